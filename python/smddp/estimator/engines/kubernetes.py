"""Kubernetes engine: writes a TrainJob for Kubeflow Trainer and submits it with Kubeflow's client."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smddp.estimator import archives, engines
from smddp.estimator.commands import COMMAND_FOLLOWS
from smddp.estimator.engines import pod
from smddp.estimator.running import Failure, LaunchError, launch_error
from smddp.validation import dns_name, escape_dollars

API, PLURAL = ("trainer.kubeflow.org", "v1alpha1"), "trainjobs"
#: Limits of the TrainJob's schema, and of one Linux environment variable in bytes.
_MOST_VARIABLES, _MOST_WORDS, _LONGEST_WORD, _LONGEST_VARIABLE = 128, 128, 65536, 128 * 1024 - 1
_ASK = 2.0
#: Seconds to tolerate an unresponsive API server.
_PATIENCE = 60.0


def make(options: dict[str, Any]) -> Kubernetes:
    return Kubernetes(options)


class Kubernetes:
    """options: runtime ("torch-distributed"), namespace, resources (of each node, as a container's)."""

    folder: Path | None = Path("/opt/ml")
    python: str | None = "python"

    def __init__(self, options: dict[str, Any]) -> None:
        engines.known("kubernetes", options, ("runtime", "namespace", "resources"))
        self._runtime = dns_name(options.get("runtime", "torch-distributed"), "engine_options: runtime")
        self._namespace = options.get("namespace")
        if self._namespace is not None:
            dns_name(self._namespace, "engine_options: namespace")
        self._resources = options.get("resources")
        if self._resources is not None and not isinstance(self._resources, dict):
            raise ValueError(f'engine_options: resources is {self._resources!r}: give {{"limits": {{"cpu": 8}}}}')

    def hosts(self, job_name: str, nodes: int) -> list[str]:
        """Returns the host names of the job's pods."""
        last = f"{job_name}-node-0-{nodes - 1}"
        if not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", job_name) or len(last) > 63:
            most = 63 - len(last) + len(job_name)
            raise ValueError(
                f"job_name: {job_name!r} names no TrainJob: give at most {most} of a-z, 0-9 and -, a letter first"
            )
        return [f"{job_name}-node-0-{number}" for number in range(nodes)]

    def channel(self, place: str) -> str | None:
        path = place.removeprefix("file://")
        if not path.startswith("/") or "://" in path:
            raise ValueError(
                f"inputs: {place!r}: in Kubernetes give the path at which the runtime's volumes have it in each pod"
            )
        return path

    def manifest(self, work: engines.Work) -> dict[str, Any]:
        """Returns the TrainJob without the job's files. Raises ValueError where the schema would reject it."""
        if work.image in (None, engines.NO_IMAGE):
            raise ValueError(
                f"image_uri is {work.image!r}: give the image that the pods run, with smddp in it "
                "(docs/guides/containers.md)"
            )
        # The runtime's controller passes torchrun the rest in PET_* variables.
        torchrun = [work.python, "-m", "torch.distributed.run", *COMMAND_FOLLOWS, *work.torchrun_words()]
        words = [work.python, "-m", "smddp.estimator.engines.pod", str(self.folder), *torchrun]
        if len(words) > _MOST_WORDS or max(map(len, words)) > _LONGEST_WORD:
            raise ValueError(
                f"a rank's command has {len(words)} words, the longest of {max(map(len, words))} characters, and "
                f"a TrainJob takes {_MOST_WORDS} of {_LONGEST_WORD}: put them into a file of source_dir"
            )
        if len(work.env) + 1 > _MOST_VARIABLES:
            raise ValueError(
                f"a TrainJob takes {_MOST_VARIABLES} variables, and these are {len(work.env) + 1} with those of "
                "hyperparameters and environment: put hyperparameters into a file of source_dir"
            )
        trainer: dict[str, Any] = {"image": work.image, "numNodes": work.nodes, "numProcPerNode": work.ranks_per_node}
        trainer |= {"command": [escape_dollars(word) for word in words], "env": _variables(work.env)}
        resources = self._resources
        if resources is None and work.gpus:
            resources = {"limits": {"nvidia.com/gpu": work.gpus}}
        if resources is not None:
            trainer["resourcesPerNode"] = resources
        metadata = {"name": work.name, **({"namespace": self._namespace} if self._namespace else {})}
        spec = {"runtimeRef": {"name": self._runtime}, "trainer": trainer}
        return {"apiVersion": "/".join(API), "kind": "TrainJob", "metadata": metadata, "spec": spec}

    def ready(self) -> None:
        engines.needed("kubeflow.trainer", "kubeflow", "kubernetes")

    def show(self, work: engines.Work) -> str:
        """Returns the TrainJob as JSON (valid YAML), with the job's files if its folder exists."""
        manifest = self.manifest(work)
        if (work.folder / "code").is_dir():
            files = {pod.FILES: _packed(work.folder)}
            manifest["spec"]["trainer"]["env"] += _variables(files)
        return json.dumps(manifest, indent=2)

    def start(self, work: engines.Work, report: Callable[[str], None]) -> _Run:
        text = self.show(work)
        (work.folder / "trainjob.yaml").write_text(text)
        trainer = engines.needed("kubeflow.trainer", "kubeflow", "kubernetes")
        common = engines.needed("kubeflow.common.types", "kubeflow", "kubernetes")
        try:
            client = trainer.TrainerClient(common.KubernetesBackendConfig(namespace=self._namespace))
            # The client's own API creates TrainJobs from Python functions only.
            backend = client.backend
            backend.custom_api.create_namespaced_custom_object(*API, backend.namespace, PLURAL, json.loads(text))
        except Exception as error:
            # Raised by the kubernetes package, urllib3 or Kubeflow's client.
            raise LaunchError(f"Kubernetes rejected the job: {error}", work.folder) from error
        report(f"smddp: TrainJob {work.name} in {backend.namespace}")
        return _Run(client, work, report)


def _variables(env: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": escape_dollars(value)} for name, value in env.items()]


def _packed(folder: Path) -> str:
    """Raises ValueError if the code is too large for a variable."""
    text = archives.packed(folder, ("code", "input/config"))
    if len(pod.FILES) + len(text) > _LONGEST_VARIABLE - 1:
        raise ValueError(
            f"the job's code is {len(text)} bytes packed, and a TrainJob carries {_LONGEST_VARIABLE}: give a smaller "
            "source_dir, with the rest installed in the image"
        )
    return text


def _whole(error: BaseException) -> str:
    """Returns an error's text with its cause, which holds the details in Kubeflow's client."""
    return f"{error} ({error.__cause__})" if error.__cause__ else str(error)


class _Run:
    def __init__(self, client: Any, work: engines.Work, report: Callable[[str], None]) -> None:
        self._client, self._name, self._folder, self._report = client, work.name, work.folder, report
        self._failures: dict[int, Failure] = {}
        self._readers: dict[str, threading.Thread] = {}
        self._last: list[str] = []
        self._stopped = False

    def wait(self) -> None:
        """Waits until the TrainJob has ended. Raises LaunchError with the first failed rank, from the pods' logs."""
        status, answered = "", time.monotonic()
        while not self._stopped:
            try:
                seen = self._client.get_job(self._name)
            except (RuntimeError, TimeoutError) as error:
                # Tolerate a temporarily unresponsive API server.
                if time.monotonic() - answered > _PATIENCE:
                    raise LaunchError(
                        f"TrainJob {self._name} may run but cannot be monitored: {_whole(error)}", self._folder
                    ) from error
                time.sleep(_ASK)
                continue
            answered = time.monotonic()
            self._read(seen.steps)
            if seen.status != status:
                status = seen.status
                self._report(f"smddp: TrainJob {self._name} is {status}")
            if status in ("Complete", "Failed"):
                break
            time.sleep(_ASK)
        for reader in self._readers.values():
            reader.join(_ASK)
        if status == "Complete":
            # Ignore failures of restarted pods.
            return
        if not self._failures and not self._stopped:
            self._read_again()
        if self._failures:
            raise launch_error(list(self._failures.values()), self._folder)
        said = "\n".join(self._last) or "(none)"
        raise LaunchError(
            f"TrainJob {self._name} {'was stopped' if self._stopped else 'failed'}, and no rank reported a cause "
            f"(kubectl describe trainjob {self._name}). The pods' last lines:\n{said}",
            self._folder,
        )

    def stop(self) -> None:
        """Deletes the TrainJob and its pods."""
        self._stopped = True
        self._client.delete_job(self._name)

    def _read(self, steps: Any) -> None:
        """Starts a log reader for each new running pod."""
        for step in steps:
            if step.name.startswith("node-") and step.pod_name not in self._readers and step.status != "Pending":
                reader = threading.Thread(target=self._follow, args=(step.name,), daemon=True)
                self._readers[step.pod_name] = reader
                reader.start()

    def _follow(self, step: str) -> None:
        try:
            for line in self._client.get_job_logs(self._name, step=step, follow=True):
                if not self._is_failure(line):
                    self._last = [*self._last[-19:], line]
                    self._report(line)
        except (RuntimeError, TimeoutError) as error:
            self._report(f"smddp: {_whole(error)}")

    def _read_again(self) -> None:
        """Reads the failures again: a followed log may have ended before them."""
        try:
            for step in self._client.get_job(self._name).steps:
                for line in self._client.get_job_logs(self._name, step=step.name):
                    self._is_failure(line)
        except (RuntimeError, TimeoutError) as error:
            self._report(f"smddp: {_whole(error)}")

    def _is_failure(self, line: str) -> bool:
        if not line.startswith(pod.FAILED):
            return False
        failure = Failure.parse(line.removeprefix(pod.FAILED))
        if failure is None:
            return False
        self._failures[failure.rank] = failure
        self._report(f"smddp: rank {failure.rank} (host {failure.host}, pid {failure.pid}) {failure.how}")
        return True
