"""Parts: callable modules on one stage. The part runs there, and the other stages receive a description."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smddp.modelparallel.pipeline import current, descriptions, mailbox
from smddp.modelparallel.pipeline.descriptions import Description, Input, Unsaid
from smddp.modelparallel.pipeline.microbatch import Microbatch
from smddp.modelparallel.pipeline.placed_operations import check_plain
from smddp.modelparallel.pipeline.placed_tensor import Form, Placed
from smddp.modelparallel.private_names import pytree
from smddp.modelparallel.state import state


class Part:
    """A module on its stage; takes the place of the module's forward.

    Args:
        number: the same on all stages.
        forward: the module's own.
        busy: called with "F" around the work, for the record of who was busy when.
    """

    def __init__(
        self, number: int, name: str, module: torch.nn.Module, owner: int, forward: Callable[..., Any], busy: Any
    ) -> None:
        self.number, self.name, self.owner = number, name or type(module).__name__, owner
        self.forward, self.module, self.busy = forward, module, busy
        self.known: dict[Any, Description] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies and pickles of a whole model have the forward of the module's class.
        whole = state.ranks is None or state.ranks.pp_size == 1
        return (getattr, (self.module, "forward")) if whole else super().__reduce_ex__(protocol)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mb = current.microbatch
        if mb is None:
            if state.ranks is not None and state.ranks.pp_size == 1:
                return self.forward(*args, **kwargs)
            raise RuntimeError(
                f"module {self.name} is on stage {self.owner}: call the model in a function decorated with @smp.step"
            )
        if mb.inside:  # a part inside a part
            return self.forward(*args, **kwargs)
        if mb.backward:
            if self.owner == mb.stage and not any(isinstance(x, Placed) for x in pytree.tree_leaves((args, kwargs))):
                return self.forward(*args, **kwargs)  # the checkpointing of a part around this one
            raise RuntimeError(
                f"module {self.name} runs again during the backward pass: torch.utils.checkpoint goes over modules of "
                "several stages. Use smp.set_activation_checkpointing(module) on each of them"
            )
        mb.module = self.name
        found = self._call(mb, args, kwargs)
        mb.module = ""  # after an error it stays, as that names it
        return found

    def _call(self, mb: Microbatch, args: Any, kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        signed = descriptions.signature(flat, spec, self.module.training)
        mb.program.note(self.name, [x.value.number if isinstance(x, Placed) else 0 for x in flat])
        for x in flat:
            if isinstance(x, Placed):
                mb.move(x, self.owner)
            elif isinstance(x, torch.Tensor):
                check_plain(mb, self.name, x)
            elif mb.changed and id(x) in mb.changed:
                self._refuse_changed(mb, x)
        here = self.owner == mb.stage
        description, results = self._run(mb, flat, spec, signed) if here else (self._receive(mb, signed), None)
        self._take_over(mb, flat, description)
        return self._wrap(mb, flat, description, results)

    def _refuse_changed(self, mb: Microbatch, x: Any) -> None:
        _, stage, module = mb.changed[id(x)]
        if stage != self.owner:
            raise ValueError(
                f"module {self.name} of stage {self.owner} gets a {type(x).__name__} that module {module} of stage "
                f"{stage} has changed, and each stage has its own: pass tensors, or put both on one stage (a cache of "
                "keys and values: use_cache=False)"
            )

    def _receive(self, mb: Microbatch, signed: Any) -> Description:
        known = self.known.get(signed)
        if known is None:
            key = (mailbox.DESCRIPTION, self.number, descriptions.digest(signed), 0)
            known = self.known[signed] = mb.wait(self.owner, key, keep=True)
        return known

    def _run(self, mb: Microbatch, flat: list[Any], spec: Any, signed: Any) -> tuple[Description, list[Any]]:
        args, kwargs = pytree.tree_unflatten([mb.own(x) if isinstance(x, Placed) else x for x in flat], spec)
        inputs = pytree.tree_leaves((args, kwargs))
        versions = [x._version if isinstance(x, torch.Tensor) and not x.is_inference() else None for x in inputs]
        objects = {i: descriptions.fingerprint(x) for i, x in enumerate(inputs) if descriptions.mutable(x)}
        mb.segment.parts.add(self.number)
        mb.inside += 1
        mb.streams.swap()
        try:
            with self.busy("F", mb.number):
                result = self.forward(*args, **kwargs)
        finally:
            mb.streams.swap()
            mb.inside -= 1
        description, leaves = descriptions.describe(result, inputs, versions, objects)
        known = self.known.get(signed)
        if known is None:
            self.known[signed] = description
            for peer in mb.mail.peers:
                key = (mailbox.DESCRIPTION, self.number, descriptions.digest(signed), 0)
                mb.mail.send(peer, key, mb.program.place(), description)
        elif not known.same(description):
            raise ValueError(
                f"module {self.name} returned {description}; for inputs of the same form it returned {known} before, "
                "and the other stages received that description. Move value-dependent code out of the module"
            )
        return description, leaves

    def _take_over(self, mb: Microbatch, flat: list[Any], description: Description) -> None:
        """Replace the arguments that the part wrote into by values of its stage."""
        for index in description.written:
            x = flat[index]
            if not isinstance(x, Placed):
                if mb.stages > 1:
                    raise RuntimeError(
                        f"module {self.name} writes into the plain tensor of shape {tuple(x.shape)} that it gets, "
                        "which other stages would not receive: return a new tensor instead"
                    )
                continue
            mb.written(x, mb.placed(x.form, self.owner, mb.own(x) if self.owner == mb.stage else None))
        for index in description.changed:
            x = flat[index]
            if mb.stages > 1 and id(x) not in mb.changed:
                mb.changed[id(x)] = (x, self.owner, self.name)

    def _wrap(self, mb: Microbatch, flat: list[Any], description: Description, results: list[Any] | None) -> Any:
        found: list[Any] = []
        for index, leaf in enumerate(description.leaves):
            if isinstance(leaf, Input):
                found.append(flat[leaf.index])
            elif isinstance(leaf, Form):
                found.append(mb.placed(leaf, self.owner, None if results is None else results[index]))
            elif isinstance(leaf, Unsaid):
                found.append(leaf if results is None else results[index])
            else:
                found.append(leaf)
        _, spec = pytree.tree_flatten(description.tree)
        return pytree.tree_unflatten(found, spec)
