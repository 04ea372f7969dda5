"""Forward of float16 and bfloat16 on tensor cores: on the PTX machine with all its checks, against float64.

How far a result may be off follows from a naive run of the same type (weights rounded to it, sums in float32).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cuda_kit
import host_kit
import numpy as np
import pytest
from support import rules, slopes

from burstmpi.backends import modules, tiles

HALVES = ("float16", "bfloat16")


def run(shape, dtype="bfloat16", *, arch="80", splits=None, gain=1.0, factor=2.0, seed=0, switches={}, change=None, **how):
    """Compute a case and hold it against float64; give what was computed.

    shape : batch, rows_q, rows_k, heads, kv_heads, d, dv
    change : of q, k, v before the run
    how : cuts, order_q, order_k, and rules
    """
    rng = np.random.default_rng(seed)
    q, k, v, dout = host_kit.arrays(rng, *shape, dtype, gain)
    if change:
        q, k, v = change(q, k, v)
    options = {name: value for name, value in how.items() if name not in ("cuts", "order_q", "order_k")}
    backend = cuda_kit.backend(arch, splits=splits, **switches)
    out, lse = cuda_kit.forward(backend, q, k, v, **how)
    true, same = host_kit.exact(dout, q, k, v, **options), host_kit.naive(dout, q, k, v, narrow=True, **options)
    host_kit.check("out", out, true[0], same[0], dtype, factor, host_kit.rms(true[1]), same[5][0])
    host_kit.check("lse", lse, true[1], same[1], "float32", factor, host_kit.rms(true[1]))
    return out, lse, true, same


# ---------------------------------------------------------------- shapes

SIZES = [(1, 1), (7, 1), (1, 130), (63, 65), (64, 64), (65, 63), (127, 129), (128, 192), (129, 7), (150, 449)]


@pytest.mark.parametrize("rows_q,rows_k", SIZES)
def test_uneven_tails(rows_q, rows_k):
    run((1, rows_q, rows_k, 2, 1, 64, 64))
    run((2, rows_q, rows_k, 1, 1, 64, 64), "float16", causal=True)


@pytest.mark.parametrize("rule", [name for name in rules(4, 4, 4) if name != "full"])
def test_rules(rule):
    options = rules(200, 200, 4)[rule]
    if "window" in options:
        options["window"] = tuple(w and 30 * w for w in options["window"])
    run((1, 200, 200, 4, 2, 64, 64), **options)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d,dv", [(32, 32), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_native_head_dims(d, dv, dtype):
    run((1, 130, 330, 2, 1, d, dv), dtype)
    run((1, 150, 150, 1, 1, d, dv), dtype, causal=True, cuts=(70,))


@pytest.mark.parametrize("d,dv", [(8, 8), (40, 72), (72, 40), (200, 200), (64, 8)])
def test_head_dims_that_are_filled_up(d, dv):
    run((1, 90, 200, 2, 1, d, dv))
    run((1, 90, 200, 2, 1, d, dv), "float16", cuts=(64, 130), splits=2)


@pytest.mark.parametrize("arch,dtype,d,dv", [
    ("75", "float16", 64, 64), ("75", "float16", 128, 128), ("75", "float16", 256, 256), ("75", "float16", 40, 96),
    ("90", "bfloat16", 64, 64), ("90", "float16", 128, 128),
    ("120", "bfloat16", 64, 64), ("120", "bfloat16", 128, 128), ("120", "float16", 192, 128), ("120", "bfloat16", 256, 256),
])  # fmt: skip
def test_architectures(arch, dtype, d, dv):
    run((1, 140, 400, 2, 1, d, dv), dtype, arch=arch)
    run((1, 140, 140, 1, 1, d, dv), dtype, arch=arch, causal=True, cuts=(50,))


@pytest.mark.slow
@pytest.mark.parametrize("arch", tiles.ARCHITECTURES)
@pytest.mark.parametrize("d", tiles.HEAD_DIMS)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_entry_of_the_table(arch, d, dtype):
    if arch == "75" and dtype == "bfloat16":
        pytest.skip("refused: see below")
    run((1, 140, 330, 2, 1, d, d), dtype, arch=arch, window=(200, 60), cuts=(131,))
    run((1, 140, 330, 2, 1, d, d), dtype, arch=arch, softcap=5.0, alibi_slopes=slopes(2), splits=3)


def test_bfloat16_is_refused_where_tensor_cores_do_not_know_it():
    with pytest.raises(ValueError, match="bfloat16 needs tensor cores of sm_80 or newer, this GPU is sm_75"):
        tiles.forward("75", "bfloat16", 64, 64)


@pytest.mark.parametrize("d", [0, 4, 12, 264])
def test_head_dims_that_are_refused(d):
    with pytest.raises(ValueError, match=f"got {d}"):
        tiles.forward("80", "bfloat16", d, 64)


# ---------------------------------------------------------------- layouts, hops, splits, strides

def test_any_order_of_keys_and_queries():
    rng = np.random.default_rng(3)
    order = {"order_q": rng.permutation(150), "order_k": rng.permutation(300)}
    run((1, 150, 300, 2, 1, 64, 64), causal=True, cuts=(120,), **order)
    striped = np.concatenate([np.arange(r, 300, 4) for r in range(4)])
    run((1, 300, 300, 1, 1, 64, 64), causal=True, order_k=striped, order_q=striped, cuts=(75, 150, 225))


@pytest.mark.parametrize("dtype", HALVES)
def test_the_error_does_not_grow_with_hops(dtype):
    """Errors of 19200 numbers: at most 1.2 of a naive run's, in one hop and in eight."""
    for cuts in ((), tuple(range(75, 600, 75))):
        out, lse, true, same = run((1, 150, 600, 2, 1, 64, 64), dtype, cuts=cuts)
        far = lambda x, i: np.abs(x.astype(np.float64) - true[i])  # noqa: B023, E731
        rounded = same[0].astype(out.dtype)
        assert far(out, 0).max() <= 1.2 * far(rounded, 0).max()
        assert host_kit.rms(far(out, 0)) <= 1.2 * host_kit.rms(far(rounded, 0))
        assert host_kit.rms(far(lse, 1)) <= 1.2 * host_kit.rms(far(same[1], 1))


@pytest.mark.parametrize("d", [64, 128])
def test_error_beside_a_naive_run(d):
    for gain in (1.0, 8.0):
        out, lse, true, same = run((1, 130, 260, 2, 2, d, d), gain=gain, causal=True)
        far = lambda x: np.abs(x.astype(np.float64) - true[0])  # noqa: B023, E731
        assert far(out).max() <= 1.2 * far(same[0].astype(out.dtype)).max()


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_splits_of_the_keys(splits):
    run((2, 70, 500, 2, 1, 64, 64), splits=splits)
    run((1, 70, 500, 2, 1, 64, 64), "float16", splits=splits, causal=True, cuts=(200,))


def test_splits_give_the_same_bits_in_any_order():
    shape = (1, 140, 500, 2, 1, 64, 64)
    first = run(shape, splits=4)
    other = run(shape, splits=4, switches={"order": "reverse"})
    assert first[0].tobytes() == other[0].tobytes() and first[1].tobytes() == other[1].tobytes()


@pytest.mark.parametrize("heads,kv_heads", [(4, 2), (6, 1), (3, 3)])
def test_views_of_a_fused_array(heads, kv_heads):
    rng = np.random.default_rng(1)
    d = 64
    fused = rng.standard_normal((2, 140, heads + 2 * kv_heads, d)).astype(host_kit.DTYPES["bfloat16"])
    q, k, v = np.split(fused, [heads, heads + kv_heads], axis=2)
    assert not q.flags.c_contiguous
    out, lse = cuda_kit.forward(cuda_kit.backend(), q, k, v, in_place=True, causal=True)
    true = host_kit.exact(q, q, k, v, causal=True)
    same = host_kit.naive(q, q, k, v, narrow=True, causal=True)
    host_kit.check("out", out, true[0], same[0], "bfloat16", 2.0, host_kit.rms(true[1]), same[5][0])


# ---------------------------------------------------------------- the reference m and its guard

def growing(q, k, v):
    """Logits that grow with the key's number, to some hundreds: each tile outgrows the one before."""
    weight = np.linspace(8, 0.02, k.shape[1])[None, :, None, None]  # tiles are walked from the last to the first
    return q, (k.astype(np.float64) * weight).astype(k.dtype), v


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", [64, 128])
def test_a_reference_that_is_outgrown(d, dtype):
    """The guard fails in full tiles, in cut ones, and where a state comes in: the tile is done again."""
    run((1, 130, 700, 1, 1, d, d), dtype, gain=12.0, change=growing)
    run((1, 130, 700, 1, 1, d, d), dtype, gain=12.0, change=growing, window=(600, 100), cuts=(350,))


def test_small_weights_of_float16_after_many_keys():
    """lse lies far above every score: weights against it would be subnormal numbers of float16."""
    run((1, 16, 3000, 1, 1, 32, 32), "float16", gain=0.01, cuts=(2500,), factor=1.2)


def test_rows_that_see_nothing():
    out, lse, *_ = run((1, 140, 300, 2, 1, 64, 64), window=(20, 0), documents=([0, 70, 140], [0, 0, 300]), cuts=(150,))
    assert (lse[:, :, :70] == -np.inf).all() and (out[:, :70].astype(float) == 0).all()
    out, lse, *_ = run((1, 140, 300, 2, 1, 64, 64), documents=([0, 70, 140], [0, 0, 300]), splits=3)
    assert (lse[:, :, :70] == -np.inf).all() and (out[:, :70].astype(float) == 0).all()


def test_no_keys_at_all_on_a_hop():
    run((1, 70, 100, 1, 1, 64, 64), cuts=(0, 50, 50))


# ---------------------------------------------------------------- copies that land early, other orders of blocks

@pytest.mark.parametrize("d", [64, 128])
def test_copies_may_land_at_any_time(d):
    for switches in ({"cp_async": "early"}, {"order": "reverse"}):
        run((1, 200, 500, 1, 1, d, d), switches=switches, window=(400, 50))


# ---------------------------------------------------------------- counters

def counted(d, rows_q=256, rows_k=1024, **options):
    """Counters of a launch of `forward`, one head."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    backend = cuda_kit.backend(count=True, check=False)
    q, k, v = (rng.standard_normal((1, n, 1, d)).astype(ml_dtypes.bfloat16) for n in (rows_q, rows_k, rows_k))
    cuda_kit.forward(backend, q, k, v, **options)
    sim = sys.modules["ptxmachine.cupy"].simulation() if hasattr(sys.modules["ptxmachine.cupy"], "simulation") else None
    history = (sim or cuda_kit.device).machine.history if sim else None
    return next(c for c in reversed(history) if c.program.name == "forward")
