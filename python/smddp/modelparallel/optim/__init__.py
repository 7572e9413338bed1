"""`smp.DistributedOptimizer`, loss scaling and mixed precision."""
