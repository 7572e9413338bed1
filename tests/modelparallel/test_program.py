"""Comparison of programs, and the split of a batch."""

from __future__ import annotations

import pytest
import torch
from smddp.modelparallel.pipeline import microbatching
from smddp.modelparallel.pipeline.program import Program, parting


def programs(*of):
    made = []
    for names in of:
        program = Program()
        for name in names:
            program.note(name, [1])
        made.append(program)
    return made


def test_the_first_differing_line_is_reported_for_both_programs():
    one, other = programs("abcd", "abxd")
    number, mine, theirs = parting(one.lines, True, other.lines, True)
    assert number == 2
    assert mine.startswith("c at ") and "test_program.py" in mine and theirs.startswith("x at ")


def test_a_slower_program_is_not_reported_as_different():
    one, other = programs("abcd", "ab")
    assert parting(one.lines, True, other.lines, False) is None
    number, mine, theirs = parting(one.lines, False, other.lines, True)
    assert (number, theirs) == (2, "the end of the step") and mine.startswith("c at ")
    number, mine, theirs = parting(other.lines, True, one.lines, False)
    assert (number, mine) == (2, "the end of the step") and theirs.startswith("c at ")


def test_a_batch_that_does_not_divide_is_named_with_its_size():
    with pytest.raises(ValueError, match=r"x\['a'\] has 7 elements along axis 0, which 2 microbatches do not divide"):
        microbatching.split({"a": torch.zeros(7)}, 2, 0, "x")
    with pytest.raises(ValueError, match="has no axis 3"):
        microbatching.split(torch.zeros(4, 4), 2, 3, "x")


def test_containers_are_split_along_their_own_axes():
    value = {"a": torch.arange(8).reshape(2, 4), "b": [torch.arange(4), torch.tensor(1.0), "text"]}
    parts = microbatching.split(value, 2, {"a": 1}, "x")
    assert parts[1]["a"].tolist() == [[2, 3], [6, 7]]
    assert parts[1]["b"][0].tolist() == [2, 3] and parts[1]["b"][2] == "text"


def test_results_keep_their_containers():
    found = microbatching.joined([{"loss": torch.tensor(float(n)), "n": n} for n in range(4)])
    assert found["loss"].reduce_mean() == 1.5 and found["loss"].reduce_sum() == 6.0 and found["n"] == [0, 1, 2, 3]
    assert found["loss"].stack().tolist() == found["loss"].concat().tolist() == [0.0, 1.0, 2.0, 3.0]
