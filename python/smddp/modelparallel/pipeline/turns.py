"""Common order of work for the ranks of a tensor group.

Shared layers synchronize the ranks, so all must run the same microbatch. The choice depends on arrived messages, which
differ between ranks at any time: the first rank of the group chooses, and the others follow. They yield at the same
points of the program: wherever they might wait for another stage.
"""

from __future__ import annotations

from collections.abc import Callable

from smddp.modelparallel.pipeline.mailbox import TURN, Key, Mail


class Turns:
    """The order of one step on this rank.

    Args:
        mail: open mailbox between the ranks of the tensor group.
    """

    def __init__(self, mail: Mail) -> None:
        self.mail = mail
        self._taken = 0

    def next(self, choose: Callable[[], int | None], ready: Callable[[int], bool]) -> int | None:
        """Return the next microbatch, or None if it is unknown or cannot run yet.

        Args:
            choose: returns the choice of the first rank.
            ready: returns True if a microbatch has received its pending message on this rank.
        """
        key: Key = (TURN, self._taken, 0, 0)
        if self.mail.stage == 0:
            number = choose()
            if number is None:
                return None
            for peer in self.mail.peers:
                self.mail.send(peer, key, (number, 0))
        else:
            if not self.mail.has(0, key):
                return None
            number = self.mail.take(0, key, keep=True).place[0]
            if not ready(number):
                return None
            self.mail.take(0, key)
        self._taken += 1
        return number
