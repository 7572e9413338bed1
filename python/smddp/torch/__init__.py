"""The torch.distributed backend. Imports `observability`, `exit_hooks` and `arrays`."""
