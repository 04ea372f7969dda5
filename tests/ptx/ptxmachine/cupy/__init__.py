"""A stand-in for CuPy that runs on the PTX machine: arrays, RawModule, streams, events, pinned memory, devices.

    from ptxmachine import cupy as standin
    standin.install()                  # from now on `import cupy` gives the stand-in
    sim = standin.reset(arch="80")     # fresh devices; see state.Simulation for the switches

Streams are lazy: see state.py.  Where it differs from CuPy is listed in tests/ptx/README.md.
"""

import sys
import types

import numpy as _numpy
from numpy import (
    bool_,
    dtype,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)

from . import cuda
from .array import (
    arange,
    array,
    asarray,
    ascontiguousarray,
    asnumpy,
    copyto,
    empty,
    empty_like,
    from_dlpack,
    full,
    full_like,
    may_share_memory,
    ndarray,
    ones,
    zeros,
    zeros_like,
)
from .module import RawKernel, RawModule
from .state import reset, simulation

__version__ = "14.0.0+ptxmachine"


def get_array_module(*args):
    """Return this module if one argument is a device array, else NumPy."""
    return sys.modules[__name__] if any(isinstance(a, ndarray) for a in args) else _numpy


def get_default_memory_pool():
    return _pool


_pool = cuda.MemoryPool()


def empty_pinned(shape, dtype=float, order="C"):
    """cupyx.empty_pinned: a NumPy array in page-locked memory."""
    kind = _numpy.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = int(_numpy.prod(shape, dtype=_numpy.int64))
    if count == 0:
        return _numpy.empty(shape, kind)
    memory = cuda.alloc_pinned_memory(count * kind.itemsize)
    return _numpy.frombuffer(memory, _numpy.uint8, count * kind.itemsize).view(kind).reshape(shape, order=order)


def zeros_pinned(shape, dtype=float, order="C"):
    out = empty_pinned(shape, dtype, order)
    out[...] = 0
    return out


def install():
    """Make `import cupy` and `import cupyx` give the stand-in, in this process."""
    me = sys.modules[__name__]
    cupyx = types.ModuleType("cupyx")
    cupyx.empty_pinned, cupyx.zeros_pinned = empty_pinned, zeros_pinned
    names = {
        "cupy": me,
        "cupy.cuda": cuda,
        "cupy.cuda.runtime": cuda.runtime,
        "cupy.cuda.memory": cuda.memory,
        "cupyx": cupyx,
    }
    for name, module in names.items():
        other = sys.modules.get(name)
        if (
            other is not None
            and other is not module
            and getattr(other, "__name__", "") == name
            and name != "cupyx"
        ):
            raise RuntimeError("install: the real %s is already imported" % name)
        sys.modules[name] = module
    return me


def uninstall():
    """Forget the stand-in: `import cupy` looks for the real one again."""
    for name in ("cupy", "cupy.cuda", "cupy.cuda.runtime", "cupy.cuda.memory", "cupyx"):
        sys.modules.pop(name, None)


__all__ = [
    "RawKernel",
    "RawModule",
    "arange",
    "array",
    "asarray",
    "ascontiguousarray",
    "asnumpy",
    "bool_",
    "copyto",
    "cuda",
    "dtype",
    "empty",
    "empty_like",
    "float16",
    "float32",
    "float64",
    "from_dlpack",
    "full",
    "full_like",
    "get_array_module",
    "int8",
    "int16",
    "int32",
    "int64",
    "may_share_memory",
    "ndarray",
    "ones",
    "reset",
    "simulation",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "zeros",
    "zeros_like",
]
