"""Writes docs/settings.md from the core's tables of SMDDP_* settings and of deprecated names.

  scripts/settings_page.py docs/settings.md            write it
  scripts/settings_page.py --check docs/settings.md    exit 1 when the page is not what the core says

The rows come from `smddp._core.settings()` and `deprecated_settings()`, which `smddp info` prints too.
"""

import sys
from pathlib import Path

HEAD = """# Settings

Made from the core's own table by `make docs`; edit `crates/smddp-core/src/config/mod.rs`, not this page.
`smddp info` prints the same with the values in force and their sources. An unknown
`SMDDP_*` name is a warning that gives the nearest known one; an invalid value is an error.

| variable | default | what it does |
|---|---|---|
"""

DEPRECATED = """
## Deprecated

A deprecated name sets the setting that replaces it, with one warning. If the two contradict each other, it is an error.

| variable | replaced by | equivalent values (old: new) |
|---|---|---|
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


def page() -> str:
    from smddp import _core

    rows = sorted((name, default, text) for name, _value, default, _source, text in _core.settings())
    settings = "".join(f"| `{name}` | `{cell(default) or '-'}` | {cell(text)} |\n" for name, default, text in rows)
    old = "".join(f"| `{name}` | `{new}` | {cell(text)} |\n" for name, new, text in _core.deprecated_settings())
    return HEAD + settings + DEPRECATED + old


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    path = Path(next(a for a in arguments if not a.startswith("--")))
    if not check:
        path.write_text(page())
        return 0
    if path.exists() and path.read_text() == page():
        return 0
    print(f"{path} is not what the core says: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
