"""The verbs of a GPU backend that are no attention: copy, clear, add, delta over raw_kernels/plain.cu."""

from __future__ import annotations

from math import prod

import numpy as np

from .block import BLOCK, TYPES, tensor, vector

__all__ = ["PLAIN", "PlainVerbs", "pieces"]

THREADS = 256

# struct Plain of raw_kernels/plain.cu
PLAIN = np.dtype(
    [
        ("to", np.uint64),
        ("from", np.uint64),
        ("to_step", np.int64, 4),
        ("from_step", np.int64, 4),
        ("pieces", np.int64),
        ("b", np.int32),
        ("c", np.int32),
        ("across", np.int32),
        ("reserved", np.int32),
        ("value", np.float64),
    ],
    align=True,
)


def _collapsed(shape, *steps):
    """Join axes that lie side by side in all arrays; at least one axis stays."""
    axes = [(n, *(s[i] for s in steps)) for i, n in enumerate(shape) if n != 1] or [(1, *(s[-1] for s in steps))]
    joined = [axes[0]]
    for n, *step in axes[1:]:
        last_n, *last = joined[-1]
        if all(outer == n * inner for outer, inner in zip(last, step)):
            joined[-1] = (last_n * n, *step)
        else:
            joined.append((n, *step))
    return joined


def pieces(shape, arrays) -> tuple[int, list]:
    """How arrays of one shape are cut: columns of a piece, and four axes (length, bytes in each array).

    arrays : [(address, strides in bytes, bytes of an item)], one or two
    """
    axes = _collapsed(shape, *(strides for _, strides, _ in arrays))
    if len(axes) > 4:
        raise ValueError(f"array: at most 4 axes that cannot be joined, got shape {shape}")
    width = 16 // max(size for _, _, size in arrays)
    columns, *steps = axes[-1]
    while width > 1 and not (
        columns % width == 0
        and all(step == size for step, (_, _, size) in zip(steps, arrays))
        and all(address % (width * size) == 0 for address, _, size in arrays)
        and all(s % (width * size) == 0 for axis in axes[:-1] for s, (_, _, size) in zip(axis[1:], arrays))
    ):
        width //= 2
    return width, [(1, *(0 for _ in arrays))] * (4 - len(axes)) + axes


class PlainVerbs:
    """copy, clear, add and delta; mixed into a backend that has ``_cupy``, ``_modules`` and ``_launched``."""

    def copy(self, target, source):
        """target[...] = source, rounding once where the types differ."""
        return self._plain("copy", target, source)

    def clear(self, target, value=0.0):
        """target[...] = value."""
        return self._plain("clear", target, value=value)

    def add(self, target, source):
        """target += source, both of the accumulator's type."""
        if target.dtype != source.dtype or target.dtype.name not in ("float32", "float64"):
            raise TypeError(f"add: float32 or float64 twice expected, got {target.dtype} and {source.dtype}")
        return self._plain("add", target, source)

    def _plain(self, name, target, source=None, value=0.0):
        if source is not None and target.shape != source.shape:
            raise ValueError(f"{name}: shapes {target.shape} and {source.shape} differ")
        if not target.size:
            return self._launched()
        arrays = [(x.data.ptr, x.strides or (0,), x.dtype.itemsize) for x in (target, source) if x is not None]
        width, axes = pieces(target.shape or (1,), arrays)
        plain = np.zeros((), PLAIN)
        plain["to"], plain["value"] = target.data.ptr, value
        plain["to_step"] = [axis[1] for axis in axes]
        defines = {"TO": TYPES[target.dtype.name], "VECTOR": width}
        if source is not None:
            plain["from"], plain["from_step"] = source.data.ptr, [axis[2] for axis in axes]
            defines["FROM"] = TYPES[source.dtype.name]
        # The longest axis may be beyond an int: only the first one is, as it is never divided by.
        lengths = [axis[0] for axis in axes]
        lengths[3] //= width
        if lengths[:3] == [1, 1, 1]:  # one run of memory
            step = width * np.array([axis[1:] for axis in axes][3])
            plain["to_step"][0] = step[0]
            if source is not None:
                plain["from_step"][0] = step[1]
            lengths = [lengths[3], 1, 1, 1]
        count = prod(lengths)
        plain["pieces"], plain["b"], plain["c"], plain["across"] = count, *lengths[1:]
        defines["INDEX"] = "u32" if count + THREADS < 2**32 else "u64"
        self._modules.kernel("plain", name, **defines)((-(-count // THREADS),), (THREADS,), (plain,))
        return self._launched()

    def delta(self, dout, out, delta):
        """delta_i = Σ_c dout_ic out_ic, in the accumulator's type."""
        batch, rows, heads, dv = dout.shape
        if not delta.size:
            return self._launched()
        size, width = dout.dtype.itemsize, 16 // dout.dtype.itemsize
        for x in (dout, out):
            if x.strides[3] != size:
                raise ValueError(f"delta: columns must lie side by side, strides are {x.strides}")
            while width > 1 and (
                dv % width or x.data.ptr % (width * size) or any(step % (width * size) for step in x.strides[:3])
            ):
                width //= 2
        block = np.zeros((), BLOCK)
        block["dout"], block["last"], block["delta"] = tensor(dout), tensor(out), vector(delta)
        block["batch"], block["rows_q"], block["heads"], block["dim_v"] = dout.shape
        warps = batch * heads * -(-rows // 32)
        defines = {"TYPE": TYPES[dout.dtype.name], "VECTOR": width}
        self._modules.kernel("plain", "delta", **defines)((-(-warps // (THREADS // 32)),), (THREADS,), (block,))
        return self._launched()
