"""Registration of the checks. The order of these imports is the order in the report."""

# isort: off
from smddp.tools.doctor.checks import ranks as ranks
from smddp.tools.doctor.checks import software as software
from smddp.tools.doctor.checks import sharing as sharing
from smddp.tools.doctor.checks import limits as limits
from smddp.tools.doctor.checks import memory as memory
from smddp.tools.doctor.checks import network as network
from smddp.tools.doctor.checks import devices as devices
from smddp.tools.doctor.checks import group as group
from smddp.tools.doctor.checks import pairs as pairs
from smddp.tools.doctor.checks import links as links

__all__ = ["devices", "group", "limits", "links", "memory", "network", "pairs", "ranks", "sharing", "software"]
