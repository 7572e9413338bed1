"""Rejection of per-head arguments for models with sharded heads."""

import pytest
import smddp.sagemaker as tsm
import torch
import transformers
from smp_cases.models import batch, tiny
from smp_cases.parts_alone import IDS, t5
from smp_cases.tensor_parallel import TOLERANCE, initialized


def _inputs(family):
    return {"input_ids": IDS, "decoder_input_ids": IDS} if family == "t5" else {"input_ids": IDS}


def case_attention_weights_of_a_shared_model_are_refused_whichever_way_they_are_asked_for():
    makers = {family: lambda family=family: tiny(family, attn_implementation="eager") for family in ("llama", "gpt2")}
    for family, make in {**makers, "t5": t5}.items():
        for degree in (2, 4):  # 4: fewer key and value heads of llama than ranks
            with initialized(tensor_parallel_degree=degree), torch.no_grad():
                model, wanted = tsm.transform(make()), make()(**_inputs(family))[0]
                for part in (model, model.base_model):
                    with pytest.raises(NotImplementedError, match=f"output_attentions=True with .*degree={degree}"):
                        part(**_inputs(family), output_attentions=True)
                if family == "llama":
                    model.config.output_attentions = True
                    with pytest.raises(NotImplementedError, match="output_attentions=True"):
                        model(**_inputs(family))
                    model.config.output_attentions = False
                mask = torch.ones(2, 4)
                with pytest.raises(NotImplementedError, match="head_mask with tensor_parallel_degree"):
                    model(**_inputs(family), head_mask=mask)
                assert (model(**_inputs(family))[0] - wanted).abs().max() < TOLERANCE, (family, degree)


def case_attention_weights_are_there_without_shared_heads():
    with initialized(tensor_parallel_degree=2), torch.no_grad():
        plan = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
        plan["model.layers.*.mlp.gate_proj"] = "colwise"
        model = tsm.transform(tiny(attn_implementation="eager"), config={"tp_plan": plan})
        assert model(input_ids=IDS, output_attentions=True).attentions[0].shape == (1, 4, 6, 6)


def case_keys_of_all_heads_are_refused_and_keys_of_a_ranks_own_are_not():
    with initialized(tensor_parallel_degree=2), torch.no_grad():
        plain, model = tiny().eval(), tsm.transform(tiny().eval())
        ids = batch(0)[:2]
        past = {each: each(input_ids=ids[:, :6], use_cache=True).past_key_values for each in (plain, model)}
        wanted, found = (each(input_ids=ids[:, 6:], past_key_values=past[each]).logits for each in (plain, model))
        assert (wanted - found).abs().max() < TOLERANCE
        prefix = transformers.DynamicCache()  # as PEFT's prefix tuning makes it, for every head
        for layer in range(2):
            prefix.update(torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8), layer)
        with pytest.raises(ValueError, match=r"keys of all 2 heads, and this rank computes 1 .*Prefix tuning"):
            model(input_ids=ids, past_key_values=prefix)
