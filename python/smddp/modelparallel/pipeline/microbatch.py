"""State of one microbatch on one stage: program position, values and pending message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from smddp.modelparallel.pipeline import mailbox
from smddp.modelparallel.pipeline.placed_tensor import Form, Placed
from smddp.modelparallel.pipeline.program import Program
from smddp.modelparallel.pipeline.schedule import BACKWARD, MicrobatchProgress
from smddp.modelparallel.pipeline.values import Segment, Value, arrival, departure

if TYPE_CHECKING:
    from smddp.modelparallel.pipeline.mailbox import Key, Mail
    from smddp.modelparallel.pipeline.rng_streams import Streams


class Parted(Exception):
    """Raised if sender and receiver of a message are at different lines of the program."""

    def __init__(self, peer: int) -> None:
        self.peer = peer


class Microbatch:
    """A microbatch's state on this stage.

    Attributes:
        progress: state for the schedule.
        module: the running part, for error messages.
        inside: nesting depth of parts that run natively.
        wants: the (stage, key) of the message that it waits for.
        pause: called to wait for a message.
        parameters_of_parts: (name, stage) of each, by id.
        in_turns: pause wherever a message is needed, even if it is there: see `pipeline.turns`.
    """

    def __init__(
        self,
        number: int,
        stage: int,
        stages: int,
        mail: Mail,
        streams: Streams,
        pause: Callable[[], None],
        parameters_of_parts: dict[int, tuple[str, int]],
        in_turns: bool = False,
    ) -> None:
        self.number, self.stage, self.stages, self.mail = number, stage, stages, mail
        self.streams, self.pause, self.parameters_of_parts = streams, pause, parameters_of_parts
        self.in_turns = in_turns
        self.progress = MicrobatchProgress(number)
        self.program = Program()
        self.segments = [Segment(0)]
        self.segment = self.segments[0]
        self.roots: list[tuple[Any, Any]] = []
        self.parameters: dict[int, Placed] = {}
        self.module = ""
        self.inside = 0
        self.wants: tuple[int, Key] | None = None
        # Plain tensors that a placed value was added to: (tensor, what was done), by id.
        self.stale: dict[int, tuple[torch.Tensor, str]] = {}
        # Objects that a part has changed: (object, stage, module), by id.
        self.changed: dict[int, tuple[Any, int, str]] = {}
        self._numbers = 0
        self._fetched: dict[int, torch.Tensor] = {}
        # Forward messages sent to and taken from each stage: they come in the order of the program.
        self._out: Counter[int] = Counter()
        self._in: Counter[int] = Counter()

    @property
    def backward(self) -> bool:
        return self.progress.phase == BACKWARD

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def placed(self, form: Form, owner: int, tensor: torch.Tensor | None) -> Placed:
        """Return a new placed tensor; ``tensor`` is its value if this stage is the owner."""
        value = Value(self.next_number(), owner, form.gradient, tensor, None if tensor is None else self.segment)
        return Placed(form, value)

    # ---- messages ----

    def wait(self, peer: int, key: Key, keep: bool = False, check: bool = False) -> Any:
        """Wait for a message of a stage. ``check``: it must come from the same line of the program."""
        if self.in_turns or not self.mail.has(peer, key):
            self.wants = (peer, key)
            self.pause()
            self.wants = None
        message = self.mail.take(peer, key, keep)
        if check and message.place != self.program.place():
            raise Parted(peer)
        return message.value

    def say(self, peer: int, value: Any) -> None:
        """Send the next forward message to a stage."""
        number = self._out[peer] = self._out[peer] + 1
        self.mail.send(peer, (mailbox.FORWARD, self.number, number, 0), self.program.place(), value)

    def receive_description(self, peer: int) -> Any:
        """Receive the next forward message of a stage."""
        number = self._in[peer] = self._in[peer] + 1
        return self.wait(peer, (mailbox.FORWARD, self.number, number, 0), check=True)

    def say_all(self, value: Any) -> None:
        for peer in self.mail.peers:
            self.say(peer, value)

    # ---- values ----

    def own(self, x: Placed) -> torch.Tensor:
        """Return this stage's tensor of a placed tensor, as an input of the current segment."""
        value = x.value
        tensor, made = value.tensor, value.segment
        assert tensor is not None and made is not None, f"stage {self.stage} lacks {x}"
        if made is self.segment or not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        known = self.segment.cuts.get(value.number)
        if known is None:
            known, slot = arrival(tensor.detach())
            self.segment.cuts[value.number] = known
            made.exits.append((tensor, slot))
        return known

    def move(self, x: Placed, to: int) -> None:
        """Send ``x`` to stage ``to`` unless it has a copy. All stages call it at the same point of the program."""
        value = x.value
        if to in value.at:
            return
        value.at.add(to)
        if self.stage == value.owner:
            tensor, made = value.tensor, value.segment
            assert tensor is not None and made is not None
            if value.gradient:
                made.sends.append((departure(tensor), value.number, to))
                self.segment.closed = made.closed = True
            self.say(to, tensor)
        elif self.stage == to:
            if value.gradient and self.segment.closed:
                self.segment = Segment(len(self.segments))
                self.segments.append(self.segment)
            tensor = self.receive_description(value.owner)
            if value.gradient:
                tensor, slot = arrival(tensor)
                self.segment.arrivals.append((slot, value.number, value.owner))
            value.tensor, value.segment = tensor, self.segment

    def fetch(self, x: Placed) -> torch.Tensor:
        """Return the detached tensor on every stage."""
        number = x.value.number
        known = self._fetched.get(number)
        if known is None:
            if self.stage == x.value.owner:
                assert x.value.tensor is not None
                known = x.value.tensor.detach()
                self.say_all(known)
            else:
                known = self.receive_description(x.value.owner)
            self._fetched[number] = known
        return known

    def written(self, x: Placed, after: Placed) -> None:
        """Record a write into ``x``, which becomes ``after``; copies of aliases on other stages are invalidated."""
        family = x.value.family
        for value in sorted(family, key=lambda each: each.number):
            if value is not after.value and value is not x.value:
                value.number = self.next_number()
                value.at = {value.owner}
        after.value.family = family
        family.discard(x.value)
        family.add(after.value)
        x.form, x.value = after.form, after.value

    # ---- results ----

    def offer(self, x: Placed, index: int) -> None:
        """Send a result from its owner; the other stages receive it at the end with `collect`."""
        if self.stage == x.value.owner and x.value.number not in self._fetched:
            assert x.value.tensor is not None
            self._fetched[x.value.number] = x.value.tensor.detach()
            for peer in self.mail.peers:
                key = (mailbox.RESULT, self.number, index, 0)
                self.mail.send(peer, key, self.program.place(), self._fetched[x.value.number])

    def collect(self, x: Placed, index: int) -> torch.Tensor:
        known = self._fetched.get(x.value.number)
        if known is None:
            known = self.wait(x.value.owner, (mailbox.RESULT, self.number, index, 0), check=True)
            self._fetched[x.value.number] = known
        return known
