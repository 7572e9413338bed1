"""The checks, by family. Importing this registers them; the report has them in the order of these lines."""

# isort: off
from smddp.doctor.checks import ranks as ranks
from smddp.doctor.checks import software as software
from smddp.doctor.checks import sharing as sharing
from smddp.doctor.checks import limits as limits
from smddp.doctor.checks import memory as memory
from smddp.doctor.checks import network as network
from smddp.doctor.checks import devices as devices
from smddp.doctor.checks import group as group
from smddp.doctor.checks import pairs as pairs
