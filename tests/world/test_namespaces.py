"""Ranks of one host in PID, mount, UTS, IPC and user namespaces that differ, on one network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks.launching import clean, free_port, outputs, torchrun

_JOB = str(Path(__file__).with_name("namespaces_job.py"))
_APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--ipc"]
_USER = ["--user", "--map-root-user"]


def _possible(command: list[str]) -> bool:
    return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0


def test_ranks_of_other_namespaces_share_memory_answer_questions_and_are_missed():
    user = [*_APART, *_USER]
    apart = _APART if os.geteuid() == 0 else user
    if not _possible(apart):
        pytest.skip(f"this machine does not allow `{' '.join(apart)}`")
    # Rank 0 keeps the namespaces of this process.
    prefixes = [[], apart, user if _possible(user) else apart]
    port = free_port()
    started = [
        subprocess.Popen(
            [*prefix, sys.executable, _JOB],
            env={**clean(), **torchrun(rank, 3, port), "SMDDP_DEBUG": "INFO"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, prefix in enumerate(prefixes)
    ]
    ended = outputs(started)
    assert [status for status, _ in ended] == [0, 0, 9], "\n".join(text for _, text in ended)
    for rank in (0, 1):
        text = ended[rank][1]
        assert f"rank {rank} is well" in text and "WARN" not in text, text
    # Rank 1 has no id for the other two.
    assert "in other PID namespaces" in ended[1][1], ended[1][1]
