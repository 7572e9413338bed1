"""A torch without one of the private names that smddp uses loses one feature with one warning."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist
from ranks import forked
from smddp.torch.device_map import HELPER_LOCALS
from torch.distributed import distributed_c10d as dist_c10d

# Each statement removes one private name, as a later torch may.
NAMES = {
    "dispatch modes": "del torch._C._len_torch_dispatch_stack",
    "profiler": "del torch.autograd._profiler_enabled",
    "ranges": "del torch._C._profiler._RecordFunctionFast",
    "transforms": "del torch._C._DisableFuncTorch",
    "overlap": "del torch._debug_has_internal_overlap",
    "functional tensors": "del torch._is_functional_tensor",
    "tracing": "import torch._dynamo; del torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "batches": "import torch.distributed.distributed_c10d as c10d; del c10d._check_p2p_op_list",
    "request": "from smddp.torch import device_map as devices; devices.HELPER_LOCALS = ('renamed', 'pg', 'device_id')",
}
# smddp reads the names at import.
PROGRAM = """
import tempfile, warnings
warnings.simplefilter("always")
{remove}
import torch.distributed as dist
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for _ in range(2):
        dist.init_process_group("smddp", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
        dist.all_reduce(tensor := torch.ones(3))
        with torch.profiler.profile():
            dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 3
        dist.destroy_process_group()
print("\\n".join(str(each.message) for each in found if "which smddp uses" in str(each.message)))
"""


def test_each_missing_name_of_torch_causes_one_warning():
    done = forked.run_all(
        [
            (PROGRAM.format(remove=f"import torch, torch.autograd, torch._C._profiler\n{each}"), {})
            for each in NAMES.values()
        ]
    )
    for name, one in zip(NAMES, done, strict=True):
        assert one.returncode == 0, (name, one.stderr)
        assert len(one.stdout.splitlines()) == 1, (name, one.stdout)


RENAMED = """
import inspect, tempfile, torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
for name in ("_new_process_group_helper", "_maybe_attach_flight_recorder"):
    function = inspect.unwrap(getattr(c10d, name, c10d.new_group))
    function.__code__ = function.__code__.replace(co_name="renamed")
dist.init_process_group("cpu:gloo,cuda:smddp", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
world = dist.group.WORLD
print(world._request.backends["cpu"], world.communicator.sequence(), world._has_observers)
"""


def test_renamed_functions_of_torch_have_no_effect():
    (done,) = forked.run_all([(RENAMED, {})])
    assert done.returncode == 0, done.stderr
    # gloo of older versions of torch prints a line, too.
    assert done.stdout.splitlines()[-1] == "gloo 0 False", done.stdout


def test_this_torch_has_the_names_that_smddp_reads():
    helper = inspect.unwrap(dist_c10d._new_process_group_helper)
    assert set(HELPER_LOCALS) <= set(helper.__code__.co_varnames)
    assert isinstance(dist.Backend._plugins, dict)
    assert set(dist.Backend.backend_list) >= {"gloo", "smddp"}


def test_a_missing_table_of_plugins_causes_a_warning(monkeypatch: pytest.MonkeyPatch):
    from smddp.torch.compat import backend_plugins

    class Backend:
        """torch's class without the table."""

    monkeypatch.setattr(dist, "Backend", Backend)
    with pytest.warns(RuntimeWarning, match="_plugins, which smddp uses"):
        assert backend_plugins() == {}
