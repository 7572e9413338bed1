"""Checkpoints: crashes, other world sizes, rejected input, and S3 names.

What takes four ranks is in smp_cases/checkpoint.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from ranks.pool import client_pool
from smddp.sagemaker.distributed.checkpoint import s3_filesystem as s3
from smddp.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader, DistributedFileSystemWriter
from smddp.sagemaker.distributed.checkpoint.safetensors_files import Entry, FileWriter, SafetensorsReader, parse_size
from smddp.sagemaker.distributed.checkpoint.state_dict_loader import load
from smddp.sagemaker.distributed.checkpoint.state_dict_saver import (
    AsyncCallsQueue,
    CheckpointError,
    PyTorchDistSaveShardedStrategy,
    async_save,
    save,
)
from smddp.sagemaker.distributed.checkpoint.state_dict_utils import (
    SMStateDictType,
    init_optim_state,
    sm_state_dict_type,
)

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.fixture(scope="module")
def pair(ranks):
    """A pool of two ranks, besides the pool of four."""
    with client_pool(2, HERE) as pool:
        yield pool


# ---- worlds of other sizes ----


@pytest.mark.parametrize(
    ("engine", "four", "two", "local"),
    [(1, (2, 2), (2, 1), False), (1, (4, 1), (1, 2), False), (2, (2, 2), (1, 2), False), (2, (2, 1), (2, 1), True)],
    ids=["fsdp1", "fsdp1-shards-to-tensors", "fsdp2", "local-with-fewer-replicas"],
)
def test_a_run_resumes_with_two_and_then_four_ranks(ranks, pair, tmp_path, engine, four, two, local):
    options = {"engine": engine, "local": local}
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    case = "smp_cases.checkpoint"
    ranks.run(case, "save_in_this_world", directory=first, shard=four[0], tensor=four[1], **options)
    pair.run(case, "pass_on_in_this_world", directory=first, to=second, shard=two[0], tensor=two[1], **options)
    pair.run(case, "resume_in_this_world", directory=second, shard=two[0], tensor=two[1], **options)
    ranks.run(case, "resume_in_this_world", directory=second, shard=four[0], tensor=four[1], **options)


def test_a_published_script_goes_on_in_new_processes_from_its_folders_of_tensor_ranks(ranks, pair, tmp_path):
    case, directory = "smp_cases.published_scripts", str(tmp_path)
    ranks.run(case, "save_sharded", directory=directory, shard=2, tensor=2)
    assert sorted(os.listdir(tmp_path)) == ["tp2-0", "tp2-1"]
    pair.run(case, "resume_sharded", directory=directory, shard=1, tensor=2)
    ranks.run(case, "resume_sharded", directory=directory, shard=2, tensor=2)


# ---- crashes ----

_SAVES_AND_IS_KILLED = """
import contextlib, os, sys, threading
import torch, torch.distributed as dist
from smddp.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemWriter
from smddp.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls, save

rank, directory, store, halfway = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
states = lambda value: {f"part{rank}": torch.full((1000,), float(value)), "step": value}
save(states(1), checkpoint_id=directory)

planned = threading.Event()

def stuck_in_the_middle(writer):
    planned.wait()
    make = writer.fs.create_stream

    @contextlib.contextmanager
    def create_stream(path, mode):
        with make(path, mode) as stream:
            write = stream.write

            class Half:
                def write(self, data):
                    write(bytes(data)[: len(data) // 2])
                    stream.flush()
                    with open(halfway, "w") as signal_file:
                        signal_file.write("now")
                    threading.Event().wait()

                def __getattr__(self, name):
                    return getattr(stream, name)

            yield Half() if rank == 1 else stream

    writer.fs.create_stream = create_stream

for place in (directory, directory + "-new"):
    hooks = [stuck_in_the_middle] if rank == 1 else []
    async_save(states(2), storage_writer=DistributedFileSystemWriter(place, pre_write_hooks=hooks))
dist.barrier()
planned.set()
maybe_finalize_async_calls(blocking=True)
"""


def test_a_write_timeout_reports_the_directory(tmp_path):
    strategy, gate = PyTorchDistSaveShardedStrategy(write_timeout=0.05), threading.Event()
    writer = DistributedFileSystemWriter(tmp_path, pre_write_hooks=[lambda _: gate.wait(60)])
    queue = AsyncCallsQueue()
    async_save({"a": torch.ones(4)}, storage_writer=writer, queue=queue, sharded_strategy=strategy)
    try:
        with pytest.raises(CheckpointError, match=rf"rank 0.*not written to {tmp_path} within 0.05 s"):
            queue.maybe_finalize_async_calls(blocking=True)
    finally:
        gate.set()


def test_the_last_complete_checkpoint_loads_after_a_kill_during_a_save(tmp_path):
    directory, halfway = tmp_path / "checkpoint", tmp_path / "halfway"
    os.mkfifo(halfway)
    arguments = [str(directory), str(tmp_path / "store"), str(halfway)]
    processes = [
        subprocess.Popen([sys.executable, "-c", _SAVES_AND_IS_KILLED, str(rank), *arguments]) for rank in range(2)
    ]
    try:
        with open(halfway) as signal_file:
            assert signal_file.read() == "now"
        assert all(process.poll() is None for process in processes), "a rank exited before it was killed"
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    found = {"part0": torch.zeros(1000), "part1": torch.zeros(1000), "step": 0}
    load(found, checkpoint_id=directory)
    assert found["step"] == 1 and (found["part0"] == 1).all() and (found["part1"] == 1).all()
    assert any(name.startswith(".incomplete-") for name in os.listdir(directory)), "the second save had not begun"
    # The next save removes the files of the killed save.
    save(found, checkpoint_id=directory)
    assert sorted(name[:4] for name in os.listdir(directory)) == [".met", "__0_"], os.listdir(directory)

    with pytest.raises(FileNotFoundError, match=r"incomplete, its save did not end: no data of ranks? .*1.*__1_"):
        load(found, checkpoint_id=f"{directory}-new")


_SAVES_AND_ENDS = """
import sys
import torch, torch.distributed as dist
from smddp.sagemaker.distributed.checkpoint.state_dict_saver import async_save

rank, directory, store = int(sys.argv[1]), *sys.argv[2:4]
backend = "gloo" if "destroys" in sys.argv else "smddp"
dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=2)
for step in range(2):
    async_save({f"part{rank}": torch.full((1000,), float(step))}, checkpoint_id=f"{directory}/{step}")
if "destroys" in sys.argv:
    dist.destroy_process_group()
print("the script has ended")
"""


@pytest.mark.parametrize("how", ["", "destroys"])
def test_a_pending_save_at_script_end_finishes_or_fails_the_script(tmp_path, how):
    command = [sys.executable, "-c", _SAVES_AND_ENDS]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "at"), str(tmp_path / "store"), how], stderr=-1, stdout=-1, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=150) for process in processes]
    assert all(out == "the script has ended\n" for out, _ in outputs), outputs
    if how == "destroys":
        assert [process.returncode for process in processes] == [1, 1], outputs
        assert all("at/1 was never finalized, so it will not load" in err for _, err in outputs), outputs
        return
    assert [process.returncode for process in processes] == [0, 0], outputs
    for step in range(2):
        found = {"part0": torch.zeros(1000), "part1": torch.zeros(1000)}
        load(found, checkpoint_id=tmp_path / "at" / str(step))
        assert all((part == step).all() for part in found.values())


def test_incomplete_checkpoints_are_rejected(tmp_path):
    states = {"x": torch.ones(1000)}
    with pytest.raises(FileNotFoundError, match="does not exist; its parent directory contains: nothing"):
        load(states, checkpoint_id=tmp_path / "none")
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray" / "notes").write_text("")
    with pytest.raises(FileNotFoundError, match=r"has no \.metadata"):
        load(states, checkpoint_id=tmp_path / "stray")
    save(states, checkpoint_id=tmp_path / "cut")
    (data,) = (tmp_path / "cut").glob("__0_*")
    os.truncate(data, 100)
    with pytest.raises(FileNotFoundError, match=r"damaged: __0_\w+ has 100 bytes of \d+ \(written by rank 0\)|damaged"):
        load(states, checkpoint_id=tmp_path / "cut")
    data.unlink()
    with pytest.raises(FileNotFoundError, match=r"is missing \(written by rank 0\)"):
        load(states, checkpoint_id=tmp_path / "cut")


def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path):
    def full(writer):
        raise OSError(28, "No space left on device")

    save({"x": torch.ones(2)}, checkpoint_id=tmp_path)
    queue = AsyncCallsQueue()
    writer = DistributedFileSystemWriter(tmp_path, post_write_hooks=[full])
    async_save({"x": torch.zeros(2)}, storage_writer=writer, queue=queue)
    async_save({"x": torch.zeros(2)}, checkpoint_id=tmp_path / "other", queue=queue)
    with pytest.raises(RuntimeError, match="No space left"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1], "the queue keeps the saves after the failed save"
    found = {"x": torch.full((2,), 7.0)}
    load(found, checkpoint_id=tmp_path)
    assert found["x"].tolist() == [1.0, 1.0]


def test_async_save_keeps_the_values_of_its_call(tmp_path):
    values, number = torch.ones(3), [1]
    queue = AsyncCallsQueue()
    async_save({"x": values, "n": number}, checkpoint_id=tmp_path, queue=queue)
    values.zero_()
    number.append(2)
    queue.maybe_finalize_async_calls(blocking=True)
    found = {"x": torch.zeros(3), "n": None}
    load(found, checkpoint_id=tmp_path)
    assert found["x"].sum() == 3 and found["n"] == [1]


def test_plain_torch_reads_our_checkpoints_and_we_read_its(tmp_path):
    import torch.distributed.checkpoint as dcp

    found = {"x": torch.zeros(3)}
    save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "ours")
    dcp.load(found, checkpoint_id=tmp_path / "ours")
    assert found["x"].sum() == 3
    dcp.save({"x": torch.full((3,), 2.0)}, checkpoint_id=tmp_path / "torchs")
    load(found, checkpoint_id=tmp_path / "torchs")
    assert found["x"].sum() == 6
    save({"x": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "writer"))
    load(found, storage_reader=dcp.FileSystemReader(tmp_path / "writer"))
    assert found["x"].sum() == 3


# ---- local state dicts, optimizer state ----


def test_a_local_state_dict_is_the_model(tmp_path):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.9)
    before = model.weight.detach().clone()
    init_optim_state(optimizer)
    assert torch.equal(model.weight, before) and optimizer.param_groups[0]["lr"] == 0.5
    assert len(optimizer.state) == 2 and model.weight.grad is None
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        local = model.state_dict()
        assert local["weight"].data_ptr() == model.weight.data_ptr()
    assert "state_dict" not in vars(model)
    save({"model": local, "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    with sm_state_dict_type(other, SMStateDictType.SM_LOCAL_STATE_DICT):
        load({"model": other.state_dict()}, checkpoint_id=tmp_path)
        assert torch.equal(other.weight, model.weight)
        other.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
        assert other.weight.sum() == 0
        with pytest.raises(ValueError, match="missing"):
            other.load_state_dict({"weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="call init_optim_state first"):
        fresh = torch.optim.AdamW(other.parameters())
        save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "plain")
        load({"optimizer": fresh.state_dict()}, checkpoint_id=tmp_path / "plain")
    with pytest.raises(TypeError, match="SM_LOCAL_STATE_DICT"), sm_state_dict_type(model, "local"):
        pass
    model(torch.ones(2)).sum().backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        init_optim_state(torch.optim.AdamW(model.parameters()))


def test_the_older_names_still_work(tmp_path):
    import torch.sagemaker.distributed.fsdp.checkpoint as older

    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.warns(DeprecationWarning, match=r"state_dict_saver\.save"):
        older.save_model_checkpoint(model, tmp_path, extra={"step": 4})
    with pytest.warns(DeprecationWarning):
        assert older.load_model_checkpoint(other, tmp_path, extra={}) == {"step": 4}
    assert torch.equal(model.weight, other.weight)
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="unknown arguments tag"):
        older.save_model_checkpoint(model, tmp_path, tag="x")


def test_every_name_that_scripts_import_is_there():
    import torch.sagemaker.distributed.checkpoint.async_utils as async_utils
    import torch.sagemaker.distributed.checkpoint.state_dict_saver as saver

    assert saver.DEFAULT_ASYNC_REQUEST_QUEUE is async_utils.DEFAULT_ASYNC_REQUEST_QUEUE
    assert issubclass(saver.PyTorchDistSaveShardedStrategy, PyTorchDistSaveShardedStrategy)
    assert saver.maybe_finalize_async_calls(blocking=True) == []
    from torch.sagemaker.distributed.checkpoint.filesystem import path_to_file_system

    assert path_to_file_system("/tmp").exists("/")


def test_the_optimizers_loader_takes_process_group_until_the_patch_is_undone():
    import torch.distributed.checkpoint.optimizer as torch_optimizer
    from smddp.sagemaker import torch_patches

    bound = torch_optimizer.load_sharded_optimizer_state_dict
    torch_patches.undo_all()
    try:
        with pytest.raises(TypeError, match="process_group"):
            bound({}, "optimizer", None, process_group=None)
    finally:
        torch_patches.apply_import()
    with pytest.raises(AttributeError, match="read_metadata"):
        bound({}, "optimizer", None, process_group=None)


def test_full_state_dict_configs_take_translate_on_save_while_patched():
    from smddp.sagemaker import torch_patches
    from torch.distributed.fsdp import FullStateDictConfig

    undo = next(patch for patch in torch_patches.PATCHES if patch.name == "translate_on_save").apply()
    try:
        assert FullStateDictConfig(True, translate_on_save=False).translate_on_save is False
        with pytest.raises(TypeError, match="translate_on_save must be a bool"):
            FullStateDictConfig(translate_on_save=1)
    finally:
        undo()
    with pytest.raises(TypeError, match="translate_on_save"):
        FullStateDictConfig(translate_on_save=True)


# ---- safetensors ----


def test_safetensors_files_are_what_safetensors_reads(tmp_path):
    from safetensors.torch import load_file

    tensors = {
        "a": torch.arange(6, dtype=torch.uint8).view(2, 3),
        "b": torch.randn(3, 4).bfloat16(),
        "none": torch.empty(0, 4),
        "one": torch.tensor(5.0),
    }
    entries = sorted((Entry(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()), key=lambda e: -e.dtype.itemsize)
    writer = FileWriter(tmp_path / "model.safetensors", entries)
    for entry in entries:
        writer.write(tensors[entry.name])
    assert not (tmp_path / "model.safetensors").exists()
    writer.close()
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys() and all(torch.equal(read[n], t) for n, t in tensors.items())
    back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(back, storage_reader=SafetensorsReader(tmp_path))
    assert all(torch.equal(back[n], t) for n, t in tensors.items())
    with pytest.raises(TypeError, match="complex64"):
        FileWriter(tmp_path / "x", [Entry("c", torch.complex64, (1,))])


def test_sizes_are_bytes_or_text():
    assert [parse_size(s) for s in (7, "5GB", "1.5 MiB", "20kb")] == [7, 5 * 10**9, 1572864, 20000]
    for wrong, kind in (("5 gallons", ValueError), (0, ValueError), (1.5, TypeError)):
        with pytest.raises(kind):
            parse_size(wrong)


# ---- S3 ----


def test_s3_names():
    assert s3.is_s3_uri("s3://bucket/key") and not s3.is_s3_uri("/s3/bucket") and not s3.is_s3_uri(None)
    assert s3.parse_s3_uri("s3://my-bucket/a/b") == ("my-bucket", "a/b")
    # pathlib takes a slash away.
    assert s3.format_s3_path("s3:/my-bucket/a") == "s3://my-bucket/a"
    for wrong in ("/tmp/x", "s3://", "s3://Bucket/x"):
        with pytest.raises(ValueError):
            s3.parse_s3_uri(wrong)


def test_s3_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "boto3", None)
    for attempt in (
        lambda: save({"x": torch.ones(1)}, checkpoint_id="s3://bucket/key"),
        lambda: load({"x": torch.ones(1)}, checkpoint_id="s3://bucket/key"),
        lambda: DistributedFileSystemReader("s3://bucket/key"),
    ):
        with pytest.raises(ImportError, match="pip install s3fs"):
            attempt()
    with pytest.raises(ImportError, match="pip install boto3"):
        s3.get_s3_region_from_uri("s3://bucket/key")


def test_s3_checkpoints_over_a_store_of_objects(monkeypatch, tmp_path):
    """fsspec's local file system stands for the bucket: `s3://` names on one side, whole objects on the other."""
    from fsspec.implementations.local import LocalFileSystem

    class Bucket(LocalFileSystem):
        @classmethod
        def _strip_protocol(cls, path):
            return str(path).replace("s3://bucket", str(tmp_path))

    store = Bucket(auto_mkdir=True, skip_instance_cache=True)
    monkeypatch.setattr(s3, "_open_s3", lambda region, client: store)
    save({"x": torch.ones(3)}, checkpoint_id="s3://bucket/run/step1")
    save({"x": torch.full((3,), 2.0)}, checkpoint_id="s3://bucket/run/step1")
    found = {"x": torch.zeros(3)}
    load(found, checkpoint_id="s3://bucket/run/step1")
    assert found["x"].sum() == 6
    assert len(os.listdir(tmp_path / "run" / "step1")) == 2
    with pytest.raises(FileNotFoundError, match="its parent directory contains: step1"):
        load(found, checkpoint_id="s3://bucket/run/step2")


def test_retries_end(monkeypatch):
    waits, calls = [], []
    monkeypatch.setattr(s3.time, "sleep", waits.append)

    @s3.retry_with_jitter
    def fails():
        calls.append(1)
        raise OSError("throttled")

    with pytest.raises(OSError, match="throttled"):
        fails()
    assert len(calls) == 5 and len(waits) == 4

    @s3.retry_with_jitter(attempts=2, errors=KeyError)
    def other():
        calls.append(2)
        raise OSError("not worth another call")

    with pytest.raises(OSError):
        other()
    assert calls.count(2) == 1
