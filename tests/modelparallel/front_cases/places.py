"""Ranks and groups of processes, and objects sent between them."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist
from front_cases.by_hand import job
from smddp.modelparallel import initialize, places
from smddp.modelparallel.checkpointing import objects
from smddp.modelparallel.checkpointing.objects import CommGroup, RankType
from smddp.modelparallel.state import state


def case_groups_hold_the_ranks_that_placement_says(directory):
    for strategy, pipelines in (("cluster", [[0, 1], [2, 3]]), ("spread", [[0, 2], [1, 3]])):
        with job(partitions=2, ddp=True, placement_strategy=strategy) as ranks:
            mine = next(each for each in pipelines if dist.get_rank() in each)
            assert places.get_pp_group() == places.get_mp_group() == ranks.pp_ranks == mine
            assert dist.get_process_group_ranks(ranks.mail_group) == mine
            assert ranks.mail_group is not ranks.pp_group
            assert places.pp_rank() == mine.index(dist.get_rank())
            assert places.get_rdp_group() == places.get_dp_group() == [each[places.pp_rank()] for each in pipelines]
            assert (places.rank(), places.size()) == (dist.get_rank(), 4)
            assert (places.pp_size(), places.rdp_size(), places.dp_size(), places.tp_size()) == (2, 2, 2, 1)
            assert places.local_rank() == dist.get_rank() and places.local_size() == 4
            assert places.get_world_process_group() is dist.group.WORLD


def case_init_reports_errors_on_every_rank(directory):
    with pytest.raises(ValueError, match="4 ranks hold 2 replicas of the model, and 'ddp' is False"):
        initialize.init({"partitions": 2})
    with pytest.raises(ValueError, match="4 ranks do not fill 'pipeline_parallel_degree'=3"):
        initialize.init({"partitions": 3, "ddp": True})
    with pytest.raises(ValueError, match="microbatches is 1 on ranks 0, 2, 3 and 2 on rank 1"):
        initialize.init({"partitions": 4, "microbatches": 2 if dist.get_rank() == 1 else 1})
    assert not initialize.is_initialized()
    with job(partitions=4):
        initialize.init({"partitions": 4})
        with pytest.raises(RuntimeError, match=r"ran already.*smp\.reset"):
            initialize.init({"partitions": 2, "ddp": True})
    with pytest.raises(RuntimeError, match=r"smp.rank\(\) needs smp.init\(\) first"):
        places.rank()


def case_objects_reach_their_destination_ranks(directory):
    with job(partitions=2, ddp=True, placement_strategy="spread") as ranks:
        if ranks.rank == 0:
            objects.send({"to": 3}, 3)
            objects.send(["second"], 3)
            objects.broadcast("all", CommGroup.WORLD)
        else:
            if ranks.rank == 3:
                assert objects.recv_from(0) == {"to": 3}
                assert objects.recv_from(0, RankType.WORLD_RANK) == ["second"]
            assert objects.recv_from(0) == "all"
        # Stage 0 of each pipeline sends to its stage 1.
        if ranks.pp_rank == 0:
            objects.broadcast(ranks.rank, CommGroup.PP_GROUP)
        else:
            assert objects.recv_from(0, RankType.PP_RANK) == ranks.pp_ranks[0]
        assert objects.allgather(ranks.rank, CommGroup.DP_GROUP) == places.get_dp_group()
        assert objects.allgather(ranks.rank) == [0, 1, 2, 3]
        objects.barrier()
        objects.dp_barrier()
        objects.mp_barrier()
        with pytest.raises(ValueError, match="DP_RANK 2 is not among 0 to 1"):
            objects.send(1, 2, RankType.DP_RANK)
        with pytest.raises(TypeError, match="takes a CommGroup"):
            objects.barrier(dist.group.WORLD)


def case_reset_clears_state_and_restores_torch_clip_grad_norm(directory):
    from torch.nn.utils import get_total_norm

    plain = inspect.unwrap(get_total_norm)
    before = plain.__code__
    with job(partitions=4):
        assert plain.__code__ is not before
        assert state.module_manager.translate_functions == []
    assert plain.__code__ is before
    assert state.cfg is None and state.ranks is None
