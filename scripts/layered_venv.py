"""Makes a virtual environment that sees the packages of the interpreter which runs this, and adds some of its own.

    .venv/bin/python scripts/layered_venv.py DIRECTORY PIP_ARGUMENT...

What the running environment holds (torch, our wheel, pytest) is not downloaded a second time; what is installed into
the new one comes first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv


def main() -> int:
    directory, *wanted = sys.argv[1:]
    python = os.path.join(directory, "bin", "python")
    if not os.path.exists(python):
        venv.create(directory, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = os.path.join(directory, "lib", version, "site-packages")
    base = sysconfig.get_path("purelib")
    with open(os.path.join(packages, "base.pth"), "w") as layer:
        # addsitedir and not the bare path, so that the base's own .pth files (editable installs) count.
        print(f"import site; site.addsitedir({base!r})", file=layer)
    return subprocess.call([python, "-m", "pip", "install", "--quiet", *wanted])


if __name__ == "__main__":
    sys.exit(main())
