"""The commands `smddp` and `smddp-bench`.

Imports `estimator`, `launch` and `observability`, and no torch except in `bench_torch`.
"""

__all__: list[str] = []
