"""Every private name that `smddp.sagemaker` uses, removed one at a time: one feature is off, the rest works."""

from __future__ import annotations

import missing_names
import pytest
from smddp.sagemaker import private_names
from smddp.torch.private_names import MissingNameError, PrivateName

NAMES = [each for each in vars(private_names).values() if isinstance(each, PrivateName)]
FSDP1 = ["fsdp1", "optimizer_state"]
GROUPS = ["group_checkpoint"]
# By name: (features that raise MissingNameError, features in which torch or transformers itself fails, warnings).
EXPECTED = {
    "_catch_all_reshard": (FSDP1, [], 0),
    "_use_unsharded_views": (FSDP1, [], 0),
    "_use_sharded_grad_views": (FSDP1, [], 0),
    "_use_unsharded_grad_views": (FSDP1, [], 0),
    "_init_flat_param_and_metadata": (FSDP1, [], 0),
    "_writeback_orig_params": (FSDP1, [], 0),
    "_unflatten_orig_param_states": (["optimizer_state"], [], 0),
    "_lazy_init": (["fully_shard"], [], 0),
    "_save_state_dict": (GROUPS, ["checkpoint"], 0),
    "_load_state_dict": (GROUPS, ["checkpoint"], 0),
    "GradScaler._unscale_grads_": (["scaling"], [], 0),
    "ShardedGradScaler._unscale_grads_": (["scaling"], [], 0),
    "ShardedTensor": (["sharded_tensors"], [], 0),
    "Shard": (["sharded_tensors"], [], 0),
    "_init_from_local_shards_and_global_metadata": (["sharded_tensors"], [], 0),
    "CheckpointWrapper": (["wrapped_offload"], [], 1),
    "OffloadWrapper": (["wrapped_offload"], [], 1),
    "_current_graph_task_id": (["wrapped_offload"], ["fully_shard"], 1),
    "_get_default_store": (["async_checkpoint"], [], 0),
    "_op_dispatcher": ([], ["transform_and_step", "fully_shard"], 1),
    "_clear_DTensor_sharding_propagator_cache": ([], [], 1),
    "_pytree": (["listed_experts"], [], 0),
    "TorchDispatchMode": (["delayed"], [], 0),
    "_supports_attention_backend": ([], [], 0),  # each of these two is enough
    "_can_set_attn_implementation": ([], [], 0),
    "_attn_implementation": (["context", "flash_attention"], ["transform_and_step", "delayed"], 0),
    "_init_weights": (["delayed"], [], 0),
    "_tied_weights_keys": (["tied_embeddings"], ["delayed"], 0),
    "_no_split_modules": ([], ["delayed"], 1),
    "_prepare_tp": (["accelerator"], [], 0),
    "_prepare_one": (["accelerator"], [], 0),
    "_get_num_items_in_batch": (["trainer"], [], 0),
    "_save": (["trainer"], [], 0),
}
# Attributes of instances, or of classes that cannot be changed.
OF_INSTANCES = {"_models", "_process_group", "_checkpoint_wrapped_module", "_cdata"}


def test_each_missing_name_disables_its_feature_alone():
    paths = [each.path for each in NAMES if each.attribute not in OF_INSTANCES]
    expected = {path: result for path in paths for end, result in EXPECTED.items() if path.endswith(f".{end}")}
    assert set(paths) == expected.keys()
    missing_names.check_each("features", __file__, expected)


@pytest.mark.parametrize("name", [each for each in NAMES if each.attribute in OF_INSTANCES], ids=lambda n: n.attribute)
def test_a_missing_attribute_is_an_error_that_names_feature_name_and_remedy(name):
    with pytest.raises(MissingNameError, match=rf"(?s){name.feature}: not available.*has no {name.path}.*Update smddp"):
        name.of(object())


@pytest.mark.parametrize("attribute", private_names.OF_FLAT_PARAMETER + private_names.OF_HANDLE)
def test_a_missing_attribute_of_fsdp1_is_an_error_where_fsdp1_is_used(attribute):
    class Part:
        def __init__(self, names):
            vars(self).update(dict.fromkeys(set(names) - {attribute}))

    unit, handle = Part([]), Part(private_names.OF_HANDLE)
    handle.flat_param, unit._handle = Part(private_names.OF_FLAT_PARAMETER), handle
    with pytest.raises(MissingNameError, match=f"has no .*{attribute}. "):
        private_names.handle_of(unit)
