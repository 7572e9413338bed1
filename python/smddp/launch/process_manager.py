"""Where the first rank is, asked of the process manager that mpirun has on every host.

mpirun tells a rank its number, and not where the others are; who comes from nccl-tests has never had to say it either.
Open MPI's answers through its PMIx library, MPICH's and Intel MPI's (Hydra) by lines of PMI 1 on the socket that each
rank inherits.

All ranks ask or none: Hydra answers when every rank has come, and Open MPI ends a job of which some have asked and
others have not. A rank that has asked must take leave before it ends or becomes another program. That program's own
MPI_Init fails then: it is told its address by `mpirun -x MASTER_ADDR=HOST`, and nobody is asked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial

from smddp._native import core

#: Seconds that Hydra's other ranks may take to come.
_PATIENCE = 60.0
#: PMIx: the name of a rank's host, and the type of a value that is a string (pmix_common.h).
_HOST_NAME, _STRING = b"pmix.hname", 3

#: What takes leave of the manager that this process has asked.
_leave: Callable[[], object] | None = None


def complete() -> bool:
    """Sets what is missing. False where there is nobody to ask. Raises OSError with the reason where it fails."""
    told = [bool(os.environ.get(name)) for name in ("MASTER_ADDR", "MASTER_PORT")]
    if "RANK" in os.environ or all(told):
        return False
    if "PMIX_RANK" in os.environ and "OMPI_COMM_WORLD_RANK" in os.environ:
        if not told[0]:
            os.environ["MASTER_ADDR"] = _ask_pmix()
        return not told[0]
    if "PMI_RANK" in os.environ and "PMI_FD" in os.environ:
        host, job = _ask_hydra()
        if not told[0]:
            os.environ["MASTER_ADDR"] = host
        # From the job's name the core derives a port.
        os.environ.setdefault("HYDRA_JOBID", job)
        return True
    return False


def leave() -> None:
    """Takes leave of a manager that was asked, which takes a rank that ends without it for a crashed one."""
    global _leave
    owed, _leave = _leave, None
    # A manager that is gone misses nobody.
    with contextlib.suppress(OSError):
        if owed is not None:
            owed()


def _owes(leave_taking: Callable[[], object]) -> None:
    global _leave
    _leave = leave_taking
    atexit.register(leave)
    os.register_at_fork(after_in_child=_owes_nothing)


def _owes_nothing() -> None:
    """A child is no rank: its end is no matter of the manager's."""
    global _leave
    _leave = None


class _Process(ctypes.Structure):
    """pmix_proc_t"""

    _fields_ = [("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Value(ctypes.Structure):
    """The begin of pmix_value_t: its union holds a pointer where the value is a string."""

    _fields_ = [("type", ctypes.c_uint16), ("string", ctypes.c_char_p)]


def _libraries() -> Iterator[str]:
    """Where PMIx may be: beside this Open MPI, or where the loader looks."""
    prefix = os.environ.get("OPAL_PREFIX")
    for place in ("lib", "lib/openmpi", "lib64") if prefix else ():
        yield f"{prefix}/{place}/libpmix.so.2"
    yield "libpmix.so.2"


def _ask_pmix() -> str:
    reasons = []
    for name in _libraries():
        try:
            library = core().undisturbed("PMIx", partial(ctypes.CDLL, name))
            break
        except OSError as error:
            reasons.append(str(error))
    else:
        raise OSError(reasons[-1])
    this, first = _Process(), _Process()
    begin = partial(library.PMIx_Init, ctypes.byref(this), None, ctypes.c_size_t(0))
    status = core().undisturbed("PMIx", begin)
    if status != 0:
        raise OSError(f"PMIx_Init of {library._name} returns {status}")
    _owes(lambda: library.PMIx_Finalize(None, ctypes.c_size_t(0)))
    first.namespace = this.namespace
    value = ctypes.POINTER(_Value)()
    status = library.PMIx_Get(ctypes.byref(first), _HOST_NAME, None, ctypes.c_size_t(0), ctypes.byref(value))
    if status != 0 or not value or value.contents.type != _STRING:
        raise OSError(f"PMIx_Get of rank 0's host by {library._name} returns {status}")
    # The library's memory: a few bytes, once a process.
    return bytes(value.contents.string).decode()


def _ask_hydra() -> tuple[str, str]:
    """The first rank's host, and the job's name."""
    # The descriptor itself stays as it is for an MPI library that comes later.
    asked = socket.socket(fileno=os.dup(int(os.environ["PMI_FD"])))
    asked.settimeout(_PATIENCE)
    lines = asked.makefile("rw", encoding="ascii")

    def say(words: str, key: str = "cmd") -> str:
        lines.write(f"cmd={words}\n")
        lines.flush()
        try:
            answer = dict(word.partition("=")[::2] for word in lines.readline().split())
        except TimeoutError:
            raise TimeoutError(f"Hydra has no answer to {words} after {_PATIENCE:g} s: have all ranks come?") from None
        if answer.get("rc", "0") != "0" or key not in answer:
            raise OSError(f"Hydra answers {answer or 'nothing'} to {words}")
        return answer[key]

    say("init pmi_version=1 pmi_subversion=1")
    _owes(lambda: say("finalize"))
    job = say("get_my_kvsname", "kvsname")
    if os.environ["PMI_RANK"] == "0":
        say(f"put kvsname={job} key=smddp-host value={socket.gethostname()}")
    say("barrier_in")
    return say(f"get kvsname={job} key=smddp-host", "value"), job
