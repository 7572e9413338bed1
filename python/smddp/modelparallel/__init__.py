"""SMP v1: any model as a pipeline over processes. Scripts import it as `smdistributed.modelparallel.torch`.

docs/guides/smp-v1 describes its use.

Imports `observability`, `sagemaker`, `smp` and `torch`.
"""

__all__: list[str] = []
