"""`deploy` with a small server in vLLM's place, and the methods that need SageMaker's service."""

import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from smddp.estimator import DeployError, PyTorch, serving

#: Answers /health and /v1/completions as vLLM does.
SERVER = """#!/usr/bin/env python3
import http.server, json, subprocess, sys
assert sys.argv[1] == "serve" and sys.argv[3] == "--host", sys.argv
if "--fails" in sys.argv:
    sys.exit("no memory")
if "--child" in sys.argv:
    words = ["sh", "-c", "trap '' TERM; echo $$ > child; while :; do sleep 0.1; done"]
    subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def do_GET(self):
        root = "/elsewhere" if "--other" in sys.argv else sys.argv[2]
        self.reply(200, {"data": [{"id": "model", "root": root}]} if self.path == "/v1/models" else {})
    def do_POST(self):
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(*(400, "no prompt") if "prompt" not in given else (200, {"text": given["prompt"][::-1]}))
http.server.HTTPServer((sys.argv[4], int(sys.argv[6])), Handler).serve_forever()
"""


@pytest.fixture
def made(tmp_path, monkeypatch) -> PyTorch:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import os, pathlib; pathlib.Path(os.environ['SM_MODEL_DIR'], 'config.json').touch()")
    estimator = PyTorch("train.py", image_uri="x", instance_type="local")
    estimator.fit(logs=False)
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return estimator


def install(place: Path) -> None:
    (place / "vllm").write_text(SERVER)
    (place / "vllm").chmod(0o755)


def test_a_model_is_served_until_its_endpoint_is_deleted(made, tmp_path):
    install(tmp_path)
    predictor = made.deploy(1, "ml.g5.xlarge")
    try:
        assert predictor.predict("abc") == {"text": "cba"} == predictor.predict({"prompt": "abc", "max_tokens": 1})
        with pytest.raises(DeployError, match=r"answers 400: .*no prompt"):
            predictor.predict({})
    finally:
        predictor.delete_endpoint()
    with pytest.raises(DeployError, match=r"no response from http://127.0.0.1"):
        predictor.predict("abc")


def test_a_deployment_that_cannot_be_is_an_error(made, tmp_path, monkeypatch):
    monkeypatch.setattr(serving.shutil, "which", lambda name: None)
    with pytest.raises(ImportError, match=r"no server is installed: .*pip install vllm.*TorchServe or Triton"):
        made.deploy()
    monkeypatch.undo()
    with pytest.raises(TypeError, match="unknown argument 'instance_typ'; did you mean 'instance_type'"):
        made.deploy(instance_typ="local")
    (made.latest_training_job.folder / "model/config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json: vLLM serves causal language models"):
        made.deploy()
    with pytest.raises(RuntimeError, match="deploy: no job: call fit"):
        PyTorch("train.py", image_uri="x", instance_type="local").deploy()


def test_a_server_that_ends_is_named_with_its_last_lines(made, tmp_path):
    install(tmp_path)
    with pytest.raises(DeployError, match="exit status 1; its last lines:\nno memory"):
        made.deploy(server_arguments=["--fails"])


def test_a_port_of_another_server_is_an_error(made, tmp_path):
    install(tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
        Path("health").touch()
        threading.Thread(target=other.serve_forever, daemon=True).start()
        try:
            with pytest.raises(DeployError, match=f"port {other.server_port} of .* cannot be used .*give another"):
                made.deploy(port=other.server_port)
        finally:
            other.shutdown()
    with pytest.raises(DeployError, match=r"has /elsewhere: expected .*/model: give another port"):
        made.deploy(server_arguments=["--other"])
    with pytest.raises(ValueError, match="70000"):
        made.deploy(port=70000)


def ended(child: int) -> bool:
    """Returns whether a process ends within 5 seconds; a zombie has ended."""
    for _ in range(50):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_server_outlives_its_thread_and_ends_with_its_children(made, tmp_path):
    install(tmp_path)
    found = []
    thread = threading.Thread(target=lambda: found.append(made.deploy(server_arguments=["--child"])))
    thread.start()
    thread.join()
    time.sleep(0.3)
    try:
        assert found[0].predict("abc") == {"text": "cba"}
    finally:
        found[0].delete_endpoint()
        found[0].delete_endpoint()
    assert ended(int(Path("child").read_text()))


def test_a_server_ends_when_python_exits(made, tmp_path):
    install(tmp_path)
    code = "import sys, pathlib; from smddp.estimator import serving; serving.find_spec = lambda name: None\n"
    code += "serving.deploy(pathlib.Path(sys.argv[1]), server_arguments=['--child'])"
    folder = made.latest_training_job.folder / "model"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60, env=os.environ)
    assert ended(int(Path("child").read_text()))


@pytest.mark.parametrize("name", serving.INSTEAD)
def test_a_method_of_the_service_says_what_to_do_instead(name):
    for owner in (PyTorch, PyTorch("a.py", image_uri="x", instance_type="local")):
        with pytest.raises(NotImplementedError, match=f"PyTorch.{name}: ") as raised:
            getattr(owner, name)("job")
        assert serving.INSTEAD[name] in str(raised.value)
