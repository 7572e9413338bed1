"""Names and retention of checkpoint directories. `distributed.checkpoint` saves and loads."""

__all__: list[str] = []
