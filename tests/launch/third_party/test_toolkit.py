"""The unmodified SageMaker training toolkit starts our jobs, one host: `make test-launch`.

It needs Open MPI and an SSH server on this machine.
"""

from pathlib import Path

import pytest

pytest.importorskip("sagemaker_training", reason="sagemaker-training is not installed: make test-launch")
import toolkit
import toolkit_scripts as scripts

pytestmark = pytest.mark.usefixtures("host_name")


@pytest.mark.parametrize("strategy", ["DATA_PARALLEL", "PYTORCH_DDP", "TORCH_DISTRIBUTED"])
def test_a_job_ends_well(tmp_path: Path, strategy: str):
    ended = toolkit.run(tmp_path / "job", scripts.TRAINS, getattr(toolkit, strategy))
    toolkit.ended_well(ended)
    assert "smddprun" in ended.log or strategy == "TORCH_DISTRIBUTED"


def test_a_model_parallel_job_over_mpi_ends_well(tmp_path: Path):
    ended = toolkit.run(tmp_path / "job", scripts.SHARDS, toolkit.MODEL_PARALLEL)
    toolkit.ended_well(ended)
    assert "smddpmprun -i ml.p4d.24xlarge --allow-bypass" in ended.log


@pytest.mark.parametrize("strategy", ["DATA_PARALLEL", "TORCH_DISTRIBUTED"])
def test_a_users_error_is_reported_as_the_users(tmp_path: Path, strategy: str):
    """The other rank raises PeerLostError, which is not reported as the cause."""
    toolkit.blames_the_user(toolkit.run(tmp_path / "job", scripts.FAILS, getattr(toolkit, strategy)))


def test_calls_that_differ_are_reported_by_name(tmp_path: Path):
    """Covers the data parallel strategies, for which the toolkit searches for smddp's errors."""
    ended = toolkit.run(tmp_path / "job", scripts.DIFFERS, toolkit.DATA_PARALLEL)
    toolkit.blames(ended, "MismatchError", "broadcast", "all_reduce")
