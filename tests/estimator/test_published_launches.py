"""Launches of published notebooks, guides and tests: accepted, or refused for the documented reason.

Only keys and values. Another table has the parameters of SMP v1.
"""

import json
import warnings
from pathlib import Path

import pytest
from smddp.estimator import HuggingFace, PyTorch, TensorFlow

LAUNCHES = json.loads(Path(__file__).with_name("published_launches.json").read_text())
CLASSES = {
    "pytorch": lambda **given: PyTorch("train.py", framework_version="2.2", py_version="py310", **given),
    "tensorflow": lambda **given: TensorFlow("py310", "2.14", entry_point="train.py", **given),
    "huggingface": lambda **given: HuggingFace("py36", "train.py", "4.4.2", pytorch_version="1.6", **given),
}


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch["name"])
def test_a_published_launch_is_accepted_or_refused_for_the_documented_reason(launch):
    make = CLASSES[launch.get("framework", "pytorch")]
    given = {name: launch[name] for name in ("distribution", "instance_type", "instance_count")}
    if "refused" in launch:
        with pytest.raises(ValueError) as raised:
            make(**given)
        assert launch["refused"] in str(raised.value)
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore", ResourceWarning)  # of other tests' objects
        warnings.simplefilter("always", UserWarning)
        made = make(**given)
    texts = [str(each.message) for each in seen]
    assert len(texts) == ("warned" in launch) and all(launch["warned"] in text for text in texts), texts
    if not {"parameter_server", "multi_worker_mirrored_strategy"} & launch["distribution"].keys():
        count = launch["instance_count"]
        commands = made.commands([f"h{number}" for number in range(count)] if count > 1 else None)
        assert commands


def test_the_table_has_the_number_of_launches_that_the_documentation_states():
    page = (Path(__file__).parents[2] / "docs" / "migrate" / "sagemaker-sdk.md").read_text()
    refused = sum("refused" in launch for launch in LAUNCHES)
    assert f"{len(LAUNCHES) - refused} of {len(LAUNCHES)} published launches" in page.replace("\n", " ")
