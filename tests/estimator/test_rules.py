"""The rules of a `distribution=` dict: each has its error, and every documented form passes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from smddp.estimator import RULES, HuggingFace, PyTorch, TensorFlow, validate

ON = {"enabled": True}
TORCH = {"torch_distributed": ON}
MPI8 = {"mpi": {"enabled": True, "processes_per_host": 8}}
P4D = {"instance_type": "ml.p4d.24xlarge"}


def modelparallel(starter: dict, **parameters) -> dict:
    return {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}, **starter}


def mpi(options: object) -> dict:
    return {"mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": options}}


GROUP = SimpleNamespace(instance_group_name="train", instance_type="ml.p4d.24xlarge")
OTHER = SimpleNamespace(instance_group_name="other", instance_type="ml.m5.xlarge")

# By rule: the invalid distribution, other arguments, and the error text.
BROKEN = {
    "shape": [
        ("torch_distributed", {}, "it is 'torch_distributed'"),
        ({"torch_distributed": True}, {}, "'torch_distributed' is True"),
        ({"smdistributed": ["dataparallel"]}, {}, "'smdistributed' is ['dataparallel']"),
        ({"smdistributed": {"dataparallel": True}}, {}, "'dataparallel' is True"),
    ],
    "keys": [
        ({"torch_distribute": ON}, {}, "did you mean 'torch_distributed'?"),
        ({"smdistributed": {"dataparalel": ON}}, {}, "did you mean 'dataparallel'?"),
        ({"mpi": {"enabled": True, "process_per_host": 8}}, {}, "did you mean 'processes_per_host'?"),
        ({"smdistributed": {"modelparallel": {"enabled": True, "parameter": {}}}}, {}, "did you mean 'parameters'?"),
    ],
    "enabled": [
        ({"torch_distributed": {"enabled": "true"}}, {}, "that of 'torch_distributed' is 'true'"),
        ({"smdistributed": {"dataparallel": {"enabled": 1}}}, {}, "that of 'smdistributed.dataparallel' is 1"),
    ],
    "one_library": [({"smdistributed": {"dataparallel": ON, "modelparallel": ON}}, P4D, "both given")],
    "one_launcher": [
        ({"pytorchddp": ON, "smdistributed": {"dataparallel": ON}}, P4D, "leave it out"),
        ({"pytorchddp": ON, **TORCH}, P4D, "torch_distributed and pytorchddp are both enabled"),
        ({**MPI8, **TORCH}, P4D, "mpi and torch_distributed are both enabled"),
        ({**MPI8, "smdistributed": {"dataparallel": ON}}, P4D, "mpi and smdistributed.dataparallel are both enabled"),
    ],
    "modelparallel_is_started": [(modelparallel({}, hybrid_shard_degree=8), P4D, "one plain process")],
    "framework": [
        (TORCH, {"framework": "tensorflow", **P4D}, "'torch_distributed' is enabled for tensorflow"),
        ({"parameter_server": ON}, P4D, "'parameter_server' is enabled for pytorch"),
        ({"pytorchxla": ON}, P4D, "Training Compiler"),
        (
            {"multi_worker_mirrored_strategy": ON, "smdistributed": {"dataparallel": ON}},
            {"framework": "tensorflow", **P4D},
            "leave one out",
        ),
    ],
    "python": [
        ({"smdistributed": {"dataparallel": ON}}, {"py_version": "py27", **P4D}, "py_version is 'py27'"),
        ({"smdistributed": {"dataparallel": ON}}, {"py_version": "py310"}, "instance_type is missing"),
    ],
    "instance_type": [
        (TORCH, {"instance_type": "ml.p4d.24xlarg"}, "the nearest known type is 'ml.p4d.24xlarge'"),
        (None, {"instance_type": "ml.p3.8xlage"}, "the nearest known type is 'ml.p3.8xlarge'"),
        (None, {"instance_type": "locale"}, "the nearest known type is 'local'"),
        (None, {"instance_type": "p3.16xlarge"}, "the nearest known type is 'ml.p3.16xlarge'"),
        (MPI8, {"instance_groups": [SimpleNamespace(instance_type="ml.p4d")]}, "'ml.p4d' is unknown"),
    ],
    "count": [(TORCH, {"instance_count": 0, **P4D}, "it is 0"), (TORCH, {"instance_count": 1.5, **P4D}, "it is 1.5")],
    "entry_point": [(TORCH, {"entry_point": "train.sh", **P4D}, "'train.sh': give a file that ends in .py")],
    "trainium": [
        ({"smdistributed": {"dataparallel": ON}}, {"instance_type": "ml.trn1.32xlarge"}, "smdistributed on ml.trn1"),
    ],
    "groups": [
        ({**MPI8, "instance_groups": [GROUP]}, P4D, "the estimator has none"),
        ({**MPI8, "instance_groups": [GROUP, OTHER]}, {"instance_groups": [GROUP]}, "2 are asked for"),
        (MPI8, {"instance_groups": [GROUP, OTHER]}, "name the group to train on"),
        ({**MPI8, "instance_groups": [OTHER]}, {"instance_groups": [GROUP]}, "not the estimator's"),
        ({"instance_groups": [GROUP]}, {"instance_groups": [GROUP]}, "no strategy that starts ranks"),
    ],
    "processes": [
        ({"mpi": {"enabled": True, "processes_per_host": 0}}, P4D, "it is 0"),
        ({"mpi": {"enabled": True, "processes_per_host": "8"}}, P4D, "it is '8'"),
        ({"mpi": {"enabled": True, "processes_per_host": 16}}, P4D, "ml.p4d.24xlarge has 8: give 8 or fewer"),
    ],
    "mpi_options": [
        (mpi(["-x", "A=1"]), P4D, "those of 'mpi' are ['-x', 'A=1']"),
        (mpi("--mca btl_vader_single_copy_mechanism cma"), P4D, "the job gives btl_vader_single_copy_mechanism itself"),
        (mpi("-mca pml ucx"), P4D, "give pml ucx, and the job gives pml itself: expected ob1"),
        (mpi("--mca btl_tcp_if_include eth0"), P4D, "give fit(interface=...)"),
        (mpi("--mca plm_rsh_num_concurrent 4"), P4D, "the job gives plm_rsh_num_concurrent itself: leave it out"),
        (mpi("--mca a 1 --mca a 2"), P4D, "give a twice"),
        (mpi("--mca 'pml' 'ucx'"), P4D, "give pml ucx, and the job gives pml itself"),
        (mpi("-x 'A=1"), P4D, "which a shell cannot split (No closing quotation): close the quotes"),
        (
            {"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_options": "--mca btl self"}}},
            P4D,
            "those of 'smdistributed.dataparallel' give btl self",
        ),
    ],
    "parameters": [
        (modelparallel(MPI8, partitions=2, microbatches=0), P4D, "'microbatches' must be at least 1, got 0"),
        (modelparallel(MPI8, partitions="2"), P4D, "'partitions' must be int"),
        (modelparallel(MPI8, partitions=2, pipeline="fast"), P4D, "'pipeline' must be one of"),
        (modelparallel(MPI8, partitions=2, optimize="cost"), P4D, "'optimize' must be one of"),
        (modelparallel(MPI8, partitions=2, ddp="yes"), P4D, "'ddp' must be bool"),
        (modelparallel(MPI8, partitions=2, memory_weight=1.5), P4D, "'memory_weight' must be from 0 to 1"),
        (modelparallel(MPI8, partitions=2, auto_partition=False), P4D, "default_partition must say"),
        (modelparallel(MPI8, partitions=2, default_partition=2), P4D, "'default_partition'=2 is not among"),
        (modelparallel(MPI8, partitions=2, ddp_port=1234), P4D, "'ddp_port'=1234 needs 'ddp': True"),
        (modelparallel(MPI8, partitions=2, ddp=True, ddp_port=-1), P4D, "'ddp_port' must be at least 0"),
        (modelparallel(MPI8, partitions=2, horovod=True), P4D, "'horovod'=True is not there"),
        (
            modelparallel(MPI8, partitions=2, microbatch=4),
            P4D,
            "'microbatch'; did you mean 'microbatches'?",
        ),
        (modelparallel(TORCH, hybrid_shard_degre=8), P4D, "did you mean 'hybrid_shard_degree'?"),
        (modelparallel(TORCH, hybrid_shard_degree=-1), P4D, "'hybrid_shard_degree' must be at least 0"),
        (
            {"smdistributed": {"modelparallel": {"enabled": True, "parameters": "/no/such/file"}}, **TORCH},
            P4D,
            "file '/no/such/file' does not exist",
        ),
        ({"smdistributed": {"modelparallel": {"enabled": True, "parameters": 3}}, **TORCH}, P4D, "parameters is 3"),
    ],
    "placement": [(modelparallel(TORCH, placement_strategy="DDP"), P4D, "it is 'DDP': give cluster")],
    "partitions": [(modelparallel(MPI8, microbatches=4), P4D, "neither partitions nor pipeline_parallel_degree")],
    "degrees": [
        (modelparallel(MPI8, partitions=3), P4D, "8 x 1 ranks, and the degrees are 3 together"),
        (modelparallel(MPI8, pipeline_parallel_degree=4, tensor_parallel_degree=4), P4D, "16 together"),
        (modelparallel(TORCH, hybrid_shard_degree=3), P4D, "these would: 0, 1, 2, 4, 8"),
        (modelparallel(TORCH, tensor_parallel_degree=16), P4D, "tensor_parallel_degree=16 does not divide 8 ranks"),
    ],
}

FINE = [
    (None, {}),
    ({}, {}),
    (TORCH, P4D),
    ({"torch_distributed": {"enabled": False}, **MPI8}, P4D),
    ({"pytorchddp": {"enabled": True, "custom_mpi_options": "-verbose --NCCL_DEBUG=VERSION"}}, P4D),
    ({"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_options": "-x NCCL_DEBUG=INFO"}}}, P4D),
    ({"smdistributed": {"dataparallel": ON}, **TORCH}, P4D),
    ({"smdistributed": {"dataparallel": ON}}, {"framework": "tensorflow", **P4D}),
    ({"mpi": ON}, {"instance_type": "ml.m5.xlarge"}),
    (mpi("-x FI_PROVIDER=efa -x FI_EFA_USE_DEVICE_RDMA=1"), P4D),
    (mpi("-verbose --mca orte_base_help_aggregate 0 --mca btl_vader_single_copy_mechanism none -mca pml ob1"), P4D),
    ({**MPI8, "instance_groups": [GROUP]}, {"instance_groups": [GROUP, OTHER]}),
    ({"parameter_server": ON}, {"framework": "tensorflow"}),
    (modelparallel(MPI8, partitions=2, microbatches=4, placement_strategy="spread", pipeline="interleaved"), P4D),
    (modelparallel(MPI8, hybrid_shard_degree=8), P4D),
    (modelparallel(TORCH, hybrid_shard_degree=4, tensor_parallel_degree=2, sm_activation_offloading=True), P4D),
    (modelparallel(TORCH, placement_strategy="cluster"), P4D),
    # Rejected by the SDK and supported here: letters of a placement, P5, any torch, CPUs.
    (modelparallel(MPI8, pipeline_parallel_degree=2, placement_strategy="TPD"), P4D),
    ({"smdistributed": {"dataparallel": ON}}, {"instance_type": "ml.p5.48xlarge", "framework_version": "2.9.0"}),
    (TORCH, {"instance_type": "ml.c5.9xlarge"}),
    # Two instances of 8 GPUs allow a degree of 16.
    (modelparallel(TORCH, hybrid_shard_degree=16), {"instance_count": 2, **P4D}),
]


def test_every_rule_has_a_case_and_a_line_in_the_documentation():
    assert set(BROKEN) == {rule.name for rule in RULES}
    page = (Path(__file__).parents[2] / "docs" / "reference" / "estimator-rules.md").read_text().replace("\n", " ")
    assert [rule.text for rule in RULES if rule.text not in page] == []


CASES = [
    pytest.param(name, *case, id=f"{name}-{at}") for name, cases in BROKEN.items() for at, case in enumerate(cases)
]


@pytest.mark.parametrize(("name", "distribution", "beside", "says"), CASES)
def test_a_broken_rule_raises_with_the_rule_and_the_value(name, distribution, beside, says):
    (rule,) = (rule for rule in RULES if rule.name == name)
    with pytest.raises(ValueError) as raised:
        validate(distribution, **beside)
    assert f"distribution: {rule.text}; " in str(raised.value) and says in str(raised.value), raised.value


@pytest.mark.parametrize(("distribution", "beside"), FINE)
def test_documented_forms_pass(distribution, beside):
    validate(distribution, **beside)


@pytest.mark.parametrize("instance_type", ["ml.p3.16xlarge", "ml.p2.xlarge", "ml.g5.2xlarge", "local"])
def test_efa_variables_without_efa_are_one_warning(instance_type):
    options = mpi("-x FI_PROVIDER=efa -x FI_EFA_USE_DEVICE_RDMA=1")
    options["mpi"].pop("processes_per_host")
    with pytest.warns(UserWarning, match=f"{instance_type} has no EFA") as seen:
        validate(options, instance_type=instance_type)
    assert len(seen) == 1 and "FI_PROVIDER=efa, FI_EFA_USE_DEVICE_RDMA=1 without effect" in str(seen[0].message)


def test_parameters_may_be_a_file(tmp_path):
    file = tmp_path / "parameters.json"
    whole = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": str(file)}}, **TORCH}
    file.write_text(json.dumps({"hybrid_shard_degree": 2}))
    assert validate(whole, **P4D).parameters == {"hybrid_shard_degree": 2}
    file.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        validate(whole, **P4D)


VERSIONS = {"framework_version": "2.2.0", "py_version": "py310"}


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: PyTorch(**VERSIONS), ValueError, "entry_point is missing"),
        (lambda: PyTorch("a.py", py_version="py310"), ValueError, "framework_version and py_version, or image_uri"),
        (lambda: PyTorch("a.py", instance_typ="x", **VERSIONS), TypeError, "unknown argument 'instance_typ'"),
        (lambda: PyTorch("a.py", training_recipe="r", **VERSIONS), ValueError, "recipes are not run here"),
        (lambda: PyTorch("a.py", compiler_config=1, **VERSIONS), ValueError, "Training Compiler"),
        (lambda: PyTorch("a.py", distribution={"ddp": ON}, **VERSIONS), ValueError, "every key is known"),
        (lambda: HuggingFace("py310", "a.py", pytorch_version="2.1"), ValueError, "transformers_version"),
        (lambda: HuggingFace("py310", "a.py", transformers_version="4"), ValueError, "one of pytorch_version"),
        (lambda: TensorFlow("py310", entry_point="a.py"), ValueError, "framework_version and py_version"),
    ],
)
def test_estimator_arguments_are_validated_before_the_start(make, kind, says):
    with pytest.raises(kind, match=says):
        make()


def test_hyperparameters_are_those_that_the_toolkit_reads():
    made = PyTorch(
        "a.py",
        distribution=modelparallel(MPI8, partitions=2),
        hyperparameters={"epochs": 3, "name": "x"},
        role="r",
        **P4D,
        **VERSIONS,
    )
    found = {name: json.loads(value) for name, value in made.hyperparameters().items()}
    assert found == {
        "epochs": 3,
        "name": "x",
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 8,
        "sagemaker_mpi_custom_mpi_options": "",
        "mp_parameters": {"partitions": 2},
        "sagemaker_distributed_dataparallel_enabled": False,
        "sagemaker_instance_type": "ml.p4d.24xlarge",
    }
