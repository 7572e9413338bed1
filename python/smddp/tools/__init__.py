"""The commands `smddp` and `smddp-bench`. Only `bench_torch` imports torch."""
