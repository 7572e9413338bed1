"""Facts about this machine and process from the kernel: limits, processors, memory, names.

`smddp info` prints a part of them, and `smddp doctor` checks them. No function fails on a misconfigured machine: an
unreadable value is None or the system's error message.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_PAGE = 4096
_CGROUPS = "/sys/fs/cgroup"
# A cgroup v1 hierarchy without a limit reports a number close to 2^63.
_NO_LIMIT = 1 << 60
T = TypeVar("T")


def read(path: str | Path) -> str:
    """Returns the text of a file, or "" if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def within(seconds: float, function: Callable[[], T]) -> T:
    """Returns the result of `function`, or raises TimeoutError after the given seconds.

    A resolver or a driver may never answer. The call then continues in a daemon thread.
    """
    done: list[T] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            done.append(function())
        except Exception as error:  # raised again in the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return done[0]


def limits() -> dict[str, int | None]:
    """Returns the soft limits of this process, None for no limit: open files (number), the others in bytes."""

    def soft(which: int) -> int | None:
        value, _ = resource.getrlimit(which)
        return None if value == resource.RLIM_INFINITY else value

    return {
        "open files": soft(resource.RLIMIT_NOFILE),
        "locked memory": soft(resource.RLIMIT_MEMLOCK),
        "address space": soft(resource.RLIMIT_AS),
        "file size": soft(resource.RLIMIT_FSIZE),
    }


def processors() -> dict[str, Any]:
    """Returns the number of processors, those usable by this process, and the cgroup quota (None without one)."""
    quotas = [quota for quota in map(_cpu_quota, _cgroups("cpu")) if quota is not None]
    return {
        "all": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)),
        "quota": min(quotas, default=None),
        "numa nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
    }


def memory() -> dict[str, int | None]:
    """Returns bytes of the machine, the lowest limit of this process's cgroups, and size and free space of /dev/shm."""
    cgroup_limits = [_memory_limit(folder) for folder in _cgroups("memory")]
    total = next((line.split()[1] for line in read("/proc/meminfo").splitlines() if line.startswith("MemTotal:")), None)
    shm: int | None = None
    free: int | None = None
    try:
        found = os.statvfs("/dev/shm")
        shm, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    except OSError:
        pass
    return {
        "machine": int(total) * 1024 if total else None,
        "cgroup": min((limit for limit in cgroup_limits if limit is not None), default=None),
        "/dev/shm": shm,
        "/dev/shm free": free,
    }


def _cgroups(controller: str) -> list[Path]:
    """Returns the folders of this process's cgroup and its ancestors, v2 or v1."""
    found: list[Path] = []
    for line in read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names == "" or controller in names.split(","):
            root = Path(_CGROUPS, names) if names else Path(_CGROUPS)
            own = root / path.lstrip("/")
            # In a container's namespace the path may be outside of the mount. The root is then the own cgroup.
            found += [folder for folder in (own, *own.parents) if folder == root or root in folder.parents]
    return found


def _cpu_quota(folder: Path) -> float | None:
    text = read(folder / "cpu.max") or f"{read(folder / 'cpu.cfs_quota_us')} {read(folder / 'cpu.cfs_period_us')}"
    quota, period = (*text.split(), "", "")[:2]
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _memory_limit(folder: Path) -> int | None:
    text = (read(folder / "memory.max") or read(folder / "memory.limit_in_bytes")).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def memfd() -> str | None:
    """Returns the error of creating, sealing and mapping a memfd, or None."""
    try:
        fd = os.memfd_create("smddp-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _PAGE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mmap.mmap(fd, _PAGE).close()
        finally:
            os.close(fd)
    except OSError as error:
        return str(error)
    return None


def refused_calls() -> dict[str, str]:
    """Returns the core's system calls that fail (a seccomp filter, a sandbox), with the errors."""
    calls: dict[str, Callable[[], Any]] = {
        "memfd_create": lambda: os.close(os.memfd_create("smddp-doctor", os.MFD_CLOEXEC)),
        "epoll_create1": lambda: select.epoll().close(),
    }
    if hasattr(os, "eventfd"):  # Python 3.10
        calls["eventfd2"] = lambda: os.close(os.eventfd(0))
    refused = {}
    for name, call in calls.items():
        try:
            call()
        except OSError as error:
            refused[name] = str(error)
    return refused


def abstract_socket() -> str | None:
    """Returns the error of a connection to an abstract unix socket of this process, or None."""
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
            # The kernel chooses the name.
            listener.bind("")
            listener.listen(1)
            client.settimeout(2)
            client.connect(listener.getsockname())
    except OSError as error:
        return str(error)
    return None


def identity() -> dict[str, Any]:
    """Returns host name, boot, user and network namespace. Ranks share memory if the last three are equal."""
    try:
        namespace: str | None = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = None
    return {
        "host": socket.gethostname(),
        "boot": read("/proc/sys/kernel/random/boot_id").strip(),
        "user": os.getuid(),
        "network namespace": namespace,
    }


def kernel() -> dict[str, Any]:
    """Returns Yama's ptrace scope (None without Yama), the mode of transparent huge pages, and the number reserved."""
    scope, pages = read("/proc/sys/kernel/yama/ptrace_scope").strip(), read("/proc/sys/vm/nr_hugepages").strip()
    modes = read("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "ptrace scope": int(scope) if scope.isdigit() else None,
        "transparent huge pages": modes.partition("[")[2].partition("]")[0] or None,
        "huge pages": int(pages) if pages.isdigit() else None,
    }


def addresses(name: str, seconds: float = 2.0) -> dict[str, Any]:
    """Returns the addresses of a host name, or the error message."""
    try:
        found = within(seconds, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:  # TimeoutError is one
        return {"name": name, "addresses": [], "error": str(error)}
    return {"name": name, "addresses": sorted({str(entry[4][0]) for entry in found}), "error": None}
