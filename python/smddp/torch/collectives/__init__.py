"""torch's collectives on the native core.

`SmddpCollectives` is a mixin that is independent of the torch class. It has every c10d method under all names that
torch 2.8 and later use. Arguments are checked before any data is sent, so a ValueError or TypeError leaves the group
unchanged.
"""

from smddp.torch.collectives.all_gather import Gathering
from smddp.torch.collectives.all_to_all import Exchanging
from smddp.torch.collectives.p2p import Messages
from smddp.torch.collectives.reduce import Reducing
from smddp.torch.collectives.rooted import Rooted

__all__ = ["SmddpCollectives"]


class SmddpCollectives(Gathering, Reducing, Rooted, Exchanging, Messages):
    """The collectives of one group. The class that uses it sets the attributes of `base.Base` and `Messages`."""
