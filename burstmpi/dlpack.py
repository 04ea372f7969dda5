"""Arrays of other libraries on a GPU, by DLPack's capsules: taken as CuPy's with no copy.

``cupy.from_dlpack`` does the same, but CuPy 13 refuses bfloat16, the type in which most of these arrays come.
"""

from __future__ import annotations

import ctypes
import weakref
from math import prod

import ml_dtypes
import numpy as np

__all__ = ["CUDA", "MANAGED", "take"]

CUDA, MANAGED = 2, 13  # device types kDLCUDA, kDLCUDAManaged
READ_ONLY = 1  # flag of a versioned tensor
VERSION = (1, 0)  # the newest that is understood
KINDS = {0: "i", 1: "u", 2: "f", 5: "c"}  # type codes whose NumPy name is a letter and the bytes
BFLOAT, BOOL = 4, 6


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; null where they are those of C
        ("byte_offset", ctypes.c_uint64),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor, in a capsule named "dltensor"."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, in a capsule named "dltensor_versioned"."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


# A capsule keeps the pointer to its name: these texts live as long as the module.
_STRUCTS = {b"dltensor": (_Managed, b"used_dltensor"), b"dltensor_versioned": (_Versioned, b"used_dltensor_versioned")}

_api = ctypes.pythonapi
_api.PyCapsule_IsValid.argtypes, _api.PyCapsule_IsValid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_SetName.argtypes, _api.PyCapsule_SetName.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int


class _Owner:
    """Whoever holds this holds the producer's memory; the deleter is called once, with the last holder gone."""

    def __init__(self, address: int, deleter: int | None):
        if deleter:
            weakref.finalize(self, _DELETER(deleter), address).atexit = False


def take(x, cupy):
    """Give an array of a CUDA device as CuPy's, and whether it may not be written.

    The producer is told the current stream of the array's device, so that it orders its own work before ours.

    Raises
    ------
    TypeError, BufferError
        A type or version that is not known; what the producer refuses.
    """
    where, number = (int(value) for value in x.__dlpack_device__())
    device = number if where == CUDA else cupy.cuda.runtime.getDevice()  # managed memory is everywhere
    with cupy.cuda.Device(device):
        stream = cupy.cuda.get_current_stream().ptr or 1  # 1: CUDA's default stream, 0 is not allowed
        try:
            capsule = x.__dlpack__(stream=stream, max_version=VERSION, copy=False)
        except TypeError:  # a producer from before version 1
            capsule = x.__dlpack__(stream=stream)
    tensor, owner, flags = _open(capsule)
    if tensor.device.type != where:
        raise BufferError(f"the capsule is of DLPack device type {tensor.device.type}, the array of {where}")
    dtype = _dtype(tensor.dtype)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = None
    if tensor.strides:
        strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
    extent = sum((n - 1) * step for n, step in zip(shape, strides)) + dtype.itemsize if strides else prod(shape) * dtype.itemsize
    memory = cupy.cuda.UnownedMemory((tensor.data or 0) + tensor.byte_offset, max(0, extent), owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides), bool(flags & READ_ONLY)


def _open(capsule):
    """Take a capsule's tensor over: (tensor, its owner, flags)."""
    for name, (struct, used) in _STRUCTS.items():
        if _api.PyCapsule_IsValid(capsule, name):
            address = _api.PyCapsule_GetPointer(capsule, name)
            managed = struct.from_address(address)
            _api.PyCapsule_SetName(capsule, used)  # from here on its deleter is ours to call
            owner = _Owner(address, managed.deleter)
            if struct is _Versioned and managed.major > VERSION[0]:
                raise BufferError(f"DLPack {managed.major}.{managed.minor} is newer than {VERSION[0]}.x")
            return managed.tensor, owner, managed.flags if struct is _Versioned else 0
    raise TypeError(f"__dlpack__ gave no capsule of a tensor, or a used one: {capsule!r}")


def _dtype(kind) -> np.dtype:
    if kind.lanes == 1 and kind.bits % 8 == 0:
        if (kind.code, kind.bits) == (BFLOAT, 16):
            return np.dtype(ml_dtypes.bfloat16)
        if (kind.code, kind.bits) == (BOOL, 8):
            return np.dtype(bool)
        try:
            return np.dtype(f"{KINDS[kind.code]}{kind.bits // 8}")
        except (KeyError, TypeError):
            pass
    raise TypeError(f"DLPack type code {kind.code} with {kind.bits} bits and {kind.lanes} lanes is not known")
