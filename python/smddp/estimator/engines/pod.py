"""Entry point of a job's pod: `python -m smddp.estimator.engines.pod FOLDER COMMAND ...`.

Unpacks the TrainJob's files into the job's folder, runs the command and prints the ranks' failures, since a pod's log
outlives its files.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from smddp.estimator import archives
from smddp.estimator.job import Folder
from smddp.estimator.source import python_path

#: Variable with the job's files.
FILES = "SMDDP_JOB_FILES"
#: Prefix of a log line with a rank's failure.
FAILED = "smddp-failure: "


def main(argv: list[str]) -> int:
    folder, command = Folder(Path(argv[0])), argv[1:]
    folder.make()
    files = os.environ.pop(FILES, None)
    if files:
        archives.unpack(files, folder.path)
    env = {**os.environ, "SM_CURRENT_HOST": socket.gethostname(), "PYTHONPATH": python_path(folder.code)}
    child = subprocess.Popen(command, env=env, cwd=folder.code)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: child.send_signal(got))
    status = child.wait()
    for file in sorted(folder.failures.glob("*.json")):
        os.write(1, f"{FAILED}{file.read_text()}\n".encode())
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
