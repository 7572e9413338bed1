"""Keras callbacks for data parallel training: broadcast, metric averages, learning rate schedules and warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smddp.tensorflow import world
from smddp.tensorflow.all_reduce import all_reduce
from smddp.tensorflow.collectives import broadcast_variables

_Callback: Any = tf.keras.callbacks.Callback


class BroadcastGlobalVariablesCallback(_Callback):  # type: ignore[misc]
    """Broadcasts the model's and optimizer's variables from rank `root_rank` after the first batch, once all exist."""

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        with tf.device(self.device or None):
            broadcast_variables(self.model.variables, self.root_rank)
            optimizer = self.model.optimizer
            variables = optimizer.variables
            broadcast_variables(variables() if callable(variables) else variables, self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(_Callback):  # type: ignore[misc]
    """Averages an epoch's metrics over all ranks, for the callbacks after this one."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not logs:
            return
        # The order of metrics may differ between ranks.
        names = sorted(name for name, value in logs.items() if _is_number(value))
        values = [tf.convert_to_tensor(float(logs[name]), tf.float64) for name in names]
        with tf.device(self.device or None):
            for name, value in zip(names, all_reduce(values)):
                logs[name] = float(value)


class LearningRateScheduleCallback(_Callback):  # type: ignore[misc]
    """The learning rate is `initial_lr` times a multiplier, a number or a function of the epoch.

    start_epoch, end_epoch: range of epochs in effect. staircase: update once per epoch; otherwise on every batch with a
    fractional epoch, which needs steps_per_epoch if Keras does not know it. momentum_correction: scale the momentum
    with the rate on a batch that changes the rate (Goyal et al., "Accurate, Large Minibatch SGD", 2017).

    Raises ValueError if steps_per_epoch is needed and unknown.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._constant = not callable(multiplier)
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier
        self._epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.staircase or self._constant or self.steps_per_epoch is not None:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError(f"{type(self).__name__}: give steps_per_epoch: the number of batches is not known")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if self.staircase or self._constant:
            if batch == 0:
                self._adjust(float(self._epoch))
        else:
            assert self.steps_per_epoch is not None
            self._adjust(self._epoch + batch / self.steps_per_epoch)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            _set(self.model.optimizer, "momentum", self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = _get(self.model.optimizer, "learning_rate")

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, now = _get(optimizer, "learning_rate"), self.initial_lr * self.multiplier(epoch)
        _set(optimizer, "learning_rate", now)
        momentum = getattr(optimizer, "momentum", None)
        # A plain number is a constant of a compiled step.
        if self.momentum_correction and isinstance(momentum, tf.Variable) and before > 0:
            self._momentum = _get(optimizer, "momentum")
            _set(optimizer, "momentum", self._momentum * now / before)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate linearly from `initial_lr` / size to `initial_lr` over `warmup_epochs`.

    initial_lr: one rank's rate times the number of ranks. verbose: 1 prints the rate at the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        size = world.size()

        def multiplier(epoch: float) -> float:
            # The last batch of the warm-up uses the full rate.
            epoch += 1.0 / self.steps_per_epoch if self.steps_per_epoch else 0.0
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        assert self.end_epoch is not None
        if epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = _get(self.model.optimizer, "learning_rate")
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _get(optimizer: Any, name: str) -> float:
    value = getattr(optimizer, name)
    return float(value.numpy() if hasattr(value, "numpy") else value)


def _set(optimizer: Any, name: str, value: float) -> None:
    there = getattr(optimizer, name)
    if hasattr(there, "assign"):
        there.assign(value)
    else:
        setattr(optimizer, name, value)
