"""Parts of a model that a script calls directly: the values of one process, or an error that names the part."""

import smddp.sagemaker as tsm
import torch
import transformers
from ranks.errors import refused
from smp_cases.hybrid import wrap1, wrap2
from smp_cases.models import VOCABULARY, batch, tiny
from smp_cases.tensor_parallel import TOLERANCE, initialized
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

NOT_GATHERED = "is sharded by FSDP and not gathered"
IDS = torch.tensor([[3, 4, 5, 40, 50, 6]])


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def _wrap_t5(model):
    for block in (*model.encoder.block, *model.decoder.block):
        fully_shard(block)
    return fully_shard(model)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, list | tuple) else []


def _recorded(model, run):
    """{module name: (args, kwargs, output tensors)} of the first call of each module of ``model`` in ``run(model)``."""
    calls = {}

    def record(name):
        def hook(_, args, kwargs, output):
            calls.setdefault(name, (args, kwargs, [tensor.clone() for tensor in _tensors(output)]))

        return hook

    handles = [
        module.register_forward_hook(record(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    with torch.no_grad():
        run(model)
    for handle in handles:
        handle.remove()
    return calls


def _alone(model, calls, units):
    """Calls each module directly; returns {module name: "right" or "refused"}."""
    found = {}
    for name, (args, kwargs, wanted) in calls.items():
        try:
            with torch.no_grad():
                outputs = _tensors(model.get_submodule(name)(*args, **kwargs))
        except RuntimeError as error:
            assert NOT_GATHERED in str(error), (name, error)
            inside = set(model.get_submodule(name).modules())
            names = {each for each, module in model.named_modules(remove_duplicate=False) if module in inside}
            assert names & set(str(error).replace(",", " ").split()), (name, error)
            found[name] = "refused"
            continue
        assert [tensor.shape for tensor in outputs] == [tensor.shape for tensor in wanted], name
        assert all((a - b).abs().max() < TOLERANCE for a, b in zip(outputs, wanted) if a.numel()), name
        found[name] = "right"
        if name in units:
            model.get_submodule(name).reshard()
    return found


CASES = {
    "llama": (tiny, lambda model: model(input_ids=batch(0)[:1], use_cache=False), wrap2),
    "gpt2": (lambda: tiny("gpt2"), lambda model: model(input_ids=batch(0)[:1], use_cache=False), None),
    "t5": (t5, lambda model: model(input_ids=IDS, decoder_input_ids=IDS, use_cache=False), _wrap_t5),
}


def _wrap_gpt2(model):
    for layer in model.transformer.h:
        fully_shard(layer)
    return fully_shard(model)


def case_every_module_alone_is_right_or_refused():
    """Each module gets the inputs of a forward pass; the reference is the model without FSDP."""
    for family, (make, run, wrap) in CASES.items():
        with initialized(hybrid_shard_degree=2, tensor_parallel_degree=2):
            calls = _recorded(tsm.transform(make().eval()), run)
            plain = _recorded(make().eval(), run)
            whole = [
                name for name in calls if "." not in name or name.endswith(("norm", "ln_f", "embed_tokens", "wte"))
            ]
            for name in whole:
                assert all((a - b).abs().max() < TOLERANCE for a, b in zip(calls[name][2], plain[name][2])), name
            model = (wrap or _wrap_gpt2)(tsm.transform(make().eval()))
            units = {name for name, module in model.named_modules() if hasattr(module, "reshard") and name}
            found = _alone(model, calls, units)
            assert all(found[name] == "right" for name in units), (family, found)
            if family != "t5":
                assert found["lm_head"] == "refused", (family, found)
            assert sum(kind == "refused" for kind in found.values()) > 10, (family, found)
        # Without FSDP, and where it shards over one rank, each part alone is right.
        with initialized(hybrid_shard_degree=1, tensor_parallel_degree=2):
            for wrapped in (lambda model: model, wrap or _wrap_gpt2):
                # The largest parts first: units inside them are initialized in their forward pass.
                for order in (reversed, iter):
                    model = wrapped(tsm.transform(make().eval()))
                    found = _alone(model, dict(order(list(calls.items()))), ())
                    assert set(found.values()) == {"right"}, (family, found)


def case_parts_of_a_model_under_fsdp1_are_refused_by_name():
    with initialized(hybrid_shard_degree=2, tensor_parallel_degree=2):
        model = wrap1(tsm.transform(tiny().eval()), use_orig_params=True)
        inner, hidden = model._fsdp_wrapped_module, torch.randn(1, 6, 32)
        for name, given in (("model.embed_tokens", IDS), ("model.norm", hidden), ("lm_head", hidden)):
            with refused(NOT_GATHERED, name, kind=RuntimeError):
                inner.get_submodule(name)(given)


def case_the_remedies_that_the_error_names_give_the_values_of_one_process():
    hidden = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(5))
    with initialized(hybrid_shard_degree=2, tensor_parallel_degree=2), torch.no_grad():
        plain = tiny()
        wanted = plain.lm_head(hidden), plain.model.embed_tokens(IDS)
        model = wrap2(tsm.transform(tiny()))
        model.unshard()
        found = model.lm_head(hidden), model.model.embed_tokens(IDS)
        assert all(torch.allclose(a, b, atol=TOLERANCE) for a, b in zip(found, wanted))

        model = tsm.transform(tiny())
        fully_shard(model.lm_head)
        assert torch.allclose(wrap2(model).lm_head(hidden), wanted[0], atol=TOLERANCE)

        tokens = {"input_ids": IDS, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        wanted = t5().generate(**tokens)
        model = _wrap_t5(tsm.transform(t5()))
        register_fsdp_forward_method(model, "generate")
        assert torch.equal(model.generate(**tokens), wanted)
