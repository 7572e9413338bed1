"""Observers in torch's dispatcher receive the calls of a smddp group; without observers calls have no overhead."""

from __future__ import annotations

import datetime
import json
import pickle
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.cases import keeps_group, on_ranks
from ranks.pool import Pool
from torch._C import _distributed_c10d as c10d

HOOKS = hasattr(c10d.ProcessGroup, "register_pre_hook")
RECORDER = hasattr(c10d, "FlightRecorderHook")
needs_hooks = pytest.mark.skipif(not HOOKS, reason="this torch has no hooks around collectives")
needs_recorder = pytest.mark.skipif(not RECORDER, reason="this torch records no other backends' calls")


def four_calls(group: Any = None) -> None:
    """In the recorder's names: all_reduce, _all_gather_base, broadcast, barrier."""
    size = dist.get_world_size()
    dist.all_reduce(torch.ones(2, 3), group=group)
    dist.all_gather_into_tensor(torch.empty(2 * size), torch.ones(2), group=group)
    dist.broadcast(torch.ones(2), 0, group=group)
    dist.barrier(group=group)


FOUR = ["all_reduce", "_all_gather_base", "broadcast", "barrier"]


def of_the_profiler(calls: Callable[[], None]) -> list[dict[str, Any]]:
    """Returns the events of a chrome trace of `calls`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        calls()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        return json.loads(Path(file.name).read_text())["traceEvents"]


@needs_hooks
@on_ranks(2)
def test_hooks_run_before_and_after_every_call_from_python_and_cpp():
    group = dist.new_group([0, 1])
    hooked: list[Any] = []
    group.register_pre_hook(1, lambda called: hooked.append(("pre", called.name.name, called.op_id)))
    group.register_post_hook(2, lambda called: hooked.append(("post", called.name.name, called.op_id)))
    four_calls(group)
    names = ["ALLREDUCE", "ALLGATHER_BASE", "BROADCAST", "BARRIER"]
    assert [(when, name) for when, name, _ in hooked] == [(when, name) for name in names for when in ("pre", "post")]
    assert [hooked[index][2] for index in (0, 2, 4, 6)] == [hooked[index][2] for index in (1, 3, 5, 7)]
    hooked.clear()
    # C++ callers pass the hooks too: DDP's reducer and functional collectives.
    torch.distributed._functional_collectives.all_reduce(torch.ones(2), "sum", group).wait()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    hooked.clear()
    model(torch.ones(1, 2)).sum().backward()
    assert [name for when, name, _ in hooked if when == "pre"] == ["ALLREDUCE"]
    hooked.clear()
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    four_calls(group)
    assert not hooked and not group._has_observers


@needs_hooks
@on_ranks(2)
def test_an_observed_call_is_unchanged():
    group = dist.new_group([0, 1])
    handles: list[Any] = []
    group.register_post_hook(1, lambda called: handles.append(called.work))
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert type(work).__name__ == "SmddpWork" and handles == [work]
    work.wait()
    assert work.is_completed() and tensor.tolist() == [3.0] * 3
    with pytest.raises(ValueError, match="4 elements"):
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(3), group=group)
    with pytest.raises(RuntimeError, match="meta"):
        dist.all_reduce(torch.empty(4, device="meta"), group=group)
    with pytest.raises(ValueError, match="meta"):
        dist.all_gather_into_tensor(torch.empty(4, device="meta"), torch.ones(2), group=group)
    # An exception of a hook in a coalescing block closes the block.
    group.register_pre_hook(2, refuse)
    with pytest.raises(OverflowError), dist._coalescing_manager(group, torch.device("cpu")):
        dist.all_reduce(torch.ones(1), group=group)
    group.unregister_pre_hook(2)
    four_calls(group)


def refuse(called: Any) -> None:
    raise OverflowError


@needs_hooks
@on_ranks(2)
def test_the_nan_check_finds_nans_before_the_transfer():
    group = dist.new_group([0, 1])
    handle = c10d.NanCheckHook.attach(group)
    dist.all_reduce(torch.ones(2), group=group)
    with pytest.raises(RuntimeError, match=r"(?i)nan"):
        dist.all_reduce(torch.tensor([1.0, float("nan")]), group=group)
    dist.all_reduce(torch.ones(2), group=group)
    handle.remove()
    dist.all_reduce(torch.tensor([float("nan")]), group=group)


@on_ranks(2)
def test_the_profiler_shows_sizes_and_path_of_every_call():
    def calls() -> None:
        four_calls()
        (dist.send if dist.get_rank() else dist.recv)(torch.ones(4), 1 - dist.get_rank())

    events = of_the_profiler(calls)
    of_calls = {event["name"]: event["args"] for event in events if event.get("name", "").startswith("smddp:")}
    assert of_calls["smddp:all_reduce"]["Input Dims"] == [[2, 3]]
    assert of_calls["smddp:all_gather_single"]["Input Dims"] == [[4], [2]]
    paths = [event["args"] for event in events if event.get("name", "").startswith("smddp way: shm")]
    shown = [(path["collective"], path["bytes"]) for path in paths]
    message = "send" if dist.get_rank() else "recv"
    assert shown == [("all_reduce", 24), ("all_gather", 16), ("broadcast", 8), ("barrier", 0), (message, 16)]
    assert all(path["path"].startswith("shm") and path["group"] for path in paths)
    if HOOKS:
        assert {"c10d::allreduce_", "c10d::_allgather_base_", "c10d::barrier"} <= {
            event.get("name") for event in events
        }


@needs_hooks
@on_ranks(2)
def test_dispatch_modes_count_calls_like_those_of_any_backend():
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counted:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2))
    assert counted.get_total_counts() == 2


class Group:
    """The attributes of a group that the dispatch uses."""

    _has_observers = False

    def _failed(self, error: BaseException) -> BaseException:
        return error


def test_the_check_for_observers_costs_at_most_300_ns():
    from smddp.torch.dispatch import collective
    from torch.autograd import _profiler_enabled

    def method(self: Any, tensors: Any, opts: Any) -> None:
        pass

    def without_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if _profiler_enabled():
                raise AssertionError
            return method(self, *args, **kwargs)
        except BaseException as error:
            raise self._failed(error) from None

    with_check, group = collective("nothing")(method), Group()

    def microseconds(function: Callable[..., Any]) -> float:
        times = timeit.repeat(lambda: function(group, 1, 2), number=200, repeat=30, timer=time.thread_time)
        return min(times) / 200 * 1e6

    assert min(microseconds(with_check) - microseconds(without_check) for _ in range(5)) <= 0.3


# The recorder runs in separate ranks: torch reads its variables once.


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pool, Path]]:
    dumps = tmp_path_factory.mktemp("dumps")
    variables = {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_FR_DUMP_TEMP_FILE": f"{dumps}/rank_"}
    with Pool(3, environment=lambda rank: variables) as pool:
        yield pool, dumps


@needs_recorder
def test_the_flight_recorder_has_four_of_four_calls(recording):
    recording[0].run(__name__, "four_are_recorded", 60.0)


def recorded() -> list[dict[str, Any]]:
    return pickle.loads(c10d._dump_fr_trace(backend="smddp"))["entries"]


@keeps_group
def four_are_recorded():
    four_calls()
    # creating a group makes calls for torch's store as well
    newest = recorded()[-4:]
    assert [entry["profiling_name"] for entry in newest] == [f"smddp:{name}" for name in FOUR]
    assert newest[0]["input_sizes"] == [[2, 3]]
    assert "four_calls" in {frame["name"] for frame in newest[0]["frames"]}
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1), group=group)
        assert recorded()[-1]["process_group"][0] == group.group_name
        dist.destroy_process_group(group)


def analysed(dumps: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Returns the report of torch's analyzer of the dumps."""
    from torch.distributed.flight_recorder import fr_trace

    assert sorted(dump.name for dump in dumps.iterdir()) == ["rank_0", "rank_1", "rank_2"]
    caplog.set_level("INFO")
    fr_trace.main([str(dumps), "--prefix", "rank_"])
    return caplog.text


@needs_recorder
def test_fr_trace_names_the_missing_rank(recording, caplog):
    pool, dumps = recording
    pool.run(__name__, "one_rank_is_missing", 60.0)
    report = analysed(dumps, caplog)
    assert "missing ranks: {1}" in report and "collective: smddp:all_reduce" in report, report


@needs_recorder
def test_fr_trace_names_the_rank_with_another_call(recording, caplog):
    pool, dumps = recording
    pool.run(__name__, "one_rank_makes_another_call", 60.0)
    report = analysed(dumps, caplog)
    assert "Culprit rank 1" in report and "'_reduce_scatter_base' does not match" in report, report


def reset_recorder() -> None:
    from smddp.torch import flight_recorder

    flight_recorder._dumped = False
    c10d._reset_fr_trace(backend="smddp")


@keeps_group
def one_rank_is_missing():
    from smddp import CollectiveTimeoutError

    reset_recorder()
    group = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=1))
    if dist.get_rank() == 1:
        c10d._dump_fr_trace_file(1, backend="smddp")
    else:
        with pytest.raises(CollectiveTimeoutError):
            dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()
    group.abort()


@keeps_group
def one_rank_makes_another_call():
    from smddp import MismatchError

    reset_recorder()
    dist.barrier()
    with pytest.raises(MismatchError):
        if dist.get_rank() != 1:
            dist.reduce_scatter_tensor(torch.empty(2), torch.ones(6))
        dist.all_reduce(torch.ones(4))
