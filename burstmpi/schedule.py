"""The steps of the ring as data: who holds whose rows when, what is computed, skipped, sent and never sent.

Some rows *travel* (K and V in forward; Q or K, V in backward), the others *stay*.  Traveller t starts at home
on rank t and visits the ranks t + offsets[1], t + offsets[2], ... (mod size), the same offsets for all
travellers, so that in every step each rank sends one parcel at most and receives one at most.  These sums count
*places* on the ring: ``order`` says which rank stands at which place (by default rank r at place r), so that ranks of
one node stand beside each other whatever numbers the launcher gave them.  For a full mask
the offsets are 0, 1, 2, ..., size-1: the plain ring.  An offset at which no rank needs its guest is left out
(a window to both sides keeps 0, 1 and size-1), and each traveller goes only as far as somebody on the rest of
its way needs it (``last``).

Gradients of travellers follow as *partials*: the home keeps its own share, the first visited rank starts the
partial, each later one adds to it, and the last one sends it straight home:

    cargo     t ──▶ t+o1 ──▶ t+o2 ──▶ …            last[t] messages
    partial         t+o1 ──▶ t+o2 ──▶ … ──▶ t      last[t] messages
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["Step", "Way", "offsets_of", "stops_of", "used_offsets"]


@dataclass(frozen=True)
class Step:
    """What one rank does in one step; None means that there is nothing of the kind."""

    index: int
    guest: int | None  # whose parcel is here
    compute: bool  # whether anything of it is visible here
    send_to: int | None  # the guest's next stop
    next_guest: int | None  # whose parcel arrives for the next step ...
    receive_from: int | None  # ... and from where
    partial_from: int | None  # where the guest's partial gradient comes from
    partial_to: int | None  # where it goes from here


@dataclass(frozen=True)
class Way:
    """The travels of all parcels, as far as every rank must know them.

    offsets : distance from home in each step, offsets[0] = 0, in places of the ring
    last : [size] the last step in which each traveller is needed
    order : [size] the rank at each place of the ring; None: rank r stands at place r
    """

    offsets: tuple[int, ...]
    last: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.last)

    @cached_property
    def _place(self) -> list[int]:
        """The place of each rank."""
        return _places(self.order, self.size).tolist()

    def _away(self, rank: int, distance: int) -> int:
        """The rank that stands so many places further."""
        place = (self._place[rank] + distance) % self.size
        return place if self.order is None else self.order[place]

    def steps(self, rank: int, guests) -> list[Step]:
        """List what ``rank`` does; ``guests[t]`` tells whether traveller t is needed there."""
        return [self._step(rank, index, guests) for index in range(len(self.offsets))]

    def _step(self, rank, index, guests) -> Step:
        offsets, away = self.offsets, self._away
        here = away(rank, -offsets[index])
        goes_on = self.last[here] > index
        guest = here if self.last[here] >= index else None
        arriving = None
        if index + 1 < len(offsets):
            arriving = away(rank, -offsets[index + 1])
            arriving = arriving if self.last[arriving] > index else None
        visiting = guest is not None and index > 0
        return Step(
            index=index,
            guest=guest,
            compute=guest is not None and bool(guests[guest]),
            send_to=away(here, offsets[index + 1]) if goes_on else None,
            next_guest=arriving,
            receive_from=None if arriving is None else away(arriving, offsets[index]),
            partial_from=away(here, offsets[index - 1]) if visiting and index > 1 else None,
            partial_to=(away(here, offsets[index + 1]) if goes_on else here) if visiting else None,
        )

    def host_of_last_step(self, traveller: int) -> int:
        """The rank from which a traveller's partial comes home."""
        return self._away(traveller, self.offsets[self.last[traveller]])

    def bytes_on_wire(self, cargo, partial=None) -> int:
        """Bytes that all ranks send together, from the bytes of each traveller's parcel and partial."""
        return sum(n * (c + p) for n, c, p in zip(self.last, cargo, partial or [0] * self.size))


def _places(order, size: int) -> np.ndarray:
    """The place of each rank, [size]: the inverse of ``order``."""
    return np.arange(size) if order is None else np.argsort(order)


def used_offsets(guests, rank: int, order=None) -> np.ndarray:
    """Mark the distances from which this rank needs a guest, [size] uint8; the maximum over ranks is the way's."""
    size = len(guests)
    place = _places(order, size)
    used = np.zeros(size, np.uint8)
    used[(place[rank] - place[np.flatnonzero(guests)]) % size] = 1
    used[0] = 1
    return used


def offsets_of(used) -> tuple[int, ...]:
    """Turn the marks of all ranks together into the offsets, in the order of the ring."""
    return tuple(np.flatnonzero(used).tolist())


def stops_of(guests, rank: int, offsets, order=None) -> np.ndarray:
    """Tell for each traveller in which step this rank needs it, [size] int32; the maximum over ranks is ``last``."""
    size = len(guests)
    place = _places(order, size)
    step_at = np.zeros(size, np.int32)
    step_at[list(offsets)] = np.arange(len(offsets))
    wanted = np.flatnonzero(guests)
    stops = np.zeros(size, np.int32)
    stops[wanted] = step_at[(place[rank] - place[wanted]) % size]
    return stops
