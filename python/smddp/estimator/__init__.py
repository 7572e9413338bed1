"""Estimators: a script and a `distribution=` dict, run here or on a list of hosts.

from smddp.estimator import PyTorch  # in place of sagemaker.pytorch

PyTorch(entry_point="train.py", ..., distribution={"torch_distributed": {"enabled": True}}).fit()

Imports `launch` and `smp`, and no torch.
"""

from smddp.estimator.classes import HuggingFace, PyTorch, TensorFlow
from smddp.estimator.commands import Command
from smddp.estimator.configs import (
    MPI,
    SMP,
    CheckpointConfig,
    Compute,
    InputData,
    MetricDefinition,
    Networking,
    OutputDataConfig,
    RetryStrategy,
    S3DataSource,
    SourceCode,
    StoppingCondition,
    Tag,
    Torchrun,
)
from smddp.estimator.model_trainer import Mode, ModelTrainer
from smddp.estimator.rules import RULES, validate
from smddp.estimator.running import Failure, LaunchError
from smddp.estimator.serving import DeployError, Predictor

__all__ = [
    "MPI",
    "RULES",
    "SMP",
    "CheckpointConfig",
    "Command",
    "Compute",
    "DeployError",
    "Failure",
    "HuggingFace",
    "InputData",
    "LaunchError",
    "MetricDefinition",
    "Mode",
    "ModelTrainer",
    "Networking",
    "OutputDataConfig",
    "Predictor",
    "PyTorch",
    "RetryStrategy",
    "S3DataSource",
    "SourceCode",
    "StoppingCondition",
    "Tag",
    "TensorFlow",
    "Torchrun",
    "validate",
]
