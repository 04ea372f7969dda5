"""What calls of given shapes need: ways, parcels, workspace.  Made once, collectively, then reused.

A plan holds numbers of the size of the rank count, never of the sequence's length.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from . import schedule
from .backends.base import Dims
from .buffers import Blueprint
from .layout import Placement
from .rules import Rules, sees

__all__ = ["Plan"]

TRAVELS = ("kv", "q")
LARGE = 1 << 18  # bytes from which on an array goes in a message of its own, which can leave from where it lies


class Plan:
    """The plan of one rank.

    Parameters
    ----------
    number : which plan this is, the same on every rank
    where_q, where_k : Placement of the queries and of the keys
    ring : for ``rank``, ``size``, ``reduce`` and ``transpose``; used here only, and collectively
    backend : for tile counts and scratch
    backward : "q", "kv" or "auto"
    """

    def __init__(
        self, number, dims: Dims, rules: Rules, where_q: Placement, where_k: Placement, ring, backend, backward: str
    ):
        self.number, self.dims, self.rules = number, dims, rules
        self.where_q, self.where_k = where_q, where_k
        self.rank, self.size = ring.rank, ring.size
        self.backend = backend
        self.scores = rules.scores(dims.d)
        # seen[j]: do my queries see any key of rank j?  The other way round by transposition.
        _, lo, hi = self._intervals(self.rank)
        seen = np.array([sees(lo, hi, where_k.positions(j)) for j in range(self.size)], np.uint8)
        self.guests = {"kv": seen, "q": ring.transpose(seen)}
        self.ways = {travels: self._way(self.guests[travels], ring) for travels in TRAVELS}
        self.parcel_bytes = {travels: self._sizes(self._parcel, travels) for travels in TRAVELS}
        self.partial_bytes = {travels: self._sizes(self._partial, travels) for travels in TRAVELS}
        self.parcel_runs = {travels: self._parcel_runs(travels) for travels in TRAVELS}
        self.travels = self._cheaper() if backward == "auto" else backward
        self.steps = {travels: self.ways[travels].steps(self.rank, self.guests[travels]) for travels in TRAVELS}
        self._rooms: dict[str, Blueprint] = {}
        self._tile_pairs: dict[str, tuple[int, int]] = {}

    def _way(self, guests, ring) -> schedule.Way:
        offsets = schedule.offsets_of(ring.reduce(schedule.used_offsets(guests, self.rank, ring.order)))
        last = ring.reduce(schedule.stops_of(guests, self.rank, offsets, ring.order))
        return schedule.Way(offsets, tuple(last.tolist()), ring.order)

    def _cheaper(self) -> str:
        """What sends fewer bytes in backward, all ranks together; the paper's way where both are equal."""
        cost = {t: self.ways[t].bytes_on_wire(self.parcel_bytes[t], self.partial_bytes[t]) for t in TRAVELS}
        return "q" if cost["q"] <= cost["kv"] else "kv"

    # ------------------------------------------------------------ parcels

    def _rows(self, travels) -> list[int]:
        return (self.where_k if travels == "kv" else self.where_q).rows

    def _parcel(self, travels, rows) -> Blueprint:
        """The arrays of a traveller, in the order in which they lie in its parcel."""
        dims, parcel = self.dims, Blueprint()
        if travels == "kv":
            parcel.add("k", (dims.batch, rows, dims.kv_heads, dims.d), dims.dtype)
            parcel.add("v", (dims.batch, rows, dims.kv_heads, dims.dv), dims.dtype)
        else:
            parcel.add("q", (dims.batch, rows, dims.heads, dims.d), dims.dtype)
            parcel.add("dout", (dims.batch, rows, dims.heads, dims.dv), dims.dtype)
            parcel.add("delta", (dims.batch, dims.heads, rows), dims.accumulator)
            parcel.add("lse", (dims.batch, dims.heads, rows), dims.accumulator)
        return parcel

    def _partial(self, travels, rows) -> Blueprint:
        """The gradients that follow a traveller."""
        dims, partial = self.dims, Blueprint()
        if travels == "kv":
            partial.add("dk", (dims.batch, rows, dims.kv_heads, dims.d), dims.accumulator)
            partial.add("dv", (dims.batch, rows, dims.kv_heads, dims.dv), dims.accumulator)
        else:
            partial.add("dq", (dims.batch, rows, dims.heads, dims.d), dims.accumulator)
        return partial

    def _sizes(self, blueprint, travels) -> list[int]:
        return [blueprint(travels, rows).nbytes for rows in self._rows(travels)]

    def _parcel_runs(self, travels) -> list[list[tuple[int, int]]]:
        return [self._parcel(travels, rows).runs(LARGE) for rows in self._rows(travels)]

    def open_own(self, buffer, travels):
        """See this rank's own parcel: where each array begins in it, and the array."""
        parcel = self._parcel(travels, self._rows(travels)[self.rank])
        return [(start, array) for (start, _, _), array in zip(parcel.fields.values(), parcel.views(self.backend, buffer).values())]

    def as_it_lies(self, x) -> bool:
        """Whether an array of this rank's own parcel is sent from where it lies."""
        return not hasattr(self.backend, "gpu") and x.nbytes >= LARGE and x.flags.c_contiguous

    def open(self, buffer, travels, traveller):
        """See a parcel as its arrays: (k, v) or (q, dout, delta, lse)."""
        return tuple(self._parcel(travels, self._rows(travels)[traveller]).views(self.backend, buffer).values())

    def open_partial(self, buffer, travels, traveller):
        """See a traveller's gradients: (dk, dv) or (dq,)."""
        return tuple(self._partial(travels, self._rows(travels)[traveller]).views(self.backend, buffer).values())

    # ------------------------------------------------------------ workspace

    def room(self, call) -> Blueprint:
        """The workspace of "forward" or "backward", as arrays in one run of bytes.

        Made when it is first asked for: its size is told by kernels, which a call that never comes need not have compiled.
        """
        if call not in self._rooms:
            self._rooms[call] = self._room(call)
        return self._rooms[call]

    def _room(self, call) -> Blueprint:
        dims, travels = self.dims, "kv" if call == "forward" else self.travels
        rows_q, rows_k = self.where_q.rows[self.rank], self.where_k.rows[self.rank]
        visitors = [step.guest for step in self.steps[travels] if step.guest is not None and step.index > 0]
        own = [self.rank] if self.ways[travels].last[self.rank] else []
        largest = lambda sizes, ranks: max((sizes[r] for r in ranks), default=0)  # noqa: E731
        most_q, most_k = rows_q, rows_k
        if travels == "kv":
            most_k = max(rows_k, largest(self.where_k.rows, visitors))
        else:
            most_q = max(rows_q, largest(self.where_q.rows, visitors))
        room = Blueprint()
        room.add("at", (most_q,), np.int32)
        room.add("lo", (most_q,), np.int32)
        room.add("hi", (most_q,), np.int32)
        room.add("pos", (most_k,), np.int32)
        scratch = self.backend.scratch_bytes(dims, self.scores, most_q, most_k, call == "backward")
        room.add("scratch", (scratch,), np.uint8)
        slot = largest(self.parcel_bytes[travels], visitors + own)
        room.add("here", (slot,), np.uint8)
        room.add("there", (slot,), np.uint8)
        sums = {"out": (rows_q, dims.heads, dims.dv)}
        if call == "backward":
            sums = {
                "dq": (rows_q, dims.heads, dims.d),
                "dk": (rows_k, dims.kv_heads, dims.d),
                "dv": (rows_k, dims.kv_heads, dims.dv),
            }
            room.add("delta", (dims.batch, dims.heads, rows_q), dims.accumulator)
            for name in ("fresh", "sent", "arriving"):
                room.add(name, (largest(self.partial_bytes[travels], visitors),), np.uint8)
            room.add("home", (largest(self.partial_bytes[travels], own),), np.uint8)
        if dims.dtype != dims.accumulator:  # else the results themselves take the sums
            for name, shape in sums.items():
                room.add(name, (dims.batch, *shape), dims.accumulator)
        return room

    def nbytes(self, call) -> int:
        """Bytes of workspace of a call."""
        return self.room(call).nbytes

    def index_bytes(self, call) -> int:
        """Bytes of the longest index vectors that are made at once."""
        fields = self.room(call).fields
        (queries,), (keys,) = fields["at"][1], fields["pos"][1]
        return 4 * max(3 * queries, keys)

    def lane_bytes(self, call) -> dict:
        """The largest message of each kind, see ``transport.LANES``."""
        size = lambda name: self.room(call).fields[name][1][0] if name in self.room(call).fields else 0  # noqa: E731
        return {
            "cargo out": size("here"), "cargo in": size("there"),
            "partial out": size("fresh"), "partial in": size("arriving"), "home in": size("home"),
        }  # fmt: skip

    # ------------------------------------------------------------ visibility

    def _intervals(self, rank, *into):
        positions = self.where_q.positions(rank)
        return self.rules.intervals(positions, self.where_q.length, self.where_k.length, *into)

    def intervals(self, rank, room, progress):
        """at, lo, hi of a rank's queries, [rows] int32, in the workspace."""
        rows = self.where_q.rows[rank]
        targets = [room[name][:rows] for name in ("at", "lo", "hi")]
        return self.backend.indices(targets, lambda *into: self._intervals(rank, *into), progress)

    def key_positions(self, rank, room, progress):
        """Global positions of a rank's keys, [rows] int32, in the workspace."""
        target = room["pos"][: self.where_k.rows[rank]]
        (pos,) = self.backend.indices([target], lambda into: self.where_k.positions(rank, out=into), progress)
        return pos

    @cached_property
    def all_tiles(self) -> dict:
        """Pairs of tiles that an unmasked call would compute here, for what travels."""
        # Tiles of queries begin where positions on the keys' axis jump, which documents of other lengths move.
        queries = self.where_q.positions if self.rules.documents is None else lambda rank: self._intervals(rank)[0]
        keys = self.where_k.positions
        count = lambda q, k: self.backend.tile_count(self.dims, queries(q), keys(k))  # noqa: E731
        return {
            "kv": sum(count(self.rank, other) for other in range(self.size)),
            "q": sum(count(other, self.rank) for other in range(self.size)),
        }

    def tile_pairs(self, call) -> tuple[int, int]:
        """Pairs of tiles that the kernels of a GPU compute here in a call, and those of an unmasked call."""
        if call not in self._tile_pairs:
            travels = "kv" if call == "forward" else self.travels
            met = {step.guest for step in self.steps[travels] if step.compute}
            computed = every = 0
            for other in range(self.size):
                q, k = (self.rank, other) if travels == "kv" else (other, self.rank)
                rows = self.where_q.rows[q], self.where_k.rows[k]
                sight = (*self._intervals(q)[1:], self.where_k.positions(k)) if other in met else None
                seen, total = self.backend.tile_pairs(self.dims, call == "backward", *rows, sight)
                computed, every = computed + seen, every + total
            self._tile_pairs[call] = computed, every
        return self._tile_pairs[call]
