"""The assignment of modules to pipeline stages."""

__all__: list[str] = []
