"""The interface of a transport group stays narrow."""

import re
from pathlib import Path

JOINT = Path(__file__).parents[2] / "crates/smddp-group/src/joint"
LIMIT = 22


def public_methods(text, name):
    blocks = re.findall(rf"^impl(?:<[^>]*>)? {name}(?:<[^>]*>)? \{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^    pub (?:unsafe |const )*fn (\w+)", "".join(blocks), re.MULTILINE)


def test_group_has_few_public_methods():
    methods = [method for file in JOINT.glob("*.rs") for method in public_methods(file.read_text(), "Group")]
    assert {"info", "begin", "publish", "end", "messages", "health"} <= set(methods)
    assert len(methods) <= LIMIT, sorted(methods)


def test_public_methods_of_all_blocks_are_counted():
    text = """
impl Group {
    pub fn a(&self) {}
    pub(super) fn b(&self) {}
    fn c(&self) {}
}
impl Drop for Group {
    fn drop(&mut self) {}
}
impl Group {
    pub const fn d(&self) {}
}
impl Messages<'_> {
    pub fn e(&self) {}
}
"""
    assert public_methods(text, "Group") == ["a", "d"]
    assert public_methods(text, "Messages") == ["e"]
