"""Initial values of transformers models whose script skips `PreTrainedModel.init_weights`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def initial_values() -> Iterator[None]:
    """Initializes and ties the models made inside, also where the script replaced `init_weights` by nothing.

    Published scripts replace it to start faster. The original's distributed layers draw their values by the
    configuration's `initializer_range`; here the layers of transformers do.
    """
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None or kind.init_weights.__module__ == kind.__module__:
        yield
        return
    script = kind.init_weights
    kind.init_weights = _init_weights
    try:
        yield
    finally:
        kind.init_weights = script


def _init_weights(model: Any) -> None:
    if hasattr(model, "initialize_weights"):
        model.initialize_weights()
    else:
        model.apply(model._init_weights)
    model.tie_weights()
