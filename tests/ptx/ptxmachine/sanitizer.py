"""Races and never-written reads in shared memory, and global words that two blocks write.

Shared memory.  Each warp w of a block has a clock c[w]; a barrier of a set of warps makes each of them know the
clocks of the others: known[w][u] says that accesses of warp u with a clock below it come before what w does now.
Per granule (1, 2, 4 or 16 bytes, the smallest access of the kernel) we keep
    wrote[g]     clock of the last write, or NEVER, or IN_FLIGHT (a cp.async that nobody waited for)
    writer[g]    its warp; ATOMIC + warp if it was an atomic; MANY after atomics of several warps
    read[w, g]   1 + clock of warp w's last read
A read is right if the last write is the warp's own or is known; a write is right if the last write and all other
warps' reads are known.  A cp.async writes at its start for the second rule (it may land early) and at its wait for
the first (it may land late), so that neither order hides the other's mistakes.

Inside of a warp, bar.warp.sync (__syncwarp) orders the lanes: turn[g] is the warp's count of them at the last write
and author[g] its lane.  What another lane of the warp wrote in the same turn must not be read or overwritten.
"""

import numpy as np

NEVER, IN_FLIGHT = np.uint32(0xFFFFFFFF), np.uint32(0xFFFFFFFE)
ATOMIC, MANY = 64, 255  # a block has at most 32 warps
ANY_LANE = 255  # author or reader is the warp as a whole (stmatrix, ldmatrix)


class SharedShadow:
    def __init__(self, blocks, warps, memory, granule, lanes=True):
        self.blocks, self.warps, self.granule, self.memory, self.lanes = blocks, warps, granule, memory, lanes
        self.per_block = memory.stride // granule
        total = blocks * self.per_block
        self.wrote = np.full(total, NEVER, np.uint32)
        self.writer = np.zeros(total, np.uint8)
        self.read = np.zeros(warps * total, np.uint32)  # [w, block, granule]
        self.total = total
        self.clock = np.zeros((blocks, warps), np.uint32)
        self.known = np.zeros((blocks, warps, warps), np.uint32)
        self.floor = np.zeros(blocks * warps, np.uint32)  # min over u of known[w][u]
        self.author, self.turn = np.zeros(total, np.uint8), np.zeros(total, np.uint32)
        self.turns = np.zeros(blocks * warps, np.uint32)
        self._wide = {}

    def reset(self):
        self.wrote[:] = NEVER
        self.read[:] = 0
        self.clock[:] = 0
        self.known[:] = 0
        self.floor[:] = 0
        self.turns[:] = 0

    def warp_barrier(self, warps):
        """Order the lanes of each warp in `warps` (n,): warp numbers over the chunk."""
        self.turns[warps] += 1

    def barrier(self, blocks, members):
        """Order the warps `members` (n, warps) bool of `blocks` (n,) with each other."""
        if members.all():
            clock = self.clock[blocks] + np.uint32(1)
            self.clock[blocks] = clock
            self.known[blocks] = clock[:, None, :]
            self.floor.reshape(self.blocks, self.warps)[blocks] = clock.min(1)[:, None]
            return
        for block, member in zip(blocks, members):
            who = np.flatnonzero(member)
            self.clock[block, who] += 1
            joined = self.known[block, who].max(0)
            joined[who] = self.clock[block, who]
            self.known[block, who] = joined
            self.floor.reshape(self.blocks, self.warps)[block, who] = self.known[block, who].min(1)

    def arrive(self, block, members):
        """Return a snapshot of what warps `members` (warps,) know, for a bar.arrive."""
        who = np.flatnonzero(members)
        self.clock[block, who] += 1
        joined = self.known[block, who].max(0)
        joined[who] = self.clock[block, who]
        return joined

    def learn(self, block, members, snapshot):
        who = np.flatnonzero(members)
        self.known[block, who] = np.maximum(self.known[block, who], snapshot)
        self.floor.reshape(self.blocks, self.warps)[block, who] = self.known[block, who].min(1)

    # An access covers `per` granules: index (n,) counts in units of the access, so arrays are viewed (·, per).
    def _granules(self, array, per):
        if per == 1:
            return array
        key = (id(array), per)
        if key not in self._wide:
            self._wide[key] = array.reshape(-1, per)
        return self._wide[key]

    def on_read(self, warp, index, nbytes, lanes):
        """Check a read.  warp (n,): global warp number; index (n,): byte offset / nbytes; lanes (n,) in the warp.

        Returns None, or (position in n, kind, detail).
        """
        per = nbytes // self.granule
        wrote = self._granules(self.wrote, per)[index]
        floor = self.floor[warp]
        bad = wrote >= (floor if per == 1 else floor[:, None])
        fault = self._explain_read(bad, wrote, warp, index, per, lanes) if bad.any() else None
        read = self._granules(self.read, per)
        local = warp % self.warps
        at = local * (self.total // per) + index
        stamp = (self.clock.ravel() + np.uint32(1))[warp]
        read[at] = stamp if per == 1 else stamp[:, None]
        return fault

    def _unordered(self, value, who, block, local, warp):
        """Return where the last write (clock `value`, writer `who`) is not ordered before warp `local`."""
        author = np.where(who == MANY, 0, who % ATOMIC)
        unknown = (value >= self.known[block, local, author]) & (author != local)
        return np.where(who == MANY, value >= self.floor[warp], unknown)

    def _same_turn(self, granule, value, who, warp, local, lane):
        """Return where another lane of the own warp wrote since the warp's last barrier of any kind."""
        if not self.lanes:
            return np.zeros(len(granule), bool)
        author = self.author[granule]
        return (
            (who == local)
            & (value == self.clock.ravel()[warp])
            & (self.turn[granule] == self.turns[warp])
            & ((author != lane) | (author == ANY_LANE))
        )

    def _between_lanes(self, byte, granule, verb):
        author = self.author[granule]
        name = "the warp" if author == ANY_LANE else "lane %d of the warp" % author
        return "shared byte %d is %s, %s wrote it, no __syncwarp or barrier between" % (byte, verb, name)

    @staticmethod
    def _name(who):
        return (
            "atomics of several warps"
            if who == MANY
            else "an atomic of warp %d" % (who - ATOMIC) if who >= ATOMIC else "warp %d" % who
        )

    def _explain_read(self, bad, wrote, warp, index, per, lanes):
        where = np.nonzero(bad)
        lane = where[0]
        granule = index[lane] if per == 1 else index[lane] * per + where[1]
        value, who = wrote[where], self.writer[granule]
        block, local = warp[lane] // self.warps, warp[lane] % self.warps
        never = value == NEVER
        flight = value == IN_FLIGHT
        race = ~never & ~flight & self._unordered(value, who, block, local, warp[lane])
        inside = ~never & ~flight & self._same_turn(granule, value, who, warp[lane], local, lanes[lane])
        wrong = never | flight | race | inside
        if not wrong.any():
            return None
        first = int(np.flatnonzero(wrong)[0])
        byte = int(granule[first] % self.per_block) * self.granule
        if never[first]:
            return int(lane[first]), "uninitialised read", "shared byte %d was never written" % byte
        if flight[first]:
            return (
                int(lane[first]),
                "race",
                "shared byte %d is read while a cp.async of warp %d writes it" % (byte, who[first]),
            )
        if inside[first] and not race[first]:
            return int(lane[first]), "race", self._between_lanes(byte, granule[first], "read")
        name = self._name(who[first])
        return (
            int(lane[first]),
            "race",
            "shared byte %d is read, %s wrote it, no barrier between" % (byte, name),
        )

    def on_write(self, warp, index, nbytes, lanes, flight=False, atomic=False):
        """Check a write (or the start of a cp.async, or an atomic) and record it."""
        per = nbytes // self.granule
        wide = self._granules(self.wrote, per)
        wrote = wide[index]
        floor = self.floor[warp]
        bad = wrote >= (floor if per == 1 else floor[:, None])
        fault = self._explain_write(bad, wrote, warp, index, per, atomic, lanes) if bad.any() else None
        local = warp % self.warps
        block = warp // self.warps
        if fault is None and self.warps > 1:
            read = self._granules(self.read, per)
            known = self.known[block, local]  # (n, warps)
            for other in range(self.warps):
                seen = read[other * (self.total // per) + index]
                late = seen > (known[:, other] if per == 1 else known[:, other, None])
                if late.any():
                    late = late.any(1) if per > 1 else late
                    late &= local != other
                    if late.any():
                        lane = int(np.flatnonzero(late)[0])
                        byte = int(index[lane] * nbytes % self.memory.stride)
                        verb = "a cp.async may overwrite" if flight else "is overwritten:"
                        fault = (
                            lane,
                            "race",
                            "shared byte %d: %s what warp %d reads, no barrier between" % (byte, verb, other),
                        )
                        break
        stamp = np.full(len(index), IN_FLIGHT, np.uint32) if flight else self.clock.ravel()[warp]
        wide[index] = stamp if per == 1 else stamp[:, None]
        if self.lanes:
            turn, author = self.turns[warp], lanes.astype(np.uint8)
            self._granules(self.turn, per)[index] = turn if per == 1 else turn[:, None]
            self._granules(self.author, per)[index] = author if per == 1 else author[:, None]
        writer = self._granules(self.writer, per)
        who = local.astype(np.uint8)
        if atomic:
            who = who + np.uint8(ATOMIC)
            before = writer[index]
            mine = who if per == 1 else who[:, None]
            unordered = bad & (before >= ATOMIC) & (before != mine) & (wrote != NEVER)
            writer[index] = mine
            mixed = unordered | (writer[index] != mine)  # several warps, now or since the last barrier
            if mixed.any():
                writer[index[mixed if per == 1 else mixed.any(1)]] = MANY
        else:
            writer[index] = who if per == 1 else who[:, None]
        if fault is None and not atomic:
            kept = writer[index] if per == 1 else writer[index][:, 0]
            if (kept != local).any():
                lane = int(np.flatnonzero(kept != local)[0])
                fault = (
                    lane,
                    "race",
                    "shared byte %d is written by warp %d and warp %d at once"
                    % (int(index[lane] * nbytes % self.memory.stride), local[lane], kept[lane]),
                )
        return fault

    def _explain_write(self, bad, wrote, warp, index, per, atomic, lanes):
        where = np.nonzero(bad)
        lane = where[0]
        granule = index[lane] if per == 1 else index[lane] * per + where[1]
        value, who = wrote[where], self.writer[granule]
        block, local = warp[lane] // self.warps, warp[lane] % self.warps
        flight = value == IN_FLIGHT
        race = (value != NEVER) & ~flight & self._unordered(value, who, block, local, warp[lane])
        if atomic:  # atomics among themselves are no race
            race &= who < ATOMIC
        inside = (
            (value != NEVER) & ~flight & self._same_turn(granule, value, who, warp[lane], local, lanes[lane])
        )
        wrong = flight | race | inside
        if not wrong.any():
            return None
        first = int(np.flatnonzero(wrong)[0])
        byte = int(granule[first] % self.per_block) * self.granule
        if flight[first]:
            return (
                int(lane[first]),
                "race",
                "shared byte %d is written while a cp.async of warp %d writes it" % (byte, who[first]),
            )
        if inside[first] and not race[first]:
            return int(lane[first]), "race", self._between_lanes(byte, granule[first], "written")
        name = self._name(who[first])
        return (
            int(lane[first]),
            "race",
            "shared byte %d is written, %s wrote it, no barrier between" % (byte, name),
        )

    def landed(self, warp, index, nbytes):
        """A cp.async was waited for: from now on it is a write of its own warp, of now."""
        per = nbytes // self.granule
        stamp = self.clock.ravel()[warp]
        self._granules(self.wrote, per)[index] = stamp if per == 1 else stamp[:, None]
        if self.lanes:
            turn = self.turns[warp]
            self._granules(self.turn, per)[index] = turn if per == 1 else turn[:, None]


class GlobalOwners:
    """Which block of the running launch wrote a global word."""

    def __init__(self, memory, blocks):
        self.memory, self.first = memory, memory.begin_launch(blocks)
        self.atomic = np.uint32(self.first + blocks)

    def on_write(self, block, offset, nbytes, atomic=False):
        """block (n,): linear block number; offset (n,): byte offset in the arena.  Returns None or (position, detail)."""
        if nbytes == 1:
            return None
        index = offset // nbytes
        view = self.memory.view("owner_bytes", nbytes * 2, 4)
        old = view[index]
        mine = (block + self.first).astype(np.uint32)
        if nbytes > 2:
            mine = mine[:, None]
        other = (old >= np.uint32(self.first)) & (old != mine)
        if atomic:
            other &= old != self.atomic
            view[index] = np.where(old == mine, mine, self.atomic)
        else:
            view[index] = mine
            other |= view[index] != mine  # two blocks in one step
        if not other.any():
            return None
        lane = int(np.nonzero(other)[0][0])
        was = int(
            (old[lane] if nbytes == 2 else old[lane][other[lane]][0])
            if old[lane].max() >= self.first
            else view[index[lane]].max()
        )
        name = "atomics" if was == int(self.atomic) else "block %d" % (was - self.first)
        return lane, "byte %d is written without atomics, %s of the same launch wrote it too" % (
            int(offset[lane]),
            name,
        )
