"""Ranks, objects, optimizer and checkpoints on four ranks: every `case_*` of `front_cases/`, run by one pool."""

from __future__ import annotations

from pathlib import Path

from ranks.cases import each_case


@each_case(Path(__file__).with_name("front_cases"))
def test_case(ranks, module, function, tmp_path):
    ranks.run(f"front_cases.{module}", function, directory=str(tmp_path))
