"""Estimators: a script and a `distribution=` dict, run here or on a list of hosts.

from smddp.estimator import PyTorch  # in place of sagemaker.pytorch

PyTorch(entry_point="train.py", ..., distribution={"torch_distributed": {"enabled": True}}).fit()
"""

from smddp.estimator.classes import HuggingFace, PyTorch, TensorFlow
from smddp.estimator.commands import Command
from smddp.estimator.rules import RULES, validate
from smddp.estimator.running import Failure, LaunchError

__all__ = ["RULES", "Command", "Failure", "HuggingFace", "LaunchError", "PyTorch", "TensorFlow", "validate"]
