"""Pipelines on four ranks: every `case_*` of `pipeline_cases/`, run by one pool."""

from __future__ import annotations

from pathlib import Path

from ranks.cases import each_case


@each_case(Path(__file__).with_name("pipeline_cases"))
def test_case(ranks, module, function):
    ranks.run(f"pipeline_cases.{module}", function)
