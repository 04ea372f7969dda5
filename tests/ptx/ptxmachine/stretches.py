"""Stretches of simple instructions run by C: records of a kernel, slots of a run, and the calls.

`Table` belongs to a program: each instruction that c/lanes.c knows is one record or a few, whose operands are numbers of
slots.  `Stretches` belongs to a run: it gives every slot its address.  What C does not know, or a memory access that
some check of the NumPy path refuses, is left to the function of the instruction's builder.

PTX_MACHINE_LANES=numpy does without C, as a machine without a compiler does; =c makes a missing compiler an error.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import numpy as np

from burstmpi.backends import compile

from .binding import WINDOWS, Binder
from .memory import GLOBAL_BASE, PARAM_WINDOW
from .ops_memory import HINTS, shape_of, space_of
from .ops_mma import SHAPES
from .parser import SIZES
from .program import TYPES, is_terminator, plan_registers

FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fno-strict-aliasing"]
VECTORS = {"avx2": "-mavx2", "fma": "-mfma"}  # what /proc/cpuinfo lists: flag

RECORD = np.dtype(
    [
        ("op", np.int32),
        ("predicate", np.int32),
        ("negate", np.uint8),
        ("flip", np.uint8),
        ("kind", np.uint8),
        ("bytes", np.uint8),
        ("words", np.uint8),
        ("signed", np.uint8),
        ("wide", np.uint8),
        ("mode", np.uint8),
        ("offset", np.int64),
        ("slot", np.int32, 24),
    ]
)
GLOBAL, SHARED, LOCAL, PARAM = range(4)
LOAD, STORE, ADD, MULTIPLY, MATRICES, SHUFFLE = range(6)
FORMATS = ("bf16", "f16", "tf32", "f64")
SHUFFLES = ("up", "down", "bfly", "idx")

_POINTERS = "wrote read clock known floor turn turns writer author"


class Memory(ctypes.Structure):
    """As in lanes.c."""

    _fields_ = [
        ("base", ctypes.c_uint64),
        ("capacity", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("first", ctypes.c_uint32),
        ("atomic", ctypes.c_uint32),
        ("block", ctypes.c_void_p),
        ("lanes_per_block", ctypes.c_int64),
        ("check", ctypes.c_int64),
        ("shared", ctypes.c_void_p),
        ("shared_size", ctypes.c_int64),
        ("shared_stride", ctypes.c_int64),
        ("shared_valid", ctypes.c_void_p),
        ("local", ctypes.c_void_p),
        ("local_size", ctypes.c_int64),
        ("local_stride", ctypes.c_int64),
        ("local_valid", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("shadow", "warps", "granule", "total", "between_lanes")),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        ("params", ctypes.c_void_p),
        ("param_bytes", ctypes.c_int64),
        ("waiting", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
    ]


def address(array):
    return array.__array_interface__["data"][0]


class Core:
    """lanes.c, loaded.  `operations` {name: (number, sizes of d, a, b, ...)}."""

    def __init__(self):
        has = set(compile.cpuinfo().get("flags", "").split())
        vectors = list(VECTORS.values()) if has.issuperset(VECTORS) else []
        library = compile.load("ptx-lanes", Path(__file__).parent / "c" / "lanes.c", FLAGS + vectors)
        library.lanes_abi.restype = ctypes.c_int64
        if library.lanes_abi() != RECORD.itemsize * 1000000 + ctypes.sizeof(Memory) * 1000 + 16:
            raise compile.BuildError("ptx-lanes: not built from this lanes.c; empty the cache folder")
        library.lanes_name.restype = ctypes.c_char_p
        library.lanes_name.argtypes = [ctypes.c_int64, ctypes.c_char_p]
        self.operations = {}
        sizes = ctypes.create_string_buffer(6)
        while (name := library.lanes_name(len(self.operations), sizes)) is not None:
            self.operations[name.decode()] = len(self.operations), tuple(sizes.raw.rstrip(b"\0"))
        self.run = library.lanes_run
        self.run.restype = ctypes.c_int64
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.run.argtypes = [pointer, number, pointer, number, pointer, pointer]


@cache
def _core(wanted):
    if wanted not in ("", "c", "numpy"):
        raise ValueError("PTX_MACHINE_LANES: c or numpy expected, got %r" % wanted)
    if wanted == "numpy":
        return None
    try:
        return Core()
    except compile.BuildError:
        if wanted == "c":
            raise
        return None


def core():
    """Return the Core, or None: no compiler, or PTX_MACHINE_LANES=numpy."""
    return _core(os.environ.get("PTX_MACHINE_LANES", ""))


# --- instructions as names of operations ----------------------------------------------------------
INTEGERS = {kind for kind in TYPES if kind[0] in "usb" and kind[1:].isdigit()}
FLOATS = {"f16", "bf16", "f16x2", "bf16x2", "f32", "f64"}
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
UNSIGNED_COMPARE = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _bits(kind):
    """u8 … u64: the unsigned type of that size."""
    return "u%d" % (8 * np.dtype(TYPES[kind]).itemsize)


def _unsigned(kind):
    return "u" + kind[1:] if kind in INTEGERS else kind


def _either(kind):
    """u for b, signs stay."""
    return "u" + kind[1:] if kind[0] == "b" and kind in INTEGERS else kind


def _step(ins, name, kinds, args=None, target=None):
    """One operation: (name, target, [(source, kind)])."""
    args = ins.args[1:] if args is None else args
    return [(name, ins.args[0] if target is None else target, list(zip(args, kinds, strict=True)))]


def _plain(*drop, of=lambda kind: kind, op=None):
    """Opcodes whose name is the opcode, but for `drop` and the type as `of` has it; all operands have that type."""

    def steps(ins):
        mods, kind = [m for m in ins.mods[:-1] if m not in drop], ins.mods[-1]
        integer = kind in INTEGERS
        if integer and len(mods) != len(ins.mods) - 1:
            return None
        if "NaN" in mods:
            mods = ["NaN", *(m for m in mods if m != "NaN")]
        name = "_".join([ins.op if integer else op or ins.op, *mods, of(kind) if integer else kind])
        return _step(ins, name, [kind] * (len(ins.args) - 1))

    return steps


def _multiply(ins):
    kind = ins.mods[-1]
    if kind not in INTEGERS:
        return _plain("rn", op="fma" if ins.op == "mad" else None)(ins)
    low = ins.mods[0] == "lo"
    name = "_".join([ins.op, *ins.mods[:-1], _unsigned(kind) if low else kind])
    kinds = [kind, kind] + ([WIDE.get(kind) if ins.mods[0] == "wide" else kind] if ins.op == "mad" else [])
    return _step(ins, name, kinds)


def _logic(ins):
    if len(ins.mods) != 1:
        return None
    kind = ins.mods[0]
    name = "%s_%s" % (ins.op, kind if kind == "pred" else _unsigned(kind))
    return _step(ins, name, [kind] * (len(ins.args) - 1))


def _shift(ins):
    kind = ins.mods[-1]
    name = "_".join([ins.op, *ins.mods[:-1], _unsigned(kind) if ins.op == "shl" else _either(kind)])
    return _step(ins, name, [kind, "u32"])


def _funnel(ins):
    return _step(ins, "_".join([ins.op, *ins.mods[:-1]]), ["b32"] * 3) if ins.mods[-1] == "b32" else None


def _words(ins):
    """lop3 and prmt."""
    return _step(ins, ins.op, ["b32"] * (len(ins.args) - 1)) if ins.mods == ("b32",) else None


def _count(ins):
    return _step(ins, "_".join([ins.op, *ins.mods[:-1], _unsigned(ins.mods[-1])]), ["b" + ins.mods[-1][1:]])


def _field(ins):
    kind = ins.mods[-1]
    return _step(ins, "_".join([ins.op, *ins.mods[:-1], _either(kind)]), [kind] * (len(ins.args) - 3) + ["u32"] * 2)


def _compare(ins):
    test, kind = ins.mods[0], ins.mods[-1]
    mods = list(ins.mods[1:-1])
    combine = next((m for m in mods if m in ("and", "or", "xor")), None)
    if combine:
        mods.remove(combine)
    if kind in INTEGERS:
        kind = _unsigned(kind) if test in ("eq", "ne", *UNSIGNED_COMPARE) else _either(kind)
        test = UNSIGNED_COMPARE.get(test, test)
    name = "_".join(["setp", test, *mods, kind])
    first, second = (ins.args[0][1], ins.args[0][2]) if ins.args[0][0] == "|" else (ins.args[0], None)
    values = ins.args[1:3]
    if combine is None and second is None:
        return _step(ins, name, [kind] * 2, target=first)
    guarded = ins.pred is not None and second is not None and first[1:2] == (ins.pred[0],)
    if guarded or len(ins.args) != (4 if combine else 3):
        return None  # the first result would change the predicate of the second
    # Results wait in scratch arrays until all operands have been read.
    out = _step(ins, name, [kind] * 2, values, ("_", 0))
    results = [(("_", 0), first)]
    if second:
        out += _step(ins, "not_pred", ["pred"], [("_", 0)], ("_", 1))
        results.append((("_", 1), second))
    if combine:
        for scratch, _ in results:
            out += _step(ins, combine + "_pred", ["pred"] * 2, [scratch, ins.args[3]], scratch)
    for scratch, result in results:
        out += _step(ins, "mov_u8", ["pred"], [scratch], result)
    return out


def _select(ins):
    if len(ins.mods) != 1:
        return None
    kind = ins.mods[0]
    return _step(ins, "selp_" + _bits(kind), [kind, kind, "pred"])


def _move(ins):
    kind = ins.mods[-1]
    target, source = ins.args
    if len(ins.mods) != 1 or kind not in TYPES:
        return None
    if target[0] == "v" and source[0] == "r":  # unpack: parts of the register are slots of their own
        width = int(kind[1:]) // len(target[1])
        if width < 16 or any(part[0] == "r" and part[1] == source[1] for part in target[1]):
            return None
        parts = [("r", source[1], width // 8 * i) for i in range(len(target[1]))]
        return [("mov_u%d" % width, to, [(part, "b%d" % width)]) for to, part in zip(target[1], parts)]
    if source[0] == "v" and target[0] != "v":
        width, count = int(kind[1:]) // len(source[1]), len(source[1])
        name = {2: "pack_u%d", 4: "pack4_u%d"}.get(count, "?%d") % width
        return _step(ins, name, ["b%d" % width] * count, source[1])
    if "v" in (target[0], source[0]):
        return None
    return _step(ins, "mov_" + _bits(kind), [kind])


def _convert(ins, width):
    """`width`: bytes of the target's register."""
    dst, src = ins.mods[-2:]
    rest = [m for m in ins.mods[:-2] if m != "rn"]
    if dst in INTEGERS and src in INTEGERS:
        if ins.mods[:-2]:
            return None
        if SIZES[src] >= SIZES[dst]:
            src = dst  # the low part
        elif src[0] == "s" and dst[0] == "u" and SIZES[dst] < width:
            return None
        return _extend(ins.args[0], ins.args[1], src, width)
    if dst in INTEGERS and src in FLOATS:
        if width != SIZES[dst] or "rn" in ins.mods:
            return None
        if not (rest and rest[0] in ("rni", "rzi", "rmi", "rpi")):
            rest = ["rzi", *rest]
    elif src in INTEGERS and (rest or dst not in FLOATS):
        return None
    if dst in ("f16x2", "bf16x2") and len(ins.args) != 3:
        return None
    return _step(ins, "_".join(["cvt", *rest, dst, src]), [src] * (len(ins.args) - 1))


def _extend(target, source, kind, width):
    """A whole register of `width` bytes from a value of type `kind`, or nothing where it is narrower."""
    size = np.dtype(TYPES[kind]).itemsize
    if width < size:
        return None
    number = ("s" if kind[0] == "s" else "u") + str(8 * size)
    name = "mov_u%d" % (8 * size) if width == size else "ext_%s_u%d" % (number, 8 * width)
    return [(name, target, [(source, kind)])]


def _generic(ins):
    """cvta: to and from the generic space."""
    to = ins.mods[0] == "to"
    mods = ins.mods[1:] if to else ins.mods
    space = mods[0].split("::")[0]
    if len(mods) != 2 or mods[1] != "u64" or space not in (*WINDOWS, "param"):
        return None
    window = PARAM_WINDOW if space == "param" else WINDOWS[space]
    return _step(ins, "sub_u64" if to else "add_u64", ["u64"] * 2, [ins.args[1], ("i", window)])


_sum = _plain("rn", of=_unsigned)
_size = _plain(of=lambda kind: "s" + kind[1:])
STEPS = {
    "add": _sum,
    "sub": _sum,
    "mul": _multiply,
    "mad": _multiply,
    "fma": _plain("rn"),
    "div": _plain("rn", "full"),
    "rem": _plain(),
    "abs": _size,
    "neg": _plain(of=_unsigned),
    "min": _plain(of=_either),
    "max": _plain(of=_either),
    "and": _logic,
    "or": _logic,
    "xor": _logic,
    "not": _logic,
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "lop3": _words,
    "prmt": _words,
    "popc": _count,
    "clz": _count,
    "brev": _count,
    "bfe": _field,
    "bfi": _field,
    "rcp": _plain("rn", "approx"),
    "sqrt": _plain("rn", "approx"),
    "rsqrt": _plain("approx"),
    "setp": _compare,
    "selp": _select,
    "mov": _move,
    "cvta": _generic,
}


VERBS = dict.fromkeys(("ld", "st", "red", "atom"), "_access")
VERBS |= {"mma": "_multiply", "ldmatrix": "_matrices", "shfl": "_shuffle"}


class Table:
    """The records of a program, and what its slots are."""

    def __init__(self, program, operations):
        self.program, self.operations = program, operations
        if not hasattr(program, "register_plan"):
            program.register_plan = plan_registers(program)
        self.numbers, self.types = program.register_plan
        self.keys = {}  # of slots that are not whole registers: key -> number
        rows, self.first, self.memory, self.pcs = [], [], [], []
        for ins in program.code:
            self.first.append(len(rows))
            made = None if is_terminator(ins) else self._records(ins)
            self.memory.append(bool(made) and ins.op in ("ld", "st", "red", "atom", "ldmatrix") and made[0][0] < 0)
            rows += made or ()
            self.pcs += [ins.pc] * len(made or ())
        self.first.append(len(rows))
        self.behind = [self._runs(counted) for counted in (False, True)]
        self.records = np.zeros(len(rows), RECORD)
        if rows:
            *fields, slots, bases = zip(*rows)
            for name, column in zip(RECORD.names, fields):
                self.records[name] = column
            width = RECORD["slot"].shape[0] - 1
            self.records["slot"][:, :width] = [row + [0] * (width - len(row)) for row in slots]
            self.records["slot"][:, width] = bases
        del self.operations

    def _runs(self, counted):
        """Return for every pc the end of the instructions from there on that C runs: accesses that are to be counted are
        NumPy's."""
        out, end = [0] * len(self.memory), len(self.memory)
        for pc in reversed(range(len(self.memory))):
            if self.first[pc] == self.first[pc + 1] or (counted and self.memory[pc]):
                end = pc
            out[pc] = end
        return out

    # --- operands ---------------------------------------------------------------------------------
    def _storage(self, name):
        return np.dtype(self.types[self.numbers[name]])

    def _key(self, *key):
        return self.keys.setdefault(key, len(self.types) + len(self.keys))

    def _register(self, operand, size, predicate):
        """The slot of a register that is at least `size` bytes wide, behind byte operand[2] of it; None if it does not fit."""
        name, start = operand[1], operand[2] if len(operand) > 2 else 0
        storage = self._storage(name)
        if (storage == np.bool_) != predicate or start + size > storage.itemsize:
            return None
        return self.numbers[name] if not start else self._key("part", name, start)

    def source(self, operand, kind, size):
        tag = operand[0]
        if tag == "r":
            return self._register(operand, size, kind == "pred")
        if tag == "_":
            return self._key(*operand)
        if tag in ("i", "f"):
            value = Binder.source(None, operand, kind)
            return self._key("constant", value.tobytes().ljust(8, b"\0"))
        if tag == "x" and kind != "pred":
            return self._key("special", operand[1], np.dtype(TYPES[kind]).str)
        if tag == "s" and kind in INTEGERS:
            return self._key("symbol", operand[1], operand[2])
        if tag == "parameter":
            return self._key(*operand)
        return None

    def target(self, operand, size, predicate):
        if operand[0] == "_":
            return self._key(*(operand if len(operand) > 1 else ("_", 2)))
        return self._register(operand, size, predicate) if operand[0] == "r" else None

    # --- instructions -----------------------------------------------------------------------------
    def _records(self, ins):
        """Return the records of an instruction, or None: it is the builder's."""
        if ins.op in VERBS:
            return getattr(self, VERBS[ins.op])(ins)
        steps = None
        if ins.op == "cvt":
            target = ins.args[0]
            if target[0] == "r" and self._storage(target[1]) != np.bool_:
                steps = _convert(ins, self._storage(target[1]).itemsize)
        elif ins.op in STEPS and ins.mods:
            try:
                steps = STEPS[ins.op](ins)
            except (KeyError, ValueError):  # another type or number of operands: the builder's
                steps = None
        return self._rows(ins, steps)

    def _rows(self, ins, steps):
        rows = []
        for name, target, sources in steps or ():
            number, sizes = self.operations.get(name, (None, ()))
            if number is None or len(sizes) != len(sources) + 1:
                return None
            flip, slots = 0, [self.target(target, sizes[0], self._gives_predicate(name, sources))]
            for i, ((operand, kind), size) in enumerate(zip(sources, sizes[1:])):
                if operand[0] == "!" and kind == "pred":
                    flip |= 1 << i
                    operand = operand[1]
                slots.append(self.source(operand, kind, size))
            if None in slots:
                return None
            rows.append(self._row(ins, number, flip, slots))
        return rows or None

    @staticmethod
    def _gives_predicate(name, sources):
        return name.startswith("setp_") or name.endswith("_pred") or (name == "mov_u8" and sources[0][1] == "pred")

    def _row(self, ins, op, flip, slots, kind=0, size=0, words=0, signed=0, wide=0, mode=0, offset=0, base=0):
        predicate, negate = (self.numbers[ins.pred[0]], ins.pred[1]) if ins.pred else (-1, False)
        return op, predicate, negate, flip, kind, size, words, signed, wide, mode, offset, slots, base

    def _verb(self, ins, slots, verb, space=0, **fields):
        """One record of what is no elementwise operation, or None where an operand does not fit."""
        if None in slots or fields.get("base", 0) is None:
            return None
        return [self._row(ins, -1, 0, slots, verb << 4 | space, **fields)]

    def _place(self, memory, space):
        """Return (space, fields of the address) of a memory operand, or None."""
        base, offset = memory[1:]
        if base[0] == "s":
            if base[1] in self.program.local_offsets:
                space = "local"
            elif base[1] not in self.program.shared_offsets or space != "shared":
                return None
            slot, wide = self.source(base, "u64", 8), True
        elif base[0] == "r":
            wide = self._storage(base[1]).itemsize == 8
            slot = self._register(base, 8 if wide else 4, False)
        else:
            return None
        spaces = {"global": GLOBAL, "shared": SHARED, "local": LOCAL, "param": PARAM}
        return (spaces[space], {"base": slot, "wide": wide, "offset": offset}) if space in spaces else None

    def _access(self, ins):
        """ld, st, and red and atom of sums of floats, of one space, up to 16 bytes."""
        kind, space = ins.mods[-1], space_of(ins)
        mods = [m for m in ins.mods[:-1] if m not in HINTS and m.split("::")[0] not in (*WINDOWS, "param")]
        vector = mods.pop() if mods and mods[-1] in ("v2", "v4") else None
        args = list(ins.args)
        result = args.pop(0) if ins.op in ("ld", "atom") else None
        memory, value = args[0], result if ins.op == "ld" else args[1]
        if kind not in SIZES or kind in ("pred", "b128") or memory[0] != "m":
            return None
        kind, count, size = shape_of(ins)
        parts = value[1] if value[0] == "v" else [value]
        base, offset = memory[1:]
        if len(parts) != count or (value[0] == "v") != (vector is not None) or count * size > 16:
            return None
        if ins.op == "ld" and base[0] == "s" and any(p.name == base[1] for p in self.program.function.params):
            fits = space in ("param", "generic") and not mods
            return self._parameter(ins, kind, size, parts, base[1], offset) if fits else None
        place = self._place(memory, space)
        sums = ins.op in ("red", "atom")
        if place is None or mods != ["add"] * sums or (space == "param" and ins.op != "ld"):
            return None
        space, fields = place
        if ins.op == "ld":
            slots = [self.target(part, size, False) for part in parts]
            return self._verb(ins, slots, LOAD, space, size=size, words=count, signed=kind[0] == "s", **fields)
        slots = [self.source(part, "b%d" % (8 * size), size) for part in parts]
        if not sums:
            return self._verb(ins, slots, STORE, space, size=size, words=count, **fields)
        if kind not in ("f32", "f64") or space != GLOBAL or vector or len(args) != 2:
            return None
        if result is not None:
            slots.append(self.target(result, size, False))
        return self._verb(ins, slots, ADD, space, size=size, words=1, mode=result is not None, **fields)

    def _multiply(self, ins):
        """mma.sync with sums in float32 or float64."""
        mods = [m for m in ins.mods if m != "rn"]
        if len(mods) != 9 or mods[:2] != ["sync", "aligned"] or mods[3:5] != ["row", "col"]:
            return None
        (name, to, left, right, start), parts = (mods[2], *mods[5:]), []
        if (name, left) not in SHAPES or left != right or to != start or to != ("f64" if left == "f64" else "f32"):
            return None
        m, rest = name[1:].split("n")
        halves, depth = int(m) // 8, int(rest.split("k")[1])
        steps, size = depth // (8 if left in ("bf16", "f16") else 4), 8 if left == "f64" else 4
        for operand, count in zip(ins.args, (2 * halves, halves * steps, steps, 2 * halves)):
            parts.append(operand[1] if operand[0] == "v" else [operand])
            if len(parts[-1]) != count:
                return None
        slots = [self.target(part, size, False) for part in parts[0]]
        slots += [self.source(part, to if i == 2 else "b%d" % (8 * size), size) for i in range(3) for part in parts[i + 1]]
        return self._verb(ins, slots, MULTIPLY, size=FORMATS.index(left), words=halves, wide=depth)

    def _matrices(self, ins):
        """ldmatrix."""
        mods = [m.split("::")[0] for m in ins.mods]
        mode = "trans" in mods
        if mode:
            mods.remove("trans")
        if mods[:3] != ["sync", "aligned", "m8n8"] or mods[4:] != ["shared", "b16"] or mods[3] not in ("x1", "x2", "x4"):
            return None
        place = self._place(ins.args[1], "shared")
        parts = ins.args[0][1] if ins.args[0][0] == "v" else [ins.args[0]]
        if place is None or place[0] != SHARED or len(parts) != int(mods[3][1]):
            return None
        slots = [self.target(part, 4, False) for part in parts]
        return self._verb(ins, slots, MATRICES, SHARED, words=len(parts), mode=mode, **place[1])

    def _shuffle(self, ins):
        """shfl.sync."""
        result, *sources = ins.args
        mods = ins.mods
        if len(sources) != 4 or len(mods) != 3 or mods[0] != "sync" or mods[1] not in SHUFFLES or mods[2] != "b32":
            return None
        first, second = (result[1], result[2]) if result[0] == "|" else (result, None)
        given = second is not None and second[0] != "_"
        slots = [self.target(first, 4, False), self.target(second, 1, True) if given else 0]
        slots += [self.source(source, "b32", 4) for source in sources]
        return self._verb(ins, slots, SHUFFLE, words=1 + given, mode=SHUFFLES.index(mods[1]))

    def _parameter(self, ins, kind, size, parts, name, offset):
        """ld.param of a name: the same for all lanes."""
        param = next(p for p in self.program.function.params if p.name == name)
        start = param.offset + offset
        if start < 0 or start + size * len(parts) > self.program.function.param_bytes:
            return None
        number = ("s" if kind[0] == "s" else "u") + str(8 * size)
        steps = []
        for i, part in enumerate(parts):
            if part[0] != "r" or self._storage(part[1]) == np.bool_:
                return None
            step = _extend(part, ("parameter", start + i * size), number, self._storage(part[1]).itemsize)
            if step is None:
                return None
            steps += step
        return self._rows(ins, steps)


def table_of(program):
    """Return the Table of a program, kept with it; None without C."""
    if core() is not None and getattr(program, "table", None) is None:
        program.table = Table(program, core().operations)
    return getattr(program, "table", None)


class Stretches:
    """A Table with the arrays of a run."""

    def __init__(self, run, binder):
        program, self.core = run.program, core()
        self.run, self.table = run, table_of(program)
        self.behind = self.table.behind[bool(run.machine.count)]  # pc -> end of the instructions from there on that C runs
        table, lanes = self.table, run.total
        self.slots = np.zeros((len(table.types) + len(table.keys), 2), np.int64)
        self.kept = []  # arrays that only slots refer to
        self.slots[: len(table.types), 0] = [address(array) for array in run.register_arrays]
        self.slots[: len(table.types), 1] = [array.itemsize for array in run.register_arrays]
        for key, i in table.keys.items():
            self.slots[i] = self._slot(binder, key)
        self.scratch = np.zeros((12, lanes), np.uint64)
        self.memory = self._memory()
        self.fixed = address(self.slots), lanes
        self.records = address(table.records)
        self.where = ctypes.addressof(self.memory)

    def _slot(self, binder, key):
        """Return (address, bytes from lane to lane) of what is no whole register."""
        run, tag = self.run, key[0]
        if tag == "part":
            array = run.registers[key[1]]
            return address(array) + key[2], array.itemsize
        if tag == "parameter":
            return address(run.params) + key[1], 0
        if tag == "constant":
            array = np.frombuffer(key[1], np.uint64).copy()
            stride = 0
        elif tag == "symbol":
            value = binder.address_of(key[1])[1] + key[2] & 0xFFFFFFFFFFFFFFFF
            array, stride = np.array([value], np.uint64), 0
        elif tag == "special":
            array = binder.special(key[1], np.dtype(key[2]))
            stride = array.strides[0] if array.ndim else 0
        else:
            array, stride = np.zeros(run.total, np.uint64), 8
            if key[1] < 2:  # a predicate's
                stride = 1
        self.kept.append(array)
        return address(array), stride

    def _memory(self):
        run, out = self.run, Memory()
        memory, shared, local, shadow = run.memory, run.shared, run.local, run.shadow
        out.base, out.capacity = GLOBAL_BASE, memory.capacity
        out.data, out.state, out.owner = (address(a) for a in (memory.data, memory.state, memory.owner))
        out.lanes_per_block, out.check = run.lanes_per_block, bool(run.check)
        for name, one in (("shared", shared), ("local", local)):
            setattr(out, name, address(one.data))
            setattr(out, name + "_size", one.size)
            setattr(out, name + "_stride", one.stride)
            setattr(out, name + "_valid", None if one.valid is None or not one.size else address(one.valid))
        out.warps = run.warps
        if shadow is not None:
            out.shadow, out.warps, out.granule, out.total = 1, shadow.warps, shadow.granule, shadow.total
            out.between_lanes = bool(shadow.lanes)
            for name in _POINTERS.split():
                setattr(out, name, address(getattr(shadow, name)))
        out.params, out.param_bytes = address(run.params), run.program.function.param_bytes
        out.scratch = address(self.scratch)
        return out

    def begin(self):
        """Note what changes with a chunk of blocks."""
        run = self.run
        self.memory.block, self.memory.waiting = address(run.lane_chunk_block), 0
        if run.owners is not None:
            self.memory.first, self.memory.atomic = run.owners.first, int(run.owners.atomic)

    def takes(self, pc):
        """Whether C runs the instruction."""
        return self.behind[pc] > pc

    def stretch(self, start, end):
        """Return a function of a group that runs the instructions [start, end), all of them taken."""
        table, run, call = self.table, self.run, self.core.run
        first, last = table.first[start], table.first[end]
        size, (slots, lanes), where = RECORD.itemsize, self.fixed, self.where
        at, count = self.records + first * size, last - first

        def run_stretch(g):
            done = call(at, count, slots, lanes, g.address, where)
            while done < count:
                pc = run.at = table.pcs[first + done]
                run.operation(pc)(g)
                behind = table.first[pc + 1]
                done = behind - first + call(
                    self.records + behind * size, last - behind, slots, lanes, g.address, where
                )
            run.at = None

        return run_stretch


__all__ = ["Core", "Stretches", "Table", "core"]
