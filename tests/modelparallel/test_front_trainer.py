"""transformers' Trainer over a pipeline of two processes, started as mpirun would start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist
import transformers

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "trainer_script.py")


def run(*arguments: str, processes: int = 0) -> dict:
    """Return the output of the script in one process, or in ``processes`` of a pipeline."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if not processes:
        output = subprocess.run([sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, timeout=240)
        assert output.returncode == 0, output.stderr.decode()[-6000:]
        return json.loads(output.stdout.decode().splitlines()[-1])
    # The ranks take it for a store that is already there.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment |= {
        "SM_HP_MP_PARAMETERS": json.dumps({"partitions": processes, "microbatches": 2}),
        "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True}),
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    started = []
    for rank in range(processes):
        place = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
        started.append(
            subprocess.Popen(
                [sys.executable, SCRIPT, *arguments],
                env={**environment, **place},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, stderr) in zip(started, outputs):
        assert process.returncode == 0, stderr[-6000:]
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(transformers.__version__ >= "5", reason="its Trainer makes no optimizer for SMP: wants 4.57")
def test_a_trainer_trains_evaluates_saves_and_resumes_with_the_losses_of_one_process(tmp_path):
    expected = run(str(tmp_path / "one"))
    found = run(str(tmp_path / "two"), processes=2)
    for key in ("loss", "grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=2e-4), key
    assert len(found["loss"]) == 6
    assert found["eval"] == pytest.approx(expected["eval"], rel=1e-4)
    resumed = run(str(tmp_path / "resumed"), str(tmp_path / "two" / "checkpoint-3"), processes=2)
    assert resumed["loss"][-3:] == pytest.approx(expected["loss"][-3:], rel=2e-4)
    assert resumed["eval"] == pytest.approx(expected["eval"], rel=1e-4)
