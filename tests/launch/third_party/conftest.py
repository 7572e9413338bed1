"""The environment's own programs for all of these tests; what a machine needs for the toolkit's jobs of one host."""

import os
import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def activated():
    """Adds the environment's programs to PATH, as activation does: launchers search it for `smddprun`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        yield


@pytest.fixture(scope="module")
def programs():
    for program in ("mpirun", "/usr/sbin/sshd"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine (Debian: openmpi-bin, openssh-server)")


@pytest.fixture
def host_name(programs):
    """Creates the file that the toolkit's replacement of gethostname() reads; without it ranks crash."""
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
