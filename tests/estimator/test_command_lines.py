"""Commands of an estimator match the toolkit's commands on one host and on several."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from smddp.estimator import PyTorch, fitting, job, validate
from smddp.estimator.commands import exported_variables

ON = {"enabled": True}
VERSIONS = {"framework_version": "2.2.0", "py_version": "py310"}


def commands(distribution, hosts=None, instance_type="ml.p4d.24xlarge", count=1, **more):
    made = PyTorch(
        "train.py",
        distribution=distribution,
        instance_type=instance_type,
        instance_count=count,
        hyperparameters={"epochs": 3, "z": {"a": 1, "b": 2}},
        output_path="file:///jobs",
        **VERSIONS,
    )
    return made.commands(hosts, job_name="j", python="/bin/python", **more)


def text(command) -> str:
    """Removes the job's many variables."""
    words = re.sub(r" -x (SM_\w+|TRAINING_JOB_NAME|PYTHONPATH)\b", "", " ".join(command.argv))
    return words.replace(" -x PATH smdd", " smdd")


RANK = "/bin/python -m smddp.estimator.rank /jobs/j /bin/python"
SCRIPT = "/jobs/j/code/train.py --epochs 3 -z a=1,b=2"


def test_torchrun_of_one_host_and_of_two():
    (one,) = commands({"torch_distributed": ON})
    start = "/bin/python -m torch.distributed.run --nnodes"
    assert text(one) == f"{start} 1 --nproc_per_node 8 --standalone --no-python -- {RANK} {SCRIPT}"
    assert one.env["FI_PROVIDER"] == "efa" and one.env["FI_EFA_USE_DEVICE_RDMA"] == "1"
    two = commands({"torch_distributed": ON}, ["a", "b:8"], count=2, interface="eth1")
    for number, (command, host) in enumerate(zip(two, "ab")):
        place = f"--master_addr a --master_port 7777 --node_rank {number}"
        assert text(command) == f"{start} 2 --nproc_per_node 8 {place} --no-python -- {RANK} {SCRIPT}"
        assert (command.host, command.env["SM_CURRENT_HOST"]) == (host, host)
        assert command.env["NCCL_SOCKET_IFNAME"] == "eth1" and command.env["SM_HOSTS"] == '["a","b"]'


@pytest.mark.parametrize("form", [{"smdistributed": {"dataparallel": ON}}, {"pytorchddp": ON}])
def test_mpirun_of_the_data_parallel_library(form):
    (one,) = commands(form)
    said = text(one)
    assert said.startswith(
        "mpirun --host localhost -np 8 --allow-run-as-root --tag-output --oversubscribe -mca plm_rsh"
    )
    assert "-x SMDATAPARALLEL_USE_SINGLENODE=1 -x FI_PROVIDER=efa -x RDMAV_FORK_SAFE=1 -x NCCL_PROTO=simple" in said
    assert re.search(rf" smddprun {RANK} (-m mpi4py )?{re.escape(SCRIPT)}$", said), said
    (two,) = commands(form, ["a", "b"], count=2, interface="eth0")
    said = text(two)
    assert "--host a:8,b:8 -np 16" in said and "-mca btl_tcp_if_include eth0 -mca oob_tcp_if_include eth0" in said
    assert "SMDATAPARALLEL_USE_HOMOGENEOUS=1" in said and "plm_rsh_num_concurrent 2" in said
    assert "-x SMDATAPARALLEL_SERVER_ADDR=a -x SMDATAPARALLEL_SERVER_PORT=7592 -x SAGEMAKER_INSTANCE_TYPE" in said
    # smddprun sets it per rank: mpirun passes all ranks the same value.
    assert "SM_CURRENT_HOST" not in two.env and two.host == "a"


def test_user_options_of_mpi_keep_their_position_in_mpirun():
    options = "--NCCL_DEBUG WARN -x A=1 --mca pls_rsh_agent ssh"
    (one,) = commands({"mpi": {"enabled": True, "processes_per_host": 4, "custom_mpi_options": options}})
    said = text(one)
    assert "--host localhost:4 -np 4" in said and "-bind-to none -map-by slot" in said
    assert "-x NCCL_DEBUG=WARN -x LD_LIBRARY_PATH -x PATH -x A=1 --mca pls_rsh_agent ssh -x FI_PROVIDER=efa" in said


def test_quotes_keep_a_value_of_a_users_options_in_one_word():
    options = """-x "MESSAGE=a b" --NCCL_DEBUG 'WARN' -mca "pml" ob1 -x C='d e'"""
    for strategy in ("mpi", "pytorchddp"):
        (one,) = commands({strategy: {**ON, "custom_mpi_options": options}})
        assert [word for word in one.argv if " " in word] == ["MESSAGE=a b", "C=d e"]
        assert "NCCL_DEBUG=WARN" in one.argv and one.argv.count("pml") == 1
        given = validate(
            {strategy: {**ON, "custom_mpi_options": options.replace('-mca "pml" ob1', "")}}, instance_type="local"
        )
        assert exported_variables(given)["MESSAGE"] == "a b"


def test_a_parameter_of_the_job_that_a_user_gives_too_is_in_the_command_once():
    options = "-verbose --mca btl_vader_single_copy_mechanism none -mca pml ob1 --mca a b"
    for strategy in (
        {"mpi": {**ON, "custom_mpi_options": options}},
        {"pytorchddp": {**ON, "custom_mpi_options": options}},
    ):
        (one,) = commands(strategy)
        said = text(one)
        assert said.count("btl_vader_single_copy_mechanism") == said.count("pml") == 1
        assert "-verbose --mca a b" in said


def test_a_job_of_the_model_parallel_library_goes_through_smddpmprun():
    form = {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}},
        "mpi": {"enabled": True, "processes_per_host": 8},
    }
    (one,) = commands(form)
    assert f"smddpmprun -i ml.p4d.24xlarge --allow-bypass {RANK}" in text(one)
    assert one.env["SM_HP_MP_PARAMETERS"] == '{"partitions":2}' and "mp_parameters" not in one.env["SM_HPS"]
    assert "mp_parameters" not in text(one)


def test_efa_variables_are_absent_without_efa():
    (one,) = commands({"smdistributed": {"dataparallel": ON}}, instance_type="ml.p3.16xlarge")
    assert "FI_PROVIDER" not in text(one)
    (one,) = commands({"torch_distributed": ON}, ["localhost:3"], instance_type="local")
    assert "FI_PROVIDER" not in one.env and "--nproc_per_node 3" in text(one)


def test_without_a_strategy_the_script_is_one_process():
    (one,) = commands(None, instance_type="local")
    assert text(one) == f"{RANK} {SCRIPT}"


@pytest.mark.parametrize(
    ("hosts", "count", "says"),
    [
        (None, 2, r"instance_count is 2, and ranks are started here: name the hosts \(hosts=\['a:8', 'b:8'\]\)"),
        (["a", "b"], 3, "instance_count is 3, and 2 hosts are named"),
        (["a", "a"], 2, "one is named twice"),
        (["a:x"], 1, "invalid entry 'a:x'"),
        (["a:0"], 1, "invalid entry 'a:0'"),
        (["a:4", "b:8"], 2, "different numbers of ranks: a:4, b:8"),
    ],
)
def test_invalid_hosts_are_reported(hosts, count, says):
    with pytest.raises(ValueError, match=says):
        commands({"torch_distributed": ON}, hosts, count=count)


def test_instance_groups_say_type_and_number_of_hosts():
    """A group is the estimator's machines, as instance_type and instance_count are."""
    group = SimpleNamespace(instance_group_name="train", instance_type="ml.p4d.24xlarge", instance_count=2)
    other = SimpleNamespace(instance_group_name="other", instance_type="ml.m5.xlarge", instance_count=1)
    form = {"mpi": {"enabled": True}, "instance_groups": [group]}
    made = PyTorch("train.py", distribution=form, instance_groups=[group, other], output_path="/jobs", **VERSIONS)
    (command,) = made.commands(["a", "b"])
    assert "--host a:8,b:8 -np 16" in text(command)
    assert command.env["SM_CURRENT_INSTANCE_TYPE"] == "ml.p4d.24xlarge"
    with pytest.raises(ValueError, match="instance_count is 2, and ranks are started here: name the hosts"):
        made.commands()


def test_an_image_and_versions_that_nothing_runs_are_reported():
    said = []
    made = PyTorch("train.py", image_uri="registry/train", **VERSIONS)
    fitting.announce(made, job.Folder(Path("/jobs/j")), said.append)
    assert said == ["smddp: no effect in a job that runs here: framework_version, py_version, image_uri"]
