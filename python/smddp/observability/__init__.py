"""Logs, metrics, dumps and status of running groups. Imports no torch and no other package of smddp."""

__all__: list[str] = []
