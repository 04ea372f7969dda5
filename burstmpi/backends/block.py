"""struct Block of raw_kernels/block.cuh, as NumPy has it: the one argument of every kernel of attention."""

from __future__ import annotations

import numpy as np

__all__ = ["BLOCK", "TYPES", "tensor", "vector"]

TYPES = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}  # -DTYPE

_TENSOR = [("data", np.uint64), ("batch", np.int64), ("row", np.int64), ("head", np.int64)]
_VECTOR = [("data", np.uint64), ("batch", np.int64), ("head", np.int64), ("row", np.int64)]
_TENSORS = ("q", "k", "v", "out", "last", "dout", "dq", "dk", "dv")
_POINTERS = ("at", "lo", "hi", "pos", "reach", "extent", "spans", "keys", "order", "slopes", "work")
_COUNTS = (
    "batch", "heads", "kv_heads", "d", "dim_v", "rows_q", "rows_k", "tile_q", "tile_k", "tiles_q", "tiles_k",
    "first", "fresh_q", "fresh_kv", "splits", "section",
)  # fmt: skip

BLOCK = np.dtype(
    [
        *((name, _TENSOR) for name in _TENSORS),
        ("lse", _VECTOR),
        ("delta", _VECTOR),
        *((name, np.uint64) for name in _POINTERS),
        ("scale", np.float64),
        ("softcap", np.float64),
        *((name, np.int32) for name in _COUNTS),
    ],
    align=True,
)


def tensor(x):
    """struct Tensor of an array (batch, rows, heads, columns)."""
    return (x.data.ptr, x.strides[0], x.strides[1], x.strides[2])


def vector(x):
    """struct Vector of an array (batch, heads, rows)."""
    return (x.data.ptr, *x.strides)
