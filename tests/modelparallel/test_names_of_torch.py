"""Every private name that `smddp.modelparallel` uses, removed one at a time: one feature is off and reported."""

from __future__ import annotations

import missing_names
import pytest
from smddp.modelparallel import private_names
from smddp.torch import private_names as of_names
from smddp.torch.private_names import MissingNameError, PrivateName

NAMES = [each for each in vars(private_names).values() if isinstance(each, PrivateName)]
# As in `missing_names.Result`.
EXPECTED = {
    "torch.utils._pytree": (["step", "stages"], [], 0),
    "torch._subclasses.fake_tensor": (["step", "stages"], [], 0),
    "torch._C.DisableTorchFunctionSubclass": (["step", "stages"], [], 0),
    "torch.overrides._get_current_function_mode_stack": ([], [], 1),
    "torch.distributed.ProcessGroup._get_backend": ([], ["begin"], 0),  # the fake group needs both
    "torch.distributed.distributed_c10d._get_default_timeout": ([], ["begin"], 0),
    "torch._C._current_graph_task_id": (["direct_call"], [], 0),
    "torch.autograd.Variable._execution_engine": (["direct_call"], ["step"], 0),
}
# Attributes of classes that cannot be changed.
FIXED = {"torch.Tensor._make_wrapper_subclass"}


def test_each_missing_name_disables_its_feature_alone():
    assert {each.path for each in NAMES} == EXPECTED.keys() | FIXED
    missing_names.check_each("modelparallel_features", __file__, EXPECTED)


@pytest.mark.parametrize("path", FIXED)
def test_a_missing_attribute_is_an_error_that_names_feature_name_and_remedy(path):
    (name,) = (each for each in NAMES if each.path == path)
    with pytest.raises(MissingNameError, match=rf"{name.feature}: not available.*has no {path}. Update smddp"):
        name.of(object())


@pytest.mark.parametrize("name", [private_names.GET_BACKEND, private_names.DEFAULT_TIMEOUT], ids=lambda n: n.attribute)
def test_without_the_groups_timeout_messages_have_the_default_timeout(name, monkeypatch):
    class Group:
        def _get_backend(self, device):
            raise RuntimeError("no backend")

    monkeypatch.setattr(name, "find", lambda: None)
    monkeypatch.setattr(of_names, "_reported", set())
    monkeypatch.setattr(private_names.dist, "get_backend", lambda group: "gloo")
    with pytest.warns(RuntimeWarning, match=name.path):
        assert private_names.timeout_of(Group()) == 1800
