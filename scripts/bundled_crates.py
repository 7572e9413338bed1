"""The crates that the wheel's native module is built from, as cargo resolves them for the platform it is built for.

`cargo tree` knows which features smddp-py itself asks for; `cargo metadata` would add what only tests and tools need.
"""

import functools
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "smddp-py"
TARGET = "x86_64-unknown-linux-gnu"

Key = tuple[str, str]


@dataclass(frozen=True)
class Crate:
    name: str
    version: str
    licence: str
    description: str
    repository: str | None
    folder: Path
    # Of this repository, and on no registry.
    ours: bool
    # Part of the module itself; the others only run while it is built.
    linked: bool
    # Of the file that crates.io serves.
    sha256: str | None
    needs: tuple[Key, ...]

    @property
    def key(self) -> Key:
        return self.name, self.version


def cargo(*arguments: str) -> str:
    """What cargo prints. Nothing is resolved anew: what Cargo.lock says is what gets built."""
    command = ["cargo", *arguments, "--locked", "--manifest-path", str(ROOT / "Cargo.toml")]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def tree(edges: str) -> set[Key]:
    lines = cargo(
        "tree", "-p", PACKAGE, "-e", edges, "--target", TARGET, "--prefix", "none", "--format", "{p}"
    ).splitlines()
    return {(name, version.removeprefix("v")) for name, version, *_ in (line.split() for line in lines if line)}


def checksums() -> dict[Key, str]:
    entry = re.compile(r'name = "(.+)"\nversion = "(.+)"\nsource = ".+"\nchecksum = "(\w+)"')
    return {(name, version): digest for name, version, digest in entry.findall((ROOT / "Cargo.lock").read_text())}


@functools.cache
def bundled() -> tuple[Crate, ...]:
    """All of them, the module itself among them, by name and version."""
    linked, needed, digests = tree("normal,no-proc-macro"), tree("normal,build"), checksums()
    found = json.loads(cargo("metadata", "--format-version", "1", "--filter-platform", TARGET))
    keys = {package["id"]: (package["name"], package["version"]) for package in found["packages"]}
    needs = {
        node["id"]: sorted(
            keys[dependency["pkg"]]
            for dependency in node["deps"]
            if any(kind["kind"] != "dev" for kind in dependency["dep_kinds"]) and keys[dependency["pkg"]] in needed
        )
        for node in found["resolve"]["nodes"]
    }
    crates = [
        Crate(
            name=package["name"],
            version=package["version"],
            licence=(package["license"] or "").replace("/", " OR "),
            description=" ".join((package["description"] or "").split()),
            repository=package["repository"],
            folder=Path(package["manifest_path"]).parent,
            ours=package["source"] is None,
            linked=keys[package["id"]] in linked,
            sha256=digests.get(keys[package["id"]]),
            needs=tuple(needs[package["id"]]),
        )
        for package in found["packages"]
        if keys[package["id"]] in needed
    ]
    assert {crate.key for crate in crates} == needed, needed - {crate.key for crate in crates}
    return tuple(sorted(crates, key=lambda crate: crate.key))
