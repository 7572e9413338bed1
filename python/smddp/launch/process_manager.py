"""Lookup of rank 0's host through mpirun's process manager.

mpirun passes each rank its number but not rank 0's address. Open MPI answers through its PMIx library. MPICH and Intel
MPI (Hydra) answer in the PMI 1 protocol on a socket that each rank inherits.

The query is collective: Hydra answers once all ranks have asked, and Open MPI aborts a job in which only some ask.
A rank that has asked must finalize before it exits or executes another program. MPI_Init of that program then fails;
start it with `mpirun -x MASTER_ADDR=HOST`, which skips the query.
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

#: Seconds to wait for the other ranks' queries to Hydra.
_PATIENCE = 60.0
#: PMIx: key of a rank's host name, and type code of a string value (pmix_common.h).
_HOST_NAME, _STRING = b"pmix.hname", 3

#: Ends this process's session with the process manager.
_finalize: Callable[[], object] | None = None


def complete() -> bool:
    """Sets missing variables. Returns False without a process manager. Raises OSError if the query fails."""
    known = [bool(os.environ.get(name)) for name in ("MASTER_ADDR", "MASTER_PORT")]
    if "RANK" in os.environ or all(known):
        return False
    if "PMIX_RANK" in os.environ and "OMPI_COMM_WORLD_RANK" in os.environ:
        if not known[0]:
            os.environ["MASTER_ADDR"] = _ask_pmix()
        return not known[0]
    if "PMI_RANK" in os.environ and "PMI_FD" in os.environ:
        host, job = _ask_hydra()
        if not known[0]:
            os.environ["MASTER_ADDR"] = host
        # The core derives a port from the job's name.
        os.environ.setdefault("HYDRA_JOBID", job)
        return True
    return False


def leave() -> None:
    """Ends the session with the process manager, which would otherwise report this rank's exit as a crash."""
    global _finalize
    finalize, _finalize = _finalize, None
    # The manager may have exited.
    with contextlib.suppress(OSError):
        if finalize is not None:
            finalize()


def _register_finalize(finalize: Callable[[], object]) -> None:
    global _finalize
    _finalize = finalize
    atexit.register(leave)
    os.register_at_fork(after_in_child=_discard_finalize)


def _discard_finalize() -> None:
    """Keeps the parent's session open when a forked child, which is not a rank, exits."""
    global _finalize
    _finalize = None


class _Process(ctypes.Structure):
    """pmix_proc_t"""

    _fields_ = [("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Value(ctypes.Structure):
    """First fields of pmix_value_t; its union holds a pointer if the value is a string."""

    _fields_ = [("type", ctypes.c_uint16), ("string", ctypes.c_char_p)]


def _libraries() -> Iterator[str]:
    """Candidate paths of the PMIx library: this Open MPI's directories, then the loader's search path."""
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
    _register_finalize(lambda: library.PMIx_Finalize(None, ctypes.c_size_t(0)))
    first.namespace = this.namespace
    value = ctypes.POINTER(_Value)()
    status = library.PMIx_Get(ctypes.byref(first), _HOST_NAME, None, ctypes.c_size_t(0), ctypes.byref(value))
    if status != 0 or not value or value.contents.type != _STRING:
        raise OSError(f"PMIx_Get of rank 0's host by {library._name} returns {status}")
    # The library allocated these few bytes once per process; they are not freed.
    return bytes(value.contents.string).decode()


def _ask_hydra() -> tuple[str, str]:
    """Returns rank 0's host and the job's name."""
    # Use a duplicate: an MPI library may use the original descriptor later.
    asked = socket.socket(fileno=os.dup(int(os.environ["PMI_FD"])))
    asked.settimeout(_PATIENCE)
    lines = asked.makefile("rw", encoding="ascii")

    def say(words: str, key: str = "cmd") -> str:
        lines.write(f"cmd={words}\n")
        lines.flush()
        try:
            answer = dict(word.partition("=")[::2] for word in lines.readline().split())
        except TimeoutError:
            raise TimeoutError(
                f"Hydra did not answer {words!r} within {_PATIENCE:g} s: check that all ranks have started"
            ) from None
        if answer.get("rc", "0") != "0" or key not in answer:
            raise OSError(f"Hydra answered {answer or 'nothing'} to {words!r}")
        return answer[key]

    say("init pmi_version=1 pmi_subversion=1")
    _register_finalize(lambda: say("finalize"))
    job = say("get_my_kvsname", "kvsname")
    if os.environ["PMI_RANK"] == "0":
        say(f"put kvsname={job} key=smddp-host value={socket.gethostname()}")
    say("barrier_in")
    return say(f"get kvsname={job} key=smddp-host", "value"), job
