"""A kernel prepared to run: basic blocks, loops, storage of variables, and the binding of registers to arrays.

A register is one NumPy array over all lanes of the blocks that run together.  Registers that live inside one
basic block share arrays from a pool, so that the working set stays in the cache.
"""

import os

import numpy as np

from .parser import PtxError, SIZES

TYPES = {
    "u8": np.uint8,
    "b8": np.uint8,
    "s8": np.int8,
    "u16": np.uint16,
    "b16": np.uint16,
    "s16": np.int16,
    "u32": np.uint32,
    "b32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "b64": np.uint64,
    "s64": np.int64,
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.uint16,
    "bf16": np.uint16,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "tf32": np.uint32,
    "pred": np.bool_,
}
STORAGE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NO_RESULT = {
    "st",
    "red",
    "bra",
    "brx",
    "bar",
    "barrier",
    "cp",
    "ret",
    "exit",
    "membar",
    "fence",
    "prefetch",
    "prefetchu",
    "trap",
    "nanosleep",
    "stmatrix",
    "call",
    "brkpt",
    "pmevent",
    "discard",
    "applypriority",
    "griddepcontrol",
}
TERMINATORS = {"bra", "brx", "ret", "exit", "bar", "barrier", "trap"}
SHARED_GUARD = 128  # between static shared variables; a multiple keeps the banks


def is_terminator(ins):
    return ins.op in TERMINATORS and not (ins.op in ("bar", "barrier") and "warp" in ins.mods)


def registers_of(operand):
    """Yield the register names in an operand."""
    kind = operand[0]
    if kind == "r":
        yield operand[1]
    elif kind == "v":
        for item in operand[1]:
            yield from registers_of(item)
    elif kind in ("m", "!"):
        yield from registers_of(operand[1])
    elif kind == "|":
        yield from registers_of(operand[1])
        yield from registers_of(operand[2])


def definitions(ins):
    """Return (written, read) register name lists of an instruction."""
    if ins.op == "call":
        return [], [r for group in (ins.args[0], ins.args[2]) for a in group for r in registers_of(a)]
    args = ins.args
    results = 0 if ins.op in NO_RESULT and not (ins.op in ("bar", "barrier") and "red" in ins.mods) else 1
    written = [r for a in args[:results] for r in registers_of(a)]
    read = [r for a in args[results:] for r in registers_of(a)]
    if ins.pred:
        read.append(ins.pred[0])
    return written, read


class Loop:
    """PCs [start, end] from a backward branch at `end` to `start`."""

    def __init__(self, start, end):
        self.start, self.end, self.depth = start, end, 1


class Program:
    """One kernel of a Module: what does not depend on the size of a launch."""

    def __init__(self, module, function):
        self.module, self.function, self.name = module, function, function.name
        self.code = function.instructions
        if not self.code or not (
            self.code[-1].op in ("ret", "exit", "trap", "bra", "brx") and not self.code[-1].pred
        ):
            last = self.code[-1].line if self.code else 0
            raise PtxError("kernel %s: no ret at its end (PTX line %d)" % (self.name, last))
        self._blocks()
        self._loops()
        self._shared()
        self._local()

    def source(self, ins):
        """Return (file, line) of the CUDA C that `ins` came from, or None."""
        if ins.source is None:
            return None
        return os.path.basename(self.module.files.get(ins.source[0], "?")), ins.source[1]

    def _blocks(self):
        leaders = {0}
        for pc, ins in enumerate(self.code):
            targets = ins.target if isinstance(ins.target, list) else [] if ins.target is None else [ins.target]
            leaders.update(targets)
            if is_terminator(ins):
                leaders.add(pc + 1)
        self.leaders = sorted(pc for pc in leaders if pc < len(self.code))
        if max(leaders) > len(self.code):
            raise PtxError("kernel %s: branch beyond its end" % self.name)
        bounds = self.leaders + [len(self.code)]
        self.block_end = np.zeros(len(self.code), int)  # first pc that is not of this pc's block
        self.block_of = np.zeros(len(self.code), int)
        for i, (start, end) in enumerate(zip(bounds, bounds[1:])):
            self.block_end[start:end] = end
            self.block_of[start:end] = i

    def _loops(self):
        ends = {}
        for pc, ins in enumerate(self.code):
            for target in ins.target if isinstance(ins.target, list) else [ins.target]:
                if target is not None and target <= pc:
                    ends[target] = max(pc, ends.get(target, pc))
        self.loops = [Loop(start, end) for start, end in sorted(ends.items())]
        for loop in self.loops:
            loop.depth = 1 + sum(
                o is not loop and o.start <= loop.start and loop.end <= o.end for o in self.loops
            )

    def _symbols(self):
        names = set()

        def walk(operand):
            if operand[0] == "s":
                names.add(operand[1])
            elif operand[0] == "v":
                for item in operand[1]:
                    walk(item)
            elif operand[0] in ("m", "!"):
                walk(operand[1])
            elif operand[0] == "|":
                walk(operand[1]), walk(operand[2])

        for ins in self.code:
            if ins.op not in ("bra", "call"):
                for operand in ins.args:
                    walk(operand)
            elif ins.op == "call":
                for operand in ins.args[0] + ins.args[2]:
                    walk(operand)
        return names

    def _shared(self):
        """Lay out static shared variables, each with a guard behind it; dynamic ones start behind all."""
        used = self._symbols()
        variables = [
            v
            for v in list(self.module.variables.values()) + list(self.function.variables.values())
            if v.space == "shared" and v.name in used
        ]
        self.shared_offsets, self.static_shared, self.dynamic_align = {}, 0, 16
        self.shared_spans, offset = [], 0
        for v in variables:
            if v.extern or v.size == 0:
                self.dynamic_align = max(self.dynamic_align, v.align)
                continue
            offset = -(-offset // v.align) * v.align
            self.static_shared = -(-self.static_shared // v.align) * v.align + v.size
            self.shared_offsets[v.name] = offset
            self.shared_spans.append((offset, v.size))
            offset = -(-(offset + v.size) // SHARED_GUARD) * SHARED_GUARD + SHARED_GUARD
        self.dynamic_base = -(-offset // self.dynamic_align) * self.dynamic_align
        for v in variables:
            if v.name not in self.shared_offsets:
                self.shared_offsets[v.name] = self.dynamic_base
        self.granule = self._granule()

    def _granule(self):
        """Return the smallest shared access of the kernel in bytes (accesses with no space may be shared)."""
        smallest = 16
        for ins in self.code:
            if ins.op in ("ld", "st", "atom", "red") and not {"global", "const", "param", "local"} & set(
                ins.mods
            ):
                size = SIZES.get(ins.mods[-1], 4)
                count = next((int(m[1]) for m in ins.mods if m in ("v2", "v4", "v8")), 1)
                smallest = min(smallest, size * count)
            elif ins.op == "cp" and ins.mods[:1] == ("async",) and len(ins.args) >= 3:
                smallest = min(smallest, ins.args[2][1])
        return smallest

    def _local(self):
        self.local_offsets, offset = {}, 0
        for v in self.function.variables.values():
            if v.space in ("local", "param"):
                offset = -(-offset // max(v.align, 1)) * max(v.align, 1)
                self.local_offsets[v.name] = offset
                offset += v.size
                offset = -(-offset // 16) * 16 + (16 if v.space == "local" else 0)  # a guard
        self.local_bytes = offset
        self.local_spans = [
            (self.local_offsets[v.name], v.size)
            for v in self.function.variables.values()
            if v.space in ("local", "param")
        ]


def plan_registers(program):
    """Return {register name: number of its array} and the types of the arrays, block-local registers sharing arrays."""
    code, kinds = program.code, program.function.registers
    named = [definitions(ins) for ins in code]
    homes, first_is_write, seen = {}, {}, {}
    for pc, ins in enumerate(code):
        written, read = named[pc]
        block = int(program.block_of[pc])
        for name in read:
            homes.setdefault(name, set()).add(block)
            first_is_write.setdefault(name, False)
            seen[name] = pc
        for name in written:
            homes.setdefault(name, set()).add(block)
            first_is_write.setdefault(name, not ins.pred)
            seen[name] = pc

    def storage(name):
        kind = kinds[name]
        if kind not in TYPES:
            raise PtxError("kernel %s: register %s of type .%s is not supported" % (program.name, name, kind))
        return np.bool_ if kind == "pred" else STORAGE[SIZES[kind]]

    numbers, types, free = {}, [], {}
    for pc, (written, read) in enumerate(named):
        for name in written + read:
            if name not in numbers:
                dtype = storage(name)
                local = len(homes[name]) == 1 and first_is_write[name]
                pool = free.setdefault(dtype, [])
                if local and pool:
                    numbers[name] = pool.pop()
                else:
                    numbers[name] = len(types)
                    types.append(dtype)
        for name in set(written + read):
            if seen[name] == pc and len(homes[name]) == 1 and first_is_write[name]:
                free[storage(name)].append(numbers[name])
    return numbers, types


def allocate_registers(program, lanes):
    """Return {register name: array over `lanes`}, and the arrays in the order of the plan."""
    if not hasattr(program, "register_plan"):
        program.register_plan = plan_registers(program)
    numbers, types = program.register_plan
    arrays = [np.zeros(lanes, dtype) for dtype in types]
    return {name: arrays[number] for name, number in numbers.items()}, arrays
