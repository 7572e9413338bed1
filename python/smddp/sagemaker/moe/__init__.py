"""Mixture of experts: the configuration and the class that scripts name; `expert_parallel` does the work."""

__all__: list[str] = []
