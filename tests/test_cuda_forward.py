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


def run(shape, dtype="bfloat16", *, arch="80", splits=1, gain=1.0, factor=2.0, seed=0, switches={}, change=None, **how):
    """Compute a case and hold it against float64; give what was computed.

    shape : batch, rows_q, rows_k, heads, kv_heads, d, dv
    splits : 1, or the main loop would hardly run: small blocks are cut until the device is full
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
    run((2, rows_q, rows_k, 1, 1, 64, 64), causal=True)


@pytest.mark.parametrize("rule", [name for name in rules(4, 4, 4) if name != "full"])
def test_rules(rule):
    options = rules(200, 200, 4)[rule]
    if "window" in options:
        options["window"] = tuple(w and 30 * w for w in options["window"])
    run((1, 200, 200, 4, 2, 64, 64), **options)


@pytest.mark.parametrize("d,dv,dtype", [
    (32, 32, "float16"), (96, 96, "bfloat16"), (128, 128, "bfloat16"), (192, 128, "float16"), (256, 256, "bfloat16"),
])  # fmt: skip
def test_native_head_dims(d, dv, dtype):
    run((1, 130, 400, 1, 1, d, dv), dtype, window=(300, 100), cuts=(330,))


@pytest.mark.parametrize("d,dv,dtype", [(8, 8, "float16"), (40, 72, "bfloat16"), (200, 24, "float16")])
def test_head_dims_that_are_filled_up(d, dv, dtype):
    run((1, 70, 330, 2, 1, d, dv), dtype, cuts=(300,), splits=2)


@pytest.mark.parametrize("arch,dtype,d,dv", [
    ("75", "float16", 64, 64), ("75", "float16", 128, 128), ("75", "float16", 32, 256), ("75", "float16", 256, 96), ("90", "bfloat16", 64, 64), ("100", "bfloat16", 128, 128), ("120", "bfloat16", 128, 128),
    *(pytest.param("75", "float16", d, dv, marks=pytest.mark.slow) for d, dv in ((256, 256), (40, 96), (96, 256), (256, 32))),
    *(pytest.param("90", dtype, 128, 128, marks=pytest.mark.slow) for dtype in HALVES),
    *(pytest.param("120", dtype, d, dv, marks=pytest.mark.slow) for dtype in HALVES for d, dv in ((64, 64), (192, 128), (256, 256))),
])  # fmt: skip
def test_architectures(arch, dtype, d, dv):
    run((1, 130, 330, 1, 1, d, dv), dtype, arch=arch, window=(250, 100), cuts=(300,))


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
    """Errors of 19200 numbers: at most 1.2 of a naive run's, in one hop and in eight.

    By their root mean square and by the largest but for 19 of them: the very largest is one number's luck, and lies
    between 0.8 and 1.3 of the naive run's for different seeds.
    """
    for cuts in ((), tuple(range(75, 600, 75))):
        out, lse, true, same = run((1, 150, 600, 2, 1, 64, 64), dtype, cuts=cuts)
        far = lambda x, i: np.abs(x.astype(np.float64) - true[i])  # noqa: B023, E731
        rounded = same[0].astype(out.dtype)
        assert np.quantile(far(out, 0), 0.999) <= 1.2 * np.quantile(far(rounded, 0), 0.999)
        assert host_kit.rms(far(out, 0)) <= 1.2 * host_kit.rms(far(rounded, 0))


@pytest.mark.parametrize("splits", [2, 7])
def test_splits_of_the_keys(splits):
    run((2, 70, 500, 2, 1, 64, 64), splits=splits, causal=True, cuts=(200,))


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
    out, _ = cuda_kit.forward(cuda_kit.backend(splits=1), q, k, v, in_place=True, causal=True)
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
    run((1, 130, 600, 1, 1, d, d), dtype, gain=12.0, change=growing, window=(500, 130), cuts=(350,))


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


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_no_queries(dtype):
    """A rank that has none: nothing is computed, in any number of parts, and nothing fails."""
    q, k, v, _ = host_kit.arrays(np.random.default_rng(0), 1, 0, 100, 2, 1, 64, 32, dtype)
    for splits in (1, 3, None):
        out, lse = cuda_kit.forward(cuda_kit.backend(splits=splits), q, k, v, cuts=(50,), causal=True)
        assert out.shape == (1, 0, 2, 32) and lse.shape == (1, 2, 0) and out.dtype == q.dtype


# ---------------------------------------------------------------- copies that land early, other orders of blocks

@pytest.mark.parametrize("d", [64, 128])
def test_copies_may_land_at_any_time(d):
    run((1, 130, 400, 1, 1, d, d), switches={"cp_async": "early", "order": "reverse"}, window=(300, 50))


# ---------------------------------------------------------------- figures: benchmarks/kernels.py prints them

BENCHMARKS = str(Path(__file__).resolve().parent.parent / "benchmarks")


@pytest.fixture
def kernels():
    sys.path.insert(0, BENCHMARKS)
    sys.path.insert(0, str(cuda_kit.PTX))
    try:
        import kernels

        yield kernels
    finally:
        sys.path.remove(BENCHMARKS)


@pytest.mark.skipif(cuda_kit.REAL, reason="counted by the PTX machine")
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("rule", ["full", "full, shuffled keys", "causal", "causal, shuffled keys"])
def test_memory_is_read_as_the_formula_says(kernels, d, rule):
    """No bank conflict, whole sectors; K and V are read once for each tile of queries that sees them, in whatever order keys lie."""
    rows_q, rows_k = 256, 1024 if "full" in rule else 256
    order = np.random.default_rng(0).permutation(rows_k) if "shuffled" in rule else np.arange(rows_k)
    told = kernels.counts(d, rows_q=rows_q, rows_k=rows_k, causal="causal" in rule, order_k=order)
    assert told["conflicts"] == 0 and told["sectors over the fewest"] == 0
    tiles_seen = 2 * 16 if "full" in rule else 2 + 4  # of 64 keys, by the two tiles of queries
    if "shuffled" in rule:  # four lanes ask for the key of a row that they copy, at d 64 once for K and V
        told["bytes"] -= tiles_seen * 64 * 4 * 4 * {64: 1, 128: 2}[d]
    if "full" in rule:
        assert abs(told["bytes"] / told["formula"] - 1) < 0.05, told
        return
    # Beyond Q, K, V and results a lane asks for the interval of its row, 8 bytes, and a little goes to
    # positions and to numbers of tiles: less than one tile more would be.
    seen = rows_q * 2 * d + tiles_seen * 64 * 2 * 2 * d + rows_q * (2 * d + 4)
    assert 0 <= told["bytes"] - seen < min(2 * 64 * 2 * d, 5 * 4096), told


# x of the loop of full tiles: other instructions per HMMA
LIMITS = {(arch, d): {64: 2.5, 128: 1.5}[d] for arch in ("80", "86", "89", "90", "100", "120") for d in (64, 128)}
STATIC = [
    *(("bfloat16", arch, d, d) for arch, d in (("80", 64), ("80", 128), ("90", 64), ("90", 128), ("120", 64))),
    *(pytest.param(dtype, arch, d, dv, marks=pytest.mark.slow) for dtype in HALVES for arch in tiles.ARCHITECTURES
      for d, dv in (*((d, d) for d in tiles.HEAD_DIMS), (192, 128)) if (arch, dtype) != ("75", "bfloat16")),
]  # fmt: skip


@pytest.mark.parametrize("dtype,arch,d,dv", STATIC)
def test_what_the_compiler_made_of_it(kernels, dtype, arch, d, dv):
    """No spills, no stack, few other instructions per HMMA, as many blocks on a multiprocessor as the table says; keys in order or sorted."""
    if kernels.sass.nvdisasm() is None:
        pytest.skip("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    plain, ordered = (kernels.figures("forward", arch, dtype, d, dv, SORTED=is_sorted) for is_sorted in (0, 1))
    for figures in (plain, ordered):
        assert figures.listing.count("LDL", "STL") == 0 and figures.listing.stack == 0 and figures.listing.spills == 0
        assert figures.occupancy >= tiles.forward(arch, dtype, d, dv).tile.resident
        assert figures.seconds < 10
        assert figures.cut.x <= 1.6 * plain.full.x  # the loop that masks, of either, beside the one of full tiles
        if arch in ("80", "90") and d in (64, 128):
            assert kernels.bound(kernels.modelled(arch, figures.full)) == "tensor"
    assert plain.full.x_without_nops <= LIMITS.get((arch, d), 5.0)
    if dtype == "bfloat16" and ("forward", arch, d) in kernels.FLASH:
        ours, theirs = kernels.times_beside_flash("forward", arch, d, plain.full)
        assert ours <= theirs
    # the key at each place is asked for, and each row's address made anew: 40 instructions of each of the two tiles at most
    assert len(ordered.full.body) - len(plain.full.body) <= 80


@pytest.mark.parametrize("d", (64, 128))
def test_no_worse_on_sm_90(kernels, d):
    """As few instructions a trip as on sm_80, without those that do nothing."""
    if kernels.sass.nvdisasm() is None:
        pytest.skip("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    old, new = (kernels.figures("forward", arch, "bfloat16", d, d, SORTED=0).full for arch in ("80", "90"))  # as above: compiled once
    assert len(new.body) - new.fillers <= len(old.body) - old.fillers, (new.mix(), old.mix())


# ---------------------------------------------------------------- faults, sown one at a time

FAULTS = {
    # name: (file, text, what stands there instead, head dim, case); each kind in the default run, its like in the slow one
    "no barrier in the main loop": ("forward.cu", "copies_wait<0>();\n                __syncthreads();", "copies_wait<0>();", 64, "long"),
    "a stage less awaited in the main loop": ("forward.cu", "copies_wait<0>();\n                __sync", "copies_wait<1>();\n                __sync", 64, "long"),
    "no barrier before a cut tile": ("forward.cu", "copies_wait<0>();\n            __syncthreads();", "copies_wait<0>();", 64, "both"),
    "a stage less awaited before a cut tile": ("forward.cu", "copies_wait<0>();\n            __sync", "copies_wait<1>();\n            __sync", 64, "both"),
    "V not awaited": ("forward_tile.cuh", "copies_wait<1>();", "copies_wait<2>();", 128, "both"),
    "no barrier for V": ("forward_tile.cuh", "copies_wait<1>();\n        __syncthreads();", "copies_wait<1>();", 128, "both"),
    "Q overwritten before it is read": ("forward_state.cuh", "(16 * P::ROW));\n    __syncthreads();", "(16 * P::ROW));", 64, "both"),
    "a key too many above": ("forward_mask.cuh", "first), above(span.y, first));", "first), above(span.y, first) + 1);", 64, "second"),
    "a key too few below": ("forward_mask.cuh", "outside(above(span.x, first),", "outside(above(span.x, first) + 1,", 64, "second"),
    "a key too many before a position": ("survey.cu", "[middle] : middle] < x", "[middle] : middle] <= x", 64, "striped"),
    "one interval in places of keys, the other in positions": ("survey.cu", "hi = place_of(block, block.keys, hi, 0, block.rows_k);", "", 64, "striped"),
    "a row that sees beyond the last key": ("survey.cu", "hi, 0, block.rows_k);", "hi, 0, block.rows_k) + 1;", 64, "narrow"),
    "places found among unsorted keys": ("survey.cu", "block.keys, lo", "nullptr, lo", 64, "shuffled"),
    "keys of a step of sorting not moved": ("survey.cu", "to[target] = key", "to[place] = key", 64, "shuffled"),
    "places for keys in a sorted tile": ("forward_shape.cuh", "SORTED ? block.keys[place", "false ? block.keys[place", 64, "shuffled"),
    "places for keys in a sorted tail": ("forward.cu", "SORTED ? block.keys : nullptr", "nullptr", 64, "shuffled"),
    "the rows of a sorted tile by steps": ("forward_shape.cuh", "    if (SORTED)\n", "    if (false)\n", 64, "shuffled"),
    "rows of the tile before in the main loop": ("forward.cu", "lowest + ahead - 1, seat_k()", "lowest + ahead, seat_k()", 64, "reversed"),
    "V's rows of the tile before in the main loop": ("forward.cu", "ahead + 1 - V_STAGES, seat_v()", "ahead, seat_v()", 64, "reversed"),
    "positions of other keys under ALiBi": ("forward_shape.cuh", "(SORTED ? block.keys[row] : row)", "row", 64, "bent"),
    "a neighbour's bits": ("forward_mask.cuh", "2 * i - 2 * quarter", "2 * i - 2 * quarter + 1", 64, "narrow"),
    "a cut tile twice": ("forward_shape.cuh", "desk.quick = desk.cut = 0", "desk.quick = 0", 64, "both"),
    "no rescaling of out": ("forward_tile.cuh", "state.out_frag[slab][n][2 * h] *= shrink;", ";", 64, "both"),
    "no rescaling of the sum": ("forward_tile.cuh", "fmaf(state.sum[slab][h], shrink, sum)", "state.sum[slab][h] + sum", 64, "both"),
    "no guard": ("forward_tile.cuh", "!(worst <= GUARD)", "false", 64, "long"),
    "a row too many": ("forward_shape.cuh", "there = place < count", "there = place <= count", 64, "both"),
    "a whole sum from each of four lanes": ("forward_state.cuh", "weight * .25f", "weight", 64, "both"),
}  # fmt: skip


ITS_LIKE = {
    "no barrier before a cut tile", "a stage less awaited before a cut tile", "no barrier for V", "a key too many before a position",
    "one interval in places of keys, the other in positions", "a row that sees beyond the last key", "places for keys in a sorted tail",
    "keys of a step of sorting not moved", "the rows of a sorted tile by steps", "V's rows of the tile before in the main loop", "a neighbour's bits",
    "no rescaling of the sum",
}  # fmt: skip
assert set(FAULTS) > ITS_LIKE

STRIPED = np.concatenate([np.arange(r, 300, 4) for r in range(4)])
SHUFFLED = np.random.default_rng(3).permutation(130)
FALLEN = np.concatenate([np.arange(64, 128), np.arange(64), [128, 129]])  # positions of each tile ascend, not so those of all
FAULT_CASES = {
    "long": ((1, 130, 600, 1, 1), {"gain": 12.0, "change": growing}),
    "narrow": ((1, 130, 130, 1, 1), {"window": (4, 0)}),
    "striped": ((1, 130, 300, 1, 1), {"window": (9, 0), "order_k": STRIPED, "cuts": (75, 150, 225)}),
    "shuffled": ((1, 130, 130, 1, 1), {"window": (9, 3), "order_k": SHUFFLED, "cuts": (50,)}),
    "second": ((1, 130, 130, 1, 1), {"window": (40, 40), "cuts": (64,)}),  # cut tiles of rows that have seen others
    "fallen": ((1, 130, 130, 1, 1), {"causal": True, "order_k": FALLEN}),
    "reversed": ((1, 130, 450, 1, 1), {"window": (280, 120), "order_k": np.arange(450)[::-1]}),  # runs of full tiles, sorted
    "bent": ((1, 130, 130, 2, 1), {"alibi_slopes": slopes(2), "causal": True, "order_k": SHUFFLED}),
    "both": ((1, 130, 450, 1, 1), {"gain": 12.0, "change": growing, "window": (280, 120), "cuts": (400,)}),
}


@pytest.mark.parametrize("case", FAULT_CASES)
@pytest.mark.parametrize("d", [64, 128])
def test_cases_of_faults_are_right_without_one(case, d):
    shape, how = FAULT_CASES[case]
    run((*shape, d, d), **how)


@pytest.mark.skipif(cuda_kit.REAL, reason="reported by the PTX machine")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in ITS_LIKE else name for name in FAULTS])
def test_a_fault_is_caught(name, tmp_path, monkeypatch):
    """One fault sown into the kernel: the machine reports it, or the result is wrong."""
    file, right, wrong, d, case = FAULTS[name]
    for source in [*modules.folder().glob("*.cu"), *modules.folder().glob("*.cuh"), *modules.folder().glob("*.h")]:
        text = source.read_text()
        if source.name == file:
            assert len(re.findall(re.escape(right), text)) == 1, f"{file}: {right!r} must stand there once"
            text = text.replace(right, wrong)
        (tmp_path / source.name).write_text(text)
    monkeypatch.setattr(modules, "folder", lambda: tmp_path)
    cuda_kit.device()
    from ptxmachine.faults import Fault

    with pytest.raises((Fault, AssertionError)):
        run((*FAULT_CASES[case][0], d, d), **FAULT_CASES[case][1])
