"""mma.sync: fragments of all warps become batches of small matrices.

A fragment is described by `layout(shape) -> (row, col)` arrays [register, element, lane], from the tables of the PTX
manual with group = lane/4 and thread = lane%4.  Products are exact; the sum over k and the accumulator is made in
float64 and rounded once to float32 (the manual leaves order and inner precision open).  f64 products are a chain
of fused multiply-adds over k.
"""

from functools import lru_cache

import numpy as np

from . import floats as F
from .binding import instruction, unknown
from .program import definitions

LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4


@lru_cache(None)
def layout(matrix, shape, kind):
    """Return (row, col), each [register, element, lane], of operand "a", "b" or "c" of an mma.

    kind: "b16" (two elements a register), "tf32" or "f64" (one) for a and b; "f32", "f64" or "f16" for c.
    """
    m, n, k = shape
    rows, cols = [], []

    def register(*elements):
        rows.append([np.broadcast_to(e[0], (32,)) for e in elements])
        cols.append([np.broadcast_to(e[1], (32,)) for e in elements])

    if matrix == "c":
        for half in range(m // 8):
            pair = [(GROUP + 8 * half, 2 * THREAD), (GROUP + 8 * half, 2 * THREAD + 1)]
            if kind == "f16":
                register(*pair)
            else:
                register(pair[0])
                register(pair[1])
    elif kind == "b16":
        for step in range(k // 8):
            if matrix == "a":
                for half in range(m // 8):
                    register(*((GROUP + 8 * half, 2 * THREAD + e + 8 * step) for e in (0, 1)))
            else:
                register(*((2 * THREAD + e + 8 * step, GROUP) for e in (0, 1)))
    else:  # tf32 and f64: steps of four along k
        for step in range(k // 4):
            if matrix == "a":
                for half in range(m // 8):
                    register((GROUP + 8 * half, THREAD + 4 * step))
            else:
                register((THREAD + 4 * step, GROUP))
    return np.array(rows), np.array(cols)


# (m, n, k) -> types of a and b that we run
SHAPES = {
    ("m16n8k16", "f16"),
    ("m16n8k16", "bf16"),
    ("m16n8k8", "f16"),
    ("m16n8k8", "bf16"),
    ("m16n8k8", "tf32"),
    ("m16n8k4", "tf32"),
    ("m8n8k4", "f64"),
    ("m16n8k4", "f64"),
    ("m16n8k8", "f64"),
    ("m16n8k16", "f64"),
}


def _decode(bits, kind):
    """Turn register words (warps, 32) into float32/float64 elements (warps, 32, elements)."""
    if kind == "bf16":
        out = np.empty(bits.shape + (2,), np.float32)
        raw = out.view(np.uint32)
        np.left_shift(bits, np.uint32(16), out=raw[..., 0])
        np.bitwise_and(bits, np.uint32(0xFFFF0000), out=raw[..., 1])
        return out
    if kind == "f16":
        return np.ascontiguousarray(bits).view(np.float16).reshape(bits.shape + (2,)).astype(np.float32)
    if kind == "tf32":  # the low 13 bits are not looked at
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    return bits.view(np.float64)[..., None]


class Fragment:
    """Registers of one operand and how to make the matrix [warp, row, col] (float64) of them."""

    def __init__(self, b, operands, matrix, shape, kind):
        self.names = tuple(o[1] if o[0] == "r" else o for o in operands)
        self.kind = kind
        size = "b64" if kind == "f64" else "b32"
        self.values = [b.source(o, size) for o in operands]
        self.values = [v if v.ndim else np.full(b.total, v) for v in self.values]
        m, n, k = shape
        self.rows, self.cols = (m, k) if matrix == "a" else (k, n)
        self.matrix = matrix
        row, col = layout(matrix, shape, kind if kind in ("f64", "tf32") else "b16")
        if len(self.values) != len(row):
            raise ValueError("%d registers for operand %s, %d expected" % (len(self.values), matrix, len(row)))
        # Every register covers a block of 8 rows (a) or columns (b) along the group index; first element's corner:
        self.corner = [(int(r[0, 0]), int(c[0, 0])) for r, c in zip(row, col)]

    def matrices(self, warps):
        count = len(warps) if warps is not None else self.values[0].size // 32
        out = np.empty((count, self.rows, self.cols))
        for value, (row, col) in zip(self.values, self.corner):
            bits = value.reshape(-1, 32)
            x = _decode(bits if warps is None else bits[warps], self.kind)  # (warps, 32, elements)
            elements = x.shape[-1]
            x = x.reshape(count, 8, 4 * elements)  # [warp, group, thread·element]
            if self.matrix == "a":
                out[:, row : row + 8, col : col + 4 * elements] = x
            else:
                out[:, row : row + 4 * elements, col : col + 8] = x.swapaxes(1, 2)
        return out


def _fragment_names(operand):
    return tuple(o[1] if o[0] == "r" else o for o in (operand[1] if operand[0] == "v" else [operand]))


def _reusable(program):
    """Return {(pc, registers): pc of an earlier mma of the basic block that decoded the same unchanged registers}."""
    if not hasattr(program, "decoded_before"):
        found, alive, using = {}, {}, {}
        leaders = set(program.leaders)
        for ins in program.code:
            if ins.pc in leaders:
                alive, using = {}, {}  # registers -> pc, register -> keys
            if ins.op == "mma":
                for operand in ins.args[1:3]:
                    names = _fragment_names(operand)
                    if names in alive:
                        found[ins.pc, names] = alive[names]
                    if ins.pred is None:
                        alive[names] = ins.pc
                        for name in names:
                            using.setdefault(name, set()).add(names)
            if ins.op != "call":
                for name in definitions(ins)[0]:
                    for names in using.pop(name, ()):
                        alive.pop(names, None)
        program.decoded_before = found
    return program.decoded_before


@instruction("mma")
def mma(b, ins):
    """mma.sync.aligned.shape.row.col.dtype.atype.btype.ctype d, a, b, c."""
    mods = [m for m in ins.mods if m not in ("rn",)]
    if mods[:2] != ["sync", "aligned"] or mods[3:5] != ["row", "col"] or len(mods) != 9:
        raise unknown(ins)
    name, (dkind, akind, bkind, ckind) = mods[2], mods[5:9]
    if (name, akind) not in SHAPES or akind != bkind or dkind != ckind:
        raise unknown(ins)
    if (
        (akind == "f64") != (dkind == "f64")
        or dkind not in ("f32", "f64", "f16")
        or (dkind == "f16" and akind != "f16")
    ):
        raise unknown(ins)
    m, rest = name[1:].split("n")
    n, k = rest.split("k")
    shape = int(m), int(n), int(k)
    run = b.run
    size = "f64" if dkind == "f64" else "b32" if dkind == "f16" else "f32"
    vectors = [b.vector(a) for a in ins.args]
    targets = [b.target(o, size) for o in vectors[0]]
    left = Fragment(b, vectors[1], "a", shape, akind)
    right = Fragment(b, vectors[2], "b", shape, akind)
    start = [b.source(o, size) for o in vectors[3]]
    start = [v if v.ndim else np.full(b.total, v) for v in start]
    groups = shape[0] // 8
    if len(targets) != len(start) or len(targets) != (groups if dkind == "f16" else 2 * groups):
        raise unknown(ins)
    cache = b.run.__dict__.setdefault("fragments", {})  # (pc, operand) -> (serial, matrices)
    reuse = _reusable(run.program)

    def matrices(part, warps):
        # The serial changes with every stretch of code that a group runs: within one, the lanes are the same.
        if ins.pred is None:
            other = cache.get((reuse.get((ins.pc, part.names)), part.names))
            if other is not None and other[0] == run.serial:
                cache[ins.pc, part.names] = other
                return other[1]
        out = part.matrices(warps)
        if ins.pred is None:
            cache[ins.pc, part.names] = (run.serial, out)
        return out

    def accumulators(warps):
        """Return c as (warps, m, 8) float64."""
        first = start[0].reshape(-1, 32)
        count = len(first) if warps is None else len(warps)
        out = np.empty((count, groups, 8, 4, 2))
        for i, value in enumerate(start):
            bits = value.reshape(-1, 32)
            bits = bits if warps is None else bits[warps]
            if dkind == "f16":
                out[:, i] = _decode(bits, "f16").reshape(count, 8, 4, 2)
            else:
                out[:, i // 2, :, :, i % 2] = bits.reshape(count, 8, 4)
        return out.reshape(count, groups * 8, 8)

    def multiply(g):
        run.whole(g, ins)
        warps = None if g.full else g.active_warps()
        x, y, out = matrices(left, warps), matrices(right, warps), accumulators(warps)
        if dkind == "f64":
            for step in range(shape[2]):
                out = F.fma64(
                    np.broadcast_to(x[:, :, step, None], out.shape),
                    np.broadcast_to(y[:, None, step], out.shape),
                    out,
                )
        else:
            out += np.matmul(x, y)
        out = out.reshape(len(out), groups, 8, 4, 2)
        if dkind == "f32":
            out = out.astype(np.float32)
            flat = out.ravel()
            if np.isnan(np.dot(flat, flat)):
                out = np.where(np.isnan(out), F.NAN32.view(np.float32), out)
        for i, target in enumerate(targets):
            if dkind == "f16":
                value = np.ascontiguousarray(F.to_f16(out[:, i].reshape(-1))).view(np.uint32).reshape(-1, 32)
            else:
                value = out[:, i // 2, :, :, i % 2].reshape(-1, 32)
            if warps is None:
                target.reshape(-1, 32)[...] = value
            else:
                target.reshape(-1, 32)[warps] = value

    return multiply
