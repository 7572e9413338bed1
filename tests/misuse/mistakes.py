"""Common mistakes, and the words that the error messages must contain.

Run as a program it makes each of them in a forked child, because torch is imported once, and prints the results as
JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import smddp
import torch
import torch.distributed as dist
from smddp.launch import programs
from smddp.tools import cli

ONES = np.ones(4)
HERE = str(Path(__file__))
#: One rank of two that torchrun started; rank 0's port is put in.
RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT"}
#: A usage error's exit status.
USAGE = 2
#: That of a child whose mistake raised, and what stands before the exception's class.
RAISED, MARK = 77, "raised "


@dataclass(frozen=True)
class Case:
    does: Callable[[], object]
    #: The class of the exception, or the program's exit status.
    ends: str | int
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def arrays(call: Callable[[smddp.Communicator], object]) -> Callable[[], object]:
    return lambda: call(smddp.init())


def torch_group(**changed: object) -> None:
    given = {"backend": "smddp", "init_method": f"file://{tempfile.mktemp()}", "rank": 0, "world_size": 1}
    dist.init_process_group(**{**given, **changed})  # type: ignore[arg-type]


def program(name: str, *arguments: str) -> Callable[[], object]:
    def run() -> object:
        sys.argv = [name, *arguments]
        return getattr(programs, name)()

    return run


def in_a_child(call: Callable[[], object]) -> None:
    """Prints the child's exception in this process."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    raise RuntimeError("reported above")


def after_close(comm: smddp.Communicator) -> None:
    comm.close()
    comm.all_reduce(ONES)


def read_only() -> np.ndarray:
    array = np.ones(4)
    array.flags.writeable = False
    return array


def forked_torch() -> None:
    torch_group()
    in_a_child(lambda: dist.all_reduce(torch.ones(1)))


def cuda_alone() -> None:
    torch_group(backend="cuda:smddp")
    dist.all_reduce(torch.ones(1))


def sharding(config: object) -> Callable[[], object]:
    def run() -> None:
        torch_group()
        import torch.sagemaker as tsm

        tsm.init(config)

    return run


def pipeline(config: dict[str, object]) -> Callable[[], object]:
    def run() -> None:
        torch_group()
        import smdistributed.modelparallel.torch as smp

        smp.init(config)

    return run


def _arrays() -> dict[str, Case]:
    def case(call: Callable[[smddp.Communicator], object], ends: str, *words: str) -> Case:
        return Case(arrays(call), ends, words)

    return {
        "a strided array": case(
            lambda c: c.all_reduce(np.ones((4, 4))[:, ::2]), "ValueError", "not contiguous", "copy"
        ),
        "a read-only array": case(lambda c: c.all_reduce(read_only()), "ValueError", "read-only", "out="),
        "a read-only output": case(lambda c: c.all_gather(ONES, out=read_only()), "ValueError", "out is read-only"),
        "objects": case(lambda c: c.all_reduce(np.array([None, 1])), "TypeError", "type object"),
        "an output of another dtype": case(
            lambda c: c.all_gather(ONES, out=np.ones(4, "float32")), "TypeError", "float64", "out has float32"
        ),
        "an output of another size": case(
            lambda c: c.all_gather(ONES, out=np.ones(5)), "ValueError", "4 elements", "5"
        ),
        "a root outside of the group": case(lambda c: c.broadcast(ONES, 3), "ValueError", "root 3", "group of 1"),
        "a factor that is missing": case(
            lambda c: c.all_reduce(ONES, "premul_sum"), "ValueError", "premul_sum needs a factor", "0.5"
        ),
        "a misspelt reduction": case(lambda c: c.all_reduce(ONES, "summ"), "ValueError", "'summ'", "sum, avg"),
        "too many counts": case(lambda c: c.all_gather(ONES, counts=[1, 2]), "ValueError", "2 blocks for 1 ranks"),
        "counts that do not fit": case(
            lambda c: c.all_gather(ONES, counts=[3]), "ValueError", "4 elements", "requires 3"
        ),
        "a call after close": case(after_close, "ClosedError", "closed", "destroyed"),
        "a call after a fork": case(
            lambda c: in_a_child(lambda: c.all_reduce(ONES)),
            "RuntimeError",
            "before this process was forked",
            "DataLoader",
        ),
        "a pickled communicator": case(lambda c: __import__("pickle").dumps(c), "TypeError", "cannot be pickled"),
        "a list": case(lambda c: c.all_reduce([1.0, 2.0]), "TypeError", "is a list", "numpy array"),
        "a text": case(lambda c: c.all_reduce("abc"), "TypeError", "is a str"),
        "a negative timeout": case(lambda c: c.all_reduce(ONES, timeout=-1), "ValueError", "positive", "-1"),
        "bits of floats": case(lambda c: c.all_reduce(ONES, "band"), "ValueError", "band of float64"),
        "the largest complex number": case(
            lambda c: c.all_reduce(np.ones(2, complex), "max"), "ValueError", "max of complex128"
        ),
        "a misspelt collective": case(lambda c: c.path("all_redcue", 8), "ValueError", "'all_redcue'", "all_reduce"),
        "a message to a missing rank": case(lambda c: c.send(ONES, 9), "ValueError", "rank 9", "group of 1"),
        "a negative tag": case(lambda c: c.send(ONES, 0, -4), "ValueError", "tag -4"),
        "the other byte order": case(lambda c: c.all_reduce(ONES.astype(">f8")), "ValueError", "big-endian"),
        "a tensor with a gradient": case(
            lambda c: c.all_reduce(torch.ones(2, requires_grad=True)), "ValueError", "require gradient"
        ),
        "a sparse tensor": case(
            lambda c: c.all_reduce(torch.eye(2).to_sparse()), "ValueError", "all_reduce", "strided"
        ),
    }


def _meeting() -> dict[str, Case]:
    def init(*given: object, **named: object) -> Callable[[], object]:
        return lambda: smddp.init(*given, **{"timeout": 2, **named}) and None

    def launched(ends: str, *words: str, **environment: str) -> Case:
        return Case(init(), ends, words, environment)

    return {
        "a rank without a size": Case(init(1), "ValueError", ("go together", "size None")),
        "a rank beyond the size": Case(init(3, 2, "127.0.0.1:1"), "ValueError", ("rank 3", "group of 2")),
        "an address without a port": Case(init(0, 2, "host"), "ValueError", ("host:port", "'host'")),
        "an address and a store": Case(init(0, 2, "h:1", store=1), "ValueError", ("not both",)),
        "two ports": Case(init(0, 2, "h:1", port=3), "ValueError", ("'h:1' has a port", "3")),
        "a store that is none": Case(init(0, 2, store=3), "TypeError", ("set, get, check", "int")),
        "no time at all": Case(init(timeout=0), "ValueError", ("positive", "0")),
        "a timeout of NaN": Case(init(timeout=float("nan")), "ValueError", ("timeout", "positive", "nan")),
        "a negative timeout": Case(init(timeout=timedelta(seconds=-1)), "ValueError", ("timeout", "positive", "-1")),
        "a timeout in quotes": Case(init(timeout="30"), "TypeError", ("timeout", "timedelta", "str", "'30'")),
        "a rank in quotes": Case(init("0", 2, "127.0.0.1:1"), "TypeError", ("rank", "integer", "str", "'0'")),
        "more ranks than any machine has": Case(
            init(0, 10**9, "127.0.0.1:1"), "ValueError", ("1000000000 ranks", "at most 131072")
        ),
        "an IPv6 address with two ports": Case(
            init(0, 2, "[::1]:1", port=3), "ValueError", ("'[::1]:1' has a port", "3")
        ),
        "an IPv6 address that is not closed": Case(
            init(0, 2, "[::1:29500"), "ValueError", ("[::1]:29500", "'[::1:29500'")
        ),
        "WORLD_SIZE of a billion": launched(
            "ConfigError", "WORLD_SIZE is 1000000000", "at most 131072", **{**RANK_0, "WORLD_SIZE": "1000000000"}
        ),
        "a host that does not exist": Case(
            init(1, 2, "no.such.host.invalid:29500"), "TopologyError", ("rank 0", "no.such.host.invalid")
        ),
        "a port that is taken": launched("TopologyError", "MASTER_PORT", "in use", **RANK_0),
        "RANK beyond WORLD_SIZE": launched("ConfigError", "RANK is 3", "2 ranks", **{**RANK_0, "RANK": "3"}),
        "an invalid number in RANK": launched("ConfigError", "RANK is 'x'", **{**RANK_0, "RANK": "x"}),
        "RANK alone": launched("ConfigError", "WORLD_SIZE is not set", "torchrun", RANK="1"),
        "no MASTER_ADDR": launched("ConfigError", "MASTER_ADDR is not set", RANK="0", WORLD_SIZE="2"),
        "a port beyond all": launched("ConfigError", "MASTER_PORT is 70000", **{**RANK_0, "MASTER_PORT": "70000"}),
        "no ranks": launched("ConfigError", "0 ranks", **{**RANK_0, "WORLD_SIZE": "0"}),
        "Slurm without an address": launched("ConfigError", "MASTER_ADDR", SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2"),
    }


def _torch() -> dict[str, Case]:
    second = timedelta(seconds=1)
    return {
        "no launcher": Case(partial(dist.init_process_group, "smddp"), "ValueError", ("RANK expected",)),
        "a rank beyond the group": Case(partial(torch_group, rank=3, world_size=2), "ValueError", ("rank 3",)),
        "NCCL without a GPU": Case(
            partial(torch_group, backend="cpu:smddp,cuda:nccl"), "RuntimeError", ("'nccl'", "leave 'cuda:nccl' out")
        ),
        "CPU tensors of a group for CUDA": Case(cuda_alone, "RuntimeError", ("CPU tensors", "cpu:smddp")),
        "a rank that does not come": Case(
            partial(torch_group, world_size=2, timeout=second), "CollectiveTimeoutError", ("rank 1", "1 of 2", "doctor")
        ),
        "a setting that no address record holds": Case(
            partial(torch_group, world_size=2, timeout=second),
            "ConfigError",
            ("SMDDP_NODE has 40000 bytes on rank 0", "at most"),
            {"SMDDP_NODE": "n" * 40000},
        ),
        "a secret that is a device": Case(
            partial(torch_group, world_size=2, timeout=second),
            "ConfigError",
            ("SMDDP_JOB_TOKEN_FILE", "not a regular file"),
            {"SMDDP_JOB_TOKEN_FILE": "/dev/zero"},
        ),
        "a group made before a fork": Case(forked_torch, "RuntimeError", ("forked later", "spawn")),
    }


def _settings() -> dict[str, Case]:
    values = {
        "SMDDP_STAGING_BYTES": ("lots", "65536"),
        "SMDDP_ALGO": ("rign", "hier-ring"),
        "SMDDP_TUNE": ("/dev/zero", "neither a table nor a file"),
        "SMDDP_SEGMENT_BYTES": ("8G", "SMDDP_STAGING_BYTES"),
        "SMDDP_NETWORK": ("gbit=fast", "latency_us"),
        "SMDDP_STREAM_BYTES": ("-1", "a size"),
        "SMDDP_THREADS": ("0", "1 to 64"),
        "SMDDP_SPIN_US": ("1.5", "whole microseconds"),
        "SMDDP_LEAVE_SECONDS": ("1e18", "seconds, from 0 to 1000000000"),
        "SMDDP_PEER_TIMEOUT": ("0", "1 or more"),
        "SMDDP_TRANSPORT": ("udp", "auto, efa, tcp, fabric, shm"),
        "SMDDP_SOCKET_FAMILY": ("AF_INET7", "AF_INET6"),
        "SMDDP_ENCRYPT": ("true", "one of 0, 1"),
        "SMDDP_AUDIT": ("wires", "did you mean wire?"),
        "SMDDP_CUDA_PATH": ("peer", "auto, ipc, host"),
        "SMDDP_CUDA_SMS": ("0", "1 to 64"),
        "SMDDP_DEBUG": ("DEBUG", "did you mean TRACE?"),
        "SMDDP_RECORDER": ("many", "a number"),
        "SMDDP_METRICS_PORT": ("http", "a port"),
        "SMDDP_STRAGGLERS": ("2", "one of 0, 1"),
    }
    found = {
        f"{name}={value}": Case(torch_group, "ConfigError", (f'{name}="{value}"', legal, "smddp info"), {name: value})
        for name, (value, legal) in values.items()
    }
    contradictions = [
        ({"SMDDP_PROBE": "0"}, {"SMDDP_NETWORK": "measure"}),
        ({"SMDDP_FABRIC_PROVIDER": "tcp"}, {"SMDDP_TRANSPORT": "efa"}),
        ({"SMDDP_REQUIRE": "efa"}, {"SMDDP_TRANSPORT": "tcp"}),
        ({"SMDDP_SHM": "0"}, {"SMDDP_NODE": "a"}),
    ]
    for old, new in contradictions:
        (name, value), (replacement, current) = *old.items(), *new.items()
        words = (f'{name}="{value}" contradicts {replacement}="{current}"', "deprecated")
        found[f"deprecated {name} beside {replacement}"] = Case(torch_group, "ConfigError", words, {**old, **new})
    wrong = {"SMDDP_ALGO": "rign"}
    words = ('SMDDP_ALGO="rign"', "hier-ring")
    found["info of a setting that is not valid"] = Case(partial(cli.main, ["info"]), 1, ("Problems", *words), wrong)
    found["info of a misspelt setting"] = Case(
        partial(cli.main, ["info"]),
        0,
        ("SMDDP_STAGING_BYTE:", "did you mean SMDDP_STAGING_BYTES"),
        {"SMDDP_STAGING_BYTE": "1M"},
    )
    found["a benchmark with a setting that is not valid"] = Case(
        partial(cli.bench, ["all_reduce", "--nproc", "2"]), USAGE, words, wrong
    )
    return found


def _programs() -> dict[str, Case]:
    def smddp_(*arguments: str) -> Callable[[], object]:
        return partial(cli.main, list(arguments))

    def bench(*arguments: str) -> Callable[[], object]:
        return partial(cli.bench, list(arguments))

    usage = {
        "smddp infoo": (smddp_("infoo"), "'infoo'", "doctor"),
        "an option that the doctor lacks": (smddp_("doctor", "--fast"), "--fast", "smddp doctor --help"),
        "no ranks to show": (smddp_("info", "-n", "0"), "at least 1", "0"),
        "an invalid pid": (smddp_("status", "abc"), "'abc'"),
        "launch without a script": (smddp_("launch"), "SCRIPT"),
        "launch of no file": (smddp_("launch", "no.py"), "entry_point", "file 'no.py' does not exist"),
        "nodes without an engine": (smddp_("launch", HERE, "--nodes", "2"), "--engine", "--hosts"),
        "a host's ranks in letters": (smddp_("launch", HERE, "--hosts", "a:x"), "'a:x'", "NAME:RANKS"),
        "a distribution with invalid JSON": (
            smddp_("launch", HERE, "--distribution", "{bad"),
            "invalid JSON",
            "'{bad'",
        ),
        "a misspelt engine": (smddp_("launch", HERE, "--engine", "slrum"), "'slrum'", "slurm"),
        "a misspelt benchmark": (bench("all_redcue"), "'all_redcue'", "all_reduce"),
        "a size in words": (bench("all_reduce", "-b", "x"), "invalid size 'x'", "64K"),
        "a benchmark of no ranks": (bench("all_reduce", "--nproc", "0"), "0 is not in 1..=4096"),
        "a backend twice": (bench("all_reduce", "--torch", "smddp,smddp"), "each once"),
        "a backend that torch lacks": (bench("all_reduce", "--torch", "smddpx", "--nproc", "1"), "'smddpx'", "gloo"),
        "a plot to nowhere": (bench("all_reduce", "--nproc", "2", "--plot"), "file name"),
        "a misspelt datatype": (bench("all_reduce", "--nproc", "2", "-d", "flaot"), "'flaot'", "float"),
        "a misspelt op": (bench("all_reduce", "--nproc", "2", "-o", "avgg"), "'avgg'", "avg"),
        "sizes that end before they begin": (bench("all_reduce", "-b", "8", "-e", "4"), "8 is above", "4"),
        "a misspelt option": (bench("all_reduce", "--nprocs", "2"), "--nprocs", "--nproc"),
        "a cluster that is not known": (bench("simulate", "all_gather", "--cluster", "p9"), "p9", "p4d, p5"),
        "smddprun without a command": (program("smddprun"), "a command is missing", "--nproc"),
        "smddprun with another's option": (program("smddprun", "--gpus", "2", "true"), "--gpus", "usage"),
        "smddprun that knows no number of ranks": (program("smddprun", "true"), "--nproc N"),
        "smddprun of less than no ranks": (program("smddprun", "--nproc", "-3", "true"), "'-3'"),
        "smddprun of a billion ranks": (program("smddprun", "--nproc", "1000000000", "true"), "from 1 to 4096"),
        "a simulation of four billion nodes": (
            bench("simulate", "all_gather", "--nodes", "4000000000"),
            "--nodes 4000000000",
            "1048576 ranks",
        ),
        "an explanation of a billion nodes": (
            bench("explain", "all_gather", "--nodes", "1000000000"),
            "--nodes 1000000000",
            "1048576 ranks",
        ),
    }
    found = {name: Case(does, USAGE, tuple(words)) for name, (does, *words) in usage.items()}
    found["smddprun of no program"] = Case(
        program("smddprun", "--nproc", "2", "no-such-prog"), 127, ("'no-such-prog'", "No such file")
    )
    found["a rank in letters"] = Case(program("smddprun", "true"), USAGE, ("RANK", "'x'"), {**RANK_0, "RANK": "x"})
    found["a rank beyond all"] = Case(
        program("smddprun", "true"), USAGE, ("RANK is 2", "2 ranks"), {**RANK_0, "RANK": "2"}
    )
    found["a process that is not there"] = Case(smddp_("status", "999999999"), 1, ("no such process",))
    found["a trace of no dump"] = Case(smddp_("trace", HERE), 1, ("is not a dump",))
    found["a replay of no file"] = Case(bench("replay", "/no/f.json"), 2, ("/no/f.json", "No such file"))
    return found


def _layers() -> dict[str, Case]:
    return {
        "a misspelt key of SMP": Case(
            sharding({"tensor_paralel_degree": 2}), "ValueError", ("did you mean 'tensor_parallel_degree'",)
        ),
        "a degree as a text": Case(sharding({"tensor_parallel_degree": "2"}), "TypeError", ("int", "'2'")),
        "a degree that does not divide": Case(sharding({"tensor_parallel_degree": 2}), "ValueError", ("2", "1 ranks")),
        "a degree below all": Case(sharding({"tensor_parallel_degree": 0}), "ValueError", ("at least 1", "0")),
        "a file that is not there": Case(
            sharding("/no/such.json"), "FileNotFoundError", ("'/no/such.json'", "given to init()", "is not there")
        ),
        "a number for keys": Case(sharding(3), "TypeError", ("dictionary", "int")),
        "SMP without a launcher": Case(
            lambda: __import__("torch.sagemaker").sagemaker.init({}), "RuntimeError", ("torchrun", "init_process_group")
        ),
        "a misspelt key of SMP v1": Case(pipeline({"microbatchs": 2}), "ValueError", ("did you mean 'microbatches'",)),
        "a pipeline of another library": Case(
            pipeline({"pipeline": "gpipe"}), "ValueError", ("interleaved", "'gpipe'")
        ),
        "more stages than ranks": Case(pipeline({"partitions": 2}), "ValueError", ("1 ranks", "multiple of 2")),
        "a placement with a letter twice": Case(pipeline({"placement_strategy": "DDT"}), "ValueError", ("'DDT'",)),
    }


CASES = {**_arrays(), **_meeting(), **_torch(), **_settings(), **_programs(), **_layers()}
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "SM_", "SMDDP_")


#: Children at once: some wait for a deadline.
AT_ONCE = 6


def begun(case: Case, taken: int) -> tuple[int, BinaryIO]:
    """A child of this process that makes the mistake, and where it says so. taken: a port that is in use."""
    out = tempfile.TemporaryFile()
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
        os.environ.update({name: value.replace("PORT", str(taken)) for name, value in case.environment.items()})
        try:
            ends = case.does()
        except SystemExit as leaving:
            ends = leaving.code
        except BaseException as error:
            print(f"{error}\n{MARK}{type(error).__name__}")
            ends = RAISED
        sys.stdout.flush()
        os._exit(ends if isinstance(ends, int) else 0)
    return child, out


def come_of(status: int, out: BinaryIO) -> tuple[object, str]:
    """Returns exit status and output of an ended child."""
    with out:
        out.seek(0)
        said = out.read().decode()
    if status == RAISED:
        return next(line.removeprefix(MARK) for line in said.splitlines() if line.startswith(MARK)), said
    return status, said


def outcomes(taken: int) -> dict[str, tuple[object, str]]:
    """Returns the result of every mistake."""
    found: dict[str, tuple[object, str]] = {}
    left, under_way = list(CASES), {}
    while left or under_way:
        while left and len(under_way) < AT_ONCE:
            name = left.pop(0)
            child, out = begun(CASES[name], taken)
            under_way[child] = name, out
        child, status = os.wait()
        name, out = under_way.pop(child)
        found[name] = come_of(os.waitstatus_to_exitcode(status), out)
    return found


if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    # Once, and not by each child; none of them starts a thread.
    for module in ("smddp.estimator.shell", "torch.sagemaker", "smdistributed.modelparallel.torch"):
        importlib.import_module(module)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        json.dump(outcomes(listener.getsockname()[1]), sys.stdout)
