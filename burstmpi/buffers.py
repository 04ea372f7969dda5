"""Workspace and parcels: one run of bytes, cut into named arrays.

A ``Blueprint`` says which arrays lie where in a run of bytes.  The same thing describes a rank's workspace and a
parcel on the wire (K and V of one rank, say).  Each array starts at a multiple of ``ALIGN`` bytes:
a cache line of the CPU, four 32-byte sectors of a GPU, and what cp.async wants.
"""

from __future__ import annotations

from math import prod

import numpy as np

__all__ = ["ALIGN", "Blueprint"]

ALIGN = 128


class Blueprint:
    """Arrays one after another in a run of bytes.

    >>> plan = Blueprint()
    >>> plan.add("k", (2, 5), "float32")
    >>> plan.nbytes
    40
    """

    def __init__(self):
        self.fields: dict[str, tuple[int, tuple[int, ...], np.dtype]] = {}  # name: (offset, shape, dtype)
        self.nbytes = 0

    def add(self, name: str, shape, dtype) -> None:
        """Append an array; an empty one takes no room."""
        dtype = np.dtype(dtype)
        size = prod(shape) * dtype.itemsize
        offset = -(-self.nbytes // ALIGN) * ALIGN if size else 0
        self.fields[name] = (offset, tuple(shape), dtype)
        if size:
            self.nbytes = offset + size

    def runs(self, large: int) -> list[tuple[int, int]]:
        """The arrays in runs, each to be sent by itself: (start, stop).

        An array of ``large`` bytes or more is a run of its own, so that it may be sent from elsewhere; smaller
        neighbours share one.  What only aligns two runs is in neither.
        """
        runs: list[tuple[int, int]] = []
        apart = True
        for offset, shape, dtype in self.fields.values():
            size = prod(shape) * dtype.itemsize
            if size and (apart or size >= large):
                runs.append((offset, offset + size))
                apart = size >= large
            elif size:
                runs[-1] = (runs[-1][0], offset + size)
        return runs

    def views(self, backend, buffer) -> dict:
        """Cut a buffer of at least ``nbytes`` bytes into the arrays."""
        return {name: backend.view(buffer, *field) for name, field in self.fields.items()}
