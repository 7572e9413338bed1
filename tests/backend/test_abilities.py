"""torch's queries and methods of a group and its backend besides collectives: each returns or is refused by name."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from torch._C import _distributed_c10d as c10d

CPU = torch.device("cpu")
# torch's setup of a group, not called on a group in use.
SETTING_UP = {
    "_pybind11_conduit_v1_",
    "_register_backend",
    "_set_default_backend",
    "_set_group_desc",
    "_set_group_name",
    "unbox",
}
# They end the group, so each gets a new group.
ENDING = {"abort", "shutdown"}
# They change the group's ranks, and have separate tests.
CHANGING = {"reconfigure", "shrink"}


def ones(count: int = 2) -> torch.Tensor:
    return torch.ones(count)


def options() -> Any:
    return c10d.Backend.Options("smddp", datetime.timedelta(seconds=3))


def hook(*arguments: Any) -> None:
    raise AssertionError(f"called with {arguments}")


def peer() -> int:
    return 1 - dist.get_rank()


def root_options(kind: Any) -> Any:
    made = kind()
    made.rootRank = 0
    return made


def lists(kind: Any, inputs: bool) -> tuple[Any, ...]:
    """The arguments of a gather (or, with inputs at the root, a scatter) of lists to rank 0."""
    parts = [[ones(), ones()]] if dist.get_rank() == 0 else []
    return ([ones()], parts, root_options(kind)) if inputs else (parts, [ones()], root_options(kind))


def second() -> datetime.timedelta:
    return datetime.timedelta(seconds=30)


# The arguments of each method: no more than one rank needs to make the call together with another.
ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "_add_ephemeral_timeout": lambda: (second(),),
    "_allgather_base": lambda: (ones(4), ones()),
    "_backend_id": lambda: (c10d.ProcessGroup.BackendType.CUSTOM,),
    "_get_backend": lambda: (CPU,),
    "_reduce_scatter_base": lambda: (ones(), ones(4)),
    "_register_on_completion_hook": lambda: (hook,),
    "_set_default_timeout": lambda: (second(),),
    "_set_group_uid": lambda: ("group",),
    "_verify_params_across_processes": lambda: ([ones()],),
    "all_gather_single": lambda: (ones(4), ones()),
    "all_gather_single_coalesced": lambda: ([ones(4)], [ones()]),
    "all_to_all_single": lambda: (ones(), ones(), [], []),
    "allgather": lambda: ([[ones(), ones()]], [ones()]),
    "allgather_coalesced": lambda: ([[ones()], [ones()]], [ones()]),
    "allgather_into_tensor_coalesced": lambda: ([ones(4)], [ones()]),
    "allocate_tensor": lambda: (8,),
    "allreduce": lambda: ([ones()],),
    "allreduce_coalesced": lambda: ([ones()],),
    "allreduce_sparse": lambda: ([ones().to_sparse()],),
    "alltoall": lambda: ([ones(), ones()], [ones(), ones()]),
    "alltoall_base": lambda: (ones(), ones(), [], []),
    "broadcast": lambda: ([ones()], root_options(c10d.BroadcastOptions)),
    "eager_connect_single_device": lambda: (CPU,),
    "gather": lambda: lists(c10d.GatherOptions, inputs=False),
    "gather_into_tensor": lambda: (ones(4), ones(), root_options(c10d.GatherOptions)),
    "gather_single": lambda: (ones(4), ones(), root_options(c10d.GatherOptions)),
    "get_backend": lambda: (CPU,),
    "merge": lambda: (dist.HashStore(), options(), 0, 2),
    "merge_remote_group": lambda: (dist.HashStore(), 4, second()),
    "perform_nocolor_split": lambda: (CPU,),
    "recv": lambda: ([ones()], peer(), 7),
    "recv_anysource": lambda: ([ones()], 7),
    "reduce": lambda: ([ones()], root_options(c10d.ReduceOptions)),
    "reduce_scatter": lambda: ([ones()], [[ones(), ones()]]),
    "reduce_scatter_single": lambda: (ones(), ones(4)),
    "reduce_scatter_single_coalesced": lambda: ([ones()], [ones(4)]),
    "reduce_scatter_tensor_coalesced": lambda: ([ones()], [ones(4)]),
    "register_abort_hook": lambda: (1, hook),
    "register_post_hook": lambda: (1, lambda called: None),
    "register_pre_hook": lambda: (1, lambda called: None),
    "scatter": lambda: lists(c10d.ScatterOptions, inputs=True),
    "send": lambda: ([ones()], peer(), 7),
    "setUsePgForSymmMemRendezvous": lambda: (False,),
    "set_timeout": lambda: (second(),),
    "split": lambda: (dist.HashStore(), [0, 1], options()),
    "split_group": lambda: ([0, 1],),
    "supports_tensor_alloc": lambda: (CPU,),
    "unregister_abort_hook": lambda: (1,),
    "unregister_post_hook": lambda: (1,),
    "unregister_pre_hook": lambda: (1,),
}
NAMED: dict[str, dict[str, Any]] = {"allocate_tensor": {"dtype": torch.float32, "device": CPU}}
# The matching calls of a message.
ANSWERS = {"send": ("recv",), "recv": ("send",), "recv_anysource": ("send",)}


def names(base: type) -> list[str]:
    """Returns the names of methods and properties of torch's class, without special names and constants."""
    found = []
    for name in dir(base):
        value = inspect.getattr_static(base, name)
        if not name.startswith("__") and name not in SETTING_UP and (callable(value) or isinstance(value, property)):
            if not inspect.isclass(value) and not isinstance(value, getattr(base, "BackendType", ())):
                found.append(name)
    return found


def wrong(name: str, ask: Callable[[], Any]) -> str | None:
    """Returns the error of one query, or None. A refusal is valid if it names the method and smddp."""
    try:
        answer = ask()
        if isinstance(answer, dist.Work):
            answer.wait()
    except NotImplementedError as error:
        return None if name in str(error) and "smddp" in str(error) else f"{name}: refused without its name: {error}"
    except BaseException as error:
        return f"{name}: {type(error).__name__}: {str(error)[:200]}"
    return None


def asked(shown: Any, base: type, calls: bool) -> list[str]:
    """Queries all properties of torch's class `base` on `shown`. Returns the errors.

    calls: also call all methods.
    """
    failures = []
    for name in names(base):
        if isinstance(inspect.getattr_static(base, name), property):
            failures.append(wrong(name, lambda name=name: getattr(shown, name)))
        elif calls and name not in ENDING | CHANGING:
            failures.append(wrong(name, lambda name=name: call(shown, name)))
    return [failure for failure in failures if failure is not None]


def call(shown: Any, name: str) -> Any:
    arguments = ARGUMENTS.get(name, tuple)
    if name.endswith("_coalescing") and isinstance(shown, dist.ProcessGroup):
        # Opens and closes a block for either of the two methods.
        shown._start_coalescing(CPU)
        return shown._end_coalescing(CPU)
    if name.endswith("_time_estimate"):
        shown._start_time_estimate()
        return shown._end_time_estimate()
    others = [getattr(shown, other)(*ARGUMENTS[other]()) for other in ANSWERS.get(name, ())]
    work = getattr(shown, name)(*arguments(), **NAMED.get(name, {}))
    for other in others:
        other.wait()
    return work


def backend_of(group: Any) -> Any:
    return group._get_backend(CPU)


@on_ranks(2)
def test_a_group_answers_all_queries_and_methods_of_torch():
    failures = asked(dist.new_group([0, 1]), c10d.ProcessGroup, calls=True)
    assert not failures, "\n".join(failures)


@on_ranks(2)
def test_a_backend_answers_all_queries_and_methods_of_torch():
    from smddp.torch.device_map import SmddpDevice

    group = dist.new_group([0, 1])
    backend = backend_of(group)
    if isinstance(backend, SmddpDevice):
        failures = asked(backend, c10d.Backend, calls=True)
    else:  # an older torch has its own placeholder, and queries only what it supports
        asks = [name for name in names(c10d.Backend) if name.startswith("supports_")]
        failures = [failure for name in asks if (failure := wrong(name, lambda name=name: getattr(backend, name)))]
    assert not failures, "\n".join(failures)


@on_ranks(2)
def test_a_group_can_be_ended_through_the_group_and_its_backend():
    from smddp.torch.device_map import SmddpDevice

    for name in sorted(ENDING):
        for show in (lambda group: group, backend_of):
            group = dist.new_group([0, 1])
            shown = show(group)
            if hasattr(type(shown), name) and (shown is group or isinstance(shown, SmddpDevice)):
                getattr(shown, name)()
                getattr(shown, name)()
            dist.barrier()


@on_ranks(2)
def test_a_group_supports_reconfigure_and_no_windows():
    group = dist.new_group([0, 1])
    for name, answer in (("_supports_reconfigure", True), ("_supports_window", False)):
        if hasattr(dist, name):
            assert getattr(dist, name)(group) is answer
            assert getattr(dist, name)() is answer
    if hasattr(c10d.Backend, "supports_window"):
        assert backend_of(group).supports_window is False
    if hasattr(c10d.Backend, "supports_reconfigure"):
        assert backend_of(group).supports_reconfigure is True


@on_ranks(2)
def test_a_backend_reports_its_groups_error():
    from smddp.torch.device_map import SmddpDevice

    group = dist.new_group([0, 1])
    backend = backend_of(group)
    # An older torch has its own placeholder.
    if isinstance(backend, SmddpDevice):
        assert backend.get_error() == c10d.ErrorType.SUCCESS
        dist.barrier()
        group.abort()
        assert backend.get_error() == group.get_error() != c10d.ErrorType.SUCCESS
    dist.barrier()
