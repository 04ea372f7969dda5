"""Block barriers: bar.sync, bar.arrive, bar.red and their barrier.* names."""

import numpy as np

from .parser import PtxError


class Barrier:
    """One barrier number of all blocks: who waits, who has only arrived, where each lane goes on."""

    def __init__(self, run):
        self.mask = np.zeros(run.total, bool)
        self.arrived = np.zeros(run.total, bool)
        self.resume = np.zeros(run.total, np.int64)
        self.vote = np.zeros(run.total, bool)
        self.expected = run.threads
        self.snapshots = {}  # block -> what warps that arrived knew


def barrier_control(run, binder, ins, predicate, negate):
    """Return f(group) -> [(pc, mask)] for a barrier instruction."""
    mods = ins.mods
    verb = next((m for m in mods if m in ("sync", "arrive", "red")), None)
    allowed = {"sync", "arrive", "red", "cta", "aligned", "popc", "and", "or", "u32", "pred"}
    if verb is None or not set(mods) <= allowed:
        raise PtxError("PTX line %d: unknown instruction %s" % (ins.line, ins.opcode))
    args = list(ins.args)
    result = args.pop(0) if verb == "red" else None
    number = binder.source(args.pop(0), "u32")
    vote = binder.predicate(args.pop()) if verb == "red" else None
    count = binder.source(args[0], "u32") if args else None
    if verb == "red":
        operation = next(m for m in mods if m in ("popc", "and", "or"))
        target = binder.target(result, "u32" if operation == "popc" else "pred")
    pc = ins.pc

    def arrive(g):
        out, mask = [], g.mask
        if predicate is not None:
            taking = mask & (~predicate if negate else predicate)
            if (mask & ~taking).any():
                out.append((pc + 1, mask & ~taking))
            mask = taking
            if not mask.any():
                return out
        if verb == "sync" and count is None and g.full and number.ndim == 0 and predicate is None:
            barrier = run.barriers.get(int(number))
            if barrier is None or not (barrier.mask.any() or barrier.arrived.any()):
                if run.shadow is not None:
                    run.shadow.barrier(np.arange(run.blocks), np.ones((run.blocks, run.warps), bool))
                return [(pc + 1, g.mask)]
        numbers = np.broadcast_to(number, (run.total,))
        for value in np.unique(numbers[mask]):
            if value > 15:
                raise run.fault(
                    "barrier", "barrier number %d is above 15" % value, ins, np.flatnonzero(mask)[0]
                )
            out += one(int(value), mask & (numbers == value))
        return out

    def one(value, mask):
        barrier = run.barriers.setdefault(value, Barrier(run))
        first = int(np.flatnonzero(mask)[0])
        expected = run.threads
        if count is not None:
            counts = np.broadcast_to(count, (run.total,))[mask]
            expected = int(counts[0])
            if (counts != expected).any() or expected % 32 or expected == 0:
                raise run.fault("barrier", "thread count %d is not one multiple of 32" % expected, ins, first)
        per_block = (run.blocks, run.lanes_per_block)
        again = mask & (barrier.mask | barrier.arrived)
        if again.any():
            raise run.fault(
                "barrier", "barrier %d: the thread arrives twice" % value, ins, np.flatnonzero(again)[0]
            )
        barrier.expected = expected
        barrier.resume[mask] = pc + 1
        out = []
        if verb == "arrive":
            barrier.arrived |= mask
            if run.shadow is not None:
                warps = mask.reshape(run.blocks, run.warps, 32).any(2)
                for block in np.flatnonzero(warps.any(1)):
                    known = run.shadow.arrive(block, warps[block])
                    barrier.snapshots[block] = np.maximum(barrier.snapshots.get(block, 0), known)
            out.append((pc + 1, mask))
        else:
            barrier.mask |= mask
            if vote is not None:
                barrier.vote[mask] = vote()[mask]
        there = (barrier.mask | barrier.arrived).reshape(per_block).sum(1)
        if (there > expected).any():
            raise run.fault(
                "barrier",
                "barrier %d: %d threads came, %d expected" % (value, there.max(), expected),
                ins,
                first,
            )
        done = there == expected
        if not done.any():
            return out
        release = barrier.mask & done[run.lane_block]
        if count is None and release.any():
            lanes = np.flatnonzero(release)
            other = lanes[barrier.resume[lanes] != barrier.resume[lanes[0]]]
            same_block = other[run.lane_block[other] == run.lane_block[lanes[0]]]
            if len(same_block):
                raise run.fault(
                    "barrier",
                    "barrier %d: threads of one block wait at different barriers (PTX lines %d and %d)"
                    % (
                        value,
                        run.program.code[barrier.resume[lanes[0]] - 1].line,
                        run.program.code[barrier.resume[same_block[0]] - 1].line,
                    ),
                    ins,
                    same_block[0],
                )
        blocks = np.flatnonzero(done)
        if vote is not None:
            votes = (barrier.vote & release).reshape(per_block).sum(1).astype(np.uint32)
            taking = release.reshape(per_block).sum(1)
            value_of = votes if operation == "popc" else votes == taking if operation == "and" else votes > 0
            np.copyto(target, value_of[run.lane_block], where=release)
        if run.shadow is not None:
            members = release.reshape(run.blocks, run.warps, 32).any(2)[blocks]
            run.shadow.barrier(blocks, members)
            for i, block in enumerate(blocks):
                if block in barrier.snapshots:
                    run.shadow.learn(block, members[i], barrier.snapshots.pop(block))
        clear = done[run.lane_block]
        barrier.mask &= ~clear
        barrier.arrived &= ~clear
        for resume in np.unique(barrier.resume[release]):
            out.append((int(resume), release & (barrier.resume == resume)))
        return out

    return arrive
