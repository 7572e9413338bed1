"""Calls on tensors and variables: values against numpy, shapes, types, gradients, errors."""

import numpy as np
import smdistributed.dataparallel.tensorflow as sdp
import tensorflow as tf

TYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint32", "complex64"]
SHAPES = [(), (1,), (7,), (0,), (3, 0, 2), (33, 5), (1000, 17)]


def mine(shape, dtype, rank=None):
    """Small whole numbers: exact in every type."""
    rank = sdp.rank() if rank is None else rank
    count = int(np.prod(shape))
    values = (np.arange(count).reshape(shape) * 3 + rank * 5) % 11 + 1
    return tf.cast(tf.constant(values), dtype)


def expected(shape, dtype, op):
    parts = np.stack([mine(shape, "float64", rank).numpy() for rank in range(sdp.size())])
    return {sdp.ReduceOp.SUM: parts.sum(0), sdp.ReduceOp.MIN: parts.min(0), sdp.ReduceOp.MAX: parts.max(0)}[op]


def reducing(*ops):
    return lambda *tensors: [sdp.oob_allreduce(tensor, op=op) for op in ops for tensor in tensors]


def both(call):
    """As written, and traced."""
    return call, tf.function(call)


def refused(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was raised: {words}")


def case_every_type_op_and_shape_is_reduced():
    for dtype in TYPES:
        ops = (sdp.ReduceOp.SUM, sdp.ReduceOp.MIN, sdp.ReduceOp.MAX)[: 1 if dtype == "complex64" else 3]
        tensors = [mine(shape, dtype) for shape in SHAPES]
        wanted = [expected(shape, dtype, op) for op in ops for shape in SHAPES]
        for call in both(reducing(*ops)):
            for tensor, result, values in zip(tensors * len(ops), call(*tensors), wanted, strict=True):
                assert result.dtype == dtype and result.shape == tensor.shape, (dtype, tensor.shape, result)
                wrong = np.count_nonzero(tf.cast(result, "float64").numpy() != values)
                assert wrong == 0, (dtype, tensor.shape, values, wrong)


def case_averages_are_those_of_numpy():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for call in both(lambda tensor: sdp.allreduce(tensor, param_index=0, num_params=1)):
            result = tf.cast(call(mine((33, 5), dtype)), "float64").numpy()
            want = expected((33, 5), dtype, sdp.ReduceOp.SUM) / sdp.size()
            np.testing.assert_allclose(result, want, rtol=1e-2 if "16" in dtype else 1e-6)
    assert sdp.allreduce(tensor=tf.ones(3)).numpy().tolist() == [1, 1, 1]


def case_float16_compression_restores_the_dtype():
    for dtype in ("float32", "float64"):
        result = sdp.allreduce(mine((7,), dtype), compression=sdp.Compression.fp16, op=sdp.ReduceOp.SUM)
        assert result.dtype == dtype
        assert result.numpy().tolist() == expected((7,), dtype, sdp.ReduceOp.SUM).tolist()
    assert sdp.allreduce(mine((7,), "int32"), compression=sdp.Compression.fp16, op=sdp.ReduceOp.SUM).dtype == tf.int32


def case_a_roots_tensor_reaches_all():
    root = sdp.size() - 1
    for dtype in [*TYPES, "bool"]:
        for call in both(lambda tensor: sdp.broadcast(tensor, root)):
            for shape in SHAPES:
                result = call(mine(shape, dtype))
                assert result.dtype == dtype and result.shape == shape
                assert np.all(result.numpy() == mine(shape, dtype, root).numpy()), (dtype, shape)


def case_variables_become_those_of_the_root():
    variables = [tf.Variable(mine(shape, dtype)) for shape in SHAPES for dtype in ("float32", "int64", "float16")]
    assert sdp.broadcast_variables(variables, root_rank=0) is None
    for variable in variables:
        assert np.all(variable.numpy() == mine(variable.shape, variable.dtype, 0).numpy())

    @tf.function
    def inside():
        sdp.broadcast_variables(variables, sdp.size() - 1)

    for variable in variables:
        variable.assign(mine(variable.shape, variable.dtype))
    inside()
    for variable in variables:
        assert np.all(variable.numpy() == mine(variable.shape, variable.dtype, sdp.size() - 1).numpy())


def case_gradients_flow_through():
    value = tf.constant([1.0, 2.0])
    for call in both(lambda value: grad(lambda value: sdp.allreduce(value, op=sdp.ReduceOp.SUM), value)):
        assert call(value).numpy().tolist() == [sum(range(1, sdp.size() + 1))] * 2
    for call in both(lambda value: grad(lambda value: sdp.broadcast(value, 0), value)):
        want = sum(range(1, sdp.size() + 1)) if sdp.rank() == 0 else 0
        assert call(value).numpy().tolist() == [want] * 2


def grad(call, value):
    with tf.GradientTape() as tape:
        tape.watch(value)
        result = call(value) * (sdp.rank() + 1.0)
    return tape.gradient(result, value)


def case_sparse_values_are_gathered_or_summed():
    rows = sdp.rank() + 1
    value = tf.IndexedSlices(tf.fill([rows, 2], sdp.rank() + 1.0), tf.range(rows), tf.constant([sdp.size() + 1, 2]))
    from smddp.tensorflow.all_reduce import all_reduce

    (kept,) = all_reduce([value], sdp.ReduceOp.SUM, sparse_as_dense=False)
    assert isinstance(kept, tf.IndexedSlices)
    assert kept.indices.numpy().tolist() == [row for rank in range(sdp.size()) for row in range(rank + 1)]
    (dense,) = all_reduce([value], sdp.ReduceOp.SUM, sparse_as_dense=True)
    assert np.all(dense.numpy() == tf.convert_to_tensor(kept).numpy())
    averaged = sdp.allreduce(value)
    assert np.allclose(averaged.numpy(), dense.numpy() / sdp.size())


def case_buckets_have_one_type_and_are_full_or_an_eighth():
    from smddp.tensorflow.all_reduce import buckets

    mib = 2**18
    tensors = [tf.zeros(mib), tf.zeros(mib, tf.float64), tf.zeros(mib), tf.zeros(3 * mib), tf.zeros(0)]
    assert buckets(list(enumerate(tensors)), 25 * 2**20) == [[0], [2], [3], [1], [4]]
    many = [(at, tf.zeros(mib)) for at in range(64)]
    assert [len(members) for members in buckets(many, 25 * 2**20)] == [8] * 8
    assert [len(members) for members in buckets(many, 5 * 2**20)] == [5] * 12 + [4]


def case_objects_go_between_ranks():
    comm = sdp.get_worker_comm()
    assert comm.bcast({"a": sdp.rank()}, root=0) == {"a": 0}
    assert comm.allgather(sdp.rank()) == list(range(sdp.size())) == list(range(comm.size))
    gathered = comm.gather("x" * sdp.rank())
    assert gathered == (["x" * rank for rank in range(sdp.size())] if sdp.rank() == 0 else None)
    comm.barrier()


def case_symbols_exist_and_invalid_arguments_raise():
    import smdistributed.dataparallel as parent
    import smdistributed.dataparallel.tensorflow.keras as of_keras
    from smdistributed.dataparallel.tensorflow.keras import callbacks

    assert sdp.__version__ == parent.__version__ == of_keras.__version__
    assert all(hasattr(module, name) for module in (sdp, of_keras, callbacks) for name in module.__all__)
    hosts = sdp.size() // sdp.local_size()
    assert 0 <= sdp.local_rank() < sdp.local_size() and sdp.local_size() * hosts == sdp.size() == of_keras.size()
    assert sdp.overlap(tensor := tf.ones(1)) is tensor
    refused(RuntimeError, "init() called more than once. smdistributed.dataparallel is already initialized.", sdp.init)
    refused(ValueError, "give one tensor", sdp.allreduce)
    refused(ValueError, "give one of ReduceOp.SUM", lambda: sdp.allreduce(tf.ones(1), op="sum"))
    refused(ValueError, f"root_rank is {sdp.size()}", lambda: sdp.broadcast(tf.ones(1), sdp.size()))
    refused(ValueError, "device_dense", lambda: sdp.DistributedGradientTape(tf.GradientTape(), device_dense="/gpu:0"))
    refused(RuntimeError, "graphs of TensorFlow 1", lambda: sdp.broadcast_global_variables(0))
    refused(TypeError, "unsupported optimizer", lambda: sdp.DistributedOptimizer(object()))
    refused(tf.errors.InvalidArgumentError, "cannot be sent", lambda: sdp.oob_allreduce(tf.constant("text")))
    refused(tf.errors.InvalidArgumentError, "average of bool", lambda: sdp.oob_allreduce(tf.constant(True)))
    # None of these calls started an operation: the ranks are still synchronized.
    assert sdp.oob_allreduce(tf.ones(1), op=sdp.ReduceOp.SUM).numpy()[0] == sdp.size()


def case_xla_compilation_raises_with_the_reason():
    @tf.function(jit_compile=True)
    def compiled(tensor):
        return sdp.oob_allreduce(tensor)

    refused(tf.errors.InvalidArgumentError, "jit_compile=False", lambda: compiled(tf.ones(3)))


def case_a_graph_of_tensorflow_1_runs_too():
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", initializer=float(sdp.rank()))
        total = sdp.oob_allreduce(tf.constant([1.0, 2.0]) * (sdp.rank() + 1), op=sdp.ReduceOp.SUM)
        optimizer = sdp.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        step = optimizer.minimize((variable - sdp.rank()) ** 2 / 2)
        hook = sdp.BroadcastGlobalVariablesHook(0)
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert session.run(variable) == 0
            ranks = sum(range(1, sdp.size() + 1))
            assert session.run(total).tolist() == [ranks, 2 * ranks]
            session.run(step)
            assert np.isclose(session.run(variable), (sdp.size() - 1) / 2)


def case_another_group_after_shutdown():
    sdp.shutdown()
    refused(ValueError, "call init() first", sdp.rank)
    refused(ValueError, "call init() first", lambda: sdp.allreduce(tf.ones(1)))
    sdp.init(timeout=60)
    assert sdp.oob_allreduce(tf.ones(2), op=sdp.ReduceOp.SUM).numpy().tolist() == [sdp.size()] * 2
