"""One rank: `job.py CASE`. Without torch, whose import fails here."""

import sys

if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]

import array
import ctypes
import mmap
import os
import signal
import time

import numpy as np
import smddp

DTYPES = [
    *("float32", "float64", "float16", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128"),
]
OPS = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def defined(dtype: str, op: str) -> bool:
    kind = np.dtype(dtype).kind
    if op in ("band", "bor", "bxor"):
        return kind in "iub"
    if op in ("min", "max"):
        return kind != "c"
    return op != "avg" or kind != "b"


def values(dtype: str, count: int, rank: int) -> np.ndarray:
    """Small whole numbers: exact in every sum and product here."""
    numbers = (np.arange(count) * 3 + rank * 5) % 7 % 3
    return numbers.astype(dtype)


def reduced(dtype: str, count: int, size: int, op: str) -> np.ndarray:
    kinds = {"b": np.logical_or} if op in ("sum", "max", "bor") else {"b": np.logical_and}
    function = OPS[op]
    if dtype == "bool" and op != "bxor":
        function = kinds["b"]
    total = values(dtype, count, 0)
    for rank in range(1, size):
        total = function(total, values(dtype, count, rank), dtype=None).astype(dtype)
    if op == "avg":
        total = total / size if np.dtype(dtype).kind in "fc" else np.trunc(total / size)
    return total.astype(dtype)


def matrix(comm: smddp.Communicator) -> None:
    """Every element type with every reduction that it has, of several sizes; any other is an error on all ranks."""
    checked = 0
    for dtype in DTYPES:
        for op in OPS:
            for count in (0, 1, 5, 1000, 40_001):
                mine = values(dtype, count, comm.rank)
                if not defined(dtype, op):
                    refused(ValueError, "not defined", lambda mine=mine, op=op: comm.all_reduce(mine, op))
                    continue
                want = reduced(dtype, count, comm.size, op)
                kept = mine.copy()
                out = np.empty_like(mine)
                assert comm.all_reduce(mine, op, out=out) is out
                close(out, want, (dtype, op, count))
                assert (mine == kept).all()
                assert comm.all_reduce(mine, op) is mine
                close(mine, want, (dtype, op, count, "in place"))
                checked += 2
    doubled = comm.all_reduce(np.full(9, comm.rank, "float32"), ("premul_sum", 2.0))
    assert (doubled == comm.size * (comm.size - 1)).all()
    say(f"{checked} checked")


def close(found: np.ndarray, want: np.ndarray, what: object) -> None:
    if found.dtype.kind in "fc":
        right = np.allclose(found, want, rtol=1e-3 if found.dtype == np.float16 else 1e-6)
    else:
        right = bool((found == want).all())
    assert right, (what, found[:8], want[:8])


def collectives(comm: smddp.Communicator) -> None:
    """Every collective: results, shapes, roots, blocks that differ."""
    me, size = comm.rank, comm.size
    for shape in [(6,), (4, 3), (2, 0), ()]:
        mine = np.full(shape, me, "int32")
        all_of = np.stack([np.full(shape, rank, "int32") for rank in range(size)])
        for found in (comm.all_gather(mine), comm.all_gather(mine, out=np.empty_like(all_of))):
            assert found.shape == all_of.shape and (found == all_of).all()
        for root in range(size):
            found = comm.gather(mine, root)
            assert found is None if me != root else (found == all_of).all() and found.shape == all_of.shape
            there = np.empty(shape, "int32")
            assert comm.scatter(all_of if me == root else None, there, root) is there and (there == me).all()
            word = np.full(shape, me, "int32")
            assert comm.broadcast(word, root) is word and (word == root).all()
            total = comm.reduce(mine.copy(), "max", root)
            assert (total is None) == (me != root) and (me != root or (total == size - 1).all())
    blocks = np.arange(size * 4, dtype="int64").reshape(size * 2, 2) + me
    part = comm.reduce_scatter(blocks)
    assert part.shape == (2, 2)
    assert (part == size * np.arange(me * 4, me * 4 + 4).reshape(2, 2) + size * (size - 1) // 2).all()
    sent = np.array([[me, to] for to in range(size)], "uint16")
    assert (comm.all_to_all(sent) == [[by, me] for by in range(size)]).all()
    counts = [rank + 1 for rank in range(size)]
    found = comm.all_gather(np.full(me + 1, me, "float64"), counts=counts)
    assert (found == np.repeat(range(size), counts)).all()
    part = comm.reduce_scatter(np.ones(sum(counts), "float32"), counts=counts)
    assert part.shape == (me + 1,) and (part == size).all()
    # To rank r r + 1 elements, from every rank as many as mine.
    found = comm.all_to_all(np.repeat(np.arange(size, dtype="int8"), counts), counts=(counts, [me + 1] * size))
    assert (found == me).all() and found.shape == (size * (me + 1),)
    assert comm.barrier() is None


def buffers(comm: smddp.Communicator) -> None:
    """Objects with the buffer protocol or DLPack are valid arguments."""
    size = comm.size
    numbers = array.array("d", [1.5, 2.5])
    assert comm.all_reduce(numbers) is numbers and list(numbers) == [1.5 * size, 2.5 * size]
    for code in "bBhHiIlLqQf":
        numbers = array.array(code, [comm.rank])
        assert comm.all_reduce(numbers, "max")[0] == size - 1, code
    data = bytearray(b"abc" if comm.rank == 0 else 3)
    assert comm.broadcast(data) == b"abc"
    view = memoryview(bytearray(8)).cast("i")
    view[1] = 1
    comm.all_reduce(view)
    assert view.tolist() == [0, size]
    fields = (ctypes.c_int16 * 3)(1, 2, 3)
    comm.all_reduce(fields)
    assert list(fields) == [size, 2 * size, 3 * size]
    shared = mmap.mmap(-1, 4096)
    shared[:2] = b"\1\2"
    comm.all_reduce(shared)
    assert shared[:2] == bytes([size, 2 * size])
    gathered = bytearray(2 * size)
    comm.all_gather(bytes([comm.rank, 7]), out=gathered)
    assert gathered == b"".join(bytes([rank, 7]) for rank in range(size))
    tensor = Tensor(np.arange(5, dtype="float32"))
    out = Tensor(np.empty(5, "float32"))
    comm.all_reduce(tensor, out=out)
    assert (out.array == size * np.arange(5)).all() and (tensor.array == np.arange(5)).all()
    comm.all_reduce(out, async_op=True).wait()
    assert (out.array == size * size * np.arange(5)).all()
    special = np.arange(4, dtype="float32").view(type("Special", (np.ndarray,), {}))
    assert (comm.all_reduce(special) == size * np.arange(4)).all()


class Tensor:
    """Nothing but DLPack, as frameworks give it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **how: object) -> object:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> object:
        return self.array.__dlpack_device__()


def asynchronous(comm: smddp.Communicator) -> None:
    """Many pending calls keep their arrays alive after the caller drops them."""
    size = comm.size
    outs = [np.empty(50_000, "float32") for _ in range(12)]
    works = [comm.all_reduce(np.full(50_000, n, "float32"), out=out, async_op=True) for n, out in enumerate(outs)]
    gathered = np.empty((size, 3), "int64")
    works.append(comm.all_gather(np.full(3, comm.rank), out=gathered, async_op=True))
    works.append(comm.barrier(async_op=True))
    for work in works:
        work.wait(30)
        assert work.is_done() and work.error() is None
    assert all((out == number * size).all() for number, out in enumerate(outs))
    assert (gathered == [[rank] * 3 for rank in range(size)]).all()
    refused(TypeError, "needs out=", lambda: comm.all_gather(np.ones(3), async_op=True))


def messages(comm: smddp.Communicator) -> None:
    me, size = comm.rank, comm.size
    if size == 1:
        refused(ValueError, "to or receive from itself", lambda: comm.send(np.ones(1), 0))
        return
    right, left = (me + 1) % size, (me - 1) % size
    for count in (0, 3, 100_000):
        got = np.empty(count, "float32")
        work = comm.recv(got, left, tag=count, async_op=True)
        assert comm.send(np.full(count, me, "float32"), right, tag=count) is None
        work.wait()
        assert work.source() == left and (got == left).all()
    if me == 0:
        box = np.empty(2, "int32")
        works = [comm.recv(np.empty(2, "int32"), tag=9, async_op=True) for _ in range(size - 1)]
        for work in works:
            work.wait()
        assert sorted(work.source() for work in works) == list(range(1, size))
        assert comm.recv(box, 1, tag=10) is box
        assert (box == 1).all()
    else:
        comm.send(np.full(2, me, "int32"), 0, tag=9)
        if me == 1:
            comm.send(np.full(2, 1, "int32"), 0, tag=10)
    assert comm.sent[right][0] >= 3
    assert any(entry["collective"] == "send" and entry["bytes"] for entry in smddp.traffic())


def splits(comm: smddp.Communicator) -> None:
    me, size = comm.rank, comm.size
    half = comm.split(me % 2, key=-me)
    members = [rank for rank in reversed(range(size)) if rank % 2 == me % 2]
    assert (half.size, members[half.rank]) == (len(members), me)
    assert (half.all_gather(np.array([me])).ravel() == members).all()
    assert comm.split(None if me else 5) is None or me == 0
    alone = half.split(half.rank)
    assert alone.size == 1 and (alone.all_reduce(np.ones(3)) == 1).all()
    assert half.local_size == len(members) and 0 <= half.local_rank < half.local_size
    assert {group["name"] for group in smddp.info()["groups"]} >= {"world", half.name, alone.name}
    alone.close()
    half.close()
    half.close()
    assert half.name not in {group["name"] for group in smddp.info()["groups"]}
    assert comm.broadcast_object({"root": me}, size - 1) == {"root": size - 1}
    assert comm.all_gather_object("x" * me) == ["x" * rank for rank in range(size)]
    try:
        comm.all_gather_object(comm)
        raise AssertionError("a group was pickled")
    except TypeError as error:
        assert "belongs to its process" in str(error)


def refused(kind: type[Exception], text: str, call) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {text}")


def arguments(comm: smddp.Communicator) -> None:
    """Bad input is an error before anything moves, on every rank, and the group goes on."""
    size = comm.size
    ones = np.ones(4 * size, "float32")
    fixed = ones.copy()
    fixed.flags.writeable = False
    matrix = np.ones((4, 6))
    cases = [
        (TypeError, "is a list", lambda: comm.all_reduce([1.0])),
        (TypeError, "is a float", lambda: comm.all_reduce(1.0)),
        (ValueError, "not contiguous", lambda: comm.all_reduce(matrix.T)),
        (ValueError, "not contiguous", lambda: comm.all_reduce(memoryview(bytearray(8))[::2])),
        (ValueError, "read-only", lambda: comm.all_reduce(fixed)),
        (ValueError, "read-only", lambda: comm.all_reduce(b"abc")),
        (ValueError, "read-only", lambda: comm.all_reduce(ones, out=fixed)),
        (ValueError, "big-endian", lambda: comm.all_reduce(np.ones(3, ">f4"))),
        (TypeError, "datetime64", lambda: comm.all_reduce(np.zeros(3, "datetime64[s]"))),
        (TypeError, "object", lambda: comm.all_reduce(np.array([None, 1]))),
        (TypeError, "float32, out has float64", lambda: comm.all_reduce(ones, out=np.ones(4 * size))),
        (ValueError, f"{4 * size} elements", lambda: comm.all_reduce(ones, out=np.ones(3, "float32"))),
        (ValueError, "invalid reduction 'median'", lambda: comm.all_reduce(ones, "median")),
        (ValueError, "sum, avg, min", lambda: comm.all_reduce(ones, ("sum", 2.0))),
        (ValueError, "not defined", lambda: comm.all_reduce(ones, "bxor")),
        (ValueError, f"root {size}", lambda: comm.broadcast(ones, size)),
        (ValueError, "root -1 is negative", lambda: comm.broadcast(ones, -1)),
        (ValueError, "a count of -1 is negative", lambda: comm.all_gather(ones, counts=[-1] * size)),
        (ValueError, "dst -1 is negative", lambda: comm.send(ones, -1)),
        (ValueError, "src -2 is negative", lambda: comm.recv(ones, -2)),
        (ValueError, "tag -3 is negative", lambda: comm.recv(ones, 0, tag=-3)),
        (ValueError, "all_reduce: timeout must be", lambda: comm.all_reduce(ones, timeout=0)),
        (ValueError, "barrier: timeout must be", lambda: comm.barrier(timeout=float("nan"))),
        (ValueError, "recv: timeout must be", lambda: comm.recv(ones, 0, timeout=-1.0)),
        (TypeError, "MaskedArray", lambda: comm.all_reduce(np.ma.masked_equal(ones.copy(), 2))),
        (ValueError, "counts", lambda: comm.all_gather(ones, out=ones.copy(), counts=[1] * (size + 1))),
        (ValueError, f"divisible into {size}", lambda: comm.reduce_scatter(np.ones(size + 1)) if size > 1 else cut()),
        (ValueError, "timeout must be", lambda: comm.set_timeout(0)),
        (ValueError, "unknown collective 'allreduce'", lambda: comm.path("allreduce", 8)),
        (TypeError, "unexpected keyword", lambda: comm.all_reduce(ones, asynchronous=True)),
        (ValueError, "rank", lambda: comm.send(ones, size + 3)),
    ]
    for kind, text, call in cases:
        refused(kind, text, call)
        assert (comm.all_reduce(np.ones(2)) == size).all()
    assert (ones == 1).all()


def cut() -> None:
    raise ValueError("divisible into 1: one rank has all elements")


def deadline(comm: smddp.Communicator) -> None:
    """All waiting ranks report the missing rank."""
    comm.barrier()
    if comm.rank == 1:
        time.sleep(2)
        os._exit(0)
    begun = time.monotonic()
    try:
        comm.all_reduce(np.ones(3), timeout=0.5)
    except smddp.CollectiveTimeoutError as error:
        assert error.ranks == [1] and "all_reduce" in str(error), error
    else:
        raise AssertionError("no error for the missing rank")
    assert time.monotonic() - begun < 1.5
    os._exit(0)


def mismatch(comm: smddp.Communicator) -> None:
    """Different calls: both are named."""
    comm.barrier()
    try:
        if comm.rank == 0:
            comm.all_reduce(np.ones(3, "float32"), timeout=10)
        else:
            comm.all_gather(np.ones(3, "float32"), timeout=10)
    except smddp.MismatchError as error:
        assert "all_reduce" in str(error) and "all_gather" in str(error), error
    else:
        raise AssertionError("no error for the departed rank")
    os._exit(0)


def killed(comm: smddp.Communicator) -> None:
    """A rank that dies is named within a second, in blocking and other calls."""
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        if comm.rank == 0:
            comm.all_reduce(np.ones(3, "float32"))
        else:
            comm.all_reduce(np.ones(3, "float32"), async_op=True).wait()
    except smddp.PeerLostError as error:
        assert error.ranks == [1], error
    else:
        raise AssertionError("no error for the missing rank")
    assert time.monotonic() - begun < 1
    assert isinstance(comm.error, smddp.PeerLostError)
    os._exit(0)


def aborted(comm: smddp.Communicator) -> None:
    comm.barrier()
    if comm.rank == 0:
        comm.abort("enough")
    try:
        comm.all_reduce(np.ones(3))
        raise AssertionError("the group lives")
    except smddp.ClosedError as error:
        assert "enough" in str(error), error
    except smddp.Error:
        assert comm.rank != 0
    os._exit(0)


def failing(comm: smddp.Communicator) -> None:
    """The failing rank raises its own error out of `with`; the others report that it left."""
    try:
        with comm:
            if comm.rank == 0:
                raise KeyError("mine")
            comm.all_reduce(np.ones(3))
    except KeyError:
        assert comm.rank == 0
    except smddp.PeerLostError as error:
        assert error.ranks == [0]
    os._exit(0)


class Alarm(Exception):
    pass


def interrupted(comm: smddp.Communicator) -> None:
    """A signal's handler runs while a call waits, and may raise: the call continues and keeps its array alive."""

    def ring(*_: object) -> None:
        raise Alarm

    for count in (2, 100_000):
        comm.barrier()
        array = np.full(count, 1 + comm.rank, "float32")
        if comm.rank == 0 and comm.size > 1:
            before = signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            begun = time.monotonic()
            try:
                comm.all_reduce(array)
                raise AssertionError("the call is over")
            except Alarm:
                assert time.monotonic() - begun < 5
            signal.signal(signal.SIGALRM, before)
            del array
            comm.send(np.ones(1), 1, tag=77)
        else:
            if comm.rank == 1:
                comm.recv(np.empty(1), 0, tag=77)
            comm.all_reduce(array)
            assert (array == comm.size * (comm.size + 1) / 2).all()
        assert (comm.all_reduce(np.ones(3)) == comm.size).all()


def again(comm: smddp.Communicator) -> None:
    """The same ranks meet again, with the first group open, closed, and with a group cut out of another."""
    for number in range(3):
        other = smddp.init(timeout=60)
        assert (other.all_reduce(np.ones(2)) == comm.size).all()
        assert other.name != comm.name
        if number % 2:
            other.close()


def said(comm: smddp.Communicator) -> None:
    say(f"{comm!r} local {comm.local_rank} of {comm.local_size}")
    assert comm.path("all_reduce", 8)
    comm.all_reduce(np.ones(2))
    assert "all_reduce" in smddp.paths()


def say(text: str) -> None:
    print(text, flush=True)


TOGETHER = [said, collectives, buffers, asynchronous, messages, splits, arguments, interrupted, again, matrix]
ALONE = [deadline, mismatch, killed, aborted, failing]

if __name__ == "__main__":
    case = sys.argv[1]
    with smddp.init(timeout=60) as world:
        for one in TOGETHER if case == "together" else [{f.__name__: f for f in TOGETHER + ALONE}[case]]:
            one(world)
            say(f"{one.__name__}: well")
