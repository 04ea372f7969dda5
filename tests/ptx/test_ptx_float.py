"""f32 and f64 instructions: rounding, NaN, infinities, subnormals, signed zeros, as the PTX manual words them."""

from fractions import Fraction

import numpy as np
import pytest
from ptxmachine import floats
from ptxsupport import bits32, bits64, evaluate, same

INF, NAN = np.inf, bits32(0x7FFFFFFF)[0]  # the one NaN that f32 instructions make
NAN64 = bits64(0x7FF8000000000000)[0]
TINY, SUB = np.float32(2.0**-126), np.float32(2.0**-127)  # smallest normal, a subnormal
BIG = np.float32(3.4028234663852886e38)  # the largest float32
ULP = 2.0**-23


def f32(op, a, b=None, c=None):
    ins = {"a": ("f32", a)}
    if b is not None:
        ins["b"] = ("f32", b)
    if c is not None:
        ins["c"] = ("f32", c)
    return evaluate("%s %%d, %s;" % (op, ", ".join("%" + n for n in ins)), ins, {"d": "f32"})


def f64(op, *operands):
    ins = {name: ("f64", v) for name, v in zip("abc", operands)}
    return evaluate("%s %%d, %s;" % (op, ", ".join("%" + n for n in ins)), ins, {"d": "f64"})


def exact(values, rnd, bits=24, emin=-126):
    """Round exact fractions to a float format: an independent way by integers only."""
    return np.array(
        [
            float(floats.round_fraction(v, rnd, bits, emin)) if v else (-0.0 if rnd == "rm" else 0.0)
            for v in values
        ],
        np.float32 if bits == 24 else np.float64,
    )


def test_the_reference_itself_rounds_as_python_divides():
    """int / int is correctly rounded in Python."""
    rng = np.random.default_rng(2)
    for _ in range(300):
        v = Fraction(int(rng.integers(-(2**62), 2**62)), int(rng.integers(1, 2**62))) * Fraction(
            2
        ) ** int(rng.integers(-900, 900))
        if v:
            assert floats.round_fraction(v) == v.numerator / v.denominator


# --- add, sub, mul --------------------------------------------------------------------------------
def test_add_special_values():
    same(
        f32("add.f32", [INF, INF, -0.0, -0.0, 1.0, np.nan, BIG], [-INF, 1, -0.0, 0.0, -1.0, 1, BIG]),
        [NAN, INF, -0.0, 0.0, 0.0, NAN, INF],
    )
    same(f32("sub.f32", [INF, 0.0, -0.0], [INF, 0.0, 0.0]), [NAN, 0.0, -0.0])
    same(f32("mul.f32", [INF, -INF, -0.0, np.nan, BIG], [0.0, 2, 3, 1, 2]), [NAN, -INF, -0.0, NAN, INF])


def test_add_ties_go_to_even():
    # 1 + ulp/2 is a tie: to even is 1; (1 + ulp) + ulp/2 ties up to 1 + 2 ulp
    same(f32("add.rn.f32", [1, 1 + ULP, 1], [ULP / 2, ULP / 2, ULP / 2 * 1.5]), [1, 1 + 2 * ULP, 1 + ULP])


@pytest.mark.parametrize("rnd", ("rz", "rm", "rp"))
@pytest.mark.parametrize("op", ("add", "sub", "mul"))
def test_directed_rounding(op, rnd):
    rng = np.random.default_rng(3)
    a = np.concatenate(
        [rng.standard_normal(40).astype(np.float32), np.float32([1, -1, 1, -1, BIG, -BIG, 1e-38])]
    )
    b = np.concatenate(
        [
            rng.standard_normal(40).astype(np.float32) * np.float32(1e-5),
            np.float32([2.0**-60, 2.0**-60, -(2.0**-60), -(2.0**-60), BIG, BIG, 1e-3]),
        ]
    )
    operation = {"add": Fraction.__add__, "sub": Fraction.__sub__, "mul": Fraction.__mul__}[op]
    expected = exact([operation(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b)], rnd)
    same(f32("%s.%s.f32" % (op, rnd), a, b), expected)


def test_exact_zero_is_negative_when_rounding_down():
    same(f32("add.rm.f32", [1.0, 0.0, -0.0], [-1.0, 0.0, 0.0]), [-0.0, 0.0, -0.0])
    same(f32("add.rz.f32", [1.0], [-1.0]), [0.0])


def test_ftz_flushes_operands_and_results():
    half = np.float32(2.0**-126 * 1.5)
    same(f32("add.f32", [SUB, half], [SUB, -TINY]), [TINY, SUB])
    same(f32("add.ftz.f32", [SUB, half, -SUB], [SUB, -TINY, -0.0]), [0.0, 0.0, -0.0])
    same(f32("mul.f32", [TINY, -TINY], [0.5, 0.5]), [SUB, -SUB])
    same(f32("mul.ftz.f32", [TINY, -TINY, SUB], [0.5, 0.5, 2.0]), [0.0, -0.0, 0.0])
    same(f32("sub.ftz.f32", [-SUB], [0.0]), [-0.0])


def test_sat_clamps_and_kills_nan():
    same(
        f32("add.sat.f32", [2.0, -3.0, np.nan, 0.25, -0.0], [0.0, 1.0, 1.0, 0.25, -0.0]),
        [1.0, 0.0, 0.0, 0.5, 0.0],
    )
    same(f32("fma.rn.sat.f32", [2.0, -1.0], [2.0, 1.0], [0.0, 0.0]), [1.0, 0.0])


# --- fma ------------------------------------------------------------------------------------------
def test_fma_is_fused():
    """(1 + u)² - 1 - 2u = u²: a product rounded first gives 0."""
    x = 1 + ULP
    same(f32("fma.rn.f32", [x], [x], [-(1 + 2 * ULP)]), [ULP * ULP])


def test_fma_does_not_round_twice():
    """a·b lands half-way between two floats and c decides: rounding through float64 would lose c."""
    a, b = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)  # a·b = 1 + 2^-11 + 2^-24: a tie
    c = [2.0**-80, -(2.0**-80), 0.0]
    up, down = np.float32(1 + 2.0**-11 + ULP), np.float32(1 + 2.0**-11)
    same(f32("fma.rn.f32", [a] * 3, [b] * 3, c), [up, down, down])


@pytest.mark.parametrize("rnd", ("rn", "rz", "rm", "rp"))
def test_fma_against_exact_fractions(rnd):
    rng = np.random.default_rng(5)
    a = (rng.standard_normal(300) * 2.0 ** rng.integers(-60, 60, 300)).astype(np.float32)
    b = (rng.standard_normal(300) * 2.0 ** rng.integers(-60, 60, 300)).astype(np.float32)
    c = (rng.standard_normal(300) * 2.0 ** rng.integers(-120, 120, 300)).astype(np.float32)
    c[:100] = (-a[:100].astype(np.float64) * b[:100]).astype(np.float32)  # cancellation
    a[200:250], b[200:250], c[200:250] = (
        a[200:250] * np.float32(1e-20),
        np.float32(1e-22),
        np.float32(1e-44),
    )  # subnormal results
    expected = exact(
        [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c)], rnd
    )
    got = f32("fma.%s.f32" % rnd, a, b, c)
    keep = expected != 0
    same(got[keep], expected[keep])
    assert (got[~keep] == 0).all()


def test_fma_special_values():
    same(
        f32(
            "fma.rn.f32",
            [INF, INF, 0.0, np.nan, -0.0, 1.0],
            [0.0, 1.0, 5.0, 1.0, 1.0, -1.0],
            [1.0, -INF, -0.0, 1.0, -0.0, 1.0],
        ),
        [NAN, NAN, 0.0, NAN, -0.0, 0.0],
    )
    same(f32("fma.rn.ftz.f32", [SUB, TINY], [2.0, 0.5], [SUB, 0.0]), [0.0, 0.0])
    same(f32("mad.rn.f32", [1 + ULP], [1 + ULP], [-(1 + 2 * ULP)]), [ULP * ULP])


@pytest.mark.parametrize("rnd", ("rn", "rz", "rm", "rp"))
def test_fma_f64_against_exact_fractions(rnd):
    rng = np.random.default_rng(6)
    n = 200
    a = rng.standard_normal(n) * 2.0 ** rng.integers(-300, 300, n)
    b = rng.standard_normal(n) * 2.0 ** rng.integers(-300, 300, n)
    c = rng.standard_normal(n) * 2.0 ** rng.integers(-600, 600, n)
    c[:80] = -a[:80] * b[:80]
    a[80:100], b[80:100], c[80:100] = 1 + 2.0**-30, 1 + 2.0**-23, rng.standard_normal(20) * 2.0**-140
    a[100:110], b[100:110] = 2.0**-600 * rng.standard_normal(10), 2.0**-460 * rng.standard_normal(
        10
    )  # subnormal range
    c[100:110] = 2.0**-1060
    a[110:115], b[110:115], c[110:115] = 2.0**1000, 2.0**23 * rng.standard_normal(5), -(2.0**1023)
    expected = exact(
        [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist())],
        rnd,
        53,
        -1022,
    )
    got = f64("fma.%s.f64" % rnd, a, b, c)
    keep = expected != 0
    same(got[keep], expected[keep])
    assert (got[~keep] == 0).all()


def test_f64_arithmetic():
    same(f64("add.f64", [1.0, INF, -0.0], [2.0**-53, -INF, -0.0]), [1.0, NAN64, -0.0])
    same(f64("sub.rn.f64", [1.0], [2.0**-54]), [1.0])
    same(f64("add.rp.f64", [1.0], [2.0**-60]), [1 + 2.0**-52])
    same(f64("add.rm.f64", [1.0, 1.0], [-(2.0**-60), -1.0]), [1 - 2.0**-53, -0.0])
    same(f64("mul.f64", [2.0**-1074], [0.5]), [0.0])
    same(f64("mul.rp.f64", [2.0**-1074], [0.5]), [2.0**-1074])
    same(f64("div.rn.f64", [1.0, 1.0, 0.0], [3.0, -0.0, 0.0]), [1 / 3, -INF, NAN64])
    same(
        f64("div.rz.f64", [2.0], [3.0]), [np.nextafter(2 / 3, 0) if Fraction(2 / 3) > Fraction(2, 3) else 2 / 3]
    )
    same(f64("abs.f64", [-0.0, -2.5]), [0.0, 2.5])
    same(f64("neg.f64", [0.0, -INF]), [-0.0, INF])
    same(f64("min.f64", [0.0, np.nan, 3.0], [-0.0, 1.0, 2.0]), [-0.0, 1.0, 2.0])
    same(f64("max.f64", [-0.0, np.nan], [0.0, np.nan]), [0.0, NAN64])
    same(f64("sqrt.rn.f64", [2.0, -1.0, -0.0]), [np.sqrt(2.0), NAN64, -0.0])
    same(f64("rcp.rn.f64", [3.0, 0.0]), [1 / 3, INF])


# --- div, rcp, sqrt -------------------------------------------------------------------------------
def test_div_f32():
    same(
        f32("div.rn.f32", [1, 1, -1, 0, INF, 1], [3, 0, 0, 0, INF, INF]),
        [np.float32(1) / np.float32(3), INF, -INF, NAN, NAN, 0],
    )
    a, b = np.float32([1, 2, -5, 7]), np.float32([3, 3, 7, 9])
    for rnd in ("rz", "rm", "rp"):
        same(
            f32("div.%s.f32" % rnd, a, b),
            exact([Fraction(float(x)) / Fraction(float(y)) for x, y in zip(a, b)], rnd),
        )
    # approx: for 2^126 < |b| < 2^128 the result is 0, and NaN for an infinite dividend
    same(
        f32("div.approx.f32", [1.0, INF, 6.0, -1.0], [2.0**127, 2.0**127, 3.0, 2.0**127]), [0.0, NAN, 2.0, -0.0]
    )
    same(f32("div.full.f32", [BIG], [BIG]), [1.0])
    same(f32("div.full.ftz.f32", [SUB, TINY], [1.0, 2.0]), [0.0, 0.0])


def test_rcp_sqrt_rsqrt():
    same(
        f32("rcp.rn.f32", [0.0, -0.0, INF, -INF, 3.0, np.nan]),
        [INF, -INF, 0.0, -0.0, np.float32(1) / np.float32(3), NAN],
    )
    same(f32("rcp.approx.ftz.f32", [SUB, -SUB, 2.0, BIG]), [INF, -INF, 0.5, 0.0])
    same(f32("sqrt.rn.f32", [4.0, -0.0, -1.0, INF, 2.0]), [2.0, -0.0, NAN, INF, np.sqrt(np.float32(2))])
    same(f32("sqrt.approx.ftz.f32", [SUB, -SUB, 9.0]), [0.0, -0.0, 3.0])
    same(f32("sqrt.rz.f32", [2.0]), exact_root(2.0, "rz"))
    same(f32("sqrt.rp.f32", [2.0, 4.0]), [exact_root(2.0, "rp")[0], 2.0])
    same(f32("rcp.rp.f32", [3.0]), exact([Fraction(1, 3)], "rp"))
    same(f32("rsqrt.approx.f32", [4.0, 0.0, -0.0, -1.0, INF]), [0.5, INF, -INF, NAN, 0.0])
    same(f32("rsqrt.approx.ftz.f32", [SUB]), [INF])
    same(f64("rsqrt.approx.f64", [4.0]), [0.5])
    got = f64("rcp.approx.ftz.f64", [3.0, 0.0, 2.0**-1060, 1.0])
    assert abs(got[0] - 1 / 3) < 1e-6 and got.view(np.uint64)[0] & 0xFFFFFFFF == 0  # the low word is zero
    same(got[1:], [INF, INF, 1.0])


def exact_root(x, rnd):
    low = np.float32(np.sqrt(x))
    while Fraction(float(low)) ** 2 > x:
        low = np.nextafter(low, np.float32(0))
    return [low if rnd == "rz" else np.nextafter(low, np.float32(INF))]


# --- ex2, lg2 and friends -------------------------------------------------------------------------
def test_ex2_lg2():
    same(
        f32("ex2.approx.f32", [0.0, -0.0, 1.0, -1.0, INF, -INF, np.nan, 128.0, -126.0]),
        [1, 1, 2, 0.5, INF, 0.0, NAN, INF, TINY],
    )
    same(f32("ex2.approx.f32", [-127.0]), [SUB])
    same(f32("ex2.approx.ftz.f32", [-127.0, SUB, -200.0]), [0.0, 1.0, 0.0])
    same(f32("lg2.approx.f32", [1.0, 2.0, 0.0, -0.0, -1.0, INF, SUB]), [0.0, 1.0, -INF, -INF, NAN, INF, -127.0])
    same(f32("lg2.approx.ftz.f32", [SUB, 0.5]), [-INF, -1.0])
    x = np.linspace(-20, 20, 101).astype(np.float32)
    assert np.abs(f32("ex2.approx.ftz.f32", x) / np.exp2(x.astype(np.float64)) - 1).max() < 2 * ULP


def test_sin_cos_tanh():
    same(f32("sin.approx.f32", [0.0, -0.0, INF]), [0.0, -0.0, NAN])
    same(f32("cos.approx.f32", [0.0, INF]), [1.0, NAN])
    same(f32("tanh.approx.f32", [0.0, INF, -INF, -0.0, np.nan]), [0.0, 1.0, -1.0, -0.0, NAN])
    assert abs(f32("sin.approx.ftz.f32", [1.0])[0] - np.sin(1.0)) < 2.0**-20
    assert abs(f32("tanh.approx.f32", [0.5])[0] - np.tanh(0.5)) < 2.0**-11


# --- min, max, abs, neg, copysign, testp ----------------------------------------------------------
def test_min_max_nan_and_signed_zero():
    a, b = [0.0, -0.0, np.nan, 1.0, np.nan, -INF], [-0.0, 0.0, 2.0, np.nan, np.nan, 1.0]
    same(f32("min.f32", a, b), [-0.0, -0.0, 2.0, 1.0, NAN, -INF])
    same(f32("max.f32", a, b), [0.0, 0.0, 2.0, 1.0, NAN, 1.0])
    same(f32("min.NaN.f32", a, b), [-0.0, -0.0, NAN, NAN, NAN, -INF])
    same(f32("max.NaN.f32", a, b), [0.0, 0.0, NAN, NAN, NAN, 1.0])
    same(f32("max.ftz.f32", [SUB, -SUB], [-1.0, -0.0]), [0.0, -0.0])
    same(f32("max.f32", [1.0, 5.0], [3.0, 2.0], [2.0, np.nan]), [3.0, 5.0])  # three operands
    same(f32("max.xorsign.abs.f32", [-3.0, 2.0, -1.0], [2.0, 4.0, -5.0]), [-3.0, 4.0, 5.0])
    same(f32("min.xorsign.abs.f32", [-3.0, -1.0], [2.0, -5.0]), [-2.0, 1.0])


def test_abs_neg_copysign():
    same(f32("abs.f32", [-1.5, -0.0, -INF, -SUB]), [1.5, 0.0, INF, SUB])
    same(f32("abs.ftz.f32", [-SUB]), [0.0])
    same(f32("neg.f32", [1.5, 0.0, INF]), [-1.5, -0.0, -INF])
    same(f32("neg.ftz.f32", [SUB, -SUB]), [-0.0, 0.0])
    same(f32("copysign.f32", [-1.0, 0.0, -0.0], [2.0, -3.0, 4.0]), [-2.0, 3.0, -4.0])  # the sign of a on b


def test_testp():
    x = [1.0, INF, np.nan, SUB, 0.0]
    table = {
        "finite": [1, 0, 0, 1, 1],
        "infinite": [0, 1, 0, 0, 0],
        "number": [1, 1, 0, 1, 1],
        "notanumber": [0, 0, 1, 0, 0],
        "normal": [1, 0, 0, 0, 0],
        "subnormal": [0, 0, 0, 1, 0],
    }
    for name, expected in table.items():
        same(
            evaluate("testp.%s.f32 %%d, %%a;" % name, {"a": ("f32", x)}, {"d": "pred"}),
            np.array(expected, bool),
        )


@pytest.mark.parametrize("kind", ("f32", "f64"))
def test_setp_ordered_and_unordered(kind):
    a, b = [1, 2, 1, np.nan, 1, np.nan, -0.0], [2, 1, 1, 1, np.nan, np.nan, 0.0]
    ordered = {
        "eq": [0, 0, 1, 0, 0, 0, 1],
        "ne": [1, 1, 0, 0, 0, 0, 0],
        "lt": [1, 0, 0, 0, 0, 0, 0],
        "le": [1, 0, 1, 0, 0, 0, 1],
        "gt": [0, 1, 0, 0, 0, 0, 0],
        "ge": [0, 1, 1, 0, 0, 0, 1],
    }
    nan = np.array([0, 0, 0, 1, 1, 1, 0], bool)
    for name, expected in ordered.items():
        same(
            evaluate(
                "setp.%s.%s %%d, %%a, %%b;" % (name, kind), {"a": (kind, a), "b": (kind, b)}, {"d": "pred"}
            ),
            np.array(expected, bool),
        )
        same(
            evaluate(
                "setp.%su.%s %%d, %%a, %%b;" % (name, kind), {"a": (kind, a), "b": (kind, b)}, {"d": "pred"}
            ),
            np.array(expected, bool) | nan,
        )
    same(evaluate("setp.num.%s %%d, %%a, %%b;" % kind, {"a": (kind, a), "b": (kind, b)}, {"d": "pred"}), ~nan)
    same(evaluate("setp.nan.%s %%d, %%a, %%b;" % kind, {"a": (kind, a), "b": (kind, b)}, {"d": "pred"}), nan)


def test_setp_ftz():
    ins = {"a": ("f32", [SUB, SUB]), "b": ("f32", [0.0, -SUB])}
    same(evaluate("setp.gt.f32 %d, %a, %b;", ins, {"d": "pred"}), [True, True])
    same(evaluate("setp.gt.ftz.f32 %d, %a, %b;", ins, {"d": "pred"}), [False, False])
    same(evaluate("setp.eq.ftz.f32 %d, %a, %b;", ins, {"d": "pred"}), [True, True])


def test_packed_f32x2():
    pack = lambda lo, hi: np.float32([lo, hi]).view(np.uint64)
    ins = {
        "a": ("b64", pack(1 + ULP, 2)),
        "b": ("b64", pack(1 + ULP, 3)),
        "c": ("b64", pack(-(1 + 2 * ULP), 1)),
    }
    same(evaluate("fma.rn.f32x2 %d, %a, %b, %c;", ins, {"d": "b64"}, target="sm_100"), pack(ULP * ULP, 7))
    same(evaluate("add.rn.ftz.f32x2 %d, %b, %c;", ins, {"d": "b64"}, target="sm_100"), pack(-ULP, 4))
    same(
        evaluate(
            "mul.rn.f32x2 %d, %b, %c;",
            {"b": ("b64", pack(2, 3)), "c": ("b64", pack(-1, 5))},
            {"d": "b64"},
            target="sm_100",
        ),
        pack(-2, 15),
    )


def test_zero_sums_rounded_down():
    """Rounding down, a sum of zero is -0 but for (+0) + (+0)."""
    for kind in ("f32", "f64"):
        a, c = [1.0, -0.0, 0.0, 0.0, -0.0], [-1.0, 0.0, 0.0, -0.0, -0.0]
        inputs = {"a": (kind, a), "c": (kind, c)}
        expected = np.array([-0.0, -0.0, 0.0, -0.0, -0.0])
        same(evaluate("add.rm.%s %%d, %%a, %%c;" % kind, inputs, {"d": kind}), expected)
        one = "0f3F800000" if kind == "f32" else "0d3FF0000000000000"
        same(evaluate("fma.rm.%s %%d, %%a, %s, %%c;" % (kind, one), inputs, {"d": kind}), expected)
        inputs["c"] = (kind, [-v for v in c])
        same(evaluate("sub.rm.%s %%d, %%a, %%c;" % kind, inputs, {"d": kind}), expected)
