"""Pictures of digits to learn from: MNIST's where its file is, else seven segments drawn with noise."""

from __future__ import annotations

import numpy as np

#: Of 28 x 28 pixels: rows and columns of the segments a to g.
_SEGMENTS = (
    (4, 5, 9, 19),
    (5, 14, 18, 19),
    (14, 24, 18, 19),
    (23, 24, 9, 19),
    (14, 24, 9, 10),
    (5, 14, 9, 10),
    (13, 14, 9, 19),
)
_DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


def load(count: int, file: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """`count` pictures of shape (28, 28, 1), float32 from 0 to 1, and their digits, the same on every rank.

    file: mnist.npz, as Keras keeps it.
    """
    if file is not None:
        with np.load(file) as found:
            return found["x_train"][:count, ..., None].astype("float32") / 255, found["y_train"][:count].astype("int64")
    generator = np.random.default_rng(0)
    digits = generator.integers(0, 10, count)
    pictures = generator.random((count, 28, 28, 1), dtype="float32") * 0.3
    for picture, digit, (down, right) in zip(pictures, digits, generator.integers(-3, 4, (count, 2))):
        for segment in _DIGITS[digit]:
            top, bottom, left, end = _SEGMENTS["abcdefg".index(segment)]
            picture[top + down : bottom + down, left + right : end + right] += 0.7
    return pictures, digits.astype("int64")
