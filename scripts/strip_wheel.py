"""Takes the debug information out of the modules in a wheel, and leaves the names of functions, for backtraces.

What a linker that knows --strip-debug would have done. Entries keep their order, dates and modes.
"""

import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def stripped(module: bytes) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        Path(file.name).write_bytes(module)
        subprocess.run(["strip", "--strip-debug", file.name], check=True)
        return Path(file.name).read_bytes()


def main(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    changed = {info.filename: stripped(data) for info, data in entries if info.filename.endswith(".so")}
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, data in entries:
            if info.filename.endswith(".dist-info/RECORD"):
                data = "".join(f"{row(line, changed)}\n" for line in data.decode().splitlines()).encode()
            archive.writestr(info, changed.get(info.filename, data))
    partial.replace(path)


def row(line: str, changed: dict[str, bytes]) -> str:
    name = line.split(",")[0]
    if name not in changed:
        return line
    digest = base64.urlsafe_b64encode(hashlib.sha256(changed[name]).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(changed[name])}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
