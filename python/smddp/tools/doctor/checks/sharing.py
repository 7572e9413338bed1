"""Checks of the prerequisites for shared memory within a node."""

from __future__ import annotations

from smddp.tools.doctor.finding import Facts, Finding, fail, of_rank, ok, warn

# Yama's ptrace scope: 1 permits parents only, 2 root only, 3 no process.
_ROOT_ONLY = 2


@of_rank("shared memory")
def shared_memory(facts: Facts) -> Finding:
    if facts["memfd"]:
        return fail(
            f"memfd_create, sealing or mapping failed: {facts['memfd']}",
            "ranks of a node cannot share memory and reach each other over the network, which is slower",
            "memory or a limit is exhausted, or a seccomp profile forbids it: try outside the container",
        )
    return ok("memfd can be made, sealed and mapped")


@of_rank("system calls")
def system_calls(facts: Facts) -> Finding:
    refused = {name: why for name, why in facts["refused calls"].items() if name != "memfd_create"}
    if refused:
        return fail(
            "; ".join(f"{name}: {why}" for name, why in refused.items()),
            "no group is made: `the system call ... failed`",
            "a seccomp profile or a sandbox forbids them: allow them, or try outside the container",
        )
    return ok("all that a group needs are permitted")


@of_rank("unix sockets")
def unix_sockets(facts: Facts) -> Finding:
    if facts["abstract socket"]:
        return fail(
            f"an abstract unix socket cannot be reached: {facts['abstract socket']}",
            "ranks of a node cannot share memory",
            "a security profile (AppArmor, SELinux, a sandbox) forbids it: allow abstract sockets of the same user",
        )
    return ok("abstract ones answer")


@of_rank("ptrace scope")
def ptrace_scope(facts: Facts) -> Finding:
    scope = facts["kernel"]["ptrace scope"]
    if scope is None:
        return ok("not restricted by Yama")
    if scope >= _ROOT_ONLY:
        return warn(
            f"kernel.yama.ptrace_scope is {scope}",
            "smddp needs no ptrace, but no py-spy or gdb shows where a rank hangs, and torch cannot share memory of "
            "expandable segments between processes",
            "sysctl kernel.yama.ptrace_scope=1",
        )
    return ok(f"{scope}: smddp needs none")
