"""Deployment of a trained model on this machine by an installed server, and methods that need SageMaker's service."""

from __future__ import annotations

import atexit
import contextlib
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

from smddp import validation
from smddp.text import did_you_mean

#: Seconds until a server must be healthy, for each response, and between SIGTERM and SIGKILL.
_START, _ANSWER, _END = 600.0, 120.0, 10.0
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
    "enable_default_profiling": "SageMaker's profiler does not run here: see docs/guides/monitoring.md",
    "register": "jobs here have no model registry: keep the folder of model_data, or register it in MLflow",
    "transformer": "no batch transform runs here: call predict() of deploy(), or a second job",
    "update_profiler": "SageMaker's profiler does not run here: see docs/guides/monitoring.md",
}


class DeployError(RuntimeError):
    """A server that did not start, or did not answer."""


class Predictor:
    """A server of a model on this machine, at `url`. It ends by `delete_endpoint`, or when Python exits."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.url = url
        self._process, self._log, self._ended = process, log, False
        atexit.register(self.delete_endpoint)

    def predict(self, data: Mapping[str, Any] | str) -> Any:
        """Returns the server's response.

        Args:
            data: Request of OpenAI's completions API, or a prompt.

        Raises:
            DeployError: The server refuses the request; with its response.
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
            raise DeployError(f"predict: no response from {self.url} ({error}); its log: {self._log}") from None

    def delete_endpoint(self, delete_endpoint_config: bool = True) -> None:
        """Ends the server and its children.

        Args:
            delete_endpoint_config: Argument of the SDK, without an effect.
        """
        del delete_endpoint_config
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self.delete_endpoint)
        server = self._process.pid
        if self._process.returncode is None:
            # The server stays a zombie until the second signal, so that its number remains that of its group.
            until = time.monotonic() + _END
            _signal(server, signal.SIGTERM)
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while os.waitid(os.P_PID, server, options) is None and time.monotonic() < until:
                time.sleep(0.05)
        _signal(server, signal.SIGKILL)
        self._process.wait()


def deploy(model: Path, port: int | None = None, server_arguments: Sequence[str] = (), **more: Any) -> Predictor:
    """Serves the model of a folder at 127.0.0.1 by vLLM, waits until it is healthy, and returns its predictor.

    model: a causal language model as transformers saves it. port: by default a free one. server_arguments: options of
    `vllm serve`. more: arguments of the SDK, without an effect. Raises TypeError for unknown arguments, ValueError
    for a folder without such a model or an invalid port, ImportError without a server, DeployError where the port is in
    use or the server does not start.
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
    port = _free_port(port)
    log = model.parent / "server.log"
    command = [*words, str(model), "--host", "127.0.0.1", "--port", str(port), *server_arguments]
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [*command, "--served-model-name", "model"],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    predictor = Predictor(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait_until_healthy(process, predictor.url, log)
        _check_model(predictor.url, model)
    except BaseException:
        predictor.delete_endpoint()
        raise
    return predictor


def _free_port(port: int | None) -> int:
    """Returns the port, by default a free one. Raises DeployError where it is in use."""
    if port is not None:
        validation.port(port)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise DeployError(
                f"deploy: port {port} of 127.0.0.1 cannot be used ({error.strerror}): give another, or leave it out"
            ) from None
        return int(free.getsockname()[1])


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


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
        healthy = False
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            healthy = True
        # A server that ended did not send the response: another one has its port.
        if process.poll() is not None:
            last = log.read_text(errors="replace").splitlines()[-20:]
            raise DeployError(
                f"deploy: the server ended with exit status {process.returncode}; its last lines:\n" + "\n".join(last)
            )
        if healthy:
            return
        time.sleep(0.2)
    raise DeployError(f"deploy: the server is not healthy after {_START:.0f} s; its log: {log}")


def _check_model(url: str, model: Path) -> None:
    """Raises DeployError where the server at `url` names the path of another model than `model`."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=_ANSWER) as response:
            roots = [model_entry["root"] for model_entry in json.load(response)["data"]]
    except (OSError, ValueError, LookupError, TypeError):
        return  # Servers need not give the path.
    if roots and str(model) not in roots:
        raise DeployError(f"deploy: the server at {url} has {roots[0]}: expected {model}: give another port")


class ServiceMethods:
    """Methods that need SageMaker's service: each is a NotImplementedError with what to do instead."""


def _method(name: str, instead: str) -> classmethod[Any, Any, None]:
    def refuse(cls: type, *_args: Any, **_given: Any) -> None:
        raise NotImplementedError(f"{cls.__name__}.{name}: {instead}")

    refuse.__doc__ = f"Raises NotImplementedError: {instead}."
    return classmethod(refuse)


for _name, _text in INSTEAD.items():
    setattr(ServiceMethods, _name, _method(_name, _text))
