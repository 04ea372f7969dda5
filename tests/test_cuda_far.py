"""Rows, heads and batches so far apart that offsets pass 2^31 and 2^32 bytes, on the PTX machine, in memory of which only rows exist."""

import mmap
from functools import cache

import cuda_kit
import host_kit
import numpy as np
import pytest

from burstmpi.backends.base import Dims, Work
from burstmpi.checks import accumulator
from burstmpi.rules import Rules, Sight

pytestmark = pytest.mark.skipif(cuda_kit.REAL, reason="tens of gigabytes of which only some rows exist")

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


@cache
def mapping(nbytes, name):
    """Bytes whose pages appear when they are touched, more of them than the machine has."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(-1, nbytes, flags=flags)


def lazy(nbytes, name):
    """Such bytes, all 0 again."""
    pages = mapping(nbytes, name)
    pages.madvise(mmap.MADV_DONTNEED)
    return np.frombuffer(pages, np.uint8)


@pytest.fixture
def make(monkeypatch):
    """A backend on a device with 4 TB; an allocation above 64 MB is out of bounds but for the rows that ``Far`` lays into it."""
    cuda_kit.device()
    from ptxmachine import memory
    from ptxmachine.cupy import state

    class Sparse(memory.GlobalMemory):
        def __init__(self, capacity):
            super().__init__(1 << 16)
            self.capacity = capacity
            self.data, self.state, self.owner_bytes = lazy(capacity, "data"), lazy(capacity, "state"), lazy(2 * capacity, "owner")
            self.owner = self.owner_bytes.view(np.uint32)

        def alloc(self, size):
            if size < 64 * MB:
                return super().alloc(size)
            offset = self._find(size)
            self.sizes[offset] = size
            memory.bisect.insort(self.starts, offset)
            self.allocated += size
            return memory.GLOBAL_BASE + offset

        def free(self, address):
            offset = address - memory.GLOBAL_BASE
            if self.sizes[offset] < 64 * MB:
                return super().free(address)
            self.allocated -= self.sizes.pop(offset)
            self.starts.remove(offset)
            return None

        def span(self, address, size):
            if size < 64 * MB:
                return super().span(address, size)
            offset = address - memory.GLOBAL_BASE
            return self.data[offset : offset + size], self.state[offset : offset + size]

    monkeypatch.setattr(state, "GlobalMemory", Sparse)
    return lambda **how: cuda_kit.backend(memory=4 << 40, splits=1, **how)


def far(cupy, x, steps):
    """x on the device, (batch, rows, heads, columns), with these bytes between batches, rows and heads; only its rows are there."""
    from ptxmachine.memory import ALLOCATED, GLOBAL_BASE, WRITTEN

    strides = (*steps, x.itemsize)
    lowest = sum((n - 1) * step for n, step in zip(x.shape, steps) if step < 0)
    reach = sum((n - 1) * abs(step) for n, step in zip(x.shape, steps)) + x.shape[3] * x.itemsize
    whole = cupy.ndarray((reach,), np.uint8, cupy.cuda.alloc(reach))
    array = cupy.ndarray(x.shape, x.dtype, whole.data + -lowest, strides)
    memory = cupy.simulation().machine.memory
    fresh = np.isnan(x.astype(np.float32)).all()  # a result: rows that nobody has written
    for index in np.ndindex(x.shape[:3]):
        at = array.data.ptr - GLOBAL_BASE + sum(i * step for i, step in zip(index, steps))
        size = x.shape[3] * x.itemsize
        memory.state[at : at + size] = ALLOCATED if fresh else ALLOCATED | WRITTEN
        memory.data[at : at + size] = np.frombuffer(x[index].tobytes(), np.uint8)
    return array


# bytes between batches, rows, heads; reversed views have negative ones
STEPS = {
    "rows 2 MB": (9 * GB, 2 * MB - 512, 256),
    "rows 31 MB": (9 * GB, 31 * MB, 512),
    "rows 48 MB": (17 * GB, 48 * MB, 1 * MB),
    "heads 5 GB": (20 * GB, 1 * KB, 5 * GB),
    "rows -48 MB": (17 * GB, -48 * MB, 256),
    "rows -5 GB": (3 * KB, -5 * GB, 512),
}


def attention(make, dtype, d, rows_q, rows_k, steps, deterministic, causal=True):
    """Forward of two hops and backward with every array far apart, held against the oracle."""
    options = {"causal": True} if causal else {}
    backend = make(deterministic=deterministic)
    cupy = backend._cupy
    q, k, v, dout = host_kit.arrays(np.random.default_rng(1), 2, rows_q, rows_k, 2, 1, d, d, dtype)
    acc, rules = accumulator(q.dtype), Rules(**options)
    put = lambda x: far(cupy, x, steps)  # noqa: E731
    nothing = lambda shape, kind: put(np.full(shape, np.nan, kind))  # noqa: E731
    dims = Dims(2, 2, 1, d, d, q.dtype, acc)
    scores = rules.scores(d)
    at, lo, hi = (cupy.asarray(np.ascontiguousarray(x)) for x in rules.intervals(np.arange(rows_q), rows_q, rows_k))
    halves = np.split(np.arange(rows_k), [rows_k // 2])
    scratch = backend.allocate(max(backend.scratch_bytes(dims, scores, rows_q, rows_k, way) for way in (False, True)))
    # the second half may be sorted: rows are then found through the keys' numbers
    works = [Work(Sight(at, lo, hi, cupy.asarray(rows.astype(np.int32)), i == 0), scores, scratch) for i, rows in enumerate(halves)]
    queries, grad, state, out = put(q), put(dout), nothing(q.shape, acc), nothing(q.shape, q.dtype)
    lse, delta, dq = cupy.empty((2, 2, rows_q), acc), cupy.empty((2, 2, rows_q), acc), nothing(q.shape, acc)
    keys, values = [put(k[:, rows]) for rows in halves], [put(v[:, rows]) for rows in halves]
    dk, dv = [nothing(x.shape, acc) for x in keys], [nothing(x.shape, acc) for x in values]
    for i, work in enumerate(works):
        final = out if i and q.dtype != acc else None
        backend.attend(queries, keys[i], values[i], state, lse, work, first=not i, final=final)
    if q.dtype == acc:
        backend.copy(out, state)
    backend.delta(grad, out, delta)
    for i, work in enumerate(works):
        backend.attend_backward(grad, queries, keys[i], values[i], lse, delta, dq, dk[i], dv[i], work, fresh_q=not i, fresh_kv=True)
    got = [cupy.asnumpy(x) for x in (out, lse, dq, *dk, *dv)]
    got = [*got[:3], np.concatenate(got[3:5], axis=1), np.concatenate(got[5:], axis=1)]
    true, same = host_kit.exact(dout, q, k, v, **options), host_kit.naive(dout, q, k, v, narrow=dtype == "bfloat16", **options)
    floors = (same[5][0], np.finfo(acc).eps, *same[5][1:])
    for name, mine, want, near, floor in zip(("out", "lse", "dq", "dk", "dv"), got, true, same, floors):
        kind = acc.name if name == "lse" else dtype
        host_kit.check(name, mine, want, near, kind, 2.0, host_kit.rms(true[1]), floor)


FEW = [("rows 31 MB", "bfloat16", False), ("rows 48 MB", "bfloat16", True), ("rows 48 MB", "float32", False), ("heads 5 GB", "bfloat16", False)]


def cases():
    for steps in STEPS:
        for dtype in ("bfloat16", "float32"):
            for deterministic in (False, True):
                marks = [] if (steps, dtype, deterministic) in FEW else [pytest.mark.slow]
                yield pytest.param(steps, dtype, deterministic, marks=marks)


@pytest.mark.parametrize("steps, dtype, deterministic", list(cases()))
def test_far_apart(make, steps, dtype, deterministic):
    """Tails and whole tiles; 150 rows of 31 MB reach beyond 2^32 bytes."""
    rows = (20, 130) if "GB" in steps else (140, 150) if dtype == "bfloat16" else (70, 90)
    attention(make, dtype, 64, *rows, STEPS[steps], deterministic)


def test_far_along_the_fast_way(make):
    """Rows just below 2 MB apart, which forward's main loop steps over with 32-bit distances, 2200 of them: beyond 2^32 bytes."""
    attention(make, "bfloat16", 64, 16, 2200, STEPS["rows 2 MB"], False, causal=False)
