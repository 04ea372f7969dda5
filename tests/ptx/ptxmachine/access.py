"""Loads and stores of all lanes at once, with bounds, alignment, sanitiser and counters.

Every function takes the active lanes (n,) and their addresses (n,) uint64 and works on values of shape (n,) or, for
a vector of words, (n, words).
"""

import numpy as np

from .memory import ALLOCATED, GLOBAL_BASE, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, UNITS, WINDOW_BYTES

BASE = np.uint64(GLOBAL_BASE)
_ALL_READABLE = {1: 0x03, 2: 0x0303, 4: 0x03030303, 8: 0x0303030303030303}
_ALL_THERE = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


class Access:
    """The accesses of one Run."""

    def __init__(self, run):
        self.run, self.memory = run, run.memory

    # --- common checks ----------------------------------------------------------------------------
    def _aligned(self, address, nbytes, lanes, ins, space):
        if nbytes > 1:
            odd = address & np.uint64(nbytes - 1)
            if odd.any():
                at = int(np.flatnonzero(odd)[0])
                raise self.run.fault(
                    "misaligned access",
                    "%s address 0x%x is not a multiple of %d" % (space, address[at], nbytes),
                    ins,
                    lanes[at],
                )

    def _global_index(self, address, nbytes, lanes, ins, verb):
        """Return the access' index in units of nbytes, checked against the arena."""
        self._aligned(address, nbytes, lanes, ins, "global")
        offset = address - BASE
        if offset.size and offset.max() > np.uint64(self.memory.capacity - nbytes):
            at = int(np.flatnonzero(offset > np.uint64(self.memory.capacity - nbytes))[0])
            raise self._outside(verb, nbytes, address[at], ins, lanes[at])
        return (offset >> np.uint64(nbytes.bit_length() - 1)).view(np.int64)

    def _outside(self, verb, nbytes, address, ins, lane):
        return self.run.fault(
            "out of bounds",
            "%s of %d bytes at 0x%x: %s" % (verb, nbytes, address, self.memory.describe(address)),
            ins,
            lane,
        )

    def _global_state(self, index, nbytes, lanes, address, ins, verb, wanted):
        unit = min(nbytes, 8)
        state = self.memory.view("state", nbytes, unit)[index]
        want = UNITS[unit](wanted[unit])
        good = (state & want) == want
        if good.all():
            return
        good = good if nbytes == unit else good.all(1)
        at = int(np.flatnonzero(~good)[0])
        where = int(address[at])
        state = self.memory.state[where - GLOBAL_BASE : where - GLOBAL_BASE + nbytes]
        missing = np.flatnonzero((state & ALLOCATED) == 0)
        if len(missing):
            raise self._outside(verb, nbytes, where + int(missing[0]), ins, lanes[at])
        byte = where + int(np.flatnonzero((state & 2) == 0)[0])
        raise self.run.fault(
            "uninitialised read",
            "global 0x%x was never written: %s" % (byte, self.memory.describe(byte)),
            ins,
            lanes[at],
        )

    # --- global -----------------------------------------------------------------------------------
    def load_global(self, lanes, address, nbytes, unit, ins):
        run = self.run
        index = self._global_index(address, nbytes, lanes, ins, "read")
        if run.check:
            self._global_state(index, nbytes, lanes, address, ins, "read", _ALL_READABLE)
        if run.counters is not None:
            run.counters.global_access(ins, run.lane_warp[lanes], address, nbytes, "read")
        return self.memory.view("data", nbytes, unit)[index]

    def store_global(self, lanes, address, values, nbytes, unit, ins):
        run = self.run
        index = self._global_index(address, nbytes, lanes, ins, "write")
        if run.check:
            self._global_state(index, nbytes, lanes, address, ins, "write", _ALL_THERE)
            bad = run.owners.on_write(run.lane_chunk_block[lanes], (address - BASE).view(np.int64), nbytes)
            if bad:
                raise run.fault("two blocks write", bad[1], ins, lanes[bad[0]])
            state_unit = min(nbytes, 8)
            self.memory.view("state", nbytes, state_unit)[index] = UNITS[state_unit](_ALL_READABLE[state_unit])
        else:
            state_unit = min(nbytes, 8)
            self.memory.view("state", nbytes, state_unit)[index] |= UNITS[state_unit](
                0x0202020202020202 & (1 << 8 * state_unit) - 1
            )
        if run.counters is not None:
            run.counters.global_access(ins, run.lane_warp[lanes], address, nbytes, "write")
        data = self.memory.view("data", nbytes, unit)
        data[index] = values
        if run.check:
            self._same_step(data, index, values, lanes, ins, "global address 0x%x", address)

    def _same_step(self, data, index, values, lanes, ins, text, address):
        """Two lanes wrote one word in one instruction: harmless only if the values are equal."""
        kept = data[index]
        if (kept != values).any():
            differ = kept != values
            at = int(np.flatnonzero(differ if differ.ndim == 1 else differ.any(1))[0])
            raise self.run.fault(
                "race", (text + " gets two values in one instruction") % address[at], ins, lanes[at]
            )

    def _inside(self, memory, address, nbytes, lanes, ins, verb, space, owner):
        """Return the addresses as int64; refuse what lies outside of all variables of a block or thread."""
        where = address.view(np.int64)
        beyond = address.size and (memory.size < nbytes or address.max() > np.uint64(memory.size - nbytes))
        if not beyond and memory.valid is None:
            return where
        bad = (address + np.uint64(nbytes) > np.uint64(memory.size)) | (address > np.uint64(memory.size))
        if memory.valid is not None and memory.size:
            inner = np.where(bad, 0, where)
            bad = bad | ~(memory.valid[inner] & memory.valid[np.minimum(inner + nbytes - 1, memory.size - 1)])
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise self.run.fault(
                "out of bounds",
                "%s of %d bytes at %s address %d of the %s, behind a variable or beyond its %d bytes"
                % (verb, nbytes, space, address[at], owner, memory.size),
                ins,
                lanes[at],
            )
        return where

    # --- shared -----------------------------------------------------------------------------------
    def shared_index(self, lanes, address, nbytes, ins, verb):
        """Return the index in units of nbytes in the array of all blocks' shared memory."""
        run = self.run
        self._aligned(address, nbytes, lanes, ins, "shared")
        where = self._inside(run.shared, address, nbytes, lanes, ins, verb, "shared", "block")
        return (run.shared_base[lanes] + where) >> (nbytes.bit_length() - 1)

    def load_shared(self, lanes, address, nbytes, unit, ins, reader=None):
        """`reader`: ANY_LANE where the bytes go to other lanes than those that give the addresses (ldmatrix)."""
        run = self.run
        index = self.shared_index(lanes, address, nbytes, ins, "read")
        if run.shadow is not None:
            self._report(
                run.shadow.on_read(run.lane_warp[lanes], index, nbytes, self._who(lanes, reader)), ins, lanes
            )
        if run.counters is not None:
            run.counters.shared_access(ins, run.lane_warp[lanes], lanes, address, nbytes)
        return run.shared.view(nbytes, unit)[index]

    def store_shared(self, lanes, address, values, nbytes, unit, ins, author=None):
        run = self.run
        index = self.shared_index(lanes, address, nbytes, ins, "write")
        if run.shadow is not None:
            self._report(
                run.shadow.on_write(run.lane_warp[lanes], index, nbytes, self._who(lanes, author)), ins, lanes
            )
        if run.counters is not None:
            run.counters.shared_access(ins, run.lane_warp[lanes], lanes, address, nbytes)
        data = run.shared.view(nbytes, unit)
        data[index] = values
        if run.shadow is not None:
            self._same_step(data, index, values, lanes, ins, "shared address %d", address)

    @staticmethod
    def _who(lanes, other):
        return lanes % 32 if other is None else np.full(len(lanes), other)

    def _report(self, bad, ins, lanes):
        if bad:
            raise self.run.fault(bad[1], bad[2], ins, lanes[bad[0]])

    # --- local, param, generic --------------------------------------------------------------------
    def _local_index(self, lanes, address, nbytes, ins, verb):
        run = self.run
        self._aligned(address, nbytes, lanes, ins, "local")
        where = self._inside(run.local, address, nbytes, lanes, ins, verb, "local", "thread")
        return (run.local_base[lanes] + where) >> (nbytes.bit_length() - 1)

    def load_local(self, lanes, address, nbytes, unit, ins):
        return self.run.local.view(nbytes, unit)[self._local_index(lanes, address, nbytes, ins, "read")]

    def store_local(self, lanes, address, values, nbytes, unit, ins):
        self.run.local.view(nbytes, unit)[self._local_index(lanes, address, nbytes, ins, "write")] = values

    def load_param(self, lanes, address, nbytes, unit, ins):
        limit = self.run.program.function.param_bytes
        if (address + np.uint64(nbytes) > np.uint64(limit)).any():
            at = int(np.flatnonzero(address + np.uint64(nbytes) > np.uint64(limit))[0])
            raise self.run.fault(
                "out of bounds",
                "read of %d bytes at parameter byte %d of %d" % (nbytes, address[at], limit),
                ins,
                lanes[at],
            )
        bytes_ = self.run.params[address.view(np.int64)[:, None] + np.arange(nbytes)]
        values = bytes_.view(UNITS[unit])
        return values[:, 0] if nbytes == unit else values

    def _spaces(self, address):
        """Yield (space, positions, addresses in it) for generic addresses."""
        rest = np.ones(len(address), bool)
        for space, base in (("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW), ("param", PARAM_WINDOW)):
            inside = (address >= np.uint64(base)) & (address < np.uint64(base + WINDOW_BYTES))
            if inside.any():
                yield space, np.flatnonzero(inside), address[inside] - np.uint64(base)
                rest &= ~inside
        if rest.any():
            yield "global", np.flatnonzero(rest), address[rest]

    def load(self, space, lanes, address, nbytes, unit, ins):
        """Load from `space` ("generic" sorts the lanes by address)."""
        if space != "generic":
            return getattr(self, "load_" + space)(lanes, address, nbytes, unit, ins)
        out = None
        for name, at, local in self._spaces(address):
            part = getattr(self, "load_" + name)(lanes[at], local, nbytes, unit, ins)
            if len(at) == len(lanes):
                return part
            if out is None:
                out = np.zeros((len(lanes),) + part.shape[1:], part.dtype)
            out[at] = part
        return out

    def store(self, space, lanes, address, values, nbytes, unit, ins):
        if space != "generic":
            if space == "param":
                raise self.run.fault("out of bounds", "write to a kernel parameter", ins, lanes[0])
            getattr(self, "store_" + space)(lanes, address, values, nbytes, unit, ins)
            return
        for name, at, local in self._spaces(address):
            self.store(name, lanes[at], local, values[at], nbytes, unit, ins)

    # --- atomics ----------------------------------------------------------------------------------
    def atomic(self, space, lanes, address, nbytes, unit, ins, function):
        """Apply `function(old, positions, space) -> new` lane after lane; return the old values.

        Lanes that hit the same address take turns.
        """
        run = self.run
        if space == "generic":
            out = None
            for name, at, local in self._spaces(address):
                part = self.atomic(
                    name,
                    lanes[at],
                    local,
                    nbytes,
                    unit,
                    ins,
                    lambda old, where, name, at=at: function(old, at[where], name),
                )
                if out is None:
                    out = np.zeros((len(lanes),) + part.shape[1:], part.dtype)
                out[at] = part
            return out
        if space == "global":
            index = self._global_index(address, nbytes, lanes, ins, "atomic")
            if run.check:
                self._global_state(index, nbytes, lanes, address, ins, "atomic", _ALL_READABLE)
                bad = run.owners.on_write(
                    run.lane_chunk_block[lanes], (address - BASE).view(np.int64), nbytes, atomic=True
                )
                if bad:
                    raise run.fault("two blocks write", bad[1], ins, lanes[bad[0]])
            data = self.memory.view("data", nbytes, unit)
        elif space == "shared":
            index = self.shared_index(lanes, address, nbytes, ins, "atomic")
            if run.shadow is not None:
                shadow = run.shadow
                never = shadow._granules(shadow.wrote, nbytes // shadow.granule)[index] == 0xFFFFFFFF
                if never.any():
                    at = int(np.flatnonzero(never if never.ndim == 1 else never.any(1))[0])
                    raise run.fault(
                        "uninitialised read", "shared byte %d was never written" % address[at], ins, lanes[at]
                    )
                self._report(
                    shadow.on_write(run.lane_warp[lanes], index, nbytes, lanes % 32, atomic=True), ins, lanes
                )
            data = run.shared.view(nbytes, unit)
        else:
            raise run.fault("out of bounds", "atomic in %s memory" % space, ins, lanes[0])
        if run.counters is not None:
            run.counters.atomic(ins, run.lane_warp[lanes], address, nbytes, space)
        old = np.zeros((len(lanes),) + data.shape[1:], data.dtype)
        order = np.argsort(index, kind="stable")
        ranked = index[order]
        first = np.r_[True, ranked[1:] != ranked[:-1]]
        start = np.maximum.accumulate(np.where(first, np.arange(len(ranked)), 0))
        rank = np.arange(len(ranked)) - start  # how many lanes before it hit the same address
        for turn in range(int(rank.max()) + 1 if len(rank) else 0):
            at = order[rank == turn] if turn or not first.all() else order
            where = index[at]
            before = data[where]
            old[at] = before
            data[where] = function(before, at, space)
        return old
