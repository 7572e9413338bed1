"""Writes the screens of docs/doctor.md, and its heat map, from what `smddp doctor` says here.

  scripts/doctor_page.py docs/doctor.md

The second screen is of four "hosts" of network namespaces (bench/lab/netlab), one of which has a slow link; it needs
what the lab needs. Figures are those of the machine that runs it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

LAB = Path(__file__).parents[1] / "bench" / "lab" / "netlab"
DOCTOR = [sys.executable, "-m", "smddp", "doctor"]


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


def main(arguments: list[str]) -> int:
    page = Path(arguments[0])
    screens = [said(DOCTOR), interesting(in_the_lab(page.with_name("doctor-pairs.svg")))]
    text, count = re.subn(
        r"```text\n.*?```", lambda _: f"```text\n{screens.pop(0).rstrip()}\n```", page.read_text(), flags=re.S
    )
    assert count == 2 and not screens, f"{page} has {count} screens"
    page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
