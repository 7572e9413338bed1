"""Import of every symbol that scripts for SMP v2 use."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

SYMBOLS = {
    "": "init is_initialized transform state patches",
    "state_handler": "state",
    "delayed_param": "DelayedParamIniter",
    "distributed.checkpoint.state_dict_saver": "save async_save maybe_finalize_async_calls",
    "distributed.checkpoint.state_dict_loader": "load",
    "distributed.checkpoint.async_utils": "AsyncCallsQueue",
    "distributed.checkpoint.filesystem": "DistributedFileSystemWriter DistributedFileSystemReader",
    "distributed.checkpoint.s3_filesystem": (
        "S3FileSystem is_s3_uri parse_s3_uri format_s3_path retry_with_jitter get_s3_region_from_uri"
    ),
    "distributed.checkpoint.state_dict_utils": (
        "sm_state_dict_type SMStateDictType init_optim_state _Interval compute_auto_checkpoint_interval"
    ),
    "distributed.checkpoint.hf": "save_pretrained load_pretrained",
    "distributed.fsdp.checkpoint": "save_model_checkpoint load_model_checkpoint",
    "grad_norm": "clip_grad_norm_",
    "rank0": "take spread",
    "offload": "statistics",
    "tensor_parallel.transformer": "TransformerLayer TETransformerLayer TransformerLMHead",
    "tensor_parallel.state_dict": "translate_state_dict_to_hf translate_hf_state_dict",
    "nn.attn": "FlashSelfAttention FlashGroupedQueryAttention",
    "nn.huggingface.llama_flashattn": "LlamaFlashAttention",
    "moe.moe_config": "MoEConfig",
    "moe.moe_layer": "MoELayer",
    "context_parallel.utils": "setup_transformer_engine_cp_groups get_batch_for_cp_rank",
    "logger": "get_logger",
    "utils.utils": "timeit",
    "utils.process_group_utils": "get_global_ranks",
    "utils.module_utils": "empty_module_params move_buffers_to_device",
    "checkpoint.utils": "limit_num_subdirs SORT_BY_LAST_INT",
    "checkpoint.constants": "SMP_IS_LOAD_INFO_KEY SMP_IS_PARTIAL_KEY",
}


@pytest.mark.parametrize("module", SYMBOLS)
def test_a_modules_symbols_import_as_scripts_import_them(module):
    found = importlib.import_module("torch.sagemaker" + f".{module}" * bool(module))
    for name in SYMBOLS[module].split():
        assert hasattr(found, name), f"torch.sagemaker.{module}.{name}"


@pytest.mark.parametrize("module", SYMBOLS)
def test_a_modules_functions_and_classes_have_docstrings(module):
    # The reference page is generated from these.
    found = importlib.import_module("torch.sagemaker" + f".{module}" * bool(module))
    callables = [getattr(found, name) for name in SYMBOLS[module].split() if callable(getattr(found, name))]
    undocumented = [value.__name__ for value in callables if not (value.__doc__ or "").strip()]
    assert undocumented == []


def test_a_flushed_cache_is_reported_once_per_step_until_the_watch_ends():
    from smddp.sagemaker.fsdp.hybrid import watch_cache_flushes

    flushes = {"num_alloc_retries": 0}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    end = watch_cache_flushes(lambda: flushes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    flushes["num_alloc_retries"] = 3
    with pytest.warns(RuntimeWarning, match="flushed its cache 3 times in this step"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        end()
        flushes["num_alloc_retries"] = 9
        optimizer.step()
