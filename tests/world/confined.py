"""Runs a script in a confined process: `confined.py CONFINEMENT SCRIPT ARGUMENTS...`."""

import ctypes
import errno
import os
import resource
import runpy
import struct
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_NUMBERS = {
    "x86_64": {"memfd_create": 319, "eventfd2": 290, "epoll_create1": 291},
    "aarch64": {"memfd_create": 279, "eventfd2": 19, "epoll_create1": 20},
}


def deny(call: str) -> None:
    """The system call fails with EPERM, as under a seccomp profile."""
    number = _NUMBERS[os.uname().machine][call]
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program)))
    assert _LIBC.prctl(38, 1, 0, 0, 0) == 0
    assert _LIBC.prctl(ctypes.c_int(22), ctypes.c_ulong(2), ctypes.c_void_p(ctypes.addressof(head)), 0, 0) == 0


def hide_proc() -> None:
    """An empty directory over /proc, in a mount namespace of this process."""
    if _LIBC.unshare(0x20000) != 0:
        print("cannot unshare", flush=True)
        os._exit(77)
    _LIBC.mount(b"none", b"/", None, 0x4000 | 0x40000, None)
    assert _LIBC.mount(b"tmpfs", b"/proc", b"tmpfs", 0, None) == 0


def limit(which: int, most: int) -> None:
    resource.setrlimit(which, (most, most))


def limit_address_space(more: int) -> None:
    """To so many bytes beyond what is mapped now."""
    pages = int(open("/proc/self/statm").read().split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


CONFINEMENTS = {
    "no-proc": hide_proc,
    "address-space-2-gib": lambda: limit_address_space(2 << 30),
    "address-space-34-gib": lambda: limit_address_space(34 << 30),
    "address-space-1-gib": lambda: limit_address_space(1 << 30),
    "address-space-256-mib": lambda: limit_address_space(256 << 20),
    "no-files": lambda: limit(resource.RLIMIT_FSIZE, 0),
    "file-size-512-mib": lambda: limit(resource.RLIMIT_FSIZE, 512 << 20),
    "no-memfd": lambda: deny("memfd_create"),
    "no-eventfd": lambda: deny("eventfd2"),
    "no-epoll": lambda: deny("epoll_create1"),
}

if __name__ == "__main__":
    # A program has loaded these before it makes its first group.
    import numpy  # noqa: F401
    import smddp  # noqa: F401

    # CONFINED_RANK leaves the other ranks as they are.
    if os.environ.get("CONFINED_RANK", os.environ["RANK"]) == os.environ["RANK"]:
        CONFINEMENTS[sys.argv[1]]()
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
