"""Writes the output of the commands in pages of docs/guides/, and their pictures, from what they print here.

  scripts/screens.py docs/guides/check-a-machine.md ...

A page's console block that begins with `$ COMMAND` gets the output of that command. Figures are those of the machine
that runs this. The last screen of check-a-machine.md needs the lab's network namespaces (bench/lab/netlab). The job of
debug-a-hang.md and traces-and-replay.md (screens_job.py) is live, and hangs.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).with_name("screens_job.py")
SMDDP = [sys.executable, "-m", "smddp"]
RANKS = 4
#: Characters of a line of the replay's report that a page shows.
LONGEST = 146
SIZES = "-b 1K -e 64M -f 8"
#: The lines of `smddp doctor` and `smddp info` that a page shows; the others are "...".
DOCTOR_LINES = ("shared memory", "open files", "interfaces", "nodes")
INFO_LINES = ("cores", "in a node", "between nodes")


def words_of(command: str) -> list[str]:
    """Returns the words of a page's command, with the programs of this interpreter and of this repository."""
    first, *rest = shlex.split(command)
    programs = {"smddp": SMDDP, "smddp-bench": [*SMDDP, "bench"], "bench/lab/netlab": [str(ROOT / "bench/lab/netlab")]}
    return [*programs[first], *(word if word != "smddp" else shutil.which("smddp") or word for word in rest)]


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "COLUMNS": "116", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=120)
    return done.stdout


def some_lines(screen: str, prefixes: tuple[str, ...]) -> str:
    """Returns the first line, the lines that begin with one of `prefixes` after the status, and the last line."""
    lines = screen.rstrip().splitlines()
    shown, wanted = [lines[0], ""], False
    for line in lines[2:-1]:
        continued = line.startswith(" " * 20)
        wanted = wanted if continued else re.sub(r"^ +(?:(?:ok|warn|FAIL) +)?", "", line).startswith(prefixes)
        if wanted:
            shown += [line]
        elif shown[-1] != "  ...":
            shown += ["  ..."]
    return "\n".join([*shown, lines[-1]])


def shortened(screen: str, cut: str) -> str:
    """Returns the screen with each run of lines that match `cut` as one line "..."."""
    lines: list[str] = []
    for line in screen.splitlines():
        if not re.match(cut, line):
            lines += [line]
        elif lines[-1:] != ["..."]:
            lines += ["..."]
    return "\n".join(lines)


def problems(screen: str) -> str:
    """Returns the screen of the doctor without the lines of checks that passed."""
    lines, shown = [], True
    for line in screen.splitlines():
        if line.startswith("netlab:"):
            continue
        shown = not line.startswith("  ok ") if line.startswith("  ") and line[2] != " " else shown or not line
        lines += [line] if shown else []
    return re.sub("\n{3,}", "\n\n", "\n".join(lines))


def check_a_machine(pictures: Path) -> dict[str, str]:
    doctor, info = "smddp doctor", "smddp info"
    lab = (
        "bench/lab/netlab run --hosts 4 --rate 1gbit --fault '0s rate host=2 to=10mbit' --keep-going --raw"
        " -- smddp doctor --svg doctor-pairs.svg"
    )
    settings = "\nsettings: "
    return {
        doctor: some_lines(run(words_of(doctor), pictures), DOCTOR_LINES),
        lab: problems(run(words_of(lab), pictures)),
        info: some_lines(run(words_of(info), pictures).partition(settings)[0], INFO_LINES),
    }


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


def debug_a_hang(_pictures: Path) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as made, hanging_job(Path(made)) as pids:
        return {"smddp status": run([*SMDDP, "status", *pids], Path(made)).replace(f"{made}/", "")}


def traces_and_replay(pictures: Path) -> dict[str, str]:
    trace, replay = "smddp trace dumps -o trace.json", "smddp-bench replay dumps --timeout 2"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with hanging_job(folder) as pids:
            run([*SMDDP, "status", *pids, "--dump", "dumps"], folder)
        run([*SMDDP, "trace", "dumps", "-o", str(pictures / "trace.svg")], folder)
        report = [
            line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
            for line in run(words_of(replay), folder).splitlines()
        ]
        return {trace: run(words_of(trace), folder), replay: "\n".join(report)}


def commands(*lines: str, before: str = "", plot: str = "", cut: str = "") -> Callable[[Path], dict[str, str]]:
    """Returns a function that runs the commands in one folder. A command writes its pictures beside the page.

    before: a first command, with SMDDP_ALGO=mesh; plot: a last one. The output of both is not shown. cut: a regular
    expression of output lines that are replaced by "...".
    """

    def screens(pictures: Path) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as made:
            folder, found = Path(made), {}
            if before:
                run(["env", "SMDDP_ALGO=mesh", *words_of(before)], folder)
            for line in [*lines, *([plot] if plot else [])]:
                words = [str(pictures / word) if word.endswith((".svg", ".png")) else word for word in words_of(line)]
                found[line] = run(words, folder).replace(f"{pictures}/", "")
            return {line: shortened(found[line], cut) if cut else found[line] for line in lines}

    return screens


SCREENS: Mapping[str, Callable[[Path], dict[str, str]]] = {
    "check-a-machine.md": check_a_machine,
    "debug-a-hang.md": debug_a_hang,
    "traces-and-replay.md": traces_and_replay,
    "benchmark.md": commands(
        f"smddp-bench all_reduce --nproc 2 {SIZES} -J reduce.json",
        "smddp-bench compare mesh.json reduce.json",
        "smddp-bench all_reduce --torch smddp,gloo --nproc 2 -b 8 -e 4M -f 64 -n 20 -J figures.json",
        before=f"smddp-bench all_reduce --nproc 2 {SIZES} -J mesh.json",
        cut=r"# (Coll|nThr|Using)|#  Rank|# ?$| +(8192|524288|4194304|33554432) ",
        plot="smddp-bench compare figures-gloo.json figures-smddp.json --plot benchmark-torch.png",
    ),
    "tune.md": commands("smddp-bench explain all_gather --bytes 256K --nodes 2 --ppn 2 --draw tune-plan.svg"),
    "simulate.md": commands(
        "smddp-bench simulate all_gather --cluster p5 --nodes 2,32 --bytes 256M",
        "smddp-bench simulate all_gather --cluster p5 --nodes 2,32 --bytes 256M --best",
    ),
}


def main(arguments: list[str]) -> int:
    for page in map(Path, arguments):
        text = page.read_text()
        for command, output in SCREENS[page.name](page.parent.absolute()).items():
            block = re.compile(rf"^```console\n\$ {re.escape(command)}\n.*?^```$", re.M | re.S)
            clean = "\n".join(line.rstrip() for line in output.strip().splitlines())
            screen = f"```console\n$ {command}\n{clean}\n```"
            text, count = block.subn(screen.replace("\\", r"\\"), text)
            assert count == 1, f"{page} has {count} blocks of {command!r}, not 1"
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
