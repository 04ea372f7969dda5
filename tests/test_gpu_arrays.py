"""Arrays of GPUs: whose they are, what is refused, in which stream results are ready, shard and gather."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_kit import REAL, attention, check, gpu, put, run, simulation
from support import collect, problem, shards, truth

import burstmpi
from burstmpi import BurstAttention, arrays

pytestmark = pytest.mark.mpi(ranks=(1, 2, 3, 4))


def small(dtype="float32", length=16, **shape):
    return problem(length, batch=1, heads=2, kv_heads=1, d=8, dv=8, dtype=dtype, **shape)


class Foreign:
    """An array of another library, by __cuda_array_interface__ alone."""

    def __init__(self, array):
        self.array = array  # its owner

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


class Exported(Foreign):
    """One that speaks DLPack by a capsule of CuPy's own; test_gpu_foreign.py makes capsules for the stand-in."""

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("kind", [Foreign, *[Exported] * REAL])
def test_arrays_of_other_libraries_are_taken_without_a_copy(comm, kind, monkeypatch):
    cupy = gpu()
    p = small()
    with attention(comm, quick=True, causal=True) as attn:
        q, k, v, dout = put(cupy, *shards(attn, p))
        seen = {}
        real = arrays.adopt
        monkeypatch.setattr(arrays, "adopt", lambda name, x, *more: seen.setdefault(name, real(name, x, *more)))
        out, lse = attn.forward(kind(q), kind(k), kind(v))
        assert isinstance(out, cupy.ndarray) and seen["q"].data.ptr == q.data.ptr and seen["v"].data.ptr == v.data.ptr
        grads = attn.backward(kind(dout), kind(q), k, v, kind(out), lse)
        got = collect(attn, *(cupy.asnumpy(x) for x in (out, lse, *grads)))
    check(got, truth(p, {"causal": True}))


def test_callers_buffers_and_views_of_a_fused_array(comm):
    cupy = gpu()
    p = problem(12, batch=1, heads=2, kv_heads=2, d=8, dv=8, dtype="float32")
    with attention(comm, quick=True, backward="kv") as attn:
        q, k, v, dout = shards(attn, p)
        (fused, dout) = put(cupy, np.stack([q, k, v], axis=2), dout)
        views = [fused[:, :, i] for i in range(3)]
        grads = cupy.empty(fused.shape, np.float32)  # views of one array that do not overlap, though their ends do
        out, lse = attn.forward(*views)
        got = attn.backward(dout, *views, out, lse, dq=grads[:, :, 0], dk=grads[:, :, 1], dv=grads[:, :, 2])
        assert all(g.data.ptr == grads[:, :, i].data.ptr for i, g in enumerate(got))
        check(collect(attn, *(cupy.asnumpy(x) for x in (out, lse, *got))), truth(p, {}))


def test_the_callers_stream(comm):
    """Inputs that are still being made are used in order, results are in order too: no synchronisation by the caller."""
    sim = simulation()
    cupy = gpu()
    p = small()
    with attention(comm, quick=True, causal=True) as attn:
        mine = shards(attn, p)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            inputs = [cupy.empty(x.shape, x.dtype) for x in mine]
            for x, y in zip(inputs, put(cupy, *mine)):
                x[...] = y
            q, k, v, dout = inputs
            out, lse = attn.forward(q, k, v)
            results = (out, lse, *attn.backward(dout, q, k, v, out, lse))
            copies = [x.copy() for x in results]
            got = collect(attn, *(cupy.asnumpy(x, stream=stream) for x in copies))
        sim = simulation()
        assert all(name != "default stream" for what, label, name in sim.trace if "kernel" in label)
    check(got, truth(p, {"causal": True}))


@pytest.mark.mpi(ranks=1)
def test_one_rank_does_not_wait_for_its_gpu(comm):
    """With nobody to send to, a call returns before a kernel has run."""
    simulation()
    cupy = gpu()
    p = small()
    with attention(comm, quick=True) as attn:
        q, k, v, _ = put(cupy, *shards(attn, p))
        cupy.cuda.Device().synchronize()
        attn.forward(q, k, v)
        sim = simulation()
        assert any(op.label == "kernel forward" for op in sim.live.values())


def refused(comm, deed, kind, text, **options):
    cupy = gpu(devices=2) if "GPU 1" in text else gpu()
    p = small()
    with attention(comm, quick=True, deadline=10, **options) as attn:
        q, k, v, dout = put(cupy, *shards(attn, p))
        with pytest.raises(kind, match=text):
            deed(attn, cupy, q, k, v)
        attn.forward(q, k, v)  # and the object works on


def other_device(cupy, x):
    values = cupy.asnumpy(x)
    with cupy.cuda.Device(1):
        return cupy.asarray(values)


CASES = {
    "NumPy among CuPy": (
        lambda attn, cupy, q, k, v: attn.forward(q, cupy.asnumpy(k), v),
        TypeError, "q, k: q is on GPU 0, k is a NumPy array",
    ),
    "a NumPy buffer": (
        lambda attn, cupy, q, k, v: attn.forward(q, k, v, out=np.empty(q.shape, np.float32)),
        TypeError, "q, out: q is on GPU 0, out is a NumPy array",
    ),
    "two devices": (
        lambda attn, cupy, q, k, v: attn.forward(q, k, other_device(cupy, v)),
        ValueError, "q, v: q is on GPU 0, v is on GPU 1",
    ),
    "a last axis with steps": (
        lambda attn, cupy, q, k, v: attn.forward(cupy.empty((*q.shape[:3], 16), q.dtype)[..., ::2], k, v),
        ValueError, r"q: the last axis must be contiguous on a GPU, got strides \(.*, 8\) of 4-byte elements",
    ),
    "rows that are not aligned": (
        lambda attn, cupy, q, k, v: attn.forward(cupy.empty((*q.shape[:3], 9), q.dtype)[..., :8], k, v),
        ValueError, r"q: rows must be aligned to 16 bytes on a GPU, got strides \(.*36, 4\)",
    ),
    "an address that is not aligned": (
        lambda attn, cupy, q, k, v: attn.forward(cupy.empty((*q.shape[:3], 12), q.dtype)[..., 1:9], k, v),
        ValueError, r"q: rows must be aligned to 16 bytes on a GPU, got strides .*, starting at address 0x",
    ),
    "a head dim of 6": (
        lambda attn, cupy, q, k, v: attn.forward(q, k, cupy.empty((*v.shape[:3], 6), v.dtype)),
        ValueError, "v: head_dim must be a multiple of 8 up to 256 on a GPU, got 6",
    ),
    "a head dim of 264": (
        lambda attn, cupy, q, k, v: attn.forward(
            *(cupy.empty((*x.shape[:3], 264), x.dtype) for x in (q, k)), v),
        ValueError, "q, k: head_dim must be a multiple of 8 up to 256 on a GPU, got 264",
    ),
    "another type": (
        lambda attn, cupy, q, k, v: attn.forward(q, k, v.astype(np.float64)),
        TypeError, "v: dtype must be float32, got float64",
    ),
    "a buffer that overlaps": (
        lambda attn, cupy, q, k, v: attn.forward(q, k, v, out=q),
        ValueError, "out: the buffer shares memory with q",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused(comm, name):
    if name == "two devices":
        simulation()
    refused(comm, *CASES[name])


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_kinds_are_named(comm):
    cupy = gpu()
    p = small()
    with attention(comm, quick=True, deadline=10) as attn:
        q, k, v, _ = shards(attn, p)
        mine = (q, k, v) if comm.rank == 0 else put(cupy, q, k, v)
        with pytest.raises(ValueError, match="arrays: must be the same on all ranks, got 'on the host' on rank 0, 'on a GPU' on rank"):
            attn.forward(*mine)
        attn.forward(q, k, v)
        attn.forward(*put(cupy, q, k, v))


def test_the_backend_option(comm):
    cupy = gpu()
    p = small()
    with attention(comm, quick=True, backend="cuda") as attn:
        q, k, v, _ = shards(attn, p)
        with pytest.raises(TypeError, match="q: must be on a GPU for backend='cuda', got a NumPy array"):
            attn.forward(q, k, v)
        attn.forward(*put(cupy, q, k, v))
        assert attn.stats.backend == "cuda"
    with attention(comm, quick=True, backend="numpy") as attn:
        with pytest.raises(TypeError, match="q: is on GPU 0, but backend='numpy' computes on the host"):
            attn.forward(*put(cupy, q, k, v))


def test_numpy_and_cupy_in_turn(comm):
    """One object serves both, call by call."""
    cupy = gpu()
    p = small()
    expected = truth(p, {"causal": True})
    with attention(comm, quick=True, causal=True) as attn:
        for _ in range(2):
            check(run(cupy, attn, p), expected)
            assert attn.stats.backend == "cuda" and attn.stats.transport in ("staged", "direct")
            q, k, v, dout = shards(attn, p)
            out, lse = attn.forward(q, k, v)
            assert attn.stats.backend == "host" and attn.stats.transport == "host"
            check(collect(attn, out, lse, *attn.backward(dout, q, k, v, out, lse)), expected)


def test_shard_and_gather(comm):
    cupy = gpu()
    whole = np.arange(2 * 23 * 3, dtype=np.float32).reshape(2, 23, 3)
    for layout in ("zigzag", "striped"):
        with attention(comm, layout=layout) as attn:
            (there,) = put(cupy, whole)
            mine = attn.shard(there)
            assert isinstance(mine, cupy.ndarray)
            np.testing.assert_array_equal(cupy.asnumpy(mine), whole[:, attn.positions(23)])
            back = attn.gather(mine)
            assert isinstance(back, cupy.ndarray) and (cupy.asnumpy(back) == whole).all()
            again = attn.shard(there if comm.rank == 0 else None, root=0)
            assert isinstance(again, cupy.ndarray) and (cupy.asnumpy(again) == cupy.asnumpy(mine)).all()
            assert (attn.gather(mine, root=0) is None) == (comm.rank > 0)


def test_no_usable_gpu(comm, monkeypatch):
    """CuPy's reason, in one line, on every rank."""
    def broken():
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version\nis insufficient for CUDA runtime version")

    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=broken, getDeviceCount=broken))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, ndarray=type("ndarray", (), {})))
    text = "cannot be used: cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version$"
    with pytest.raises(ValueError, match=f"backend: 'cuda' {text}"):
        BurstAttention(comm, backend="cuda")
    with pytest.raises(RuntimeError, match=f"GPU: {text}"):
        burstmpi.use_gpu()


def test_no_cupy(comm, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    x = SimpleNamespace(__cuda_array_interface__={})
    with BurstAttention(comm) as attn:
        with pytest.raises(TypeError, match="q: is on a GPU, and CuPy cannot be imported: import of cupy halted"):
            attn.forward(x, x, x)


@pytest.mark.mpi(ranks=1)
def test_import_needs_no_cupy(comm):
    code = "import sys, burstmpi, burstmpi.doctor; assert 'cupy' not in sys.modules"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
