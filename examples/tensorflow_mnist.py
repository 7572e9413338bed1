"""Digits with TensorFlow on several ranks, a loop of one's own:

    smddprun --nproc 4 python examples/tensorflow_mnist.py

The batch is the same however many ranks share it, and so are the losses: --losses writes them, --compare holds them
against those of another run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import digits
import smdistributed.dataparallel.tensorflow as sdp
import tensorflow as tf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=96, help="of all ranks together")
    parser.add_argument("--mnist", metavar="FILE", help="mnist.npz; else digits that are drawn")
    parser.add_argument("--losses", metavar="FILE", help="write them")
    parser.add_argument("--compare", metavar="FILE", help="hold them against these, to 1e-5")
    given = parser.parse_args()

    sdp.init()
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.build((None, 28, 28, 1))
    optimizer = tf.keras.optimizers.Adam(1e-3)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # One line: every rank begins with rank 0's values.
    sdp.broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def step(pictures: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(pictures, training=True))
        # Another: the gradients are all ranks'.
        tape = sdp.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return sdp.oob_allreduce(loss)

    if given.batch % sdp.size():
        parser.error(f"--batch {given.batch} is not divided by {sdp.size()} ranks")
    each = given.batch // sdp.size()
    pictures, labels = digits.load(given.steps * given.batch, given.mnist)
    losses = []
    for at in range(given.steps):
        begin = at * given.batch + sdp.rank() * each
        losses.append(float(step(pictures[begin : begin + each], labels[begin : begin + each])))
        if sdp.rank() == 0 and at % 20 == 19:
            print(f"step {at + 1}: loss {losses[-1]:.4f}", flush=True)
    status = 0
    if sdp.rank() == 0:
        status = report(losses, given, sdp.size())
    sdp.shutdown()
    return status


def report(losses: list[float], given: argparse.Namespace, ranks: int) -> int:
    if given.losses:
        Path(given.losses).write_text(json.dumps(losses))
    if given.compare:
        before = json.loads(Path(given.compare).read_text())
        apart = max(abs(one - other) for one, other in zip(losses, before))
        print(f"{ranks} ranks: losses differ by {apart:.1e} at most", flush=True)
        return 1 if apart > 1e-5 else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
