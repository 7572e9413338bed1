"""The checks, by family. Importing this registers them; the report has them in the order of these lines."""

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
