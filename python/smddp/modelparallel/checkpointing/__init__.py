"""State dicts and checkpoints of a partitioned model."""

__all__: list[str] = []
