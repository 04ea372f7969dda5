"""Arrays of other libraries, as the tests need them: producers of real DLPack capsules and of __cuda_array_interface__.

The memory is the stand-in's; structs and capsules are made here byte by byte, with nothing of the library's own reader.
"""

from __future__ import annotations

import ctypes
import struct

import numpy as np

CPU, CUDA, PINNED, ROCM, MANAGED = 1, 2, 3, 10, 13
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}

_new = ctypes.pythonapi.PyCapsule_New
_new.argtypes, _new.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object
_valid = ctypes.PyDLL(None).PyCapsule_IsValid  # by address: a capsule that is being destroyed must not be counted again
_valid.argtypes, _valid.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_int
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_alive = {}  # address of a struct → all that it points to


class Producer:
    """An array of a library that speaks DLPack 1: ``__dlpack__`` with stream, max_version and copy.

    Parameters
    ----------
    array : of the stand-in; ``let_go`` leaves it to the capsules that are out
    stream : the producer's own stream, on which the array is made
    place : (device type, device number) that it claims
    code, bits : of the type, where they are to be others than the array's
    """

    versions = True

    def __init__(self, array, *, stream=None, place=None, read_only=False, code=None, bits=None, major=1, lanes=1):
        self.array, self.stream, self.read_only, self.major, self.lanes = array, stream, read_only, major, lanes
        self.place = place or (CUDA, array.device.id)
        bfloat = array.dtype.name == "bfloat16"
        self.code = (4 if bfloat else CODES[array.dtype.kind]) if code is None else code
        self.bits = 8 * array.dtype.itemsize if bits is None else bits
        self.asked, self.deleted = [], 0

    def let_go(self):
        self.array = None

    def __dlpack_device__(self):
        return self.place

    def __dlpack__(self, *, stream=None, max_version=None, copy=None):
        self.asked.append({"stream": stream, "max_version": max_version, "copy": copy})
        return self._export(stream, self.versions and max_version is not None)

    def _export(self, stream, versioned):
        if self.stream is not None and stream != -1:
            from ptxmachine.cupy.streams import stream_of

            assert stream not in (None, 0), "DLPack: stream 0 is ambiguous and not allowed"
            stream_of(stream).wait_event(self.stream.record())
        array, ndim = self.array, self.array.ndim
        numbers = (ctypes.c_int64 * (2 * ndim))(*array.shape, *(step // array.itemsize for step in array.strides))
        at = ctypes.addressof(numbers)
        data, offset = array.data.ptr - 32, 32  # as PyTorch never does, and the protocol allows
        tensor = struct.pack(
            "<QiiiBBHQQQ", data, *self.place, ndim, self.code, self.bits, self.lanes, at, at + 8 * ndim, offset
        )
        deleter = _DELETER(self._delete)
        call = ctypes.cast(deleter, ctypes.c_void_p).value
        if versioned:
            raw = struct.pack("<IIQQQ", self.major, 0, 0, call, int(self.read_only)) + tensor
        else:
            raw = tensor + struct.pack("<QQ", 0, call)
        block = ctypes.create_string_buffer(raw, len(raw))
        address = ctypes.addressof(block)
        name = b"dltensor_versioned" if versioned else b"dltensor"
        destructor = _DESTRUCTOR(lambda capsule: self._drop(capsule, name, address))
        _alive[address] = [block, numbers, deleter, array, name, destructor]
        return _new(address, name, ctypes.cast(destructor, ctypes.c_void_p))

    def _delete(self, address):
        self.deleted += 1
        held = _alive[address]
        held[3] = None  # the array; the functions themselves are running or may still be called

    def _drop(self, capsule, name, address):
        if _valid(capsule, name):  # nobody has taken it
            self._delete(address)


class OldProducer(Producer):
    """One from before DLPack 1: it knows of no version."""

    def __dlpack__(self, *, stream=None):
        self.asked.append({"stream": stream})
        return self._export(stream, False)


class LikeNumba:
    """``__cuda_array_interface__`` version 3 alone, with the stream on which the array is made."""

    def __init__(self, array, *, stream=None, read_only=False):
        self.array, self.stream, self.read_only, self.asked = array, stream, read_only, 0

    def let_go(self):
        """It is itself the owner."""

    @property
    def __cuda_array_interface__(self):
        self.asked += 1
        x = self.array
        return {
            "shape": x.shape, "strides": x.strides, "typestr": np.dtype(x.dtype).str, "version": 3,
            "data": (x.data.ptr, self.read_only), "stream": None if self.stream is None else self.stream.ptr or 1,
        }  # fmt: skip
