"""The real SDK's side of test_sdk.py, in the environment that has it: cases on its input, what it did in a file."""

import inspect
import json
import os
import sys
from unittest.mock import MagicMock

os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")

from sagemaker.huggingface import HuggingFace
from sagemaker.instance_group import InstanceGroup
from sagemaker.pytorch import PyTorch
from sagemaker.tensorflow import TensorFlow


def session() -> MagicMock:
    """One that never asks the network."""
    made = MagicMock(boto_region_name="us-west-2", config={}, sagemaker_config={}, local_mode=False)
    made.default_bucket_prefix = None
    return made


def one(case: dict) -> dict:
    given = dict(case["estimator"])
    if case["groups"]:
        groups = {name: InstanceGroup(name, kind, 1) for name, kind in case["groups"].items()}
        given["instance_groups"] = list(groups.values())
        asked = given["distribution"]["instance_groups"]
        given["distribution"]["instance_groups"] = [
            groups.get(name) or InstanceGroup(name, "ml.m5.xlarge", 1) for name in asked
        ]
    kind = {"PyTorch": PyTorch, "TensorFlow": TensorFlow}[case["class"]]
    try:
        made = kind(role="arn:aws:iam::1:role/r", sagemaker_session=session(), **given)
        return {"hyperparameters": made.hyperparameters()}
    except Exception as error:
        # Which kind is part of what is compared: a rule of the SDK's is a ValueError.
        return {"error": type(error).__name__, "text": str(error)}


def signature(kind: type) -> list[str]:
    """Returns the constructor's arguments, with inherited ones."""
    found = {name for each in kind.__mro__ if "__init__" in vars(each) for name in parameters(each)}
    return sorted(found - {"self", "args", "kwargs"})


def parameters(kind: type) -> list[str]:
    return list(inspect.signature(kind.__init__).parameters)


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    found = {name: one(case) for name, case in cases.items()}
    found["arguments"] = {each.__name__: signature(each) for each in (PyTorch, TensorFlow, HuggingFace)}
    # The SDK prints to stdout.
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
