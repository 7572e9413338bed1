"""The configuration and the arithmetic of placement: one process, no group."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smddp.modelparallel import ranks
from smddp.smp import v1_keys
from smddp.smp.v1_keys import Config

DIVISORS = st.sampled_from([1, 2, 3, 4, 6])


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv(v1_keys.LAUNCHER, raising=False)


def test_without_any_source_every_key_has_its_default():
    assert v1_keys.read(None) == Config()
    assert Config().active_microbatches == 3 and Config(pipeline_parallel_degree=4).active_microbatches == 6
    assert (Config().memory_weight, Config(optimize="speed").memory_weight) == (0.8, 0.2)


def test_both_names_of_a_key_say_the_same():
    assert v1_keys.read({"partitions": 4}) == v1_keys.read({"pipeline_parallel_degree": 4})
    assert v1_keys.read({"partitions": 4, "pipeline_parallel_degree": 4}).partitions == 4
    with pytest.raises(ValueError, match=r"'partitions' and 'pipeline_parallel_degree' are one key.*4 and 2"):
        v1_keys.read({"partitions": 4, "pipeline_parallel_degree": 2})


def test_launcher_settings_override_the_script_with_a_warning(monkeypatch, caplog):
    monkeypatch.setenv(v1_keys.LAUNCHER, json.dumps({"partitions": 2, "ddp": True}))
    found = v1_keys.read({"pipeline_parallel_degree": 4, "microbatches": 8})
    assert (found.partitions, found.microbatches, found.ddp) == (2, 8, True)
    assert "replaces the script's 4" in caplog.text
    monkeypatch.setenv(v1_keys.LAUNCHER, "{partitions")
    with pytest.raises(ValueError, match=r"SM_HP_MP_PARAMETERS is not JSON"):
        v1_keys.read(None)
    monkeypatch.setenv(v1_keys.LAUNCHER, "[1]")
    with pytest.raises(TypeError, match="SM_HP_MP_PARAMETERS: expected a dictionary"):
        v1_keys.read(None)


WRONG = {
    "microbatch": (2, ValueError, "unknown key 'microbatch'; did you mean 'microbatches'"),
    "hybrid_shard_degree": (2, ValueError, r"a key of SMP v2, whose import is torch\.sagemaker"),
    "microbatches": (0, ValueError, "'microbatches' must be at least 1, got 0"),
    "partitions": (True, TypeError, "'partitions' must be int, got bool: True"),
    "memory_weight": (1.5, ValueError, "'memory_weight' must be from 0 to 1"),
    "pipeline": ("gpipe", ValueError, "'pipeline' must be one of interleaved, simple, _only_forward, got 'gpipe'"),
    "placement_strategy": ("DDT", ValueError, "cluster, spread or the letters D, P, T once each"),
    "optimize": ("time", ValueError, "'optimize' must be one of memory, speed"),
    "auto_partition": (False, ValueError, "'auto_partition' is False, so 'default_partition'"),
    "default_partition": (1, ValueError, "'default_partition'=1 is not among the stages 0 to 0"),
    "ddp_port": (1234, ValueError, "'ddp_port'=1234 needs 'ddp': True"),
    "ddp_dist_backend": ("nccl", ValueError, "'ddp_dist_backend'='nccl' needs 'ddp': True"),
    "activation_loading_horizon": (0, ValueError, "must be at least 1"),
}


@pytest.mark.parametrize("key", WRONG)
def test_invalid_values_are_named_with_the_allowed_values(key):
    value, error, text = WRONG[key]
    with pytest.raises(error, match=text):
        v1_keys.read({key: value})


def test_a_key_of_a_missing_feature_raises_unless_default():
    refused = 0
    for name, field in v1_keys.KEYS.items():
        if not field.metadata["instead"]:
            continue
        refused += 1
        v1_keys.read({name: field.default})
        other = {bool: not field.default, int: 7, float: 0.5, str: "file"}[field.metadata["kind"]]
        with pytest.raises(NotImplementedError, match=f"'{name}'=.*Instead: "):
            v1_keys.read({name: other})
    assert refused == 2


def test_a_key_without_effect_is_logged(caplog):
    v1_keys.read({"ddp": True, "ddp_port": 2345})
    assert "'ddp_port' has no effect here" in caplog.text


def test_a_sharding_key_without_sharding_is_reported(caplog):
    v1_keys.read({"sdp_reduce_bucket_size": 1000, "sdp_gradient_clipping": 1.0})
    assert "'sdp_reduce_bucket_size' has no effect" in caplog.text and "gradient_clipping" not in caplog.text
    v1_keys.read({"sharded_data_parallel_degree": 2, "sdp_hierarchical_allgather": False})
    assert "'sdp_hierarchical_allgather' has no effect here" in caplog.text


def test_every_key_of_the_original_is_there():
    from smddp.sagemaker.config import V1_ONLY

    assert V1_ONLY | {"tensor_parallel_degree", "activation_loading_horizon"} == {*v1_keys.KEYS, *v1_keys.ALIASES}
    assert all(field.metadata["meaning"] for field in dataclasses.fields(Config))


def test_cluster_spread_and_letters_place_as_the_original_documents():
    assert ranks.place(8, "cluster", 2)["mp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks.place(8, "spread", 2)["mp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    of_bits = ranks.place(8, "DPT", 2, 2)
    assert (of_bits["tp"][0], of_bits["pp"][0], of_bits["rdp"][0]) == ([0, 1], [0, 2], [0, 4])
    of_bits = ranks.place(8, "PTD", 2, 2)
    assert (of_bits["rdp"][0], of_bits["tp"][0], of_bits["pp"][0]) == ([0, 1], [0, 2], [0, 4])
    with pytest.raises(ValueError, match=r"6 ranks do not fill.*start a multiple of 4 ranks"):
        ranks.place(6, "cluster", 4)


@given(
    st.sampled_from(["cluster", "spread", *map("".join, itertools.permutations("DPT"))]), DIVISORS, DIVISORS, DIVISORS
)
def test_groups_of_any_placement_cover_the_world_and_fit_together(strategy, pipeline, tensor, copies):
    size = pipeline * tensor * copies
    groups = ranks.place(size, strategy, pipeline, tensor)
    degrees = {"pp": pipeline, "tp": tensor, "rdp": copies, "dp": tensor * copies, "mp": pipeline * tensor}
    for name, lists in groups.items():
        assert all(len(members) == degrees[name] for members in lists)
        assert all(members == sorted(members) for members in lists)
        assert sorted(itertools.chain(*lists)) == list(range(size))
    fastest = {"P": "pp", "T": "tp", "D": "rdp"}[ranks.letters(strategy)[-1]]
    assert groups[fastest][0] == list(range(degrees[fastest]))
    for rank in range(size):
        mine = {name: set(ranks.mine(groups, name, rank)) for name in groups}
        # A pipeline, a tensor group and the copies of a part meet in this rank alone; the others are made of them.
        assert mine["pp"] & mine["tp"] == mine["pp"] & mine["rdp"] == mine["tp"] & mine["rdp"] == {rank}
        assert mine["dp"] & mine["mp"] == mine["tp"]
        assert mine["mp"] == set().union(*(ranks.mine(groups, "pp", other) for other in mine["tp"]))
        assert mine["dp"] == set().union(*(ranks.mine(groups, "rdp", other) for other in mine["tp"]))
        # All of a stage stand at the same place in their pipelines.
        places = {ranks.mine(groups, "pp", other).index(other) for other in mine["dp"]}
        assert len(places) == 1
