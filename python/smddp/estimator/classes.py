"""Estimators of PyTorch, Hugging Face and TensorFlow, with the signatures of SageMaker's SDK 2.x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smddp.estimator.framework import Framework

#: Where a training container has the model; `Folder.in_job` replaces it by the job's own folder.
CONTAINER_MODEL = "/opt/ml/model"


class PyTorch(Framework):
    """Estimator with the interface of `sagemaker.pytorch.PyTorch`; `fit` runs the job here.

    docs/reference/estimator-arguments.md has every argument, docs/reference/estimator-rules.md every rule of
    `distribution`. Raises ValueError for a broken rule or an argument that a job here cannot follow, TypeError for
    unknown arguments.
    """

    _framework_name = "pytorch"

    def __init__(
        self,
        entry_point: str | None = None,
        framework_version: str | None = None,
        py_version: str | None = None,
        source_dir: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        image_uri: str | None = None,
        distribution: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            entry_point,
            source_dir,
            hyperparameters,
            framework_version=framework_version,
            py_version=py_version,
            image_uri=image_uri,
            distribution=distribution,
            **more,
        )


class HuggingFace(Framework):
    """Estimator with the interface of `sagemaker.huggingface.HuggingFace`; `fit` runs the job here. See `PyTorch`."""

    _framework_name = "huggingface"

    def __init__(
        self,
        py_version: str,
        entry_point: str,
        transformers_version: str | None = None,
        tensorflow_version: str | None = None,
        pytorch_version: str | None = None,
        source_dir: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        image_uri: str | None = None,
        distribution: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        if image_uri is None and transformers_version is None:
            raise ValueError("HuggingFace: give transformers_version and pytorch_version, or image_uri")
        if image_uri is None and (tensorflow_version is None) == (pytorch_version is None):
            raise ValueError("HuggingFace: give one of pytorch_version and tensorflow_version")
        super().__init__(
            entry_point,
            source_dir,
            hyperparameters,
            framework_version=pytorch_version or tensorflow_version,
            py_version=py_version,
            image_uri=image_uri,
            distribution=distribution,
            **more,
        )
        self.transformers_version = transformers_version


class TensorFlow(Framework):
    """Estimator with the interface of `sagemaker.tensorflow.TensorFlow`; `fit` runs the job here. See `PyTorch`.

    model_dir: passed to the script as --model_dir. Default: /opt/ml/model, which is the model folder of the job. False
    passes nothing.
    """

    _framework_name = "tensorflow"

    def __init__(
        self,
        py_version: str | None = None,
        framework_version: str | None = None,
        model_dir: str | bool | None = None,
        image_uri: str | None = None,
        distribution: Mapping[str, Any] | None = None,
        *,
        entry_point: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            entry_point,
            more.pop("source_dir", None),
            more.pop("hyperparameters", None),
            framework_version=framework_version,
            py_version=py_version,
            image_uri=image_uri,
            distribution=distribution,
            **more,
        )
        if model_dir is not False:
            self.script_hyperparameters["model_dir"] = model_dir or CONTAINER_MODEL
