"""The compiled kernels against the float64 reference: every instruction set, type, rule, shape and stride."""

from __future__ import annotations

import itertools
import zlib

import host_kit as kit
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burstmpi.backends import base, host, reference
from burstmpi.backends.base import Tally
from burstmpi.backends.host import ISAS, HostBackend, missing
from burstmpi.layout import place
from burstmpi.rules import Rules, Sight

RULES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (37, 5)},
    "causal window": {"causal": True, "window": (50, 0)},
    "documents": {"documents": (0, 3, 90, 131, 201)},
    "softcap": {"softcap": 5.0, "causal": True},
    "largest softcap": {"softcap": 1e30},
    "least softcap": {"softcap": 1e-18},
    "alibi": {"alibi_slopes": (0.3, 0.02, 0.7, 0.1)},
    "all": {"causal": True, "window": (70, 0), "documents": (0, 100, 201), "softcap": 7.0, "alibi_slopes": (0.5, 0.25, 0.1, 0.0)},
    "scale": {"scale": 0.31},
}

NARROW = ("amx", "amx-bf16", "avx512bf16")  # P and dS are rounded to bfloat16 before they are multiplied


@pytest.fixture(scope="module", params=kit.isas())
def backend(request):
    return kit.backend_of(request.param)


@pytest.fixture(autouse=True)
def once(request):
    """In plain C, which is slow, no kernel runs for a second instruction set that has the same for a type."""
    told = getattr(request.node, "callspec", None)
    isa, dtype = (told.params.get(name) for name in ("backend", "dtype")) if told else (None, None)
    if isa in kit.plain() and dtype and host.variant(isa, dtype)[0] != isa:
        pytest.skip(f"in plain C, {dtype} by {isa} is {dtype} by {host.variant(isa, dtype)[0]}")


def run(backend, dout, q, k, v, dtype, factor=2.0, cuts=(), order=None, **options):
    """Forward and backward against the oracle; returns what came out.

    order : positions of the rows of q and of k that the backend gets, where it does not get them in order
    """
    true = kit.exact(dout, q, k, v, **options)
    same = kit.naive(dout, q, k, v, narrow=backend.isa in NARROW and dtype == "bfloat16", **options)
    at_q, at_k = order or (slice(None), slice(None))
    dout, q, k, v = dout[:, at_q], q[:, at_q], k[:, at_k], v[:, at_k]
    true, same = ([x[0][:, at_q], x[1][:, :, at_q], x[2][:, at_q], x[3][:, at_k], x[4][:, at_k], *x[5:]] for x in (true, same))
    out, lse = kit.forward(backend, q, k, v, cuts=cuts, positions=order, **options)
    size = kit.rms(true[1])
    kit.check("out", out, true[0], same[0], dtype, factor, size, same[5][0])
    # ln of a sum that was rounded once: an absolute error, however small lse is; with few keys it errs by what their scores do
    floor = max(np.finfo(lse.dtype).eps, same[5][4])
    kit.check("lse", lse, true[1], same[1], "float64" if dtype == "float64" else "float32", factor, floor=floor)
    grads = kit.backward(backend, dout, q, k, v, out, lse, cuts=cuts, positions=order, **options)
    for name, got, want, near, floor in zip(("dq", "dk", "dv"), grads, true[2:], same[2:5], same[5][1:]):
        kit.check(name, got, want, near, dtype, factor, size, floor)
    return out, lse, *grads


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_the_check_would_notice(strange):
    """What is not finite fails, however much error is allowed, unless the reference has the same there."""
    finite = np.ones((1, 3, 2, 4))
    spoilt = finite.copy()
    spoilt[0, 1, 0, 2] = strange
    other = np.where(np.isfinite(spoilt), spoilt, np.inf if np.isnan(strange) else -strange)
    for got, true in ((spoilt, finite), (finite, spoilt), (finite * strange, finite), (finite * strange, spoilt), (other, spoilt)):
        with pytest.raises(AssertionError, match="out: .* not finite"):
            kit.check("out", got.astype(np.float32), true, true, "float32", factor=1e9)
        with pytest.raises(AssertionError, match="out: .* not finite"):
            kit.error("out", got.astype(kit.DTYPES["bfloat16"]), true)
    kit.check("out", spoilt.astype(np.float32), spoilt, spoilt, "float32")
    assert kit.error("out", 2 * spoilt, spoilt) == 1


@pytest.mark.parametrize("isa, dtype", [(isa, dtype) for isa in kit.plain() for dtype in kit.DTYPES if host.variant(isa, dtype)[0] == isa])
@pytest.mark.parametrize("rule", list(RULES))
def test_rules_in_plain_c(isa, rule, dtype):
    """Of what is slow by instruction sets that this CPU lacks, this much in the default run."""
    test_rules_and_types(kit.backend_of(isa), rule, dtype)


@pytest.mark.parametrize("dtype", list(kit.DTYPES))
@pytest.mark.parametrize("rule", list(RULES))
def test_rules_and_types(backend, rule, dtype):
    rng = np.random.default_rng(zlib.crc32(f"{rule} {dtype}".encode()))
    q, k, v, dout = kit.arrays(rng, 2, 201, 201, 4, 2, 40, 24, dtype)
    run(backend, dout, q, k, v, dtype, **RULES[rule])
    run(backend, dout, q, k, v, dtype, cuts=(64, 65, 150), **RULES[rule])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("rule", ["causal", "window", "all", "alibi"])
def test_scores_far_apart(backend, rule, dtype):
    """Tiles outgrow their m again and again, so that those behind them are begun with their maximum (`steep`): full, cut and bent."""
    rng = np.random.default_rng(zlib.crc32(f"steep {rule} {dtype}".encode()))
    options = {"window": (400, 100)} if rule == "window" else {**RULES[rule], "documents": (0, 300, 900)} if rule == "all" else RULES[rule]
    q, k, v, dout = kit.arrays(rng, 1, 900, 900, 4, 2, 16, 24, dtype, gain=60)
    run(backend, dout, q, k, v, dtype, cuts=(530,), **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("run_of_rows", [1, 8, 40, 130])
def test_rows_in_any_order(backend, run_of_rows, dtype):
    """What a panel sees of a tile then has gaps: between vectors of a panel, blocks of a tile, tiles of a task."""
    rng = np.random.default_rng(run_of_rows)

    def shuffled(rows):
        starts = rng.permutation(np.arange(0, rows, run_of_rows))
        return np.concatenate([np.arange(start, min(start + run_of_rows, rows)) for start in starts])

    scores = ({}, {"softcap": 4.0}, {"alibi_slopes": (0.5, 0.1)})
    sights = ({"causal": True}, {"window": (50, 20)}, {"causal": True, "documents": ((0, 30, 200, 300), (0, 100, 260, 500))})
    for sight, bend in itertools.product(sights, scores):
        q, k, v, dout = kit.arrays(rng, 1, 300, 500, 2, 1, 40, 24, dtype)
        order = shuffled(300), shuffled(500)
        run(backend, dout, q, k, v, dtype, cuts=() if bend else (330,), order=order, **sight, **bend)


@pytest.mark.parametrize("d, dv", [(1, 1), (3, 17), (16, 8), (64, 64), (72, 80), (96, 96), (128, 128), (100, 512), (512, 33)])
def test_head_dims(backend, d, dv):
    rng = np.random.default_rng(d * 1000 + dv)
    q, k, v, dout = kit.arrays(rng, 1, 61, 150, 2, 1, d, dv, "float32")
    run(backend, dout, q, k, v, "float32", causal=True)


@pytest.mark.parametrize("dtype", list(kit.DTYPES))
@pytest.mark.parametrize("d, dv", [(64, 64), (130, 257), (512, 512), (512, 8), (8, 512)])
def test_head_dims_of_all_types(backend, d, dv, dtype):
    rng = np.random.default_rng(d * 1000 + dv)
    q, k, v, dout = kit.arrays(rng, 1, 37, 70, 2, 1, d, dv, dtype)
    run(backend, dout, q, k, v, dtype, causal=True, cuts=(41,))


@pytest.mark.parametrize("dtype", list(kit.DTYPES))
@pytest.mark.parametrize("rows_q, rows_k", [(1, 1), (1, 700), (700, 1), (7, 300), (300, 7), (49, 97), (385, 193), (500, 500)])
def test_lengths_and_cross_attention(backend, rows_q, rows_k, dtype):
    rng = np.random.default_rng(rows_q * 1000 + rows_k)
    q, k, v, dout = kit.arrays(rng, 1, rows_q, rows_k, 2, 2, 20, 12, dtype)
    run(backend, dout, q, k, v, dtype)
    run(backend, dout, q, k, v, dtype, causal=True)  # rows_q > rows_k: early rows see nothing


@pytest.mark.parametrize("gain", [1, 8, 40, 200])
@pytest.mark.parametrize("dtype", list(kit.DTYPES))
def test_large_logits(backend, gain, dtype):
    rng = np.random.default_rng(gain)
    q, k, v, dout = kit.arrays(rng, 1, 300, 400, 2, 2, 64, 64, dtype, gain)
    run(backend, dout, q, k, v, dtype)
    run(backend, dout, q, k, v, dtype, causal=True, cuts=(130,))


@pytest.mark.parametrize("rule", ["full", "causal window", "documents"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows, cut_q", [(230, 0), (230, 77), (230, 230), (2000, 0)])  # the last: several groups of panels
def test_gradients_that_the_last_block_rounds(backend, dtype, rule, rows, cut_q):
    """The bits of sums that are rounded when all is done, for panels that are whole and that are not, and keys that nobody sees."""
    rng = np.random.default_rng(zlib.crc32(rule.encode()))
    q, k, v, dout = kit.arrays(rng, 2, rows, 330, 2, 1, 64, 40, dtype)
    options = {**RULES[rule], **({"documents": ((0, 90, 90, rows), (0, 90, 200, 330))} if rule == "documents" else {})}
    out, lse = kit.forward(backend, q, k, v, **options)
    one, two = (kit.rounded_gradients(backend, dout, q, k, v, out, lse, cut_q, 200, way, **options) for way in ("after", "within"))
    for name, a, b in zip(("dq", "dk", "dv"), one, two):
        assert np.isfinite(a.astype(np.float64)).all(), name
        assert a.tobytes() == b.tobytes(), name


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("d", [40, 64])  # a scale that is rounded, and one that is not
@pytest.mark.parametrize("far", [17, 110])  # and where a product's rounding error cannot be told without an FMA
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_far_scores_find_their_weight_again(backend, dtype, far, d, options):
    """Each query has one key far above the others: P = 1 but for a rounding of its own, so that out is v and dv is dout.

    In forward P is 2^(s - m) of any size: as bfloat16 it is rounded, and so is out.  In backward it is 1.
    """
    rng = np.random.default_rng(d)
    _, k, v, dout = kit.arrays(rng, 1, 96, 200, 2, 2, d, 24, dtype)
    q = (k[:, 104:].astype(np.float32) * 2.0**far).astype(k.dtype)
    out, lse = kit.forward(backend, q, k, v, **options)
    _, _, dv = kit.backward(backend, dout, q, k, v, out, lse, **options)
    for got, true, within in ((out, v[:, 104:], 2**-7 if dtype == "bfloat16" else 2**-21), (dv[:, 104:], dout, 2**-21)):
        np.testing.assert_allclose(got.astype(np.float32), true.astype(np.float32), rtol=within)
    assert not dv[:, :104].any()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype, root", [("float32", 1.6e19), ("bfloat16", 1.6e19), ("float64", 1.18e154)])
def test_scores_whose_power_of_two_is_beyond_the_type(backend, dtype, root, sign):
    """A score is finite where score log2(e) is not."""
    if backend.isa == "portable":
        pytest.skip("without an FMA the product's rounding error cannot be told there: NaN")
    q, v = np.full((1, 60, 1, 1), root).astype(kit.DTYPES[dtype]), np.ones((1, 60, 1, 8)).astype(kit.DTYPES[dtype])
    score = sign * float(q[0, 0, 0, 0]) ** 2
    for cuts in ((), (20,)):
        out, lse = kit.forward(backend, sign * q, q, v, scale=1.0, cuts=cuts)
        *_, dv = kit.backward(backend, v, sign * q, q, v, out, lse, scale=1.0, cuts=cuts)
        assert np.allclose(out.astype(float), 1, rtol=1e-6) and np.allclose(lse, score, rtol=1e-6)
        assert np.isfinite(dv).all()


@pytest.mark.parametrize("cuts", [(), (97,)], ids=str)
@pytest.mark.parametrize("margin", [8, 12, 16, 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_key_above_all_others(backend, dtype, margin, cuts):
    """P is rounded to bfloat16 before it is multiplied: where one weight is nearly all of a row, that must not be felt in out, whose
    error would be all of dP - delta, and so of dQ and dK."""
    rng = np.random.default_rng(3)
    q, k, v, dout = kit.arrays(rng, 1, 200, 450, 2, 2, 64, 64, dtype)
    above = k[:, 40:440:2].astype(np.float64)  # in two tiles of every kernel
    q = (above * margin * 8 / (above**2).sum(axis=3, keepdims=True)).astype(q.dtype)
    true = kit.exact(dout, q, k, v)
    same = kit.naive(dout, q, k, v, narrow=backend.isa in NARROW and dtype == "bfloat16")
    out, lse = kit.forward(backend, q, k, v, cuts=cuts)
    results = out, lse, *kit.backward(backend, dout, q, k, v, out, lse, cuts=cuts)
    for i, name in ((2, "dq"), (3, "dk"), (4, "dv")):
        error, of_naive = (kit.rms(x[i].astype(np.float64) - true[i]) for x in (results, same))
        assert error <= 2 * of_naive, (name, error, of_naive)


def test_scores_that_grow_without_end(backend):
    """Each tile's scores are far above those of the tile before, then far below: every m is wrong once."""
    rng = np.random.default_rng(5)
    q, k, v, dout = kit.arrays(rng, 1, 60, 900, 1, 1, 8, 8, "float32")
    q[..., 0] = 1
    for ramp in (np.arange(900.0) * 3, np.arange(900.0)[::-1] * 3, np.abs(np.arange(900.0) - 450) * 5):
        k[..., 0] = ramp[None, :, None]
        run(backend, dout, q, k, v, "float32", scale=1.0)
        run(backend, dout, q, k, v, "float32", scale=1.0, cuts=(100, 500))


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("dtype, high, low", [("float64", 1010, 400), ("float32", 110, 60), ("bfloat16", 110, 60)])
def test_large_values_under_large_weights(backend, dtype, high, low, options):
    """Single keys of a tile have scores that an m from the first ones may still stand (P = 2^36), and P times values x 2^high is beyond
    the type's numbers."""
    rng = np.random.default_rng(7)
    q, k, v, dout = kit.arrays(rng, 1, 300, 500, 2, 1, 12, 24, dtype)
    q[..., 0] = 1
    k[..., 0] = np.where(np.arange(500) % 64 == 60, 25, 0)[None, :, None]
    options = {**options, "scale": 1.0}
    true = kit.exact(dout, q, k, v, **options)
    *same, floors = kit.naive(dout, q, k, v, narrow=backend.isa in NARROW and dtype == "bfloat16", **options)
    large, small = (np.ldexp(x.astype(np.float64), by).astype(x.dtype) for x, by in ((v, high), (dout, -low)))
    for cuts in ((), (130,)):
        out, lse = kit.forward(backend, q, k, large, cuts=cuts, **options)
        results = out, lse, *kit.backward(backend, small, q, k, large, out, lse, cuts=cuts, **options)
        for i, (name, back, floor) in enumerate(zip(("out", "lse", "dq", "dk", "dv"), (-high, 0, low - high, low - high, low), (floors[0], floors[4], *floors[1:4]))):
            got = np.ldexp(results[i].astype(np.float64), back)
            kit.check(name, got, true[i], same[i], dtype, score=kit.rms(true[1]), floor=floor)


def test_weights_of_a_loop_of_their_own_are_those_behind_the_product():
    """To the bit (weigh.h): also where they vanish, where m is far too low, for a NaN, and by an lse that is not the rows' own."""
    isa = next(x for x in ISAS if x in ("avx512", "avx2", "portable") and not missing(x))
    builds = [HostBackend(isa, threads=1, extra_flags=(f"-DWEIGH_LATER={n}",)) for n in (0, 1)]
    rng = np.random.default_rng(17)
    for gain, low in ((1, 0), (30, 0), (300, 0), (1, 100), (1, np.nan)):
        q, k, v, dout = kit.arrays(rng, 1, 260, 260, 2, 1, 36, 20, "float32", gain)
        k[:, 150:154, :, 0], q[:, 30, 0] = 3.0 * gain, np.nan if low else q[:, 30, 0]
        for options in ({}, {"causal": True, "documents": (0, 70, 260)} if low else {"window": (80, 90)}):
            one, two = ([*kit.forward(x, q, k, v, cuts=(130,), **options)] for x in builds)
            for x, results in zip(builds, (one, two)):
                results += kit.backward(x, dout, q, k, v, results[0], results[1] - np.float32(low), cuts=(130,), **options)
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), one, two):
                assert np.array_equal(a, b, equal_nan=True), (name, gain, low, options)


def strided(x, rng):
    """The same values behind awkward strides."""
    axes = rng.permutation(4)
    big = np.full(tuple(2 * x.shape[a] + 1 for a in axes), np.nan).astype(x.dtype)
    view = big[tuple(slice(1, None, 2) if rng.integers(2) else slice(2 * x.shape[a], 0, -2) for a in axes)]
    view = view.transpose(np.argsort(axes))
    view[...] = x
    return view


@pytest.mark.parametrize("dtype", list(kit.DTYPES))
def test_strides_change_no_bit(backend, dtype):
    rng = np.random.default_rng(9)
    plain = kit.arrays(rng, 2, 70, 130, 4, 2, 18, 10, dtype)
    odd = [strided(x, rng) for x in plain]
    assert all((a == b).all() for a, b in zip(plain, odd))
    q, k, v, dout = plain
    want = kit.forward(backend, q, k, v, causal=True)
    got = kit.forward(backend, *odd[:3], causal=True)
    assert all((a == b).all() for a, b in zip(want, got))
    want_g = kit.backward(backend, dout, q, k, v, *want, causal=True)
    got_g = kit.backward(backend, odd[3], *odd[:3], strided(want[0], rng), want[1], causal=True)
    assert all((a == b).all() for a, b in zip(want_g, got_g))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 37, 3, 5), (1, 300, 2, 64), (2, 5, 1, 200), (3, 0, 2, 8)], ids=str)
def test_sums_become_the_callers_type_as_numpy_rounds(backend, shape, dtype):
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, shape, np.uint32)  # every exponent: subnormals, what overflows, infinities, NaN
    bits.flat[::3] &= 0xFFFF_F000  # and ties
    sums = bits.view(np.float32)
    with np.errstate(all="ignore"):
        want = sums.astype(kit.DTYPES[dtype])
    for source in (sums, strided(sums, rng)):
        for target in (np.empty_like(want), strided(want, rng)):
            target[...] = 7
            backend.copy(target, source)
            nan = np.isnan(want)
            np.testing.assert_array_equal(np.isnan(target), nan)
            np.testing.assert_array_equal(target.view(np.uint16)[~nan], want.view(np.uint16)[~nan])
            if target.base is not None:  # a view into NaN: nothing was written between its numbers
                target[...] = np.nan
                assert np.isnan(target.base).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 3)}, {"documents": (0, 20, 77, 160)}, {}], ids=str)
def test_nan_and_infinities_stay_with_the_rows_that_see_them(backend, kind, options, dtype):
    from burstmpi.backends import reference
    from burstmpi.rules import Rules

    rng = np.random.default_rng(3)
    clean = kit.arrays(rng, 1, 160, 160, 2, 2, 12, 12, dtype)
    mask, _ = reference.visible(Rules(**options), 160, 160)
    before = kit.forward(backend, *clean[:3], **options)
    before = (*before, *kit.backward(backend, clean[3], *clean[:3], *before, **options))
    exact = kit.exact(clean[3], *clean[:3], **options)
    far = lambda i, got, rows: np.abs(got.astype(float) - exact[i])[rows].max(initial=0)  # noqa: E731
    naive = kit.naive(clean[3], *clean[:3], narrow=backend.isa in NARROW and dtype == "bfloat16", **options)[:5]
    usual = [max(far(i, got, ...) for got in both) for i, both in enumerate(zip(before, naive))]

    def near(i, got, rows):
        """Whether the rows that see no NaN are right: their tiles are summed in another order, so that they differ from those without one."""
        return far(i, got, rows) <= 2 * usual[i]

    for which in ("k", "v", "q"):
        q, k, v, dout = (x.copy() for x in clean)
        at = 75
        {"q": q, "k": k, "v": v}[which][:, at, :, 3] = kind
        touched = mask[at] if which == "q" else mask[:, at]
        rows = np.arange(160) == at if which == "q" else touched
        out, lse = kit.forward(backend, q, k, v, **options)
        assert near(0, out, np.s_[:, ~rows]) and near(1, lse, np.s_[:, :, ~rows])
        if np.isnan(kind):
            bad = out[:, rows, :, 3] if which == "v" else out[:, rows]
            assert np.isnan(bad.astype(float)).all()
        dq, dk, dv = kit.backward(backend, dout, q, k, v, out, lse, **options)
        assert near(2, dq, np.s_[:, ~rows])
        keys = ~mask[rows].any(axis=0) if rows.any() else np.ones(160, bool)  # keys that no touched row sees
        assert near(3, dk, np.s_[:, keys]) and near(4, dv, np.s_[:, keys])


@pytest.mark.parametrize("dtype", list(kit.DTYPES))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("what", ["q", "k", "v", "dout"])
def test_nan_and_infinities_are_where_the_reference_has_them(backend, what, value, dtype):
    """Number by number, in every result; all others are right."""
    rules = {**{rule: RULES[rule] for rule in ("full", "causal", "softcap")}, "window": {"window": (9, 3)}}
    rules |= {"documents": {"documents": (0, 20, 55, 100)}, "alibi": {"alibi_slopes": (0.5, 0.1), "causal": True}}
    loose = 1e-4 if dtype == "float32" else 2e-2
    for (rule, options), columns in itertools.product(rules.items(), (slice(None), 3)):
        arrays = dict(zip(("q", "k", "v", "dout"), kit.arrays(np.random.default_rng(3), 1, 100, 100, 2, 2, 12, 12, dtype)))
        arrays[what][:, 45, :, columns] = value
        q, k, v, dout = arrays.values()
        with np.errstate(all="ignore"):
            true = kit.exact(dout, q, k, v, **options)
        out, lse = kit.forward(backend, q, k, v, cuts=(30,), **options)
        results = out, lse, *kit.backward(backend, dout, q, k, v, out, lse, cuts=(30,), **options)
        assert not all(np.isfinite(x).all() for x in true)
        for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), results, true):
            far = kit.error(f"{rule}, {name}", got, want)
            assert far <= loose * (1 + kit.rms(want)), f"{rule}, {name}: {far:.3g}"


def test_state_goes_through_rows_that_see_nothing_yet(backend):
    rng = np.random.default_rng(8)
    q, k, v, dout = kit.arrays(rng, 1, 100, 300, 1, 1, 16, 16, "float32")
    run(backend, dout, q, k, v, "float32", causal=True, window=(30, 0), cuts=(10, 150, 250))


@pytest.mark.parametrize("dtype", list(kit.DTYPES))
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": (90, 0)}, {"documents": (0, 100, 350, 1000)}], ids=str)
def test_tiles_that_nobody_sees_are_not_computed(backend, options, dtype):
    """Inside a block as well: each pair of a panel and a tile with something to see is counted, and no other."""
    rows, heads = 1000, 2
    if len(backend._variants(kit.DTYPES[dtype])) > 1:
        pytest.skip("by pieces tiles are told in those of another kernel")
    arrays = kit.arrays(np.random.default_rng(4), 1, rows, rows, heads, heads, 8, 8, dtype)
    at, lo, hi = Rules(**options).intervals(np.arange(rows), rows, rows)
    library = backend._unit(arrays[0].dtype)
    panels, tiles = -(-rows // library.tile_rows), -(-rows // library.tile_keys)
    seen = np.zeros((panels * library.tile_rows, tiles * library.tile_keys), bool)
    seen[:rows, :rows] = (lo[:, None] <= np.arange(rows)) & (np.arange(rows) < hi[:, None])
    want = heads * seen.reshape(panels, library.tile_rows, tiles, library.tile_keys).any(axis=(1, 3)).sum()
    assert want < heads * panels * tiles * 0.7
    tally = Tally()
    out, lse = kit.forward(backend, *arrays[:3], tally=tally, **options)
    assert tally.tiles == want
    kit.backward(backend, arrays[3], *arrays[:3], out, lse, tally=tally, **options)
    assert tally.tiles == 2 * want


@pytest.mark.parametrize("cut", [384, 500])
def test_keys_that_no_row_sees_between_those_that_some_do(backend, cut):
    """Panels of one group see tiles far apart: those between are not packed, and their gradients are 0."""
    rng = np.random.default_rng(cut)
    q, k, v, dout = kit.arrays(rng, 1, 1152, 900, 1, 1, 16, 16, "float32")
    documents = ((0, cut, cut, 1152), (0, 100, 800, 900))
    _, _, _, dk, dv = run(backend, dout, q, k, v, "float32", documents=documents)
    assert not dk[:, 100:800].any() and not dv[:, 100:800].any()
    run(backend, dout, q, k, v, "float32", documents=documents, cuts=(450,))


class Told:
    """A library that writes down its name when a verb is called; ``tame`` is what it says of all numbers."""

    def __init__(self, library, name, calls, tame):
        self._library, self._name, self._calls = library, name, calls
        self.tame = lambda block: tame

    def __getattr__(self, what):
        found = getattr(self._library, what)
        if what not in ("attend", "attend_backward"):
            return found
        return lambda block: (self._calls.append(self._name), found(block))[1]


@pytest.mark.parametrize("step", [1, 2])
def test_numbers_that_cannot_be_split(step):
    """Three pieces of 8 bits hold a float32 if none of them overflows, is flushed as a subnormal, or is an infinity or a NaN."""
    backend = HostBackend("portable")
    library = backend._of(np.dtype(np.float32), False)[0]
    at = np.zeros(9, np.int32)
    work = base.Work(Sight(at, at, at, at), Rules().scores(8), np.zeros(0, np.uint8))

    def tame(*some, rest=1.0, of=2, work=work):
        arrays = [np.full((1, 9, 2, 16), rest, np.float32)[..., ::step] for _ in range(3)]
        arrays[of][0, 5, 1, : len(some)] = some
        return library.tame(backend._block(*arrays, np.zeros((1, 2, 9), np.float32), work))

    assert tame() and tame(0.0, -0.0, 1e-40, 2.0**-102, -(2.0**70)) and tame(rest=0.0)
    for some in (np.inf, -np.nan, 2.0**71, -(2.0**-103), 2.0**-126):
        assert not tame(0.5, some), some
    assert not tame(rest=2.0**-61)
    tiny = base.Work(work.sight, Rules(scale=2.0**-90).scores(8), work.scratch)  # Q is split with its factor
    assert not tame(work=tiny) and not tame(2.0**-20, of=0, rest=2.0**40, work=tiny) and tame(rest=2.0**40, work=tiny)


@pytest.mark.parametrize("small", [(), (1e-19,), (1e-35,), (0.0,)], ids=str)
@pytest.mark.parametrize("size", [1.0, 2.0**60, 2.0**-20, 2.0**-80, 2.0**-126])
@pytest.mark.parametrize("others, scale", [(1.0, 1.0), (2.0**40, 2.0**-50)])
def test_gradients_that_cannot_be_split_are_brought_into_range(size, small, others, scale):
    """So that backward rounds scores by the same kernel as forward: by a power of 2 that neither overflows nor is lost on the way back."""
    backend = HostBackend("portable")
    x, dout = np.full((1, 9, 2, 16), others, np.float32), np.full((1, 9, 2, 16), size, np.float32)
    dout[0, 3, 1, : len(small)] = small
    at = np.zeros(9, np.int32)
    work = base.Work(Sight(at, at, at, at), Rules(scale=scale).scores(16), np.zeros(0, np.uint8))
    block = backend._block(x, x, x, np.zeros((1, 2, 9), np.float32), work)
    tame = backend._of(np.dtype(np.float32), False)[0].tame
    block.dout = host._array(dout)
    assert tame(block)
    factor, least = block.dout_factor, min([size, *(y for y in small if y)])
    assert np.frexp(factor)[0] == 0.5 and 1 <= factor and scale / factor >= 2.0**-126
    assert factor == 1 or size * factor * others**2 <= 2.0**94
    assert factor == 1 or size < 2.0**-60 or least < 2.0**-102
    if others == 1:
        assert size * factor >= 2.0**-60 and least * factor >= 2.0**-102
    for strange in (np.inf, np.nan, 2.0**71):
        dout[0, 8, 0, 3] = strange
        assert not tame(block)


@pytest.mark.parametrize("gain", [8, 200])
@pytest.mark.parametrize("spoil", ["small", "one tiny number", "a tiny row"])
def test_small_gradients_by_pieces(spoil, gain):
    """Backward finds forward's weights again whatever dout is."""
    backend = kit.backend_of("amx")
    q, k, v, dout = kit.arrays(np.random.default_rng(0), 1, 130, 300, 1, 1, 64, 64, "float32", gain)
    if spoil == "small":
        dout *= np.float32(1e-19)
    dout[0, 3, 0, :1] *= np.float32(1e-35 if spoil == "one tiny number" else 1)
    dout[0, 7] *= np.float32(1e-33 if spoil == "a tiny row" else 1)
    run(backend, dout, q, k, v, "float32")
    if spoil == "a tiny row":
        out, lse = kit.forward(backend, q, k, v)
        dq, *_ = kit.backward(backend, dout, q, k, v, out, lse)
        true, same = kit.exact(dout, q, k, v)[2][0, 7], kit.naive(dout, q, k, v)[2][0, 7]
        assert kit.rms((dq[0, 7] - true) * 1e33) <= 3 * kit.rms((same - true) * 1e33) + 1e-6 * kit.rms(true * 1e33)


@pytest.mark.parametrize("size, k_size, scale", [(1e-40, 1, None), (1e-30, 1e10, 1e-10), (1e-24, 1e15, 1e-15)])
def test_gradients_at_the_end_of_float32_by_pieces(size, k_size, scale):
    """Subnormal ones count as 0, and small ones times a small scale are not lost where K is large."""
    backend = kit.backend_of("amx")
    q, k, v, dout = kit.arrays(np.random.default_rng(0), 1, 40, 70, 1, 1, 16, 16, "float32")
    k, dout = k * np.float32(k_size), dout * np.float32(size)
    out, lse = kit.forward(backend, q, k, v, scale=scale)
    grads = kit.backward(backend, dout, q, k, v, out, lse, scale=scale)
    for got, true in zip(grads, kit.exact(dout, q, k, v, scale=scale)[2:]):
        assert np.isfinite(got).all() and kit.rms((got - true) / size) <= 1e-5 * kit.rms(true / size) + 2.0**-126 / size * (1 + kit.rms(true / size))


def test_a_tiny_factor_by_pieces():
    """Pieces of Q, which carries it, would be subnormal."""
    backend = kit.backend_of("amx")
    q, k, v, dout = kit.arrays(np.random.default_rng(0), 1, 130, 300, 1, 1, 64, 64, "float32", 1e-6)
    run(backend, dout, q, k, v, "float32", softcap=1e30)


def test_out_stays_over_many_hops(backend):
    """Rows that have seen all they see stay as they are, whatever comes by: keys out of sight, or far below."""
    q, k, v, _ = kit.arrays(np.random.default_rng(1), 1, 100, 330, 1, 1, 16, 16, "float32")
    q[..., 0], k[:, 100:, :, 0] = 1, -400  # e^-100
    for options in ({"documents": ((0, 100, 100), (0, 100, 330))}, {}):
        whole, _ = kit.forward(backend, q, k, v, **options)
        hops, _ = kit.forward(backend, q, k, v, cuts=range(101, 330), **options)
        true, _ = reference.forward(q, k, v, **options)
        assert kit.rms(hops - true) <= 2 * kit.rms(whole - true) + np.finfo(np.float32).eps * kit.rms(true)


@pytest.mark.parametrize(
    "rows, options, forced, tame, taken",
    [
        (100, {}, False, 1, "pieces"),
        (99, {}, False, 1, "vectors"),
        (200, {"causal": True}, False, 1, "pieces"),  # 100.5 keys a row
        (198, {"causal": True}, False, 1, "vectors"),  # 99.5
        (300, {"window": (40, 40)}, False, 1, "vectors"),
        (300, {"documents": (0, 90, 180, 300)}, False, 1, "pieces"),  # 102 keys a row
        (300, {"documents": (0, 98, 200, 300)}, False, 1, "pieces"),
        (300, {"documents": range(0, 301, 50)}, False, 1, "vectors"),
        (99, {}, True, 1, "pieces"),
        (300, {}, False, 0, "vectors"),
        (300, {}, True, 0, "vectors"),
    ],
)
def test_rows_that_see_few_keys_go_by_vectors(monkeypatch, rows, options, forced, tame, taken):
    """Where float32 has two kernels, as with AMX: the same one serves forward and backward, so that they round alike."""
    made = HostBackend("portable", threads=1)
    made._forced, calls = forced, []
    monkeypatch.setattr(host, "LONG_ROW", 100)

    def two(dtype, backward, of=made._of):
        (real,) = of(dtype, backward)
        return [Told(real, "pieces", calls, tame), Told(real, "vectors", calls, None)]

    monkeypatch.setattr(made, "_of", two)
    q, k, v, dout = kit.arrays(np.random.default_rng(rows), 1, rows, rows, 1, 1, 8, 8, "float32")
    run(made, dout, q, k, v, "float32", **options)
    assert calls == [taken, taken]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_keys_that_a_row_sees_are_counted_alike_in_every_layout(layout):
    """The estimate of a block beside what its rows see: exact where keys are neighbours, else as if they were evenly spread."""
    where, rules = place(layout, 240, 4), Rules(causal=True, window=(90, 0))
    for mine in range(4):
        at, lo, hi = rules.intervals(where.positions(mine), 240, 240)
        for theirs in range(4):
            pos = where.positions(theirs).astype(np.int32)
            seen = ((lo[:, None] <= pos) & (pos < hi[:, None])).sum(axis=1).mean()
            told = host._keys_seen(Sight(at, lo, hi, pos))
            assert told == seen if layout == "contiguous" else abs(told - seen) <= 0.25 * len(pos), (mine, theirs)


def laid_out(draw, q, k, v, dout):
    """The same values as a caller may hold them, drawn; some may become one row, head, batch or column, given many times."""
    way = draw(st.sampled_from(["dense", "fused", "any strides", "columns apart", "backwards", "repeated"]))
    if way == "fused":  # q, k and v side by side in one array, with something else behind
        width, rows = max(q.shape[3], v.shape[3]), max(q.shape[1], k.shape[1])
        whole = np.full((q.shape[0], rows, q.shape[2] + 2 * k.shape[2] + 1, width), np.nan).astype(q.dtype)
        heads = np.cumsum([0, q.shape[2], k.shape[2], k.shape[2]])
        views = [whole[:, : x.shape[1], at : at + x.shape[2], : x.shape[3]] for x, at in zip((q, k, v), heads)]
        for view, x in zip(views, (q, k, v)):
            view[...] = x
        return *views, dout
    if way == "any strides":
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        return tuple(strided(x, rng) for x in (q, k, v, dout))
    if way == "columns apart":  # the last axis is not the dense one
        return tuple(np.ascontiguousarray(x.swapaxes(1, 3)).swapaxes(1, 3) for x in (q, k, v, dout))
    if way == "backwards":
        axes = draw(st.lists(st.booleans(), min_size=4, max_size=4))
        turn = tuple(slice(None, None, -1) if axis else slice(None) for axis in axes)
        return tuple(np.ascontiguousarray(x[turn])[turn] for x in (q, k, v, dout))
    if way == "repeated":  # a stride of 0
        axis = draw(st.integers(0, 3))
        once = lambda x: np.broadcast_to(np.take(x, [0], axis), x.shape)  # noqa: E731
        which = draw(st.sets(st.integers(0, 3), min_size=1))
        return tuple(once(x) if i in which else x for i, x in enumerate((q, k, v, dout)))
    return q, k, v, dout


def anything(backend, draw, most, widest=130):
    """One problem, drawn: up to ``most`` keys, and head dims up to ``widest``."""
    dtype = draw(st.sampled_from(list(kit.DTYPES)))
    batch = draw(st.integers(1, 3))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows_q, rows_k = draw(st.integers(1, most // 2)), draw(st.integers(1, most))
    d, dv = draw(st.integers(1, widest)), draw(st.integers(1, widest))
    options = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        sides = st.one_of(st.none(), st.integers(0, 150))
        options["window"] = (draw(sides), draw(sides))
    if draw(st.booleans()):
        options["softcap"] = draw(st.floats(0.5, 50))
    if draw(st.booleans()):
        options["alibi_slopes"] = tuple(draw(st.lists(st.floats(0, 1), min_size=kv_heads * group, max_size=kv_heads * group)))
    if draw(st.booleans()):
        inner_q, inner_k = (sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in (rows_q, rows_k))
        options["documents"] = ((0, *inner_q, rows_q), (0, *inner_k, rows_k))
    cuts = sorted(set(draw(st.lists(st.integers(1, max(1, rows_k - 1)), max_size=3)))) if rows_k > 1 else []
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    gain = draw(st.sampled_from([1, 6, 30]))
    dense = kit.arrays(rng, batch, rows_q, rows_k, kv_heads * group, kv_heads, d, dv, dtype, gain)
    q, k, v, dout = laid_out(draw, *dense)
    if any(0 in x.strides for x in (q, k, v, dout)):
        # Roundings of terms that are all one number go the same way, and a naive run, which adds in pairs, may make none: no measure.
        # So: to the bit what the same numbers give in arrays of their own, which other draws hold against the oracle.
        out, lse = kit.forward(backend, q, k, v, cuts=cuts, **options)
        got = out, lse, *kit.backward(backend, dout, q, k, v, out, lse, cuts=cuts, **options)
        q, k, v, dout = (np.ascontiguousarray(x) for x in (q, k, v, dout))
        again = kit.forward(backend, q, k, v, cuts=cuts, **options)
        again += kit.backward(backend, dout, q, k, v, *again, cuts=cuts, **options)
        for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), got, again):
            np.testing.assert_array_equal(one, other, err_msg=name)
        return
    # Few numbers make a noisy estimate of the naive error: a wider factor than elsewhere.
    run(backend, dout, q, k, v, dtype, factor=6.0, cuts=cuts, **options)


SEARCH = dict(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@settings(max_examples=60, **SEARCH)
@given(data=st.data())
def test_anything(backend, data):
    anything(backend, data.draw, 200)


@pytest.mark.slow
@settings(max_examples=1500, **SEARCH)
@given(data=st.data())
def test_anything_for_long(backend, data):
    """About ten minutes for each instruction set.  One in six has several groups of several panels by AVX-512."""
    anything(backend, data.draw, 500, data.draw(st.sampled_from([130, 130, 512])))
