"""A tensor-core attention forward, d 128, runs as it would on a GPU; all architectures; checks and orders agree."""

import ml_dtypes
import numpy as np
import pytest
from ptxmachine import cupy
from ptxsupport import source

SHARED = 4 * 64 * 128 * 2


def reference(q, k, v, scale):
    s = np.einsum("hqd,hkd->hqk", q, k) * scale
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return np.einsum("hqk,hkd->hqd", p / total, v), (top + np.log(total))[..., 0]


def naive(q, k, v, scale):
    """The same with P rounded to bf16 and sums in float32: the error that the format makes."""
    f = lambda x: x.astype(np.float32)
    s = np.einsum("hqd,hkd->hqk", f(q), f(k)) * np.float32(scale)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hqk,hkd->hqd", p.astype(ml_dtypes.bfloat16).astype(np.float32), f(v)) / p.sum(
        -1, keepdims=True
    )


def run(len_q, len_k, heads, arch="80", seed=0, **switches):
    """Return (error / error of the naive run, simulation) of out; lse is asserted."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((heads, n, 128)).astype(ml_dtypes.bfloat16) for n in (len_q, len_k, len_k))
    sim = cupy.reset(arch=arch, memory=1 << 26, **switches)
    kernel = cupy.RawModule(code=source("attention_mma.cu")).get_function("attention")
    kernel.max_dynamic_shared_size_bytes = SHARED
    out, lse = cupy.empty((heads, len_q, 128), np.float32), cupy.empty((heads, len_q), np.float32)
    scale = 128**-0.5
    kernel(
        (-(-len_q // 128), heads),
        (128,),
        (*(cupy.asarray(x) for x in (q, k, v)), out, lse, len_q, len_k, np.float32(scale)),
        shared_mem=SHARED,
    )
    exact, exact_lse = reference(*(x.astype(np.float64) for x in (q, k, v)), scale)
    got, got_lse = out.get(), lse.get()
    assert np.isfinite(got).all() and np.abs(got_lse - exact_lse).max() < 1e-5
    error, usual = np.abs(got - exact).max(), np.abs(naive(q, k, v, scale) - exact).max()
    return error / usual if usual else (0.0 if error == 0 else np.inf), sim


@pytest.mark.parametrize("len_q,len_k", [(1, 1), (7, 63), (64, 64), (65, 129), (128, 200)])
def test_shapes(len_q, len_k):
    assert run(len_q, len_k, 2)[0] < 1.5


@pytest.mark.parametrize("arch", ("80", "86", "90", "120"))
def test_architectures(arch):
    assert run(128, 100, 1, arch)[0] < 1.5


def test_checks_orders_and_landing_do_not_change_a_bit():
    results = []
    for switches in (
        {},
        {"check": False},
        {"order": "reverse"},
        {"cp_async": "early"},
        {"max_lanes": 128},
        {"count": True},
    ):
        rng = np.random.default_rng(1)
        q = rng.standard_normal((2, 150, 128)).astype(ml_dtypes.bfloat16)
        cupy.reset(arch="80", memory=1 << 26, **switches)
        kernel = cupy.RawModule(code=source("attention_mma.cu")).get_function("attention")
        kernel.max_dynamic_shared_size_bytes = SHARED
        x, out, lse = cupy.asarray(q), cupy.empty((2, 150, 128), np.float32), cupy.empty((2, 150), np.float32)
        kernel((2, 2), (128,), (x, x, x, out, lse, 150, 150, np.float32(0.09)), shared_mem=SHARED)
        results.append(out.get().tobytes() + lse.get().tobytes())
    assert len(set(results)) == 1


@pytest.mark.slow
def test_the_size_of_the_timing_line():
    assert run(1024, 1024, 4, check=False)[0] < 1.5
    assert run(1024, 1024, 4)[0] < 1.5
