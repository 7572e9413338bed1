"""The unmodified SageMaker training toolkit runs our jobs on two hosts of network namespaces: `make test-launch`.

Both hosts run its `train`; that of the first starts mpirun, which gets to the other by the toolkit's SSH server there.
"""

import pytest

pytest.importorskip("sagemaker_training", reason="sagemaker-training is not installed: make test-launch")
import toolkit
import toolkit_hosts
import toolkit_scripts as scripts

# A test may wait for the jobs of those before it.
pytestmark = pytest.mark.timeout(900)
JOB = 400
MPI = ["DATA_PARALLEL", "MODEL_PARALLEL"]


def jobs_of(script: str, *strategies: str) -> pytest.MarkDecorator:
    given = [(script, strategy) for strategy in strategies]
    return pytest.mark.parametrize("job", given, indirect=True, ids=["-".join(each) for each in given])


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """Those that the selected tests ask for, all under way."""
    missing = toolkit_hosts.missing()
    if missing:
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("toolkit")

    def begin(which: tuple[str, str]) -> toolkit_hosts.Running:
        script, strategy = which
        image = toolkit.TENSORFLOW if script.startswith("TF_") else toolkit.PYTORCH
        text, parameters = getattr(scripts, script), getattr(toolkit, strategy)
        return toolkit_hosts.start(folder / "-".join(which), text, parameters, image)

    wanted = [item.callspec.params["job"] for item in request.session.items if item.path == request.path]
    if not toolkit.TENSORFLOW.there():
        wanted = [each for each in wanted if not each[0].startswith("TF_")]
    running = toolkit_hosts.Several(begin, wanted, JOB)
    yield running
    running.end()


@pytest.fixture
def job(request, jobs) -> list[toolkit.Ended]:
    """Returns the job's result on each host."""
    if request.param[0].startswith("TF_") and not toolkit.TENSORFLOW.there():
        pytest.skip(f"no {toolkit.TENSORFLOW.bin}: make test-launch")
    return jobs.ended(request.param)


# Failures first: their jobs take longest.


@jobs_of("FAILS", *MPI)
def test_a_users_error_on_the_other_host_is_reported_as_the_users(job):
    """The first host's toolkit writes the job's failure file; the other's ends once that host is unreachable."""
    toolkit.blames_the_user(job[0])


@jobs_of("TF_FAILS", "DATA_PARALLEL")
def test_a_users_error_in_tensorflow_is_reported_as_the_users(job):
    toolkit.blames_the_user(job[0])


@jobs_of("FAILS", "TORCH_DISTRIBUTED")
def test_a_users_error_under_torchrun_is_reported_by_its_host(job):
    """Each host's toolkit observes only its local ranks."""
    toolkit.blames_the_user(job[1])
    toolkit.blames(job[0], "ExecuteUserScriptError")


@jobs_of("DIFFERS", "DATA_PARALLEL")
def test_calls_that_differ_are_reported_by_name(job):
    toolkit.blames(job[0], "MismatchError", "broadcast", "all_reduce")


@jobs_of("CANNOT_MEET", *MPI)
def test_hosts_that_cannot_reach_each_other_are_reported_by_name(job):
    toolkit.blames(job[0], "TopologyError", "nosuch0")


@jobs_of("TF_CANNOT_MEET", "DATA_PARALLEL")
def test_hosts_that_cannot_reach_each_other_are_reported_by_name_in_tensorflow(job):
    toolkit.blames(job[0], "TopologyError", "nosuch0")


def both_end_well(job: list[toolkit.Ended]) -> None:
    first, other = job
    toolkit.ended_well(first)
    assert other.status == 0 and other.success and not other.failure, other.log[-6000:]


@jobs_of("TRAINS", "DATA_PARALLEL", "TORCH_DISTRIBUTED")
def test_a_job_ends_well(job):
    both_end_well(job)


@jobs_of("SHARDS", "MODEL_PARALLEL")
def test_a_model_parallel_job_over_mpi_ends_well(job):
    both_end_well(job)


@jobs_of("TF_TRAINS", "DATA_PARALLEL")
def test_a_tensorflow_job_ends_well(job):
    both_end_well(job)
