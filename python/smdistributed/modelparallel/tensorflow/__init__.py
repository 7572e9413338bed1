"""TensorFlow's side of the original, which is not there."""

raise ImportError(
    "smdistributed.modelparallel.tensorflow is not there: the original served TensorFlow up to 2.6 by way of "
    "Optimizer.get_gradients, which the default optimizers of no TensorFlow for Python 3.10 and later have. "
    "smdistributed.dataparallel is data parallelism, and smdistributed.modelparallel.torch cuts torch's models."
)
