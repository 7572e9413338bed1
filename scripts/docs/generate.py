"""Writes the generated pages of docs/reference/ from code and from data files beside this script.

scripts/docs/generate.py            write them
scripts/docs/generate.py --check    exit 1 when one of them differs from what the code gives
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import cli
import config_keys
import estimator_rules
import families
import metrics
import settings
import versions
import writer

#: Generated page -> function that returns its text.
PAGES: Mapping[str, Callable[[], str]] = {
    "docs/reference/settings.md": settings.page,
    "docs/reference/cli/smddp.md": cli.smddp_page,
    "docs/reference/cli/smddprun.md": cli.smddprun_page,
    "docs/reference/cli/smddp-bench.md": cli.bench_page,
    "docs/reference/smp-config.md": config_keys.v2_page,
    "docs/reference/smp-v1-config.md": config_keys.v1_page,
    "docs/reference/model-families.md": families.page,
    "docs/reference/estimator-rules.md": estimator_rules.page,
    "docs/reference/metrics.md": metrics.page,
    "docs/reference/supported-versions.md": versions.page,
}


def texts() -> dict[str, str]:
    """Returns the text of every generated page."""
    return {name: make() for name, make in PAGES.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Writes the generated pages of docs/reference/.")
    parser.add_argument("--check", action="store_true", help="exit 1 if a page differs, and write nothing")
    parser.add_argument("--root", type=Path, default=writer.ROOT, help="repository (default: this one)")
    options = parser.parse_args(arguments)
    pages = texts()
    if options.check:
        changed = writer.stale(options.root, pages)
        for name in changed:
            print(f"{name} differs from its sources: run `make docs`", file=sys.stderr)
        return 1 if changed else 0
    writer.write(options.root, pages)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
