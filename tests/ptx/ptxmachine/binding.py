"""How an instruction becomes a function: operands as arrays, results under a mask.

An instruction is added by writing a builder

    @instruction("add")
    def add(b, ins):
        a, c, d = b.source(ins.args[1], "u32"), b.source(ins.args[2], "u32"), b.target(ins.args[0], "u32")
        return lambda g: np.add(a, c, out=d, where=g.where)

A builder runs once per launch size, the function once per step for all lanes.  Functions must compute before they
write (a result may share its array with an operand) and must write under `g.where` only.
"""

import numpy as np

from .memory import LOCAL_WINDOW, SHARED_WINDOW
from .parser import PtxError
from .program import STORAGE, TYPES

BUILDERS = {}
ONE, ZERO = np.uint32(1), np.uint32(0)


def instruction(*names):
    """Register a builder for the opcodes `names`."""

    def register(builder):
        for name in names:
            BUILDERS[name] = builder
        return builder

    return register


def put(target, value, where):
    np.copyto(target, value, where=where, casting="unsafe")


def unknown(ins):
    return PtxError("PTX line %d: unknown instruction %s" % (ins.line, ins.opcode))


def only(ins, *allowed):
    """Raise for a modifier that is not among `allowed`: an unknown modifier must not be ignored."""
    for mod in ins.mods:
        if mod not in allowed:
            raise PtxError("PTX line %d: unknown modifier .%s in instruction %s" % (ins.line, mod, ins.opcode))


class Binder:
    """Turns operands of a run's kernel into arrays."""

    def __init__(self, run):
        self.run, self.registers, self.total = run, run.registers, run.total
        self.carry = np.zeros(run.total, bool)  # the CC flag of add.cc and its like

    def _view(self, name, dtype):
        array = self.registers[name]
        size = np.dtype(dtype).itemsize
        if array.dtype == np.bool_ or dtype == np.bool_:
            if array.dtype != dtype:
                raise PtxError("kernel %s: predicate %s used as a number" % (self.run.program.name, name))
            return array
        if size == array.itemsize:
            return array.view(dtype)
        if size < array.itemsize:  # the low part
            return array.view(dtype)[:: array.itemsize // size]
        raise PtxError("kernel %s: register %s is narrower than its use" % (self.run.program.name, name))

    def source(self, operand, kind):
        """Return an operand as an array (lanes,) or a 0-d constant of PTX type `kind`."""
        dtype = np.dtype(TYPES[kind])
        tag = operand[0]
        if tag == "r":
            return self._view(operand[1], dtype.type)
        if tag == "i":
            if dtype.kind == "f":
                raw = operand[1]
                return np.array(raw & ((1 << 8 * dtype.itemsize) - 1), STORAGE[dtype.itemsize]).view(dtype)
            if dtype == np.bool_:
                return np.array(bool(operand[1]))
            return np.array(operand[1] & ((1 << 8 * dtype.itemsize) - 1), STORAGE[dtype.itemsize]).view(dtype)
        if tag == "f":
            bits, width = operand[1], operand[2]
            if width == 8 * dtype.itemsize:
                return np.array(bits, STORAGE[dtype.itemsize]).view(dtype)
            value = np.array(bits, STORAGE[width // 8]).view(np.float32 if width == 32 else np.float64)
            if dtype.kind == "f":
                return value.astype(dtype)
            if kind == "f16":
                return value.astype(np.float16).view(np.uint16)
            return value.astype(np.float32).view(np.uint32)
        if tag == "x":
            return self.special(operand[1], dtype)
        if tag == "s":
            return np.array(
                self.address_of(operand[1])[1] + operand[2] & ((1 << 8 * dtype.itemsize) - 1),
                STORAGE[dtype.itemsize],
            ).view(dtype)
        if tag == "!":
            raise PtxError("negated operand where a number was expected")
        raise PtxError("operand %r is not a value" % (operand,))

    def target(self, operand, kind):
        """Return the array that a result of type `kind` goes to (a scratch array for the sink `_`)."""
        if operand[0] == "_":
            return np.zeros(self.total, TYPES[kind])
        if operand[0] != "r":
            raise PtxError("operand %r cannot take a result" % (operand,))
        return self._view(operand[1], TYPES[kind])

    def wide_target(self, operand, signed):
        """Return a register as a whole integer, for results narrower than the register (ld.u8, cvt)."""
        if operand[0] == "_":
            return np.zeros(self.total, np.int64)
        array = self.registers[operand[1]]
        if not signed:
            return array
        return array.view({1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[array.itemsize])

    def predicate(self, operand):
        """Return a function that gives the predicate operand (maybe negated) as a bool array."""
        if operand[0] == "!":
            inner = self.predicate(operand[1])
            return lambda: ~inner()
        if operand[0] == "i":
            value = np.full(self.total, bool(operand[1]))
            return lambda: value
        array = self.registers[operand[1]]
        if array.dtype != np.bool_:
            raise PtxError("kernel %s: %s is not a predicate" % (self.run.program.name, operand[1]))
        return lambda: array

    def vector(self, operand):
        """Return the list of operands of a vector, or the operand alone in a list."""
        return operand[1] if operand[0] == "v" else [operand]

    # --- names ------------------------------------------------------------------------------------
    def address_of(self, name):
        """Return (space, address) of a variable."""
        run = self.run
        if name in run.program.shared_offsets:
            return "shared", run.program.shared_offsets[name]
        if name in run.program.local_offsets:
            return "local", run.program.local_offsets[name]
        for param in run.program.function.params:
            if param.name == name:
                return "param", param.offset
        if name in run.module.addresses:
            return "global", run.module.addresses[name]
        raise PtxError("kernel %s: unknown name %s" % (run.program.name, name))

    def special(self, name, dtype):
        """Return a special register as an array or constant of `dtype`."""
        run = self.run
        base, _, axis = name.partition(".")
        axis = "xyz".find(axis) if axis else -1
        lane = run.lane_id
        if base == "%tid":
            value = run.thread_xyz[axis]
        elif base == "%ctaid":
            value = run.block_xyz[axis]
        elif base == "%nctaid":
            value = run.grid_arrays[axis]
        elif base == "%ntid":
            value = run.grid_arrays[3 + axis]
        elif base == "%laneid":
            value = lane
        elif base == "%warpid":
            value = (run.thread // 32).astype(np.uint32)
        elif base == "%nwarpid":
            value = np.array(run.warps, np.uint32)
        elif base == "%lanemask_eq":
            value = ONE << lane
        elif base == "%lanemask_lt":
            value = (ONE << lane) - ONE
        elif base == "%lanemask_le":
            value = ((np.uint32(2) << lane) - ONE).astype(np.uint32)
        elif base == "%lanemask_ge":
            value = ~((ONE << lane) - ONE)
        elif base == "%lanemask_gt":
            value = ~((np.uint32(2) << lane) - ONE)
        elif base in ("%smid", "%gridid", "%cluster_ctarank", "%cluster_ctaid", "%is_explicit_cluster"):
            value = np.zeros((), np.uint32)
        elif base in ("%nsmid", "%cluster_nctarank", "%cluster_nctaid"):
            value = np.ones((), np.uint32)
        elif base == "%dynamic_smem_size":
            value = np.array(run.dynamic_shared, np.uint32)
        elif base == "%total_smem_size":
            value = np.array(run.dynamic_shared + run.program.static_shared, np.uint32)
        else:
            raise PtxError(
                "kernel %s: special register %s is not supported (the machine has no time)"
                % (run.program.name, name)
            )
        if dtype.itemsize == 4:
            return value.view(dtype)
        if value.ndim == 0 or base not in ("%tid", "%ctaid", "%nctaid", "%ntid"):
            return value.astype(STORAGE[dtype.itemsize]).view(dtype)
        if dtype.itemsize < 4:
            return value.view(dtype)[:: 4 // dtype.itemsize]
        raise PtxError("kernel %s: %s as a 64-bit value is not supported" % (run.program.name, name))


WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "global": 0, "const": 0}
