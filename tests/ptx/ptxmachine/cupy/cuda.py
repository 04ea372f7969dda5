"""cupy.cuda: the names of CuPy for what lies in the modules beside."""
import types

from . import errors as _errors
from . import memory as _memory
from . import runtime
from .errors import CUDADriverError, CUDARuntimeError
from .memory import (Memory, MemoryPointer, MemoryPool, OutOfMemoryError, PinnedMemory, PinnedMemoryPointer, UnownedMemory, alloc,
                     alloc_pinned_memory, get_allocator, malloc, set_allocator)
from .streams import Device, Event, Stream, get_current_stream

runtime.CUDARuntimeError = CUDARuntimeError
memory = _memory
driver = types.SimpleNamespace(CUDADriverError=CUDADriverError)
compiler = types.SimpleNamespace(CompileException=_errors.CompileException)
stream = types.SimpleNamespace(Stream=Stream, Event=Event, get_current_stream=get_current_stream)
device = types.SimpleNamespace(Device=Device)


def is_available():
    return runtime.getDeviceCount() > 0


def get_device_id():
    return runtime.getDevice()


__all__ = ["CUDADriverError", "Device", "Event", "Memory", "MemoryPointer", "MemoryPool", "OutOfMemoryError", "PinnedMemory",
           "PinnedMemoryPointer", "Stream", "UnownedMemory", "alloc", "alloc_pinned_memory", "get_allocator", "get_current_stream",
           "get_device_id", "is_available", "malloc", "runtime", "set_allocator"]
