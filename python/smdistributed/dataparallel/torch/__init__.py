"""torch under its historic names: `torch_smddp` for today's scripts, `distributed` and `parallel` for older ones."""
