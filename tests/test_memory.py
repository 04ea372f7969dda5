"""Memory: what workspace_bytes says is what is allocated, nothing large is allocated twice, nothing grows with N²."""

import tracemalloc

import numpy as np
import pytest
from support import TYPES

from burstmpi import BurstAttention
from burstmpi.buffers import ALIGN

pytestmark = pytest.mark.mpi


def held():
    """Bytes that NumPy arrays hold now, of those allocated since tracemalloc was started."""
    traces = tracemalloc.take_snapshot().traces
    return sum(trace.size for trace in traces if trace.domain == np.lib.tracemalloc_domain)


def taken(result):
    """Bytes that a result holds: it starts at a line of a buffer that is at most ALIGN bytes larger."""
    owner = result if result.base is None else result.base
    assert owner.base is None and result.nbytes <= owner.nbytes <= result.nbytes + ALIGN, (result.nbytes, owner.nbytes)
    return owner.nbytes


def tensors(rows, dtype, heads=4, kv_heads=2, d=32, dv=16):
    make = lambda *shape: np.ones(shape, TYPES[dtype])  # noqa: E731
    return make(1, rows, heads, d), make(1, rows, kv_heads, d), make(1, rows, kv_heads, dv), make(1, rows, heads, dv)


@pytest.mark.parametrize("backend", ["auto", "numpy"])
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0, "alibi_slopes": [1.0] * 4}], ids=["full", "rules"])
def test_workspace_bytes_is_exact(comm, dtype, backward, options, backend):
    rows = 96 + 16 * (comm.rank % 2)
    q, k, v, dout = tensors(rows, dtype)
    with BurstAttention(comm, layout="contiguous", backward=backward, backend=backend, **options) as attn:
        inference = attn.workspace_bytes(q.shape, k.shape, v.shape, dtype, backward=False)
        training = attn.workspace_bytes(q.shape, k.shape, v.shape, dtype)
        tracemalloc.start()
        try:
            out, lse = attn.forward(q, k, v)
            assert held() == inference + taken(out) + taken(lse)
            grads = attn.backward(dout, q, k, v, out, lse)
            assert held() == training + taken(out) + taken(lse) + sum(taken(g) for g in grads)
        finally:
            tracemalloc.stop()


@pytest.mark.mpi(ranks=(1, 3))
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_call_allocates_nothing_large(comm, dtype, backward):
    rows = 1500
    q, k, v, dout = tensors(rows, dtype)
    with BurstAttention(comm, layout="contiguous", backward=backward, causal=True) as attn:
        out, lse = attn.forward(q, k, v)
        dq, dk, dv = attn.backward(dout, q, k, v, out, lse)
        tracemalloc.start()
        try:
            attn.forward(q, k, v, out=out, lse=lse)
            attn.backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # A few vectors over rows of index arithmetic and the rows of a tile; the workspace alone has more than 5 MiB.
    assert peak < 2**20, peak


def peak_of(comm, rows):
    """Peak bytes of one rank over forward and backward, results and workspace included."""
    q, k, v, dout = tensors(rows, "float32")
    tracemalloc.start()
    try:
        with BurstAttention(comm, layout="contiguous") as attn:
            out, lse = attn.forward(q, k, v)
            attn.backward(dout, q, k, v, out, lse)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.mpi(ranks=7)
def test_peak_does_not_grow_with_the_number_of_ranks(comm):
    """Two ranks and seven ranks, the same rows on each."""
    few = comm.Split(comm.rank // 2)  # 2 + 2 + 2 + 1
    small = peak_of(few, 512) if few.size == 2 else None
    few.Free()
    large = peak_of(comm, 512)
    if small is not None:
        assert large < small + 64 * 1024, (small, large)


@pytest.mark.mpi(ranks=2)
def test_peak_is_linear_in_the_rows(comm):
    peaks = {rows: peak_of(comm, rows) for rows in (512, 1024, 2048)}
    # Twice the rows, at most twice the bytes; an array of scores would make them four times as many.
    assert peaks[1024] < 2.05 * peaks[512] and peaks[2048] < 2.05 * peaks[1024], peaks
