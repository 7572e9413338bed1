"""An unknown name is answered with a known one only if both are similar."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from smddp import text
from smddp.estimator import PyTorch, engines
from smddp.observability import info
from smddp.sagemaker import config as v2
from smddp.sagemaker.tensor_parallel import plan_entries
from smddp.smp import v1_keys as v1


def estimator(name: str) -> object:
    return PyTorch("a.py", image_uri="train", distribution={name: {"enabled": True}})


def strategy(name: str) -> object:
    return PyTorch("a.py", image_uri="train", distribution={"mpi": {"enabled": True, name: 1}})


def argument(name: str) -> object:
    return PyTorch("a.py", image_uri="train", **{name: 1})


def pattern(name: str) -> object:
    return plan_entries.expand(torch.nn.ModuleDict({"linear": torch.nn.ReLU()}), {name: "colwise"}, True)


#: A function that refuses an unknown name, and a misspelt name with the right one.
ENTRIES: dict[str, tuple[Callable[[str], object], str, str]] = {
    "SMP v1": (lambda name: v1.check({name: 2}, "init()"), "microbatchs", "microbatches"),
    "SMP v2": (lambda name: v2.check({name: 2}, "init()"), "hybrid_shard_degre", "hybrid_shard_degree"),
    "style": (lambda name: plan_entries.style_name(name, "a.*"), "colwis", "colwise"),
    "pattern": (pattern, "linaer", "linear"),
    "strategy": (estimator, "torch_distribute", "torch_distributed"),
    "key of a strategy": (strategy, "process_per_host", "processes_per_host"),
    "argument": (argument, "volume_sizes", "volume_size"),
    "engine": (lambda name: engines.find(name, None), "slrum", "slurm"),
    "engine option": (lambda name: engines.find("kubernetes", {name: 1}), "namespaces", "namespace"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_only_a_similar_name_is_suggested_and_the_sentence_is_whole(entry: str):
    call, misspelt, right = ENTRIES[entry]
    with pytest.raises((ValueError, TypeError)) as raised:
        call(misspelt)
    assert f"{misspelt!r}" in str(raised.value) and f"did you mean {right!r}?" in str(raised.value)
    for unrelated in ("zzzqqq", "FOO_BAR_BAZ", "x"):
        with pytest.raises((ValueError, TypeError)) as raised:
            call(unrelated)
        assert "did you mean" not in str(raised.value)
        # No two sentences without a mark between them.
        assert not re.search(r"'[\w.]+' [A-Z]\w+", str(raised.value)), raised.value


def test_a_prefix_that_all_names_share_is_not_compared(monkeypatch: pytest.MonkeyPatch):
    settings = dict.fromkeys(("SMDDP_TUNE", "SMDDP_PEER_TIMEOUT", "SMDDP_WIRE_FORMAT", "SMDDP_STAGING_BYTES"))
    for name in ("SMDDP_TIMEOUT", "SMDDP_FOO_BAR_BAZ", "SMDDP_STAGING_BYTE", "SMDDP_OLD"):
        monkeypatch.setenv(name, "1")
    found = info._unknown(settings, {"SMDDP_OLD": {}})
    assert found["SMDDP_TIMEOUT"] == "SMDDP_PEER_TIMEOUT" and found["SMDDP_STAGING_BYTE"] == "SMDDP_STAGING_BYTES"
    assert found["SMDDP_FOO_BAR_BAZ"] is None
    assert text.did_you_mean("tune", ["tune"]) == "; did you mean 'tune'?" and text.did_you_mean("", []) == ""
