"""ld, st, cp.async, atom, red and the instructions that only order or hint."""

import numpy as np

from . import floats as F
from .access import Access
from .binding import instruction, only, put, unknown
from .memory import UNITS
from .parser import SIZES, PtxError
from .program import TYPES

SPACES = ("global", "shared", "local", "const", "param")
HINTS = {
    "weak",
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "mmio",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "unified",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "nc",
    "wb",
    "wt",
    "acq_rel",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::evict_first",
    "L2::evict_last",
    "L2::evict_normal",
    "noftz",
}


def access_of(b):
    if not hasattr(b.run, "access"):
        b.run.access = Access(b.run)
    return b.run.access


def space_of(ins):
    for mod in ins.mods:
        name, _, scope = mod.partition("::")
        if name in SPACES and scope in ("", "cta", "entry", "func"):
            return "global" if name == "const" else name
        if name in SPACES:  # shared::cluster
            raise unknown(ins)
    return "generic"


def addresses(b, operand, space):
    """Return f(g) -> addresses (n,) uint64 of the active lanes, and the space (a name may tell it)."""
    kind, base, offset = operand
    offset = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
    if base[0] in ("s", "i"):
        if base[0] == "s":
            where, value = b.address_of(base[1])
            if space in ("generic", "param") or where == "local":
                space = where
        else:
            value = base[1]
        constant = np.uint64((value + int(offset)) & 0xFFFFFFFFFFFFFFFF)
        return (lambda g: np.full(len(g.lanes), constant)), space
    register = b.registers[base[1]]
    if register.itemsize == 4:
        low = np.uint32(int(offset) & 0xFFFFFFFF)
        return (lambda g: (g.pick(register) + low).astype(np.uint64)), space
    return (lambda g: g.pick(register) + offset), space


def shape_of(ins):
    """Return (type, words, bytes of a word) of a load or store."""
    kind = ins.mods[-1]
    count = next((int(m[1]) for m in ins.mods if m in ("v2", "v4", "v8")), 1)
    if kind not in SIZES or kind == "pred":
        raise unknown(ins)
    return kind, count, SIZES[kind]


def check_mods(ins, *more):
    """Refuse modifiers that the machine does not know, and spaces of a cluster."""
    for mod in ins.mods:
        if mod not in HINTS and mod.partition("::")[0] not in SPACES and mod not in more and mod not in SIZES:
            raise PtxError("PTX line %d: unknown modifier .%s in instruction %s" % (ins.line, mod, ins.opcode))


@instruction("ld", "ldu")
def load(b, ins):
    check_mods(ins, "v2", "v4", "v8")
    kind, count, size = shape_of(ins)
    if kind == "b128":
        raise unknown(ins)
    address, space = addresses(b, ins.args[1], space_of(ins))
    access, nbytes, run = access_of(b), count * size, b.run
    signed = kind[0] == "s"
    parts = b.vector(ins.args[0])
    if len(parts) != count:
        raise PtxError("PTX line %d: %d registers for %s" % (ins.line, len(parts), ins.opcode))
    targets = [b.wide_target(part, signed) for part in parts]
    dtype = np.dtype("%s%d" % ("i" if signed else "u", size))
    if space == "param" and ins.args[1][1][0] == "s":  # the same for all lanes
        start = b.address_of(ins.args[1][1][1])[1] + ins.args[1][2]
        if start + nbytes > run.program.function.param_bytes:
            raise PtxError("PTX line %d: parameter read beyond its end" % ins.line)

        def load_param(g):
            values = run.params[start : start + nbytes].view(dtype)
            for target, value in zip(targets, values):
                put(target, value, g.where)

        return load_param

    def run_load(g):
        values = access.load(space, g.lanes, address(g), nbytes, size, ins)
        if signed:
            values = values.view(dtype)
        if count == 1:
            _give(targets[0], values, g)
        else:
            for i, target in enumerate(targets):
                _give(target, values[:, i], g)

    return run_load


def _give(target, values, g):
    if g.full:
        target[:] = values
    else:
        target[g.lanes] = values


@instruction("st")
def store(b, ins):
    check_mods(ins, "v2", "v4", "v8")
    kind, count, size = shape_of(ins)
    if kind == "b128":
        raise unknown(ins)
    address, space = addresses(b, ins.args[0], space_of(ins))
    access, nbytes = access_of(b), count * size
    parts = b.vector(ins.args[1])
    if len(parts) != count:
        raise PtxError("PTX line %d: %d registers for %s" % (ins.line, len(parts), ins.opcode))
    values = [b.source(part, "b%d" % (8 * size)) for part in parts]

    def run_store(g):
        lanes = g.lanes
        if count == 1:
            data = np.broadcast_to(g.pick(values[0]), (len(lanes),))
        else:
            data = np.empty((len(lanes), count), UNITS[size])
            for i, value in enumerate(values):
                data[:, i] = g.pick(value)
        access.store(space, lanes, address(g), data, nbytes, size, ins)

    return run_store


# --- cp.async -------------------------------------------------------------------------------------
@instruction("cp")
def cp(b, ins):
    mods = ins.mods
    if mods[:2] == ("async", "commit_group"):
        return lambda g: _commit(b.run, g)
    if mods[:2] == ("async", "wait_group"):
        keep = ins.args[0][1]
        return lambda g: _wait(b.run, g, keep, ins)
    if mods[:2] == ("async", "wait_all"):
        return lambda g: _wait(b.run, g, None, ins)
    if mods[0] != "async" or "bulk" in mods or "mbarrier" in mods or "global" not in mods:
        raise unknown(ins)
    for mod in mods[1:]:
        if mod not in (
            "ca",
            "cg",
            "shared",
            "shared::cta",
            "global",
            "L2::64B",
            "L2::128B",
            "L2::256B",
            "L2::cache_hint",
        ):
            raise PtxError("PTX line %d: unknown modifier .%s in instruction %s" % (ins.line, mod, ins.opcode))
    size = ins.args[2][1]
    if size not in (4, 8, 16) or ("cg" in mods and size != 16):
        raise PtxError("PTX line %d: cp.async of %d bytes" % (ins.line, size))
    to, _ = addresses(b, ins.args[0], "shared")
    source, _ = addresses(b, ins.args[1], "global")
    extra = ins.args[3] if len(ins.args) > 3 else None
    kind = b.registers[extra[1]].dtype if extra and extra[0] == "r" else None
    hint = "L2::cache_hint" in mods
    if extra and hint and len(ins.args) == 4 and (kind is None or kind.itemsize == 8):
        extra = None  # a cache policy, not a size
    ignore = b.predicate(extra) if kind == np.bool_ else None
    length = b.source(extra, "u32") if extra is not None and ignore is None else None
    run, access = b.run, access_of(b)
    unit = min(size, 8)

    def copy(g):
        lanes, target = g.lanes, to(g)
        index = access.shared_index(lanes, target, size, ins, "cp.async")
        address = source(g)
        data = np.zeros((len(lanes),) if size == unit else (len(lanes), size // unit), UNITS[unit])
        if ignore is not None:
            count = np.where(g.pick(ignore()), np.uint32(0), np.uint32(size))
        elif length is not None:
            count = np.broadcast_to(g.pick(length), (len(lanes),))
        else:
            count = None
        if count is None:
            data[...] = access.load_global(lanes, address, size, unit, ins)
        else:
            if (count > size).any():
                raise run.fault(
                    "out of bounds",
                    "cp.async of %d of %d bytes" % (count.max(), size),
                    ins,
                    lanes[int(count.argmax())],
                )
            some = np.flatnonzero(count)  # a part of a copy must be aligned as the whole
            access._aligned(address[some], size, lanes[some], ins, "global")
            whole = np.flatnonzero(count == size)
            if len(whole):
                data[whole] = access.load_global(lanes[whole], address[whole], size, unit, ins)
            for at in np.flatnonzero((count > 0) & (count < size)):
                row = data.reshape(len(lanes), -1)[at : at + 1].view(np.uint8).ravel()
                for i in range(int(count[at])):  # zero-fill behind `count` bytes
                    row[i] = access.load_global(
                        lanes[at : at + 1], address[at : at + 1] + np.uint64(i), 1, 1, ins
                    )[0]
                data.reshape(len(lanes), -1)[at] = row.view(UNITS[unit])
        if run.shadow is not None:
            access._report(
                run.shadow.on_write(run.lane_warp[lanes], index, size, lanes % 32, flight=True), ins, lanes
            )
        if run.counters is not None:
            run.counters.shared_access(ins, run.lane_warp[lanes], lanes, target, size)
        if run.machine.cp_async == "early":
            run.shared.view(size, unit)[index] = data
        run.copies.append((lanes, run.committed[lanes], index, data, size, unit))

    return copy


def _commit(run, g):
    run.committed[g.lanes] += 1


def _wait(run, g, keep, ins):
    """Land the copies of the active lanes but those of the last `keep` committed groups (None: all, committed or not)."""
    left = []
    for lanes, group, index, data, size, unit in run.copies:
        if g.full:
            done = np.ones(len(lanes), bool)
        else:
            done = g.mask[lanes]
        if keep is not None:
            done &= group < run.committed[lanes] - keep
        if not done.any():
            left.append((lanes, group, index, data, size, unit))
            continue
        if not done.all():
            rest = ~done
            left.append((lanes[rest], group[rest], index[rest], data[rest], size, unit))
            lanes, index, data = lanes[done], index[done], data[done]
        if run.machine.cp_async == "late":
            run.shared.view(size, unit)[index] = data
        if run.shadow is not None:
            run.shadow.landed(run.lane_warp[lanes], index, size, lanes % 32)
    run.copies = left


# --- atomics --------------------------------------------------------------------------------------
def _float_add(kind, space, old, value):
    """The add of atom and red: to nearest; global f32 flushes subnormals, shared keeps them."""
    if kind == "f32":
        x, y = old.view(np.float32), value.view(np.float32)
        if space == "global":
            x, y = F.flush32(x), F.flush32(y)
        out = x + y
        if space == "global":
            out = F.flush32(out)
        return np.where(np.isnan(out), F.NAN32, out.view(np.uint32))
    if kind == "f64":
        return (old.view(np.float64) + value.view(np.float64)).view(np.uint64)
    fmt = kind.replace("x2", "")
    widen, narrow = (F.f16_to_32, F.to_f16) if fmt == "f16" else (F.bf16_to_32, F.to_bf16)
    x, y = (np.ascontiguousarray(v).view(np.uint16) for v in (old, value))
    return narrow(widen(x) + widen(y)).view(old.dtype).reshape(old.shape)


def _half_min_max(kind, op, old, value):
    fmt = kind.replace("x2", "")
    widen, narrow = (F.f16_to_32, F.to_f16) if fmt == "f16" else (F.bf16_to_32, F.to_bf16)
    x, y = (np.ascontiguousarray(v).view(np.uint16) for v in (old, value))
    return narrow(F.min_max32(widen(x), widen(y), op == "max", False)).view(old.dtype).reshape(old.shape)


@instruction("atom", "red")
def atomic(b, ins):
    ops = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    check_mods(ins, "v2", "v4", "v8", *ops)
    op = next((m for m in ins.mods if m in ops), None)
    kind, count, size = shape_of(ins)
    if op is None or kind == "b128":
        raise unknown(ins)
    args = list(ins.args)
    result = args.pop(0) if ins.op == "atom" else None
    address, space = addresses(b, args[0], space_of(ins))
    if kind in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
        if op == "add":
            combine = lambda old, v, where: _float_add(kind, where, old, v)
        elif op in ("min", "max") and kind.replace("x2", "") in ("f16", "bf16"):
            combine = lambda old, v, where: _half_min_max(kind, op, old, v)
        else:
            raise unknown(ins)
    else:
        dtype = TYPES[kind]
        table = {
            "add": np.add,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
            "exch": lambda o, v: v,
            "inc": lambda o, v: np.where(o >= v, dtype(0), o + dtype(1)),
            "dec": lambda o, v: np.where((o == 0) | (o > v), v, o - dtype(1)),
            "cas": None,
        }
        function, unsigned = table[op], UNITS[size]
        combine = (
            lambda old, v, where: np.asarray(function(old.view(dtype), v.view(dtype)))
            .astype(dtype)
            .view(unsigned)
        )
    parts = [b.source(p, "b%d" % (8 * size)) for p in b.vector(args[1])]
    swap = b.source(args[2], "b%d" % (8 * size)) if op == "cas" else None
    targets = [b.target(p, "b%d" % (8 * size)) for p in b.vector(result)] if result is not None else []
    access, nbytes = access_of(b), count * size

    def run(g):
        lanes = g.lanes
        if count == 1:
            value = np.broadcast_to(g.pick(parts[0]), (len(lanes),))
        else:
            value = np.stack([np.broadcast_to(g.pick(p), (len(lanes),)) for p in parts], 1)
        if op == "cas":
            new = np.broadcast_to(g.pick(swap), (len(lanes),))
            function = lambda old, at, where: np.where(old == value[at], new[at], old)
        else:
            function = lambda old, at, where: combine(old, np.ascontiguousarray(value[at]), where)
        old = access.atomic(space, lanes, address(g), nbytes, size, ins, function)
        for i, target in enumerate(targets):
            _give(target, old if count == 1 else old[:, i], g)

    return run


# --- order and hints: nothing to do, every access here is in order --------------------------------
@instruction("membar", "fence")
def fence(b, ins):
    only(
        ins,
        "cta",
        "gl",
        "gpu",
        "sys",
        "sc",
        "acq_rel",
        "cluster",
        "acquire",
        "release",
        "proxy",
        "alias",
        "async",
        "global",
        "shared::cta",
    )
    return lambda g: None


@instruction(
    "prefetch", "prefetchu", "discard", "applypriority", "nanosleep", "pmevent", "griddepcontrol", "brkpt"
)
def hint(b, ins):
    return lambda g: None


@instruction("createpolicy")
def createpolicy(b, ins):
    target = b.target(ins.args[0], "b64")
    return lambda g: put(target, 0, g.where)


@instruction("call")
def call(b, ins):
    """Only assert is left as a call; the rest is inlined by the parser, and printf is refused."""
    name = ins.args[1]

    def stop(g):
        raise b.run.fault("assert", "device assertion failed", ins, g.lanes[0])

    if name == "__assertfail":
        return stop
    raise PtxError("PTX line %d: call of %s is not supported" % (ins.line, name))
