"""Writes third-party/LICENSES.txt: the licence texts of all crates that the wheel is built from.

Their licences ask that text and copyright lines travel with the binary. A text that several crates have stands once,
under the names of those crates.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

from bundled_crates import ROOT, Crate, bundled

OUT = ROOT / "third-party" / "LICENSES.txt"

HEAD = """\
Third-party software in smddp's wheel

smddp itself is under Apache-2.0 (LICENSE). Its native module is built from the Rust crates below. Where a crate offers
several licences, smddp takes Apache-2.0 if that is among them, otherwise MIT. The texts that the
crates come with follow the list.

The module also holds Rust's standard library and what that is built from, (c) the Rust Project contributors,
under "MIT OR Apache-2.0" and taken under Apache-2.0: https://github.com/rust-lang/rust/blob/main/COPYRIGHT

"""
RULE = "=" * 100
# "-other-bits", ".md" and whatever else may follow.
NAMES = re.compile(r"(un)?licen[cs]e|copying|copyright|notice", re.IGNORECASE)


def texts(crate: Crate) -> list[Path]:
    """Its licence files, and those of what it brings along in folders. Manifests and code are not among them."""
    found = [
        path
        for path in crate.folder.rglob("*")
        if path.is_file() and NAMES.match(path.name) and path.suffix.lower() not in (".rs", ".toml", ".html", ".json")
    ]
    assert found, f"{crate.name} {crate.version} comes without its licence's text: find it, and add it here"
    return sorted(found)


def page() -> str:
    crates = [crate for crate in bundled() if not crate.ours]
    first: dict[str, str] = {}
    owners: dict[str, list[str]] = defaultdict(list)
    for crate in crates:
        for path in texts(crate):
            text = path.read_text(encoding="utf-8", errors="replace").strip("\n\r \ufeff")
            # Line ends and indentation make no other licence.
            same = " ".join(text.split())
            first.setdefault(same, "\n".join(line.rstrip() for line in text.splitlines()))
            owner = f"{crate.name} {crate.version}"
            if owner not in owners[same]:
                owners[same].append(owner)
    listed = "".join(
        f"  {crate.name} {crate.version}: {crate.licence}{'' if crate.linked else ' (while it is built)'}\n"
        for crate in crates
    )
    written = "".join(f"\n{RULE}\n{', '.join(owners[same])}\n{RULE}\n\n{text}\n" for same, text in first.items())
    return HEAD + listed + written


if __name__ == "__main__":
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(page(), encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size} bytes", file=sys.stderr)
