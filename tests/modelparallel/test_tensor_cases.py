"""Tensor parallelism on four ranks, with stages and with replicas: every `case_*` of `tensor_cases/`."""

from __future__ import annotations

from pathlib import Path

from ranks.cases import each_case


@each_case(Path(__file__).with_name("tensor_cases"))
def test_case(ranks, module, function, tmp_path):
    ranks.run(f"tensor_cases.{module}", function, directory=str(tmp_path))
