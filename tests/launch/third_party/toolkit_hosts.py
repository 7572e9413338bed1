"""A job of the unmodified toolkit on two hosts: its `train` in a container on each, as the service starts it.

Hosts are netlab's; the toolkit's SSH server listens at port 22 of each, and its mpirun gets to the other host by ssh.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toolkit

HERE = Path(__file__).parent
NETLAB = HERE.parents[2] / "bench" / "lab" / "netlab"
HOSTS = ["h0", "h1"]
CONTAINER = [*"unshare --mount --pid --fork --kill-child --mount-proc sh".split(), str(HERE / "container.sh")]
SSHD = """
HostKey /etc/ssh/key
AuthorizedKeysFile /etc/ssh/key.pub
StrictModes no
PermitRootLogin yes
UsePAM yes
PidFile none
"""
SSH = """
Host *
    IdentityFile /etc/ssh/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""
#: A login has the variables that the toolkit writes to /etc/environment, and needs nothing that a container may lack.
PAM = """
auth sufficient pam_permit.so
account required pam_permit.so
session required pam_env.so
"""


def missing() -> str | None:
    """Returns the missing requirement of this machine, or None."""
    for program in ("mpirun", "/usr/sbin/sshd", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"no {program} on this machine (Debian: openmpi-bin, openssh-server)"
    if os.geteuid() != 0:
        return "an SSH server that lets ranks in runs as root"
    if subprocess.run([NETLAB, "check"], capture_output=True).returncode != 0:
        return "no network namespaces here (bench/lab/netlab check)"
    return None


@dataclass
class Running:
    """A running job."""

    folder: Path
    jobs: list[toolkit.Job]
    lab: subprocess.Popen[bytes]

    def ended(self, timeout: float) -> list[toolkit.Ended]:
        """Returns the toolkit's result on each host."""
        try:
            self.lab.wait(timeout)
        finally:
            self.end()
        status = [job.folder / "status" for job in self.jobs]
        assert all(each.exists() for each in status), (self.folder / "log").read_text()
        return [job.left(int(each.read_text())) for job, each in zip(self.jobs, status)]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.lab.pid, signal.SIGTERM)
        self.lab.wait(30)


def start(folder: Path, script: str, parameters: dict, image: toolkit.Image, ranks: int = 2) -> Running:
    """A job of two hosts with so many ranks each."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", key], check=True)
    jobs = [
        toolkit.Job(folder / host, script, parameters, image, hosts=HOSTS, host=host, ranks=ranks, base=Path("/opt/ml"))
        for host in HOSTS
    ]
    commands = []
    for job, host in zip(jobs, HOSTS):
        _machine(job.folder, key)
        command = [str(NETLAB), "exec", host, "--", *CONTAINER, str(job.folder), str(image.bin / "train")]
        commands.append(shlex.join(command))
    # Together, as the service does; the lab ends when both have.
    shell = "".join(f"{command} & " for command in commands) + "wait"
    seen = {str(HERE.parents[2]), str(image.bin.parent), sys.prefix, sys.base_prefix}
    environment = {**jobs[0].environment, "HOME": "/opt/ml/machine/root", "SEEN": " ".join(sorted(seen))}
    with open(folder / "log", "w") as log:
        lab = subprocess.Popen(
            [NETLAB, "up", "--hosts", str(len(HOSTS)), "--", "sh", "-c", shell],
            env=environment,
            cwd="/",
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(folder, jobs, lab)


def _machine(folder: Path, key: Path) -> None:
    """Creates the files that container.sh mounts over the machine's."""
    machine = folder / "machine"
    for each in ("etc/ssh", "etc/pam.d", "root/.ssh", "tmp"):
        (machine / each).mkdir(parents=True)
    (machine / "tmp").chmod(0o1777)
    (machine / "etc/environment").touch()
    (machine / "etc/pam.d/sshd").write_text(PAM)
    (machine / "etc/ssh/sshd_config").write_text(SSHD)
    (machine / "etc/ssh/ssh_config").write_text(SSH)
    for name in ("key", "key.pub"):
        shutil.copy(key.with_name(name), machine / "etc/ssh" / name)
    # Default key of paramiko, with which the toolkit probes other hosts.
    shutil.copy(key, machine / "root/.ssh/id_rsa")


class Several:
    """Jobs side by side: the toolkit waits for half a minute after a job that ended well, and a worker for minutes
    where its master failed."""

    def __init__(self, begin: Callable[[Any], Running], wanted: Iterable[Hashable], timeout: float) -> None:
        # More at a time than cores, since most of it is waiting.
        self._pool = ThreadPoolExecutor(4 + (os.cpu_count() or 1))
        self._running: list[Running] = []
        self._timeout = timeout
        self._jobs = {each: self._pool.submit(self._run, begin, each) for each in dict.fromkeys(wanted)}

    def _run(self, begin: Callable[[Any], Running], which: Hashable) -> list[toolkit.Ended]:
        running = begin(which)
        self._running.append(running)
        return running.ended(self._timeout)

    def ended(self, which: Hashable) -> list[toolkit.Ended]:
        return self._jobs[which].result()

    def end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for running in self._running:
            running.end()
