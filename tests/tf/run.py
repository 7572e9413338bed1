"""One rank: `python run.py MODULE [CASE ...]`. Runs the module's cases and prints each result as a line of JSON."""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).parent))

import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)

import smdistributed.dataparallel.tensorflow as sdp


def main() -> None:
    module = importlib.import_module(f"cases.{sys.argv[1]}")
    sdp.init(timeout=60)
    for name, case in list(vars(module).items()):
        if not name.startswith("case_") or (sys.argv[2:] and name not in sys.argv[2:]):
            continue
        try:
            skipped, error = case(), ""
        except BaseException:
            skipped, error = None, traceback.format_exc()
        report = {"case": name[5:], "rank": sdp.rank(), "error": error, "skipped": skipped}
        os.write(1, ("\n@" + json.dumps(report) + "\n").encode())
        if error:
            # The ranks are out of step.
            os._exit(1)
    sdp.shutdown()


if __name__ == "__main__":
    main()
