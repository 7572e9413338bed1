"""One step on one stage: one thread per microbatch, of which one runs at a time, and failure handling."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from smddp.modelparallel.pipeline import backward, current, failures, mailbox, program
from smddp.modelparallel.pipeline.backward import Sums
from smddp.modelparallel.pipeline.coroutines import Coroutines
from smddp.modelparallel.pipeline.failures import Aborted, Failure
from smddp.modelparallel.pipeline.mailbox import Mail
from smddp.modelparallel.pipeline.measurements import Measured
from smddp.modelparallel.pipeline.microbatch import Microbatch, Parted
from smddp.modelparallel.pipeline.placed_operations import check_plain
from smddp.modelparallel.pipeline.placed_tensor import Placed
from smddp.modelparallel.pipeline.rng_streams import Streams
from smddp.modelparallel.pipeline.schedule import BACKWARD, DONE, Plan
from smddp.modelparallel.pipeline.turns import Turns
from smddp.modelparallel.private_names import pytree

# Time before a waiting stage compares its program with the others; doubled after each comparison.
_ASK_SECONDS = 0.5
# Time that a stage waits for a peer with a different program to report the first different line.
_ANSWER_SECONDS = 10.0


class Runner:
    """Runs the microbatches of one step on one stage.

    Args:
        stage, stages: index of this stage, and number of stages.
        mail: an open mailbox.
        deadline: seconds after which a missing message is an error.
        divisor: divisor of the gradients of all microbatches.
        turns: common order of the tensor group's ranks.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        mail: Mail,
        plan: Plan,
        sums: Sums,
        measured: Measured,
        deadline: float,
        divisor: int,
        turns: Turns | None = None,
    ) -> None:
        self.stage, self.stages, self.mail, self.plan, self.sums = stage, stages, mail, plan, sums
        self.measured, self.deadline, self.divisor = measured, deadline, divisor
        self.turns = turns
        self.failure: Failure | None = None
        # True once the failure was sent to all stages.
        self.failure_sent = False
        self._microbatches: list[Microbatch] = []
        self._threads = Coroutines()
        self._results: list[Any] = []
        self._abort = self._over = False
        self.went_back = False
        mail.on_failed = self._failed_elsewhere
        mail.on_record = self._compare
        self._mails = [mail]
        if turns is not None:
            turns.mail.on_failed = self._failed_elsewhere
            self._mails.append(turns.mail)

    # ---- the threads ----

    def run(
        self, calls: list[Callable[[], Any]], environment: Callable[[], Any], seed: int, parts: dict[int, Any]
    ) -> list[Any]:
        """Run all calls and return their results. Raises the failure of any stage."""
        for number in range(len(calls)):
            self._microbatches.append(
                Microbatch(
                    number,
                    self.stage,
                    self.stages,
                    self.mail,
                    Streams(seed, number, self.stage),
                    lambda number=number: self._leave(number),  # type: ignore[misc]
                    parts,
                    self.turns is not None,
                )
            )
        self._results = [None] * len(calls)
        for number, call in enumerate(calls):
            self._threads.start(functools.partial(self._main, number, call, environment))
        try:
            self._schedule()
        except Exception as error:
            self.fail(error, "the schedule")
        finally:
            self._end_threads()
            with self.mail.changed:
                self._over = True
        self.measured.segments = len(self._microbatches[0].segments)
        self.measured.operations = len(self._microbatches[0].program.lines)
        if self.failure is not None:
            raise self.failure.error(self.stage)
        return self._results

    def _end_threads(self) -> None:
        """End the threads that are not done."""
        self._abort = self.failure is not None

        def at_work(number: int) -> None:  # cleanup code may use the current microbatch
            current.microbatch = self._microbatches[number]

        self._threads.end(at_work)
        current.microbatch = None

    def _leave(self, number: int) -> None:
        """Yield until the schedule chooses this microbatch again."""
        mb = self._microbatches[number]
        mb.streams.pause()
        self._threads.leave(number)
        if self._abort:
            raise Aborted
        mb.streams.resume()

    def _main(self, number: int, call: Callable[[], Any], environment: Callable[[], Any]) -> None:
        mb = self._microbatches[number]
        if self._abort:
            return
        mb.streams.resume()
        try:
            with environment():
                self._results[number] = self._microbatch(mb, call)
        except Aborted:
            return
        except Parted as parted:
            self._part(mb, parted.peer)
        except BaseException as error:
            self.fail(error, f"microbatch {number}", mb.module)
        mb.progress.phase = DONE

    def _microbatch(self, mb: Microbatch, call: Callable[[], Any]) -> Any:
        leaves, spec = pytree.tree_flatten(call())
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Placed):
                mb.offer(leaf, index)
            elif isinstance(leaf, torch.Tensor):
                check_plain(mb, "the step's result", leaf)
        mb.program.ended = True
        if mb.roots:
            self.went_back = True
            mb.progress.phase, mb.progress.segment = BACKWARD, len(mb.segments) - 1
            if mb.number == 0:
                self.sums.begin(mb.segments)
            backward.start(mb, self.divisor)
            for at in reversed(mb.segments):
                mb.progress.segment = at.index
                self._leave(mb.number)
                last = mb is self._microbatches[-1]
                on_caller = functools.partial(self._threads.on_caller, mb.number)
                backward.segment(mb, at, self.sums, self.measured.busy, last, on_caller)
        mb.progress.phase = DONE
        found = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Placed):
                found.append(mb.collect(leaf, index))
            else:
                found.append(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
        return pytree.tree_unflatten(found, spec)

    # ---- the schedule ----

    def _schedule(self) -> None:
        entries = [mb.progress for mb in self._microbatches]
        ended: set[int] = set()
        while len(ended) < len(entries) and self.failure is None:
            number = self._next(entries, ended)
            if number is None:
                return
            mb = self._microbatches[number]
            mb.progress.started = True
            live = sum(progress.started and progress.phase != DONE for progress in entries)
            self.measured.peak = max(self.measured.peak, live)
            current.microbatch = mb
            self._threads.run(number)
            current.microbatch = None
            if not self._under_way(number):
                ended.add(number)

    def _under_way(self, number: int) -> bool:
        mb = self._microbatches[number]
        return mb.progress.phase != DONE or mb.wants is not None

    def _next(self, entries: list[Any], ended: set[int]) -> int | None:
        """Wait for the next microbatch that can run; None after a failure."""
        begun, ask, limit = time.monotonic(), _ASK_SECONDS, self.deadline + self.mail.slack
        arrived = self.mail.arrived
        while True:
            with self.mail.changed:
                while True:
                    if self.failure is not None or self._broken() is not None:
                        break
                    for mb in self._microbatches:
                        mb.progress.waiting = mb.wants is not None and not self.mail.has(*mb.wants)
                    number = self._choose(entries) if self.turns is None else self._next_in_order(entries)
                    if number is not None:
                        return number
                    if not self.mail.changed.wait(min(ask, 0.25)) and time.monotonic() - begun > ask:
                        break
                    if self.mail.arrived != arrived:
                        begun, ask, arrived = time.monotonic(), _ASK_SECONDS, self.mail.arrived
            broken = self._broken()
            if self.failure is None and broken is not None:
                self.fail(broken, "messages between stages")
            if self.failure is not None:
                return None
            ask = min(2 * ask, limit)
            self._ask()
            if time.monotonic() - begun > limit:
                raise TimeoutError(f"no message arrived for {self.deadline:g} s; waiting for {self._waits()}")

    def _choose(self, entries: list[Any]) -> int | None:
        # Collecting a result that has arrived ends a microbatch, so it comes first.
        for mb in self._microbatches:
            if mb.progress.phase == DONE and mb.wants is not None and not mb.progress.waiting:
                return mb.number
        chosen = self.plan.choose(entries)
        return None if chosen is None else chosen.number

    def _next_in_order(self, entries: list[Any]) -> int | None:
        assert self.turns is not None
        return self.turns.next(lambda: self._choose(entries), lambda number: not entries[number].waiting)

    def _broken(self) -> Exception | None:
        return next((mail.broken for mail in self._mails if mail.broken is not None), None)

    def _waits(self) -> str:
        """Return the pending messages, for error messages."""
        kinds = {mailbox.FORWARD: "a tensor", mailbox.BACKWARD: "a gradient", mailbox.RESULT: "a result"}
        found = []
        for mb in self._microbatches:
            if mb.wants is not None:
                peer, key = mb.wants
                line = f", at {program.at(mb.program.lines[-1])}" if mb.program.lines else ""
                what = kinds.get(key[0], "the description of a module's results")
                found.append(f"{what} of stage {peer} (microbatch {mb.number}{line})")
        return "; ".join(found) or "another stage"

    # ---- programs that part ----

    def _ask(self) -> None:
        """Send the record of this stage to the stages that it waits for."""
        for mb in self._microbatches:
            if mb.wants is not None:
                self._show(mb, mb.wants[0])

    def _show(self, mb: Microbatch, peer: int) -> None:
        record = (list(mb.program.lines), mb.program.ended)
        self.mail.send(peer, (mailbox.RECORD, mb.number, 0, 0), (0, 0), record)

    def _compare(self, peer: int, number: int, record: Any) -> None:
        """Compare the program of a waiting stage, on a receiver thread. Reports a difference to all stages."""
        if number >= len(self._microbatches):
            return
        mine = self._microbatches[number].program
        found = program.parting(list(mine.lines), mine.ended, *record)
        if found is not None:
            line, own, other = found
            error = RuntimeError(
                f"the stages run different programs from line {line} of the step on: stage {self.stage} has {own}, "
                f"stage {peer} has {other}. All stages run the same step function: no branch of it may depend on the "
                "rank, nor on data that only one stage has"
            )
            self.fail(error, f"microbatch {number}, module code between parts")

    def _part(self, mb: Microbatch, peer: int) -> None:
        """Handle a message from a different line: its sender reports the first difference, or else this stage does."""
        self._show(mb, peer)
        until = time.monotonic() + min(_ANSWER_SECONDS, self.deadline)
        with self.mail.changed:
            while self.failure is None and self._broken() is None and time.monotonic() < until:
                self.mail.changed.wait(0.1)
        if self.failure is None:
            line = program.at(mb.program.lines[-1]) if mb.program.lines else "its beginning"
            error = RuntimeError(f"the program of stage {peer} differs from this one's up to {line}")
            self.fail(error, f"microbatch {mb.number}")

    # ---- failures ----

    def fail(self, error: BaseException, place: str, module: str = "") -> None:
        """Fail the step and report it to all stages. Only the first failure is reported."""
        where = f"{place}, stage {self.stage}{f', module {module}' if module else ''}"
        with self.mail.changed:
            if self.failure is not None:
                return
            self.failure = failures.of(error, self.stage, where)
            self.mail.changed.notify_all()
        self._send_failure()
        with self.mail.changed:
            self.failure_sent = True
            self.mail.changed.notify_all()

    def _send_failure(self) -> None:
        for mail in self._mails:
            for peer in mail.peers:
                with contextlib.suppress(Exception):
                    mail.send(peer, (mailbox.FAILED, 0, 0, 0), (0, 0), self.failure)

    def _failed_elsewhere(self, failure: Failure) -> None:
        """Record the failure of a peer, on a receiver thread that holds the lock of the mailbox."""
        if self.failure is None:
            self.failure = failure
            if self.turns is not None and not self._over:
                # Forward it to ranks that do not exchange messages with the failed rank.
                self._send_failure()
            self.failure_sent = True
