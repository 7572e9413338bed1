"""Threads as coroutines: exactly one of them or their caller runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Coroutines:
    """Threads by number. Each runs from `run` to its next `leave`, while the caller waits."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._go: list[threading.Semaphore] = []
        self._back = threading.Semaphore(0)
        self._task: Callable[[], None] | None = None

    def start(self, main: Callable[[], None]) -> None:
        """Start a thread, which waits until it is scheduled. Threads are numbered from 0 in order of creation."""
        number = len(self._threads)
        go = threading.Semaphore(0)
        self._go.append(go)

        def run() -> None:
            go.acquire()
            main()
            self._back.release()

        self._threads.append(threading.Thread(target=run, name=f"smp microbatch {number}"))
        self._threads[-1].start()

    def run(self, number: int) -> None:
        """Resume a thread until it yields or ends; called on the calling thread."""
        self._hand_over(number)
        while self._task is not None:
            task, self._task = self._task, None
            task()
            self._hand_over(number)

    def _hand_over(self, number: int) -> None:
        self._go[number].release()
        self._back.acquire()

    def leave(self, number: int) -> None:
        """Yield from a thread until it is scheduled again."""
        self._back.release()
        self._go[number].acquire()

    def on_caller(self, number: int, work: Callable[[], None]) -> None:
        """Run ``work`` on the calling thread, and raise its exception; called on a coroutine thread."""
        raised: list[BaseException] = []

        def task() -> None:
            try:
                work()
            except BaseException as error:
                raised.append(error)

        self._task = task
        self.leave(number)
        if raised:
            raise raised[0]

    def end(self, before: Callable[[int], None]) -> None:
        """Run all threads to their end, one at a time; calls ``before(number)`` before each."""
        for number, (thread, go) in enumerate(zip(self._threads, self._go)):
            before(number)
            go.release()
            thread.join()
