"""The features of `smddp.sagemaker` that need private names, each used once; see `missing_names`."""

from __future__ import annotations

import copy
import tempfile
import types

import missing_names
import torch
import torch.distributed as dist
from torch import nn

# Made before the name is removed, since transformers reads its names when it makes a model.
MODELS = {}


def _make(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, **options))


def llama(kind: str = "plain"):
    return copy.deepcopy(MODELS[kind])


def transform_and_step():
    import smddp.sagemaker as tsm

    model = tsm.transform(llama())
    ids = torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
    model(torch.ones(2, 4)).sum().backward()
    return model


def optimizer_state():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = fsdp1()
    FullyShardedDataParallel.optim_state_dict(model, torch.optim.SGD(model.parameters(), 0.1))


def fully_shard():
    from torch.distributed.fsdp import fully_shard as shard

    model = shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()


def scaling():
    torch.amp.GradScaler("cpu").scale(torch.ones(1))


def group_checkpoint():
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.ones(2)}, checkpoint_id=tempfile.mkdtemp(), process_group=dist.new_group([0]))


def checkpoint():
    import torch.distributed.checkpoint as dcp

    directory = tempfile.mkdtemp()
    dcp.save({"a": torch.ones(2)}, checkpoint_id=directory, no_dist=True)
    dcp.load(found := {"a": torch.zeros(2)}, checkpoint_id=directory, no_dist=True)
    assert found["a"].tolist() == [1, 1]


def wrapped_offload():
    from smddp.sagemaker import torch_patches
    from smddp.sagemaker.private_names import MissingNameError

    if "activation_offloading" not in [patch.name for patch in torch_patches.patches()]:
        raise MissingNameError(f"{missing_names.removed} not available")
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    layer = wrappers.checkpoint_wrapper(nn.Linear(32, 32))
    wrappers.offload_wrapper(nn.Sequential(layer))(torch.ones(32, 32, requires_grad=True)).sum().backward()


def delayed():
    from smddp.sagemaker.delayed_param import DelayedParamIniter

    DelayedParamIniter(llama("meta"), device="cpu").materialize()


def context():
    from smddp.sagemaker.context_parallel import forward
    from smddp.sagemaker.private_names import ATTENTION

    model = llama()
    assert forward._by_registry(type(model))
    ATTENTION.of(model.config)


def flash_attention():
    from smddp.sagemaker.nn.huggingface.llama_flashattn import LlamaFlashAttention

    LlamaFlashAttention(llama().config, 0)


def tied_embeddings():
    from smddp.sagemaker.distributed.checkpoint import hf

    hf._is_tied(llama("tied"), "lm_head.weight")


def listed_experts():
    from smddp.sagemaker.fsdp import idle_experts

    idle_experts._with_idle(torch.ones(2, requires_grad=True), [nn.Parameter(torch.ones(1))])


def decoder_layers():
    from smddp.sagemaker.tensor_parallel import plan_entries

    assert len(plan_entries.layers_of(llama(), {"model.layers.*.mlp.up_proj": "colwise"})) == 1


def sharded_tensors():
    from smddp.sagemaker import private_names as private

    assert not private.is_sharded_tensor(torch.ones(1))
    for name in (private.SHARDED_TENSOR, private.SHARD, private.FROM_SHARDS):
        name.get()


def async_checkpoint():
    from smddp.sagemaker.private_names import DEFAULT_STORE

    DEFAULT_STORE.get()()


def _client(module, kind, **functions):
    """Makes a stand-in for a client's module that a script imports now, and creates its class."""
    names = ("_prepare_tp", "_prepare_one", "prepare", "gather", "reduce", "save_state", "load_state")
    names += ("_get_num_items_in_batch", "get_tp_size", "save_model", "_save", "train", "compute_loss")
    methods = {name: lambda self: None for name in names if f"{module}.{kind}.{name}" != missing_names.removed}
    made = types.ModuleType(module)
    setattr(made, kind, type(kind, (), {"__init__": lambda self: None, **methods}))
    for name in ("ParallelismConfig", "recursively_apply", "gather_object", "get_model_tp_size"):
        setattr(made, name, lambda *_: None)
    for name in ("load_fsdp_model", "load_sharded_checkpoint", "_is_peft_model", "load_checkpoint_in_model"):
        setattr(made, name, lambda *_: None)
    from smddp.sagemaker.replacements import client_change

    # Trainer's module holds Accelerate's class, too.
    made.Accelerator = getattr(made, "Accelerator", type("Accelerator", (), {}))
    client_change(kind, f"of_{'accelerate' if kind == 'Accelerator' else 'trainer'}")(made)
    if missing_names.removed.startswith(f"{module}.{kind}."):
        if kind != "Accelerator":
            made.Accelerator()
        getattr(made, kind)()


def accelerator():
    _client("accelerate.accelerator", "Accelerator")


def trainer():
    _client("transformers.trainer", "Trainer")


FEATURES = (
    transform_and_step,
    fsdp1,
    optimizer_state,
    fully_shard,
    scaling,
    group_checkpoint,
    checkpoint,
    wrapped_offload,
    delayed,
    context,
    flash_attention,
    tied_embeddings,
    listed_experts,
    decoder_layers,
    sharded_tensors,
    async_checkpoint,
    accelerator,
    trainer,
)


def begin() -> None:
    """Starts a world of two ranks in torch's fake group."""
    import smddp.sagemaker as tsm
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tsm.init({"tensor_parallel_degree": 2, "hybrid_shard_degree": 1, "sm_activation_offloading": True})


def main(path: str) -> None:
    """Uses each feature without the name."""
    MODELS["plain"] = _make()
    MODELS["tied"] = _make(tie_word_embeddings=True)
    with torch.device("meta"):
        MODELS["meta"] = _make()
    missing_names.use(path, begin, FEATURES, MODELS.values())
