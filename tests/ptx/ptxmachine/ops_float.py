"""Floating-point instructions: f32, f64, f16, bf16 and their packed pairs."""

import numpy as np

from . import floats as F
from .binding import instruction, only, put, unknown

FLOAT_BUILDERS = {}
ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
HALF = {"f16": (F.f16_to_32, F.to_f16), "bf16": (F.bf16_to_32, F.to_bf16)}


def floating(*names):
    """Register the float builder behind an opcode that integers share."""

    def register(builder):
        for name in names:
            FLOAT_BUILDERS[name] = builder
        return builder

    return register


def rounding(ins):
    return next((m for m in ins.mods if m in ROUNDINGS), "rn")


def build(b, ins, single, double=None, half=None, args=None):
    """Build d = f(a, ...) from `single(values, rnd)` on float32, `double` on float64 and `half` on float32 → bits.

    `half(values, fmt, rnd)` returns bits of the format; f16x2 and bf16x2 run it on both halves.
    """
    kind = ins.mods[-1]
    operands = ins.args[1:] if args is None else args
    ftz, sat, relu, rnd = "ftz" in ins.mods, "sat" in ins.mods, "relu" in ins.mods, rounding(ins)
    if kind in ("f32", "f32x2") and single is not None:
        return _single(b, ins, single, operands, ftz, sat, relu, rnd, kind == "f32x2")
    if kind == "f64" and double is not None and not (ftz and ins.op not in ("rcp", "rsqrt")):
        values, target = [b.source(a, "f64") for a in operands], b.target(ins.args[0], "f64")

        def run64(g):
            out = np.atleast_1d(double(values, rnd))
            nan = np.isnan(out)
            put(target, np.where(nan, F.NAN64.view(np.float64), out) if nan.any() else out, g.where)

        return run64
    if kind in ("f16", "bf16", "f16x2", "bf16x2") and half is not None:
        return _half(b, ins, half, operands, ftz, sat, relu, rnd)
    raise unknown(ins)


def _single(b, ins, single, operands, ftz, sat, relu, rnd, pair):
    if pair:
        raw = [b.source(a, "b64") for a in operands]
        whole = b.target(ins.args[0], "b64")
        values = [
            v.view(np.float32) if v.ndim else np.tile(np.atleast_1d(v).view(np.float32), b.total) for v in raw
        ]
    else:
        values = [b.source(a, "f32") for a in operands]
        target = b.target(ins.args[0], "f32")
        if all(v.ndim == 0 for v in values):
            values[0] = np.full(b.total, values[0])

    def run(g):
        arguments = [F.flush32(v) for v in values] if ftz else values
        out = single(arguments, rnd)
        if ftz:
            out = F.flush32(out)
        if sat:
            out = F.saturate(out)
        if relu:
            out = np.where(out > 0, out, np.where(np.isnan(out), out, np.float32(0)))
        out = F.canonical32(out)
        if pair:
            put(whole, np.ascontiguousarray(out).view(np.uint64), g.where)
        else:
            put(target, out, g.where)

    return run


def _flush_half(bits, fmt):
    """Flush subnormal f16 or bf16 bits to signed zero."""
    exponent = np.uint16(0x7C00 if fmt == "f16" else 0x7F80)
    return np.where(bits & exponent, bits, bits & np.uint16(0x8000))


def half_sources(b, operands, kind):
    """Return arrays of f16/bf16 bits: (lanes,) or, for pairs, (2·lanes,)."""
    if kind.endswith("x2"):
        raw = [b.source(a, "b32") for a in operands]
        return [
            v.view(np.uint16) if v.ndim else np.tile(np.atleast_1d(v).view(np.uint16), b.total) for v in raw
        ]
    return [v if v.ndim else np.full(b.total, v) for v in (b.source(a, kind) for a in operands)]


def _half(b, ins, half, operands, ftz, sat, relu, rnd):
    kind = ins.mods[-1]
    fmt = kind.replace("x2", "")
    widen = HALF[fmt][0]
    values = half_sources(b, operands, kind)
    target = b.target(ins.args[0], "b32" if kind.endswith("x2") else "b16")

    def run(g):
        bits = [_flush_half(v, fmt) for v in values] if ftz else values
        out = half([widen(np.ascontiguousarray(v)) for v in bits], fmt, rnd)
        if ftz:
            out = _flush_half(out, fmt)
        if sat or relu:
            x = widen(out)
            x = F.saturate(x) if sat else np.where(np.isnan(x), x, np.maximum(x, np.float32(0)))
            out = HALF[fmt][1](x + np.float32(0))
        put(target, np.ascontiguousarray(out).view(target.dtype), g.where)

    return run


def _round_half(function):
    """Make a `half` from an operation whose float32 result rounds once more without harm."""
    return lambda values, fmt, rnd: HALF[fmt][1](function(*values), rnd)


# --- arithmetic -----------------------------------------------------------------------------------
UFUNC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


@floating("add", "sub", "mul")
def add_sub_mul(b, ins):
    only(ins, "ftz", "sat", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2", *ROUNDINGS)
    ufunc, op = UFUNC[ins.op], ins.op

    def single(values, rnd):
        return ufunc(*values) if rnd == "rn" else F.directed32(op, *values, rnd)

    def double(values, rnd):
        return ufunc(*values) if rnd == "rn" else F.directed64(op, *values, rnd)

    return build(b, ins, single, double, _round_half(ufunc))


@instruction("fma")
@floating("mad")
def fma(b, ins):
    only(ins, "ftz", "sat", "relu", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2", *ROUNDINGS)

    def half(values, fmt, rnd):
        exact = F.fma_odd(*(v.astype(np.float64) for v in values))
        return HALF[fmt][1](exact, rnd)

    return build(b, ins, lambda v, rnd: F.fma32(*_same(v), rnd), lambda v, rnd: F.fma64(*v, rnd), half)


def _same(values):
    """Make the first operand an array, so that conversions keep their shape."""
    if values[0].ndim == 0:
        a, c = values[1], values[0]
        if a.ndim == 0:
            a = np.broadcast_to(a, values[2].shape)
        return [a, c, values[2]]
    return values


@floating("div")
def div(b, ins):
    only(ins, "ftz", "approx", "full", "f32", "f64", *ROUNDINGS)

    def single(values, rnd):
        x, y = values
        if rnd != "rn":
            return F.directed32("div", x, y, rnd)
        out = x / y
        if "approx" in ins.mods:  # the divisor's reciprocal underflows: 0, or NaN for inf
            big = (np.abs(y) > np.float32(2.0**126)) & np.isfinite(y)
            if big.any():
                out = np.where(
                    big,
                    np.where(np.isinf(x) | np.isnan(x), np.float32(np.nan), np.copysign(np.float32(0), out)),
                    out,
                )
        return out

    return build(b, ins, single, lambda v, rnd: v[0] / v[1] if rnd == "rn" else F.directed64("div", *v, rnd))


@floating("abs", "neg")
def abs_neg(b, ins):
    only(ins, "ftz", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    kind = ins.mods[-1]
    if kind in HALF or kind.replace("x2", "") in HALF:
        values = half_sources(b, ins.args[1:], kind)
        target = b.target(ins.args[0], "b32" if kind.endswith("x2") else "b16")
        fmt = kind.replace("x2", "")

        def run(g):
            v = _flush_half(values[0], fmt) if "ftz" in ins.mods else values[0]
            out = v & np.uint16(0x7FFF) if ins.op == "abs" else v ^ np.uint16(0x8000)
            put(target, np.ascontiguousarray(out).view(target.dtype), g.where)

        return run
    function = np.absolute if ins.op == "abs" else np.negative
    x, target = b.source(ins.args[1], kind), b.target(ins.args[0], kind)
    if "ftz" in ins.mods:
        return lambda g: put(target, function(F.flush32(x)), g.where)
    return lambda g: function(x, out=target, where=g.where)


@floating("min", "max")
def min_max(b, ins):
    only(ins, "ftz", "NaN", "xorsign", "abs", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    nan, xor = "NaN" in ins.mods, "xorsign" in ins.mods

    def function(values, rnd=None):
        if xor:  # the sign is the product of signs, the value of |.|
            sign = np.signbit(values[0]) ^ np.signbit(values[1])
            for v in values[2:]:
                sign = sign ^ np.signbit(v)
            values = [np.abs(v) for v in values]
        out = F.min_max32(values[0], values[1], ins.op == "max", nan)
        for v in values[2:]:
            out = F.min_max32(out, v, ins.op == "max", nan)
        return np.where(sign, -out, out) if xor else out

    return build(b, ins, function, function, lambda v, fmt, rnd: HALF[fmt][1](function(v)))


# --- approximations: correctly rounded here, the manual allows a few ulp --------------------------
def _wide(function):
    """float32 in, float64 inside, float32 out: one rounding of an almost exact value."""
    return lambda values, rnd=None: function(values[0].astype(np.float64)).astype(np.float32)


def _upper(x):
    return (x.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


def _upper_half(function):
    """rcp/rsqrt.approx.ftz.f64: only the upper 32 bits of operand and result count, subnormals are 0."""

    def run(values, rnd=None):
        x = _upper(np.atleast_1d(values[0]).copy())
        x = np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), x)
        out = function(x)
        out = np.where(np.isnan(out), out, _upper(np.ascontiguousarray(out)))
        return np.where(np.abs(out) < 2.0**-1022, np.copysign(0.0, out), out)

    return run


def _rsqrt(x):
    return np.where(x == 0, np.copysign(np.inf, x), 1.0 / np.sqrt(x))


@instruction("rcp", "sqrt", "rsqrt")
def roots(b, ins):
    only(ins, "approx", "ftz", "f32", "f64", *ROUNDINGS)
    function = {"rcp": lambda x: 1.0 / x, "sqrt": np.sqrt, "rsqrt": _rsqrt}[ins.op]
    one = np.ones((), np.float32)

    def single(values, rnd):
        if rnd != "rn":
            return (
                F.directed32("div", one, values[0], rnd)
                if ins.op == "rcp"
                else F.sqrt_directed(np.atleast_1d(values[0]), rnd, 24)
            )
        if ins.op == "rsqrt":
            return _wide(function)(values)
        return function(values[0]).astype(np.float32) if ins.op == "sqrt" else one / values[0]

    def double(values, rnd):
        if "ftz" in ins.mods:
            return _upper_half(function)(values)
        if rnd != "rn":
            return (
                F.directed64("div", np.ones(()), values[0], rnd)
                if ins.op == "rcp"
                else F.sqrt_directed(np.atleast_1d(values[0]), rnd, 53)
            )
        return function(values[0])

    return build(b, ins, single, double)


@instruction("ex2", "lg2", "sin", "cos", "tanh")
def transcendental(b, ins):
    only(ins, "approx", "ftz", "f32", "f16", "bf16", "f16x2", "bf16x2")
    function = {"ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh}[ins.op]

    def half(values, fmt, rnd):
        return HALF[fmt][1](function(values[0].astype(np.float64)))

    return build(b, ins, _wide(function), None, half if ins.op in ("ex2", "tanh") else None)


@instruction("copysign")
def copysign(b, ins):
    """d = b with the sign of a."""
    kind = ins.mods[-1]
    only(ins, "f32", "f64")
    x, y, target = b.source(ins.args[1], kind), b.source(ins.args[2], kind), b.target(ins.args[0], kind)
    return lambda g: np.copysign(y, x, out=target, where=g.where)


@instruction("testp")
def testp(b, ins):
    kind, test = ins.mods[-1], ins.mods[0]
    only(ins, "f32", "f64", "finite", "infinite", "number", "notanumber", "normal", "subnormal")
    x, target = b.source(ins.args[1], kind), b.target(ins.args[0], "pred")
    tiny = 2.0 ** (-126 if kind == "f32" else -1022)
    function = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda v: ~np.isnan(v),
        "notanumber": np.isnan,
        "normal": lambda v: np.isfinite(v) & (np.abs(v) >= tiny),
        "subnormal": lambda v: (np.abs(v) < tiny) & (v != 0),
    }[test]
    return lambda g: put(target, function(x), g.where)


# --- comparison -----------------------------------------------------------------------------------
def _compare(name):
    """Return f(x, y): ordered comparisons are false for NaN, the ones with u true."""
    ordered = {
        "eq": np.equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "ne": lambda x, y: (x < y) | (x > y),
    }
    if name in ordered:
        return ordered[name]
    if name == "num":
        return lambda x, y: ~(np.isnan(x) | np.isnan(y))
    if name == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if name[:-1] in ordered and name[-1] == "u":
        function = ordered[name[:-1]]
        return lambda x, y: function(x, y) | np.isnan(x) | np.isnan(y)
    return None


def compare_floats(b, ins, a, c, kind):
    """Return f() -> bool array for setp and set on floats."""
    function = _compare(ins.mods[0])
    if function is None or kind not in ("f32", "f64", "f16", "bf16"):
        raise unknown(ins)
    if kind in HALF:
        x, y = half_sources(b, (a, c), kind)
        flush = (lambda v: _flush_half(v, kind)) if "ftz" in ins.mods else lambda v: v
        return lambda: function(
            HALF[kind][0](np.ascontiguousarray(flush(x))), HALF[kind][0](np.ascontiguousarray(flush(y)))
        )
    x, y = b.source(a, kind), b.source(c, kind)
    if "ftz" in ins.mods:
        return lambda: function(F.flush32(x), F.flush32(y))
    return lambda: function(x, y)


def _compare_pairs(b, ins):
    kind, fmt = ins.mods[-1], ins.mods[-1].replace("x2", "")
    function = _compare(ins.mods[0])
    if function is None:
        raise unknown(ins)
    x, y = half_sources(b, ins.args[1:3], kind)
    flush = (lambda v: _flush_half(v, fmt)) if "ftz" in ins.mods else lambda v: v
    return lambda: function(
        HALF[fmt][0](np.ascontiguousarray(flush(x))), HALF[fmt][0](np.ascontiguousarray(flush(y)))
    )


@floating("setp_x2")
def setp_pairs(b, ins):
    """setp.cmp.f16x2 p|q, a, b: p for the low halves, q for the high ones."""
    if any(m in ("and", "or", "xor") for m in ins.mods):
        raise unknown(ins)
    test = _compare_pairs(b, ins)
    p, q = b.target(ins.args[0][1], "pred"), b.target(ins.args[0][2], "pred")

    def run(g):
        both = test()
        put(p, both[0::2], g.where)
        put(q, both[1::2], g.where)

    return run


@floating("set_x2")
def set_pairs(b, ins):
    """set.cmp.dtype.f16x2: 1.0 or all ones per half."""
    if any(m in ("and", "or", "xor") for m in ins.mods):
        raise unknown(ins)
    test, target = _compare_pairs(b, ins), b.target(ins.args[0], "b32")
    one = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(ins.mods[-2], 0xFFFF)
    return lambda g: put(target, np.where(test(), np.uint16(one), np.uint16(0)).view(np.uint32), g.where)
