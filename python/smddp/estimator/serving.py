"""Deployment of a trained model on this machine by an installed server, and methods that need SageMaker's service."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smddp.text import did_you_mean

#: Seconds until a server must be healthy, and for each answer.
_START, _ANSWER = 600.0, 120.0
_PR_SET_PDEATHSIG = 1
#: Arguments of the SDK's deploy without an effect here.
_NO_EFFECT = frozenset(
    """initial_instance_count instance_type serializer deserializer accelerator_type wait tags use_compiled_model
    model_name endpoint_name kms_key data_capture_config role vpc_config_override model_data_download_timeout
    container_startup_health_check_timeout volume_size enable_network_isolation""".split()
)
#: Methods of SageMaker's estimators that need its service, and what to do instead.
INSTEAD = {
    "attach": "jobs here end with their process: read job.json in the job's folder, or call latest_training_job",
    "compile_model": "nothing is compiled here: compile the model in the training script",
    "create_model": "no model of SageMaker's is made here: use the folder of model_data, or call deploy()",
    "delete_endpoint": "call delete_endpoint() of the predictor that deploy() returns",
    "enable_default_profiling": "SageMaker's profiler does not run here: see docs/observability.md",
    "register": "jobs here have no model registry: keep the folder of model_data, or register it in MLflow",
    "transformer": "no batch transform runs here: call predict() of deploy(), or a second job",
    "update_profiler": "SageMaker's profiler does not run here: see docs/observability.md",
}


class DeployError(RuntimeError):
    """A server that did not start, or did not answer."""


class Predictor:
    """A server of a model on this machine, at `url`. Its end is that of this process, or `delete_endpoint`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.url = url
        self._process, self._log = process, log

    def predict(self, data: Mapping[str, Any] | str) -> Any:
        """Returns the server's answer to a request of OpenAI's completions API, or to a prompt.

        Raises DeployError with the server's words where it refuses the request.
        """
        body = {"prompt": data} if isinstance(data, str) else dict(data)
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise DeployError(f"predict: {self.url} answers {error.code}: {error.read()[:500]!r}") from None
        except OSError as error:
            raise DeployError(f"predict: no answer of {self.url} ({error}); its log: {self._log}") from None

    def delete_endpoint(self, delete_endpoint_config: bool = True) -> None:
        """Ends the server. delete_endpoint_config: of the SDK; there is none here."""
        del delete_endpoint_config
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def deploy(model: Path, port: int | None = None, server_arguments: Sequence[str] = (), **more: Any) -> Predictor:
    """Serves the model of a folder at 127.0.0.1 by vLLM, waits until it is healthy, and returns its predictor.

    model: a causal language model as transformers saves it. port: by default a free one. server_arguments: options of
    `vllm serve`. more: arguments of the SDK, without an effect. Raises TypeError for unknown arguments, ValueError
    for a folder without such a model, ImportError without a server, DeployError where it does not start.
    """
    for name in more:
        if name not in _NO_EFFECT:
            raise TypeError(f"deploy: unknown argument {name!r}{did_you_mean(name, _NO_EFFECT)}")
    if not (model / "config.json").is_file():
        raise ValueError(
            f"deploy: {model} has no config.json: vLLM serves causal language models that the script saved by "
            "save_pretrained() to SM_MODEL_DIR; serve other models by a server of your own"
        )
    words = _server()
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    log = model.parent / "server.log"
    command = [*words, str(model), "--host", "127.0.0.1", "--port", str(port), *server_arguments]
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [*command, "--served-model-name", "model"],
            stdout=output,
            stderr=output,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    predictor = Predictor(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait_until_healthy(process, predictor.url, log)
    except BaseException:
        predictor.delete_endpoint()
        raise
    return predictor


def _server() -> list[str]:
    """Returns the command of the installed server, before the model's path. Raises ImportError without one."""
    program = os.path.join(os.path.dirname(sys.executable), "vllm")
    if find_spec("vllm") is not None and os.access(program, os.X_OK):
        return [program, "serve"]
    if (found := shutil.which("vllm")) is not None:
        return [found, "serve"]
    raise ImportError(
        "deploy: no server is installed: for causal language models pip install vllm (docs.vllm.ai has a CPU build); "
        "other models need a server of your own, such as TorchServe or Triton, on the folder of model_data"
    )


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START
    while time.monotonic() < until:
        if process.poll() is not None:
            last = log.read_text(errors="replace").splitlines()[-20:]
            raise DeployError(
                f"deploy: the server ended with exit status {process.returncode}; its last lines:\n" + "\n".join(last)
            )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise DeployError(f"deploy: the server is not healthy after {_START:.0f} s; its log: {log}")


class ServiceMethods:
    """Methods that need SageMaker's service: each is a NotImplementedError with what to do instead."""


def _method(name: str, instead: str) -> classmethod[Any, Any, None]:
    def refuse(cls: type, *_args: Any, **_given: Any) -> None:
        raise NotImplementedError(f"{cls.__name__}.{name}: {instead}")

    refuse.__doc__ = f"Raises NotImplementedError: {instead}."
    return classmethod(refuse)


for _name, _text in INSTEAD.items():
    setattr(ServiceMethods, _name, _method(_name, _text))
