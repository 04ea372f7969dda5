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

Atomics of several warps that no barrier orders count together: joined[w, g] is 1 + clock of warp w's last one.

Inside of a warp, bar.warp.sync (__syncwarp) orders the lanes of its mask, by a Lamport clock: turns[lane] becomes 1 +
the largest of them.  turn[g] is the clock of the lane that wrote last and author[g] that lane.  What another lane of the
warp wrote in a turn that is not below the own one must not be read or overwritten.
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
        self.turns = np.zeros(blocks * warps * 32, np.uint32)
        self.joined = None  # made with the first atomic
        self._wide = {}

    def reset(self):
        self.wrote[:] = NEVER
        self.read[:] = 0
        self.clock[:] = 0
        self.known[:] = 0
        self.floor[:] = 0
        self.turns[:] = 0
        if self.joined is not None:
            self.joined[:] = 0

    def warp_barrier(self, lanes, masks):
        """Order each of `lanes` (n,), numbers over the chunk, with the lanes of its mask in `masks` (n,) uint32."""
        rows = self.turns.reshape(-1, 32)[lanes // 32]
        if (masks != 0xFFFFFFFF).any():
            named = (masks[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
            rows = np.where(named, rows, np.uint32(0))
        self.turns[lanes] = rows.max(1) + np.uint32(1)

    def _turn(self, warp, lanes, oldest=False):
        """Return the lanes' Lamport clocks; of a warp as a whole the newest (or the oldest)."""
        out = self.turns[warp * 32 + lanes % 32]
        whole = lanes == ANY_LANE
        if whole.any():
            rows = self.turns.reshape(-1, 32)[warp]
            out = np.where(whole, rows.min(1) if oldest else rows.max(1), out)
        return out

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

    def _unordered(self, granule, value, who, block, local):
        """Return where the last write (clock `value`, writer `who`) is not ordered before warp `local`."""
        author = np.where(who == MANY, 0, who % ATOMIC)
        unknown = (value >= self.known[block, local, author]) & (author != local)
        many = np.flatnonzero(who == MANY)
        if len(many):
            others = self.joined.reshape(self.warps, -1)[:, granule[many]].T  # [access, warp]
            late = others > self.known[block[many], local[many]]
            late[np.arange(len(many)), local[many]] = False
            unknown[many] = late.any(1)
        return unknown

    def _same_turn(self, granule, value, who, warp, local, lane, atomic=False):
        """Return where another lane of the own warp wrote since a barrier ordered the two.

        An atomic may follow the warp's other atomics.
        """
        if not self.lanes:
            return np.zeros(len(granule), bool)
        author = self.author[granule]
        mine = (who == local) if atomic else (who == local) | (who == local + ATOMIC)
        return (
            mine
            & (value == self.clock.ravel()[warp])
            & (self.turn[granule] >= self._turn(warp, lane, oldest=True))
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
        race = ~never & ~flight & self._unordered(granule, value, who, block, local)
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
            turn, author = self._turn(warp, lanes), lanes.astype(np.uint8)
            authors = self._granules(self.author, per)
            before = authors[index] if atomic else None
            turns = self._granules(self.turn, per)
            since = turns[index] >= (turn if per == 1 else turn[:, None]) if atomic else None
            turns[index] = turn if per == 1 else turn[:, None]
            author = author if per == 1 else author[:, None]
            authors[index] = author
            if atomic:  # atomics of several lanes, now or in this turn, are the warp's
                own = (
                    self._granules(self.writer, per)[index] == (local if per == 1 else local[:, None]) + ATOMIC
                )
                own = own & (wrote == (stamp if per == 1 else stamp[:, None])) & since & (before != author)
                several = own | (authors[index] != author)
                if several.any():
                    authors[index[several if per == 1 else several.any(1)]] = ANY_LANE
        writer = self._granules(self.writer, per)
        who = local.astype(np.uint8)
        if atomic:
            who = who + np.uint8(ATOMIC)
            before = writer[index]
            mine = who if per == 1 else who[:, None]
            unordered = bad & (before >= ATOMIC) & (before != mine) & (wrote != NEVER)
            writer[index] = mine
            self._join(local, index, per, stamp)
            mixed = unordered | (writer[index] != mine)  # several warps, now or since the last barrier
            if mixed.any():
                rows = index[mixed if per == 1 else mixed.any(1)]
                writer[rows] = MANY
                both = np.maximum(
                    wrote, stamp if per == 1 else stamp[:, None]
                )  # the newest of all: a bound for all
                np.maximum.at(wide, index, both)
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

    def _join(self, local, index, per, stamp):
        """Note an atomic's clock for its warp, for granules that atomics of several warps share."""
        if self.warps > 1:
            if self.joined is None:
                self.joined = np.zeros(self.warps * self.total, np.uint32)
            at = local * (self.total // per) + index
            self._granules(self.joined, per)[at] = (
                stamp + np.uint32(1) if per == 1 else stamp[:, None] + np.uint32(1)
            )

    def _explain_write(self, bad, wrote, warp, index, per, atomic, lanes):
        where = np.nonzero(bad)
        lane = where[0]
        granule = index[lane] if per == 1 else index[lane] * per + where[1]
        value, who = wrote[where], self.writer[granule]
        block, local = warp[lane] // self.warps, warp[lane] % self.warps
        flight = value == IN_FLIGHT
        race = (value != NEVER) & ~flight & self._unordered(granule, value, who, block, local)
        if atomic:  # atomics among themselves are no race
            race &= who < ATOMIC
        inside = (
            (value != NEVER)
            & ~flight
            & self._same_turn(granule, value, who, warp[lane], local, lanes[lane], atomic)
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

    def landed(self, warp, index, nbytes, lanes):
        """A cp.async was waited for: from now on it is a write of its own warp, of now."""
        per = nbytes // self.granule
        stamp = self.clock.ravel()[warp]
        self._granules(self.wrote, per)[index] = stamp if per == 1 else stamp[:, None]
        if self.lanes:
            turn = self._turn(warp, lanes)
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
