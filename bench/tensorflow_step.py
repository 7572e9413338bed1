"""A training step's time over smddp, MultiWorkerMirroredStrategy (gRPC, ring) and Horovod, in one run, turn by turn.

    smddprun --nproc 2 python bench/tensorflow_step.py --tensors 12 --mib 24

The same model, batch and optimizer in the same processes; gradients are checked in the same run, each way against
smddp's. Horovod counts where it is installed. Times are rank 0's medians of a whole step, in milliseconds; "alone" is
the step without any communication. "overlap" is the part of the gradients that was reduced before their
last bucket began.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import smddp
import smdistributed.dataparallel.tensorflow as sdp
import tensorflow as tf

try:
    import horovod.tensorflow as hvd
except ImportError:
    hvd = None

#: Of this host, for the others where hosts are several.
ADDRESS, INTERFACE = os.environ.get("BENCH_ADDRESS", "127.0.0.1"), os.environ.get("BENCH_INTERFACE", "lo")

Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=12)
    parser.add_argument("--mib", type=float, default=24, help="of gradients, together")
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each way in a round")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()

    sdp.init(timeout=120)
    strategy = mirrored()
    width = max(1, int((given.mib * 2**20 / 4 / given.tensors) ** 0.5))
    inputs = tf.constant(np.random.default_rng(sdp.rank()).standard_normal((given.batch, width)).astype("float32"))

    def loss_of(weights: list[Any]) -> tf.Tensor:
        value = inputs
        for weight in weights:
            value = tf.tanh(value @ weight)
        return tf.reduce_mean(value**2)

    def weights() -> list[tf.Variable]:
        # The same everywhere.
        generator = np.random.default_rng(5)
        scale = 1 / width**0.5
        return [
            tf.Variable((generator.standard_normal((width, width)) * scale).astype("float32"))
            for _ in range(given.tensors)
        ]

    def descend(own: list[tf.Variable], gradients: list[Any]) -> None:
        for weight, gradient in zip(own, gradients):
            weight.assign_sub(0.1 * gradient)

    def taped(wrap: Callable[[tf.GradientTape], tf.GradientTape]) -> tuple[Step, list[Any]]:
        own = weights()

        @tf.function
        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(own)
            descend(own, wrap(tape).gradient(loss, own))
            return loss

        return step, own

    ways: dict[str, tuple[Step, list[Any]]] = {"alone": taped(lambda tape: tape)}
    ways["smddp"] = taped(sdp.DistributedGradientTape)
    if strategy is not None:
        with strategy.scope():
            shared = weights()

        def replica() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(shared)
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, shared))
            own = [strategy.experimental_local_results(weight)[0] for weight in shared]
            descend(own, gradients)
            return loss

        @tf.function
        def mirrored_step() -> tf.Tensor:
            return strategy.run(replica)

        ways["mirrored"] = (mirrored_step, shared)
    if hvd is not None:
        start_horovod()
        ways["horovod"] = taped(hvd.DistributedGradientTape)
    times: dict[str, list[float]] = {name: [] for name in ways}
    overlaps: list[float] = []
    for step, _ in ways.values():
        step()
        step()
    for _ in range(given.rounds):
        for name, (step, _) in ways.items():
            sdp.get_worker_comm().barrier()
            begun_ns = time.time_ns()
            for _ in range(given.steps):
                begun = time.perf_counter()
                float(step())
                times[name].append((time.perf_counter() - begun) * 1e3)
                if name == "smddp":
                    overlaps.append(overlap(begun_ns))
                    begun_ns = time.time_ns()
    flat = {name: np.concatenate([np.asarray(weight).ravel() for weight in own]) for name, (_, own) in ways.items()}
    wrong = {
        name: int(np.count_nonzero(np.abs(values - flat["smddp"]) > 1e-4))
        for name, values in flat.items()
        if name != "alone"
    }
    if sdp.rank() == 0:
        ms = {name: float(np.median(values)) for name, values in times.items()}
        report = {"ranks": sdp.size(), "tensors": given.tensors, "mib": given.mib, "ms": ms, "wrong": wrong}
        report["ratio"] = {name: ms["smddp"] / value for name, value in ms.items() if name not in ("alone", "smddp")}
        report["overlap"] = float(np.median(overlaps))
        print(json.dumps(report), flush=True)
        if given.json:
            with open(given.json, "a") as file:
                file.write(json.dumps(report) + "\n")
    sdp.shutdown()
    # gRPC's servers of the strategy are not made to be closed.
    os._exit(0)


def overlap(since: int) -> float:
    """Of a step's all_reduces the part of their bytes that was through before the last of them began, which is beside
    the backward pass. since: when the step began, nanoseconds since 1970.
    """
    (world,) = smddp.dump()["groups"]
    calls = [each for each in world["operations"] if "all_reduce" in each["what"] and each["submitted_ns"] >= since]
    last = max(each["submitted_ns"] for each in calls)
    through = sum(each["bytes"] for each in calls if each["ended_ns"] is not None and each["ended_ns"] <= last)
    return through / sum(each["bytes"] for each in calls)


def start_horovod() -> None:
    """Over gloo, without its own launcher: rank 0 has the server at which ranks meet."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    rank, size, local, hosts = sdp.rank(), sdp.size(), sdp.local_size(), sdp.size() // sdp.local_size()
    port = None
    if rank == 0:
        server = RendezvousServer(verbose=0)
        port = server.start()
        slots = [SlotInfo(f"host{at // local}", at, at % local, at // local, size, local, hosts) for at in range(size)]
        server.init(slots)
    address, port = sdp.get_worker_comm().bcast((ADDRESS, port))
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank % local, "LOCAL_SIZE": local, "CROSS_SIZE": hosts}
    place |= {"CROSS_RANK": rank // local, "HOSTNAME": f"host{rank // local}"}
    place |= {"GLOO_RENDEZVOUS_ADDR": address, "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": INTERFACE}
    place |= {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in place.items()})
    hvd.init()
    assert hvd.size() == size, f"Horovod has {hvd.size()} ranks of {size}"


def mirrored() -> Any:
    """The strategy over all ranks; its addresses go by smddp."""
    import socket

    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    workers = sdp.get_worker_comm().allgather(f"{ADDRESS}:{port}")
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": sdp.rank()}}
    )
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


if __name__ == "__main__":
    main()
