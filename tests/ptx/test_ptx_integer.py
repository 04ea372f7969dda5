"""Integer, logic, shift, selection and move instructions against values worked out from the PTX manual."""

import numpy as np
import pytest
from ptxmachine.parser import PtxError
from ptxsupport import evaluate, same

MAX, MIN = 2**31 - 1, -(2**31)
U = 0xFFFFFFFF
A, B = [0, 1, -1, MAX, MIN, MIN, 7, -7, 7, -7], [0, -1, -1, 1, -1, 1, 2, 2, -2, -2]


def s32(op, a=A, b=B):
    return evaluate(op + " %d, %a, %b;", {"a": ("s32", a), "b": ("s32", b)}, {"d": "s32"})


def wrap(values, bits=32):
    values = [v & (1 << bits) - 1 for v in values]
    return np.array(values, "u%d" % (bits // 8)).view("i%d" % (bits // 8))


def test_add_sub_wrap():
    same(s32("add.s32"), wrap([a + b for a, b in zip(A, B)]))
    same(s32("sub.s32"), wrap([a - b for a, b in zip(A, B)]))


def test_add_sub_saturate():
    clip = lambda v: max(MIN, min(MAX, v))
    same(s32("add.sat.s32"), [clip(a + b) for a, b in zip(A, B)])
    same(s32("sub.sat.s32"), [clip(a - b) for a, b in zip(A, B)])


def test_add_16_and_64_bits():
    same(
        evaluate("add.u16 %d, %a, %b;", {"a": ("u16", [0xFFFF, 1]), "b": ("u16", [1, 2])}, {"d": "u16"}), [0, 3]
    )
    same(
        evaluate("add.s64 %d, %a, %b;", {"a": ("s64", [2**63 - 1, -1]), "b": ("s64", [1, -1])}, {"d": "s64"}),
        [-(2**63), -2],
    )
    same(evaluate("sub.u64 %d, %a, 1;", {"a": ("u64", [0, 5])}, {"d": "u64"}), [2**64 - 1, 4])


def test_packed_add_min_max():
    a = {"a": ("b32", [0x0001FFFF, 0x7FFF8000]), "b": ("b32", [0x00010001, 0x00010001])}
    same(evaluate("add.u16x2 %d, %a, %b;", a, {"d": "b32"}), [0x00020000, 0x80008001])
    same(evaluate("min.s16x2 %d, %a, %b;", a, {"d": "b32"}), [0x0001FFFF, 0x00018000])
    same(evaluate("max.u16x2 %d, %a, %b;", a, {"d": "b32"}), [0x0001FFFF, 0x7FFF8000])


@pytest.mark.parametrize("bits", (32, 64))
def test_carry_chain(bits):
    """add.cc / addc and sub.cc / subc on pairs of words equal the arithmetic of twice the width."""
    full, half = 1 << 2 * bits, 1 << bits
    rng = np.random.default_rng(1)
    xs = [0, 1, half - 1, half, full - 1, full // 2] + [
        int.from_bytes(rng.bytes(bits // 4), "little") for _ in range(20)
    ]
    ys = [full - 1, half - 1, 1, half, full - 1, 1] + [
        int.from_bytes(rng.bytes(bits // 4), "little") for _ in range(20)
    ]
    k = "u%d" % bits
    ins = {
        "a": (k, [x % half for x in xs]),
        "b": (k, [x // half for x in xs]),
        "c": (k, [y % half for y in ys]),
        "e": (k, [y // half for y in ys]),
    }
    code = "add.cc.{0} %l, %a, %c; addc.{0} %h, %b, %e; sub.cc.{0} %m, %a, %c; subc.cc.{0} %n, %b, %e; subc.{0} %o, 0, 0;".format(
        k
    )
    out = evaluate(
        code,
        {n: (k, np.array(v, np.uint64)) for n, (_, v) in ins.items()},
        {"l": k, "h": k, "m": k, "n": k, "o": k},
    )
    for i, (x, y) in enumerate(zip(xs, ys)):
        assert int(out["l"][i]) + half * int(out["h"][i]) == (x + y) % full
        assert int(out["m"][i]) + half * int(out["n"][i]) == (x - y) % full
        assert int(out["o"][i]) == (half - 1 if x < y else 0)  # the last borrow


def test_mad_carry():
    code = "mad.lo.cc.u32 %l, %a, %b, %c; madc.hi.u32 %h, %a, %b, %e; mad.hi.cc.u32 %m, %a, %b, %c; madc.lo.cc.u32 %n, %a, %b, %e;"
    a, b, c, e = [U, 5, 0x80000000], [U, 7, 2], [U, 1, U], [U, 0, 3]
    out = evaluate(
        code, {"a": ("u32", a), "b": ("u32", b), "c": ("u32", c), "e": ("u32", e)}, dict.fromkeys("lhmn", "u32")
    )
    for i in range(3):
        low = (a[i] * b[i] % 2**32) + c[i]
        assert out["l"][i] == low % 2**32
        assert out["h"][i] == (a[i] * b[i] // 2**32 + e[i] + low // 2**32) % 2**32
        high = a[i] * b[i] // 2**32 + c[i]
        assert out["m"][i] == high % 2**32
        assert out["n"][i] == (a[i] * b[i] + e[i] + high // 2**32) % 2**32


@pytest.mark.parametrize("kind", ("u16", "s16", "u32", "s32", "u64", "s64"))
def test_mul_lo_hi_wide_mad(kind):
    bits, signed = int(kind[1:]), kind[0] == "s"
    edge = [0, 1, 2, 3, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1, 0x1234 % (1 << bits)]
    a, b = [x for x in edge for _ in edge], [y for _ in edge for y in edge]
    value = lambda v: v - (1 << bits) if signed and v >> bits - 1 else v
    pack = lambda vs, w=bits: np.array([v & (1 << w) - 1 for v in vs], "u%d" % (w // 8)).view(
        ("i" if signed else "u") + str(w // 8)
    )
    ins = {"a": (kind, pack(a)), "b": (kind, pack(b))}
    products = [value(x) * value(y) for x, y in zip(a, b)]
    same(evaluate("mul.lo.%s %%d, %%a, %%b;" % kind, ins, {"d": kind}), pack(products))
    same(evaluate("mul.hi.%s %%d, %%a, %%b;" % kind, ins, {"d": kind}), pack([p >> bits for p in products]))
    same(
        evaluate("mad.lo.%s %%d, %%a, %%b, %%a;" % kind, ins, {"d": kind}),
        pack([p + x for p, x in zip(products, a)]),
    )
    same(
        evaluate("mad.hi.%s %%d, %%a, %%b, %%b;" % kind, ins, {"d": kind}),
        pack([(p >> bits) + y for p, y in zip(products, b)]),
    )
    if bits < 64:
        wide = kind[0] + str(2 * bits)
        same(evaluate("mul.wide.%s %%d, %%a, %%b;" % kind, ins, {"d": wide}), pack(products, 2 * bits))
        same(
            evaluate("mad.wide.%s %%d, %%a, %%b, 1;" % kind, ins, {"d": wide}),
            pack([p + 1 for p in products], 2 * bits),
        )


def test_mul24_mad24_sad():
    a, b = [0x01FFFFFF, 0x00800000, 3], [2, 2, 5]
    same(
        evaluate("mul24.lo.u32 %d, %a, %b;", {"a": ("u32", a), "b": ("u32", b)}, {"d": "u32"}),
        [0x1FFFFFE, 0x1000000, 15],
    )
    same(
        evaluate("mul24.lo.s32 %d, %a, %b;", {"a": ("s32", a), "b": ("s32", b)}, {"d": "s32"}),
        [-2, -0x1000000, 15],
    )
    same(
        evaluate(
            "mul24.hi.s32 %d, %a, %b;", {"a": ("s32", [0x00800000]), "b": ("s32", [0x00800000])}, {"d": "s32"}
        ),
        [0x40000000],
    )
    same(
        evaluate("mad24.lo.s32 %d, %a, %b, 1;", {"a": ("s32", a), "b": ("s32", b)}, {"d": "s32"}),
        [-1, -0xFFFFFF, 16],
    )
    same(
        evaluate(
            "sad.s32 %d, %a, %b, 10;", {"a": ("s32", [3, -5, MIN]), "b": ("s32", [5, 5, MIN])}, {"d": "s32"}
        ),
        [12, 20, 10],
    )
    same(evaluate("sad.u32 %d, %a, %b, 0;", {"a": ("u32", [3, U]), "b": ("u32", [5, 0])}, {"d": "u32"}), [2, U])


def test_dp4a_dp2a():
    same(
        evaluate(
            "dp4a.s32.s32 %d, %a, %b, %c;",
            {"a": ("b32", [0xFF010203]), "b": ("b32", [0x02030405]), "c": ("b32", [10])},
            {"d": "s32"},
        ),
        [-1 * 2 + 1 * 3 + 2 * 4 + 3 * 5 + 10],
    )
    same(
        evaluate(
            "dp4a.u32.u32 %d, %a, %b, 0;",
            {"a": ("b32", [0xFF010203]), "b": ("b32", [0x02030405])},
            {"d": "u32"},
        ),
        [255 * 2 + 3 + 8 + 15],
    )
    same(
        evaluate(
            "dp2a.lo.s32.s32 %d, %a, %b, 0;",
            {"a": ("b32", [0xFFFE0003]), "b": ("b32", [0x0A0B0405])},
            {"d": "s32"},
        ),
        [-2 * 4 + 3 * 5],
    )
    same(
        evaluate(
            "dp2a.hi.s32.u32 %d, %a, %b, 0;",
            {"a": ("b32", [0xFFFE0003]), "b": ("b32", [0xFF0B0405])},
            {"d": "s32"},
        ),
        [-2 * 255 + 3 * 11],
    )


def test_div_rem_cut_towards_zero():
    a, b = [7, -7, 7, -7, MIN, MIN, 0, 5], [2, 2, -2, -2, -1, 1, 3, 7]
    same(s32("div.s32", a, b), [3, -3, -3, 3, MIN, MIN, 0, 0])
    same(s32("rem.s32", a, b), [1, -1, 1, -1, 0, 0, 0, 5])
    same(evaluate("div.u32 %d, %a, %b;", {"a": ("u32", [U, 7]), "b": ("u32", [2, U])}, {"d": "u32"}), [MAX, 0])
    same(
        evaluate("div.s64 %d, %a, %b;", {"a": ("s64", [-(2**63), -9]), "b": ("s64", [-1, 4])}, {"d": "s64"}),
        [-(2**63), -2],
    )
    same(
        evaluate(
            "rem.u64 %d, %a, %b;",
            {"a": ("u64", np.array([2**64 - 1, 10], np.uint64)), "b": ("u64", [10, 3])},
            {"d": "u64"},
        ),
        [5, 1],
    )


def test_abs_neg_min_max():
    same(evaluate("abs.s32 %d, %a;", {"a": ("s32", [-5, 5, MIN])}, {"d": "s32"}), [5, 5, MIN])
    same(evaluate("neg.s32 %d, %a;", {"a": ("s32", [-5, 5, MIN, 0])}, {"d": "s32"}), [5, -5, MIN, 0])
    same(evaluate("neg.s64 %d, %a;", {"a": ("s64", [-5])}, {"d": "s64"}), [5])
    same(s32("min.s32"), np.minimum(A, B))
    same(s32("max.s32"), np.maximum(A, B))
    same(evaluate("min.u32 %d, %a, %b;", {"a": ("u32", [U]), "b": ("u32", [1])}, {"d": "u32"}), [1])
    same(s32("max.relu.s32", [-3, 4], [-5, 2]), [0, 4])


def test_logic():
    a = {"a": ("b32", [0b1100, U, 0]), "b": ("b32", [0b1010, 0xF0F0F0F0, 0])}
    same(evaluate("and.b32 %d, %a, %b;", a, {"d": "b32"}), [0b1000, 0xF0F0F0F0, 0])
    same(evaluate("or.b32 %d, %a, %b;", a, {"d": "b32"}), [0b1110, U, 0])
    same(evaluate("xor.b32 %d, %a, %b;", a, {"d": "b32"}), [0b0110, 0x0F0F0F0F, 0])
    same(evaluate("not.b32 %d, %a;", a, {"d": "b32"}), [0xFFFFFFF3, 0, U])
    same(evaluate("cnot.b32 %d, %a;", a, {"d": "b32"}), [0, 0, 1])
    p = {"a": ("pred", [0, 0, 1, 1]), "b": ("pred", [0, 1, 0, 1])}
    same(evaluate("and.pred %d, %a, %b;", p, {"d": "pred"}), [False, False, False, True])
    same(evaluate("or.pred %d, %a, !%b;", p, {"d": "pred"}), [True, False, True, True])
    same(evaluate("xor.pred %d, %a, %b;", p, {"d": "pred"}), [False, True, True, False])
    same(evaluate("not.pred %d, %a;", p, {"d": "pred"}), [True, True, False, False])


@pytest.mark.parametrize("amount", (0, 1, 31, 32, 33, 255, 0x80000000, U))
def test_shift_amounts_are_clamped(amount):
    x = 0x80000001
    for immediate in (True, False):
        operand = str(amount) if immediate else "%n"
        ins = {"a": ("b32", [x]), "n": ("u32", [amount])}
        same(
            evaluate("shl.b32 %%d, %%a, %s;" % operand, ins, {"d": "b32"}),
            [x << amount & U if amount < 32 else 0],
        )
        same(
            evaluate("shr.u32 %%d, %%a, %s;" % operand, ins, {"d": "b32"}), [x >> amount if amount < 32 else 0]
        )
        same(evaluate("shr.s32 %%d, %%a, %s;" % operand, ins, {"d": "s32"}), [(x - 2**32) >> min(amount, 31)])


def test_shift_64_and_16():
    ins = {"a": ("b64", np.array([2**63 + 1] * 4, np.uint64)), "n": ("u32", [0, 63, 64, 1000])}
    same(evaluate("shl.b64 %d, %a, %n;", ins, {"d": "b64"}), np.array([2**63 + 1, 2**63, 0, 0], np.uint64))
    same(evaluate("shr.u64 %d, %a, %n;", ins, {"d": "b64"}), np.array([2**63 + 1, 1, 0, 0], np.uint64))
    same(evaluate("shr.s64 %d, %a, %n;", ins, {"d": "s64"}), [-(2**63) + 1, -1, -1, -1])
    same(
        evaluate("shr.s16 %d, %a, %n;", {"a": ("s16", [-4, -4]), "n": ("u32", [1, 16])}, {"d": "s16"}), [-2, -1]
    )


def test_funnel_shift():
    ins = {"a": ("b32", [0x89ABCDEF] * 5), "b": ("b32", [0x01234567] * 5), "n": ("b32", [0, 4, 31, 32, 36])}
    both = 0x0123456789ABCDEF
    same(
        evaluate("shf.l.wrap.b32 %d, %a, %b, %n;", ins, {"d": "b32"}),
        [both << (n & 31) >> 32 & U for n in (0, 4, 31, 32, 36)],
    )
    same(
        evaluate("shf.l.clamp.b32 %d, %a, %b, %n;", ins, {"d": "b32"}),
        [both << min(n, 32) >> 32 & U for n in (0, 4, 31, 32, 36)],
    )
    same(
        evaluate("shf.r.wrap.b32 %d, %a, %b, %n;", ins, {"d": "b32"}),
        [both >> (n & 31) & U for n in (0, 4, 31, 32, 36)],
    )
    same(
        evaluate("shf.r.clamp.b32 %d, %a, %b, %n;", ins, {"d": "b32"}),
        [both >> min(n, 32) & U for n in (0, 4, 31, 32, 36)],
    )


@pytest.mark.parametrize("table", (0x00, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x1B, 0xFF))
def test_lop3(table):
    a, b, c = 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA
    expected = sum(
        ((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i) for i in range(32)
    )
    same(
        evaluate(
            "lop3.b32 %%d, %%a, %%b, %%c, %d;" % table,
            {"a": ("b32", [a]), "b": ("b32", [b]), "c": ("b32", [c])},
            {"d": "b32"},
        ),
        [expected],
    )


def test_counting_bits():
    x = [0, 1, 0x80000000, U, 0x00F0]
    same(evaluate("popc.b32 %d, %a;", {"a": ("b32", x)}, {"d": "u32"}), [0, 1, 1, 32, 4])
    same(evaluate("clz.b32 %d, %a;", {"a": ("b32", x)}, {"d": "u32"}), [32, 31, 0, 0, 24])
    same(evaluate("brev.b32 %d, %a;", {"a": ("b32", x)}, {"d": "b32"}), [0, 0x80000000, 1, U, 0x0F000000])
    same(evaluate("bfind.u32 %d, %a;", {"a": ("u32", x)}, {"d": "u32"}), [U, 0, 31, 31, 7])
    same(evaluate("bfind.s32 %d, %a;", {"a": ("s32", [0, 1, MIN, -1, -2])}, {"d": "u32"}), [U, 0, 30, U, 0])
    same(evaluate("bfind.shiftamt.u32 %d, %a;", {"a": ("u32", x)}, {"d": "u32"}), [U, 31, 0, 0, 24])
    y = np.array([0, 2**63, 2**64 - 1], np.uint64)
    same(evaluate("popc.b64 %d, %a;", {"a": ("b64", y)}, {"d": "u32"}), [0, 1, 64])
    same(evaluate("clz.b64 %d, %a;", {"a": ("b64", y)}, {"d": "u32"}), [64, 0, 0])
    same(evaluate("brev.b64 %d, %a;", {"a": ("b64", y)}, {"d": "b64"}), np.array([0, 1, 2**64 - 1], np.uint64))


def test_bit_field_extract():
    ins = {
        "a": ("u32", [0xABCD1234] * 7),
        "p": ("u32", [0, 4, 28, 32, 0, 16, 30]),
        "n": ("u32", [4, 8, 8, 4, 0, 32, 1]),
    }
    same(evaluate("bfe.u32 %d, %a, %p, %n;", ins, {"d": "u32"}), [4, 0x23, 0xA, 0, 0, 0xABCD, 0])
    ins["a"] = ("s32", np.array([0xABCD1234] * 7, np.uint32).view(np.int32))
    # The sign is bit min(pos+len-1, 31); beyond the top all bits are the sign; len 0 gives 0.
    same(evaluate("bfe.s32 %d, %a, %p, %n;", ins, {"d": "s32"}), [4, 0x23, -6, -1, 0, -0x5433, 0])
    same(evaluate("bfe.s64 %d, %a, 60, 4;", {"a": ("s64", [-(2**63), 0x5 << 60])}, {"d": "s64"}), [-8, 5])


def test_bit_field_insert():
    ins = {
        "a": ("b32", [0xF] * 5),
        "b": ("b32", [0] * 5),
        "p": ("u32", [0, 4, 30, 32, 4]),
        "n": ("u32", [4, 2, 4, 4, 0]),
    }
    same(evaluate("bfi.b32 %d, %a, %b, %p, %n;", ins, {"d": "b32"}), [0xF, 0x30, 0xC0000000, 0, 0])
    same(
        evaluate(
            "bfi.b64 %d, %a, %b, 8, 8;",
            {"a": ("b64", [0xAB]), "b": ("b64", np.array([2**64 - 1], np.uint64))},
            {"d": "b64"},
        ),
        np.array([0xFFFFFFFFFFFFABFF], np.uint64),
    )


def test_prmt():
    a, b = 0x33221100, 0x77665584
    ins = {"a": ("b32", [a] * 4), "b": ("b32", [b] * 4), "s": ("b32", [0x3210, 0x7654, 0x0426, 0xCCC8])}
    # bit 3 of a selector replicates the sign of the byte: byte 4 is 0x84 (negative), byte 0 is 0x00
    same(evaluate("prmt.b32 %d, %a, %b, %s;", ins, {"d": "b32"}), [a, b, 0x00842266, 0xFFFFFF00])
    modes = {
        "f4e": [0x33221100, 0x84332211, 0x55843322, 0x66558433],
        "b4e": [0x55667700, 0x66770011, 0x77001122, 0x00112233],
        "rc8": [0x00000000, 0x11111111, 0x22222222, 0x33333333],
        "ecl": [0x33221100, 0x33221111, 0x33222222, 0x33333333],
        "ecr": [0x00000000, 0x11111100, 0x22221100, 0x33221100],
        "rc16": [0x11001100, 0x33223322, 0x11001100, 0x33223322],
    }
    for mode, expected in modes.items():
        got = evaluate(
            "prmt.b32.%s %%d, %%a, %%b, %%s;" % mode,
            {"a": ("b32", [a] * 4), "b": ("b32", [b] * 4), "s": ("b32", [0, 1, 2, 3])},
            {"d": "b32"},
        )
        same(got, expected)


@pytest.mark.parametrize(
    "name,test",
    [
        ("eq", lambda a, b: a == b),
        ("ne", lambda a, b: a != b),
        ("lt", lambda a, b: a < b),
        ("le", lambda a, b: a <= b),
        ("gt", lambda a, b: a > b),
        ("ge", lambda a, b: a >= b),
    ],
)
def test_setp_integers(name, test):
    a = np.array([0, 1, -1, MAX, MIN, 5], np.int32)
    b = np.array([0, -1, 1, MIN, MAX, 5], np.int32)
    same(
        evaluate("setp.%s.s32 %%d, %%a, %%b;" % name, {"a": ("s32", a), "b": ("s32", b)}, {"d": "pred"}),
        test(a, b),
    )
    ua, ub = a.view(np.uint32), b.view(np.uint32)
    same(
        evaluate("setp.%s.u32 %%d, %%a, %%b;" % name, {"a": ("u32", ua), "b": ("u32", ub)}, {"d": "pred"}),
        test(ua, ub),
    )
    unsigned = {"lt": "lo", "le": "ls", "gt": "hi", "ge": "hs"}.get(name)
    if unsigned:
        same(
            evaluate(
                "setp.%s.u32 %%d, %%a, %%b;" % unsigned, {"a": ("u32", ua), "b": ("u32", ub)}, {"d": "pred"}
            ),
            test(ua, ub),
        )


def test_setp_two_results_and_combination():
    ins = {"a": ("s32", [1, 2, 3, 4]), "c": ("pred", [1, 0, 1, 0])}
    out = evaluate("setp.lt.and.s32 %p|%q, %a, 3, %c;", ins, {"p": "pred", "q": "pred"})
    same(out["p"], [True, False, False, False])
    same(out["q"], [False, False, True, False])
    out = evaluate("setp.lt.or.s32 %p|%q, %a, 3, !%c;", ins, {"p": "pred", "q": "pred"})
    same(out["p"], [True, True, False, True])
    same(out["q"], [False, True, True, True])
    same(evaluate("setp.eq.xor.s32 %p, %a, 3, %c;", ins, {"p": "pred"}), [True, False, False, False])


def test_set_selp_slct():
    same(evaluate("set.lt.u32.s32 %d, %a, 0;", {"a": ("s32", [-1, 0, 1])}, {"d": "u32"}), [U, 0, 0])
    same(
        evaluate(
            "set.ge.and.f32.s32 %d, %a, 0, %p;",
            {"a": ("s32", [-1, 0, 1]), "p": ("pred", [1, 1, 0])},
            {"d": "f32"},
        ),
        [0, 1, 0],
    )
    same(
        evaluate("selp.b32 %d, %a, 9, %p;", {"a": ("b32", [1, 2]), "p": ("pred", [1, 0])}, {"d": "b32"}), [1, 9]
    )
    same(
        evaluate(
            "selp.f64 %d, %a, %b, %p;",
            {"a": ("f64", [1.5, 2]), "b": ("f64", [-0.0, 4]), "p": ("pred", [0, 1])},
            {"d": "f64"},
        ),
        [-0.0, 2],
    )
    same(
        evaluate(
            "slct.b32.s32 %d, %a, %b, %c;",
            {"a": ("b32", [1] * 3), "b": ("b32", [2] * 3), "c": ("s32", [0, 5, -1])},
            {"d": "b32"},
        ),
        [1, 1, 2],
    )
    c = np.array([0.0, -0.0, np.nan, -1e-40, 1.0], np.float32)
    same(evaluate("slct.b32.f32 %d, 1, 2, %c;", {"c": ("f32", c)}, {"d": "b32"}), [1, 1, 2, 2, 1])
    same(evaluate("slct.ftz.b32.f32 %d, 1, 2, %c;", {"c": ("f32", c)}, {"d": "b32"}), [1, 1, 2, 1, 1])


def test_mov_and_packing():
    same(evaluate("mov.b32 %d, %a;", {"a": ("b32", [5, U])}, {"d": "b32"}), [5, U])
    same(evaluate("mov.f32 %d, 0fBF800000;", {"a": ("b32", [5])}, {"d": "f32"}), [-1.0])
    same(evaluate("mov.f64 %d, 0d3FF0000000000000;", {"a": ("b32", [5])}, {"d": "f64"}), [1.0])
    same(evaluate("mov.pred %d, %a;", {"a": ("pred", [0, 1])}, {"d": "pred"}), [False, True])
    same(evaluate("mov.b64 %d, {%a, %b};", {"a": ("b32", [1]), "b": ("b32", [2])}, {"d": "b64"}), [2 << 32 | 1])
    same(evaluate("mov.b32 %d, {%a, %b};", {"a": ("b16", [1]), "b": ("b16", [2])}, {"d": "b32"}), [2 << 16 | 1])
    out = evaluate("mov.b64 {%l, %h}, %a;", {"a": ("b64", [2 << 32 | 1])}, {"l": "b32", "h": "b32"})
    assert (out["l"][0], out["h"][0]) == (1, 2)
    out = evaluate("mov.b32 {%l, %h}, %a;", {"a": ("b32", [0xABCD1234])}, {"l": "b16", "h": "b16"})
    assert (out["l"][0], out["h"][0]) == (0x1234, 0xABCD)
    same(evaluate("mov.b64 {%l, _}, %a;", {"a": ("b64", [2 << 32 | 1])}, {"l": "b32"}), [1])
    same(
        evaluate(
            "mov.b64 {%a, %b}, %c; mov.b64 %d, {%b, %a};",
            {"c": ("b64", [2 << 32 | 1]), "a": ("b32", [0]), "b": ("b32", [0])},
            {"d": "b64"},
        ),
        [1 << 32 | 2],
    )


def test_unknown_instruction_and_modifier_name_their_line():
    with pytest.raises(PtxError, match=r"PTX line \d+: unknown instruction vadd\.s32"):
        evaluate("vadd.s32 %d, %a, %a;", {"a": ("s32", [1])}, {"d": "s32"})
    with pytest.raises(PtxError, match=r"PTX line \d+: unknown modifier \.foo"):
        evaluate("add.foo.s32 %d, %a, %a;", {"a": ("s32", [1])}, {"d": "s32"})
