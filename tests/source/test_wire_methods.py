"""The interface of a transport between nodes stays narrow."""

import re
from pathlib import Path

import pytest

WIRE = Path(__file__).resolve().parents[2] / "crates/smddp-net/src/wire.rs"


def methods(text: str, trait: str) -> list[str]:
    body = re.search(rf"^pub (?:unsafe )?trait {trait}\b.*?^\}}", text, re.MULTILINE | re.DOTALL)
    assert body, f"no trait {trait}"
    return re.findall(r"^    (?:unsafe )?fn (\w+)", body[0], re.MULTILINE)


@pytest.mark.parametrize(("trait", "limit"), [("Wire", 13), ("Sink", 4)])
def test_a_trait_has_few_methods(trait, limit):
    found = methods(WIRE.read_text(), trait)
    assert 0 < len(found) <= limit, found


def test_only_methods_of_the_trait_count():
    body = "    fn a(&self);\n    unsafe fn b(&self) {\n        fn c() {}\n    }\n"
    text = "pub trait Wire: Send {\n" + body + "}\nfn d() {}\n"
    assert methods(text, "Wire") == ["a", "b"]
