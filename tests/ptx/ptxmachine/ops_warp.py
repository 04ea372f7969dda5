"""Instructions of a whole warp: shuffles, votes, bar.warp, matrix loads and stores."""

import numpy as np

from .binding import instruction, only, put, unknown
from .ops_memory import access_of, addresses
from .sanitizer import ANY_LANE

FULL = np.uint32(0xFFFFFFFF)


def _bits(mask):
    """Pack a bool array (warps·32,) into one uint32 per warp."""
    return np.packbits(mask.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32).ravel()


@instruction("bar", "barrier")
def warp_barrier(b, ins):
    """bar.warp.sync mask: wait for the lanes of the mask (block barriers are control flow, see barriers.py)."""
    if "warp" not in ins.mods or "sync" not in ins.mods:
        raise unknown(ins)
    mask, run = b.source(ins.args[0], "b32"), b.run

    def wait(g):
        run.members(g, ins, mask)
        if run.shadow is not None:
            run.shadow.warp_barrier(g.lanes, np.broadcast_to(mask, (b.total,))[g.lanes])

    return wait


@instruction("shfl")
def shfl(b, ins):
    """d|p = a of lane j, j from mode, lane and the clamp operand c (segment mask in bits 8-12)."""
    only(ins, "sync", "up", "down", "bfly", "idx", "b32")
    if "sync" not in ins.mods:
        raise unknown(ins)
    mode = ins.mods[1]
    first, second = (ins.args[0][1], ins.args[0][2]) if ins.args[0][0] == "|" else (ins.args[0], None)
    target = b.target(first, "b32")
    valid = b.target(second, "pred") if second and second[0] != "_" else None
    value, delta, clamp, mask = (b.source(a, "b32") for a in ins.args[1:5])
    run, total = b.run, b.total
    lane = run.lane_id.astype(np.int64)
    warp_start = run.all_lanes - lane

    def pick():
        bval = (delta & np.uint32(31)).astype(np.int64)
        cval, segment = (clamp & np.uint32(31)).astype(np.int64), (
            (clamp >> np.uint32(8)) & np.uint32(31)
        ).astype(np.int64)
        top = (lane & segment) | (cval & ~segment & 31)
        if mode == "up":
            j = lane - bval
            inside = j >= top
        elif mode == "down":
            j = lane + bval
            inside = j <= top
        elif mode == "bfly":
            j = lane ^ bval
            inside = j <= top
        else:
            j = (lane & segment) | (bval & ~segment & 31)
            inside = j <= top
        return warp_start + np.where(inside, j, lane), inside

    constant = pick() if delta.ndim == 0 and clamp.ndim == 0 else None

    def shuffle(g):
        run.members(g, ins, mask)
        source, inside = constant or pick()
        if not g.full or mask.ndim:  # lanes of the group may shuffle under masks of their own
            members = np.broadcast_to(mask, (total,)) >> (source % 32).astype(np.uint32) & np.uint32(1)
            missing = g.mask & (~g.mask[source] | (members == 0))
            if missing.any():
                at = int(np.flatnonzero(missing)[0])
                raise run.fault(
                    "missing lanes", "shfl reads lane %d, which does not take part" % (source[at] % 32), ins, at
                )
        put(target, np.broadcast_to(value, (total,))[source], g.where)
        if valid is not None:
            put(valid, inside, g.where)

    return shuffle


def _member_bits(b, g, mask):
    """Return the member lanes of each lane's own mask that are here, (lanes,) uint32: halves of a warp may differ."""
    return np.repeat(_bits(g.mask), 32) & np.broadcast_to(mask, (b.total,))


def _member_lanes(b, g, mask):
    """Return the members of each lane's own mask as [warp, lane, other] bool; lane is 1 if all masks of a warp agree."""
    bits = _member_bits(b, g, mask).reshape(-1, 32)
    if mask.ndim == 0:
        bits = bits[:, :1]
    return ((bits[:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)).astype(bool)


@instruction("vote")
def vote(b, ins):
    only(ins, "sync", "all", "any", "uni", "ballot", "pred", "b32")
    if "sync" not in ins.mods:
        raise unknown(ins)
    test, mask, mode, run = b.predicate(ins.args[1]), b.source(ins.args[2], "b32"), ins.mods[1], b.run
    target = b.target(ins.args[0], "b32" if mode == "ballot" else "pred")

    def count(g):
        run.members(g, ins, mask)
        members = _member_bits(b, g, mask)
        yes = members & np.repeat(_bits(test()), 32)
        if mode == "ballot":
            out = yes
        elif mode == "all":
            out = yes == members
        elif mode == "any":
            out = yes != 0
        else:
            out = (yes == members) | (yes == 0)
        put(target, out, g.where)

    return count


@instruction("activemask")
def activemask(b, ins):
    target = b.target(ins.args[0], "b32")
    return lambda g: put(target, np.repeat(_bits(g.mask), 32), g.where)


@instruction("elect")
def elect(b, ins):
    """elect.sync d|p, mask: the lowest lane of the mask is the leader."""
    only(ins, "sync")
    run = b.run
    target, leads = b.target(ins.args[0][1], "b32"), b.target(ins.args[0][2], "pred")
    mask = b.source(ins.args[1], "b32")

    def choose(g):
        run.members(g, ins, mask)
        first = np.broadcast_to(_member_lanes(b, g, mask).argmax(2), (b.total // 32, 32)).ravel()
        put(target, first, g.where)
        put(leads, first == run.lane_id, g.where)

    return choose


@instruction("match")
def match(b, ins):
    only(ins, "any", "all", "sync", "b32", "b64")
    kind, run = ins.mods[-1], b.run
    pair = ins.args[0][0] == "|"
    target = b.target(ins.args[0][1] if pair else ins.args[0], "b32")
    same = b.target(ins.args[0][2], "pred") if pair else None
    value, mask = b.source(ins.args[1], kind), b.source(ins.args[2], "b32")

    def compare(g):
        run.members(g, ins, mask)
        members = _member_lanes(b, g, mask)
        rows = np.broadcast_to(value, (b.total,)).reshape(-1, 32)
        equal = (rows[:, :, None] == rows[:, None, :]) & members  # [warp, lane, other]
        if "any" in ins.mods:
            put(target, _bits(equal.reshape(-1, 32)), g.where)
            return
        alike = (equal == members).all(2).ravel()
        put(target, np.where(alike, _member_bits(b, g, mask), np.uint32(0)), g.where)
        if same is not None:
            put(same, alike, g.where)

    return compare


@instruction("redux")
def redux(b, ins):
    kind, run, op = ins.mods[-1], b.run, ins.mods[1]
    only(ins, "sync", "add", "min", "max", "and", "or", "xor", "u32", "s32", "b32")
    value, mask, target = b.source(ins.args[1], kind), b.source(ins.args[2], "b32"), b.target(ins.args[0], kind)
    ufunc = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[op]
    info = np.iinfo(value.dtype)
    start = {
        "add": 0,
        "or": 0,
        "xor": 0,
        "min": info.max,
        "max": info.min,
        "and": -1 if info.min < 0 else info.max,
    }[op]

    def reduce(g):
        run.members(g, ins, mask)
        rows = np.broadcast_to(value, (b.total,)).reshape(-1, 32)
        own = np.where(_member_lanes(b, g, mask), rows[:, None, :], value.dtype.type(start))
        out = ufunc.reduce(own, axis=2, dtype=value.dtype)
        put(target, np.broadcast_to(out, (b.total // 32, 32)).ravel(), g.where)

    return reduce


# --- matrices in shared memory --------------------------------------------------------------------
def _matrix_mods(b, ins):
    """Return (number of 8×8 matrices, transposed) of ldmatrix or stmatrix."""
    only(ins, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    if "m8n8" not in ins.mods or "b16" not in ins.mods:
        raise unknown(ins)
    return next(int(m[1]) for m in ins.mods if m in ("x1", "x2", "x4")), "trans" in ins.mods


def _transpose(words):
    """Transpose 8×8 matrices of 16-bit elements: words (..., 8, 4) uint32."""
    halves = words.view(np.uint16)  # (..., 8, 8)
    return np.ascontiguousarray(halves.swapaxes(-1, -2)).view(np.uint32)


def _rows(run, g, count):
    """Return (active warps or None for all, lanes that give row addresses, positions of them)."""
    if g.full and count == 4:
        return run.all_lanes
    return (g.active_warps()[:, None] * 32 + np.arange(8 * count)).ravel()


@instruction("ldmatrix")
def ldmatrix(b, ins):
    """Lane 8i + r gives the address of row r of matrix i; lane l gets row l/4, columns 2(l%4) and the next."""
    count, trans = _matrix_mods(b, ins)
    targets = [b.target(p, "b32") for p in b.vector(ins.args[0])]
    address, space = addresses(b, ins.args[1], "shared")
    run, access = b.run, access_of(b)

    def load(g):
        run.whole(g, ins)
        lanes = _rows(run, g, count)
        where = _address_of_lanes(b, ins.args[1], lanes) if len(lanes) != b.total else address(g)
        words = access.load_shared(lanes, where, 16, 4, ins, ANY_LANE).reshape(-1, count, 8, 4)
        if trans:
            words = _transpose(words)
        words = words.reshape(-1, count, 32)
        for i, target in enumerate(targets):
            if g.full:
                target.reshape(-1, 32)[...] = words[:, i]
            else:
                target.reshape(-1, 32)[g.active_warps()] = words[:, i]

    return load


def _address_of_lanes(b, operand, lanes):
    """Return the addresses (n,) uint64 that `lanes` hold in an address operand."""
    base, offset = operand[1], operand[2]
    if base[0] != "r":
        value = b.address_of(base[1])[1] if base[0] == "s" else base[1]
        return np.full(len(lanes), np.uint64(value + offset))
    register = b.registers[base[1]][lanes]
    if register.itemsize == 4:
        return (register + np.uint32(offset & 0xFFFFFFFF)).astype(np.uint64)
    return register + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)


@instruction("stmatrix")
def stmatrix(b, ins):
    count, trans = _matrix_mods(b, ins)
    values = [b.source(p, "b32") for p in b.vector(ins.args[1])]
    run, access = b.run, access_of(b)

    def store(g):
        run.whole(g, ins)
        lanes, warps = _rows(run, g, count), g.active_warps()
        words = np.stack([np.broadcast_to(v, (b.total,)).reshape(-1, 32)[warps] for v in values], 1).reshape(
            -1, count, 8, 4
        )
        if trans:
            words = _transpose(words)
        access.store_shared(
            lanes, _address_of_lanes(b, ins.args[0], lanes), words.reshape(-1, 4), 16, 4, ins, ANY_LANE
        )

    return store


@instruction("movmatrix")
def movmatrix(b, ins):
    """Transpose an 8×8 matrix of 16-bit elements that the warp holds in one register."""
    only(ins, "sync", "aligned", "m8n8", "trans", "b16")
    value, target, run = b.source(ins.args[1], "b32"), b.target(ins.args[0], "b32"), b.run

    def move(g):
        run.whole(g, ins)
        put(target, _transpose(value.reshape(-1, 8, 4).copy()).ravel(), g.where)

    return move
