"""One task of a Slurm job: fills in task-specific values, runs its command and records its exit status."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from smddp.estimator.variables import of_hosts

#: Placeholders in a command that each task replaces.
NODE = "$SLURM_NODEID"
FIRST_HOST = "$FIRST_HOST"
PORT = "$PORT"
#: Seconds for other tasks to record their failures before this task's failure makes Slurm end them.
_GRACE = 3.0


def run(command: Sequence[str], env: Mapping[str, str], folder: str, instance_type: str) -> None:
    """Entry point of each task. Raises RuntimeError if the command fails, which ends the job."""
    task, node = os.environ["SLURM_PROCID"], int(os.environ.get("SLURM_NODEID", "0"))
    hosts = _hosts()
    # Below the ephemeral port range; jobs that share hosts get different ports.
    port = 20000 + int(os.environ["SLURM_JOB_ID"]) % 10000
    own = {NODE: str(node), FIRST_HOST: hosts[0], PORT: str(port)}
    whole = {
        **os.environ,
        **env,
        **of_hosts(hosts, instance_type, env.get("SM_NETWORK_INTERFACE_NAME")),
        "SM_CURRENT_HOST": hosts[node],
    }
    tasks = Path(folder, "tasks")
    tasks.mkdir(exist_ok=True)
    try:
        status = subprocess.run(
            placed(command, own), env=whole, cwd=Path(folder, "code"), stdin=subprocess.DEVNULL
        ).returncode
    except OSError as error:
        print(f"{command[0]}: {error}", flush=True)
        status = 127
    if status != 0:
        time.sleep(_GRACE)
    part = tasks / f".{task}"
    part.write_text(str(status))
    part.rename(tasks / task)
    if status != 0:
        raise RuntimeError(f"{command[0]} ended with {status}")


def placed(command: Sequence[str], own: Mapping[str, str]) -> list[str]:
    """Replaces placeholders in torchrun's options; the words of the rank's command are not changed."""
    at = command.index("--no-python") if "torch.distributed.run" in command[:3] else 0
    return [*(own.get(word, word) for word in command[:at]), *command[at:]]


def statuses(folder: Path) -> dict[str, int]:
    """Returns the exit statuses of the ended tasks, by task number."""
    found = (file for file in (folder / "tasks").glob("*") if file.name.isdecimal())
    return {file.name: int(file.read_text()) for file in found}


def _hosts() -> list[str]:
    import submitit

    return list(submitit.JobEnvironment().hostnames)
