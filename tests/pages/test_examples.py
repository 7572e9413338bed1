"""The examples that no other test runs.

tests/hosts has ddp, fsdp1, fsdp2 and dtensor_tp, tests/faults elastic_ddp, tests/world numpy_allreduce; the demos have
smp, smp_v1, tensorflow_mnist and keras_fit.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import reading

EXAMPLES = reading.ROOT / "examples"
SMALL = ("--dim", "64", "--context", "32", "--backend", "smddp")


def ranks(count: int, example: str, *words: object) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [*launch, str(EXAMPLES / example), *SMALL, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The two longest, in `make test-pages`: tests/modelparallel and tests/smp/test_checkpoint.py hold what they show, too.
@pytest.mark.slow
def test_the_pipeline_has_the_losses_of_one_process():
    output = ranks(4, "pipeline.py", "--steps", 6, "--check")
    assert "4 stages, 4 microbatches" in output and "from the losses of one process" in output


@pytest.mark.slow
def test_two_ranks_go_on_where_four_were(tmp_path: Path):
    def losses(output: str) -> dict[str, str]:
        return dict(line.split(": loss ") for line in output.splitlines() if ": loss " in line)

    four = losses(ranks(4, "reshard.py", "--steps", 6, "--save", tmp_path / "checkpoint"))
    two = losses(ranks(2, "reshard.py", "--steps", 6, "--load", tmp_path / "checkpoint"))
    assert list(two) == ["step 4", "step 5", "step 6"]
    for step, loss in two.items():
        assert abs(float(loss) - float(four[step])) < 2e-3, (four, two)


def test_a_profile_shows_the_collectives_in_torchs_timeline_and_in_the_traces(tmp_path: Path):
    output = ranks(2, "profiling.py", "--steps", 4, "--out", tmp_path)
    assert "smddp:all_reduce" in output
    events = json.loads((tmp_path / "rank1.trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "smddp:all_reduce" for event in events)
    command = [Path(sys.executable).parent / "smddp", "trace", *sorted(tmp_path.glob("*.dump.json"))]
    done = subprocess.run([*command, "-o", tmp_path / "ranks.json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "of 2 processes" in done.stdout, done.stdout + done.stderr
