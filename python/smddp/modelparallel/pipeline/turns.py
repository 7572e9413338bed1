"""The ranks of a tensor group take their pieces of work in one order.

Inside of shared layers they wait for each other, so all must work on the same microbatch. Which one is next depends
on what has arrived, which each sees at another time: the first rank of the group chooses, and the others follow. They
stop at the same places of the program to ask, which is wherever they might have to wait for another stage.
"""

from __future__ import annotations

from collections.abc import Callable

from smddp.modelparallel.pipeline.mailbox import TURN, Key, Mail


class Turns:
    """The order of one step on this rank.

    Args:
        mail: between the ranks of the tensor group, opened already.
    """

    def __init__(self, mail: Mail) -> None:
        self.mail = mail
        self._taken = 0

    def next(self, choose: Callable[[], int | None], ready: Callable[[int], bool]) -> int | None:
        """The microbatch that runs next, or None as long as that is not known or it cannot run yet.

        Args:
            choose: what the first rank chooses.
            ready: whether a microbatch has all that it waits for here.
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
