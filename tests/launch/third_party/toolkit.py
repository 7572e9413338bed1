"""A job of the unmodified training toolkit: its folder as the service lays it out, and its `train` program."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Image:
    """Toolkit installation of a container image: directory of programs, and module of the framework's part."""

    bin: Path
    module: str

    def there(self) -> bool:
        return (self.bin / "train").exists()


PYTORCH = Image(Path(sys.executable).parent, "sagemaker_pytorch_container.training:main")
TENSORFLOW = Image(
    Path(__file__).parents[3] / ".venvs" / "toolkit-tensorflow" / "bin", "sagemaker_tensorflow_container.training:main"
)

DATA_PARALLEL = {"sagemaker_distributed_dataparallel_enabled": True, "sagemaker_instance_type": "ml.p4d.24xlarge"}
PYTORCH_DDP = {"sagemaker_pytorch_ddp_enabled": True, "sagemaker_instance_type": "ml.p4d.24xlarge"}
TORCH_DISTRIBUTED = {"sagemaker_torch_distributed_enabled": True, "sagemaker_instance_type": "ml.p4d.24xlarge"}
MODEL_PARALLEL = {
    "sagemaker_mpi_enabled": True,
    "sagemaker_mpi_num_of_processes_per_host": 2,
    "sagemaker_mpi_custom_mpi_options": "",
    "sagemaker_instance_type": "ml.p4d.24xlarge",
    "mp_parameters": {"hybrid_shard_degree": 2},
}


@dataclass
class Ended:
    status: int
    log: str
    success: bool
    failure: str
    model: list[str]

    def kind(self) -> str:
        """The error's name, with which a failure file begins."""
        return self.failure.partition(":")[0]


class Job:
    """One host of a job, in a separate folder, which is mounted at `base`."""

    def __init__(
        self,
        folder: Path,
        script: str,
        parameters: dict,
        image: Image,
        *,
        hosts: list[str],
        host: str,
        ranks: int,
        base: Path | None = None,
    ) -> None:
        self.folder, self.image = folder, image
        base = base or folder
        # The toolkit counts GPUs by this program, and starts a rank for each.
        programs = folder / "bin"
        programs.mkdir(parents=True)
        (programs / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(f"echo GPU {rank}\n" for rank in range(ranks)))
        (programs / "nvidia-smi").chmod(0o755)
        config, code = folder / "input" / "config", folder / "code"
        for path in (config, code, folder / "model", folder / "output", folder / "input" / "data"):
            path.mkdir(parents=True, exist_ok=True)
        (code / "script.py").write_text(script)
        hyperparameters = {
            "sagemaker_program": "script.py",
            "sagemaker_submit_directory": str(base / "code"),
            "sagemaker_container_log_level": 20,
            **parameters,
        }
        # Every value of that file is JSON in a string.
        text = {name: json.dumps(value) for name, value in hyperparameters.items()}
        (config / "hyperparameters.json").write_text(json.dumps(text))
        (config / "inputdataconfig.json").write_text("{}")
        resources = {
            "current_host": host,
            "hosts": hosts,
            "network_interface_name": "lo" if len(hosts) == 1 else "eth0",
            "current_group_name": "homogeneousCluster",
            "current_instance_type": "ml.p4d.24xlarge",
            "instance_groups": [
                {"instance_group_name": "homogeneousCluster", "instance_type": "ml.p4d.24xlarge", "hosts": hosts}
            ],
        }
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SM", "PYTEST"))},
            "PATH": f"{base / 'bin'}:{image.bin}:{os.environ['PATH']}",
            "SAGEMAKER_BASE_DIR": str(base),
            "SAGEMAKER_TRAINING_MODULE": image.module,
            "AWS_REGION": "us-west-2",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "random",
        }

    def start(self) -> subprocess.Popen[bytes]:
        # A file, since the SSH server that it leaves would keep a pipe open.
        with open(self.folder / "log", "w") as log:
            return subprocess.Popen(
                [str(self.image.bin / "train")],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self, process: subprocess.Popen[bytes], timeout: float = 200) -> Ended:
        try:
            process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return self.left(process.returncode)

    def left(self, status: int) -> Ended:
        """Returns the toolkit's exit status and results."""
        output = self.folder / "output"
        failure = output / "failure"
        return Ended(
            status,
            (self.folder / "log").read_text(),
            (output / "success").exists(),
            failure.read_text() if failure.exists() else "",
            sorted(path.name for path in (self.folder / "model").iterdir()),
        )


def run(folder: Path, script: str, parameters: dict, image: Image = PYTORCH, ranks: int = 2) -> Ended:
    """A job of one host."""
    shutil.rmtree(folder, ignore_errors=True)
    job = Job(folder, script, parameters, image, hosts=["localhost"], host="localhost", ranks=ranks)
    return job.ended(job.start())


def ended_well(ended: Ended) -> None:
    assert ended.status == 0 and ended.success and not ended.failure, ended.log[-6000:]
    assert ended.model == ["model.pt"]


def blames(ended: Ended, kind: str, *words: str) -> None:
    """The job failed, and its failure file has this error's name and these words."""
    assert ended.status != 0 and not ended.success, ended.log[-6000:]
    assert ended.kind() == kind and all(word in ended.failure for word in words), ended.failure[:6000]


def blames_the_user(ended: Ended) -> None:
    blames(ended, "ExecuteUserScriptError", 'KeyError: "the user\'s own"')
