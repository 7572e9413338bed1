"""Scripts of the toolkit's jobs, for PyTorch and for TensorFlow: two ranks a host, one host or more."""

HERE = """
import json, os
hosts = json.loads(os.environ["SM_HOSTS"])
local = int(os.environ["LOCAL_RANK"])
here = hosts.index(os.environ["SM_CURRENT_HOST"])
model = os.path.join(os.environ["SM_MODEL_DIR"], "model.pt")
"""
JOIN = (
    HERE
    + """
import torch, torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()
"""
)
TRAINS = (
    JOIN
    + """
assert size == 2 * len(hosts) and rank == 2 * here + local
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
net(torch.ones(2, 4)).sum().backward()
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [size] * 3
if rank == 0:
    torch.save(net.state_dict(), model)
dist.destroy_process_group()
"""
)
SHARDS = (
    HERE
    + """
import torch, torch.distributed as dist, torch.sagemaker as tsm
tsm.init()
rank, size = dist.get_rank(), dist.get_world_size()
assert tsm.state.hybrid_shard_degree == 2 and dist.get_backend() == "smddp"
assert size == 2 * len(hosts) and rank == 2 * here + local
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [size] * 3
if rank == 0:
    torch.save(total, model)
dist.destroy_process_group()
"""
)
FAILS = (
    JOIN
    + """
dist.barrier()
if rank == size - 1:
    {}["the user's own"]
dist.all_reduce(torch.ones(3))
"""
)
DIFFERS = (
    JOIN
    + """
dist.barrier()
if rank == size - 1:
    dist.all_reduce(torch.ones(3))
else:
    dist.broadcast(torch.ones(3), 0)
    dist.barrier()
"""
)
#: An interface that the other host has and the last one has not.
UNREACHABLE = """
import os
if os.environ["SM_CURRENT_HOST"] == "h1":
    os.environ["SMDDP_SOCKET_IFNAME"] = "nosuch0"
"""
CANNOT_MEET = UNREACHABLE + JOIN

TF_JOIN = (
    HERE
    + """
import tensorflow as tf
import smdistributed.dataparallel.tensorflow as sdp
sdp.init()
rank, size = sdp.rank(), sdp.size()

@tf.function
def step(value):
    for _ in tf.range(3):
        value = sdp.oob_allreduce(value) + 0.0
    return value

@tf.function
def another(value):
    return sdp.oob_allreduce(tf.concat([value, value], 0))

step(tf.ones(100))
"""
)
TF_TRAINS = (
    TF_JOIN
    + """
assert size == 2 * len(hosts) and rank == 2 * here + local
weights = tf.Variable(tf.fill([4, 1], float(rank)))
sdp.broadcast_variables([weights], root_rank=0)
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(tf.linalg.matmul(tf.fill([2, 4], rank + 1.0), weights))
gradient = sdp.DistributedGradientTape(tape).gradient(loss, [weights])[0]
assert gradient.numpy().ravel().tolist() == [size + 1.0] * 4, gradient
weights.assign_sub(gradient)
if rank == 0:
    tf.io.write_file(model, tf.io.serialize_tensor(weights))
sdp.shutdown()
"""
)
TF_FAILS = (
    TF_JOIN
    + """
if rank == size - 1:
    {}["the user's own"]
step(tf.ones(100))
"""
)
TF_DIFFERS = (
    TF_JOIN
    + """
(another if rank == size - 1 else step)(tf.ones(100))
"""
)
TF_CANNOT_MEET = UNREACHABLE + TF_JOIN
