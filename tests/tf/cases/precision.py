"""Mixed precision, accumulation and sparse gradients on shards against one process on the whole batch.

Under mixed_float16 one row of the last rank overflows in updates 0 and 3: all ranks skip these, as one process does.
"""

import numpy as np
import precision_cells
import smdistributed.dataparallel.tensorflow as sdp
import tensorflow as tf

UPDATES, ROWS, RATE = 6, 4, 0.01
OVERFLOWS = (0, 3)
Keras = tf.keras
LossScaleOptimizer = Keras.mixed_precision.LossScaleOptimizer
KERAS_3 = hasattr(Keras.optimizers.Optimizer, "apply")


def made_model(gradients):
    Keras.utils.set_random_seed(7)
    layers = Keras.layers
    if gradients == "dense":
        hidden = [layers.Input((5,)), layers.Dense(8, activation="tanh")]
    else:
        # Keras 3 overlooks an overflow in IndexedSlices: the layer behind them overflows, too.
        hidden = [layers.Input((3,), dtype="int32"), layers.Embedding(11, 4), layers.Flatten(), layers.Dense(4)]
    return Keras.Sequential([*hidden, layers.Dense(1, dtype="float32")])


def made_optimizer(name):
    if name == "SGD":
        return Keras.optimizers.SGD(RATE, momentum=0.9)
    return Keras.optimizers.legacy.Adam(RATE) if name == "legacy" else Keras.optimizers.Adam(RATE)


def data(cell):
    """Rows by update, pass, rank and row of a pass."""
    shape = (UPDATES, cell["passes"], sdp.size(), ROWS)
    generator = np.random.default_rng(3)
    if cell["gradients"] == "dense":
        inputs = generator.standard_normal((*shape, 5)).astype("float32") / 4
    else:
        inputs = generator.integers(0, 11, (*shape, 3)).astype("int32")
    targets = generator.standard_normal((*shape, 1)).astype("float32") / 4
    if cell["precision"] != "float32":
        for update in OVERFLOWS:
            targets[update, 0, -1, 0] = 1e6
    return inputs, targets


def batches(array, rank=None):
    """Every pass of one rank; or every update of one process."""
    if rank is None:
        return array.reshape(UPDATES, -1, array.shape[-1])
    return array[:, :, rank].reshape(-1, ROWS, array.shape[-1])


def with_dense_gradients(optimizer):
    """The same optimizer with IndexedSlices made dense: Keras 3's Adam treats repeated rows of these differently."""
    kind = type(optimizer)

    def dense(gradients):
        return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]

    class Dense(kind):
        if hasattr(kind, "apply"):

            def apply(self, grads, trainable_variables=None):
                return super().apply(dense(grads), trainable_variables)
        else:

            def apply_gradients(self, grads_and_vars, *more, **keywords):
                gradients, variables = zip(*grads_and_vars)
                return super().apply_gradients(list(zip(dense(gradients), variables)), *more, **keywords)

    optimizer.__class__ = Dense
    return optimizer


def wrapped(cell):
    """This rank's optimizer, in the cell's wrapping order."""
    optimizer = made_optimizer(cell["optimizer"])
    if cell["loop"] == "tape":
        return optimizer if cell["precision"] == "float32" else LossScaleOptimizer(optimizer)
    settings = {
        "sparse_as_dense": cell["gradients"] == "sparse_as_dense",
        "backward_passes_per_step": cell["passes"],
        "average_aggregated_gradients": True,
    }
    if cell["precision"] == "outside":
        return sdp.DistributedOptimizer(LossScaleOptimizer(optimizer), **settings)
    optimizer = sdp.DistributedOptimizer(optimizer, **settings)
    return LossScaleOptimizer(optimizer) if cell["precision"] == "inside" else optimizer


def plain(cell):
    """One process's optimizer."""
    optimizer = made_optimizer(cell["optimizer"])
    optimizer = optimizer if cell["precision"] == "float32" else LossScaleOptimizer(optimizer)
    return with_dense_gradients(optimizer) if cell["gradients"] == "sparse_as_dense" else optimizer


def trained(cell, optimizer, inputs, targets, tape_of=lambda tape: tape):
    """The model after a step on each batch."""
    model = made_model(cell["gradients"])
    if cell["loop"].endswith("fit"):
        eager = cell["loop"] == "eager_fit"
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=eager, jit_compile=False)
        rows = [array.reshape(-1, array.shape[-1]) for array in (inputs, targets)]
        model.fit(*rows, batch_size=inputs.shape[1], shuffle=False, verbose=0)
        return model, model.optimizer
    if hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
            scale = getattr(optimizer, "scale_loss", None) or getattr(optimizer, "get_scaled_loss", None)
            loss = scale(loss) if scale else loss
        gradients = tape_of(tape).gradient(loss, model.trainable_variables)
        if hasattr(optimizer, "get_unscaled_gradients"):
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    for pair in zip(inputs, targets):
        step(*map(tf.constant, pair))
    return model, optimizer


def scale_of(optimizer):
    return float(optimizer.dynamic_scale if KERAS_3 else optimizer.loss_scale)


def check(cell):
    if cell["optimizer"] == "legacy" and KERAS_3:
        return "no legacy optimizers in this Keras"
    half = cell["precision"] != "float32"
    Keras.mixed_precision.set_global_policy("mixed_float16" if half else "float32")
    inputs, targets = data(cell)
    want, want_optimizer = trained(cell, plain(cell), batches(inputs), batches(targets))

    def distributed(tape):
        return sdp.DistributedGradientTape(tape, sparse_as_dense=cell["gradients"] == "sparse_as_dense")

    rank = sdp.rank()
    tape_of = distributed if cell["loop"] == "tape" else lambda tape: tape
    model, optimizer = trained(cell, wrapped(cell), batches(inputs, rank), batches(targets, rank), tape_of)
    for variable, wanted in zip(model.trainable_variables, want.trainable_variables):
        found = variable.numpy()
        assert len(set(sdp.get_worker_comm().allgather(found.tobytes()))) == 1, f"{variable.name}: ranks differ"
        assert np.isfinite(found).all(), variable.name
        tolerance = 3e-3 if half else 2e-5
        np.testing.assert_allclose(found, wanted.numpy(), atol=tolerance, rtol=tolerance, err_msg=variable.name)
    assert int(optimizer.iterations) == int(want_optimizer.iterations)
    if half:
        assert scale_of(optimizer) == scale_of(want_optimizer) == 2.0 ** (15 - len(OVERFLOWS))
    return None


for _cell in precision_cells.product():
    globals()[f"case_{precision_cells.name(_cell)}"] = lambda cell=_cell: check(cell)
