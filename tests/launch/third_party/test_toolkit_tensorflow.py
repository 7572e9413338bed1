"""The unmodified SageMaker training toolkit for TensorFlow starts our jobs, one host: `make test-launch`.

The toolkit is in a separate environment without torch (.venvs/toolkit-tensorflow).
"""

from pathlib import Path

import pytest
import toolkit
import toolkit_scripts as scripts

pytestmark = [
    pytest.mark.usefixtures("host_name"),
    pytest.mark.skipif(not toolkit.TENSORFLOW.there(), reason=f"no {toolkit.TENSORFLOW.bin}: make test-launch"),
]


def run(folder: Path, script: str) -> toolkit.Ended:
    return toolkit.run(folder / "job", script, toolkit.DATA_PARALLEL, toolkit.TENSORFLOW)


def test_a_job_ends_well(tmp_path: Path):
    ended = run(tmp_path, scripts.TF_TRAINS)
    toolkit.ended_well(ended)
    assert "smddprun" in ended.log


def test_a_users_error_is_reported_as_the_users(tmp_path: Path):
    """The other rank raises TensorFlow's InternalError for the lost peer, which is not reported as the cause."""
    toolkit.blames_the_user(run(tmp_path, scripts.TF_FAILS))


def test_calls_that_differ_are_reported_by_name(tmp_path: Path):
    """TensorFlow raises only its error types; their text contains smddp's error name."""
    toolkit.blames(run(tmp_path, scripts.TF_DIFFERS), "MismatchError", "smddp.MismatchError: ")
