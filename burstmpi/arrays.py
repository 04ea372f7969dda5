"""Which arrays a call was given: NumPy's, or ones on a GPU, of whatever library.

The array decides who computes.  CuPy is imported only when somebody brings an array of a GPU.
"""

from __future__ import annotations

import sys

import numpy as np

from . import dlpack

__all__ = ["adopt", "adopt_all", "check_layout", "current_device", "on_gpu", "reason", "shares_memory"]

ALIGNED = 16  # bytes: what a thread of a kernel loads at once


def _is_cupys(x) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def on_gpu(x) -> bool:
    """Whether something is an array on a CUDA device."""
    if isinstance(x, np.ndarray):
        return False
    if _is_cupys(x):
        return True
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[0]) in (dlpack.CUDA, dlpack.MANAGED)
    return hasattr(x, "__cuda_array_interface__")


def adopt(name, x, written=False):
    """Give an array of a GPU as CuPy's, with no copy; all else as it is.

    Parameters
    ----------
    written : whether it is a buffer for a result

    Raises
    ------
    TypeError
        CuPy is missing or cannot take it: the reason in one line.
    ValueError
        A buffer for a result that may not be written.
    """
    if _is_cupys(x) or not on_gpu(x):
        return x
    try:
        import cupy
    except Exception as error:
        raise TypeError(f"{name}: is on a GPU, and CuPy cannot be imported: {reason(error)}") from None
    try:
        # By DLPack the owner orders its work before ours; the other interface names its stream, and CuPy waits for it.
        if hasattr(x, "__dlpack__"):
            taken, locked = dlpack.take(x, cupy)
        else:
            taken, locked = cupy.asarray(x), bool(x.__cuda_array_interface__["data"][1])
    except Exception as error:
        raise TypeError(f"{name}: CuPy cannot take this {type(x).__name__}: {reason(error)}") from None
    if written and locked:
        raise ValueError(f"{name}: the buffer is read-only")
    return taken


def adopt_all(arrays: dict, written=()) -> int | None:
    """Adopt arrays in place; tell the device on which all of them are, None for the host.

    Parameters
    ----------
    written : names of buffers for results

    Raises
    ------
    TypeError
        Some are NumPy's and some on a GPU.
    ValueError
        They are on different devices.
    """
    where: dict[str, int | None] = {}
    for name, x in arrays.items():
        if x is not None:
            arrays[name] = x = adopt(name, x, name in written)
            where[name] = int(x.device.id) if on_gpu(x) else None
    if not where:
        return None
    (first, place), *_ = where.items()
    for name, other in where.items():
        if other != place:
            words = [f"{n} is {_word(w, arrays[n])}" for n, w in ((first, place), (name, other))]
            raise (TypeError if None in (place, other) else ValueError)(f"{first}, {name}: {words[0]}, {words[1]}")
    return place


def current_device() -> int:
    """The number of the current device.

    Raises
    ------
    ValueError
        No CuPy or no usable device: the reason in one line.
    """
    try:
        import cupy

        return int(cupy.cuda.runtime.getDevice())
    except Exception as error:
        raise ValueError(f"backend: 'cuda' cannot be used: {reason(error)}") from None


def _word(device, x) -> str:
    if device is not None:
        return f"on GPU {device}"
    if isinstance(x, np.ndarray):
        return "a NumPy array"
    kind = f" of DLPack device type {int(x.__dlpack_device__()[0])}" if hasattr(x, "__dlpack_device__") else ""
    return f"a {type(x).__name__}{kind}"


def check_layout(name, x) -> None:
    """What the kernels of a GPU want of an array (batch, rows, heads, columns): columns side by side, rows aligned.

    Raises
    ------
    ValueError
        With the strides.
    """
    if not x.size:
        return
    *steps, last = x.strides
    if x.shape[-1] > 1 and last != x.itemsize:
        raise ValueError(f"{name}: the last axis must be contiguous on a GPU, got strides {x.strides} of {x.itemsize}-byte elements")
    odd = [step for n, step in zip(x.shape, steps) if n > 1 and step % ALIGNED]
    if odd or x.data.ptr % ALIGNED:
        where = "" if odd else f", starting at address {x.data.ptr:#x}"
        raise ValueError(f"{name}: rows must be aligned to {ALIGNED} bytes on a GPU, got strides {x.strides}{where}")


def shares_memory(a, b) -> bool:
    """Whether two arrays may share memory, be they on the host or on a GPU; what is too hard to tell counts as yes."""
    if not a.size or not b.size:
        return False
    try:
        return np.shares_memory(_shadow(a), _shadow(b), max_work=100_000)
    except np.exceptions.TooHardError:
        return True


class _Shadow:
    def __init__(self, interface):
        self.__array_interface__ = interface


def _shadow(x):
    """An array of the host with the addresses of one on a GPU, of which nobody may touch an element."""
    if isinstance(x, np.ndarray):
        return x
    kind = f"|V{x.itemsize}"
    return np.asarray(_Shadow({"data": (x.data.ptr, True), "shape": x.shape, "strides": x.strides, "typestr": kind, "version": 3}))


def reason(error) -> str:
    """What an exception says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
