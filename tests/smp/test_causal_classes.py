"""Every causal model class of the installed transformers is correct under tensor parallelism, or rejected."""

from __future__ import annotations

import pytest
from smp_cases import causal_classes

CLASSES = causal_classes.classes()
# Plans of transformers and of ours, experts, state-space layers, and some that are refused.
IN_CI = ["cohere", "glm4", "jamba", "olmo2", "phi3", "doge", "gpt_oss", "mamba"]


def test_some_classes_are_right_or_refused(ranks):
    kinds = [kind for kind in IN_CI if kind in CLASSES]
    ranks.run("smp_cases.causal_classes", "all_are_right_or_refused", seconds=180.0, kinds=kinds)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_class_is_right_or_refused(ranks):
    ranks.run("smp_cases.causal_classes", "all_are_right_or_refused", seconds=1400.0, kinds=list(CLASSES))
