"""Imports torch's own distributed suite under one backend name and runs it under another.

The suite decides at import, in decorators, which tests a backend may run: it compares the module
global ``BACKEND`` (read from the environment) with the names of the built-in backends. A backend
it does not know would skip nearly everything, so the module is imported under a known name and
the global, which the test bodies read when they run, is set to the wanted name afterwards.
"""

from __future__ import annotations

import importlib
import os
import types
import unittest

SUITE = "torch.testing._internal.distributed.distributed_test"

# Ranks outnumber cores: one arithmetic thread each. These must be set before torch is imported,
# and no thread may exist in the process that forks the ranks.
_SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# Tests whose body knows only the built-in names and builds no model under any other. They ask
# `dist.get_backend()` for nothing, so the gate's name serves once the group exists.
_NAMES_IN_BODY = "test_accumulate_gradients_no_sync"

# The suite's file barrier waits 10 s by default, which a loaded machine can exceed.
_FILE_BARRIER_SECONDS = 60


def load(
    backend: str,
    gate: str,
    world_size: int,
    subgroups: bool = False,
    expect_profiler_events: bool = False,
) -> types.ModuleType:
    """Returns the suite's module, gated as backend ``gate`` and set to run ``backend``.

    ``subgroups`` also lets the tests on the sub-group {1, 2} run, which the suite keeps for worlds
    of 8 ranks and more unless the environment names MPI when the test runs.
    Can be called once per process: decorators are evaluated at import.
    """
    for name in _SINGLE_THREADED:
        os.environ[name] = "1"
    os.environ.update(
        BACKEND=gate,
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        # Only the prefix matters at import; every test gets its own file, see `point_at`.
        INIT_METHOD="file://unset",
    )
    suite = importlib.import_module(SUITE)
    suite.BACKEND = backend
    suite.GATE = gate
    os.environ["BACKEND"] = "mpi" if subgroups else backend
    suite.Barrier.sync.__func__.__defaults__ = (None, _FILE_BARRIER_SECONDS)
    if expect_profiler_events:
        suite.PROFILING_SUPPORTED_BACKENDS.append(backend)
        suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    return suite


def point_at(suite: types.ModuleType, directory: str) -> None:
    """Makes this process's run of a test use ``directory`` for its rendezvous and file barrier."""
    os.environ["TEMP_DIR"] = directory
    suite.INIT_METHOD = f"file://{directory}/init_dir/shared_init_file"


def make_directories(directory: str) -> None:
    """Creates what the suite expects to find below ``TEMP_DIR``."""
    for name in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(directory, name))


def test_names(suite: types.ModuleType) -> list[str]:
    """All tests of the suite, sorted."""
    base = suite.DistributedTest._DistTestBase
    return sorted(unittest.TestLoader().getTestCaseNames(base))


def static_skip(suite: types.ModuleType, test: str) -> str | None:
    """The reason a decorator gave at import for skipping ``test``, or None."""
    method = getattr(suite.DistributedTest._DistTestBase, test)
    if getattr(method, "__unittest_skip__", False):
        return method.__unittest_skip_why__
    return None


def skip_message(exit_code: int) -> str | None:
    """The reason behind an exit status that the suite uses to say "skipped", or None."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if skip.exit_code == exit_code:
            return skip.message
    return None


def rank_class(suite: types.ModuleType) -> type:
    """The test case one rank runs: the suite's own, reporting failure by exception alone."""
    gate = suite.GATE

    class SuiteRank(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def run_test(self, test_name: str, parent_pipe: object) -> None:
            # The parent watches exit statuses and log files, so the suite's pipe and its
            # listener thread are not needed.
            os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
            if test_name.startswith(_NAMES_IN_BODY):
                suite.BACKEND = gate
            suite.torch.testing._internal.common_utils.set_rng_seed()
            getattr(self, test_name)()

    return SuiteRank
