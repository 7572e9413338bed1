"""SMP parameters that a launcher passes to its ranks."""

from __future__ import annotations

import json
from typing import Any

#: Environment variable with the parameters, a JSON object.
LAUNCHER = "SM_HP_MP_PARAMETERS"


def read_json(text: str, source: str) -> Any:
    """Returns the parsed ``text``. Raises ValueError that names ``source`` for invalid JSON."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON ({error}): {text[:200]!r}") from None
