"""Hybrid sharding: any degree, FSDP1 and FSDP2, the losses of one process, and what crosses between nodes."""

import functools

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from ranks.errors import refused
from smddp.sagemaker.fsdp import gloo_average
from smp_cases.models import batch, loss_of, part_of, tiny
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

STEPS = 2


@functools.cache
def plain_losses(family: str = "llama") -> list[float]:
    """The losses of one process on whole batches."""
    model = tiny(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [_step(model, optimizer, batch(step)) for step in range(STEPS)]


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, ids)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def losses(model: torch.nn.Module) -> list[float]:
    """This rank's part of each batch, and the mean loss over all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        mine = _step(model, optimizer, part_of(batch(step), tsm.state.dp_rank, tsm.state.dp_size))
        mean = torch.tensor(mine)
        dist.all_reduce(mean)
        found.append(float(mean) / dist.get_world_size())
    return found


def assert_same(found: list[float], wanted: list[float]) -> None:
    assert all(abs(a - b) < 1e-5 for a, b in zip(found, wanted)), (found, wanted)


def wrap1(model: torch.nn.Module, **options) -> FSDP:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def wrap2(model: torch.nn.Module, **options) -> torch.nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _with(config: dict, body) -> None:
    tsm.init(config)
    try:
        body()
    finally:
        tsm.state.reset()


def case_fsdp1_trains_as_one_process_at_every_degree():
    for degree in (1, 2, 4):
        for original in (True, False):

            def body(degree=degree, original=original):
                model = wrap1(tiny(), use_orig_params=original)
                assert dist.get_world_size(model.process_group) == (4 if degree == 1 else degree)
                assert_same(losses(model), plain_losses())

            _with({"hybrid_shard_degree": degree}, body)


def case_fsdp2_trains_as_one_process_at_every_degree():
    for degree in (1, 2, 4):

        def body(degree=degree):
            model = wrap2(tiny())
            weight = model.lm_head.weight
            assert weight.device_mesh.shape == ((4 // degree, degree) if degree < 4 else (4,))
            assert weight.to_local().shape[0] == weight.shape[0] // degree
            assert_same(losses(model), plain_losses())

        _with({"hybrid_shard_degree": degree}, body)


def case_strategies_are_forced_or_kept_as_documented():
    strategy = ShardingStrategy
    expected = {
        2: {
            None: strategy.HYBRID_SHARD,
            strategy.FULL_SHARD: strategy.HYBRID_SHARD,
            strategy.SHARD_GRAD_OP: strategy.HYBRID_SHARD,
            strategy.HYBRID_SHARD: strategy.HYBRID_SHARD,
            strategy._HYBRID_SHARD_ZERO2: strategy._HYBRID_SHARD_ZERO2,
        },
        1: {strategy.FULL_SHARD: strategy.NO_SHARD, strategy.HYBRID_SHARD: strategy.NO_SHARD},
        0: {None: strategy.FULL_SHARD, strategy.SHARD_GRAD_OP: strategy.SHARD_GRAD_OP},
    }
    for degree, pairs in expected.items():
        for asked, got in pairs.items():

            def body(asked=asked, got=got, degree=degree):
                model = FSDP(torch.nn.Linear(4, 4), sharding_strategy=asked, device_id=torch.device("cpu"))
                assert model.sharding_strategy == got, (degree, asked, model.sharding_strategy)

            _with({"hybrid_shard_degree": degree}, body)


def case_zero2_hybrid_trains_as_one_process():
    def body():
        model = wrap1(tiny(), sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2)
        assert_same(losses(model), plain_losses())

    _with({"hybrid_shard_degree": 2}, body)


def case_degree_zero_does_not_patch_torch():
    def body():
        assert tsm.state.rep_rank_process_group is None and tsm.state.shard_size is None
        assert not {"hybrid_fsdp", "hybrid_fully_shard"} & {patch.name for patch in tsm.patches()}
        model = wrap1(tiny())
        assert dist.get_world_size(model.process_group) == 4
        assert_same(losses(model), plain_losses())

    _with({}, body)


def case_explicit_process_groups_are_kept():
    def body():
        model = FSDP(torch.nn.Linear(4, 4), process_group=dist.group.WORLD, device_id=torch.device("cpu"))
        assert model.sharding_strategy == ShardingStrategy.FULL_SHARD
        assert dist.get_world_size(model.process_group) == 4

    _with({"hybrid_shard_degree": 2}, body)


def case_reset_undoes_everything():
    before = FSDP.__init__
    listed = tsm.patches()
    tsm.init({"hybrid_shard_degree": 2})
    assert FSDP.__init__ is not before
    tsm.state.reset()
    assert FSDP.__init__ is before and tsm.patches() == listed and not tsm.is_initialized()
    linear = torch.nn.Linear(8, 8)
    fully_shard(linear, mesh=dist.device_mesh.init_device_mesh("cpu", (4,)))
    assert linear.weight.to_local().shape[0] == 2


def case_state_reports_the_index_in_every_dimension():
    rank = dist.get_rank()

    def body():
        state = tsm.state
        ranks_of = dist.get_process_group_ranks
        assert (state.rank, state.world_size, state.tp_size, state.tp_rank) == (rank, 4, 2, rank % 2)
        assert ranks_of(state.tp_process_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert ranks_of(state.shard_process_group) == [rank]
        assert ranks_of(state.replication_process_group) == [rank % 2, rank % 2 + 2]
        assert ranks_of(state.rep_rank_process_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert state.ranker.get_rep_groups() == [[0, 2], [1, 3]]
        assert [state.ranker.get_rep_rank(r) for r in range(4)] == [0, 0, 1, 1]
        assert (state.dp_rank, state.dp_size, state.rep_rank, state.rep_size) == (rank // 2, 2, rank // 2, 2)
        assert ranks_of(state.world_process_group) == [0, 1, 2, 3]
        assert state.mesh.mesh_dim_names == ("replicate", "shard", "tensor")

    _with({"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, body)


def case_different_configurations_raise_on_every_rank():
    with refused("hybrid_shard_degree is 4 on ranks 0-2 and 2 on rank 3"):
        tsm.init({"hybrid_shard_degree": 2 if dist.get_rank() == 3 else 4})
    assert not tsm.is_initialized()


def case_a_second_init_needs_a_reset():
    def body():
        tsm.init({"hybrid_shard_degree": 2})
        attempts = (
            lambda: tsm.init({"hybrid_shard_degree": 4}),
            lambda: setattr(tsm.state, "hybrid_shard_degree", 4),
        )
        for attempt in attempts:
            with refused("reset()", kind=RuntimeError):
                attempt()

    _with({"hybrid_shard_degree": 2}, body)


def case_an_optimizer_created_before_sharding_is_reported():
    for wrap in (wrap1, wrap2):

        def body(wrap=wrap):
            model = tiny()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model = wrap(model)
            loss_of(model, batch(0)).backward()
            with refused("Create the optimizer after"):
                optimizer.step()

        _with({"hybrid_shard_degree": 2}, body)


def on_two_nodes_gathers_avoid_the_network():
    """Two "nodes" of two ranks: between them goes the all-reduce of one shard, and nothing else."""
    for wrap in (wrap1, wrap2):

        def body(wrap=wrap):
            model = wrap(tiny())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            mine = part_of(batch(0), tsm.state.dp_rank, tsm.state.dp_size)
            _step(model, optimizer, mine)
            before = _counted()
            _step(model, optimizer, mine)
            step = {key: size - before.get(key, 0) for key, size in _counted().items()}
            between = {collective: size for (crosses, collective), size in step.items() if crosses and size}
            inside = {collective: size for (crosses, collective), size in step.items() if not crosses and size}
            shard = sum(p.numel() * 4 for p in tiny().parameters()) // 2
            assert set(between) == {"all_reduce"}, between
            assert shard <= between["all_reduce"] < shard * 1.05, (between, shard)
            assert {"all_gather", "reduce_scatter"} <= set(inside), inside

        _with({"hybrid_shard_degree": 2}, body)


def on_two_nodes_shard_groups_fill_a_node_for_any_rank_order():
    """Ranks 0 and 2 are on one node here, 1 and 3 on the other."""

    def body():
        mine = dist.get_process_group_ranks(tsm.state.shard_process_group)
        assert mine == [dist.get_rank() % 2, dist.get_rank() % 2 + 2], mine
        assert_same(losses(wrap1(tiny())), plain_losses())

    _with({"hybrid_shard_degree": 2}, body)


def _counted() -> dict:
    """Returns the total bytes by (crosses nodes, collective), over all open groups but the world's."""
    import smddp

    total: dict = {}
    # The world's group carries what the test itself asks.
    for entry in smddp.traffic():
        if entry["size"] < 4:
            key = (entry["nodes"] > 1, entry["collective"])
            total[key] = total.get(key, 0) + entry["bytes"]
    return total


def case_fully_shard_over_gloo_is_refused_where_torch_sums_gradients():
    gloo = dist.new_group(backend="gloo")
    over_gloo = dist.device_mesh.DeviceMesh.from_group(gloo, "cpu")
    over_default = dist.device_mesh.init_device_mesh("cpu", (4,))
    first_correct, gloo_average.FIRST_CORRECT = gloo_average.FIRST_CORRECT, (99, 0)

    def body():
        with refused("torch 99.0 or later", kind=RuntimeError):
            fully_shard(torch.nn.Linear(4, 4), mesh=over_gloo)
        if dist.get_backend() == "gloo":
            with refused("Use init_process_group(backend='smddp')", kind=RuntimeError):
                fully_shard(torch.nn.Linear(4, 4))
        else:
            fully_shard(torch.nn.Linear(4, 4), mesh=over_default)
            fully_shard(torch.nn.Linear(4, 4))

    try:
        _with({"hybrid_shard_degree": 2}, body)
        _with({}, body)
    finally:
        gloo_average.FIRST_CORRECT = first_correct


def case_fully_shard_over_gloo_averages_gradients_or_is_refused():
    gloo = dist.new_group(backend="gloo")
    mesh = dist.device_mesh.DeviceMesh.from_group(gloo, "cpu")
    layer = torch.nn.Linear(1, 4, bias=False)

    def body():
        if gloo_average.torch_sums():
            with refused("sums the gradients of the 4 ranks", kind=RuntimeError):
                fully_shard(layer, mesh=mesh)
            return
        fully_shard(layer, mesh=mesh)
        layer(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
        assert layer.weight.grad.full_tensor().unique().tolist() == [1.5]

    _with({}, body)
