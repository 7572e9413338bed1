"""Prints one Markdown table row of counts from a pytest JUnit file, with the versions of a package and of Python."""

import platform
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version


def main(package: str, path: str) -> int:
    root = ElementTree.parse(path).getroot()
    suites = [root] if root.tag == "testsuite" else list(root)
    total, bad, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    seconds = sum(float(suite.get("time", 0)) for suite in suites)
    print(
        f"| {version(package)} | {platform.python_version()} | {total - bad - skipped} | {bad} | {skipped} "
        f"| {seconds:.0f} |"
    )
    return 1 if bad or not total else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
