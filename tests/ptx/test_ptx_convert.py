"""cvt with every rounding, cvta, isspacep."""

import numpy as np
import pytest
from ptxsupport import bits32, bits64, evaluate, half, pair, same
from test_ptx_half import INF16, INFB, NAN, table

NAN32 = bits32(0x7FFFFFFF)[0]


def cvt(name, src, values, dst):
    return evaluate("cvt.%s %%d, %%a;" % name, {"a": (src, values)}, {"d": dst})


# --- integers -------------------------------------------------------------------------------------
def test_integer_width():
    same(cvt("s64.s32", "s32", [-1, 5], "s64"), [-1, 5])
    same(cvt("u64.u32", "u32", [0xFFFFFFFF], "u64"), [0xFFFFFFFF])
    same(cvt("u32.u64", "u64", [0x1_2345_6789], "u32"), [0x23456789])
    same(cvt("s32.s8", "s8", [-128, 127], "s32"), [-128, 127])
    same(cvt("u32.u8", "u8", [255], "u32"), [255])
    same(cvt("s32.s16", "s16", [-2], "s32"), [-2])
    same(cvt("u16.u32", "u32", [0x12345], "u16"), [0x2345])
    same(cvt("u32.s16", "s16", [-1], "u32"), [0xFFFFFFFF])
    # a narrow result in a wide register: extended by its own sign
    same(evaluate("cvt.s8.s32 %d, %a;", {"a": ("s32", [0x180, 0x7F])}, {"d": "s32"}), [-128, 127])
    same(evaluate("cvt.u8.u32 %d, %a;", {"a": ("u32", [0x1FF])}, {"d": "u32"}), [0xFF])


def test_integer_saturation():
    same(cvt("sat.s8.s32", "s32", [300, -300, 5], "s32"), [127, -128, 5])
    same(cvt("sat.u8.s32", "s32", [300, -300, 5], "u32"), [255, 0, 5])
    same(cvt("sat.u32.s32", "s32", [-1, 7], "u32"), [0, 7])
    same(cvt("sat.s32.u32", "u32", [0xFFFFFFFF, 7], "s32"), [2**31 - 1, 7])
    same(cvt("sat.s32.s64", "s64", [2**40, -(2**40)], "s32"), [2**31 - 1, -(2**31)])


# --- float to integer -----------------------------------------------------------------------------
def test_float_to_integer_rounding():
    x = [0.5, 1.5, 2.5, -0.5, -1.5, 1.2, -1.2, 1.8]
    same(cvt("rni.s32.f32", "f32", x, "s32"), [0, 2, 2, 0, -2, 1, -1, 2])
    same(cvt("rzi.s32.f32", "f32", x, "s32"), [0, 1, 2, 0, -1, 1, -1, 1])
    same(cvt("rmi.s32.f32", "f32", x, "s32"), [0, 1, 2, -1, -2, 1, -2, 1])
    same(cvt("rpi.s32.f32", "f32", x, "s32"), [1, 2, 3, 0, -1, 2, -1, 2])


def test_float_to_integer_clamps_and_nan():
    """Out of range clamps.  NaN is 0, but 1 << (bits-1) from f64 or to 64 bits."""
    x = [3e9, -3e9, np.inf, -np.inf, np.nan]
    same(cvt("rzi.s32.f32", "f32", x, "s32"), [2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0])
    same(cvt("rzi.u32.f32", "f32", [5e9, -1.0, np.nan, 3e9], "u32"), [2**32 - 1, 0, 0, 3000000000])
    same(cvt("rzi.s64.f32", "f32", [1e20, np.nan], "s64"), [2**63 - 1, -(2**63)])
    same(
        cvt("rzi.u64.f64", "f64", [1e20, -1.0, np.nan, 2.0**63], "u64"),
        np.array([2**64 - 1, 0, 2**63, 2**63], np.uint64),
    )
    same(cvt("rzi.s32.f64", "f64", [np.nan, -7.9], "s32"), [-(2**31), -7])
    same(cvt("rni.s8.f32", "f32", [200.0, -200.0], "s32"), [127, -128])
    same(cvt("rzi.s32.f16", "f16", half(2.75, -2.75), "s32"), [2, -2])
    same(cvt("rzi.s32.bf16", "bf16", [0x4030], "s32"), [2])
    same(cvt("rpi.ftz.s32.f32", "f32", [1e-40], "s32"), [0])
    same(cvt("rpi.s32.f32", "f32", [1e-40], "s32"), [1])


# --- integer to float -----------------------------------------------------------------------------
def test_integer_to_float_rounding():
    x = [2**24 + 1, 2**24 + 3, -(2**24 + 1)]
    same(cvt("rn.f32.s32", "s32", x, "f32"), [2.0**24, 2.0**24 + 4, -(2.0**24)])
    same(cvt("rz.f32.s32", "s32", x, "f32"), [2.0**24, 2.0**24 + 2, -(2.0**24)])
    same(cvt("rp.f32.s32", "s32", x, "f32"), [2.0**24 + 2, 2.0**24 + 4, -(2.0**24)])
    same(cvt("rm.f32.s32", "s32", x, "f32"), [2.0**24, 2.0**24 + 2, -(2.0**24) - 2])
    same(
        cvt("rn.f32.u64", "u64", np.array([2**64 - 1, 2**40 + 2**16 + 1], np.uint64), "f32"),
        [2.0**64, 2.0**40 + 2**17],
    )
    same(cvt("rz.f32.u64", "u64", np.array([2**64 - 1], np.uint64), "f32"), [2.0**64 - 2**40])
    same(cvt("rn.f64.s64", "s64", [2**53 + 1, -(2**53 + 3)], "f64"), [2.0**53, -(2.0**53 + 4)])
    same(cvt("rz.f64.s64", "s64", [2**53 + 1, -(2**53 + 3), 0], "f64"), [2.0**53, -(2.0**53 + 2), 0])
    same(cvt("rn.f16.s32", "s32", [2049, 70000, 2051], "f16"), [0x6800, INF16, 0x6802])
    same(cvt("rn.bf16.s32", "s32", [257, 259], "bf16"), [0x4380, 0x4382])
    same(cvt("rn.f16.u8", "u8", [200], "f16"), half(200))


# --- float to float -------------------------------------------------------------------------------
def bracket(x, kind):
    """Bit patterns of the format's neighbours below and above |x|, from the table of all its values."""
    values = table(kind)
    below = np.searchsorted(values, np.abs(x), side="right") - 1
    above = np.minimum(np.searchsorted(values, np.abs(x)), len(values))
    return below, above


@pytest.mark.parametrize("kind", ("f16", "bf16"))
@pytest.mark.parametrize("rnd", ("rn", "rz"))
def test_f32_to_half_by_the_table(kind, rnd):
    rng = np.random.default_rng(7)
    edge = table(kind)[[1, 2, 3, 500, -1]]
    mid = (edge[:-1] + table(kind)[[2, 3, 4, 501]]) / 2  # ties
    x = np.concatenate(
        [
            rng.standard_normal(300) * 2.0 ** rng.integers(-26, 17, 300),
            edge,
            mid,
            [0.0, 1e-9, 65519.0, 65520.0, 1e30],
        ]
    ).astype(np.float32)
    x = np.concatenate([x, -x])
    below, above = bracket(x.astype(np.float64), kind)
    top = len(table(kind))
    if rnd == "rz":
        expected = np.minimum(below, top - 1)
    else:
        values = np.append(
            table(kind), 2 * table(kind)[-1] - table(kind)[-2]
        )  # infinity rounds as the next step
        low, high = np.abs(x) - values[np.minimum(below, top)], values[np.minimum(above, top)] - np.abs(
            x
        ).astype(np.float64)
        expected = np.where((low < high) | ((low == high) & (below % 2 == 0)), below, above)
        expected = np.where(np.abs(x) >= values[-1], top, expected)
    expected = expected.astype(np.uint16) | np.where(np.signbit(x), 0x8000, 0).astype(np.uint16)
    same(cvt("%s.%s.f32" % (rnd, kind), "f32", x, kind), expected)


def test_half_special_values_and_packing():
    x = [np.inf, -np.inf, np.nan, -0.0]
    same(cvt("rn.f16.f32", "f32", x, "f16"), [INF16, INF16 | 0x8000, NAN, 0x8000])
    same(cvt("rn.bf16.f32", "f32", x, "bf16"), [INFB, INFB | 0x8000, NAN, 0x8000])
    same(cvt("rz.f16.f32", "f32", [1e6, -1e6], "f16"), [0x7BFF, 0xFBFF])
    same(cvt("rn.relu.f16.f32", "f32", [-1.0, 1.0, np.nan], "f16"), [0, 0x3C00, NAN])
    # the first operand goes to the upper half
    ins = {"a": ("f32", [1.0, np.nan]), "b": ("f32", [-2.0, 1 + 2.0**-8])}
    same(evaluate("cvt.rn.bf16x2.f32 %d, %a, %b;", ins, {"d": "b32"}), pair([0xC000, 0x3F80], [0x3F80, NAN]))
    same(evaluate("cvt.rn.f16x2.f32 %d, %a, %b;", ins, {"d": "b32"}), pair([0xC000, 0x3C04], [0x3C00, NAN]))
    same(evaluate("cvt.rn.relu.bf16x2.f32 %d, %a, %b;", ins, {"d": "b32"}), pair([0, 0x3F80], [0x3F80, NAN]))
    same(
        evaluate("cvt.rz.bf16x2.f32 %d, %a, %a;", {"a": ("f32", [1 + 2.0**-7 - 2.0**-20])}, {"d": "b32"}),
        pair([0x3F80], [0x3F80]),
    )


def test_widening_is_exact():
    same(cvt("f32.f16", "f16", [0x0001, 0x8000, INF16, NAN], "f32"), [2.0**-24, -0.0, np.inf, NAN32])
    same(cvt("f32.bf16", "bf16", [0x0001, 0x3F80], "f32"), [2.0**-133, 1.0])
    same(cvt("f64.f32", "f32", [1e-45, -0.0], "f64"), [np.float64(np.float32(1e-45)), -0.0])
    same(cvt("ftz.f64.f32", "f32", [1e-45], "f64"), [0.0])


@pytest.mark.parametrize(
    "rnd,expected",
    (
        ("rn", [1.0, 1 + 2.0**-22, -1.0]),
        ("rz", [1.0, 1 + 2.0**-23, -1.0]),
        ("rp", [1 + 2.0**-23, 1 + 2.0**-22, -1.0]),
        ("rm", [1.0, 1 + 2.0**-23, -1 - 2.0**-23]),
    ),
)
def test_f64_to_f32(rnd, expected):
    same(cvt("%s.f32.f64" % rnd, "f64", [1 + 2.0**-24, 1 + 3 * 2.0**-24, -1 - 2.0**-24], "f32"), expected)


def test_f64_to_f32_range():
    same(
        cvt("rn.f32.f64", "f64", [1e300, 1e-300, -1e-300, 2.0**-149, bits64(0x7FF0000000000001)[0]], "f32"),
        [np.inf, 0.0, -0.0, 2.0**-149, NAN32],
    )
    same(cvt("rz.f32.f64", "f64", [1e300], "f32"), [np.float32(3.4028234663852886e38)])
    same(cvt("rn.ftz.f32.f64", "f64", [2.0**-130], "f32"), [0.0])
    same(cvt("rn.f16.f64", "f64", [1 + 2.0**-11 + 2.0**-40], "f16"), [0x3C01])  # once, not through f32
    same(cvt("rn.sat.f32.f64", "f64", [2.0, -1.0], "f32"), [1.0, 0.0])


def test_round_to_integral_value():
    x = [0.5, 1.5, -0.5, -0.2, 2.5, np.inf]
    same(cvt("rni.f32.f32", "f32", x, "f32"), [0.0, 2.0, -0.0, -0.0, 2.0, np.inf])
    same(cvt("rmi.f32.f32", "f32", x, "f32"), [0.0, 1.0, -1.0, -1.0, 2.0, np.inf])
    same(cvt("rpi.f32.f32", "f32", x, "f32"), [1.0, 2.0, -0.0, -0.0, 3.0, np.inf])
    same(cvt("rzi.f64.f64", "f64", [-1.7], "f64"), [-1.0])
    same(cvt("sat.f32.f32", "f32", [2.0, -1.0, 0.5, np.nan], "f32"), [1.0, 0.0, 0.5, 0.0])


def test_tf32():
    """Ten bits of mantissa; rna: ties away from zero."""
    one = 0x3F800000
    x = bits32(one | 0x0FFF, one | 0x1000, one | 0x1001, one | 0x3000, one | 0x80001000, 0x7F800000)
    same(
        cvt("rna.tf32.f32", "f32", x, "b32"),
        [one, one | 0x2000, one | 0x2000, one | 0x4000, 0xBF802000, 0x7F800000],
    )
    same(cvt("rn.tf32.f32", "f32", x, "b32"), [one, one, one | 0x2000, one | 0x4000, 0xBF800000, 0x7F800000])
    same(cvt("rz.tf32.f32", "f32", x, "b32"), [one, one, one, one | 0x2000, 0xBF800000, 0x7F800000])
    same(cvt("rna.tf32.f32", "f32", [np.nan], "b32"), [0x7FFFFFFF])


def test_cvta_and_isspacep():
    code = """.shared .align 16 .b8 buffer[64]; .reg .b64 %g, %s; mov.u64 %s, buffer; add.u64 %s, %s, 8;
              cvta.shared.u64 %g, %s; isspacep.shared %p, %g; isspacep.global %q, %g; isspacep.local %r, %g;
              cvta.to.shared.u64 %d, %g; st.b32 [%g], 77; ld.shared.b32 %e, [buffer+8];"""
    out = evaluate(code, {"a": ("b32", [1])}, {"p": "pred", "q": "pred", "r": "pred", "d": "u64", "e": "b32"})
    assert out["p"][0] and not out["q"][0] and not out["r"][0] and out["d"][0] == 8 and out["e"][0] == 77
    same(evaluate("isspacep.global %p, %addr_;", {"a": ("b32", [1])}, {"p": "pred"}), [True])
    code = ".local .align 8 .b8 mine[16]; .reg .b64 %g, %l; mov.u64 %l, mine; cvta.local.u64 %g, %l; st.u32 [%g+4], %a; ld.local.u32 %d, [mine+4]; isspacep.local %p, %g;"
    out = evaluate(code, {"a": ("u32", [3, 4])}, {"d": "u32", "p": "pred"})
    same(out["d"], [3, 4])
    assert out["p"].all()
