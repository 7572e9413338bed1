"""`Model.fit` with Keras's callbacks."""

import numpy as np
import smdistributed.dataparallel.tensorflow as sdp
import tensorflow as tf
from smdistributed.dataparallel.tensorflow.keras import callbacks

from cases.training import BATCH, STEPS, model, shard, weights


def data():
    generator = np.random.default_rng(3)
    inputs = generator.standard_normal((STEPS, BATCH, 5)).astype("float32")
    return inputs, inputs.sum(-1, keepdims=True).astype("float32")


def fitted(made, optimizer, inputs, targets, batch, used=(), epochs=2):
    made.compile(optimizer=optimizer, loss="mse")
    history = made.fit(
        inputs.reshape(-1, 5),
        targets.reshape(-1, 1),
        batch_size=batch,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(used),
    )
    return history.history


def shards():
    inputs, targets = data()
    return np.stack([shard(each) for each in inputs]), np.stack([shard(each) for each in targets])


def case_fit_has_one_processs_losses():
    for make in (lambda: tf.keras.optimizers.SGD(0.01, momentum=0.9), lambda: tf.keras.optimizers.Adam(0.01)):
        want = model()
        plain = fitted(want, make(), *data(), BATCH)
        made = model()
        history = fitted(
            made,
            sdp.keras.DistributedOptimizer(make()),
            *shards(),
            BATCH // sdp.size(),
            [callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback()],
        )
        np.testing.assert_allclose(history["loss"], plain["loss"], atol=1e-5, rtol=1e-4)
        np.testing.assert_allclose(weights(made), weights(want), atol=1e-5, rtol=1e-4)
        assert len(set(sdp.get_worker_comm().allgather(weights(made).tobytes()))) == 1


def case_different_initial_values_are_replaced_by_rank_0s():
    made = model(seed=sdp.rank())
    fitted(
        made,
        sdp.DistributedOptimizer(tf.keras.optimizers.Adam(0.01)),
        *shards(),
        BATCH // sdp.size(),
        [callbacks.BroadcastGlobalVariablesCallback(0)],
        epochs=1,
    )
    assert len(set(sdp.get_worker_comm().allgather(weights(made).tobytes()))) == 1
    everyones = sdp.get_worker_comm().allgather(int(made.optimizer.iterations))
    assert everyones == [STEPS] * sdp.size()


class Rates(tf.keras.callbacks.Callback):
    """Records the learning rate at each batch's end."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate.numpy()))


def case_learning_rates_warm_up_and_follow_a_schedule():
    rates, initial = Rates(), 0.01 * sdp.size()
    used = [
        callbacks.LearningRateWarmupCallback(initial_lr=initial, warmup_epochs=2, verbose=1),
        callbacks.LearningRateScheduleCallback(initial_lr=initial, multiplier=0.1, start_epoch=3),
        callbacks.LearningRateScheduleCallback(initial, lambda epoch: 2.0 - epoch, start_epoch=2, end_epoch=3),
        rates,
    ]
    optimizer = sdp.DistributedOptimizer(tf.keras.optimizers.SGD(initial, momentum=0.9))
    history = fitted(model(), optimizer, *shards(), BATCH // sdp.size(), used, epochs=4)
    first, second, third, fourth = (rates.seen[at * STEPS : (at + 1) * STEPS] for at in range(4))
    begin = [(initial / sdp.size()) * ((step + 1) / STEPS * (sdp.size() - 1) / 2 + 1) for step in range(2 * STEPS)]
    np.testing.assert_allclose(first + second, begin, rtol=1e-5)
    assert np.isclose(second[-1], initial)
    assert np.allclose(third, 0.0, atol=1e-9) and np.allclose(fourth, 0.1 * initial)
    if "lr" in history:
        assert np.isclose(history["lr"][-1], 0.1 * initial)
    assert np.isclose(getattr(optimizer.momentum, "numpy", lambda: optimizer.momentum)(), 0.9)


def case_metrics_are_the_ranks_average():
    logs = {"loss": float(sdp.rank()), "accuracy": np.float32(2 * sdp.rank()), "name": "x"}
    callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    mean = (sdp.size() - 1) / 2
    assert (logs["loss"], logs["accuracy"], logs["name"]) == (mean, 2 * mean, "x")


def case_a_saved_model_loads_and_continues_training():
    import tempfile
    from pathlib import Path

    made = model()
    fitted(made, sdp.DistributedOptimizer(tf.keras.optimizers.Adam(0.01)), *shards(), BATCH // sdp.size(), epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.keras")
        made.save(file)
        assert b"smddp" not in file.read_bytes()
        loaded = tf.keras.models.load_model(file)
    assert type(loaded.optimizer) is tf.keras.optimizers.Adam
    assert int(loaded.optimizer.iterations) == STEPS
    np.testing.assert_array_equal(weights(loaded), weights(made))
