"""Integer, logic, shift, select, predicate and move instructions."""

import numpy as np

from .binding import instruction, only, put, unknown
from .ops_float import FLOAT_BUILDERS, compare_floats
from .parser import PtxError
from .program import TYPES

INTEGERS = {"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "b8", "b16", "b32", "b64", "u16x2", "s16x2"}
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def _ufunc(b, ins, ufunc, kind, sources=None):
    """Build d = ufunc(a, ...) for a NumPy ufunc that keeps the type."""
    values = [b.source(a, kind) for a in (sources or ins.args[1:])]
    target = b.target(ins.args[0], kind)
    if len(values) != ufunc.nin:
        raise PtxError("PTX line %d: %s takes %d operands" % (ins.line, ins.opcode, ufunc.nin))
    return lambda g: ufunc(*values, out=target, where=g.where)


def _compute(b, ins, function, kind, result=None, kinds=None):
    """Build d = function(a, ...) for any function of arrays."""
    kinds = kinds or [kind] * (len(ins.args) - 1)
    values = [b.source(a, k) for a, k in zip(ins.args[1:], kinds)]
    target = b.target(ins.args[0], result or kind)
    return lambda g: put(target, function(*values), g.where)


# --- 64-bit helpers -------------------------------------------------------------------------------
def mul_high(a, c):
    """High half of the product of two integer arrays of one type."""
    dtype = np.result_type(a, c)
    if dtype.itemsize < 8:
        wide = np.int64 if dtype.kind == "i" else np.uint64
        return ((np.asarray(a).astype(wide) * np.asarray(c).astype(wide)) >> wide(8 * dtype.itemsize)).astype(
            dtype
        )
    x, y = np.asarray(a).view(np.uint64), np.asarray(c).view(np.uint64)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    xl, xh, yl, yh = x & low, x >> half, y & low, y >> half
    mid = xh * yl + ((xl * yl) >> half)
    mid2 = xl * yh + (mid & low)
    high = xh * yh + (mid >> half) + (mid2 >> half)
    if dtype.kind == "i":  # signed: subtract the other where one is negative
        zero = np.uint64(0)
        high = high - np.where(np.asarray(a) < 0, y, zero) - np.where(np.asarray(c) < 0, x, zero)
    return high.view(dtype)


def divide(a, c):
    """Quotient cut towards zero; all ones where the divisor is 0 (the manual leaves that open)."""
    a, c = np.broadcast_arrays(a, c)
    zero = c == 0
    if a.dtype.kind == "u":
        out = a // np.where(zero, a.dtype.type(1), c)
    else:
        unsigned = np.dtype("u%d" % a.dtype.itemsize)
        q = _magnitude(a, unsigned) // np.where(zero, unsigned.type(1), _magnitude(c, unsigned))
        out = np.where((a < 0) != (c < 0), -q, q).view(a.dtype)
    return np.where(zero, ~a.dtype.type(0), out)


def remainder(a, c):
    """Remainder with the sign of the dividend; the dividend itself where the divisor is 0."""
    a, c = np.broadcast_arrays(a, c)
    zero = c == 0
    if a.dtype.kind == "u":
        out = a % np.where(zero, a.dtype.type(1), c)
    else:
        unsigned = np.dtype("u%d" % a.dtype.itemsize)
        r = _magnitude(a, unsigned) % np.where(zero, unsigned.type(1), _magnitude(c, unsigned))
        out = np.where(a < 0, -r, r).view(a.dtype)
    return np.where(zero, a, out)


def _magnitude(a, unsigned):
    return np.where(a < 0, -a.view(unsigned), a.view(unsigned))


# --- add, sub, mul, mad ---------------------------------------------------------------------------
@instruction("add", "sub")
def add_sub(b, ins):
    kind = ins.mods[-1]
    if kind not in INTEGERS:
        return FLOAT_BUILDERS[ins.op](b, ins)
    only(ins, "sat", "cc", kind)
    ufunc = np.add if ins.op == "add" else np.subtract
    if "cc" in ins.mods:
        return _carry(b, ins, kind, False)
    if "sat" in ins.mods:
        return _compute(
            b,
            ins,
            lambda x, y: np.clip(ufunc(x.astype(np.int64), y.astype(np.int64)), -(2**31), 2**31 - 1),
            kind,
        )
    if kind.endswith("x2"):
        return _pairs(b, ins, ufunc, kind)
    return _ufunc(b, ins, ufunc, kind)


@instruction("addc", "subc")
def addc_subc(b, ins):
    only(ins, "cc", ins.mods[-1])
    return _carry(b, ins, ins.mods[-1], True)


def _carry(b, ins, kind, take):
    """add.cc, addc, sub.cc, subc: sums with the carry (borrow) flag."""
    x, y, d = (
        b.source(ins.args[1], "b" + kind[1:]),
        b.source(ins.args[2], "b" + kind[1:]),
        b.target(ins.args[0], "b" + kind[1:]),
    )
    subtract, give = ins.op.startswith("sub"), "cc" in ins.mods
    flag = b.carry

    def run(g):
        carry = flag.astype(d.dtype) if take else d.dtype.type(0)
        if subtract:
            out = x - y
            over = np.broadcast_to(x < y, d.shape)
            over = over | (out < carry)
            out = out - carry
        else:
            out = x + y
            over = np.broadcast_to(out < x, d.shape)
            out = out + carry
            over = over | (out < carry)
        put(d, out, g.where)
        if give:
            put(flag, over, g.where)

    return run


def _pairs(b, ins, function, kind):
    lane_kind = np.int16 if kind[0] == "s" else np.uint16
    values = [np.ascontiguousarray(b.source(a, "b32")) for a in ins.args[1:]]
    target = b.target(ins.args[0], "b32")

    def run(g):
        parts = [np.ascontiguousarray(np.broadcast_to(v, (b.total,))).view(lane_kind) for v in values]
        put(target, function(*parts).astype(lane_kind).view(np.uint32), g.where)

    return run


@instruction("mul", "mad")
def mul_mad(b, ins):
    kind = ins.mods[-1]
    if kind not in INTEGERS:
        return FLOAT_BUILDERS[ins.op](b, ins)
    only(ins, "lo", "hi", "wide", "cc", "sat", kind)
    mode = next((m for m in ins.mods if m in ("lo", "hi", "wide")), None)
    if mode is None or "sat" in ins.mods:
        raise unknown(ins)
    x, y = b.source(ins.args[1], kind), b.source(ins.args[2], kind)
    wide = WIDE[kind] if mode == "wide" else kind
    target = b.target(ins.args[0], wide)
    dtype = TYPES[wide]
    if mode == "wide":
        product = lambda: np.multiply(x, y, dtype=dtype)
    elif mode == "lo":
        product = lambda: x * y
    else:
        product = lambda: mul_high(x, y)
    if ins.op == "mul":
        return lambda g: put(target, product(), g.where)
    z = b.source(ins.args[3], wide)
    if "cc" in ins.mods:
        flag, unsigned = b.carry, TYPES["b" + wide[1:]]

        def with_carry(g):
            p = np.asarray(product()).astype(dtype).view(unsigned)
            out = p + z.view(unsigned)
            put(flag, out < p, g.where)
            put(target, out.view(dtype), g.where)

        return with_carry
    return lambda g: put(target, product() + z, g.where)


@instruction("madc")
def madc(b, ins):
    kind = ins.mods[-1]
    only(ins, "lo", "hi", "cc", kind)
    x, y, z = (b.source(a, kind) for a in ins.args[1:])
    target, flag, dtype = b.target(ins.args[0], kind), b.carry, TYPES["b" + kind[1:]]

    def run(g):
        p = np.asarray(x * y if "lo" in ins.mods else mul_high(x, y)).view(dtype)
        out = p + z.view(dtype)
        over = out < p
        out2 = out + flag.astype(dtype)
        over = over | (out2 < out)
        put(target, out2.view(TYPES[kind]), g.where)
        if "cc" in ins.mods:
            put(flag, over, g.where)

    return run


@instruction("mul24", "mad24")
def mul24(b, ins):
    kind = ins.mods[-1]
    only(ins, "lo", "hi", kind)
    signed = kind[0] == "s"

    def run(x, y, z=None):
        wide = np.int64
        if signed:
            x, y = ((v.astype(wide) << 40) >> 40 for v in (x, y))
        else:
            x, y = (v.astype(wide) & 0xFFFFFF for v in (x, y))
        p = (x * y) >> (16 if "hi" in ins.mods else 0)
        return p if z is None else p + z

    return _compute(b, ins, run, kind)


@instruction("sad")
def sad(b, ins):
    kind = ins.mods[-1]
    only(ins, kind)
    return _compute(b, ins, lambda x, y, z: np.where(x < y, y - x, x - y) + z, kind)


@instruction("dp4a", "dp2a")
def dot_product(b, ins):
    """dp4a.atype.btype d, a, b, c;  dp2a.lo/.hi takes 16-bit halves of a and bytes of b."""
    only(ins, "u32", "s32", "lo", "hi")
    kinds = [m for m in ins.mods if m in ("u32", "s32")]
    x, y = b.source(ins.args[1], "b32"), b.source(ins.args[2], "b32")
    z, target = b.source(ins.args[3], "b32"), b.target(ins.args[0], "b32")

    def field(v, width, at, signed):
        v = (v.astype(np.int64) >> (width * at)) & ((1 << width) - 1)
        return np.where(v >> (width - 1), v - (1 << width), v) if signed else v

    def run(g):
        total = z.astype(np.int64)
        count, width, base = (4, 8, 0) if ins.op == "dp4a" else (2, 16, 2 if "hi" in ins.mods else 0)
        for i in range(count):
            total = total + field(x, width, i, kinds[0] == "s32") * field(y, 8, base + i, kinds[1] == "s32")
        put(target, total, g.where)

    return run


@instruction("div", "rem")
def div_rem(b, ins):
    kind = ins.mods[-1]
    if kind not in INTEGERS:
        return FLOAT_BUILDERS[ins.op](b, ins)
    only(ins, kind)
    return _compute(b, ins, divide if ins.op == "div" else remainder, kind)


@instruction("abs", "neg")
def abs_neg(b, ins):
    kind = ins.mods[-1]
    if kind not in INTEGERS:
        return FLOAT_BUILDERS[ins.op](b, ins)
    only(ins, kind)
    return _ufunc(b, ins, np.absolute if ins.op == "abs" else np.negative, kind)


@instruction("min", "max")
def min_max(b, ins):
    kind = ins.mods[-1]
    if kind not in INTEGERS:
        return FLOAT_BUILDERS[ins.op](b, ins)
    only(ins, kind, "relu")
    ufunc = np.minimum if ins.op == "min" else np.maximum
    if kind.endswith("x2"):
        function = (lambda x, y: np.maximum(ufunc(x, y), 0)) if "relu" in ins.mods else ufunc
        return _pairs(b, ins, function, kind)
    if "relu" in ins.mods:
        return _compute(b, ins, lambda x, y: np.maximum(ufunc(x, y), 0), kind)
    return _ufunc(b, ins, ufunc, kind)


# --- logic and shifts -----------------------------------------------------------------------------
@instruction("and", "or", "xor")
def logic(b, ins):
    kind = ins.mods[-1]
    only(ins, kind)
    ufunc = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[ins.op]
    if kind == "pred" and any(a[0] == "!" for a in ins.args[1:]):
        x, y = b.predicate(ins.args[1]), b.predicate(ins.args[2])
        target = b.target(ins.args[0], kind)
        return lambda g: ufunc(x(), y(), out=target, where=g.where)
    return _ufunc(b, ins, ufunc, kind)


@instruction("not")
def invert(b, ins):
    only(ins, ins.mods[-1])
    return _ufunc(b, ins, np.invert, ins.mods[-1])


@instruction("cnot")
def cnot(b, ins):
    only(ins, ins.mods[-1])
    return _compute(b, ins, lambda x: x == 0, ins.mods[-1])


@instruction("shl", "shr")
def shift(b, ins):
    """Amounts above the width are clamped: 0, or the sign for shr.s."""
    kind = ins.mods[-1]
    only(ins, kind)
    x, amount, target = b.source(ins.args[1], kind), b.source(ins.args[2], "u32"), b.target(ins.args[0], kind)
    dtype, bits = TYPES[kind], 8 * np.dtype(TYPES[kind]).itemsize
    if amount.ndim == 0:
        count = int(amount)
        if count >= bits:
            if kind[0] == "s" and ins.op == "shr":
                return lambda g: np.right_shift(x, dtype(bits - 1), out=target, where=g.where)
            return lambda g: put(target, 0, g.where)
        ufunc, value = np.left_shift if ins.op == "shl" else np.right_shift, dtype(count)
        return lambda g: ufunc(x, value, out=target, where=g.where)

    def run(g):
        over = amount >= bits
        count = np.minimum(amount, np.uint32(bits - 1)).astype(dtype)
        if ins.op == "shl":
            out = np.where(over, dtype(0), x << count)
        else:
            out = x >> count if kind[0] == "s" else np.where(over, dtype(0), x >> count)
        put(target, out, g.where)

    return run


@instruction("shf")
def funnel_shift(b, ins):
    """shf.l/.r.clamp/.wrap.b32 d, lo, hi, amount."""
    only(ins, "l", "r", "clamp", "wrap", "b32")
    left, wrap = "l" in ins.mods, "wrap" in ins.mods

    def run(lo, hi, amount):
        both = (hi.astype(np.uint64) << np.uint64(32)) | lo
        count = amount & np.uint32(31) if wrap else np.minimum(amount, np.uint32(32))
        if left:
            return (both << count.astype(np.uint64)) >> np.uint64(32)
        return both >> count.astype(np.uint64)

    return _compute(b, ins, run, "b32")


@instruction("lop3")
def lop3(b, ins):
    """Any logic function of three: bit (a, b, c) of the immediate, over 0xF0, 0xCC, 0xAA."""
    only(ins, "b32")
    table = ins.args[4][1] & 0xFF
    x, y, z = (b.source(a, "b32") for a in ins.args[1:4])
    target = b.target(ins.args[0], "b32")
    terms = [i for i in range(8) if table >> i & 1]

    def run(g):
        out = np.uint32(0)
        for i in terms:
            out = out | (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        put(target, out, g.where)

    return run


@instruction("popc", "clz", "brev", "bfind")
def bits(b, ins):
    kind = ins.mods[-1]
    only(ins, kind, "shiftamt")
    width = int(kind[1:])
    unsigned = "b%d" % width
    x = b.source(ins.args[1], unsigned)
    target = b.target(ins.args[0], unsigned if ins.op == "brev" else "b32")

    def length(v):
        """Number of significant bits."""
        out = np.zeros(v.shape, np.int64)
        for step in (32, 16, 8, 4, 2, 1):
            if step < width:
                big = (v >> v.dtype.type(step)) != 0
                out += np.where(big, step, 0)
                v = np.where(big, v >> v.dtype.type(step), v)
        return out + (v != 0)

    def run(g):
        if ins.op == "popc":
            out = np.bitwise_count(x)
        elif ins.op == "clz":
            out = width - length(x)
        elif ins.op == "brev":
            out, one = np.zeros_like(x), x.dtype.type(1)
            for i in range(width):
                out = out | (((x >> x.dtype.type(i)) & one) << x.dtype.type(width - 1 - i))
        else:
            v = np.where(x >> x.dtype.type(width - 1), ~x, x) if kind[0] == "s" else x
            n = length(v)
            out = np.where(n == 0, 0xFFFFFFFF, width - n if "shiftamt" in ins.mods else n - 1)
        put(target, out, g.where)

    return run


@instruction("bfe", "bfi")
def bit_field(b, ins):
    """Extract or insert `len` bits at `pos`; bits beyond the top are the sign (bfe.s) or 0."""
    kind = ins.mods[-1]
    only(ins, kind)
    width = int(kind[1:])
    if ins.op == "bfe":
        x, pos, length = b.source(ins.args[1], kind), b.source(ins.args[2], "u32"), b.source(ins.args[3], "u32")
        target = b.target(ins.args[0], kind)

        def extract(g):
            p = (pos & np.uint32(0xFF)).astype(np.int64)
            n = (length & np.uint32(0xFF)).astype(np.int64)
            raw = x.view(TYPES["b%d" % width]).astype(np.uint64)
            inside = np.where(p < width, raw >> np.minimum(p, 63).astype(np.uint64), np.uint64(0))
            mask = np.where(
                n >= 64, ~np.uint64(0), (np.uint64(1) << np.minimum(n, 63).astype(np.uint64)) - np.uint64(1)
            )
            out = inside & mask
            if kind[0] == "s":
                top = np.minimum(p + n - 1, width - 1)
                sign = np.where(
                    n == 0, np.uint64(0), (raw >> np.maximum(top, 0).astype(np.uint64)) & np.uint64(1)
                )
                avail = np.clip(width - p, 0, n)  # bits that were really there
                fill = ~np.where(
                    avail >= 64,
                    ~np.uint64(0),
                    (np.uint64(1) << np.minimum(avail, 63).astype(np.uint64)) - np.uint64(1),
                )
                out = np.where(sign == 1, out | fill, out)
            put(target, out, g.where)

        return extract
    unsigned = "b%d" % width
    x, y = b.source(ins.args[1], unsigned), b.source(ins.args[2], unsigned)
    pos, length, target = (
        b.source(ins.args[3], "u32"),
        b.source(ins.args[4], "u32"),
        b.target(ins.args[0], unsigned),
    )

    def insert(g):
        p = (pos & np.uint32(0xFF)).astype(np.int64)
        n = (length & np.uint32(0xFF)).astype(np.int64)
        mask = np.where(
            n >= 64, ~np.uint64(0), (np.uint64(1) << np.minimum(n, 63).astype(np.uint64)) - np.uint64(1)
        )
        shift_by = np.minimum(p, 63).astype(np.uint64)
        mask = np.where(p >= width, np.uint64(0), mask << shift_by)
        put(target, (y & ~mask) | ((x.astype(np.uint64) << shift_by) & mask), g.where)

    return insert


@instruction("prmt")
def prmt(b, ins):
    """Pick four bytes out of {a, b}; a selector's bit 3 replicates the byte's sign.  Modes f4e … rc16 too."""
    only(ins, "b32", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = ins.mods[1] if len(ins.mods) > 1 else None
    tables = {
        "f4e": lambda s: [s, s + 1, s + 2, s + 3],
        "b4e": lambda s: [s, (s + 7) % 8, (s + 6) % 8, (s + 5) % 8],
        "rc8": lambda s: [s] * 4,
        "ecl": lambda s: [max(s, i) for i in range(4)],
        "ecr": lambda s: [min(s, i) for i in range(4)],
        "rc16": lambda s: [0, 1, 0, 1] if s % 2 == 0 else [2, 3, 2, 3],
    }

    def run(x, y, selector):
        both = (y.astype(np.uint64) << np.uint64(32)) | x
        out = np.uint32(0)
        if mode:
            table = np.array([tables[mode](s) for s in range(4)], np.uint64)
            picks = table[(selector & np.uint32(3)).astype(np.int64)]
        for i in range(4):
            if mode:
                code = picks[..., i]
            else:
                code = ((selector >> np.uint32(4 * i)) & np.uint32(15)).astype(np.uint64)
            byte = (both >> ((code & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
            byte = np.where(
                (code & np.uint64(8)) != 0,
                np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0)),
                byte,
            )
            out = out | (byte << np.uint64(8 * i))
        return out

    return _compute(b, ins, run, "b32")


# --- comparison and selection ---------------------------------------------------------------------
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(b, ins, a, c):
    """Return f() -> bool array for the comparison of a setp or set."""
    kind = ins.mods[-1]
    if kind not in INTEGERS:
        return compare_floats(b, ins, a, c, kind)
    ufunc = COMPARE[ins.mods[0]]
    if ins.mods[0] in ("lo", "ls", "hi", "hs"):
        kind = "u" + kind[1:]
    x, y = b.source(a, kind), b.source(c, kind)
    return lambda: ufunc(x, y)


@instruction("setp")
def setp(b, ins):
    kind = ins.mods[-1]
    compare = ins.mods[0]
    combine = next((m for m in ins.mods[1:] if m in BOOLEAN), None)
    only(ins, compare, "ftz", kind, *BOOLEAN)
    if kind.endswith("x2"):
        return FLOAT_BUILDERS["setp_x2"](b, ins)
    test = _comparison(b, ins, ins.args[1], ins.args[2])
    first, second = (ins.args[0][1], ins.args[0][2]) if ins.args[0][0] == "|" else (ins.args[0], None)
    p = b.target(first, "pred")
    q = b.target(second, "pred") if second else None
    if combine is None and q is None:
        if kind in INTEGERS:
            ufunc, number = COMPARE[compare], "u" + kind[1:] if compare in ("lo", "ls", "hi", "hs") else kind
            x, y = b.source(ins.args[1], number), b.source(ins.args[2], number)
            return lambda g: ufunc(x, y, out=p, where=g.where)
        return lambda g: put(p, test(), g.where)
    other = b.predicate(ins.args[3]) if combine else None

    def run(g):
        result = test()
        inverse = ~result
        if combine:
            c = other()
            result, inverse = BOOLEAN[combine](result, c), BOOLEAN[combine](inverse, c)
        put(p, result, g.where)
        if q is not None:
            put(q, inverse, g.where)

    return run


@instruction("set")
def set_(b, ins):
    """set.cmp.dtype.stype: all ones (or 1.0) where true."""
    dkind = ins.mods[-2]
    combine = next((m for m in ins.mods[1:] if m in BOOLEAN), None)
    only(ins, ins.mods[0], "ftz", dkind, ins.mods[-1], *BOOLEAN)
    if ins.mods[-1].endswith("x2"):
        return FLOAT_BUILDERS["set_x2"](b, ins)
    test = _comparison(b, ins, ins.args[1], ins.args[2])
    other = b.predicate(ins.args[3]) if combine else None
    target = b.target(ins.args[0], dkind)
    true = {"f32": np.float32(1), "f16": np.uint16(0x3C00), "bf16": np.uint16(0x3F80)}.get(
        dkind, ~TYPES[dkind](0) if dkind in INTEGERS else None
    )
    if true is None:
        raise unknown(ins)

    def run(g):
        result = test()
        if combine:
            result = BOOLEAN[combine](result, other())
        put(target, np.where(result, true, target.dtype.type(0)), g.where)

    return run


@instruction("selp")
def selp(b, ins):
    kind = ins.mods[-1]
    only(ins, kind)
    x, y, p = b.source(ins.args[1], kind), b.source(ins.args[2], kind), b.predicate(ins.args[3])
    target = b.target(ins.args[0], kind)
    return lambda g: put(target, np.where(p(), x, y), g.where)


@instruction("slct")
def slct(b, ins):
    """slct: a where c >= 0 (-0 is >= 0, NaN is not), else b."""
    kind, sign = ins.mods[-2], ins.mods[-1]
    only(ins, "ftz", kind, sign)
    x, y, c = b.source(ins.args[1], kind), b.source(ins.args[2], kind), b.source(ins.args[3], sign)
    target = b.target(ins.args[0], kind)
    # A subnormal c < 0 is -0 under .ftz, which is >= 0.
    limit = np.float32(-(2.0**-126)) if "ftz" in ins.mods else None
    return lambda g: put(target, np.where(c > limit if limit is not None else c >= 0, x, y), g.where)


@instruction("mov")
def mov(b, ins):
    kind = ins.mods[-1]
    only(ins, kind)
    target, source = ins.args
    if kind == "b128":
        raise unknown(ins)
    if target[0] == "v" and source[0] != "v":  # unpack
        parts = target[1]
        width = int(kind[1:]) // len(parts)
        whole = b.source(source, "b" + kind[1:])
        targets = [b.target(part, "b%d" % width) for part in parts]
        dtype = TYPES["b%d" % width]

        def unpack(g):
            value = np.array(whole)  # a copy: a part may share its array
            for i, part in enumerate(targets):
                put(part, (value >> value.dtype.type(width * i)).astype(dtype), g.where)

        return unpack
    if source[0] == "v" and target[0] != "v":  # pack
        parts = source[1]
        width = int(kind[1:]) // len(parts)
        values = [b.source(part, "b%d" % width) for part in parts]
        whole = b.target(target, "b" + kind[1:])
        dtype = TYPES["b" + kind[1:]]

        def pack(g):
            out = values[0].astype(dtype)
            for i, value in enumerate(values[1:], 1):
                out = out | (value.astype(dtype) << dtype(width * i))
            put(whole, out, g.where)

        return pack
    if target[0] == "v":
        raise PtxError("PTX line %d: mov between vectors is not supported" % ins.line)
    x, d = b.source(source, kind), b.target(target, kind)
    return lambda g: put(d, x, g.where)
