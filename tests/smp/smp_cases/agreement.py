"""Different data or random numbers on the ranks of one tensor group raise an error."""

import copy

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from ranks.errors import refused
from smp_cases.models import batch, loss_of, tiny
from smp_cases.tensor_parallel import Collectives, initialized, wrapped


def different(*words: str):
    """Asserts that every rank raises an error with its group's ranks, instructions, and ``words``."""
    first = dist.get_rank() - tsm.state.tp_rank
    group = ", ".join(str(first + rank) for rank in range(tsm.state.tp_size))
    return refused(f"ranks {group} share each layer", "tsm.state.dp_rank", "Trainer", *words, kind=RuntimeError)


def case_other_data_on_ranks_of_a_tensor_group_is_refused():
    for engine in ("alone", "fsdp1", "fsdp2"):
        # A tied embedding is sharded, too, and sums rows of both ranks: only the ids reveal the difference.
        for family in ("llama", "gemma", "mixtral"):
            with initialized(tensor_parallel_degree=2):
                model = tsm.transform(tiny(family))
                model = model if engine == "alone" else wrapped(model, engine)
                with different("the embedding" if family == "gemma" else "model.layers.0"):
                    loss_of(model, batch(dist.get_rank()))
                # Samples of other lengths, too, which would not even add up.
                with different():
                    loss_of(model, batch(0)[:, : 6 + dist.get_rank()])
                loss_of(model, batch(tsm.state.dp_rank)).backward()


def case_other_random_numbers_on_ranks_of_a_tensor_group_are_refused():
    for options in ({"embd_pdrop": 0.2}, {"resid_pdrop": 0.2}):
        with initialized(tensor_parallel_degree=4):
            model = tsm.transform(tiny("gpt2", **options)).train()
            torch.manual_seed(dist.get_rank())
            with different("transformer.h." if "resid_pdrop" in options else "transformer.h.0"):
                loss_of(model, batch(0))
            # Without dropout no random numbers are drawn, so rank-specific seeds are valid.
            loss_of(model.eval(), batch(0))


def case_rank_specific_seeds_are_unified_by_transform():
    with initialized(tensor_parallel_degree=2):
        torch.manual_seed(dist.get_rank())
        model = tsm.transform(tiny("gpt2", embd_pdrop=0.2, resid_pdrop=0.2)).train()
        torch.manual_seed(100 + dist.get_rank())
        model = tsm.transform(tiny("gpt2", embd_pdrop=0.2, resid_pdrop=0.2)).train()
        loss_of(model, batch(0)).backward()
        mine = torch.get_rng_state()
        states = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(states, mine)
        assert torch.equal(states[0], states[1]) and torch.equal(states[2], states[3])


def case_only_the_first_passes_are_checked():
    with initialized(tensor_parallel_degree=2, tensor_parallel_checks=2):
        model = tsm.transform(tiny())
        for mode in (True, False):
            model.train(mode)
            gathered = []
            for _ in range(4):
                with Collectives() as forward:
                    loss_of(model, batch(0))
                gathered.append(forward.counts["all_gather_into_tensor"])
            assert gathered == [3, 3, 1, 1], gathered  # one is the head's
    with initialized(tensor_parallel_degree=2, tensor_parallel_checks=0):
        loss_of(tsm.transform(tiny()), batch(dist.get_rank()))


def case_recomputed_layers_and_low_precision_pass_the_check():
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"sequence_parallel": True}):
            with initialized(tensor_parallel_degree=4):
                model = tsm.transform(tiny("phi", resid_pdrop=0.2), dtype=dtype, config=options).train()
                for reentrant in (True, False):
                    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                    loss_of(model, batch(0)).backward()


class Wrapper(torch.nn.Module):
    """Wrapper that adds to a projection's output, in a form that PEFT does not use."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.inner = base
        rows, columns = base.weight.to_local().shape if hasattr(base.weight, "to_local") else base.weight.shape
        self.lora_A, self.lora_B = torch.nn.Linear(columns, 2, bias=False), torch.nn.Linear(2, rows, bias=False)

    def forward(self, x):
        return self.inner(x) + self.lora_B(self.lora_A(x))


def case_unknown_wrappers_of_sharded_layers_are_rejected_in_the_first_pass():
    with initialized(tensor_parallel_degree=2):
        for name in ("q_proj", "o_proj"):
            for engine in ("alone", "fsdp2"):
                model = tsm.transform(tiny())
                attention = model.model.layers[1].self_attn
                setattr(attention, name, Wrapper(getattr(attention, name)))
                model = model if engine == "alone" else wrapped(model, engine)
                with refused(f"model.layers.1.self_attn.{name} has become a smp_cases.agreement.Wrapper"):
                    loss_of(model, batch(0))


def case_torch_wrappers_are_accepted():
    from smddp.sagemaker.tensor_parallel.transformer import TransformerLayer
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    with initialized(tensor_parallel_degree=2, hybrid_shard_degree=2):
        for engine in ("fsdp1", "fsdp2"):
            model = wrapped(tsm.transform(tiny()), engine)
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, TransformerLayer))
            loss_of(model, batch(tsm.state.dp_rank)).backward()
        loss_of(copy.deepcopy(tsm.transform(tiny())), batch(tsm.state.dp_rank)).backward()
