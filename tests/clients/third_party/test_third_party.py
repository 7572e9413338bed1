"""Third-party clients on our backend: each script trains to the losses of one process.

Needs `requirements-clients.txt`; run by `make test-clients`, not by the default run. A client that is
not installed is skipped by name.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
BACKEND = os.environ.get("SMDDP_TEST_BACKEND", "smddp")

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(400)]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("package", "script"),
    [
        ("deepspeed", "deepspeed_zero3.py"),
        ("lightning", "lightning_ddp.py"),
        ("accelerate", "accelerate_sagemaker.py"),
        ("transformers", "transformers_sagemaker.py"),
    ],
)
def test_client_equals_one_process(package, script, world_size, tmp_path):
    _run(package, script, world_size, tmp_path)


def test_accelerate_with_fsdp2_and_tensor_parallelism_equals_one_process(tmp_path):
    _run("accelerate", "accelerate_tensor_parallel.py", 4, tmp_path)


def test_peft_on_shared_layers_equals_one_process(tmp_path):
    _run("peft", "peft_lora.py", 4, tmp_path)


def test_trainer_saves_adapters_of_shared_layers_as_one_process(tmp_path):
    _run("peft", "peft_trainer.py", 4, tmp_path)


def _run(package, script, world_size, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -r tests/clients/third_party/requirements-clients.txt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command += ["--redirects=0", os.path.join(HERE, script)]
    environment = {
        **os.environ,
        "SMDDP_TEST_BACKEND": BACKEND,
        "OMP_NUM_THREADS": "1",
        # Nothing is looked up on the network.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(tmp_path),
    }
    log = tmp_path / "log.txt"
    with open(log, "w") as text:
        process = subprocess.Popen(
            command, stdout=text, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path, start_new_session=True
        )
        try:
            status = process.wait(300)
        except subprocess.TimeoutExpired:
            # On SIGTERM torchrun ends its workers, which are in separate sessions.
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            status = "no end within 300 s"
    assert status == 0, f"{script}: {status}\n{log.read_text()[-6000:]}"
