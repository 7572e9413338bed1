"""Data parallel training with TensorFlow, on the same core as the torch backend.

Scripts import it by its historic name, `smdistributed.dataparallel.tensorflow`; docs/guides/tensorflow.md.
TensorFlow 2.12 and newer; importing this imports it.

Imports `arrays`.
"""

__all__: list[str] = []
