"""Outputs of a shared model that a script changes in place, as Trainer scales its loss, against one process."""

import smddp.sagemaker as tsm
from smddp.sagemaker.tensor_parallel.state_dict import translate_state_dict_to_hf
from smp_cases.expert_models import moe_config, tiny_moe
from smp_cases.models import batch, tiny
from smp_cases.tensor_parallel import initialized, whole

CHANGES = {
    "loss": lambda out: out.loss.mul_(0.5),
    "logits": lambda out: out.logits.div_(2.0).square().mean(),
    "hidden": lambda out: out.hidden_states[-1].mul_(2.0).square().mean(),
}


def _gradients(model, change):
    ids = batch(0)[:2]
    model.zero_grad()
    change(model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def case_outputs_may_change_in_place():
    rows = (
        ("llama", tiny, {"sequence_parallel": True}, {"tensor_parallel_degree": 2}),
        ("gpt2", lambda: tiny("gpt2"), None, {"tensor_parallel_degree": 2}),
        ("tied", lambda: tiny(tie_word_embeddings=True), None, {"tensor_parallel_degree": 2}),
        ("mixtral", lambda: tiny_moe("mixtral"), moe_config(), {"tensor_parallel_degree": 2}),
        ("spread", lambda: tiny_moe("mixtral"), moe_config(), {"expert_parallel_degree": 2}),
    )
    for family, make, config, degrees in rows:
        with initialized(**degrees):
            model = tsm.transform(make(), config=config)
            for name, change in CHANGES.items():
                wanted = _gradients(make(), change)
                found = translate_state_dict_to_hf(model, _gradients(model, change))
                for key, gradient in wanted.items():
                    if family == "spread" and "experts" in key:
                        continue  # of other experts, and of the tokens of both ranks
                    gap = (found[key] - gradient).abs().max()
                    assert gap < 1e-5, (family, degrees, name, key, float(gap))
