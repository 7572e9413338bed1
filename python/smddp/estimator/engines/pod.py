"""What a pod of a job runs: `python -m smddp.estimator.engines.pod FOLDER COMMAND ...`.

It makes the job's folder from the files that the TrainJob carries, runs the command, and prints how ranks failed: files
of a pod are gone with it, its log is not.
"""

from __future__ import annotations

import base64
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

from smddp.estimator.job import Folder
from smddp.estimator.source import python_path

#: The variable with the job's files.
FILES = "SMDDP_JOB_FILES"
#: What a line that tells of a failed rank begins with.
FAILED = "smddp-failure: "


def main(argv: list[str]) -> int:
    folder, command = Folder(Path(argv[0])), argv[1:]
    folder.make()
    files = os.environ.pop(FILES, None)
    if files:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(files)), mode="r:gz") as archive:
            # Who sent it runs commands here.
            archive.extractall(folder.path, filter="fully_trusted")
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
