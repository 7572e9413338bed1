"""Messages between the stages of a pipeline during a step.

One thread per peer receives into a mailbox during a step, and ends with the peer's last message of that step. No
thread waits between steps or at exit. A message is a header of fixed size and at most one payload. Each has a unique
tag, because gloo does not order messages with equal tags.
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
# Heartbeats per deadline: a receiver without a message within the deadline fails.
_BEATS = 4
_SLACK_SECONDS = 0.5
# Time that a failed step waits for the other stages to end it after the deadline.
_GRACE_SECONDS = 10.0
Key = tuple[int, int, int, int]


class Message:
    """Received message: a tensor, an object or nothing, and the position of the sender's program."""

    __slots__ = ("place", "value")

    def __init__(self, value: Any, place: tuple[int, int]) -> None:
        self.value, self.place = value, place


class Mail:
    """Messages between one stage and the others.

    Args:
        stage: stage of this process.
        ranks: global ranks of the stages.
        group: process group used only for these messages.
    """

    def __init__(self, stage: int, ranks: list[int], group: dist.ProcessGroup) -> None:
        self.stage, self.ranks, self.group = stage, ranks, group
        self.peers = [peer for peer in range(len(ranks)) if peer != stage]
        self.changed = threading.Condition()
        self.broken: Exception | None = None
        self.arrived = 0
        # Number and bytes of the tensors sent, by peer.
        self.tensors: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        # Called by a receiver thread for the program record or failure of a peer.
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
        # Peers that wait for no further message in this step.
        self._done: set[int] = set()

    def open(self, deadline: float) -> None:
        """Start receiving, at the start of a step on every stage. ``deadline``: the group's timeout, in seconds."""
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
        """Send the end of the step, receive the remaining messages, and discard unused ones.

        First, all stages wait until none waits for a message, because a waiting stage may need a failure report.
        After a failure, descriptions are discarded too, as only some stages may have received them.
        ``failed``: returns True once the step has failed and all stages have received the report.
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
        if late:  # no other step can follow, so these threads may keep running
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
        """Additional time to wait after the deadline, in seconds. It covers one heartbeat interval, so the group
        reports a dead or stopped stage first."""
        return self._deadline / _BEATS + _SLACK_SECONDS

    def _await_all(self, failed: Callable[[], bool]) -> None:
        """Wait until all stages have sent DONE. Fails if no message arrives within the deadline."""
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
            f"no message arrived for {self._deadline:g} s, the group's timeout, "
            f"and stages {stages} (ranks {ranks}) {what}"
        )

    def _send_heartbeats(self) -> None:
        """Send heartbeats: a step may exceed the deadline, and two stages may exchange no message in it."""
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
        """Send a tensor, an object or nothing to a stage, without blocking."""
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
            # A payload in device memory is copied to the host.
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
        """Return True if the message has arrived."""
        return (peer, key) in self._box

    def take(self, peer: int, key: Key, keep: bool = False) -> Message:
        """Return a message that has arrived; ``keep`` leaves it in the mailbox."""
        with self.changed:
            return self._box[peer, key] if keep else self._box.pop((peer, key))
