"""What a profiler would count: instructions, loops, bank conflicts, sectors, bytes, atomics.

Counts are of warps: an instruction that a warp executes counts once, whatever its lanes do.
"""

import numpy as np

CLASSES = (
    ("tensor", {"mma"}),
    ("ldmatrix", {"ldmatrix", "stmatrix", "movmatrix"}),
    ("cp.async", {"cp"}),
    ("special", {"ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt"}),
    ("atomic", {"atom", "red"}),
    ("barrier", {"bar", "barrier", "membar", "fence"}),
    ("warp", {"shfl", "vote", "match", "redux", "elect", "activemask"}),
    ("control", {"bra", "brx", "ret", "exit", "trap", "call"}),
    ("convert", {"cvt", "cvta"}),
    ("move", {"mov", "selp", "slct", "prmt"}),
    ("predicate", {"setp", "set", "testp", "isspacep"}),
)


def class_of(ins):
    """Return the class of an instruction for the mix."""
    for name, ops in CLASSES:
        if ins.op in ops:
            return name
    if ins.op in ("ld", "st", "ldu"):
        space = next(
            (
                m.split("::")[0]
                for m in ins.mods
                if m.split("::")[0] in ("global", "shared", "local", "param", "const")
            ),
            "generic",
        )
        return space
    kind = ins.mods[-1] if ins.mods else ""
    return "float" if kind in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2") else "integer"


class Counters:
    """Counts of one launch.  `executed_warps[pc]` is how many warps executed the instruction at pc."""

    def __init__(self, program):
        self.program = program
        size = len(program.code)
        self.executed_warps, self.executed_lanes = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.shared_requests, self.shared_wavefronts, self.shared_ideal = (
            np.zeros(size, np.int64) for _ in range(3)
        )
        self.global_requests, self.global_sectors, self.global_ideal = (
            np.zeros(size, np.int64) for _ in range(3)
        )
        self.bytes_read, self.bytes_written = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.atomic_lanes = np.zeros(size, np.int64)

    # --- recording --------------------------------------------------------------------------------
    def executed(self, start, end, g):
        self.executed_warps[start:end] += len(g.active_warps())
        self.executed_lanes[start:end] += len(g.lanes)

    def shared_access(self, ins, warp, lanes, address, nbytes):
        """Count wavefronts: 32 banks of 4 bytes; 8-byte accesses go by half-warps, 16-byte ones by quarters."""
        if len(lanes) == 0:
            return
        per_phase = 32 if nbytes <= 4 else 128 // nbytes
        if (
            len(lanes) % per_phase == 0
            and (lanes.reshape(-1, per_phase)[:, 0] % per_phase == 0).all()
            and (lanes.reshape(-1, per_phase)[:, -1] % per_phase == per_phase - 1).all()
        ):
            # Whole phases.  Lanes whose words fill all banks do not conflict: the usual case, told by one OR.
            slot = (address >> np.uint64(max(nbytes, 4).bit_length() - 1)).astype(np.uint32) & np.uint32(
                per_phase - 1
            )
            filled = np.bitwise_or.reduce((np.uint32(1) << slot).reshape(-1, per_phase), axis=1)
            if nbytes >= 4 and (filled == np.uint32((1 << per_phase) - 1)).all():
                self.shared_requests[ins.pc] += int(np.count_nonzero(np.diff(warp)) + 1)
                self.shared_wavefronts[ins.pc] += len(filled)
                self.shared_ideal[ins.pc] += len(filled)
                return
        phase = warp * (32 // per_phase) + (lanes % 32) // per_phase
        words = max(1, nbytes // 4)
        word = (address.astype(np.int64) // 4)[:, None] + np.arange(words)
        keys = np.unique(
            np.repeat(phase, words) * (1 << 20) + word.ravel()
        )  # lanes that share a word share its access
        _, phases = np.unique(keys >> 20, return_inverse=True)
        per_bank = np.bincount(phases * 32 + (keys & 31), minlength=(phases.max() + 1) * 32).reshape(-1, 32)
        self.shared_requests[ins.pc] += len(np.unique(warp))
        self.shared_wavefronts[ins.pc] += int(per_bank.max(1).sum())
        self.shared_ideal[ins.pc] += len(per_bank)

    def global_access(self, ins, warp, address, nbytes, verb):
        """Count 32-byte sectors per warp, and the fewest that could hold the distinct bytes asked for."""
        if len(address) == 0:
            return
        at = address.astype(np.int64)
        span = max(1, nbytes // 32)
        sector = ((at >> 5)[:, None] + np.arange(span)).ravel()
        unique = np.unique(np.repeat(warp, span).astype(np.int64) << 44 | (sector & (1 << 44) - 1))
        distinct = np.unique(warp.astype(np.int64) << 44 | ((at // nbytes) & (1 << 44) - 1))
        self.global_requests[ins.pc] += len(np.unique(warp))
        self.global_sectors[ins.pc] += len(unique)
        per_warp = np.unique(distinct >> 44, return_counts=True)[1]
        self.global_ideal[ins.pc] += int((-(-per_warp * nbytes // 32)).sum())
        (self.bytes_read if verb == "read" else self.bytes_written)[ins.pc] += len(address) * nbytes

    def atomic(self, ins, warp, address, nbytes, space):
        self.atomic_lanes[ins.pc] += len(address)
        if space == "global":
            self.global_access(ins, warp, address, nbytes, "write")

    # --- data -------------------------------------------------------------------------------------
    def mix(self, start=0, end=None):
        """Return {class: warp instructions} of the pcs [start, end)."""
        out = {}
        for ins in self.program.code[start:end]:
            name = class_of(ins)
            out[name] = out.get(name, 0) + int(self.executed_warps[ins.pc])
        return {name: n for name, n in sorted(out.items(), key=lambda item: -item[1]) if n}

    def opcodes(self):
        """Return {opcode: warp instructions}."""
        out = {}
        for ins in self.program.code:
            n = int(self.executed_warps[ins.pc])
            if n:
                out[ins.opcode] = out.get(ins.opcode, 0) + n
        return out

    @property
    def instructions(self):
        return int(self.executed_warps.sum())

    @property
    def tensor_share(self):
        """mma instructions / all instructions."""
        return self.mix().get("tensor", 0) / max(1, self.instructions)

    @property
    def bank_conflicts(self):
        """Wavefronts of shared accesses above the conflict-free number."""
        return int((self.shared_wavefronts - self.shared_ideal).sum())

    @property
    def sectors(self):
        return int(self.global_sectors.sum())

    @property
    def sector_efficiency(self):
        """Fewest possible sectors / sectors moved."""
        return float(self.global_ideal.sum() / max(1, self.global_sectors.sum()))

    @property
    def bytes(self):
        """Bytes that lanes asked of and gave to global memory: (read, written)."""
        return int(self.bytes_read.sum()), int(self.bytes_written.sum())

    @property
    def atomics(self):
        return int(self.atomic_lanes.sum())

    def loops(self):
        """Return a list of dicts, one a loop, innermost last: lines, trips (of warps), mix, tensor share, conflicts."""
        out = []
        for loop in self.program.loops:
            pcs = slice(loop.start, loop.end + 1)
            mix = self.mix(loop.start, loop.end + 1)
            total = sum(mix.values())
            code = self.program.code
            out.append(
                {
                    "ptx_lines": (code[loop.start].line, code[loop.end].line),
                    "source": self.program.source(code[loop.start]),
                    "depth": loop.depth,
                    "pcs": (loop.start, loop.end),
                    "trips": int(self.executed_warps[loop.end]),
                    "instructions": total,
                    "mix": mix,
                    "tensor_share": mix.get("tensor", 0) / max(1, total),
                    "bank_conflicts": int((self.shared_wavefronts - self.shared_ideal)[pcs].sum()),
                    "sectors": int(self.global_sectors[pcs].sum()),
                    "ideal_sectors": int(self.global_ideal[pcs].sum()),
                }
            )
        return out

    def accesses(self):
        """Return a list of dicts, one a memory instruction: line, opcode, requests, wavefronts, sectors, bytes."""
        out = []
        for ins in self.program.code:
            pc = ins.pc
            if self.shared_requests[pc] or self.global_requests[pc]:
                out.append(
                    {
                        "pc": pc,
                        "ptx_line": ins.line,
                        "source": self.program.source(ins),
                        "opcode": ins.opcode,
                        "shared_requests": int(self.shared_requests[pc]),
                        "wavefronts": int(self.shared_wavefronts[pc]),
                        "conflicts": int(self.shared_wavefronts[pc] - self.shared_ideal[pc]),
                        "global_requests": int(self.global_requests[pc]),
                        "sectors": int(self.global_sectors[pc]),
                        "ideal_sectors": int(self.global_ideal[pc]),
                        "bytes_read": int(self.bytes_read[pc]),
                        "bytes_written": int(self.bytes_written[pc]),
                        "atomics": int(self.atomic_lanes[pc]),
                    }
                )
        return out

    def table(self):
        """Return everything as text."""
        total = max(1, self.instructions)
        lines = [
            "kernel %s: %d warp instructions, tensor share %.1f%%"
            % (self.program.name, self.instructions, 100 * self.tensor_share)
        ]
        lines += ["  %-10s %10d %6.1f%%" % (name, n, 100 * n / total) for name, n in self.mix().items()]
        lines.append(
            "bytes read %d, written %d; sectors %d (efficiency %.1f%%); bank conflicts %d; atomics %d"
            % (*self.bytes, self.sectors, 100 * self.sector_efficiency, self.bank_conflicts, self.atomics)
        )
        for loop in self.loops():
            lines.append(
                "%sloop PTX %d-%d%s: %d trips, %d instructions, tensor share %.1f%%, conflicts %d"
                % (
                    "  " * loop["depth"],
                    *loop["ptx_lines"],
                    " (%s:%d)" % loop["source"] if loop["source"] else "",
                    loop["trips"],
                    loop["instructions"],
                    100 * loop["tensor_share"],
                    loop["bank_conflicts"],
                )
            )
        lines.append(
            "%8s %-44s %9s %9s %9s %9s %9s %9s"
            % ("PTX", "memory instruction", "requests", "wavefr.", "conflicts", "sectors", "ideal", "bytes")
        )
        for a in self.accesses():
            lines.append(
                "%8d %-44s %9d %9d %9d %9d %9d %9d"
                % (
                    a["ptx_line"],
                    a["opcode"][:44],
                    max(a["shared_requests"], a["global_requests"]),
                    a["wavefronts"],
                    a["conflicts"],
                    a["sectors"],
                    a["ideal_sectors"],
                    a["bytes_read"] + a["bytes_written"],
                )
            )
        return "\n".join(lines)


__all__ = ["Counters", "class_of"]
