"""Writes the screens of a page of docs/, and its picture, from what the commands say here.

  scripts/screens.py docs/doctor.md           `smddp doctor`, and its heat map
  scripts/screens.py docs/observability.md    `smddp status` of a job, and its trace
  scripts/screens.py docs/screens.md          `smddp info`, a bench with its plot, two compared, a plan with its drawing

The doctor's second screen is of four "hosts" of network namespaces (bench/lab/netlab), one of which has a slow link; it
needs what the lab needs. The job (screens_job.py) is live, and hangs. Figures are those of the machine that runs it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LAB = Path(__file__).parents[1] / "bench" / "lab" / "netlab"
JOB = Path(__file__).with_name("screens_job.py")
SMDDP = [sys.executable, "-m", "smddp"]
DOCTOR = [*SMDDP, "doctor"]
RANKS = 4


def said(command: list[str]) -> str:
    environment = {**os.environ, "COLUMNS": "116", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120).stdout


def in_the_lab(svg: Path) -> str:
    lab = ["--hosts", "4", "--rate", "1gbit", "--fault", "0s rate host=2 to=10mbit", "--keep-going", "--timeout", "90"]
    whole = said([sys.executable, str(LAB), "run", *lab, "--raw", "--", *DOCTOR, "--svg", str(svg)])
    return "\n".join(line for line in whole.splitlines() if not line.startswith("netlab:"))


def interesting(screen: str) -> str:
    """Without the lines of what is well."""
    lines, shown = [], True
    for line in screen.splitlines():
        shown = not line.startswith("  ok ") if line.startswith("  ") and line[2] != " " else shown or not line
        lines += [line] if shown else []
    return re.sub("\n{3,}", "\n\n", "\n".join(lines))


def doctor(page: Path) -> list[str]:
    return [said(DOCTOR), interesting(in_the_lab(page.with_name("doctor-pairs.svg")))]


@contextmanager
def hanging_job(folder: Path) -> Iterator[list[str]]:
    """The pids of a job in which rank 3 reads a batch and all others wait for it."""
    from smddp.observability import status as _status

    # The name that status shows.
    shutil.copy(JOB, folder / "train.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SMDDP_RECORDER": "32"}
    log = folder / "log"
    with log.open("w") as errors:
        job = subprocess.Popen(launch, cwd=folder, env=environment, stderr=errors)
    try:
        until = time.monotonic() + 120
        while True:
            assert job.poll() is None and time.monotonic() < until, f"the job does not hang:\n{log.read_text()}"
            pids = (folder / "pids").read_text().split() if (folder / "pids").exists() else []
            texts = [_status.ask(int(pid)) for pid in pids]
            waits = [group["present"] for one in texts for group in one["groups"] if group["present"]]
            if len(texts) == RANKS and sum(present["seconds"] > 5 for present in waits) == RANKS - 1:
                break
            time.sleep(0.1)
        yield pids
    finally:
        job.terminate()
        job.wait(60)


def job(page: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as made, hanging_job(Path(made)) as pids:
        status = said([*SMDDP, "status", *pids, "--dump", f"{made}/dumps"])
        dumps = sorted(map(str, Path(made, "dumps").iterdir()))
        said([*SMDDP, "trace", *dumps, "-o", str(page.with_name("trace.svg"))])
    return [status.replace(f"{made}/", "")]


def commands(page: Path) -> list[str]:
    """Each of the page's headings is the command; the files that it names lie beside the page, or are not kept."""
    bench, screens = [*SMDDP, "bench"], []
    with tempfile.TemporaryDirectory() as made:
        sizes = ["-b", "1K", "-e", "64M", "-f", "8"]
        said(["env", "SMDDP_ALGO=mesh", *bench, "all_reduce", "--nproc", "2", *sizes, "-J", f"{made}/mesh.json"])
        for line in re.findall("^## `(.*)`$", page.read_text(), re.M):
            words = shlex.split(line)
            command = [*(SMDDP if words[0] == "smddp" else bench), *words[1:]]
            for at, word in enumerate(command):
                if word.endswith(".json"):
                    command[at] = f"{made}/{word}"
                elif word.endswith((".png", ".svg")):
                    command[at] = str(page.with_name(word))
            screens.append(said(command).replace(f"{made}/", "").replace(f"{page.parent}/", ""))
    screens[0] = screens[0].partition("\nsettings: ")[0]
    return screens


SCREENS = {"doctor.md": doctor, "observability.md": job, "screens.md": commands}


def main(arguments: list[str]) -> int:
    page = Path(arguments[0])
    screens = SCREENS[page.name](page)
    wanted = len(screens)
    text, count = re.subn(
        r"```text\n.*?```", lambda _: f"```text\n{screens.pop(0).rstrip()}\n```", page.read_text(), flags=re.S
    )
    assert count == wanted, f"{page} has {count} screens, not {wanted}"
    page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
