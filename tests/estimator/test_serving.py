"""`deploy` with a small server in vLLM's place, and the methods that need SageMaker's service."""

from pathlib import Path

import pytest
from smddp.estimator import DeployError, PyTorch, serving

#: Answers /health and /v1/completions as vLLM does.
SERVER = """#!/usr/bin/env python3
import http.server, json, sys
assert sys.argv[1] == "serve" and sys.argv[3] == "--host", sys.argv
if "--fails" in sys.argv:
    sys.exit("no memory")
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def do_GET(self):
        self.reply(200, {})
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
    with pytest.raises(DeployError, match=r"no answer of http://127.0.0.1"):
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


@pytest.mark.parametrize("name", serving.INSTEAD)
def test_a_method_of_the_service_says_what_to_do_instead(name):
    for owner in (PyTorch, PyTorch("a.py", image_uri="x", instance_type="local")):
        with pytest.raises(NotImplementedError, match=f"PyTorch.{name}: ") as raised:
            getattr(owner, name)("job")
        assert serving.INSTEAD[name] in str(raised.value)
