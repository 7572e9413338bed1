"""Expert parallelism in one process with torch's fake process group: invalid input raises before communication,
balancing follows the papers, and expert groups are subsets of the data-parallel ranks."""

from __future__ import annotations

import pytest
import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smddp.sagemaker import autograd_collectives
from smddp.sagemaker.expert_parallel import balancing
from smddp.sagemaker.expert_parallel.experts import scaled
from smddp.sagemaker.moe.moe_config import MoEConfig
from smddp.sagemaker.moe.moe_layer import MoELayer
from smddp.sagemaker.parallel import arranged, even_nodes, layout
from smp_cases.expert_models import FAMILIES, moe_config, tiny_moe
from smp_cases.models import batch, loss_of, tiny


def refused(model, error, match, config=None):
    """Asserts that `transform` raises and leaves the model unchanged."""

    def shapes():
        return {name: (p.shape, type(p)) for name, p in model.named_parameters()}, [type(m) for m in model.modules()]

    before = shapes()
    with pytest.raises(error, match=match):
        tsm.transform(model, config=config)
    assert before == shapes()


def test_experts_that_do_not_divide_are_refused_with_the_degrees_that_work(world):
    world(8, expert_parallel_degree=8)
    refused(tiny_moe("mixtral"), ValueError, r"=8 does not divide the 4 experts of .*these do: 1, 2, 4", MoEConfig())


def test_a_degree_without_a_configuration_of_experts_is_refused(world):
    world(expert_parallel_degree=2)
    refused(tiny_moe("mixtral"), ValueError, r"takes a MoEConfig, and there is none")
    refused(tiny_moe("mixtral"), ValueError, r"it has smp_moe=False", MoEConfig(smp_moe=False))


def test_a_family_without_an_adapter_is_refused_with_those_that_have_one(world):
    world(expert_parallel_degree=2)
    refused(tiny(), ValueError, "no layer of experts that .* can spread. Those of MixtralSparseMoeBlock", MoEConfig())


def test_columns_of_experts_that_a_tensor_group_cannot_share_are_refused(world):
    world(expert_parallel_degree=2, tensor_parallel_degree=2)
    model = tiny_moe("mixtral", intermediate_size=33)
    refused(model, ValueError, "tensor_parallel_degree=2 does not divide the 33 columns", MoEConfig())


def test_experts_with_biases_that_a_tensor_group_would_spread_are_refused_with_what_runs(world):
    world(expert_parallel_degree=1, tensor_parallel_degree=2)
    refused(tiny_moe("gpt_oss"), NotImplementedError, "leave it out, so that a tensor group shares", MoEConfig())
    tsm.transform(tiny_moe("gpt_oss"))


def test_what_is_no_configuration_of_experts_is_refused(world):
    world(expert_parallel_degree=2)
    refused(tiny_moe("mixtral"), TypeError, '"moe" must be a MoEConfig, got dict', {"moe": {}})
    with pytest.raises(ValueError, match="moe_load_balancing='sinkhorm'"):
        MoEConfig(moe_load_balancing="sinkhorm")
    with pytest.raises(TypeError, match="moe_all_to_all_dispatcher='ring'"):
        MoEConfig(moe_all_to_all_dispatcher="ring")


def test_values_of_rank_0_alone_are_refused_with_what_reads_files(world):
    world(expert_parallel_degree=2)
    with pytest.raises(NotImplementedError, match="load_pretrained"):
        tsm.transform(tiny_moe("mixtral"), config=MoEConfig(), load_state_dict_from_rank0=True)


def test_a_degree_that_the_data_parallel_ranks_are_no_multiple_of_is_refused():
    with pytest.raises(ValueError, match=r"expert_parallel_degree=4 does not fit: 8 ranks / .*=4 = 2.*would: 1, 2"):
        layout(8, 0, 4, expert=4)


@pytest.mark.parametrize(
    ("world_size", "shard", "expert", "expert_shard", "copies"),
    [(16, 8, 2, 4, 2), (16, 8, 8, 1, 2), (16, 2, 8, 1, 2), (16, 0, 4, 4, 1), (12, 3, 2, 3, 2), (8, 1, 2, 1, 4)],
)
def test_a_copy_of_the_experts_lies_on_as_many_ranks_as_one_of_the_rest(
    world_size, shard, expert, expert_shard, copies
):
    sizes = layout(world_size, shard, 1, expert=expert)
    assert (sizes.expert_shard, sizes.copies) == (expert_shard, copies)


def test_nodes_are_even_where_each_has_as_many_of_a_group_in_a_run():
    assert even_nodes([0, 1, 4, 5], list("aaaabbbb")) == [[0, 1], [4, 5]]
    assert even_nodes([0, 1, 2, 3], list("aaab")) is None
    assert even_nodes([0, 1, 2, 3], list("abab")) is None


@pytest.mark.parametrize(
    ("shard", "expert", "mesh"),
    [(2, 1, [[0, 2], [1, 3]]), (2, 2, [[0, 2], [1, 3]]), (4, 1, [[0, 1, 2, 3]]), (2, 4, [[0, 1], [2, 3]])],
)
def test_ranks_are_ordered_by_node_unless_a_group_would_not_ascend(shard, expert, mesh):
    """torch numbers a group's ranks in ascending order, so parts would have the offsets of others."""
    assert arranged(layout(4, shard, 1, expert=expert), list("abab")).squeeze(-1).tolist() == mesh


def test_groups_of_experts_are_neighbours_and_copies_hold_all_of_them(world):
    world(8, expert_parallel_degree=4, hybrid_shard_degree=2)
    assert dist.get_process_group_ranks(tsm.state.ep_process_group) == [0, 1, 2, 3]
    assert (tsm.state.ep_size, tsm.state.ep_rank) == (4, 0)
    assert dist.get_process_group_ranks(tsm.state.rep_rank_process_group) == [0, 1, 2, 3]
    assert tsm.state.ranker.get_rep_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert dist.get_process_group_ranks(tsm.state.shard_process_group) == [0, 1]


def test_a_rank_holds_its_part_of_the_experts_and_layers_are_moe_layers(world):
    world(expert_parallel_degree=2)
    for family in ("mixtral", *FAMILIES):
        model = tsm.transform(tiny_moe(family), config=MoEConfig())
        layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        assert layers, family
        for _, parameter in layers[0].experts.named_parameters():
            assert parameter.to_local().shape[0] * 2 == parameter.shape[0]


def test_distributed_data_parallel_is_refused_with_spread_experts(world):
    world(expert_parallel_degree=2)
    model = tsm.transform(tiny_moe("mixtral"), config=MoEConfig())
    with pytest.raises(ValueError, match="spread experts must not be averaged"):
        torch.nn.parallel.DistributedDataParallel(model)


def test_reset_takes_back_what_experts_changed_in_torch(world):
    from torch.distributed.fsdp import fully_shard

    def called():
        return fully_shard.__closure__[fully_shard.__code__.co_freevars.index("func")].cell_contents

    before = called()
    world(expert_parallel_degree=2)
    assert called() is not before
    tsm.state.reset()
    assert called() is before


def test_sinkhorn_chooses_as_the_textbook_says(world):
    """Reference: alternately normalize the rows and columns of exp(logits)."""
    world(1)
    logits = torch.randn(48, 6, generator=torch.Generator().manual_seed(3)) * 2
    matrix = logits.double().exp()
    for _ in range(2000):
        matrix = matrix / matrix.sum(1, keepdim=True)
        matrix = matrix / matrix.sum(0, keepdim=True) * (48 / 6)
    assert torch.equal(balancing.sinkhorn(logits, 2).sort(1).values, matrix.topk(2, 1).indices.sort(1).values)


def test_sinkhorn_spreads_tokens_that_all_prefer_one_expert(world):
    world(1)
    logits = torch.randn(4096, 8, generator=torch.Generator().manual_seed(3))
    logits[:, 5] += 6.0
    own = torch.bincount(logits.argmax(1), minlength=8)
    chosen = torch.bincount(balancing.sinkhorn(logits, 1).flatten(), minlength=8)
    assert own.max() > 4000 and 0.8 * 512 < chosen.min() <= chosen.max() < 1.2 * 512


def test_sinkhorn_leaves_evaluation_alone(world):
    world(1)
    model = tsm.transform(tiny_moe("mixtral"), config=moe_config(moe_load_balancing="sinkhorn")).eval()
    with torch.no_grad():
        assert abs(loss_of(model, batch(0)) - loss_of(tiny_moe("mixtral").eval(), batch(0))) < 1e-6


def test_the_aux_loss_is_that_of_transformers(world):
    """Theirs counts the k choices one by one, and sums their shares."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    world(1)
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
    probabilities = logits.softmax(-1)
    found = balancing.aux_loss(probabilities, probabilities.topk(2, -1).indices)
    theirs = load_balancing_loss_func((logits,), 4, 2)
    assert isinstance(theirs, torch.Tensor) and abs(found - theirs / 2) < 1e-6


def test_balanced_gives_every_expert_the_same_number_across_ranks():
    parts = [balancing.round_robin(6, 2, 4, 6 * rank, torch.device("cpu")) for rank in range(2)]
    assert torch.bincount(torch.cat(parts).flatten()).tolist() == [6, 6, 6, 6]
    assert all(len(set(row)) == 2 for row in torch.cat(parts).tolist())


def test_added_losses_have_the_factor_of_the_loss_and_leave_its_value(world):
    world(1)
    config = moe_config(moe_load_balancing="aux_loss", moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.1)

    def gradient(factor, config, as_tuple=False):
        model = tsm.transform(tiny_moe("mixtral"), config=config)
        ids = batch(0)
        loss = model(ids, labels=ids, return_dict=False)[0] if as_tuple else loss_of(model, ids)
        (loss * factor).backward()
        return loss.detach(), next(p.grad for name, p in model.named_parameters() if name.endswith("gate.weight"))

    loss, once = gradient(1.0, config)
    _, eightfold = gradient(8.0, config)
    _, of_a_tuple = gradient(8.0, config, as_tuple=True)
    bare, without = gradient(1.0, moe_config())
    assert loss == bare and not torch.allclose(once, without, atol=1e-4)
    assert torch.allclose(eightfold, 8 * once, rtol=1e-4, atol=1e-6)
    assert torch.allclose(of_a_tuple, eightfold, rtol=1e-4, atol=1e-6)


def test_gradients_of_gradients_go_through_every_exchange(world):
    world(1)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    for there in (
        lambda rows: autograd_collectives.exchange(rows, [3], [3], group),
        lambda rows: autograd_collectives.gather(rows, group),
        lambda rows: autograd_collectives.scatter(rows, group),
        lambda rows: autograd_collectives.gather(rows, group, 1),
        lambda rows: autograd_collectives.scatter(rows, group, 1),
        lambda rows: scaled(rows, 0.5),
    ):
        assert torch.autograd.gradgradcheck(there, (torch.rand(3, 2, dtype=torch.double, requires_grad=True),))
