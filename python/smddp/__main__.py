"""`python -m smddp` is the command `smddp`."""

import sys

from smddp.cli import main

sys.exit(main())
