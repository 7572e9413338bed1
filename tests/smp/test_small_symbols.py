"""Small helpers that training scripts import, checked against their documentation."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from smddp.sagemaker import logger as logging_module
from smddp.sagemaker.checkpoint.utils import SORT_BY_LAST_INT, limit_num_subdirs
from smddp.sagemaker.context_parallel.utils import setup_transformer_engine_cp_groups
from smddp.sagemaker.distributed.checkpoint.state_dict_utils import _Interval, compute_auto_checkpoint_interval
from smddp.sagemaker.logger import get_logger
from smddp.sagemaker.moe.moe_config import MoEConfig
from smddp.sagemaker.moe.moe_layer import MoELayer
from smddp.sagemaker.utils.module_utils import empty_module_params, move_buffers_to_device
from smddp.sagemaker.utils.process_group_utils import get_global_ranks
from smddp.sagemaker.utils.utils import timeit
from torch import nn

NAMES = {
    "logger": ["get_logger"],
    "utils.utils": ["timeit"],
    "utils.process_group_utils": ["get_global_ranks"],
    "utils.module_utils": ["empty_module_params", "move_buffers_to_device"],
    "checkpoint.constants": ["SMP_IS_LOAD_INFO_KEY", "SMP_IS_PARTIAL_KEY"],
    "checkpoint.utils": ["limit_num_subdirs", "SORT_BY_LAST_INT"],
    "moe.moe_config": ["MoEConfig"],
    "moe.moe_layer": ["MoELayer"],
    "context_parallel.utils": ["setup_transformer_engine_cp_groups"],
    "nn.attn": ["FlashSelfAttention", "FlashGroupedQueryAttention"],
    "nn.huggingface.llama_flashattn": ["LlamaFlashAttention"],
}


@pytest.mark.parametrize("module", NAMES)
def test_imports_under_the_name_scripts_use(module):
    import smddp.sagemaker  # noqa: F401 - makes torch.sagemaker importable where autoload is off

    found = importlib.import_module(f"torch.sagemaker.{module}")
    assert found is importlib.import_module(f"smddp.sagemaker.{module}")
    for name in NAMES[module]:
        assert hasattr(found, name)


# -- logger ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_logger(monkeypatch, capsys):
    """The package's logger as in a new process whose script has configured no logging; gives what it wrote."""
    logger = logging.getLogger(logging_module.NAME)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "propagate", False)
    # Ignore the handlers that pytest adds to every logger.
    monkeypatch.setattr(logger, "hasHandlers", lambda: any(type(h) is logging.StreamHandler for h in logger.handlers))
    monkeypatch.delenv("SMP_LOG_LEVEL", raising=False)
    level = logger.level
    logger.setLevel(logging.NOTSET)
    yield lambda: capsys.readouterr().err
    logger.setLevel(level)


def test_logger_names_the_rank_once_per_line(fresh_logger, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    get_logger().info("first")
    get_logger().info("second")
    lines = fresh_logger().splitlines()
    assert len(lines) == 2
    assert all("[rank 3]" in line for line in lines)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("off", []),
        ("fatal", ["fatal"]),
        ("WARNING", ["warning", "fatal"]),
        (None, ["info", "warning", "fatal"]),
        ("debug", ["debug", "info", "warning", "fatal"]),
    ],
)
def test_log_level_from_the_environment(fresh_logger, monkeypatch, level, expected):
    if level is not None:
        monkeypatch.setenv("SMP_LOG_LEVEL", level)
    logger = get_logger()
    for method in ("debug", "info", "warning", "fatal"):
        getattr(logger, method)(method)
    assert [line.split()[-1] for line in fresh_logger().splitlines()] == expected


def test_log_level_of_the_script_is_kept(fresh_logger):
    logging.getLogger(logging_module.NAME).setLevel(logging.ERROR)
    assert get_logger().level == logging.ERROR


def test_unknown_log_level_lists_valid_levels(fresh_logger, monkeypatch):
    monkeypatch.setenv("SMP_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match=r"loud.*off, fatal"):
        get_logger()


# -- timeit, ranks ---------------------------------------------------------------------------------------------


def test_timeit_logs_title_rank_and_seconds(fresh_logger, monkeypatch):
    ticks = iter([10.0, 11.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    with timeit(True, "Model creation", 5):
        pass
    assert "Model creation on rank 5 took 1.500 s" in fresh_logger()


def test_timeit_logs_a_body_that_fails_and_nothing_when_off(fresh_logger):
    with pytest.raises(ZeroDivisionError), timeit(True, "failing", 0):
        raise ZeroDivisionError
    assert "failing" in fresh_logger()
    with timeit(False, "silent", 0):
        pass
    assert "silent" not in fresh_logger()


def test_get_global_ranks(tmp_path):
    with pytest.raises(ValueError, match="init_process_group"):
        get_global_ranks()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        assert get_global_ranks() == list(range(8))
        assert get_global_ranks(dist.new_group([0, 2, 6])) == [0, 2, 6]
        with pytest.raises(TypeError, match="list"):
            get_global_ranks([0, 2])
        with pytest.raises(ValueError, match="not in this process group"):
            get_global_ranks(dist.new_group([1, 2]))
    finally:
        dist.destroy_process_group()


# -- modules ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.first.weight.mark = "kept"
        self.own = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.first.register_buffer("inner", torch.ones(3))


def test_empty_module_params_keeps_all_but_the_values():
    with torch.device("meta"):
        model = Tied()
    assert empty_module_params(model, device="cpu") is model
    assert model.own.device.type == "cpu"
    assert model.first.weight.is_meta, "recurse is off"
    empty_module_params(model, device="cpu", recurse=True)
    assert not any(p.is_meta for p in model.parameters())
    assert model.second.weight is model.first.weight
    assert model.first.weight.mark == "kept"
    assert [model.first.weight.requires_grad, model.first.bias.requires_grad] == [True, False]
    assert model.table.is_meta, "buffers are unchanged"
    assert empty_module_params(Tied(), device="meta").own.is_meta
    assert empty_module_params(Tied()).own.device.type == "cpu", "no device: where it is"


def test_move_buffers_to_device_leaves_parameters():
    model = Tied()
    assert move_buffers_to_device(model, "meta") is model
    assert (model.table.is_meta, model.first.inner.is_meta, model.own.is_meta) == (True, False, False)
    move_buffers_to_device(model, torch.device("meta"), recurse=True)
    assert model.first.inner.is_meta
    assert "table" not in model.state_dict(), "as persistent as before"
    with pytest.raises(ValueError, match=r"inner|table"):
        move_buffers_to_device(model, "cpu", recurse=True)


# -- checkpoint folders ----------------------------------------------------------------------------------------


def folders(tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    return tmp_path


def test_oldest_folders_go_by_the_last_number(tmp_path):
    folders(tmp_path, "llama7-900steps", "llama7-1000steps", "llama7-80steps", "logs")
    (tmp_path / "llama7-1steps").write_text("a file")
    (tmp_path / "llama7-2steps").symlink_to(tmp_path / "logs")
    removed = limit_num_subdirs(tmp_path, 2)
    assert removed == [str(tmp_path / "llama7-80steps")]
    left = {"llama7-900steps", "llama7-1000steps", "logs", "llama7-1steps", "llama7-2steps"}
    assert set(os.listdir(tmp_path)) == left
    assert limit_num_subdirs(str(tmp_path), 2) == []


def test_only_folders_that_match_count(tmp_path, fresh_logger):
    folders(tmp_path, "a-1", "a-2", "a-3", "b-0")
    limit_num_subdirs(tmp_path, 1, regex=r"a-[0-9]*", log=False)
    assert set(os.listdir(tmp_path)) == {"a-3", "b-0"}
    assert fresh_logger() == ""
    limit_num_subdirs(tmp_path, 1)
    assert str(tmp_path / "b-0") in fresh_logger()


def test_other_orders(tmp_path):
    folders(tmp_path, "x", "yy", "zzz")
    for age, name in enumerate(["yy", "zzz", "x"]):
        os.utime(tmp_path / name, (age, age))
    assert limit_num_subdirs(tmp_path, 2, sort_fn=None) == [str(tmp_path / "yy")]
    assert limit_num_subdirs(tmp_path, 1, sort_fn=lambda name: -len(name)) == [str(tmp_path / "zzz")]


def test_all_ranks_may_limit_concurrently(tmp_path):
    names = [f"llama-{step}steps" for step in (2, 4, 6)]
    for round in range(5):
        root = tmp_path / str(round)
        for name in names:
            (root / name).mkdir(parents=True)
            for file in range(100):
                (root / name / f"__{file}.distcp").touch()
        with ThreadPoolExecutor(4) as ranks:
            found = list(ranks.map(lambda _: limit_num_subdirs(root, 1, regex=r"^.*\d+steps$"), range(4)))  # noqa: B023
        assert os.listdir(root) == names[2:]
        assert sorted(path for of_rank in found for path in of_rank) == [str(root / name) for name in names[:2]]


def test_a_checkpoint_directory_selects_its_siblings(tmp_path):
    regex = r"^.*\d+steps$"
    for inner in ("", "ep2-0"):
        root = tmp_path / f"run-9steps{inner}"
        for step in (2, 4, 6):
            folder = root / f"mixtral-{step}steps" / inner
            folder.mkdir(parents=True)
            (folder / ".metadata").touch()
        (root / "logs").mkdir()
        # An expert rank that wrote nothing, then the rank that did.
        assert limit_num_subdirs(root / "mixtral-6steps" / "ep2-1", 1, regex=regex) == []
        deleted = limit_num_subdirs(root / "mixtral-6steps" / inner, 1, regex=regex)
        assert deleted == [str(root / "mixtral-2steps"), str(root / "mixtral-4steps")]
        assert sorted(os.listdir(root)) == ["logs", "mixtral-6steps"]
        # A folder of checkpoints has no files of one, whatever its name is.
        assert limit_num_subdirs(root / "logs", 1, regex=regex) == []
    assert limit_num_subdirs(tmp_path / "nothing", 2) == []
    assert (tmp_path / "run-9steps").exists()


@pytest.mark.parametrize("regex", [None, r"^.*\d+steps$"])
def test_folders_of_an_interrupted_call_are_deleted_by_the_next_one(tmp_path, monkeypatch, regex):
    def interrupted(path):
        raise KeyboardInterrupt

    for step in (2, 4, 6):
        (tmp_path / f"llama-{step}steps" / "inner").mkdir(parents=True)
    (tmp_path / ".deleted.a_file").touch()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", interrupted)
        limit_num_subdirs(tmp_path, 2, regex=regex)
    (left,) = (name for name in os.listdir(tmp_path) if name.startswith(".deleted.llama-2steps."))
    for number in range(40):
        for file in range(50):
            (tmp_path / left / str(number)).mkdir(exist_ok=True)
            (tmp_path / left / str(number) / str(file)).touch()
    with ThreadPoolExecutor(4) as ranks:
        found = list(ranks.map(lambda _: limit_num_subdirs(tmp_path, 2, regex=regex), range(4)))
    assert found == [[]] * 4
    assert sorted(os.listdir(tmp_path)) == [".deleted.a_file", "llama-4steps", "llama-6steps"]


def test_a_checkpoint_interval_covers_writing_and_overhead():
    assert _Interval().interval == 0
    found = compute_auto_checkpoint_interval([1.0, 1.0], [1.5, 1.3], [0.1, 0.2], [2.0, 6.5])
    assert found == _Interval(7, 1.0, pytest.approx(0.4), 6.5)
    assert _Interval(**dataclasses.asdict(found)) == found
    assert compute_auto_checkpoint_interval([1.0], [3.0], [0.1], [0.5]).interval == 20
    assert compute_auto_checkpoint_interval([1.0], [0.9], [0.0], [0.5]).interval == 1
    with pytest.raises(ValueError, match="step_durations: expected positive"):
        compute_auto_checkpoint_interval([], [], [], [])


def test_invalid_arguments_raise_before_any_deletion(tmp_path):
    folders(tmp_path, "a-1", "a-2", "a-x")
    for n, error in ((0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError), (None, TypeError)):
        with pytest.raises(error, match="n is"):
            limit_num_subdirs(tmp_path, n)
    with pytest.raises(ValueError, match="regular expression"):
        limit_num_subdirs(tmp_path, 1, regex="(")
    with pytest.raises(ValueError, match="a-x"):
        limit_num_subdirs(tmp_path, 1, sort_fn=SORT_BY_LAST_INT, regex="a-")
    assert len(os.listdir(tmp_path)) == 3


# -- experts and context ---------------------------------------------------------------------------------------


def test_moe_config_holds_the_documented_defaults():
    config = MoEConfig()
    assert (config.smp_moe, config.random_seed, config.moe_load_balancing) == (True, 12345, "sinkhorn")
    assert (config.global_token_shuffle, config.moe_all_to_all_dispatcher) == (False, True)
    assert (config.moe_aux_loss_coeff, config.moe_z_loss_coeff) == (0.001, 0.001)
    assert MoEConfig(use_cpu_initialization=True, moe_aux_loss_coeff=0, moe_load_balancing="none").random_seed == 12345


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("smp_moe", 1, TypeError),
        ("random_seed", 1.5, TypeError),
        ("random_seed", True, TypeError),
        ("random_seed", -1, ValueError),
        ("moe_load_balancing", "fair", ValueError),
        ("moe_load_balancing", None, ValueError),
        ("moe_aux_loss_coeff", "0.1", TypeError),
        ("moe_aux_loss_coeff", -0.1, ValueError),
        ("moe_z_loss_coeff", float("nan"), ValueError),
    ],
)
def test_moe_config_refuses(name, value, error):
    with pytest.raises(error, match=name):
        MoEConfig(**{name: value})


def test_unsupported_features_raise_with_instructions():
    assert not any(isinstance(module, MoELayer) for module in Tied().modules())
    with pytest.raises(TypeError, match="is not made by hand"):
        MoELayer()
    setup_transformer_engine_cp_groups(Tied(), [0], None)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        setup_transformer_engine_cp_groups(Tied(), [0], dist.new_group([0]))
        with pytest.raises(ValueError, match=r"context parallelism over 2 ranks.*tsm.transform\(\) first"):
            setup_transformer_engine_cp_groups(Tied(), [0, 1], dist.new_group([0, 1]))
    finally:
        dist.destroy_process_group()
