"""Writes third-party/smddp.cyclonedx.json, a CycloneDX 1.5 bill of materials: the crates that the wheel is built from.

maturin would write one by itself, with the paths of the machine, a random number, the time and the crates of every
platform. This one says what is built, and says the same wherever that is.
"""

import json
import sys
from urllib.parse import quote

from bundled_crates import PACKAGE, ROOT, Crate, Key, bundled

OUT = ROOT / "third-party" / "smddp.cyclonedx.json"


def reference(crate: Crate) -> str:
    """Our own crates are on no registry, where another may have their name: no package URL."""
    return f"{crate.name}@{crate.version}" if crate.ours else purl(crate)


def purl(crate: Crate) -> str:
    return f"pkg:cargo/{crate.name}@{quote(crate.version, safe='')}"


def component(crate: Crate) -> dict:
    found = {
        "type": "library",
        "bom-ref": reference(crate),
        "name": crate.name,
        "version": crate.version,
        "description": crate.description,
        "scope": "required" if crate.linked else "excluded",
        "licenses": [{"expression": crate.licence}],
    }
    if not crate.description:
        del found["description"]
    if not crate.ours:
        found["purl"] = purl(crate)
        found["hashes"] = [{"alg": "SHA-256", "content": crate.sha256}]
        if crate.repository:
            found["externalReferences"] = [{"type": "vcs", "url": crate.repository}]
    return found


def bill() -> dict:
    crates = {crate.key: crate for crate in bundled()}
    (module,) = (crate for crate in crates.values() if crate.name == PACKAGE)
    top = f"pkg:pypi/smddp@{module.version}"

    def references(keys: tuple[Key, ...]) -> list[str]:
        return sorted(reference(crates[key]) for key in keys)

    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": top,
                "name": "smddp",
                "version": module.version,
                "licenses": [{"expression": module.licence}],
                "purl": top,
            }
        },
        "components": [component(crate) for crate in crates.values()],
        "dependencies": [
            {"ref": top, "dependsOn": [reference(module)]},
            *({"ref": reference(crate), "dependsOn": references(crate.needs)} for crate in crates.values()),
        ],
    }


def page() -> str:
    return json.dumps(bill(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(page(), encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size} bytes", file=sys.stderr)
