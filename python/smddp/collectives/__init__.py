"""torch's collectives on the native core.

`SmddpCollectives` is a mixin that does not know which torch class it serves. It has every c10d method under
all names that torch 2.5 and later use. Arguments are checked before anything moves, so a ValueError or a
TypeError leaves the group as it was.
"""

from smddp.collectives.exchanging import Exchanging
from smddp.collectives.gathering import Gathering
from smddp.collectives.messages import Messages
from smddp.collectives.reducing import Reducing
from smddp.collectives.rooted import Rooted

__all__ = ["SmddpCollectives"]


class SmddpCollectives(Gathering, Reducing, Rooted, Exchanging, Messages):
    """The collectives of one group. The class that uses it sets the attributes of `base.Base` and `Messages`."""
