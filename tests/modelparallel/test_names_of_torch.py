"""Every private name that `smddp.modelparallel` uses, removed in turn: one feature is off and reported."""

from __future__ import annotations

import missing_names
from smddp.modelparallel import private_names
from smddp.torch.private_names import PrivateName

NAMES = [each for each in vars(private_names).values() if isinstance(each, PrivateName)]
# As in `missing_names.Result`.
EXPECTED = {
    "torch.utils._pytree": (["step", "stages"], [], 0),
    "torch._subclasses.fake_tensor": (["stages"], [], 0),
}


def test_each_missing_name_disables_its_feature_alone():
    found = missing_names.in_turn("modelparallel_features", __file__, [each.path for each in NAMES])
    assert found == {"": ([], [], 0), **EXPECTED}
