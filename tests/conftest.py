"""The server that all rank processes are forked from."""

import multiprocessing
import signal

# A background job of a shell ignores Ctrl-C, as would every process that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Modules that the server imports once for all ranks. None of them starts a thread.
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
