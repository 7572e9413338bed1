"""Checkpoints of sharded models, resumed at equal and other layouts with the losses of an uninterrupted run."""

import contextlib
import functools
import os
import shutil
import tempfile
import threading

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from ranks.errors import refused
from smddp.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
from smddp.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader, DistributedFileSystemWriter
from smddp.sagemaker.distributed.checkpoint.hf import load_pretrained, save_pretrained
from smddp.sagemaker.distributed.checkpoint.state_dict_loader import load
from smddp.sagemaker.distributed.checkpoint.state_dict_saver import (
    async_save,
    maybe_finalize_async_calls,
    save,
)
from smddp.sagemaker.distributed.checkpoint.state_dict_utils import (
    SMStateDictType,
    init_optim_state,
    sm_state_dict_type,
)
from smp_cases import models
from smp_cases.models import batch, loss_of, part_of
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BEFORE, AFTER = 2, 2

# As many key and value heads as the widest tensor group here.
tiny = functools.partial(models.tiny, num_key_value_heads=4)

_PLAN = {
    **{f"model.layers.*.self_attn.{part}_proj": ColwiseParallel() for part in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    **{f"model.layers.*.mlp.{part}_proj": ColwiseParallel() for part in ("gate", "up")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(model, optimizer, ids) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, ids)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@functools.cache
def unbroken_losses() -> list[float]:
    """Returns the losses of an uninterrupted run in one process."""
    model = tiny()
    optimizer = optimizer_of(model)
    return [_step(model, optimizer, batch(step)) for step in range(BEFORE + AFTER)]


def train(model, optimizer, steps) -> None:
    """Trains a sharded model and compares its mean losses with the uninterrupted run."""
    for step in steps:
        mine = torch.tensor(_step(model, optimizer, part_of(batch(step), tsm.state.dp_rank, tsm.state.dp_size)))
        dist.all_reduce(mine)
        mean, wanted = float(mine) / dist.get_world_size(), unbroken_losses()[step]
        assert abs(mean - wanted) < 2e-5, f"step {step}: {mean} instead of {wanted}"


@contextlib.contextmanager
def configured(shard: int, tensor: int = 1):
    tsm.init({"hybrid_shard_degree": shard, "tensor_parallel_degree": tensor})
    try:
        yield
    finally:
        tsm.state.reset()


@contextlib.contextmanager
def shared_directory():
    """Creates a directory that all ranks access."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    try:
        yield name[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(name[0], ignore_errors=True)


def _original() -> bool:
    """FSDP1 with NO_SHARD takes tensor-parallel parameters only in its flat form."""
    return tsm.state.hybrid_shard_degree != 1


def sharded(engine: int, seed: int = 0):
    """The tiny Llama under FSDP1 or FSDP2 at the configured degrees, and its optimizer; values by seed."""
    model = tiny()
    if seed:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
    if tsm.state.tp_size > 1:
        parallelize_module(model, tsm.state.mesh["tensor"], _PLAN)
    if engine == 1:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
        model = FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=_original())
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model, optimizer_of(model)


def save_as_documented(model, optimizer, directory: str) -> None:
    """A script's sharded save under FSDP1: each tensor rank into its own directory, by the first replica."""
    state = tsm.state
    group = model.process_group
    coordinator = min(dist.get_process_group_ranks(group))
    maybe_finalize_async_calls(blocking=True, process_group=group)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        saved = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer), "step": BEFORE}
    if state.ranker.get_rep_rank(dist.get_rank()) == 0:
        async_save(
            saved,
            checkpoint_id=os.path.join(directory, f"tp{state.tp_rank}_ep{state.ep_rank}"),
            process_group=group,
            coordinator_rank=coordinator,
        )
    maybe_finalize_async_calls(blocking=True, process_group=group)
    dist.barrier()


def load_as_documented(model, optimizer, directory: str) -> None:
    state = tsm.state
    reader = DistributedFileSystemReader(os.path.join(directory, f"tp{state.tp_rank}_ep{state.ep_rank}"))
    group = model.process_group
    coordinator = min(dist.get_process_group_ranks(group))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        found = {"model": model.state_dict(), "step": 0}
        load(found, storage_reader=reader, process_group=group, coordinator_rank=coordinator)
        model.load_state_dict(found["model"])
        assert found["step"] == BEFORE
        optim = load_sharded_optimizer_state_dict(
            model_state_dict=found["model"], optimizer_key="optimizer", storage_reader=reader, process_group=group
        )
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, optim["optimizer"], group=group))


def save_any(model, optimizer, directory: str) -> None:
    """FSDP2's and everyone's form: one directory, by one whole copy of the model."""
    saved = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": BEFORE,
    }
    save(saved, checkpoint_id=directory)


def load_any(model, optimizer, directory: str) -> None:
    found = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 0}
    load(found, checkpoint_id=directory)
    assert found["step"] == BEFORE
    set_model_state_dict(model, found["model"])
    set_optimizer_state_dict(model, optimizer, found["optimizer"])


def _resumes(engine: int, layouts, save_with, load_with) -> None:
    """Trains at the first layout, saves, and resumes at each other layout."""
    with shared_directory() as directory:
        with configured(*layouts[0]):
            model, optimizer = sharded(engine)
            train(model, optimizer, range(BEFORE))
            save_with(model, optimizer, directory)
        for layout in layouts:
            with configured(*layout):
                model, optimizer = sharded(engine, seed=7)
                load_with(model, optimizer, directory)
                train(model, optimizer, range(BEFORE, BEFORE + AFTER))


def case_fsdp1_resumes_at_another_shard_degree():
    _resumes(1, [(2,), (4,)], save_as_documented, load_as_documented)
    _resumes(1, [(4,), (2,)], save_as_documented, load_as_documented)


def case_fsdp1_resumes_at_another_tensor_degree():
    _resumes(1, [(2, 2), (4, 1), (1, 4)], save_as_documented, load_as_documented)


def case_fsdp1_without_tensor_parallelism_resumes_with_it():
    _resumes(1, [(4, 1), (2, 2)], save_as_documented, load_as_documented)


def case_fsdp2_resumes_at_another_layout():
    _resumes(2, [(2, 1), (4, 1), (2, 2), (1, 1)], save_any, load_any)


def case_fsdp2_with_tensor_parallelism_resumes_at_another_layout():
    _resumes(2, [(2, 2), (4, 1), (1, 4), (1, 2)], save_any, load_any)


def case_native_fsdp1_resumes():
    with shared_directory() as directory:
        tsm.init({})
        try:
            for seed, begin in ((0, 0), (7, BEFORE)):
                model, optimizer = sharded(1, seed)
                if begin:
                    load_as_documented(model, optimizer, directory)
                    train(model, optimizer, range(BEFORE, BEFORE + AFTER))
                else:
                    train(model, optimizer, range(BEFORE))
                    save_as_documented(model, optimizer, directory)
        finally:
            tsm.state.reset()


def _transformed(original: bool = True):
    """Returns the tiny Llama as scripts create it: transformed, under FSDP1, without a separate seed."""
    model = tsm.transform(tiny())
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    model = FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=original)
    return model, optimizer_of(model)


def case_flat_parameters_with_tensor_parallelism_resume():
    for layout, save_it, load_it in (
        ((1, 2), save_any, load_any),  # the group of half of the ranks does not hold global rank 0
        ((2, 2), save_as_documented, load_as_documented),
    ):
        with shared_directory() as directory:
            for begin in (0, BEFORE):
                with configured(*layout):
                    model, optimizer = _transformed(original=False)
                    if begin:
                        load_it(model, optimizer, directory)
                    train(model, optimizer, range(begin, begin + BEFORE))
                    if not begin:
                        save_it(model, optimizer, directory)


def case_fsdp1_with_tensor_parallelism_resumes_in_torchs_own_form_at_every_degree():
    # The first layout saves, at a shard degree of 1, too.
    for layouts in ([(1, 2), (2, 2), (1, 4)], [(2, 2), (1, 2)]):
        with shared_directory() as directory:
            with configured(*layouts[0]):
                model, optimizer = _transformed()
                train(model, optimizer, range(BEFORE))
                save_any(model, optimizer, directory)
            for layout in layouts:
                with configured(*layout):
                    model, optimizer = _transformed()
                    load_any(model, optimizer, directory)
                    train(model, optimizer, range(BEFORE, BEFORE + AFTER))


# ---- sub-worlds ----


def _save_and_load(engine: int, local: bool):
    """Returns the save and load functions of a model."""
    if local:
        return save_local, load_local
    return (save_as_documented, load_as_documented) if engine == 1 else (save_any, load_any)


def save_in_this_world(directory: str, engine: int, shard: int, tensor: int, local: bool) -> None:
    """Run on pools of several sizes, like the next two: trains the first half and saves."""
    with configured(shard, tensor):
        model, optimizer = sharded(engine)
        train(model, optimizer, range(BEFORE))
        _save_and_load(engine, local)[0](model, optimizer, directory)


def pass_on_in_this_world(directory: str, to: str, engine: int, shard: int, tensor: int, local: bool) -> None:
    """Loads and saves again, without a training step."""
    with configured(shard, tensor):
        model, optimizer = sharded(engine, seed=7)
        save_with, load_with = _save_and_load(engine, local)
        load_with(model, optimizer, directory)
        save_with(model, optimizer, to)


def resume_in_this_world(directory: str, engine: int, shard: int, tensor: int, local: bool) -> None:
    """Loads and trains the second half."""
    with configured(shard, tensor):
        model, optimizer = sharded(engine, seed=9)
        _save_and_load(engine, local)[1](model, optimizer, directory)
        train(model, optimizer, range(BEFORE, BEFORE + AFTER))


# ---- local checkpoints ----


def _local_place(model, directory: str):
    """A script's directory, group and coordinator of a local checkpoint."""
    state = tsm.state
    mine = None
    for ranks in state.ranker.get_rep_groups():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = (group, min(ranks))
    name = f"tp{state.tp_rank}_ep{state.ep_rank}_fsdp{state.shard_rank}"
    return os.path.join(directory, name), *mine


def _local_states(model, optimizer) -> dict:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counted, sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        states = {"model": model.state_dict()}
        init_optim_state(optimizer, skip_empty_param=True)
        states["optimizer"] = optimizer.state_dict()
    assert counted.get_total_counts() == 0, counted.get_comm_counts()
    return states


def save_local(model, optimizer, directory: str) -> None:
    place, group, coordinator = _local_place(model, directory)
    queue = AsyncCallsQueue()
    async_save(
        {**_local_states(model, optimizer), "step": BEFORE},
        checkpoint_id=place,
        process_group=group,
        coordinator_rank=coordinator,
        queue=queue,
    )
    assert queue.maybe_finalize_async_calls(blocking=True, skip_sync=True) == [0]
    dist.barrier()


def load_local(model, optimizer, directory: str) -> None:
    place, group, coordinator = _local_place(model, directory)
    states = {**_local_states(model, optimizer), "step": 0}
    reader = DistributedFileSystemReader(place)
    load(state_dict=states, process_group=group, coordinator_rank=coordinator, storage_reader=reader)
    assert states["step"] == BEFORE


def case_a_local_checkpoint_loads_in_place_without_communication():
    _resumes(1, [(2, 1)], save_local, load_local)
    _resumes(1, [(2, 2)], save_local, load_local)
    _resumes(2, [(2, 1)], save_local, load_local)
    _resumes(2, [(2, 2)], save_local, load_local)


def case_one_replica_writes_a_local_checkpoint():
    with shared_directory() as directory, configured(2):
        model, optimizer = sharded(1)
        train(model, optimizer, range(1))
        save_local(model, optimizer, directory)
        if dist.get_rank() == 0:
            for name in sorted(os.listdir(directory)):
                place = os.path.join(directory, name)
                sizes = {f[:4]: os.path.getsize(os.path.join(place, f)) for f in os.listdir(place) if f[0] == "_"}
                assert sizes["__0_"] > 10_000 and sizes.get("__1_", 0) == 0, (name, sizes)


def _refused(kind, text: str, attempt) -> None:
    with refused(text, kind=kind):
        attempt()


def case_a_local_checkpoint_of_another_degree_is_refused():
    with shared_directory() as directory:
        with configured(2):
            model, optimizer = sharded(1)
            train(model, optimizer, range(1))
            save_local(model, optimizer, directory)
        with configured(4):
            model, optimizer = sharded(1)
            place = os.path.join(directory, f"tp0_ep0_fsdp{tsm.state.shard_rank % 2}")
            states = _local_states(model, optimizer)
            _refused(
                ValueError,
                "local checkpoint saved with shard degree 2, and this run has shard degree 4",
                lambda: load(states, checkpoint_id=place),
            )
            _refused(
                ValueError,
                "is a local checkpoint (shard 0 of 2), but the state dict is not local",
                lambda: load(
                    {"model": get_model_state_dict(model)}, checkpoint_id=os.path.join(directory, "tp0_ep0_fsdp0")
                ),
            )
            _refused(
                FileNotFoundError,
                "fsdp3 does not exist; its parent directory contains",
                lambda: load(states, checkpoint_id=os.path.join(directory, "tp0_ep0_fsdp3")),
            )


def case_missing_tensor_ranks_are_detected():
    with shared_directory() as directory:
        with configured(2, 2):
            model, optimizer = sharded(1)
            train(model, optimizer, range(1))
            save_as_documented(model, optimizer, directory)
        if dist.get_rank() == 0:
            shutil.rmtree(os.path.join(directory, "tp1_ep0"))
        dist.barrier()
        with configured(4):
            model, optimizer = sharded(1)
            _refused(ValueError, "not all of them are here", lambda: load_as_documented(model, optimizer, directory))


# ---- asynchronous saves ----


class Gate:
    """A hook of the writer that waits until it is opened; always opened at the end."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, writer) -> None:
        self.reached.set()
        assert self.opened.wait(30)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.opened.set()


def case_training_continues_during_several_saves():
    with shared_directory() as directory, configured(2), Gate() as gate:
        model, optimizer = sharded(2)
        queue = AsyncCallsQueue()
        wanted = []
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            wanted.append({n: p.full_tensor().clone() for n, p in model.named_parameters()})
            writer = DistributedFileSystemWriter(f"{directory}/{step}", pre_write_hooks=[gate])
            states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            async_save(states, storage_writer=writer, queue=queue, force_check_all_plans=False)
        assert gate.reached.wait(30)
        # Nothing is written yet, three saves wait, and training goes on with other values.
        train(model, optimizer, range(3, 4))
        assert queue.get_num_unfinalized_calls() == 3
        assert queue.maybe_finalize_async_calls(blocking=False) == []
        _refused(
            FileNotFoundError,
            "is incomplete, its save did not end: no data of ranks 0-3",
            lambda: load(dict(states), checkpoint_id=f"{directory}/0"),
        )
        if dist.get_rank() != 1:
            gate.opened.set()
            queue._calls[-1][1]._written.exception(30)
        # Rank 1 is not done, so no rank finalizes anything.
        assert queue.maybe_finalize_async_calls(blocking=False) == []
        gate.opened.set()
        assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
        for step in range(3):
            found = {"model": get_model_state_dict(model)}
            load(found, checkpoint_id=f"{directory}/{step}")
            for name, tensor in found["model"].items():
                assert torch.equal(tensor.full_tensor(), wanted[step][name]), (step, name)


def case_saves_written_on_all_ranks_are_finalized_without_waiting():
    with shared_directory() as directory:
        queue = AsyncCallsQueue()
        group = dist.group.WORLD
        with Gate() as gate:
            async_save({"x": torch.ones(2)}, checkpoint_id=f"{directory}/0", queue=queue)
            held = DistributedFileSystemWriter(f"{directory}/1", pre_write_hooks=[gate])
            async_save({"x": torch.ones(2)}, storage_writer=held, queue=queue)
            assert gate.reached.wait(30)
            assert queue.maybe_finalize_async_calls(blocking=False, process_group=group) == [0]
        assert queue.maybe_finalize_async_calls(blocking=True, process_group=group) == [1]


def case_a_rank_without_saves_does_not_delay_other_ranks():
    with shared_directory() as directory:
        queue = AsyncCallsQueue()
        pair = dist.new_group([2, 3])
        if dist.get_rank() >= 2:
            async_save({"x": torch.ones(2)}, checkpoint_id=directory, process_group=pair, queue=queue)
            queue._calls[0][1]._written.exception(30)
        done = queue.maybe_finalize_async_calls(blocking=False)
        assert done == ([0] if dist.get_rank() >= 2 else [])
        found = {"x": torch.zeros(2)}
        dist.barrier()
        load(found, checkpoint_id=directory)
        assert found["x"].sum() == 2


def case_a_rank_that_cannot_write_fails_every_rank():
    def full_disk(writer):
        raise OSError(28, "No space left on device")

    for background in (False, True):
        with shared_directory() as directory:
            save({"x": torch.zeros(2)}, checkpoint_id=directory)
            hooks = [full_disk] if dist.get_rank() == 2 else []
            writer = DistributedFileSystemWriter(directory, pre_write_hooks=hooks)
            queue = AsyncCallsQueue()

            def attempt(writer=writer, queue=queue, background=background):
                if background:
                    async_save({"x": torch.ones(2)}, storage_writer=writer, queue=queue)
                    queue.maybe_finalize_async_calls(blocking=True)
                else:
                    save({"x": torch.ones(2)}, storage_writer=writer)

            _refused(RuntimeError, "failed on rank 2: OSError: [Errno 28] No space left on device", attempt)
            found = {"x": torch.full((2,), 5.0)}
            load(found, checkpoint_id=directory)
            assert found["x"].sum() == 0, "the checkpoint from before must still load"
            # With wait_error_handling=False the error is logged, and the previous checkpoint remains.
            save({"x": torch.ones(2)}, storage_writer=writer, wait_error_handling=False)
            load(found, checkpoint_id=directory)
            assert found["x"].sum() == 0
            save({"x": torch.ones(2)}, checkpoint_id=directory)
            load(found, checkpoint_id=directory)
            assert found["x"].sum() == 2


def case_a_planning_error_is_raised_on_every_rank():
    with shared_directory() as directory:
        path = os.path.join(directory, "file")
        if dist.get_rank() == 0:
            with open(path, "w"):
                pass
        dist.barrier()
        _refused(FileExistsError, "failed on rank", lambda: save({"x": torch.ones(1)}, checkpoint_id=path))
        _refused(TypeError, "must be a dictionary", lambda: save([1], checkpoint_id=directory))
        _refused(ValueError, "give checkpoint_id", lambda: save({}))
        _refused(ValueError, "give checkpoint_id", lambda: load({}))
        _refused(ValueError, "coordinator_rank=9", lambda: save({}, checkpoint_id=directory, coordinator_rank=9))


def case_ranks_that_name_different_directories_are_refused_before_anything_is_written():
    for saving in (save, async_save):
        with shared_directory() as directory:
            mine = f"{directory}/step{dist.get_rank() // 3}"
            attempt = functools.partial(saving, {"x": torch.ones(1)}, checkpoint_id=mine)
            _refused(ValueError, f"ranks 0-2: {directory}/step0; rank 3: {directory}/step1", attempt)
            dist.barrier()
            assert not os.listdir(directory)


def case_plans_are_reused_only_if_every_rank_asks_for_the_same():
    from unittest import mock

    from smddp.sagemaker.distributed.checkpoint.planner import SavePlanner
    from smddp.sagemaker.distributed.checkpoint.state_dict_saver import PyTorchDistSaveShardedStrategy

    with shared_directory() as directory:
        strategy = PyTorchDistSaveShardedStrategy()
        queue = AsyncCallsQueue()
        planned = 0
        original = SavePlanner.create_global_plan

        def counting(self, plans):
            nonlocal planned
            planned += 1
            return original(self, plans)

        with mock.patch.object(SavePlanner, "create_global_plan", counting):
            for step, size in enumerate((2, 2, 3, 3)):
                mine = torch.full((size if dist.get_rank() == 1 else 1,), float(step))
                states = {"mine": {f"r{dist.get_rank()}": mine}}
                async_save(
                    states,
                    checkpoint_id=f"{directory}/{step}",
                    queue=queue,
                    sharded_strategy=strategy,
                    force_check_all_plans=False,
                )
                queue.maybe_finalize_async_calls(blocking=True)
                found = {"mine": {f"r{r}": torch.empty(size if r == 1 else 1) for r in range(4)}}
                load(found, checkpoint_id=f"{directory}/{step}")
                assert all((t == step).all() for t in found["mine"].values()), found
        assert planned == (2 if dist.get_rank() == 0 else 0)


def case_mismatched_names_are_reported():
    with shared_directory() as directory:
        save(
            {"model": {"weight": torch.ones(2), "bias": torch.ones(2)}, "other": torch.ones(1)}, checkpoint_id=directory
        )
        wrong = {"model": {"wieght": torch.ones(2), "bias": torch.ones(2)}}
        _refused(
            ValueError,
            "does not have model.wieght (nearest: model.weight)",
            lambda: load(wrong, checkpoint_id=directory),
        )
        fewer = {"model": {"bias": torch.ones(2)}}
        _refused(ValueError, "does not ask for its model.weight", lambda: load(fewer, checkpoint_id=directory))
        load(fewer, checkpoint_id=directory, check_keys_matched=False)
        odd = {"model": {"weight": torch.ones(2), "bias": torch.ones(2)}}
        if dist.get_rank() == 3:
            odd["other"] = torch.ones(1)
        _refused(ValueError, "different entries", lambda: load(odd, checkpoint_id=directory))


# ---- Hugging Face's form ----


def _loads_in_transformers(directory: str, model_loss: float, ids) -> None:
    from transformers import AutoModelForCausalLM

    plain, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert abs(float(loss_of(plain, ids).detach()) - model_loss) < 1e-5


def case_safetensors_of_every_layout_load_in_transformers_and_back():
    ids = batch(5)
    for tied in (False, True):
        for engine, layouts in ((1, ((2, 1), (4, 1), (1, 1), (2, 2))), (2, ((2, 1), (2, 2), (1, 4)))):
            with shared_directory() as directory:
                reference = tiny(tie_word_embeddings=tied)
                with torch.no_grad():
                    for parameter in reference.parameters():
                        parameter.mul_(1.5)
                wanted = float(loss_of(reference, ids).detach())
                if dist.get_rank() == 0:
                    reference.save_pretrained(f"{directory}/first")
                dist.barrier()
                last = f"{directory}/first"
                for i, layout in enumerate(layouts):
                    with configured(*layout):
                        model = tiny(tie_word_embeddings=tied)
                        if tsm.state.tp_size > 1:
                            parallelize_module(model, tsm.state.mesh["tensor"], _PLAN)
                        if engine == 1:
                            model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=_original())
                        else:
                            fully_shard(model)
                        load_pretrained(model, last)
                        assert abs(float(loss_of(model, ids).detach()) - wanted) < 1e-5, (engine, layout, tied)
                        last = f"{directory}/{i}"
                        save_pretrained(model, last, max_shard_size="20KB" if i % 2 else "5GB")
                    if dist.get_rank() == 0:
                        assert os.path.exists(f"{last}/model.safetensors.index.json") == bool(i % 2)
                        _loads_in_transformers(last, wanted, ids)
                    dist.barrier()


def case_safetensors_of_native_fsdp1():
    """Without tsm's mesh FSDP1 gives ShardedTensors."""
    with shared_directory() as directory:
        model = FSDP(tiny(), device_id=torch.device("cpu"))
        wanted = float(loss_of(model, batch(0)).detach())
        save_pretrained(model, directory)
        if dist.get_rank() == 0:
            _loads_in_transformers(directory, wanted, batch(0))
        dist.barrier()
        other = FSDP(tiny().apply(lambda m: [p.data.zero_() for p in m.parameters()]), device_id=torch.device("cpu"))
        load_pretrained(other, directory)
        assert abs(float(loss_of(other, batch(0)).detach()) - wanted) < 1e-5
        if dist.get_rank() == 0:
            with open(os.path.join(directory, "blocked"), "w"):
                pass
        _refused(FileExistsError, "rank 0", lambda: save_pretrained(model, os.path.join(directory, "blocked")))
        _refused(
            FileNotFoundError, "model.safetensors", lambda: load_pretrained(model, os.path.join(directory, "none"))
        )
        _refused(TypeError, "transformers model", lambda: save_pretrained(torch.nn.Linear(1, 1), directory))


def case_full_state_dicts_under_tensor_parallelism_are_whole():
    ids = batch(5)
    for layout in ((2, 2), (1, 4), (2, 1)):
        with configured(*layout):
            model, _ = sharded(1)
            wanted = float(loss_of(model, ids).detach())
            config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True, translate_on_save=True)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
                full = model.state_dict()
            assert bool(full) == (dist.get_rank() == 0 or (layout == (1, 4) and not tsm.state.tp_rank)), len(full)
            if dist.get_rank() == 0:
                plain = tiny()
                assert full.keys() == plain.state_dict().keys()
                plain.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in full.items()})
                plain.load_state_dict(full)
                assert abs(float(loss_of(plain, ids).detach()) - wanted) < 1e-5
            dist.barrier()
