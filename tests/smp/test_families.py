"""Every family with a plan of our own trains as one process: one of each layout in `make test`, all in
`make test-smp-full`."""

from __future__ import annotations

import itertools

import pytest
from smp_cases import family_models

NAMES = family_models.names()
# One of each layout; the others' rows in the table are theirs.
IN_CI = ["bert", "roberta", "opt", "t5", "bart", "vit", "gptj", "bloom", "gpt_neo", "stablelm", "mpt", "falcon_alibi"]
# Styles that few have: sinks of heads, latent attention, experts with biases, stored as (in, out), or that return what
# they get.
FEW = ["gpt_oss", "mimo_v2_flash", "deepseek_v2", "deepseek_v3", "deepseek_v3_whole_queries", "minicpm3"]
FEW = [name for name in [*FEW, "longcat_flash", "llama4"] if name in NAMES]
# Tied heads with biases, encoder and decoder, biases by head, fused heads; each with both engines in the full
# product.
UNDER_FSDP = [
    ("bert", 1, 2),
    ("t5", 2, 2),
    ("bart", 1, 2),
    ("bloom", 2, 2),
    ("gpt_oss", 1, 2),
    ("deepseek_v3", 2, 2),
    ("llama4", 1, 2),
]


def test_each_layout_trains_as_one_process(ranks):
    ranks.run("smp_cases.families", "all_train_as_one_process", seconds=180.0, names=IN_CI, degree=2)


@pytest.mark.parametrize("degree", [2, 4])
def test_what_few_have_trains_as_one_process(ranks, degree):
    ranks.run("smp_cases.families", "all_train_as_one_process", seconds=180.0, names=FEW, degree=degree)


def test_latent_attention_and_experts_keep_the_collective_budget(ranks):
    ranks.run("smp_cases.families", "latent_attention_and_experts_keep_the_collective_budget")


def test_they_train_as_one_process_under_fsdp(ranks):
    ranks.run("smp_cases.families", "all_train_under_fsdp", seconds=180.0, rows=UNDER_FSDP)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("degree", [2, 4])
def test_all_train_as_one_process(ranks, degree):
    ranks.run("smp_cases.families", "all_train_as_one_process", seconds=600.0, names=NAMES, degree=degree)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_train_as_one_process_under_fsdp(ranks):
    rows = list(itertools.product(NAMES, (1, 2), (2, 4)))
    ranks.run("smp_cases.families", "all_train_under_fsdp", seconds=1400.0, rows=rows)
