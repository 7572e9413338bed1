"""The unmodified SageMaker training toolkit starts our jobs, one host: `make test-launch`.

It needs Open MPI and an SSH server on this machine.
"""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("sagemaker_training", reason="sagemaker-training is not installed: make test-launch")
import toolkit

JOIN = """
import os, torch, torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()
"""
TRAINS = (
    JOIN
    + """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
total = torch.ones(3)
dist.all_reduce(total)
assert size == 2 and total.tolist() == [2, 2, 2] and int(os.environ["LOCAL_RANK"]) == rank
if rank == 0:
    torch.save(model.state_dict(), os.path.join(os.environ["SM_MODEL_DIR"], "model.pt"))
dist.destroy_process_group()
"""
)
SHARDS = """
import os, torch, torch.sagemaker as tsm
tsm.init()
assert tsm.state.hybrid_shard_degree == 2 and torch.distributed.get_backend() == "smddp"
total = torch.ones(3)
torch.distributed.all_reduce(total)
assert total.tolist() == [2, 2, 2]
if torch.distributed.get_rank() == 0:
    torch.save(total, os.path.join(os.environ["SM_MODEL_DIR"], "model.pt"))
torch.distributed.destroy_process_group()
"""
FAILS = (
    JOIN
    + """
dist.barrier()
if rank == 1:
    {}["the user's own"]
dist.all_reduce(torch.ones(3))
"""
)
DIFFERS = (
    JOIN
    + """
dist.barrier()
if rank == 1:
    dist.all_reduce(torch.ones(3))
else:
    dist.broadcast(torch.ones(3), 0)
    dist.barrier()
"""
)


@pytest.fixture(scope="module", autouse=True)
def machine():
    for program in ("mpirun", "/usr/sbin/sshd"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine (Debian: openmpi-bin, openssh-server)")


@pytest.fixture
def host_name():
    """The toolkit's ranks have a gethostname() of its own, which reads this file and crashes where there is none."""
    file = Path("/opt/ml/input/config/resourceconfig.json")
    if file.exists():
        yield
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"current_host": "localhost", "hosts": ["localhost"]}')
    except OSError as error:
        pytest.skip(f"{file} cannot be made: {error}")
    yield
    file.unlink()


def ended_well(ended: toolkit.Ended) -> bool:
    assert ended.status == 0 and ended.success and not ended.failure, ended.log[-6000:]
    return ended.model == ["model.pt"]


@pytest.mark.parametrize("strategy", ["DATA_PARALLEL", "PYTORCH_DDP", "TORCH_DISTRIBUTED"])
def test_a_job_ends_well(tmp_path: Path, strategy: str):
    ended = toolkit.run(tmp_path / "job", TRAINS, getattr(toolkit, strategy))
    assert ended_well(ended) and ("smddprun" in ended.log or strategy == "TORCH_DISTRIBUTED")


def test_a_model_parallel_job_over_mpi_ends_well(tmp_path: Path, host_name):
    parameters = {**toolkit.MODEL_PARALLEL, "mp_parameters": {"hybrid_shard_degree": 2}}
    ended = toolkit.run(tmp_path / "job", SHARDS, parameters)
    assert ended_well(ended) and "smddpmprun -i ml.p4d.24xlarge --allow-bypass" in ended.log


@pytest.mark.parametrize("strategy", ["DATA_PARALLEL", "TORCH_DISTRIBUTED"])
def test_a_users_error_is_reported_as_the_users(tmp_path: Path, strategy: str):
    """The other rank is told that a peer is lost: it is not to blame."""
    ended = toolkit.run(tmp_path / "job", FAILS, getattr(toolkit, strategy))
    assert ended.status != 0 and not ended.success
    kind = ended.failure.split("sagemaker_training.errors.")[-1].split(":")[0]
    assert kind == "ExecuteUserScriptError", ended.failure[:3000]
    assert 'KeyError: "the user\'s own"' in ended.failure, ended.failure


def test_calls_that_differ_are_reported_by_name(tmp_path: Path):
    """Under its data parallel strategies, where the toolkit looks for errors of ours."""
    ended = toolkit.run(tmp_path / "job", DIFFERS, toolkit.DATA_PARALLEL)
    assert ended.status != 0 and not ended.success
    assert "MismatchError" in ended.failure and "broadcast" in ended.failure and "all_reduce" in ended.failure
