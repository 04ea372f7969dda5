"""Floating-point arithmetic as the PTX manual words it, on NumPy arrays.

Everything here is exact first and rounded once.  Values travel as float32/float64 arrays or as raw bits
(uint16 for f16 and bf16).  `rnd` is one of rn (to nearest, ties to even), rna (ties away), rz, rm, rp.

A sum or product that must be rounded to a narrow format is first made in float64 with *round to odd*: the
float64 result, if inexact, gets its last bit set.  Rounding that to a format of at most 51 bits equals rounding
the exact value (Boldo and Melquiond 2008).
"""

import math
from fractions import Fraction

import numpy as np

NAN32, NAN16, NAN64 = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF), np.uint64(0x7FF8000000000000)
TINY32 = np.float32(2.0**-126)  # the smallest normal float32

# name: (precision in bits with the hidden one, exponent of the smallest normal, largest finite value)
FORMATS = {
    "f16": (11, -14, 65504.0),
    "bf16": (8, -126, float(2**128 - 2**120)),
    "tf32": (11, -126, float(2**128 - 2**117)),
    "f32": (24, -126, float(2**128 - 2**104)),
}


def flush32(x):
    """Return x with subnormal float32 values replaced by zeros of the same sign."""
    small = np.abs(x) < TINY32
    if small.any():
        x = np.where(small, np.copysign(np.float32(0), x), x)
    return x


def canonical32(x):
    """Return x with every NaN as 0x7fffffff, the one that float32 instructions make."""
    square = np.dot(x, x) if x.ndim else x  # NaN if and only if one is there: squares never cancel
    if square != square:
        x = np.where(np.isnan(x), NAN32.view(np.float32), x)
    return x


def narrow(x, fmt, rnd="rn"):
    """Round float64 `x` to `fmt` and return float64 values on that format's grid (overflow as `rnd` says)."""
    bits, emin, largest = FORMATS[fmt]
    _, exponent = np.frexp(x)
    quantum = np.maximum(exponent - bits, emin - bits + 1)  # x is rounded to a multiple of 2**quantum
    scaled = np.ldexp(x, -quantum)
    if rnd == "rn":
        scaled = np.rint(scaled)
    elif rnd == "rna":
        scaled = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    elif rnd == "rz":
        scaled = np.trunc(scaled)
    elif rnd == "rm":
        scaled = np.floor(scaled)
    elif rnd == "rp":
        scaled = np.ceil(scaled)
    else:
        raise ValueError("rounding %r is not known" % rnd)
    out = np.where(np.isfinite(x), np.copysign(np.ldexp(scaled, quantum), x), x)
    over = np.isfinite(x) & (np.abs(out) > largest)
    if np.any(over):
        up = {"rn": True, "rna": True, "rz": False, "rm": x < 0, "rp": x > 0}[rnd]
        out = np.where(over, np.copysign(np.where(up, np.inf, largest), x), out)
    return out


# --- float64 with round to odd --------------------------------------------------------------------
def _two_sum(a, b):
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _to_odd(s, error):
    """Return s, with its last bit forced to 1 where the exact value was s + error, error ≠ 0, cut towards zero."""
    bits = s.view(np.int64)
    inexact = (error != 0) & np.isfinite(s) & np.isfinite(error)
    if not np.any(inexact):
        return s
    # Step to the neighbour below in magnitude where rounding went up, then set the last bit.
    down = inexact & ((error < 0) == (s > 0)) & (s != 0)
    bits = bits - down
    return np.where(inexact, bits | 1, bits).view(np.float64)


def add_odd(a, b):
    """Return a + b in float64, rounded to odd."""
    s, error = _two_sum(a, b)
    return _to_odd(s, error)


def _two_product(a, b):
    """Return p, e with p + e = a·b exactly (Veltkamp split; no overflow or underflow assumed)."""
    p = a * b
    ah = a * 134217729.0
    ah = ah - (ah - a)
    bh = b * 134217729.0
    bh = bh - (bh - b)
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def fma64(a, b, c, rnd="rn"):
    """Return the float64 fused multiply-add: a·b + c with one rounding (to nearest; other modes by fractions)."""
    a, b, c = (np.atleast_1d(np.asarray(x, np.float64)) for x in np.broadcast_arrays(a, b, c))
    uh, ul = _two_product(a, b)
    th, tl = _two_sum(c, ul)
    vh, vl = _two_sum(uh, th)
    z, error = _two_sum(tl, vl)
    out = vh + _to_odd(z, error)
    # Where a partial result could overflow or lose bits below the smallest subnormal: exact arithmetic.
    mag = np.abs(uh)
    safe = (mag < 2.0**990) & (np.abs(a) < 2.0**990) & (np.abs(b) < 2.0**990) & (np.abs(c) < 2.0**990)
    safe &= (mag > 2.0**-960) & ((np.abs(out) > 2.0**-960) | (out == 0))
    plain = (uh == 0) & ((a == 0) | (b == 0))
    out = np.where(plain, a * b + c, out)
    slow = ~(safe | plain)
    if rnd != "rn":
        slow = np.ones_like(slow)
    if slow.any():
        out = np.array(out)
        for i in np.flatnonzero(slow.ravel()):
            x, y, w = float(a.flat[i]), float(b.flat[i]), float(c.flat[i])
            if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(w)):
                out.flat[i] = x * y + w if not (math.isfinite(x) and math.isfinite(y)) else w
            else:
                exact = Fraction(x) * Fraction(y) + Fraction(w)
                if exact == 0:
                    product_sign = math.copysign(1, x) * math.copysign(1, y)
                    same = product_sign == math.copysign(1, w) and (
                        x * y == 0 or Fraction(x) * Fraction(y) == 0
                    )
                    out.flat[i] = math.copysign(0.0, w) if same else (-0.0 if rnd == "rm" else 0.0)
                else:
                    out.flat[i] = round_fraction(exact, rnd)
    return out


def round_fraction(value, rnd="rn", bits=53, emin=-1022):
    """Return Fraction `value` ≠ 0 rounded to a float with `bits` bits (infinity on overflow to nearest)."""
    sign, mag = (-1, -value) if value < 0 else (1, value)
    exponent = mag.numerator.bit_length() - mag.denominator.bit_length()
    if Fraction(2) ** exponent > mag:
        exponent -= 1
    quantum = max(exponent, emin) - bits + 1
    scaled = mag / Fraction(2) ** quantum
    whole, rest = divmod(scaled.numerator, scaled.denominator)
    twice = 2 * rest
    up = {
        "rn": twice > scaled.denominator or (twice == scaled.denominator and whole & 1),
        "rz": False,
        "rm": rest and sign < 0,
        "rp": rest and sign > 0,
    }[rnd]
    whole += bool(up)
    limit = 1024 if bits == 53 else 128
    if whole.bit_length() + quantum > limit:
        away = rnd == "rn" or (rnd == "rp" and sign > 0) or (rnd == "rm" and sign < 0)
        top = math.ldexp(2**bits - 1, limit - bits)
        return sign * (math.inf if away else top)
    return sign * math.ldexp(whole, quantum)


def fma_odd(a, b, c):
    """Return a·b + c for a, b, c whose product is exact in float64, rounded to odd."""
    return add_odd(a * b, c)


# --- float32 --------------------------------------------------------------------------------------
def fma32(a, b, c, rnd="rn"):
    """Return the float32 fused multiply-add."""
    product = a.astype(np.float64) * b  # 48 bits: exact
    s = product + c
    if rnd == "rn":
        out = s.astype(np.float32)
        # Two roundings differ from one only if s fell on a midpoint of float32, or if the result is subnormal.
        odd = ((s.view(np.int64) & 0x1FFFFFFF) == 0x10000000) | (np.abs(s) < 2.0**-125)
        if not odd.any():
            return out
        return to32(add_odd(product, np.broadcast_to(c, product.shape).astype(np.float64)))
    c = np.broadcast_to(c, product.shape).astype(np.float64)
    exact = add_odd(product, c)
    return to32(narrow(_zero_down(exact, product, c) if rnd == "rm" else exact, "f32", rnd))


def to32(x):
    return x.astype(np.float32)


def _zero_down(exact, x, y):
    """Return the sum exact of x and y with its zeros as rounding down has them: -0, but for (+0) + (+0)."""
    positive = (x == 0) & (y == 0) & ~np.signbit(x) & ~np.signbit(y)
    return np.where((exact == 0) & ~positive, -0.0, exact)


def directed32(op, a, b, rnd):
    """Return a op b (add, sub, mul, div) in float32 with rounding `rnd` other than to nearest."""
    a, b = np.broadcast_arrays(np.atleast_1d(a), np.atleast_1d(b))
    x, y = a.astype(np.float64), b.astype(np.float64)
    if op == "sub":
        y = -y
    if op in ("add", "sub"):
        exact = add_odd(x, y)
        if rnd == "rm":
            exact = _zero_down(exact, x, y)
    elif op == "mul":
        exact = x * y
    else:
        q = x / y
        rest = np.array(
            [
                (
                    float(np.sign(Fraction(n) - Fraction(v) * Fraction(d)))
                    if np.isfinite(v) and np.isfinite(n) and np.isfinite(d) and d
                    else 0.0
                )
                for n, v, d in zip(x.ravel(), q.ravel(), y.ravel())
            ]
        ).reshape(q.shape)
        exact = _to_odd(q, rest * np.where(np.signbit(y), -1.0, 1.0))
    return to32(narrow(exact, "f32", rnd))


def directed64(op, a, b, rnd):
    """Return a op b in float64 with a directed rounding, by exact fractions (slow, rare)."""
    a, b = np.broadcast_arrays(np.atleast_1d(a), np.atleast_1d(b))
    out = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[op](a, b)
    for i in range(out.size):
        x, y = float(a.flat[i]), float(b.flat[i])
        if math.isfinite(x) and math.isfinite(y) and not (op == "div" and y == 0):
            fx, fy = Fraction(x), Fraction(y)
            exact = fx + fy if op == "add" else fx - fy if op == "sub" else fx * fy if op == "mul" else fx / fy
            if exact != 0:
                out.flat[i] = round_fraction(exact, rnd)
            elif op in ("add", "sub") and rnd == "rm":
                out.flat[i] = _zero_down(0.0, x, y if op == "add" else -y)
    return out


def sqrt_directed(x, rnd, bits):
    """Return sqrt(x) with a directed rounding; x float32 (bits 24) or float64 (bits 53)."""
    out = np.sqrt(x.astype(np.float64))
    for i in range(out.size):
        v = float(x.flat[i])
        if math.isfinite(v) and v > 0:
            exact = Fraction(v)
            shift = 2 * (120 + max(0, -math.frexp(v)[1]))  # enough bits below the point
            root = math.isqrt(int(exact * (1 << shift)))
            inexact = Fraction(root * root, 1 << shift) != exact
            value = Fraction(2 * root + (1 if inexact else 0), 1 << (shift // 2 + 1))
            out.flat[i] = round_fraction(value, rnd, bits, -1022 if bits == 53 else -126)
    return out.astype(x.dtype)


def min_max32(a, b, largest, nan):
    """Return min or max of float arrays: -0 < +0; NaN loses, or wins with `nan` (the .NaN modifier)."""
    ufunc = (np.maximum if nan else np.fmax) if largest else (np.minimum if nan else np.fmin)
    out = ufunc(a, b)
    same = (a == b) & (a == 0)
    if np.any(same):
        integer = np.uint32 if out.dtype == np.float32 else np.uint64
        ai, bi = np.asarray(a).view(integer), np.asarray(b).view(integer)
        out = np.where(same, (ai & bi if largest else ai | bi).view(out.dtype), out)
    return out


def saturate(x):
    """Clamp to [+0, 1]; NaN becomes +0."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


# --- f16 and bf16: raw bits <-> float32 -----------------------------------------------------------
def f16_to_32(bits):
    return bits.view(np.float16).astype(np.float32)


def bf16_to_32(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_f16(x, rnd="rn"):
    """Round float32 or float64 `x` to f16 bits (NaN is 0x7fff)."""
    if rnd != "rn":
        x = narrow(np.asarray(x, np.float64), "f16", rnd)
    out = np.atleast_1d(np.asarray(x).astype(np.float16)).view(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, NAN16, out) if np.any(nan) else out


def to_bf16(x, rnd="rn"):
    """Round float32 or float64 `x` to bf16 bits (NaN is 0x7fff)."""
    x = np.atleast_1d(np.asarray(x))
    if x.dtype == np.float32 and rnd == "rn":
        bits = x.view(np.uint32)
        out = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
    else:
        out = (
            narrow(x.astype(np.float64), "bf16", rnd).astype(np.float32).view(np.uint32) >> np.uint32(16)
        ).astype(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, NAN16, out) if np.any(nan) else out


def to_tf32(bits, rnd="rna"):
    """Round float32 bits to tf32: 10 bits of mantissa, the low 13 bits zero."""
    x = bits.view(np.float32)
    if rnd == "rna":
        out = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    else:
        out = narrow(x.astype(np.float64), "tf32", rnd).astype(np.float32).view(np.uint32)
    special = ~np.isfinite(x)
    if np.any(special):
        out = np.where(np.isnan(x), NAN32, np.where(special, bits, out))
    return out
