"""Starting ranks, and what launchers leave in their environment: `smddprun` and its relatives. Without torch."""
