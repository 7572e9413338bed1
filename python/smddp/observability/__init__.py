"""Logs, metrics, dumps and status of running groups. Imports no torch."""
