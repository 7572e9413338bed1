"""`smp.DistributedOptimizer`, loss scaling and mixed precision."""

__all__: list[str] = []
