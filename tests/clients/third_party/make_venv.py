"""Makes .venvs/clients: the third-party clients, layered over the interpreter that runs this.

    .venv/bin/python tests/clients/third_party/make_venv.py [DIRECTORY]

The new environment sees the packages of the running one (torch, our wheel, pytest), so torch is not
downloaded a second time. DeepSpeed is installed without compiling any of its operators.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))


def main() -> int:
    directory = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, ".venvs", "clients")
    python = os.path.join(directory, "bin", "python")
    if not os.path.exists(python):
        venv.create(directory, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = os.path.join(directory, "lib", version, "site-packages")
    base = sysconfig.get_path("purelib")
    with open(os.path.join(packages, "base.pth"), "w") as layer:
        # addsitedir and not the bare path, so that the base's own .pth files (editable installs) count.
        print(f"import site; site.addsitedir({base!r})", file=layer)
    environment = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    install = [python, "-m", "pip", "install", "--quiet", "--no-build-isolation"]
    install += ["-r", os.path.join(HERE, "requirements-clients.txt")]
    return subprocess.call(install, env=environment)


if __name__ == "__main__":
    sys.exit(main())
