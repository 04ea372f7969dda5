"""Move whole arrays to and from the ranks' rows: what ``BurstAttention.shard`` and ``gather`` do.

A layout says which rows; the ring carries bytes.  Collective, and wrong input is refused on every rank alike.
"""

from __future__ import annotations

import numpy as np

from . import checks
from .arrays import adopt, current_device
from .layout import place, placement_of

__all__ = ["gather", "shard"]


def shard(ring, layout_of, x, axis, root, common):
    """Take this rank's rows of a whole array; see ``BurstAttention.shard``.

    Parameters
    ----------
    ring : ring.Ring
    layout_of : gives the layout, as in ``layout.place``, or raises what is wrong with the caller's ``side``
    common : what all ranks must say alike, the name of the call among it

    An array of a GPU comes to the host first, and this rank's rows go back to its device; from a root, every rank
    gets them on its current device.
    """
    problem, told, device = None, None, None
    try:
        layout = layout_of()
        checks.root(root, ring.size)
        if root in (None, ring.rank):
            x = adopt("x", x)
            checks.movable(x, axis)
            x, device = _to_host(x)
            place(layout, x.shape[axis], ring.size)
            told = (x.shape, x.dtype, device is not None)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    if root is None and told is not None:
        common = common | {"shape": told[0], "dtype": str(told[1]), "arrays": "on a GPU" if told[2] else "on the host"}
    shape, dtype, on_gpu = ring.meet(common, told, problem)[ring.rank if root is None else root]
    with ring.alike():
        where = place(layout, shape[axis], ring.size)
    part = lambda rank: np.ascontiguousarray(np.take(x, where.positions(rank), axis=axis))  # noqa: E731
    if root is None:
        return _to_device(part(ring.rank), device)
    mine = np.empty(_with_rows(shape, axis, where.rows[ring.rank]), dtype)
    ring.scatter_bytes(lambda rank: _bytes(part(rank)), _bytes(mine), root)
    return _to_device(mine, current_device() if on_gpu and device is None else device)


def gather(ring, layout_of, x, axis, root, common):
    """Put the ranks' rows together into the whole array; see ``BurstAttention.gather``."""
    problem, rows, rest, device = None, 0, {}, None
    try:
        layout = layout_of()
        checks.root(root, ring.size)
        x = adopt("x", x)
        checks.movable(x, axis)
        x, device = _to_host(x)
        rows = x.shape[axis]
        rest = {"shape": _with_rows(x.shape, axis, "rows"), "dtype": str(x.dtype)}
        rest["arrays"] = "on the host" if device is None else "on a GPU"
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    counts = ring.meet(common | rest, rows, problem)
    with ring.alike():
        where = placement_of(layout, counts, common["side"])
    whole = np.empty(_with_rows(x.shape, axis, where.length), x.dtype) if root in (None, ring.rank) else None
    row_bytes = int(np.prod(_with_rows(x.shape, axis, 1), dtype=np.int64)) * x.itemsize
    sizes = [count * row_bytes for count in counts]
    for rank, part in enumerate(ring.gather_bytes(_bytes(np.ascontiguousarray(x)), sizes, root)):
        if whole is not None:
            index = (slice(None),) * axis + (where.positions(rank),)
            whole[index] = part.view(x.dtype).reshape(_with_rows(x.shape, axis, counts[rank]))
    return None if whole is None else _to_device(whole, device)


def _to_host(x):
    """An array of the host, and the device that it came from; None where it has been on the host."""
    if isinstance(x, np.ndarray):
        return x, None
    import cupy

    with x.device:
        return cupy.asnumpy(x), int(x.device.id)


def _to_device(x, device):
    if device is None:
        return x
    import cupy

    with cupy.cuda.Device(device):
        return cupy.asarray(x)


def _with_rows(shape, axis, rows) -> tuple:
    return (*shape[:axis], rows, *shape[axis + 1 :])


def _bytes(x) -> np.ndarray:
    """See a C-contiguous array as bytes."""
    return x.reshape(-1).view(np.uint8)
