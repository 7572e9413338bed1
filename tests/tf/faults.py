"""One rank of a job that fails: `python faults.py KIND`. Says how its own step ended, in a line of JSON."""

import json
import os
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import smdistributed.dataparallel.tensorflow as sdp
import tensorflow as tf


@tf.function
def step(value):
    for _ in tf.range(3):
        value = sdp.oob_allreduce(value) + 0.0
    return value


@tf.function
def another(value):
    return sdp.oob_allreduce(tf.concat([value, value], 0))


@tf.function
def gradients(values, absent):
    with tf.GradientTape() as tape:
        tape.watch(values)
        loss = sum(tf.reduce_sum(value) for value in (values[1:] if absent else values))
    return sdp.DistributedGradientTape(tape).gradient(loss, values)


def main() -> None:
    kind = sys.argv[1]
    sdp.init(timeout=3 if kind == "timeout" else 60)
    value = tf.ones(1000)
    step(value)
    another(value)
    sdp.get_worker_comm().barrier()
    last = sdp.rank() == sdp.size() - 1
    begun = time.time()
    os.write(1, b"\nready\n")
    try:
        if kind == "killed" and last:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "interrupted" and last:
            # Wait until the other ranks, which wait for this rank in a step, have ended.
            sys.stdin.readline()
        if kind == "timeout" and last:
            time.sleep(6)
        if kind == "absent":
            gradients([tf.ones(1000), tf.ones(1000)], last)
        (another if kind == "mismatch" and last else step)(value)
        error = None
    except BaseException as raised:
        error = raised
    report = {"rank": sdp.rank(), "begun": begun, "ended": time.time()}
    report |= {"kind": type(error).__name__, "text": str(error)}
    os.write(1, ("\n@" + json.dumps(report) + "\n").encode())
    os._exit(0 if error is None else 3)


if __name__ == "__main__":
    main()
