"""f16, bf16 and their pairs."""

import numpy as np
import pytest
from ptxsupport import bfloat, evaluate, half, pair, same

NAN = 0x7FFF
INF16, INFB = 0x7C00, 0x7F80
SUB16 = 0x0001  # the smallest f16 subnormal, 2^-24


def table(kind):
    """All finite non-negative values of a format in order (float64), index = bit pattern."""
    bits = np.arange(INF16 if kind == "f16" else INFB, dtype=np.uint16)
    return (
        bits.view(np.float16).astype(np.float64)
        if kind == "f16"
        else (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    )


def rounded(x, kind):
    """Round exact float64 values to nearest even by searching the table of all values: independent of the machine."""
    values = table(kind)
    out = []
    for v in np.abs(x):
        if np.isnan(v):
            out.append(NAN)
            continue
        at = int(np.searchsorted(values, v))  # values[at-1] < v <= values[at]
        if at == len(values):
            limit = values[-1] + (values[-1] - values[-2]) / 2
            out.append(at - 1 if v < limit else at)  # at is the pattern of infinity
            continue
        if values[at] != v:
            low, high = v - values[at - 1], values[at] - v
            at = at - 1 if low < high or (low == high and (at - 1) % 2 == 0) else at
        out.append(at)
    bits = np.array(out, np.uint16)
    return np.where(np.isnan(x), NAN, bits | np.where(np.signbit(x), 0x8000, 0)).astype(np.uint16)


def values_of(bits, kind):
    return (
        bits.view(np.float16).astype(np.float64)
        if kind == "f16"
        else (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    )


def samples(kind, seed, n=400):
    """Random finite bit patterns, many near the ends."""
    rng = np.random.default_rng(seed)
    top = INF16 if kind == "f16" else INFB
    bits = rng.integers(0, top, n).astype(np.uint16)
    bits[:40] = rng.integers(0, 40, 40)
    bits[40:60] = top - 1 - rng.integers(0, 5, 20)
    return bits | (rng.integers(0, 2, n).astype(np.uint16) << 15)


@pytest.mark.parametrize("kind", ("f16", "bf16"))
@pytest.mark.parametrize("op", ("add", "sub", "mul"))
def test_arithmetic_rounds_once(kind, op):
    a, b = samples(kind, 1), samples(kind, 2)
    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op](values_of(a, kind), values_of(b, kind))
    if kind == "bf16" and op != "mul":  # exponents far apart: the float64 sum must be exact
        keep = (
            np.abs(np.log2(np.abs(values_of(a, kind)) + 1e-300) - np.log2(np.abs(values_of(b, kind)) + 1e-300))
            < 40
        )
        a, b, exact = a[keep], b[keep], exact[keep]
    got = evaluate("%s.rn.%s %%d, %%a, %%b;" % (op, kind), {"a": (kind, a), "b": (kind, b)}, {"d": kind})
    same(got, rounded(exact, kind))


@pytest.mark.parametrize("kind", ("f16", "bf16"))
def test_fma_rounds_once(kind):
    a, b, c = samples(kind, 3), samples(kind, 4), samples(kind, 5)
    x, y, z = (values_of(v, kind) for v in (a, b, c))
    with np.errstate(over="ignore"):
        keep = (
            np.abs(np.log2(np.abs(x * y) + 1e-300) - np.log2(np.abs(z) + 1e-300)) < 30
        )  # the float64 sum is exact
        exact = (x * y + z)[keep]
    got = evaluate(
        "fma.rn.%s %%d, %%a, %%b, %%c;" % kind,
        {"a": (kind, a[keep]), "b": (kind, b[keep]), "c": (kind, c[keep])},
        {"d": kind},
    )
    same(got, rounded(exact, kind))


def test_fma_is_fused_and_breaks_ties_by_the_addend():
    x = half(1 + 2.0**-10)  # x² = 1 + 2^-9 + 2^-20
    same(
        evaluate("fma.rn.f16 %d, %a, %a, %c;", {"a": ("f16", x), "c": ("f16", half(-1))}, {"d": "f16"}),
        half(2.0**-9 + 2.0**-20),
    )
    a, b = half(1 + 2.0**-5), half(1 + 2.0**-6)  # 1 + 2^-5 + 2^-6 + 2^-11: a tie between two f16
    tie = 1 + 2.0**-5 + 2.0**-6
    ins = {
        "a": ("f16", np.repeat(a, 3)),
        "b": ("f16", np.repeat(b, 3)),
        "c": ("f16", [SUB16, SUB16 | 0x8000, 0]),
    }
    same(evaluate("fma.rn.f16 %d, %a, %b, %c;", ins, {"d": "f16"}), half(tie + 2.0**-10, tie, tie))


def test_special_values():
    ins = {"a": ("f16", [INF16, INF16, 0x8000, NAN]), "b": ("f16", [INF16 | 0x8000, 0x3C00, 0x8000, 0x3C00])}
    same(evaluate("add.f16 %d, %a, %b;", ins, {"d": "f16"}), [NAN, INF16, 0x8000, NAN])
    same(
        evaluate(
            "mul.bf16 %d, %a, %b;", {"a": ("bf16", [INFB, 0x8000]), "b": ("bf16", [0, 0x3F80])}, {"d": "bf16"}
        ),
        [NAN, 0x8000],
    )


def test_ftz_sat_relu():
    ins = {"a": ("f16", [SUB16, 0x8001, 0x3C00]), "b": ("f16", [0, 0, 0x3C00])}
    same(evaluate("add.f16 %d, %a, %b;", ins, {"d": "f16"}), [SUB16, 0x8001, 0x4000])
    same(evaluate("add.ftz.f16 %d, %a, %b;", ins, {"d": "f16"}), [0, 0, 0x4000])  # -0 + 0 = +0
    same(
        evaluate("mul.ftz.f16 %d, %a, %b;", {"a": ("f16", [0x8400]), "b": ("f16", [0x3800])}, {"d": "f16"}),
        [0x8000],
    )
    same(
        evaluate(
            "add.sat.f16 %d, %a, %b;",
            {"a": ("f16", half(2, -2, 0.25)), "b": ("f16", half(0, 0, 0.25))},
            {"d": "f16"},
        ),
        half(1, 0, 0.5),
    )
    same(evaluate("add.sat.f16 %d, %a, %a;", {"a": ("f16", [NAN])}, {"d": "f16"}), [0])
    one = half(1, 1)
    same(
        evaluate(
            "fma.rn.relu.f16 %d, %a, %b, %c;",
            {"a": ("f16", half(1, -1)), "b": ("f16", one), "c": ("f16", half(1, -1))},
            {"d": "f16"},
        ),
        half(2, 0),
    )
    same(
        evaluate(
            "fma.rn.relu.bf16 %d, %a, %a, %c;",
            {"a": ("bf16", [NAN, 0x3F80]), "c": ("bf16", [0, 0xC080])},
            {"d": "bf16"},
        ),
        [NAN, 0],
    )


@pytest.mark.parametrize("kind", ("f16", "bf16"))
@pytest.mark.parametrize(
    "op,count",
    (
        ("add.rn", 2),
        ("sub.rn", 2),
        ("mul.rn", 2),
        ("fma.rn", 3),
        ("min", 2),
        ("max", 2),
        ("max.NaN", 2),
        ("abs", 1),
        ("neg", 1),
    ),
)
def test_pairs_equal_two_singles(kind, op, count):
    low, high = [samples(kind, 10 + i, 64) for i in range(count)], [
        samples(kind, 20 + i, 64) for i in range(count)
    ]
    names = "abc"[:count]
    text = lambda k: "%s.%s %%d, %s;" % (op, k, ", ".join("%" + n for n in names))
    single = [
        evaluate(text(kind), {n: (kind, v) for n, v in zip(names, part)}, {"d": kind}) for part in (low, high)
    ]
    packed = evaluate(
        text(kind + "x2"),
        {n: (kind + "x2", pair(lo, hi)) for n, lo, hi in zip(names, low, high)},
        {"d": kind + "x2"},
    )
    same(packed, pair(*single))


def test_min_max():
    a, b = [0x0000, 0x8000, NAN, 0x3C00, NAN], [0x8000, 0x0000, 0x3C00, NAN, NAN]
    same(
        evaluate("min.f16 %d, %a, %b;", {"a": ("f16", a), "b": ("f16", b)}, {"d": "f16"}),
        [0x8000, 0x8000, 0x3C00, 0x3C00, NAN],
    )
    same(
        evaluate("max.f16 %d, %a, %b;", {"a": ("f16", a), "b": ("f16", b)}, {"d": "f16"}),
        [0, 0, 0x3C00, 0x3C00, NAN],
    )
    same(
        evaluate("max.NaN.f16 %d, %a, %b;", {"a": ("f16", a), "b": ("f16", b)}, {"d": "f16"}),
        [0, 0, NAN, NAN, NAN],
    )


def test_ex2_tanh():
    same(
        evaluate(
            "ex2.approx.f16 %d, %a;", {"a": ("f16", half(0, 1, -1, -24, 16, np.inf, -np.inf))}, {"d": "f16"}
        ),
        half(1, 2, 0.5, 2.0**-24, np.inf, np.inf, 0),
    )
    x = pair(half(3), half(-3))
    same(evaluate("ex2.approx.f16x2 %d, %a;", {"a": ("f16x2", x)}, {"d": "f16x2"}), pair(half(8), half(0.125)))
    same(
        evaluate(
            "ex2.approx.ftz.bf16x2 %d, %a;", {"a": ("bf16x2", pair(bfloat(3), bfloat(-127)))}, {"d": "bf16x2"}
        ),
        pair(bfloat(8), [0]),
    )
    same(
        evaluate("ex2.approx.ftz.bf16 %d, %a;", {"a": ("bf16", [INFB | 0x8000, NAN])}, {"d": "bf16"}), [0, NAN]
    )
    same(
        evaluate("tanh.approx.f16 %d, %a;", {"a": ("f16", half(0, np.inf, -np.inf))}, {"d": "f16"}),
        half(0, 1, -1),
    )
    same(
        evaluate("tanh.approx.bf16x2 %d, %a;", {"a": ("bf16x2", pair([0x8000], [INFB]))}, {"d": "bf16x2"}),
        pair([0x8000], [0x3F80]),
    )


def test_comparisons():
    ins = {"a": ("f16", half(1, 2, np.nan)), "b": ("f16", half(2, 2, 1))}
    same(evaluate("setp.lt.f16 %d, %a, %b;", ins, {"d": "pred"}), [True, False, False])
    same(evaluate("setp.geu.f16 %d, %a, %b;", ins, {"d": "pred"}), [False, True, True])
    same(
        evaluate(
            "setp.eq.bf16 %d, %a, %b;", {"a": ("bf16", [0, NAN]), "b": ("bf16", [0x8000, NAN])}, {"d": "pred"}
        ),
        [True, False],
    )
    same(
        evaluate("setp.eq.ftz.f16 %d, %a, %b;", {"a": ("f16", [SUB16]), "b": ("f16", [0x8001])}, {"d": "pred"}),
        [True],
    )
    out = evaluate(
        "setp.gt.f16x2 %p|%q, %a, %b;",
        {"a": ("f16x2", pair(half(1), half(5))), "b": ("f16x2", pair(half(2), half(3)))},
        {"p": "pred", "q": "pred"},
    )
    assert not out["p"][0] and out["q"][0]
    out = evaluate(
        "set.gt.f16x2.f16x2 %d, %a, %b;",
        {"a": ("f16x2", pair(half(1), half(5))), "b": ("f16x2", pair(half(2), half(3)))},
        {"d": "f16x2"},
    )
    same(out, pair([0], [0x3C00]))
    out = evaluate(
        "set.leu.u32.bf16x2 %d, %a, %b;",
        {"a": ("bf16x2", pair([NAN], bfloat(5))), "b": ("bf16x2", pair([0], bfloat(3)))},
        {"d": "u32"},
    )
    same(out, [0x0000FFFF])
