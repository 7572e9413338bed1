"""What a machine needs for the toolkit's jobs of one host."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def programs():
    for program in ("mpirun", "/usr/sbin/sshd"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine (Debian: openmpi-bin, openssh-server)")


@pytest.fixture
def host_name(programs):
    """The toolkit's ranks have a gethostname() of its own, which reads this file and crashes where there is none."""
    file = Path("/opt/ml/input/config/resourceconfig.json")
    if file.exists():
        yield
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"current_host": "localhost", "hosts": ["localhost"]}')
    except OSError as error:
        pytest.skip(f"{file} cannot be made: {error}")
    yield
    file.unlink()
