"""Names of the original's layers on transformers models, at tensor degree 1 and 2, with the losses of one process."""

from __future__ import annotations

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from lm_training import gpt2, train
from smddp.modelparallel.partitioning.partition import CHECKPOINTED
from tensor_cases.families import adam, made, one_process, wrapped

LAYOUTS = [
    {"tensor_parallel_degree": 2, "partitions": 2, "microbatches": 2},
    {"partitions": 2, "microbatches": 2, "ddp": True},
    {"sharded_data_parallel_degree": 2, "ddp": True},
]


def gptj():
    from transformers import GPTJConfig, GPTJForCausalLM

    return GPTJForCausalLM(GPTJConfig(vocab_size=64, n_positions=16, n_embd=16, n_layer=4, n_head=2, rotary_dim=4))


def gptneo():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "max_position_embeddings": 16}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 2]]))


def gptneox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))


def case_layers_have_published_names_at_every_degree(directory):
    for layout in LAYOUTS:
        for family in (gpt2, gptj, gptneo, gptneox):
            with job(**layout):
                with smp.model_creation(tensor_parallelism=True, flash_attention=True):
                    module = made(family)
                names = list(module.state_dict())
                model = smp.DistributedModel(module)
                transformer = model.module.module.transformer
                assert transformer is model.get_module().base_model is model.module.module.module.transformer
                layers = transformer.seq_layers
                assert len(layers) == 4 and isinstance(layers, torch.nn.Sequential)
                assert isinstance(transformer, smp.nn.DistributedTransformer)
                for layer in layers:
                    assert isinstance(layer, smp.nn.DistributedTransformerLayer)
                    assert isinstance(layer.attention, smp.nn.DistributedAttentionLayer)
                    assert isinstance(layer.output, smp.nn.DistributedTransformerOutputLayer)
                flash = sum(isinstance(each, smp.nn.FlashAttentionLayer) for each in model.modules())
                assert flash == (4 if getattr(module.config, "_attn_implementation", "") == "sdpa" else 0)
                assert list(module.state_dict()) == names
    with job(partitions=2, ddp=True):
        with smp.tensor_parallelism(enabled=False):
            module = made(gpt2)
        assert not hasattr(smp.DistributedModel(module).get_module().transformer, "seq_layers")


def case_checkpointed_sublayers_change_no_loss(directory):
    losses, _, _, _, _ = one_process(gpt2)
    for layout in LAYOUTS:
        with job(**layout, sdp_gradient_clipping=0.0):
            model, optimizer = wrapped(gpt2)
            for layer in model.get_module().transformer.seq_layers:
                smp.set_activation_checkpointing(layer.attention)
                smp.set_activation_checkpointing(layer.output)
            marked = sum(CHECKPOINTED in module.__dict__ for module in model.modules())
            assert marked == 8 and train(model, optimizer, range(2))[0] == pytest.approx(losses, rel=1e-6)


def case_methods_of_documentation(directory):
    with job(partitions=2, ddp=True):
        model = smp.DistributedModel(made(gpt2))
        optimizer = smp.DistributedOptimizer(adam(model))
        seen = []
        model.register_post_partition_hook(lambda *_: seen.append("removed")).remove()
        model.register_post_step_hook(lambda *_: seen.append("removed")).remove()
        model.register_post_partition_hook(lambda *found: seen.append(found))
        handle = model.register_post_step_hook(lambda *found: seen.append(found))
        train(model, optimizer, range(1))
        handle.remove()
        assert seen == [(model, optimizer)] * 2
        model.register_post_partition_hook(lambda *found: seen.append(found)).remove()
        assert len(seen) == 3
        with pytest.raises(NotImplementedError, match="the 2 replicas must make the same number of steps"):
            model.join()
        with pytest.raises(NotImplementedError, match="without torch's GradBucket"):
            model.register_comm_hook(None, print)
        assert smp.step(detach_outputs=False)
