"""The class that scripts test a model's layers of experts against."""

from __future__ import annotations

from typing import Any

from torch import nn


class MoELayer(nn.Module):
    """A layer of experts of a model that `transform` was given with a `MoEConfig`.

    Raises TypeError when constructed: `transform` makes the model's own layers instances of it.
    """

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise TypeError(
            "MoELayer is not made by hand: tsm.transform(model, config=MoEConfig(...)) makes the model's own layers of "
            "experts instances of it"
        )
