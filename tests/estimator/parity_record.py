"""Records the real training toolkit's values in parity.json: `parity_record.py PYTHON`, an interpreter that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from parity_cases import CASES, service_files

HERE = Path(__file__).parent
TABLE = HERE / "parity.json"
RECORDED: dict[str, dict] = json.loads(TABLE.read_text()) if TABLE.exists() else {}


def toolkit(python: str | Path, name: str, base: Path) -> dict:
    """Returns the toolkit's variables and command for a case. BASE stands for `base`, PYTHON for its interpreter."""
    service_files(name, CASES[name], base)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SM_", "SAGEMAKER_"))}
    own = {"SAGEMAKER_BASE_DIR": str(base), "TRAINING_JOB_NAME": "j", "AWS_REGION": "us-west-2"}
    done = subprocess.run(
        [python, HERE / "parity_toolkit.py"], env={**clean, **own}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(done.stdout.splitlines()[-1].replace(str(base), "BASE"))
    if not found["command"][0].endswith((".py", "/sh")):
        found["command"][0] = "PYTHON"
    return found


def record(python: str | Path) -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as folder:
        return {name: toolkit(python, name, Path(folder, str(at))) for at, name in enumerate(CASES)}


if __name__ == "__main__":
    TABLE.write_text(json.dumps(record(sys.argv[1]), indent=1, sort_keys=True) + "\n")
