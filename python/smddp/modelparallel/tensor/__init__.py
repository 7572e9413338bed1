"""Tensor parallelism of SMP v1, over the plans and layers of `smddp.sagemaker.tensor_parallel`."""

__all__: list[str] = []
