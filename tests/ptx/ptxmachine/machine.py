"""The machine: runs a kernel of PTX over all lanes of many blocks at once.

Lanes that stand at the same instruction form a group; the group at the smallest pc runs until its basic block ends,
and merges with whom it meets.  A `.sync` instruction waits until all lanes that it names have come, a barrier until
the whole block has.  When nobody can run and somebody waits, that is a fault.
"""

import os
from contextlib import contextmanager

import numpy as np

from . import (  # noqa: F401 (they register instructions)
    ops_convert,
    ops_float,
    ops_integer,
    ops_memory,
    ops_mma,
    ops_warp,
)  # noqa: F401 (they register instructions)
from .barriers import barrier_control
from .binding import BUILDERS, Binder
from .counters import Counters
from .faults import Fault, LaunchError
from .memory import GLOBAL_BASE, LOCAL_WINDOW, SHARED_WINDOW, BlockMemory, GlobalMemory
from .parser import PtxError
from .program import allocate_registers, is_terminator
from .sanitizer import GlobalOwners, SharedShadow
from .stored import parsed
from .stretches import Stretches, core

PATIENCE = 4096  # stretches of code after which a group that is ready gets its turn


class Group:
    """Lanes that run together.  `where` is the NumPy mask argument: True if all lanes are in."""

    __slots__ = ("mask", "full", "where", "_lanes", "run", "warps", "_address")

    def __init__(self, run, mask, full=None):
        self.run, self.mask = run, mask
        self.full = bool(mask.all()) if full is None else full
        self.where = True if self.full else mask
        self._lanes = self._address = None
        self.warps = None

    @property
    def address(self):
        """Where the mask is, for C: None if all lanes are in."""
        if self._address is None and not self.full:
            self._address = self.mask.__array_interface__["data"][0]
        return self._address

    @property
    def lanes(self):
        """Indices of the active lanes (n,)."""
        if self._lanes is None:
            self._lanes = self.run.all_lanes if self.full else np.flatnonzero(self.mask)
        return self._lanes

    def pick(self, array):
        """Return the active lanes of a register array (or a scalar as it is)."""
        return array if self.full or array.ndim == 0 else array[self.lanes]

    def narrowed(self, predicate):
        return Group(self.run, predicate.copy() if self.full else predicate & self.mask)

    def active_warps(self):
        """Return (numbers of warps with an active lane)."""
        if self.warps is None:
            self.warps = np.flatnonzero(self.mask.reshape(-1, 32).any(1))
        return self.warps


class Incomplete(Exception):
    """A warp-wide instruction met a group in which lanes are missing."""


class Module:
    """PTX loaded into a machine's memory."""

    def __init__(self, machine, text):
        self.parsed = parsed(text)
        self.target = self.parsed.target
        self.addresses = {}
        for v in self.parsed.variables.values():
            if v.space in ("global", "const"):
                address = machine.memory.alloc(v.size)
                self.addresses[v.name] = address
        for v in self.parsed.variables.values():
            if v.space in ("global", "const") and v.size:
                data, state = machine.memory.span(self.addresses[v.name], v.size)
                image = bytearray(v.data or bytes(v.size))  # module variables without initialiser are zero
                for at, name, addend in v.fixups:
                    image[at : at + 8] = (self.addresses[name] + addend).to_bytes(8, "little")
                data[:] = np.frombuffer(bytes(image), np.uint8)
                state[:] = 3

    def program(self, name):
        programs = self.parsed.programs
        if name not in programs:
            raise KeyError("no kernel %r in the module; it has %s" % (name, sorted(programs)))
        return programs[name]


class Machine:
    """A device with memory, and the switches of a run.

    check      find races, never-written reads, exact bounds (else only what would break the machine itself)
    warp_races find missing __syncwarp between lanes of one warp too
    count      keep Counters of each launch in `self.counters`
    cp_async   "late": a copy lands when it is waited for; "early": at once
    order      "forward", "reverse" or an int seed: the order in which blocks and their atomics take their turn
    max_lanes  how many lanes run together
    max_steps  instruction steps after which a chunk of blocks counts as hanging
    """

    def __init__(
        self,
        memory=None,
        check=True,
        warp_races=True,
        count=False,
        cp_async="late",
        order="forward",
        max_lanes=8192,
        max_steps=10_000_000,
    ):
        if cp_async not in ("late", "early"):
            raise ValueError("cp_async: 'late' or 'early' expected, got %r" % (cp_async,))
        self.memory = (
            memory if memory is not None else GlobalMemory(int(os.environ.get("PTX_MACHINE_MEMORY", 1 << 30)))
        )
        self.check, self.count, self.cp_async, self.order, self.warp_races = (
            check,
            count,
            cp_async,
            order,
            warp_races,
        )
        self.max_lanes, self.max_steps = max_lanes, max_steps
        self.counters, self.history = None, []  # of the last launch; of all launches with count=True
        self.launches = 0
        self._runs = {}

    def load(self, text):
        """Parse PTX `text`, place its variables in memory and return a Module."""
        return Module(self, text)

    @contextmanager
    def switched(self, **switches):
        """Change switches (check=, count=, cp_async=, order=...) for a while."""
        old = {name: getattr(self, name) for name in switches}
        for name, value in switches.items():
            setattr(self, name, value)
        try:
            yield self
        finally:
            for name, value in old.items():
                setattr(self, name, value)

    def launch(self, module, name, grid, block, params=b"", shared=0):
        """Run kernel `name` over `grid` × `block` with the parameter bytes `params`.

        Raises Fault with the report, LaunchError for a launch that CUDA refuses.
        """
        program = module.program(name)
        grid, block = _three(grid), _three(block)
        threads = block[0] * block[1] * block[2]
        limit = min(1024, program.function.max_threads or 1024)
        required = program.function.required_threads
        if threads > limit or min(block) < 1 or block[2] > 64 or (required and required != block):
            raise LaunchError(
                "kernel %s: block %s has %d threads, at most %d allowed" % (name, block, threads, limit)
            )
        if min(grid) < 1 or grid[0] > 2**31 - 1 or max(grid[1:]) > 65535:
            raise LaunchError("kernel %s: grid %s is not valid" % (name, grid))
        if len(params) != program.function.param_bytes:
            raise LaunchError(
                "kernel %s: %d parameter bytes given, %d needed"
                % (name, len(params), program.function.param_bytes)
            )
        blocks = grid[0] * grid[1] * grid[2]
        order = np.arange(blocks)
        if self.order == "reverse":
            order = order[::-1].copy()
        elif self.order != "forward":
            np.random.default_rng(self.order).shuffle(order)
        lanes = -(-threads // 32) * 32
        per_chunk = max(1, self.max_lanes // lanes)
        owners = GlobalOwners(self.memory, blocks) if self.check else None
        self.counters = Counters(program) if self.count else None
        if self.count:
            self.history.append(self.counters)
        self.launches += 1
        with np.errstate(all="ignore"):
            for start in range(0, blocks, per_chunk):
                chunk = order[start : start + per_chunk]
                run = self._run(module, program, len(chunk), threads, shared)
                run.begin(chunk, grid, block, params, owners, self.counters)
                run.execute()
        return self.counters

    def _run(self, module, program, blocks, threads, shared):
        """Return a bound Run, reused for launches of the same size."""
        key = (
            id(module),
            program.name,
            blocks,
            threads,
            shared,
            self.check,
            self.count,
            self.cp_async,
            self.warp_races,
        )
        if key not in self._runs:
            while len(self._runs) > 15:
                del self._runs[next(iter(self._runs))]
            self._runs[key] = Run(self, module, program, blocks, threads, shared)
        return self._runs[key]


def _three(value):
    value = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    return tuple(int(x) for x in value) + (1,) * (3 - len(value))


class Run:
    """A kernel bound to arrays for `blocks` blocks of `threads` threads."""

    def __init__(self, machine, module, program, blocks, threads, shared):
        self.machine, self.module, self.program = machine, module, program
        self.memory = machine.memory
        self.blocks, self.threads = blocks, threads
        self.warps = -(-threads // 32)
        self.lanes_per_block = self.warps * 32
        self.total = blocks * self.lanes_per_block
        self.all_lanes = np.arange(self.total)
        self.lane_block = self.all_lanes // self.lanes_per_block  # slot of the block in this chunk
        self.lane_warp = self.all_lanes // 32  # warp number over the chunk
        self.lane_id = (self.all_lanes % 32).astype(np.uint32)
        self.thread = self.all_lanes % self.lanes_per_block
        self.exists = self.thread < threads
        self.dynamic_shared = shared
        size = program.dynamic_base + shared
        valid = np.zeros(size, bool)
        for start, length in program.shared_spans + [(program.dynamic_base, shared)]:
            valid[start : start + length] = True
        self.shared = BlockMemory(blocks, size, None if valid.all() else valid)
        self.shared_base = self.lane_block * self.shared.stride
        valid = np.zeros(program.local_bytes, bool)
        for start, length in program.local_spans:
            valid[start : start + length] = True
        self.local = BlockMemory(self.total if program.local_bytes else 1, program.local_bytes, valid)
        self.local_base = self.all_lanes * self.local.stride
        self.check = machine.check
        self.shadow = (
            SharedShadow(blocks, self.warps, self.shared, program.granule, machine.warp_races)
            if self.check and size
            else None
        )
        self.registers, self.register_arrays = allocate_registers(program, self.total)
        self.params = np.zeros(max(16, program.function.param_bytes + 16), np.uint8)
        self.block_xyz = [np.zeros(self.total, np.uint32) for _ in range(3)]
        self.thread_xyz = [np.zeros(self.total, np.uint32) for _ in range(3)]
        self.grid, self.block, self.chunk = (1, 1, 1), (threads, 1, 1), np.zeros(blocks, int)
        self.grid_arrays = [np.zeros((), np.uint32) for _ in range(6)]  # %nctaid.xyz, %ntid.xyz
        self.steps = self.serial = 0
        self.counters = None
        self._bind()

    def _bind(self):
        """Prepare the instructions.  The function of one is made when it is first needed; once a program that of all
        that C does not know, so that an error is found even where nothing runs."""
        self.binder = Binder(self)
        self.ops, self.controls, self._slices = [None] * len(self.program.code), {}, {}
        self.at = None  # the pc inside of a stretch, where NumPy took over
        self.stretches = Stretches(self, self.binder) if core() else None
        if not getattr(self.program, "bound", False):
            for ins in self.program.code:
                if is_terminator(ins):
                    self.control(ins.pc)
                elif self.stretches is None or not self.stretches.takes(ins.pc):
                    self.operation(ins.pc)
            self.program.bound = True

    def _made(self, make, ins):
        """Return make(ins) with the errors of a builder as those of the program."""
        try:
            return make(ins)
        except PtxError:
            raise
        except Exception as error:
            raise PtxError(
                "kernel %s, PTX line %d: %s cannot be read: %s: %s"
                % (self.program.name, ins.line, ins.opcode, type(error).__name__, error)
            ) from error

    def _build(self, ins):
        builder = BUILDERS.get(ins.op)
        if builder is None:
            raise PtxError(
                "kernel %s, PTX line %d: unknown instruction %s" % (self.program.name, ins.line, ins.opcode)
            )
        operation = builder(self.binder, ins)
        return operation if ins.pred is None else self._predicated(operation, *ins.pred)

    def operation(self, pc):
        """Return the function of the instruction at `pc`, no terminator."""
        if self.ops[pc] is None:
            self.ops[pc] = self._made(self._build, self.program.code[pc])
        return self.ops[pc]

    def control(self, pc):
        """Return the function of the terminator at `pc`, or None for another instruction."""
        if pc not in self.controls:
            ins = self.program.code[pc]
            self.controls[pc] = self._made(self._control, ins) if is_terminator(ins) else None
        return self.controls[pc]

    def _slice(self, pc, end):
        """Return [(pc, function)] of the instructions from `pc` to `end`, simple ones together."""
        out, stretches = [], self.stretches
        while pc < end:
            behind = pc if stretches is None else min(stretches.behind[pc], end)
            if behind > pc:
                out.append((pc, stretches.stretch(pc, behind)))
            else:
                out.append((pc, self.operation(pc)))
                behind += 1
            pc = behind
        return out

    def _predicated(self, operation, name, negate):
        predicate = self.registers[name]

        def run(g):
            sub = g.narrowed(~predicate if negate else predicate)
            if sub.full or sub.mask.any():
                operation(sub)

        return run

    # --- faults -----------------------------------------------------------------------------------
    def fault(self, kind, detail, ins, lane):
        """Return a Fault that names lane `lane` of this chunk."""
        lane = int(lane)
        thread = tuple(int(axis[lane]) for axis in self.thread_xyz)
        block = tuple(int(axis[lane]) for axis in self.block_xyz)
        text = self.program.module.text_lines[ins.line - 1]
        return Fault(
            kind,
            detail,
            self.program.name,
            ins,
            text,
            self.program.source(ins),
            block,
            int(self.thread[lane]) // 32,
            lane % 32,
            thread,
        )

    # --- a chunk of blocks ------------------------------------------------------------------------
    def begin(self, chunk, grid, block, params, owners, counters):
        self.chunk, self.grid, self.block, self.owners, self.counters = chunk, grid, block, owners, counters
        self.lane_chunk_block = chunk[self.lane_block]
        linear = self.lane_chunk_block
        self.block_xyz[0][:] = linear % grid[0]
        self.block_xyz[1][:] = linear // grid[0] % grid[1]
        self.block_xyz[2][:] = linear // (grid[0] * grid[1])
        self.thread_xyz[0][:] = self.thread % block[0]
        self.thread_xyz[1][:] = self.thread // block[0] % block[1]
        self.thread_xyz[2][:] = self.thread // (block[0] * block[1])
        for array, value in zip(self.grid_arrays, (*grid, *block)):
            array[...] = value
        self.params[: len(params)] = np.frombuffer(params, np.uint8)
        self.shared.reset()
        self.local.reset()
        if self.shadow is not None:
            self.shadow.reset()
        if self.stretches is not None:
            self.stretches.begin()
        self.at = None
        self.copies = []  # cp.async under way
        self.committed = np.zeros(self.total, np.int64)  # groups that each lane has committed
        self.exited = ~self.exists
        self.waiting = {}  # pc of a .sync instruction -> mask of lanes there
        self.barriers = {}  # barrier number -> Barrier
        self.steps, self.ready_pc, self.serial = 0, -1, self.serial + 1

    def execute(self):
        self.groups, turn = {0: self.exists.copy()}, 0
        while True:
            if not self.groups:
                if self.waiting or any(b.mask.any() for b in self.barriers.values()):
                    raise self._deadlock()
                return
            # Now and then another group than the first has its turn: one that spins waits for what others do.
            turn += 1
            pc = min(self.groups)
            if turn % PATIENCE == 0:
                pc = sorted(self.groups)[turn // PATIENCE % len(self.groups)]
            group = Group(self, self.groups.pop(pc))
            self._run_group(pc, group)

    def _run_group(self, pc, g):
        """Run `g` from `pc` as long as it stays whole and nobody else is before it."""
        end_of, slices = self.program.block_end, self._slices
        while True:
            self.serial += 1  # fragments decoded before are void
            end = int(end_of[pc])
            control = self.control(end - 1)
            code = slices.get(pc)
            if code is None:
                code = slices[pc] = self._slice(pc, end - 1 if control else end)
            at = pc
            try:
                for at, operation in code:
                    operation(g)
            except Incomplete:
                at, self.at = at if self.at is None else self.at, None
                if self.counters is not None:
                    self.counters.executed(pc, at, g)
                g = self._gather(at, g)
                if g is None:
                    return
                pc = at
                # Run the instruction itself now that its warps are whole, then go on behind it.
                self.ready_pc, self.serial = at, self.serial + 1
                self.operation(at)(g)
                self.ready_pc = -1
                if self.counters is not None:
                    self.counters.executed(at, at + 1, g)
                pc = at + 1
                if pc == int(end_of[at]):
                    self._join(pc, g.mask)
                    return
                continue
            except (Fault, PtxError):
                raise
            except Exception as error:
                ins = self.program.code[at if self.at is None else self.at]
                raise RuntimeError(
                    "kernel %s, PTX line %d, %s: %s: %s"
                    % (self.program.name, ins.line, ins.opcode, type(error).__name__, error)
                ) from error
            if self.counters is not None:
                self.counters.executed(pc, end, g)
            self.steps += end - pc
            if self.steps > self.machine.max_steps:
                raise self.fault(
                    "no end",
                    "%d instructions and no end in sight" % self.steps,
                    self.program.code[end - 1 if control else min(end, len(self.ops) - 1)],
                    g.lanes[0],
                )
            if control is None:
                pc = end
                if self.groups:
                    self._join(pc, g.mask)
                    return
                continue
            nexts = control(g)
            if len(nexts) == 1 and nexts[0][1] is g.mask and not self.groups:
                pc = nexts[0][0]
                continue
            for pc, mask in nexts:
                self._join(pc, mask)
            return

    def _join(self, pc, mask):
        if pc in self.groups:
            self.groups[pc] = self.groups[pc] | mask
        else:
            self.groups[pc] = mask

    # --- instructions for whole warps -------------------------------------------------------------
    def whole(self, g, ins):
        """Called by `.sync.aligned` instructions: every warp must be there with all its lanes."""
        if g.full or self.ready_pc == ins.pc:
            return
        lanes = g.mask.reshape(-1, 32)
        if ins.pc in self.waiting or (lanes.any(1) != lanes.all(1)).any():
            if ins.pred is not None:
                lane = np.flatnonzero(g.mask)[0]
                raise self.fault(
                    "missing lanes",
                    "%s under a predicate that not all lanes of the warp share" % ins.op,
                    ins,
                    lane,
                )
            raise Incomplete

    def members(self, g, ins, mask):
        """Called by `.sync` instructions with a member mask (scalar or (lanes,)): all named lanes must be there."""
        bits = np.broadcast_to(mask, (self.total,))
        full = np.uint32(0xFFFFFFFF)
        if g.full and (mask == full).all():
            return
        if mask.ndim:
            self._agree(g, ins, bits)
        if self.ready_pc == ins.pc:
            return
        active = np.packbits(g.mask.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32).ravel()
        here = active[self.lane_warp]
        outside = g.mask & (((bits >> self.lane_id) & np.uint32(1)) == 0)
        if outside.any():
            raise self.fault(
                "missing lanes",
                "the lane is not in its own member mask 0x%08x" % bits[np.flatnonzero(outside)[0]],
                ins,
                np.flatnonzero(outside)[0],
            )
        lacking = g.mask & ((bits & ~here) != 0)
        if ins.pc in self.waiting or lacking.any():
            if ins.pred is not None and lacking.any():
                lane = np.flatnonzero(lacking)[0]
                raise self.fault(
                    "missing lanes",
                    "%s: lanes 0x%08x of mask 0x%08x do not take part"
                    % (ins.op, int(bits[lane] & ~here[lane]), int(bits[lane])),
                    ins,
                    lane,
                )
            raise Incomplete

    def _agree(self, g, ins, bits):
        """Refuse lanes that name each other in different masks."""
        rows, here = bits.reshape(-1, 32), g.mask.reshape(-1, 32)
        lane = here.argmax(1)[:, None]
        mixed = np.flatnonzero((here & (rows != np.take_along_axis(rows, lane, 1))).any(1))
        if not len(mixed):
            return
        rows, here = rows[mixed], here[mixed]
        named = (rows[:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1) == 1  # [warp, lane, other]
        differ = named & here[:, :, None] & here[:, None, :] & (rows[:, :, None] != rows[:, None, :])
        if differ.any():
            warp, lane, other = (int(i[0]) for i in np.nonzero(differ))
            raise self.fault(
                "missing lanes",
                "%s: lane %d names lane %d in mask 0x%08x, which has mask 0x%08x"
                % (ins.op, lane, other, rows[warp, lane], rows[warp, other]),
                ins,
                mixed[warp] * 32 + lane,
            )

    def _gather(self, pc, g):
        """Merge `g` with the lanes that wait at `pc`; return the group of complete warps, or None."""
        ins = self.program.code[pc]
        mask = g.mask | self.waiting.pop(pc, False)
        active = (
            np.packbits(mask.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32).ravel()[self.lane_warp]
        )
        ready = mask & ((self.member_mask(ins) & ~active) == 0)
        # A lane goes on only with all lanes of its mask: a warp half of which lacks lanes waits as a whole.
        rest = mask & ~ready
        if rest.any():
            self.waiting[pc] = rest
        if self.stretches is not None:
            self.stretches.memory.waiting = bool(self.waiting)
        return Group(self, ready) if ready.any() else None

    def member_mask(self, ins):
        operand = MEMBER_OPERAND.get(ins.op)
        full = np.uint32(0xFFFFFFFF)
        if operand is None:
            return full
        value = ins.args[operand]
        if value[0] == "i":
            return np.uint32(value[1] & 0xFFFFFFFF)
        return self.registers[value[1]]

    def _deadlock(self):
        code = self.program.code
        if self.waiting:
            pc, mask = next(iter(self.waiting.items()))
            lane = int(np.flatnonzero(mask)[0])
            warp = slice(lane // 32 * 32, lane // 32 * 32 + 32)
            here = int(np.packbits(mask[warp], bitorder="little").view(np.uint32)[0])
            gone = int(np.packbits(self.exited[warp], bitorder="little").view(np.uint32)[0])
            detail = "only lanes 0x%08x of the warp reached it (exited: 0x%08x)" % (here, gone)
            return self.fault("missing lanes", "%s: %s" % (code[pc].op, detail), code[pc], lane)
        for number, barrier in self.barriers.items():
            if barrier.mask.any():
                lane = int(np.flatnonzero(barrier.mask)[0])
                block = self.lane_block[lane]
                of_block = slice(block * self.lanes_per_block, (block + 1) * self.lanes_per_block)
                arrived = int(barrier.mask[of_block].sum() + barrier.arrived[of_block].sum())
                exited = int((self.exited & self.exists)[of_block].sum())
                return self.fault(
                    "barrier",
                    "barrier %d: %d of %d threads reached it, %d have exited"
                    % (number, arrived, barrier.expected, exited),
                    code[int(barrier.resume[lane]) - 1],
                    lane,
                )

    # --- control flow -----------------------------------------------------------------------------
    def _control(self, ins):
        """Return f(group) -> [(pc, mask)] for a block's last instruction."""
        predicate = self.registers[ins.pred[0]] if ins.pred else None
        negate = bool(ins.pred and ins.pred[1])
        pc, op = ins.pc, ins.op
        if op == "bra":
            target = ins.target
            if predicate is None:
                return lambda g: [(target, g.mask)]

            def branch(g):
                taken = ~predicate if negate else predicate
                taken = taken.copy() if g.full else taken & g.mask
                if not taken.any():
                    return [(pc + 1, g.mask)]
                rest = g.mask & ~taken
                if not rest.any():
                    return [(target, g.mask)]
                return [(target, taken), (pc + 1, rest)]

            return branch
        if op == "brx":
            index, targets = self.binder.source(ins.args[0], "u32"), ins.target

            def switch(g):
                values = np.broadcast_to(index, (self.total,))
                if (values[g.mask] >= len(targets)).any():
                    raise self.fault(
                        "branch", "brx.idx index out of its table of %d" % len(targets), ins, g.lanes[0]
                    )
                out = []
                for i, target in enumerate(targets):
                    mask = g.mask & (values == i)
                    if mask.any():
                        out.append((target, mask))
                return out

            return switch
        if op in ("ret", "exit"):

            def leave(g):
                mask = g.mask
                if predicate is not None:
                    mask = mask & (~predicate if negate else predicate)
                self.exited = self.exited | mask
                rest = g.mask & ~mask
                return [(pc + 1, rest)] if rest.any() else []

            return leave
        if op == "trap":

            def trap(g):
                mask = g.mask
                if predicate is not None:
                    mask = mask & (~predicate if negate else predicate)
                if mask.any():
                    raise self.fault("trap", "the kernel stopped itself", ins, np.flatnonzero(mask)[0])
                return [(pc + 1, g.mask)]

            return trap
        return barrier_control(self, self.binder, ins, predicate, negate)


MEMBER_OPERAND = {"shfl": -1, "vote": -1, "match": -1, "redux": -1, "elect": -1, "bar": 0, "barrier": 0}

__all__ = [
    "Machine",
    "Module",
    "Fault",
    "LaunchError",
    "PtxError",
    "GLOBAL_BASE",
    "SHARED_WINDOW",
    "LOCAL_WINDOW",
]
