"""Messages between the stages of a pipeline during a step.

One thread per peer receives into a mailbox while a step runs, and ends with the peer's last message of that step: no
thread waits between steps, or at exit. Each message is a header of fixed size and at most one payload. Every one has a
tag of its own, as gloo keeps no order within one.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
]
_HEADER = 24
_NOTHING, _OBJECT = -1, -2

# Kinds of messages. A key is (kind, microbatch, number, second number).
FORWARD, BACKWARD, DESCRIPTION, RESULT, RECORD, FAILED, DONE, END, ALIVE, TURN = range(10)
# How often a stage says that it is there, in parts of the deadline: a receiver that hears nothing fails.
_BEATS = 4
_SLACK_SECONDS = 0.5
# How long a step that failed waits for the others to end it, where the deadline has passed.
_GRACE_SECONDS = 10.0
Key = tuple[int, int, int, int]


class Message:
    """What came: a tensor, an object or nothing, and how far the sender's program was."""

    __slots__ = ("place", "value")

    def __init__(self, value: Any, place: tuple[int, int]) -> None:
        self.value, self.place = value, place


class Mail:
    """One stage's messages to and from the others.

    Args:
        stage: this process's own.
        ranks: the stages' global ranks.
        group: for these messages alone.
    """

    def __init__(self, stage: int, ranks: list[int], group: dist.ProcessGroup) -> None:
        self.stage, self.ranks, self.group = stage, ranks, group
        self.peers = [peer for peer in range(len(ranks)) if peer != stage]
        self.changed = threading.Condition()
        self.broken: Exception | None = None
        self.arrived = 0
        # Tensors sent and their bytes, by peer: what crosses between stages can be counted.
        self.tensors: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        # Called by a receiver: for a peer's record of its program, or its failure.
        self.on_record: Callable[[int, int, Any], None] = lambda peer, microbatch, record: None
        self.on_failed: Callable[[Any], None] = lambda failure: None
        self._box: dict[tuple[int, Key], Message] = {}
        self._sending = threading.Lock()
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._received: defaultdict[int, int] = defaultdict(int)
        self._under_way: list[tuple[Any, Any]] = []
        self._receivers: list[threading.Thread] = []
        self._deadline, self._last_received = 0.0, 0.0
        self._ended = threading.Event()
        self._beat: threading.Thread | None = None
        # The peers that wait for nothing more in this step.
        self._done: set[int] = set()

    def open(self, deadline: float) -> None:
        """Begin to receive. Every stage does at the beginning of a step. ``deadline``: seconds, the group's."""
        self._done = set()
        self._deadline, self._last_received = deadline, time.monotonic()
        self._ended.clear()
        if self.peers:
            self._beat = threading.Thread(target=self._send_heartbeats, name="smp mail heartbeat", daemon=True)
            self._beat.start()
        self._receivers = [
            threading.Thread(target=self._receive_loop, args=(peer,), name=f"smp mail from stage {peer}", daemon=True)
            for peer in self.peers
        ]
        for receiver in self._receivers:
            receiver.start()

    def close(self, failed: Callable[[], bool]) -> None:
        """Tell all that nothing more comes, take what they still send, and forget what nobody took.

        Before, all stages wait until none waits for anything: one that does may have to be told why it waits in vain.
        After a failure descriptions are forgotten, too: some stages may have them and some not.
        ``failed``: whether the step has failed and all have been told.
        """
        self._send_to_all(DONE)
        self._await_all(failed)
        self._ended.set()
        if self._beat is not None:
            self._beat.join()
        self._send_to_all(END)
        until = max(self._last_received + self._deadline, time.monotonic() + min(_GRACE_SECONDS, self._deadline))
        for receiver in self._receivers:
            receiver.join(max(0.0, until - time.monotonic()))
        late = [peer for peer, receiver in zip(self.peers, self._receivers) if receiver.is_alive()]
        if late:  # no other step can follow, so these threads may stay as they are
            self._break(self._timeout_error(late, "have not ended the step"))
        self._receivers = []
        while self._under_way and self.broken is None:
            try:
                self._under_way.pop()[1].wait()
            except Exception as error:
                self._break(error)
        kept = () if failed() else self._box.items()
        self._box = {key: message for key, message in kept if key[1][0] == DESCRIPTION}

    @property
    def slack(self) -> float:
        """How much longer than the deadline to wait for a message: of a stage that is dead or stopped the group, whose
        last heartbeat may be as late, tells more."""
        return self._deadline / _BEATS + _SLACK_SECONDS

    def _await_all(self, failed: Callable[[], bool]) -> None:
        """Wait until all have said that they are done, as long as something comes within the deadline."""
        with self.changed:
            begun = time.monotonic()
            while not (failed() or self.broken is not None or len(self._done) == len(self.peers)):
                left = max(self._last_received, begun) + self._deadline + self.slack - time.monotonic()
                if left <= 0:
                    self._break(self._timeout_error(sorted(set(self.peers) - self._done), "are not done"))
                else:
                    self.changed.wait(left)

    def _timeout_error(self, stages: list[int], what: str) -> TimeoutError:
        ranks = [self.ranks[stage] for stage in stages]
        return TimeoutError(
            f"nothing came for {self._deadline:g} s, the group's timeout, and stages {stages} (ranks {ranks}) {what}"
        )

    def _send_heartbeats(self) -> None:
        """A step may take longer than the deadline, and two stages may have nothing to tell each other in it."""
        while not self._ended.wait(self._deadline / _BEATS):
            self._send_to_all(ALIVE)

    def _send_to_all(self, kind: int) -> None:
        for peer in self.peers:
            try:
                self.send(peer, (kind, 0, 0, 0), (0, 0))
            except Exception as error:
                self._break(error)

    def _break(self, error: Exception) -> None:
        with self.changed:
            if self.broken is None:
                self.broken = error
            self.changed.notify_all()

    # ---- sending ----

    def send(self, peer: int, key: Key, place: tuple[int, int], value: Any = None) -> None:
        """Send a tensor, an object or nothing to a stage. Returns at once."""
        payload, code, shape = self._packed(value)
        header = torch.zeros(_HEADER, dtype=torch.int64)
        words = [*key, *place, code, len(shape), *shape]
        device = isinstance(value, torch.Tensor) and not value.is_cpu
        header[: len(words)] = torch.tensor(words)
        header[-1] = int(device)
        with self._sending:
            number = self._sent[peer] = self._sent[peer] + 2
            to = self.ranks[peer]
            self._under_way.append((header, dist.isend(header, to, group=self.group, tag=number)))
            if payload is not None:
                self._under_way.append((payload, dist.isend(payload, to, group=self.group, tag=number + 1)))
            if isinstance(value, torch.Tensor):
                self.tensors[peer] += 1
                self.bytes[peer] += value.numel() * value.element_size()
            if len(self._under_way) > 256:
                self._under_way = [pair for pair in self._under_way if not pair[1].is_completed()]

    def _packed(self, value: Any) -> tuple[torch.Tensor | None, int, tuple[int, ...]]:
        if value is None:
            return None, _NOTHING, ()
        if isinstance(value, torch.Tensor):
            if value.dim() > _HEADER - 9:
                raise ValueError(f"a tensor of {value.dim()} dimensions does not fit a message between stages")
            if value.dtype not in DTYPES:
                raise TypeError(f"a tensor of {value.dtype} cannot pass between stages")
            # A payload of device memory passes through the host.
            held = value.detach().cpu().contiguous()
            return (held if held.numel() else None), DTYPES.index(value.dtype), tuple(value.shape)
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        return packed, _OBJECT, (packed.numel(),)

    # ---- receiving ----

    def _receive_loop(self, peer: int) -> None:
        try:
            while True:
                header, payload = self._next(peer)
                key: Key = (header[0], header[1], header[2], header[3])
                if key[0] == END:
                    return
                if key[0] == ALIVE:
                    continue
                if key[0] == RECORD:
                    self.on_record(peer, key[1], payload)
                    continue
                with self.changed:
                    self.arrived += 1
                    self._last_received = time.monotonic()
                    if key[0] == DONE:
                        self._done.add(peer)
                    elif key[0] == FAILED:
                        self.on_failed(payload)
                    else:
                        self._box[peer, key] = Message(payload, (header[4], header[5]))
                    self.changed.notify_all()
        except Exception as error:
            self._break(error)

    def _next(self, peer: int) -> tuple[list[int], Any]:
        number = self._received[peer] = self._received[peer] + 2
        words = torch.empty(_HEADER, dtype=torch.int64)
        dist.recv(words, self.ranks[peer], group=self.group, tag=number)
        header = words.tolist()
        code, shape = header[6], header[8 : 8 + header[7]]
        if code == _NOTHING:
            return header, None
        tensor = torch.empty(shape, dtype=torch.uint8 if code == _OBJECT else DTYPES[code])
        if tensor.numel():
            dist.recv(tensor, self.ranks[peer], group=self.group, tag=number + 1)
        if code == _OBJECT:
            return header, pickle.loads(tensor.numpy().tobytes())
        return header, tensor.to("cuda") if header[-1] else tensor

    def has(self, peer: int, key: Key) -> bool:
        """Whether that message is there."""
        return (peer, key) in self._box

    def take(self, peer: int, key: Key, keep: bool = False) -> Message:
        """That message, which is there; ``keep`` leaves it for others."""
        with self.changed:
            return self._box[peer, key] if keep else self._box.pop((peer, key))
