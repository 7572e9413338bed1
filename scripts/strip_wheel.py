"""Removes debug information and symbols of data from the modules in a wheel.

Backtraces need names of functions only; the other symbols are 1 % of the wheel. Entries keep their order, dates and
modes.
"""

import base64
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Symbols without code.
_DATA = [f"--strip-symbol={pattern}" for pattern in ("GCC_except_table*", "*anon.*")]


def tool(machine: str) -> tuple[list[str], dict[str, str]]:
    """Returns a command that strips modules for a processor, and its environment.

    binutils' strip often supports this machine's processor only; Rust's objcopy supports all of them.
    """
    if machine == platform.machine():
        return ["strip"], {}
    asked = subprocess.run(["rustc", "--print", "sysroot"], check=True, stdout=subprocess.PIPE, text=True)
    sysroot = Path(asked.stdout.strip())
    found = sorted(sysroot.glob("lib/rustlib/*/bin/rust-objcopy"))
    if found:
        return [str(found[0])], {"LD_LIBRARY_PATH": str(sysroot / "lib")}
    strip = f"{machine}-linux-gnu-strip"
    if shutil.which(strip):
        return [strip], {}
    sys.exit(
        f"missing: a program that strips modules for {machine}: neither {strip} nor a rust-objcopy in {sysroot}\n"
        f"    install it with: apt-get install binutils-{machine.replace('_', '-')}-linux-gnu"
    )


def stripped(module: bytes, machine: str) -> bytes:
    command, environment = tool(machine)
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        Path(file.name).write_bytes(module)
        subprocess.run(
            [*command, "--strip-debug", "--wildcard", *_DATA, file.name], check=True, env={**os.environ, **environment}
        )
        return Path(file.name).read_bytes()


def main(path: Path) -> None:
    machine = re.search(r"linux_(?:\d+_\d+_)?(\w+)\.whl$", path.name)[1]
    with zipfile.ZipFile(path) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    changed = {info.filename: stripped(data, machine) for info, data in entries if info.filename.endswith(".so")}
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, data in entries:
            if info.filename.endswith(".dist-info/RECORD"):
                data = "".join(f"{row(line, changed)}\n" for line in data.decode().splitlines()).encode()
            archive.writestr(info, changed.get(info.filename, data), compresslevel=9)
    partial.replace(path)


def row(line: str, changed: dict[str, bytes]) -> str:
    name = line.split(",")[0]
    if name not in changed:
        return line
    digest = base64.urlsafe_b64encode(hashlib.sha256(changed[name]).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(changed[name])}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
