"""What several folders share: a pool of ranks, and the process that all rank processes are forked from."""

import multiprocessing
import signal
import sys
from pathlib import Path

# `ranks`, the pool of tests/clients, serves tests/smp too, and tests/hosts runs its cases.
sys.path.insert(0, str(Path(__file__).with_name("clients")))

# What a shell runs in the background ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imported once and not by each rank, four at a time on two cores. None of them starts a thread.
multiprocessing.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "transformers.modeling_utils",
        "transformers.models.llama.modeling_llama",
    ]
)
