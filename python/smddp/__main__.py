"""`python -m smddp` is the command `smddp`."""

import sys

from smddp.tools.cli import main

sys.exit(main())
