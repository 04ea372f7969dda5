"""dQ, dK, dV of float16 and bfloat16 by the CUDA kernels: raw_kernels/backward.cu and backward_queries.cu.

On the PTX machine with all its checks on, against the float64 oracle.  Tolerances come from a naive run in which P and dS
are rounded to the same type and sums are float32; where a case is too small for a comparison of two errors to mean
anything, what one rounding costs is added (host_kit.check).
"""

import sys

import cuda_kit
import host_kit
import numpy as np
import pytest
from support import rules, slopes

from burstmpi.backends import modules, tiles
from burstmpi.backends.base import Tally, Work
from burstmpi.layout import place
from burstmpi.rules import Rules, Sight

sys.path[:0] = [str(cuda_kit.PTX), str(cuda_kit.PTX.parent.parent / "benchmarks")]
import kernels  # noqa: E402
import sass  # noqa: E402
from ptxmachine.faults import Fault  # noqa: E402

NAMES = ("dq", "dk", "dv")


class Case:
    """Inputs of one attention, what is true of their gradients, and what a naive run makes of them.

    shape : batch, rows_q, rows_k, heads, kv_heads, d, dv
    apart : added to all of q and taken from all of k, so that every score is about -apart² · d · scale
    """

    def __init__(self, *shape, dtype="bfloat16", gain=1.0, seed=0, apart=0.0, **options):
        self.dtype, self.options, self.rules = dtype, options, Rules(**options)
        q, k, v, dout = host_kit.arrays(np.random.default_rng(seed), *shape, dtype, gain)
        if apart:
            q, k = (q.astype(np.float64) + apart).astype(q.dtype), (k.astype(np.float64) - apart).astype(k.dtype)
        self.arrays = q, k, v, dout
        self.true = host_kit.exact(dout, q, k, v, **options)
        self.same = host_kit.naive(dout, q, k, v, narrow=True, **options)

    def run(self, backend, *, cuts_q=(), cuts_k=(), layout="contiguous", strided=False, start=None):
        """dq, dk, dv, block of queries by block of keys, each result added to where it has been made before.

        strided : inputs and results are views of larger arrays, their heads and rows far apart
        start : what dq, dk, dv hold before; they are then added to from the first block on
        """
        q, k, v, dout = self.arrays
        bench = cuda_kit.Bench(backend, q, k, v, **self.options)
        at, lo, hi = self.rules.intervals(np.arange(q.shape[1]), q.shape[1], k.shape[1])
        scores = self.rules.scores(q.shape[3])
        order = lambda rows, parts: (  # noqa: E731
            np.arange(rows) if layout == "contiguous"
            else np.concatenate([place(layout, rows, parts).positions(r) for r in range(parts)])
        )  # fmt: skip
        blocks_q = np.split(order(q.shape[1], len(cuts_q) + 1), cuts_q)
        blocks_k = np.split(order(k.shape[1], len(cuts_k) + 1), cuts_k)
        put = lambda x: bench.put(spread(x) if strided else np.ascontiguousarray(x))  # noqa: E731
        out, lse = self.true[0].astype(q.dtype), self.true[1].astype(np.float32)
        grads = [np.full(x.shape, np.nan, np.float32) for x in (q, k, v)] if start is None else [x.copy() for x in start]
        scratch = backend.allocate(backend.scratch_bytes(bench.dims, scores, q.shape[1], k.shape[1], True))
        sides = []
        for rows in blocks_k:
            pos = bench.put(rows.astype(np.int32))
            sides.append((rows, put(k[:, rows]), put(v[:, rows]), put(grads[1][:, rows]), put(grads[2][:, rows]), pos))
        for i, rows in enumerate(blocks_q):
            mine = [put(x[:, rows]) for x in (dout, q, out)]
            mine_lse = bench.put(np.ascontiguousarray(lse[:, :, rows]))
            delta = bench.filled(mine_lse.shape, np.float32)
            bench.wait(backend.delta(mine[0], mine[2], delta))
            dq = put(grads[0][:, rows])
            at_, lo_, hi_ = (bench.put(np.ascontiguousarray(x[rows])) for x in (at, lo, hi))
            for j, (_, keys, values, dk, dv, pos) in enumerate(sides):
                work = Work(Sight(at_, lo_, hi_, pos), scores, scratch, tally=Tally())
                fresh = start is None
                bench.wait(
                    backend.attend_backward(
                        mine[0], mine[1], keys, values, mine_lse, delta, dq, dk, dv, work,
                        fresh_q=fresh and j == 0, fresh_kv=fresh and i == 0,
                    )
                )  # fmt: skip
            grads[0][:, rows] = bench.get(dq)
        for rows, _, _, dk, dv, _ in sides:
            grads[1][:, rows], grads[2][:, rows] = bench.get(dk), bench.get(dv)
        return grads

    def check(self, grads, factor=1.2, small=False, start=None):
        """Hold gradients against the oracle: at most ``factor`` × the naive run's error."""
        for i, (name, got, want, near) in enumerate(zip(NAMES, grads, self.true[2:], self.same[2:5])):
            got = got.astype(np.float64) - (0 if start is None else start[i])
            if small:
                host_kit.check(name, got, want, near, self.dtype, factor, host_kit.rms(self.true[1]), self.same[5][1 + i])
                continue
            assert np.isfinite(got).all(), name
            error, naive = host_kit.rms(got - want), host_kit.rms(near.astype(np.float64) - want)
            # results that were there before are float32: adding to them rounds once
            rounding = 0 if start is None else 2.0**-24 * host_kit.rms(start[i])
            assert error <= factor * naive + rounding, f"{name}: error {error:.3g}, naive {naive:.3g}"


def spread(x):
    """The same numbers as a view: heads beside those of two other arrays, rows and batches further apart."""
    batch, rows, heads, columns = x.shape
    whole = np.full((batch, rows + 3, 3, heads, columns), np.nan, x.dtype)
    view = whole[:, 1 : rows + 1, 1]
    view[...] = x
    return view


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("d", (64, 128))
def test_error_is_that_of_a_naive_run(d, deterministic):
    """Full, cut and empty tiles, tails on both sides, grouped heads."""
    case = Case(1, 190, 260, 2, 1, d, d, causal=True)
    case.check(case.run(cuda_kit.backend(deterministic=deterministic)))


@pytest.mark.parametrize("arch, dtype", [("75", "float16"), ("90", "bfloat16"), ("120", "float16"), ("86", "bfloat16")])
@pytest.mark.parametrize("deterministic", (False, True))
def test_architectures(arch, dtype, deterministic):
    case = Case(1, 129, 135, 2, 2, 64, 64, dtype=dtype, window=(100, 0))
    case.check(case.run(cuda_kit.backend(arch, deterministic=deterministic)))


@pytest.mark.parametrize("rows_q, rows_k", [(1, 1), (7, 65), (63, 129), (64, 127), (65, 1), (127, 64)])
def test_lengths_that_hurt(rows_q, rows_k):
    case = Case(2, rows_q, rows_k, 1, 1, 64, 64, seed=rows_q)
    for deterministic in (False, True):
        case.check(case.run(cuda_kit.backend(deterministic=deterministic)), 2.0, small=True)


@pytest.mark.parametrize("rule", rules(70, 140, 2))
def test_rules(rule):
    case = Case(1, 70, 140, 2, 1, 32, 32, dtype="float16", **rules(70, 140, 2)[rule])
    for deterministic in (False, True):
        case.check(case.run(cuda_kit.backend(deterministic=deterministic)), small=True)


@pytest.mark.parametrize("bend", ({"alibi_slopes": slopes(1)}, {"softcap": 2.0}), ids=("alibi", "softcap"))
def test_other_scores_on_sm_90(bend):
    """K is not held there but read where it is used, for S of twice as many queries."""
    case = Case(1, 128, 131, 1, 1, 64, 64, dtype="float16", **bend)
    case.check(case.run(cuda_kit.backend("90")), small=True)


def halves_of_v():
    """For sm_75, tiles of 32 × 32: a full tile and tails on both sides."""
    return Case(1, 34, 35, 1, 1, 256, 256, dtype="float16")


def test_half_of_v_in_registers():
    case = halves_of_v()
    case.check(case.run(cuda_kit.backend("75")), small=True)


# (arch, d, dv): native ones, filled up ones, unequal ones
DIMS = [("80", 32, 32), ("80", 96, 96), ("90", 128, 128), ("90", 192, 192), ("80", 256, 256), ("80", 192, 128), ("120", 128, 128), ("80", 40, 72)]
DIMS += [(arch, *dims) for arch in ("75", "80", "90", "120") for dims in ((32, 64), (64, 32))]  # fewer columns than an entry of 64 keeps
DIMS += [("120", 32, 256)]
MORE = [(a, d, dv) for a in ("75", "80", "90", "120") for d, dv in [*((n, n) for n in (8, 32, 64, 72, 96, 128, 192, 200, 256)), (192, 128), (40, 136)]]  # fmt: skip


@pytest.mark.parametrize("arch, d, dv", DIMS)
def test_head_dims(arch, d, dv):
    dims(arch, d, dv, False)


def test_no_more_steps_are_kept_than_there_are():
    """And where all of V is kept, it fits shared memory on its way to registers."""
    for arch in tiles.ARCHITECTURES:
        for d in tiles.HEAD_DIMS:
            for dv in tiles.HEAD_DIMS:
                told, alone = (of(arch, "float16", d, dv).defines for of in (tiles.backward, tiles.backward_queries))
                assert max(told["K_KEPT"], told["Q_KEPT"], alone["Q_KEPT"]) <= d // 16, (arch, d, dv)
                assert max(told["V_KEPT"], alone["DO_KEPT"]) <= dv // 16, (arch, d, dv)
                assert told["V_KEPT"] < dv // 16 or told["TILE_K"] * (2 * dv + told["PAD"]) <= told["SHARED"], (arch, d, dv)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("arch, d, dv", MORE)
def test_more_head_dims(arch, d, dv, deterministic):
    dims(arch, d, dv, deterministic)


def dims(arch, d, dv, deterministic):
    case = Case(1, 68, 130, 1, 1, d, dv, dtype="float16", causal=True)
    case.check(case.run(cuda_kit.backend(arch, deterministic=deterministic)), small=True)


@pytest.mark.parametrize("deterministic", (False, True))
def test_strides_and_what_was_there_before(deterministic):
    """Views of larger arrays are taken and filled as they are; dq, dk, dv are added to."""
    case = Case(2, 66, 130, 4, 2, 64, 64, causal=True)
    rng = np.random.default_rng(5)
    start = [rng.standard_normal(x.shape).astype(np.float32) for x in case.arrays[:3]]
    backend = cuda_kit.backend(deterministic=deterministic)
    case.check(case.run(backend, strided=True, start=start), small=True, start=start)


@pytest.mark.parametrize("travelling", ("keys", "queries"))
def test_error_does_not_grow_with_the_hops(travelling):
    """Eight blocks of keys, added to dQ, or eight blocks of queries, added to dK and dV: zigzag, causal."""
    case = Case(1, 256, 256, 1, 1, 64, 64, causal=True)
    cuts = np.arange(32, 256, 32)
    hops = {"cuts_k": cuts} if travelling == "keys" else {"cuts_q": cuts}
    case.check(case.run(cuda_kit.backend(), layout="zigzag", **hops))


def test_rows_that_see_nothing():
    """lse = -inf: no share of anything, dq 0; keys that nobody sees get 0."""
    case = Case(1, 100, 70, 1, 1, 64, 64, causal=True)
    assert np.isneginf(case.true[1]).any()
    for deterministic in (False, True):
        grads = case.run(cuda_kit.backend(deterministic=deterministic))
        case.check(grads, small=True)
        assert not grads[0][:, :30].any()
    case = Case(1, 70, 200, 1, 1, 64, 64, window=(3, 3))
    grads = case.run(cuda_kit.backend())
    assert not grads[1][:, :120].any() and not grads[2][:, :120].any()


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_no_queries(dtype, deterministic):
    """A rank that has none: dk and dv of its share are 0, and stay what they were where it is added to them."""
    case = Case(1, 0, 70, 2, 1, 64, 32, dtype=dtype, causal=True)
    dq, dk, dv = case.run(cuda_kit.backend(deterministic=deterministic), cuts_k=(33,))
    assert dq.shape == (1, 0, 2, 64) and dk.shape == (1, 70, 1, 64) and dv.shape == (1, 70, 1, 32)
    assert not dk.any() and not dv.any()
    start = [np.full(x.shape, 3, np.float32) for x in case.arrays[:3]]
    assert all((x == 3).all() for x in case.run(cuda_kit.backend(deterministic=deterministic), cuts_k=(33,), start=start))


def beyond_the_last_key():
    """Scores near -200: a key that is not there, its K filled up with zeros, would have P = exp(200) = inf.

    The last tile has 35 keys: what follows them is the same thread's second row, which no clamp of the first one hides.
    """
    return Case(1, 70, 163, 1, 1, 64, 64, apart=5.0)


@pytest.mark.parametrize("deterministic", (False, True))
def test_keys_beyond_the_last(deterministic):
    """Memory behind the last key holds NaN: it is not read, and the rows of the tile that are not there do not count."""
    case = beyond_the_last_key()
    assert case.true[1].max() < -120
    case.check(case.run(cuda_kit.backend(deterministic=deterministic), strided=True), small=True)


def test_the_same_bits_whatever_the_order_of_blocks():
    case = Case(1, 130, 260, 4, 2, 64, 64, causal=True)
    runs = [case.run(cuda_kit.backend(deterministic=True, order=order)) for order in ("forward", "reverse", 7)]
    for other in runs[1:]:
        assert all((a == b).all() for a, b in zip(runs[0], other))
    case.check(case.run(cuda_kit.backend(order="reverse")))  # the fast way: right in any order


def test_bfloat16_on_sm_75_is_refused():
    for of in (tiles.backward, tiles.backward_queries):
        with pytest.raises(ValueError, match="bfloat16.*sm_80.*sm_75"):
            of("75", "bfloat16", 64, 64)


# ---------------------------------------------------------------- what the machine counts


def counted(case, name, arch="80", **switches):
    """Counters of the launch of a kernel."""
    backend = cuda_kit.backend(arch, count=True, **switches)
    case.run(backend)
    from ptxmachine.cupy.state import simulation

    return next(c for c in simulation().machine.history if c.program.name == name)


@pytest.mark.parametrize("arch, rows_q", (("80", 192), ("90", 256)))
@pytest.mark.parametrize("d", (64, 128))
def test_no_bank_conflicts_full_sectors_bytes_of_the_formula(d, arch, rows_q):
    case = Case(1, rows_q, 256, 1, 1, d, d)
    counters = counted(case, "backward", arch)
    assert counters.bank_conflicts == 0
    loops = [loop for loop in counters.loops() if loop["mix"].get("tensor")]
    assert loops and all(loop["sectors"] == loop["ideal_sectors"] for loop in loops)
    tile = tiles.backward(arch, "bfloat16", d, d).tile
    tiles_q, tiles_k = rows_q // tile.queries, 256 // tile.keys
    pair = tile.queries * (2 * 2 * d + 16)  # Q, dO and the front of a record, for each pair of tiles
    own = tile.keys * (2 * 2 * d + 4)  # K, V and positions, once
    read, written = counters.bytes
    assert read == pytest.approx(tiles_k * (own + tiles_q * pair), rel=0.05)
    sums = tiles_k * tiles_q * tile.queries * d * 4
    assert written == pytest.approx(2 * 256 * d * 4, rel=0.05) or written == pytest.approx(2 * 256 * d * 4 + sums, rel=0.05)
    assert counters.atomics == tiles_k * rows_q * d // (4 if arch == "90" else 1)  # red.v4
    counters = counted(case, "backward_queries", arch, deterministic=True)
    assert counters.bank_conflicts == 0


@pytest.mark.slow
@pytest.mark.parametrize("d", tiles.HEAD_DIMS)
@pytest.mark.parametrize("arch", [arch for arch in tiles.ARCHITECTURES if arch != "89"])  # sm_89: the text of sm_86
def test_no_bank_conflicts_on_any_architecture(arch, d):
    tile = tiles.backward(arch, "float16", d, d).tile
    case = Case(1, 2 * tile.queries, 2 * tile.keys, 1, 1, d, d, dtype="float16")
    assert counted(case, "backward", arch).bank_conflicts == 0
    assert counted(case, "backward_queries", arch, deterministic=True).bank_conflicts == 0


# ---------------------------------------------------------------- what ptxas made of it

needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason="nvdisasm is missing")


def paths(direction, arch, dtype, d, dv, **defines):
    """The kernel's listing, and the hot path of the loop over full tiles and of the one that masks; it compiles in less than 10 s of CPU."""
    found = kernels.figures(direction, arch, dtype, d, dv, **defines)
    assert found.seconds < 10, found.seconds
    return found.listing, found.full, found.cut


@needs_nvdisasm
@pytest.mark.parametrize("d, limit", [(64, 1.85), (128, 1.4)])
def test_instructions_beside_the_tensor_cores(d, limit):
    """x on sm_80 as promised, no more on sm_90; nothing in local memory; the loop that masks costs at most 1.6 times; bound by the tensor cores."""
    seen = {}
    for arch in ("80", "90"):
        listing, full, cut = paths("backward", arch, "bfloat16", d, d)
        assert (listing.stack, listing.spills, full.local, cut.local) == (0, 0, 0, 0), arch
        assert full.x <= limit and cut.x <= 1.6 * full.x, (arch, full.x, cut.x)
        model = kernels.modelled(arch, full)
        assert kernels.bound(model) == "tensor" and kernels.all_shared(full) <= model["tensor"], (model, kernels.all_shared(full))
        ours, theirs = kernels.times_beside_flash("backward", arch, d, full)
        assert ours <= theirs, arch
        seen[arch] = full.x
    assert seen["90"] <= seen["80"]


# (direction, architecture, head dim or both of them, WITH_DQ) of which nothing lies in local memory, but for what is LEFT.
CLEAN = [("backward", "80", 96, 1), ("backward", "120", 128, 1), ("backward", "75", 64, 1), ("backward", "90", (192, 128), 1), ("backward", "80", 128, 0)]
CLEAN += [("backward_queries", arch, d, 1) for arch in ("80", "90") for d in (64, 128)]
MORE_CLEAN = [
    (direction, arch, d, with_dq, dtype)
    for direction, with_dq in (("backward", 1), ("backward", 0), ("backward_queries", 1))
    for arch in tiles.ARCHITECTURES
    for d in (*tiles.HEAD_DIMS, (192, 128))
    for dtype in ("float16", "bfloat16")
    if (arch, dtype) != ("75", "bfloat16")
]
# What is left in the loop that masks.
LEFT = {("90", 192, 1): 1, ("120", 32, 1): 1, ("100", 96, 1): 1, ("90", 128, 0): 1}
joined = lambda x: "_".join(map(str, x)) if isinstance(x, tuple) else None  # noqa: E731
# The same with softcap or ALiBi, in the loop of full tiles.
SCORED = [("backward", arch, d, dq, which) for arch in ("80", "90") for d in (64, 128) for dq in (1, 0) for which in ("BURST_ALIBI", "BURST_SOFTCAP")]
SCORED += [("backward_queries", arch, d, 1, which) for arch in ("80", "90") for d in (64, 128) for which in ("BURST_ALIBI", "BURST_SOFTCAP")]


@needs_nvdisasm
@pytest.mark.parametrize("direction, arch, d, with_dq", CLEAN, ids=joined)
def test_nothing_in_local_memory(direction, arch, d, with_dq):
    clean(direction, arch, d, with_dq, "float16" if arch == "75" else "bfloat16")


@needs_nvdisasm
@pytest.mark.slow
@pytest.mark.parametrize("direction, arch, d, with_dq, dtype", MORE_CLEAN, ids=joined)
def test_nothing_in_local_memory_anywhere(direction, arch, d, with_dq, dtype):
    clean(direction, arch, d, with_dq, dtype)


def clean(direction, arch, d, with_dq, dtype):
    _, full, cut = paths(direction, arch, dtype, *(d if isinstance(d, tuple) else (d, d)), WITH_DQ=with_dq)
    assert cut.x <= 1.6 * full.x
    assert full.local == 0 and cut.local <= (LEFT.get((arch, d, with_dq), 0) if direction == "backward" else 0)


@needs_nvdisasm
@pytest.mark.slow
@pytest.mark.parametrize("direction, arch, d, with_dq, which", SCORED)
def test_nothing_in_local_memory_with_other_scores(direction, arch, d, with_dq, which):
    _, full, _ = paths(direction, arch, "bfloat16", d, d, WITH_DQ=with_dq, **{which: 1})
    assert full.local == 0


@needs_nvdisasm
@pytest.mark.parametrize("arch", ["86", pytest.param("89", marks=pytest.mark.slow), "120"])
@pytest.mark.parametrize("d, limit", [(64, 1.85), (128, 1.4)])
def test_instructions_where_shared_memory_is_small(arch, d, limit):
    """Within 99 KB, counted without the compiler's NOPs."""
    assert tiles.backward(arch, "bfloat16", d, d).tile.shared <= 99 << 10
    _, full, _ = paths("backward", arch, "bfloat16", d, d)
    assert full.x_without_nops <= limit and full.local == 0


# ---------------------------------------------------------------- sown faults


class Sown(modules.Modules):
    """Kernels with one place of their text changed."""

    def __init__(self, cupy, source, old, new):
        super().__init__(cupy)
        self.source, self.old, self.new = source, old, new

    def kernel(self, source, name, shared=0, **defines):
        if source != self.source:
            return super().kernel(source, name, shared, **defines)
        code = (modules.folder() / f"{source}.cu").read_text()
        assert self.old in code, self.old
        code = code.replace(self.old, self.new)
        kernel = self._cupy.RawModule(code=code, options=modules.options(defines)).get_function(name)
        if shared > 48 << 10:
            kernel.max_dynamic_shared_size_bytes = shared
        return kernel


TOP = "copies_wait<0>();\n            __syncthreads();\n            {}"
WAIT = "copies_wait<Q_LATER>();"
FAULTS = [
    ("backward", WAIT + "\n            __syncthreads();", WAIT, "no barrier before a tile is read"),
    ("backward", "if (MIDDLE_BARRIER) __syncthreads();", "", "no barrier between dS and dQ"),
    ("backward", WAIT, WAIT.replace("Q_LATER", "1"), "waits for one stage less"),
    ("backward", "if (V_STAYS || V_HALVED) __syncthreads();", "", "Q overwrites V before it is in registers"),
    ("backward", "w.fetch(walk, stage ^ STAGE,", "w.fetch(walk, stage,", "the next tile into the stage in use"),
    ("backward", "< (u32)sight.w", "<= (u32)sight.w", "a mask that reaches one too far"),
    ("backward", "(u32)(pos[first_m + m][i] - sight.x)", "(u32)(pos[first_m + m][i] - 1 - sight.x)", "a mask that is one off"),
    ("backward", "step ? dp[m][2 * n + e] : minus_delta", "dp[m][2 * n + e]", "dP starts at nothing"),
    ("backward", "block.d, (float)block.scale)", "block.d, 1)", "dK without the scale"),
    ("backward", "f[2 * i] * (float)block.scale", "f[2 * i]", "dQ without the scale in every other column"),
    ("backward", "if (row < block.rows_q) {", "if (row <= block.rows_q) {", "a row beyond the last"),
    ("backward", "ds_frag[n][first_m + m][2 * e + i] = pack(ds0, ds1)", "ds_frag[n][first_m + m][2 * e + i] = pack(ds0, p1)", "dS without dP"),
    ("backward", "if (key >= block.rows_k) continue;", "if (key > block.rows_k) continue;", "a row beyond the last is written"),
    ("backward_queries", TOP.format("w.pin"), "copies_wait<0>();\n            w.pin", "no barrier"),
    ("backward_queries", TOP.format("w.pin"), TOP.format("w.pin").replace("<0>", "<1>"), "one stage less"),
    ("backward_queries", "if (QUERIES_STAY) __syncthreads();", "", "K overwrites Q before it is in registers"),
    ("backward_queries", "< (u32)sight[m][i >> 1].y", "<= (u32)sight[m][i >> 1].y", "a mask that reaches one too far"),
    ("backward_queries", ": minus_delta[m])", ": s[m][0])", "dP starts at P"),
]


# Of the shape of d 128 on sm_90: four warps share keys, half of them make dK, the others dV.
LATER = "if (Q_LATER && chunk == 0) {{\n                copies_wait<{}>();\n                {}"
SHARED_KEYS_FAULTS = [
    ("backward", LATER.format(0, "__syncthreads();"), LATER.format(1, "__syncthreads();"), "Q is not waited for"),
    ("backward", LATER.format(0, "__syncthreads();"), LATER.format(0, ""), "no barrier before Q is read"),
    ("backward", "if (SHARERS > 1) __syncthreads();", "", "the next tile over one that others still read"),
    ("backward", "product() ? DS_AT : P_AT", "product() ? P_AT : DS_AT", "the others' dS in place of P"),
    ("backward", "chosen(product(), ds_frag[n][first_m + m][i], p_frag[n][first_m + m][i])", "p_frag[n][first_m + m][i]", "P in place of dS for dK"),
    ("backward", "const u32 query = (sharer ^ i) * OWN;", "const u32 query = i * OWN;", "a warp's own queries twice"),
    ("backward", "again.q[kept < 0 ? 0 : kept][n];", "again.q[kept < 0 ? 0 : kept][0];", "kept Q of other queries"),
    ("backward", "number = walk.get(w.desk());", "number = w.number(walk);", "dQ to the sums of another tile"),
]


def shared_keys():
    return Case(1, 130, 140, 2, 2, 128, 128, causal=True)


@pytest.mark.parametrize("source, old, new", [f[:3] for f in SHARED_KEYS_FAULTS], ids=[f[3] for f in SHARED_KEYS_FAULTS])
def test_sown_faults_of_shared_keys_are_found(source, old, new):
    found_by(shared_keys(), source, old, new, arch="90")


def few():
    return Case(1, 20, 36, 1, 1, 64, 64)


def few_with_alibi():
    return Case(1, 20, 36, 1, 1, 64, 64, alibi_slopes=slopes(1))


# Of the shapes that keep K for one tile of queries (sm_90, d 64; not so with ALiBi), and half of V (sm_75, d 256).
WRONG_HALF = "w.keys<Warp::CarryV>(block.v, V_AT, block.dim_v, {});"
SHORT_OF_REGISTERS_FAULTS = [
    ("90", few, "if (ANEW) hold_k();", "", "K is not read"),
    ("90", few_with_alibi, "else ldmatrix(a[m], along<K_BYTES>(k_rows, 2 * step)",
     "else ldmatrix(a[m], along<K_BYTES>(k_rows, 0)", "the first columns of K in each step"),
    ("75", halves_of_v, WRONG_HALF.format("V_COLUMNS"), WRONG_HALF.format("0"), "the wrong half of V"),
    ("75", halves_of_v, "if (V_STAYS || V_HALVED) __syncthreads();", "if (V_STAYS) __syncthreads();", "Q overwrites half of V before it is in registers"),
]  # fmt: skip


@pytest.mark.parametrize("arch, case, old, new", [f[:4] for f in SHORT_OF_REGISTERS_FAULTS], ids=[f[4] for f in SHORT_OF_REGISTERS_FAULTS])
def test_sown_faults_where_registers_are_short_are_found(arch, case, old, new):
    found_by(case(), "backward", old, new, arch=arch, small=True)


SEEN = "key < block.rows_k ? block.pos[key] : -2147483647 - 1"
TAIL_FAULTS = [
    ("backward", SEEN, SEEN.replace("<", "<="), "the position of a key beyond the last is read"),
    ("backward", SEEN, SEEN.replace("-2147483647 - 1", "0"), "a key beyond the last is seen"),
    ("backward", "x.row, block.rows_k - first,", "x.row, block.rows_k + 1 - first,", "a row of K and V beyond the last is read"),
    ("backward", "(tile + 1) * TILE_K <= block.rows_k,", "true,", "the last tile is taken for a full one"),
    ("backward_queries", "shared_store(to, 1u << 31);", "shared_store(to, 0);", "a key beyond the last is seen"),
    ("backward_queries", "+ key < block.rows_k)", "+ key <= block.rows_k)", "the position of a key beyond the last is read"),
    ("backward_queries", "block.rows_k - key_k,", "block.rows_k + 1 - key_k,", "a row of K beyond the last is read"),
    ("backward_queries", "block.rows_k - key_v,", "block.rows_k + 1 - key_v,", "a row of V beyond the last is read"),
]


@pytest.mark.parametrize("source, old, new", [f[:3] for f in TAIL_FAULTS], ids=[f"{f[0]}: {f[3]}" for f in TAIL_FAULTS])
def test_sown_faults_beyond_the_last_key_are_found(source, old, new):
    found_by(beyond_the_last_key(), source, old, new, strided=True)


def two_tiles():
    return Case(1, 130, 140, 1, 1, 64, 64, causal=True, scale=0.3)


@pytest.mark.parametrize("source, old, new", [f[:3] for f in FAULTS], ids=[f"{f[0]}: {f[3]}" for f in FAULTS])
def test_sown_faults_are_found(source, old, new):
    found_by(two_tiles(), source, old, new)


# Those beyond the last key are in test_keys_beyond_the_last, those of half of V in test_half_of_v_in_registers.
RIGHT = [("80", two_tiles, False, False), ("80", two_tiles, True, False)]
RIGHT += [("90", shared_keys, False, False), ("90", few, False, True), ("90", few_with_alibi, False, True)]


@pytest.mark.parametrize("arch, case, deterministic, small", RIGHT)
def test_cases_of_faults_are_right_without_one(arch, case, deterministic, small):
    case = case()
    case.check(case.run(cuda_kit.backend(arch, deterministic=deterministic)), small=small)


def found_by(case, source, old, new, arch="80", small=False, **how):
    """By the machine's checks, or by the comparison with the oracle."""
    backend = cuda_kit.backend(arch, deterministic=source == "backward_queries")
    if cuda_kit.REAL:
        pytest.skip("a GPU does not report races")
    backend._modules = Sown(backend._cupy, source, old, new)
    with pytest.raises((Fault, AssertionError)) as found:
        case.check(case.run(backend, **how), small=small or bool(how))
    assert not str(found.value).startswith(old)
