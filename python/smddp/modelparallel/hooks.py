"""Hooks of `DistributedModel`: after the cut, after a step; and methods of DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from smddp.modelparallel.state import state

_Hook = Callable[..., Any]


class Hooks:
    """Mixed into `DistributedModel`."""

    partitioned: bool

    def _make_hooks(self) -> None:
        self._after_cut: OrderedDict[int, _Hook] = OrderedDict()
        self._after_step: OrderedDict[int, _Hook] = OrderedDict()

    def register_post_partition_hook(self, hook: _Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` after the cut of the model, or now if it is already cut.

        Returns a handle whose ``remove()`` unregisters the hook.
        """
        if not self.partitioned:
            return _registered(self._after_cut, hook)
        hook(self, state.script_optimizer)
        return RemovableHandle(OrderedDict())

    def register_post_step_hook(self, hook: _Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` once after the next step; transformers loads the optimizer in it.

        Returns a handle whose ``remove()`` unregisters the hook.
        """
        return _registered(self._after_step, hook)

    def _call(self, hooks: OrderedDict[int, _Hook]) -> None:
        """Call ``hooks`` once, in the order of their registration."""
        calls = list(hooks.values())
        hooks.clear()
        for hook in calls:
            hook(self, state.script_optimizer)

    def join(self, *_args: Any, **_options: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the only replica may make any number of steps.

        Raises NotImplementedError for several replicas, whose steps average gradients together.
        """
        _, ranks = state.made("DistributedModel.join()")
        if ranks.rdp_size > 1:
            raise NotImplementedError(
                f"DistributedModel.join(): the {ranks.rdp_size} replicas must make the same number of steps. Give each "
                "of them as many batches, for example by DistributedSampler(dataset, drop_last=True)"
            )
        return contextlib.nullcontext()

    def register_comm_hook(self, _state: Any, hook: _Hook) -> None:
        """Raises NotImplementedError: gradients are averaged without torch's GradBucket."""
        raise NotImplementedError(
            f"DistributedModel.register_comm_hook({getattr(hook, '__name__', hook)}): gradients are averaged without "
            "torch's GradBucket. Change them between the step and optimizer.step()"
        )


def _registered(hooks: OrderedDict[int, _Hook], hook: _Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
