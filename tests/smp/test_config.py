"""The configuration: accepted values, sources, and error messages. One process, no group."""

from __future__ import annotations

import json

import pytest
from smddp.sagemaker import config, parallel
from smddp.sagemaker.state_handler import State


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv(config.LAUNCHER, raising=False)


def test_without_any_source_every_key_has_its_default():
    values = config.read(None, {})
    assert values == {key.name: key.default for key in config.KEYS.values()}
    assert len(values) == 9 + 1  # those of SMP v2, and tensor_parallel_checks
    assert (values["tensor_parallel_degree"], values["hybrid_shard_degree"]) == (1, 0)


@pytest.mark.parametrize("form", ["dict", "path", "environment"])
def test_a_dict_a_json_file_and_the_environment_are_equivalent(form, tmp_path, monkeypatch):
    given = {"hybrid_shard_degree": 4, "sm_activation_offloading": False}
    argument = given
    if form == "path":
        argument = tmp_path / "smp.json"
        argument.write_text(json.dumps(given))
    elif form == "environment":
        argument = None
        monkeypatch.setenv(config.LAUNCHER, json.dumps(given))
    values = config.read(argument, {})
    assert values["hybrid_shard_degree"] == 4 and values["sm_activation_offloading"] is False


def test_the_launcher_wins_over_the_script_and_an_assigned_degree_over_both(monkeypatch, caplog):
    monkeypatch.setenv(config.LAUNCHER, '{"hybrid_shard_degree": 8, "tensor_parallel_degree": 4}')
    values = config.read({"hybrid_shard_degree": 2, "random_seed": 7}, {"tensor_parallel_degree": 1})
    assert values["hybrid_shard_degree"] == 8 and values["random_seed"] == 7 and values["tensor_parallel_degree"] == 1
    assert "replaces the script's 2" in caplog.text and "replaces the launcher's 4" in caplog.text


def test_the_older_name_of_the_seed_is_accepted_but_not_both():
    assert config.read({"tensor_parallel_seed": 3}, {})["random_seed"] == 3
    with pytest.raises(ValueError, match="older name of 'random_seed'"):
        config.read({"tensor_parallel_seed": 3, "random_seed": 4}, {})


def test_keys_of_v1_are_tolerated_with_a_note(caplog):
    values = config.read({"placement_strategy": "cluster", "partitions": 2, "hybrid_shard_degree": 2}, {})
    assert "placement_strategy" not in values and values["hybrid_shard_degree"] == 2
    assert "'placement_strategy' is a key of SMP v1" in caplog.text


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"hybrid_shard_degre": 2}, ValueError, "did you mean 'hybrid_shard_degree'"),
        ({"zzz": 2}, ValueError, "The keys are hybrid_shard_degree"),
        ({"tensor_parallel_degree": "2"}, TypeError, "must be int, got str: '2'"),
        ({"tensor_parallel_degree": True}, TypeError, "must be int, got bool"),
        ({"tensor_parallel_degree": 2.0}, TypeError, "must be int, got float"),
        ({"sm_activation_offloading": 1}, TypeError, "must be bool, got int"),
        ({"tensor_parallel_degree": 0}, ValueError, "at least 1, got 0"),
        ({"activation_loading_horizon": 0}, ValueError, "at least 1, got 0"),
        ({"hybrid_shard_degree": -1}, ValueError, "at least 0, got -1"),
        ([("a", 1)], TypeError, "expected a dictionary of SMP keys, got list"),
    ],
)
def test_an_invalid_key_type_or_range_raises_with_instructions(given, error, text):
    with pytest.raises(error, match=text):
        config.read(given, {})


def test_invalid_json_reports_its_source(tmp_path, monkeypatch):
    path = tmp_path / "bad.json"
    path.write_text("{hybrid")
    with pytest.raises(ValueError, match=r"bad\.json.*is not JSON"):
        config.read(path, {})
    monkeypatch.setenv(config.LAUNCHER, "a=1")
    with pytest.raises(ValueError, match=config.LAUNCHER):
        config.read(None, {})


def every_layout():
    for world in range(1, 33):
        for shard in range(0, world + 1):
            for tensor in range(1, world + 1):
                yield world, shard, tensor


def test_exactly_the_degrees_that_divide_are_accepted():
    for world, shard, tensor in every_layout():
        fits = world % tensor == 0 and (shard == 0 or (world // tensor) % shard == 0)
        try:
            sizes = parallel.layout(world, shard, tensor)
        except ValueError:
            assert not fits, (world, shard, tensor)
        else:
            assert fits, (world, shard, tensor)
            assert sizes.world == world and sizes.tensor == tensor
            assert sizes.shard == (shard or world // tensor)
            assert sizes.native == (shard == 0 and tensor == 1)


@pytest.mark.parametrize(
    ("world", "shard", "tensor", "text"),
    [
        (6, 4, 1, r"hybrid_shard_degree=4 does not fit: 6 ranks are not a multiple of 4; these would: 0, 1, 2, 3, 6"),
        (8, 4, 4, r"8 ranks / tensor_parallel_degree=4 = 2, which is not a multiple of 4; these would: 0, 1, 2$"),
        (8, 1, 3, r"tensor_parallel_degree=3 does not divide 8 ranks; these do: 1, 2, 4, 8"),
        (4, 1, 8, r"tensor_parallel_degree=8 does not divide 4 ranks"),
    ],
)
def test_a_degree_that_does_not_divide_shows_the_arithmetic(world, shard, tensor, text):
    with pytest.raises(ValueError, match=text):
        parallel.layout(world, shard, tensor)


@pytest.mark.parametrize("key", ["context", "expert"])
def test_other_degrees_divide_the_world_too(key):
    with pytest.raises(ValueError, match=f"{key}_parallel_degree=3 does not divide 4"):
        parallel.layout(4, 4, 1, **{key: 3})


@pytest.mark.parametrize(
    ("world", "shard", "tensor", "context", "text"),
    [
        (4, 4, 1, 3, r"context_parallel_degree=3 does not divide 4 ranks; these do: 1, 2, 4"),
        (8, 2, 1, 4, r"context_parallel_degree=4 must not exceed hybrid_shard_degree=2"),
        (12, 3, 1, 2, r"=2 does not divide a sharding group of 3 ranks .*; these do: 1, 3"),
        (8, 0, 4, 4, r"=4 does not divide a sharding group of 2 ranks .*tensor_parallel_degree=4\); these do: 1, 2"),
    ],
)
def test_a_context_group_is_a_part_of_a_sharding_group(world, shard, tensor, context, text):
    with pytest.raises(ValueError, match=text):
        parallel.layout(world, shard, tensor, context)
    assert parallel.layout(world, shard, tensor, 1).context == 1


def test_ranks_are_ordered_by_node_for_any_launcher_numbering():
    assert parallel.order_by_node(["a", "a", "b", "b"]) == [0, 1, 2, 3]
    assert parallel.order_by_node(["a", "b", "a", "b"]) == [0, 2, 1, 3]
    assert parallel.order_by_node(["b", "a", "c", "a", "b"]) == [0, 4, 1, 3, 2]


def test_degrees_are_assignable_before_init_and_checked():
    state = State()
    state.tensor_parallel_degree = 1
    assert state._assigned == {"tensor_parallel_degree": 1}
    with pytest.raises(TypeError, match="must be int"):
        state.hybrid_shard_degree = "8"
    with pytest.raises(AttributeError):
        state.random_seed = 3


def test_attributes_that_need_the_mesh_raise_before_init():
    state = State()
    assert (state.tp_rank, state.tp_size, state.cp_rank, state.ep_rank) == (0, 1, 0, 0)
    with pytest.raises(RuntimeError, match=r"known only after tsm\.init\(\)"):
        _ = state.rep_rank_process_group
