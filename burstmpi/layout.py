"""Which global positions each rank's rows are: pure index arithmetic.

    contiguous   rank r holds the r-th run of rows; the caller may cut where it likes
    zigzag       2G runs; rank r holds runs r and 2G-1-r, so that a causal mask gives every rank the same work
    striped      rank r holds positions r, r+G, r+2G, ...
    explicit     whatever positions the caller's ranks say, each position once

With 8 tokens on 2 ranks::

    contiguous   rank 0: 0 1 2 3     rank 1: 4 5 6 7
    zigzag       rank 0: 0 1 6 7     rank 1: 2 3 4 5
    striped      rank 0: 0 2 4 6     rank 1: 1 3 5 7

Lengths need not divide: runs differ by one row at most, and a rank may hold none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from . import checks

__all__ = ["Placement", "place", "placement_of"]


@dataclass(frozen=True)
class Placement:
    """A layout with its numbers filled in: where each of ``length`` rows lives.

    ``runs[r]`` lists the runs of rank r as (first position, number of rows, step), in the order of its rows;
    explicit positions have ``given[r]`` instead, one int32 vector a rank.
    """

    name: str
    runs: tuple[tuple[tuple[int, int, int], ...], ...] | None = None
    given: tuple[np.ndarray, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.given if self.runs is None else self.runs)

    @cached_property
    def length(self) -> int:
        return sum(self.rows)

    @cached_property
    def rows(self) -> list[int]:
        """Rows of each rank."""
        if self.runs is None:
            return [len(positions) for positions in self.given]
        return [sum(count for _, count, _ in runs) for runs in self.runs]

    @cached_property
    def ascending(self) -> list[bool]:
        """Whether the positions of each rank's rows ascend."""
        if self.runs is None:
            return [bool((positions[:-1] < positions[1:]).all()) for positions in self.given]
        ends = [[x for first, count, step in runs if count for x in (first, first + (count - 1) * step)] for runs in self.runs]
        return [x == sorted(x) for x in ends]

    def positions(self, rank: int, out=None) -> np.ndarray:
        """Write the global positions of a rank's rows, [rows] int32, in the order of its rows."""
        if self.runs is None:
            if out is None:
                return self.given[rank]
            out[:] = self.given[rank]
            return out
        runs = self.runs[rank]
        if out is None:
            out = np.empty(sum(count for _, count, _ in runs), np.int32)
        row = 0
        for first, count, step in runs:
            out[row : row + count] = np.arange(first, first + count * step, step, dtype=np.int32)
            row += count
        return out


def split(length: int, parts: int) -> list[int]:
    """Cut a length into parts that differ by one at most, the longer ones first."""
    whole, rest = divmod(length, parts)
    return [whole + (part < rest) for part in range(parts)]


def place(layout, length: int, size: int) -> Placement:
    """Lay ``length`` rows out over ``size`` ranks.

    Parameters
    ----------
    layout : "contiguous", "zigzag", "striped", or the int vectors of all ranks, a tuple

    Raises
    ------
    ValueError
        Explicit positions that are not exactly 0 ... length-1.
    """
    if not isinstance(layout, str):
        if sum(map(len, layout)) != length:
            raise ValueError(f"layout: explicit positions are {sum(map(len, layout))}, but there are {length} rows")
        return Placement("explicit", given=layout)
    if layout == "contiguous":
        return _contiguous(split(length, size))
    if layout == "striped":
        return Placement(layout, tuple(((r, len(range(r, length, size)), size),) for r in range(size)))
    counts = split(length, 2 * size)
    starts = np.concatenate(([0], np.cumsum(counts))).tolist()
    return Placement(
        layout, tuple(tuple((starts[p], counts[p], 1) for p in (r, 2 * size - 1 - r)) for r in range(size))
    )


def _contiguous(rows) -> Placement:
    starts = np.concatenate(([0], np.cumsum(rows))).tolist()
    return Placement("contiguous", tuple(((start, count, 1),) for start, count in zip(starts, rows)))


def placement_of(layout, rows, what: str) -> Placement:
    """Find the placement of rows that the ranks already hold.

    Parameters
    ----------
    layout : as in ``place``
    rows : rows of each rank
    what : "queries" or "keys", for messages

    Raises
    ------
    ValueError
        Some rank holds another number of rows than the layout gives it.
    """
    length = sum(rows)
    if length > checks.MAX_LENGTH:
        raise ValueError(f"{what}: {length} rows in all, positions go up to {checks.MAX_LENGTH}")
    if isinstance(layout, str) and layout == "contiguous":
        return _contiguous(rows)
    if isinstance(layout, str):
        placement = place(layout, length, len(rows))
        name = f"{layout} over {len(rows)} ranks of {length} rows"
    else:
        placement = Placement("explicit", given=layout)
        name = "the layout's explicit vector"
    for rank, (has, wants) in enumerate(zip(rows, placement.rows)):
        if has != wants:
            raise ValueError(f"{what}: {name} puts {wants} rows on rank {rank}, it has {has}")
    return placement


def check_explicit(positions) -> tuple[np.ndarray, ...]:
    """Check that the ranks' explicit positions hold each of 0 ... N-1 exactly once.

    Parameters
    ----------
    positions : one int vector a rank

    Returns
    -------
    The same as int32, one a rank.

    Raises
    ------
    ValueError
        With the position and the ranks that hold it.
    """
    positions = [np.asarray(mine) for mine in positions]
    length = sum(map(len, positions))
    owner = np.full(length, -1, np.int32)
    for rank, mine in enumerate(positions):
        outside = mine >= length
        if outside.any():
            raise ValueError(
                f"layout: rank {rank} holds position {mine[outside][0]}, but all ranks together hold {length} rows"
            )
        twice = owner[mine] >= 0
        if twice.any():
            at = mine[twice][0]
            raise ValueError(f"layout: position {at} is held by rank {owner[at]} and by rank {rank}")
        values, counts = np.unique(mine, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"layout: position {values[counts > 1][0]} is held twice by rank {rank}")
        owner[mine] = rank
    # As many positions as rows, none outside, none twice: so none is missing.
    return tuple(mine.astype(np.int32) for mine in positions)
