"""SMP v1: any model as a pipeline over processes. Scripts import it as `smdistributed.modelparallel.torch`.

docs/smp-v1.md lists every symbol and key.

Imports `observability`, `sagemaker`, `smp` and `torch`.
"""

__all__: list[str] = []
