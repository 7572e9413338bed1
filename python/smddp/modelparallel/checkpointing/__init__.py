"""State dicts and checkpoints of a partitioned model."""
