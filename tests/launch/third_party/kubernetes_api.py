"""As much of Kubernetes' API as Kubeflow's client uses, for one TrainJob, whose pods are processes here."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RUNTIME = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch-distributed", "labels": {"trainer.kubeflow.org/framework": "torch"}},
    "spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": {"replicatedJobs": []}}},
}
RUNTIME["spec"]["template"]["spec"]["replicatedJobs"].append(
    {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": {"spec": {"containers": [{"name": "node", "image": "any"}]}}},
        },
    }
)
WHEN = "2025-01-01T00:00:00Z"


class Cluster:
    """State of the fake cluster: one TrainJob and its pods."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.trainjob: dict | None = None
        self.pods: list[subprocess.Popen[bytes]] = []

    def start(self, trainjob: dict) -> dict:
        """Starts the pods with the variables that the runtime's controller sets."""
        trainjob["metadata"] |= {"namespace": "tests", "creationTimestamp": WHEN}
        trainer = trainjob["spec"]["trainer"]
        for number in range(trainer["numNodes"]):
            place = str(self.folder / f"pod-{number}")
            env = {each["name"]: each["value"].replace("/opt/ml", place) for each in trainer["env"]}
            pet = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"], "NODE_RANK": number}
            pet |= {"MASTER_ADDR": "localhost", "MASTER_PORT": self.port}
            env |= {f"PET_{name}": str(value) for name, value in pet.items()}
            words = [word.replace("/opt/ml", place) for word in trainer["command"]]
            words = [sys.executable if word == "python" else word for word in words]
            with open(self.folder / f"pod-{number}.log", "wb") as log:
                both = {**os.environ, **env}
                self.pods.append(subprocess.Popen(words, env=both, stdout=log, stderr=log, start_new_session=True))
        self.trainjob = trainjob
        return trainjob

    def seen(self) -> dict | None:
        if self.trainjob is not None and all(each.poll() is not None for each in self.pods):
            well = not any(each.returncode for each in self.pods)
            condition = {"type": "Complete" if well else "Failed", "status": "True", "reason": "Ended", "message": ""}
            self.trainjob["status"] = {"conditions": [{**condition, "lastTransitionTime": WHEN}]}
        return self.trainjob

    def listed(self) -> dict:
        found = []
        for number, pod in enumerate(self.pods):
            labels = {"jobset.sigs.k8s.io/replicatedjob-name": "node"}
            labels["batch.kubernetes.io/job-completion-index"] = str(number)
            metadata = {"name": f"pod-{number}", "labels": labels, "creationTimestamp": WHEN}
            phase = "Running" if pod.poll() is None else "Failed" if pod.returncode else "Succeeded"
            found.append({"metadata": metadata, "spec": {"containers": [{"name": "node"}]}, "status": {"phase": phase}})
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found}

    def log(self, name: str, whole: bool) -> bytes:
        if whole:
            self.pods[int(name.removeprefix("pod-"))].wait(100)
        return (self.folder / f"{name}.log").read_bytes()

    def end(self) -> None:
        self.trainjob = None
        for pod in self.pods:
            with contextlib.suppress(ProcessLookupError):
                pod.terminate()
            pod.wait(30)


class _Handler(BaseHTTPRequestHandler):
    cluster: Cluster

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(self.cluster.start(json.loads(body)), 201)

    def do_DELETE(self) -> None:
        self.cluster.end()
        self._answer({"kind": "Status", "status": "Success"})

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        name = path.split("/")
        if name[-1] == "log":
            self._answer(self.cluster.log(name[-2], "follow=True" in query))
        elif name[-1] == "pods":
            self._answer(self.cluster.listed())
        elif name[-2] == "trainjobs":
            self._answer(self.cluster.seen())
        elif name[-2] == "clustertrainingruntimes":
            self._answer(RUNTIME)
        else:
            self._answer(None)

    def _answer(self, what: dict | bytes | None, status: int = 200) -> None:
        if what is None:
            what, status = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}, 404
        body = what if isinstance(what, bytes) else json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(what, bytes) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@contextlib.contextmanager
def cluster(folder: Path, port: int) -> Iterator[tuple[Cluster, Path]]:
    """A cluster, and the file that leads to it. port: where its pods' torchrun meets."""
    made = Cluster(folder, port)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": made}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = folder / "kubeconfig"
    at = {"server": f"http://127.0.0.1:{server.server_port}"}
    context = {"cluster": "c", "user": "u", "namespace": "tests"}
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": at}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": context}],
                "current-context": "x",
            }
        )
    )
    try:
        yield made, config
    finally:
        made.end()
        server.shutdown()
        server.server_close()
