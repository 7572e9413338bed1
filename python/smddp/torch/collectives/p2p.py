"""Sends and receives between two ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from torch import Tensor, nn
from torch.distributed import Work

from smddp.torch import profiling
from smddp.torch.arguments import block, check_writable, one, readable, target_buffer
from smddp.torch.collectives.base import After, Base
from smddp.torch.compat import is_functional, profiler_enabled
from smddp.torch.dispatch import collective
from smddp.torch.dtypes import code_of
from smddp.torch.loopback import Mailbox
from smddp.torch.work import DoneWork, SmddpWork

_ANY_SOURCE = -1
_PLAIN_TYPES = (Tensor, nn.Parameter)


class Messages(Base):
    """Point-to-point messages."""

    _mailbox: Mailbox
    _timeout: timedelta
    _sent: dict[int, tuple[int, int]]  # by receiver: messages and their bytes
    _count_sent: AbstractContextManager[Any]  # guards `_sent`: several threads may send

    @collective("send")
    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Work:
        tensor = one(tensors, "send")
        if not (tensor.is_cpu and self._serves_cpu) and not self._on_cuda(tensor):
            return self._elsewhere(tensor).send(tensors, dstRank, tag)
        self._check_strided(tensor)
        self._check_peer("send", dstRank, tag)
        if self._estimate is not None:
            self._estimate.message(dstRank, tensor.nbytes)
            return self._note(DoneWork([tensor]))
        staged = not tensor.is_cpu
        source = self._device_side().outgoing(tensor) if staged else readable(tensor)
        if dstRank == self._rank:
            self._mailbox.send(source, tag)
            return self._note(DoneWork([tensor]))
        place, code = block(source), code_of(tensor.dtype)
        native = self._begin("send", source, self._comm.send, place, code, dstRank, tag, (source,), 0.0)
        with self._count_sent:
            messages, size = self._sent.get(dstRank, (0, 0))
            self._sent[dstRank] = messages + 1, size + source.nbytes
        if staged:
            return self._note(self._device_side().message(native, tensor, (), self._ranks))
        return self._note(SmddpWork(native, [tensor], (), self._ranks))

    @collective("recv")
    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Work:
        tensor = one(tensors, "recv")
        if not (tensor.is_cpu and self._serves_cpu) and not self._on_cuda(tensor):
            return self._elsewhere(tensor).recv(tensors, srcRank, tag)
        self._check_peer("recv", srcRank, tag)
        return self._receive(tensor, srcRank, tag)

    @collective("recvAnySource")
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        tensor = one(tensors, "recv")
        if not (tensor.is_cpu and self._serves_cpu) and not self._on_cuda(tensor):
            return self._elsewhere(tensor).recv_anysource(tensors, tag)
        self._check_peer("recv", 0, tag)
        return self._receive(tensor, _ANY_SOURCE, tag)

    # The method name in torch's C++ code.
    recvAnysource = recv_anysource

    def check_message(self, receives: bool, tensor: Tensor, peer: int, tag: int) -> None:
        """Raises the errors of `send` or `recv` for these arguments, before any data is sent."""
        if not (tensor.is_cpu and self._serves_cpu) and not self._on_cuda(tensor):
            self._elsewhere(tensor)
            return
        self._check_strided(tensor)
        self._check_peer("recv" if receives else "send", peer, tag)
        code_of(tensor.dtype)
        if type(tensor) in _PLAIN_TYPES and _has_address(tensor):  # the call unwraps other tensors
            block(tensor)
            if receives:
                check_writable(tensor)

    def _receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        self._check_strided(tensor)
        if self._estimate is not None:
            self._estimate.message(source, tensor.nbytes)
            return self._note(DoneWork([tensor]))
        staged = not tensor.is_cpu
        after: After = []
        if staged:
            buffer, upload = self._device_side().incoming(tensor)
            after.append(upload)
        else:
            buffer = target_buffer(tensor, after)
        if source == self._rank:
            native = self._mailbox.receive(buffer, tag, self._timeout.total_seconds())
        else:
            place, code = block(buffer), code_of(tensor.dtype)
            native = self._begin("recv", buffer, self._comm.recv, place, code, source, tag, (tensor, buffer), 0.0)
        if staged:
            return self._note(self._device_side().message(native, tensor, after, self._ranks))
        return self._note(SmddpWork(native, [tensor], after, self._ranks))

    def _begin(self, what: str, tensor: Tensor, begin: Callable[..., Any], *arguments: Any) -> Any:
        if profiling.seen and profiler_enabled():
            with profiling.message_range(self._comm, tensor, what):
                return begin(*arguments)
        return begin(*arguments)

    def _check_peer(self, what: str, peer: int, tag: int) -> None:
        if not 0 <= peer < self._size:
            raise ValueError(f"{what}: invalid rank {peer} in a group of {self._size} ranks")
        if not 0 <= tag < 2**63:
            raise ValueError(f"{what}: tags must not be negative, and below 2**63, got {tag}")


def _has_address(tensor: Tensor) -> bool:
    """Returns False for a wrapper of a torch.func transform."""
    if is_functional(tensor):
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True
