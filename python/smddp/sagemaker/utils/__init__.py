"""Small helpers that training scripts import one by one."""

__all__: list[str] = []
