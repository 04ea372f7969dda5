"""cvt, cvta and isspacep."""

import numpy as np

from . import floats as F
from .binding import WINDOWS, instruction, only, put, unknown
from .memory import GLOBAL_BASE, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_BYTES
from .program import TYPES

FLOATS = {"f32", "f64", "f16", "bf16"}
INTEGERS = {"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64"}
TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction("cvt")
def cvt(b, ins):
    dst, src = ins.mods[-2], ins.mods[-1]
    only(
        ins,
        "rn",
        "rz",
        "rm",
        "rp",
        "rna",
        "rni",
        "rzi",
        "rmi",
        "rpi",
        "ftz",
        "sat",
        "satfinite",
        "relu",
        "pack",
        dst,
        src,
    )
    if dst in ("f16x2", "bf16x2"):
        return _pack(b, ins, dst, src)
    if dst == "tf32":
        return _tf32(b, ins)
    if "satfinite" in ins.mods or "pack" in ins.mods:
        raise unknown(ins)
    if dst in INTEGERS and src in INTEGERS:
        return _integers(b, ins, dst, src)
    if dst in INTEGERS and src in FLOATS:
        return _float_to_integer(b, ins, dst, src)
    if dst in FLOATS and src in INTEGERS:
        return _integer_to_float(b, ins, dst, src)
    if dst in FLOATS and src in FLOATS:
        return _floats(b, ins, dst, src)
    raise unknown(ins)


def _rounding(ins):
    return next((m for m in ins.mods if m in ("rn", "rz", "rm", "rp", "rna")), "rn")


def _widen(kind):
    return {"f16": F.f16_to_32, "bf16": F.bf16_to_32}.get(kind, lambda v: v)


def _finish(b, ins, dst, ftz):
    """Return store(g, float64 or float32 array on dst's grid or wider, rounding)."""
    target = b.target(ins.args[0], dst)
    rnd, sat, relu = _rounding(ins), "sat" in ins.mods, "relu" in ins.mods

    def store(g, x):
        if dst == "f32":
            out = (
                x
                if x.dtype == np.float32
                else (x if rnd == "rn" else F.narrow(x, "f32", rnd)).astype(np.float32)
            )
            if ftz:
                out = F.flush32(out)
        elif dst == "f64":
            out = x.astype(np.float64)
        else:
            if relu:
                x = np.where(np.isnan(x), x, np.maximum(x, x.dtype.type(0)))
            if sat:
                x = F.saturate(x)
            put(target, (F.to_f16 if dst == "f16" else F.to_bf16)(x, rnd), g.where)
            return
        if sat:
            out = F.saturate(out)
        nan = np.isnan(out)
        if nan.any():
            out = np.where(nan, (F.NAN32.view(np.float32) if dst == "f32" else F.NAN64.view(np.float64)), out)
        put(target, out, g.where)

    return store


def _floats(b, ins, dst, src):
    x, widen = b.source(ins.args[1], src), _widen(src)
    ftz = "ftz" in ins.mods
    store = _finish(b, ins, dst, ftz)
    whole = next((m for m in ins.mods if m in TO_INTEGER), None)

    def run(g):
        v = widen(np.ascontiguousarray(np.atleast_1d(x)))
        if ftz and src == "f32":
            v = F.flush32(v)
        if whole:
            v = np.copysign(TO_INTEGER[whole](v), v)
        store(g, v)

    return run


def _integer_to_float(b, ins, dst, src):
    x, rnd = b.source(ins.args[1], src), _rounding(ins)
    store = _finish(b, ins, dst, False)
    exact = np.dtype(TYPES[src]).itemsize <= 4
    target = b.target(ins.args[0], dst)

    def run(g):
        v = np.atleast_1d(x)
        if exact:
            store(g, v.astype(np.float64))
            return
        # 64 bits do not fit a float64: cut to the top 62 with a sticky bit, convert, scale back.
        if rnd == "rn" and dst in ("f32", "f64"):
            put(target, v.astype(target.dtype), g.where)
            return
        negative = (v < 0) if v.dtype.kind == "i" else np.zeros(v.shape, bool)
        mag = np.where(negative, -v.view(np.uint64), v.view(np.uint64))
        high = (mag >> np.uint64(11)).astype(np.float64) * 2048.0
        out = F.add_odd(high, (mag & np.uint64(2047)).astype(np.float64))
        out = np.where(negative, -out, out)
        if dst == "f64":
            ints = [int(value) for value in v]
            out = np.array([F.round_fraction(F.Fraction(value), rnd) if value else 0.0 for value in ints])
        store(g, out)

    return run


def _float_to_integer(b, ins, dst, src):
    """Round and clamp to the range.  NaN gives 0; from f64, or to 64 bits, it gives 1 << (bits - 1)."""
    x, widen = b.source(ins.args[1], src), _widen(src)
    whole = next((m for m in ins.mods if m in TO_INTEGER), "rzi")
    target = b.wide_target(ins.args[0], dst[0] == "s")
    info = np.iinfo(TYPES[dst])
    ftz = "ftz" in ins.mods
    top = 1 << (info.bits - 1)
    nan_value = 0 if src != "f64" and info.bits < 64 else (info.min if dst[0] == "s" else top)

    def run(g):
        v = widen(np.ascontiguousarray(np.atleast_1d(x)))
        if ftz and src == "f32":
            v = F.flush32(v)
        v = TO_INTEGER[whole](v.astype(np.float64))
        nan = np.isnan(v)
        low, high = v <= info.min, v >= info.max
        inner = np.where(nan | low | high, 0.0, v)
        out = inner.astype(np.uint64) if dst == "u64" else inner.astype(np.int64)
        kind = out.dtype.type
        out = np.where(low, kind(info.min), np.where(high, kind(info.max), out))
        out = np.where(nan, kind(nan_value), out)
        put(target, out, g.where)

    return run


def _integers(b, ins, dst, src):
    """Truncate or extend; .sat clamps to the destination's range."""
    x = b.source(ins.args[1], src)
    target = b.wide_target(ins.args[0], dst[0] == "s")
    dtype = TYPES[dst]
    if "sat" in ins.mods:
        info, own = np.iinfo(dtype), np.iinfo(TYPES[src])
        low, high = max(info.min, own.min), min(info.max, own.max)
        return lambda g: put(target, np.clip(x, TYPES[src](low), TYPES[src](high)).astype(dtype), g.where)
    if np.dtype(dtype).itemsize == target.itemsize:
        return lambda g: put(target, x, g.where)  # NumPy's unsafe cast truncates and extends by src's sign
    return lambda g: put(target, x.astype(dtype), g.where)


def _pack(b, ins, dst, src):
    """cvt.rn.bf16x2.f32 d, a, b: a in the upper half, b in the lower."""
    if src != "f32" or "satfinite" in ins.mods or len(ins.args) != 3:
        raise unknown(ins)
    hi, lo, target = b.source(ins.args[1], "f32"), b.source(ins.args[2], "f32"), b.target(ins.args[0], "b32")
    convert = F.to_f16 if dst == "f16x2" else F.to_bf16
    rnd, relu, sixteen = _rounding(ins), "relu" in ins.mods, np.uint32(16)

    def run(g):
        x, y = np.atleast_1d(hi), np.atleast_1d(lo)
        if relu:
            x, y = (np.where(np.isnan(v), v, np.maximum(v, np.float32(0))) for v in (x, y))
        put(target, (convert(x, rnd).astype(np.uint32) << sixteen) | convert(y, rnd), g.where)

    return run


def _tf32(b, ins):
    if "satfinite" in ins.mods or ins.mods[-1] != "f32":
        raise unknown(ins)
    x, target, rnd = b.source(ins.args[1], "b32"), b.target(ins.args[0], "b32"), _rounding(ins)

    def run(g):
        bits = F.to_tf32(np.atleast_1d(x), rnd)
        if "relu" in ins.mods:
            bits = np.where((bits.view(np.float32) > 0) | np.isnan(bits.view(np.float32)), bits, np.uint32(0))
        put(target, bits, g.where)

    return run


@instruction("cvta")
def cvta(b, ins):
    """cvta.space: to generic; cvta.to.space: from generic."""
    only(ins, "to", "global", "shared", "local", "const", "param", "cta", "u64", "u32")
    space = next(
        m.split("::")[0]
        for m in ins.mods
        if m.split("::")[0] in ("global", "shared", "local", "const", "param")
    )
    window = np.uint64(PARAM_WINDOW if space == "param" else WINDOWS[space])
    kind = ins.mods[-1]
    if kind != "u64":
        raise unknown(ins)
    x, target = b.source(ins.args[1], "u64"), b.target(ins.args[0], "u64")
    ufunc = np.subtract if "to" in ins.mods else np.add
    return lambda g: ufunc(x, window, out=target, where=g.where)


@instruction("isspacep")
def isspacep(b, ins):
    space = ins.mods[0].split("::")[0]
    x, target = b.source(ins.args[1], "u64"), b.target(ins.args[0], "pred")
    if space == "global":
        return lambda g: put(target, x >= np.uint64(GLOBAL_BASE), g.where)
    base = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "const": None, "param": PARAM_WINDOW}.get(space, -1)
    if base == -1:
        raise unknown(ins)
    if base is None:
        return lambda g: put(target, False, g.where)
    return lambda g: put(target, (x >= np.uint64(base)) & (x < np.uint64(base + WINDOW_BYTES)), g.where)
