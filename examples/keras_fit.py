"""Digits with Keras's `fit` on several ranks:

smddprun --nproc 4 python examples/keras_fit.py
"""

from __future__ import annotations

import argparse

import digits
import smdistributed.dataparallel.tensorflow.keras as sdp
import tensorflow as tf
from smdistributed.dataparallel.tensorflow.keras import callbacks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="of each rank")
    parser.add_argument("--mnist", metavar="FILE", help="mnist.npz; else digits that are drawn")
    given = parser.parse_args()

    sdp.init()
    tf.keras.utils.set_random_seed(sdp.rank())
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    # As many times the rate as there are ranks, reached slowly.
    rate = 1e-3 * sdp.size()
    model.compile(
        optimizer=sdp.DistributedOptimizer(tf.keras.optimizers.Adam(rate)),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    pictures, labels = digits.load(7680, given.mnist)
    model.fit(
        pictures[sdp.rank() :: sdp.size()],
        labels[sdp.rank() :: sdp.size()],
        batch_size=given.batch,
        epochs=given.epochs,
        verbose=2 if sdp.rank() == 0 else 0,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.MetricAverageCallback(),
            callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=1),
        ],
    )
    sdp.shutdown()


if __name__ == "__main__":
    main()
