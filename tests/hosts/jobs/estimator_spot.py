"""A spot job of two hosts, one of which loses all its processes: prints both jobs' losses and the restarts."""

import json
import subprocess
import sys
import time
from pathlib import Path

from smddp.estimator import PyTorch

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "estimator")]
from test_restarts import TRAIN

place, rsh = Path(sys.argv[1]), sys.argv[2]
(place / "train.py").write_text(TRAIN)
(place / "undisturbed").touch()
for name in ("undisturbed", "spot"):
    made = PyTorch(
        str(place / "train.py"),
        image_uri="x",
        instance_type="local",
        instance_count=2,
        output_path=str(place / "jobs"),
        checkpoint_s3_uri=str(place / "checkpoints" / name),
        hyperparameters={"a": "/opt/ml/checkpoints", "marker": str(place / name), "port": 7777},
        use_spot_instances=True,
        max_wait=60,
    )
    made.fit(hosts=["h0:1", "h1:1"], rsh=rsh, job_name=name, wait=False)
    until = time.monotonic() + 30
    while not (place / name).exists() and time.monotonic() < until:
        time.sleep(0.02)
    if name == "spot":
        subprocess.run([rsh, "h1", "kill", "-9", "-1"])
    made.latest_training_job.wait()
    losses = json.loads((place / "jobs" / name / "model/losses.json").read_text())
    print(f"{name}: {made.latest_training_job.restarts} restarts, losses {losses}", flush=True)
