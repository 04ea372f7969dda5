"""Every error that a caller can cause: one function a question, one message an answer.

A message reads ``subject: problem, value``.  The functions here look at one rank's arguments; that all ranks
agree is asked by ``ring.Ring.agree``.
"""

from __future__ import annotations

import math
import numbers
import sys

import ml_dtypes
import numpy as np

from .arrays import on_gpu, shares_memory

__all__ = ["LAYOUTS", "WAYS", "KernelError", "accumulator"]

LAYOUTS = ("contiguous", "zigzag", "striped")
SOFTCAPS, SCALES = (1e-18, 1e30), (1e-30, 1e30)  # in float32 scores and their gradients are sound there
STEEPEST = 1e30  # an ALiBi slope
WAYS = ("auto", "q", "kv")
TYPES = ("float64", "float32", "float16", "bfloat16")
IDS = "(document ids become boundaries by burstmpi.boundaries)"
MAX_LENGTH = 2**31 - 2  # positions are int32, and so is the end of the last interval


class KernelError(RuntimeError):
    """A kernel of the GPU cannot be compiled or loaded: the text says on which rank, which one and why."""


# ---------------------------------------------------------------- options


def flag(name, value) -> bool:
    """A real bool: 1, "no" or an array would hide a mistake."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: must be True or False, got {value!r}")
    return bool(value)


def choice(name, value, known) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}: must be one of {', '.join(map(repr, known))}, got {value!r}")
    return str(value)


def positive(name, value):
    """A finite number above 0, or None."""
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: must be a number or None, got {value!r}")
    try:
        value = float(value)
    except OverflowError:
        raise ValueError(f"{name}: must be finite and above 0, got a number beyond float64") from None
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}: must be finite and above 0, got {value!r}")
    return value


def _between(name, value, low, high):
    value = positive(name, value)
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name}: must be from {low:g} to {high:g}, got {value!r}")
    return value


def softcap(value):
    """A cap such that scores divided by it are neither too small nor too large for float32, or None."""
    return _between("softcap", value, *SOFTCAPS)


def scale(value, cap):
    """A factor that float32 holds, alone and divided by the softcap, or None."""
    value = _between("scale", value, *SCALES)
    if value is not None and cap is not None and not 1e-37 <= value / cap <= 1e37:
        raise ValueError(f"scale: must be from 1e-37 to 1e37 times the softcap, got {value!r} and a softcap of {cap!r}")
    return value


def window(value):
    """(left, right), each a whole number >= 0 or None."""
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"window: must be a pair (left, right), got {value!r}")
    for side in value:
        if side is None:
            continue
        if isinstance(side, (bool, np.bool_)) or not isinstance(side, numbers.Integral):
            raise TypeError(f"window: each side must be a whole number or None, got {value!r}")
        if side < 0:
            raise ValueError(f"window: each side must be 0 or more, got {value!r}")
    # More than the longest sequence is as good as open, and must not overflow the index arithmetic.
    return tuple(None if side is None or side > MAX_LENGTH else int(side) for side in value)


def slopes(value):
    """One ALiBi slope a query head, as a tuple."""
    if value is None:
        return None
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"alibi_slopes: must be a vector of numbers, got {value!r}") from None
    except OverflowError:
        raise ValueError("alibi_slopes: must be finite, got a number beyond float64 among them") from None
    if array.ndim != 1 or not len(array):
        raise ValueError(f"alibi_slopes: must have shape (heads,), got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"alibi_slopes: must be finite, got {array[~np.isfinite(array)][0]} among them")
    if (np.abs(array) > STEEPEST).any():
        raise ValueError(f"alibi_slopes: must be from {-STEEPEST:g} to {STEEPEST:g}, got {array[np.abs(array) > STEEPEST][0]:g} among them")
    return tuple(array.tolist())


def integer_vector(name, value, most=MAX_LENGTH) -> np.ndarray:
    """A vector of whole numbers, as int64."""
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        raise TypeError(f"{name}: must be a vector of whole numbers, got {value!r}") from None
    if array.ndim != 1:
        got = repr(value) if array.ndim == 0 else f"shape {array.shape}"
        raise ValueError(f"{name}: must be a vector, got {got}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: must be whole numbers, got {array.dtype}")
    if array.size and array.max() > most:
        raise ValueError(f"{name}: must be at most {most}, got {array.max()}")
    return array.astype(np.int64)


def documents(value):
    """Boundaries, or a pair of them for cross-attention → (of queries, of keys or None), tuples."""
    if value is None:
        return None
    pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(np.ndim(part) == 1 for part in value)
    parts = tuple(_boundaries(part) for part in (value if pair else (value,)))
    if pair and len(parts[0]) != len(parts[1]):
        raise ValueError(
            f"documents: as many for the queries as for the keys, got {len(parts[0]) - 1} and {len(parts[1]) - 1}"
        )
    return (parts[0], parts[1] if pair else None)


def _boundaries(value):
    b = integer_vector("documents", value)
    if not len(b) or b[0] != 0:
        raise ValueError(f"documents: boundaries start at 0, got {_short(b)} {IDS}")
    if (np.diff(b) < 0).any():
        at = int(np.flatnonzero(np.diff(b) < 0)[0])
        raise ValueError(f"documents: boundaries must not fall, got {b[at]} before {b[at + 1]}")
    return tuple(b.tolist())


def document_lengths(docs, length_q, length_k) -> None:
    """Documents end where the sequence ends; two lengths need two sets of boundaries."""
    if docs is None:
        return
    of_queries, of_keys = docs
    if of_keys is None and length_q != length_k:
        raise ValueError(
            f"documents: {length_q} queries and {length_k} keys need a pair (boundaries of queries, of keys)"
        )
    for what, b, length in (("queries", of_queries, length_q), ("keys", of_keys or of_queries, length_k)):
        if b[-1] != length:
            raise ValueError(f"documents: boundaries of the {what} end at {b[-1]}, but there are {length} {what} {IDS}")


def layout(value):
    """A word, an int vector of this rank's positions, or a pair of those → (of queries, of keys)."""
    pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(p, str) or np.ndim(p) == 1 for p in value)
    if isinstance(value, (list, tuple)) and not pair and any(isinstance(part, str) for part in value):
        raise TypeError(f"layout: a pair is a tuple (of queries, of keys), got {value!r}")
    parts = [_one_layout(part) for part in (value if pair else (value,))]
    return parts[0], parts[-1]


def _one_layout(value):
    if isinstance(value, str):
        return choice("layout", value, LAYOUTS)
    if value is None or isinstance(value, dict):
        known = ", ".join(map(repr, LAYOUTS))
        raise TypeError(f"layout: must be one of {known} or a vector of positions, got {value!r}")
    positions = integer_vector("layout", value)
    if len(positions) and positions.min() < 0:
        raise ValueError(f"layout: positions must be 0 or more, got {positions.min()}")
    return positions


# ---------------------------------------------------------------- arrays


def accumulator(dtype) -> np.dtype:
    """The type of sums, lse and gradients on the way: float64 for float64, float32 for all else."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def element_type(name, value) -> np.dtype:
    """float64, float32, float16 or bfloat16 (ml_dtypes), in this machine's byte order."""
    try:
        dtype = np.dtype(ml_dtypes.bfloat16 if value == "bfloat16" else value)
    except TypeError:
        raise TypeError(f"{name}: dtype must be one of {', '.join(TYPES)}, got {value!r}") from None
    if dtype.name not in TYPES or not dtype.isnative:
        raise TypeError(f"{name}: dtype must be one of {', '.join(TYPES)}, got {dtype!r}")
    return dtype


def plain_array(name, value) -> None:
    """A NumPy array, and none with a mask of its own; or an array on a GPU."""
    if not isinstance(value, np.ndarray) and not on_gpu(value):
        raise TypeError(f"{name}: must be a NumPy array, got {type(value).__name__}")
    masked = sys.modules.get("numpy.ma")  # whoever has such an array has loaded it; it takes 8 ms
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise TypeError(f"{name}: is a masked array, whose mask would be ignored; masks are options of BurstAttention")


def array(name, value, shape=None, dtype=None, ndim=4):
    """A NumPy array of that ndim, and where given that shape and dtype."""
    plain_array(name, value)
    if value.ndim != ndim:
        axes = "(batch, rows, heads, head_dim)" if ndim == 4 else "(batch, heads, rows)"
        raise ValueError(f"{name}: must have {ndim} axes {axes}, got shape {value.shape}")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name}: dtype must be {np.dtype(dtype)}, got {value.dtype}")
    if shape is not None and value.shape != tuple(shape):
        raise ValueError(f"{name}: shape must be {tuple(shape)}, got {value.shape}")
    return value


def head_dim_on_gpu(name, value) -> None:
    """What the CUDA kernels have: whole 16-byte loads of the narrowest type, and tiles that fit."""
    if value % 8 or value > 256:
        raise ValueError(f"{name}: head_dim must be a multiple of 8 up to 256 on a GPU, got {value}")


def stage_bytes(value, default) -> int:
    """BURSTMPI_STAGE_BYTES: bytes of a chunk, or the default where it is not set."""
    if not value:
        return default
    told = whole(value)
    if not told or told >= 2**31:
        raise ValueError(f"BURSTMPI_STAGE_BYTES: must be a number of bytes below 2**31, got {value!r}")
    return told


def whole(text) -> int | None:
    """The whole number that a variable of the environment holds, or None."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def shapes(q, k, v) -> None:
    """The three shapes fit together."""
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if not isinstance(shape, (tuple, list)):
            raise TypeError(f"{name}: must be a shape (batch, rows, heads, head_dim), got {type(shape).__name__}")
        if len(shape) != 4:
            raise ValueError(f"{name}: must have 4 axes (batch, rows, heads, head_dim), got shape {tuple(shape)}")
        if any(not isinstance(n, numbers.Integral) or n < 0 for n in shape):
            raise ValueError(f"{name}: a shape is four whole numbers >= 0, got {tuple(shape)}")
        if shape[2] < 1 or shape[3] < 1:
            raise ValueError(f"{name}: needs at least one head and one head dim, got shape {tuple(shape)}")
    if not q[0] == k[0] == v[0]:
        raise ValueError(f"q, k, v: batch must be the same, got {q[0]}, {k[0]}, {v[0]}")
    if k[1] != v[1]:
        raise ValueError(f"k, v: rows must be the same, got {k[1]} and {v[1]}")
    if k[2] != v[2]:
        raise ValueError(f"k, v: heads must be the same, got {k[2]} and {v[2]}")
    if q[2] % k[2]:
        raise ValueError(f"q, k: {k[2]} key heads do not divide {q[2]} query heads")
    if q[3] != k[3]:
        raise ValueError(f"q, k: head_dim must be the same, got {q[3]} and {k[3]}")


def length(value) -> int:
    """A number of rows."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"length: must be a whole number, got {value!r}")
    if not 0 <= value <= MAX_LENGTH:
        raise ValueError(f"length: must be from 0 to {MAX_LENGTH}, got {value}")
    return int(value)


def plain(value):
    """A whole number, a word or a truth of NumPy as Python's, so that both compare and print alike; all else as it is."""
    return value.item() if isinstance(value, (np.integer, np.str_, np.bool_)) else value


def root(value, size) -> None:
    """A rank, or None."""
    if value is None:
        return
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral) or not 0 <= value < size:
        raise ValueError(f"root: must be a rank below {size} or None, got {value!r}")


def movable(x, axis) -> None:
    """An array that can be cut along an axis and sent."""
    plain_array("x", x)
    if x.dtype.hasobject:
        raise TypeError(f"x: arrays of Python objects cannot be sent, got dtype {x.dtype}")
    if not x.dtype.itemsize:
        raise TypeError(f"x: elements of no bytes cannot be sent, got dtype {x.dtype!r}")
    if isinstance(axis, (bool, np.bool_)) or not isinstance(axis, numbers.Integral) or not 0 <= axis < x.ndim:
        raise ValueError(f"axis: x has {x.ndim} axes, got axis {axis!r}")


def heads_of_slopes(alibi_slopes, heads) -> None:
    """One slope a query head."""
    if alibi_slopes is not None and len(alibi_slopes) != heads:
        raise ValueError(f"alibi_slopes: {len(alibi_slopes)} slopes for {heads} query heads")


def result(name, value, shape, dtype, inputs) -> None:
    """A caller's buffer for a result: right shape and type, writable, apart from what is still to be read."""
    array(name, value, shape, dtype, ndim=len(shape))
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ValueError(f"{name}: the buffer is read-only")
    steps = sorted((abs(stride), n) for n, stride in zip(value.shape, value.strides) if n > 1) if value.size else []  # NumPy's of nothing mean nothing
    if steps and steps[0][0] == 0:
        raise ValueError(f"{name}: the buffer is a broadcast view, its rows overlap")
    extent = value.dtype.itemsize
    for stride, n in steps:
        if stride < extent:
            raise ValueError(f"{name}: the buffer overlaps itself, got strides {value.strides} for shape {value.shape}")
        extent += stride * (n - 1)
    for other_name, other in inputs:
        if shares_memory(value, other):
            raise ValueError(f"{name}: the buffer shares memory with {other_name}")


def _short(vector) -> str:
    """A vector's beginning, for a message."""
    return np.array2string(np.asarray(vector), threshold=6, edgeitems=3)


def spans(numbers) -> list[str]:
    """[0, 1, 2, 5] → ["0-2", "5"], for messages."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
