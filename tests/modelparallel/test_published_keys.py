"""Keys and values of published notebooks and scripts of SMP v1, as data: `smp.init()` accepts them.

``values``: each key with its distinct values. ``configurations``: whole dictionaries of notebooks, scripts, containers'
tests, the SDK's validation and articles. ``refused``: dictionaries that public documentation rules out, with the
message.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from smddp.smp import v1_keys

PUBLISHED = json.loads(Path(__file__).with_name("published_keys.json").read_text(encoding="utf-8"))
VALUES = [(key, value) for key, values in PUBLISHED["values"].items() for value in values]


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch):
    monkeypatch.delenv(v1_keys.LAUNCHER, raising=False)


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_published_value_is_accepted(key, value):
    accepted = v1_keys.check({key: value}, "smp.init()")
    name = v1_keys.ALIASES.get(key, key)
    assert accepted == {name: value}
    assert value is None or type(accepted[name]) is v1_keys.KEYS[name].metadata["kind"]


@pytest.mark.parametrize("name", PUBLISHED["configurations"])
def test_published_configuration_is_accepted_from_script_and_launcher(name, monkeypatch):
    values = PUBLISHED["configurations"][name]
    assert all(value in PUBLISHED["values"][key] for key, value in values.items())
    found = v1_keys.read(values)
    monkeypatch.setenv(v1_keys.LAUNCHER, json.dumps(values))
    assert v1_keys.read(None) == found


@pytest.mark.parametrize("name", PUBLISHED["refused"])
def test_configuration_outside_the_documentation_is_refused(name):
    values, message = PUBLISHED["refused"][name]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        v1_keys.read(values)


def test_data_counts_distinct_dictionaries():
    kinds = ("configurations", "refused")
    found = [value[0] if kind == "refused" else value for kind in kinds for value in PUBLISHED[kind].values()]
    assert len({json.dumps(value, sort_keys=True) for value in found}) == len(found) == 69
    page = (Path(__file__).parents[2] / "docs" / "migrate" / "smp-v1.md").read_text(encoding="utf-8").replace("\n", " ")
    accepted, refused = len(PUBLISHED["configurations"]), len(PUBLISHED["refused"])
    assert f"`init` accepts {accepted} of {len(found)} published dictionaries; {refused} are refused" in page
    print(f"{len(found)} distinct dictionaries: {accepted} accepted, {refused} refused")


def test_data_covers_every_key_with_published_use():
    assert len(VALUES) == 101
    assert v1_keys.KEYS.keys() | v1_keys.ALIASES.keys() == PUBLISHED["values"].keys() | {
        "ddp_port",
        "load_partition",
        "partition_file",
    }


@pytest.mark.parametrize("key", ["fast_mode", "static_mode", "checkpoint_attentions", "_match_weights"])
def test_value_without_effect_is_logged_once_with_the_reason(key, caplog):
    v1_keys.read({key: True})
    assert caplog.text.count(f"'{key}' has no effect here (value True): ") == 1
    caplog.clear()
    v1_keys.read({key: False})
    assert not caplog.text


def test_key_that_was_never_published_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"unknown key '_match_weight'; did you mean '_match_weights'\?"):
        v1_keys.read({"_match_weight": True})
