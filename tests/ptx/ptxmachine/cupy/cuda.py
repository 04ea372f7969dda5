"""cupy.cuda: the names of CuPy for what lies in the modules beside."""

import types

from . import errors as _errors
from . import memory as _memory
from . import runtime
from .memory import (
    Memory,
    MemoryPointer,
    MemoryPool,
    PinnedMemory,
    PinnedMemoryPointer,
    UnownedMemory,
    alloc,
    alloc_pinned_memory,
    get_allocator,
    set_allocator,
    using_allocator,
)
from .streams import Device, Event, ExternalStream, Stream, get_current_stream

memory = _memory
driver = types.SimpleNamespace(CUDADriverError=_errors.CUDADriverError)
compiler = types.SimpleNamespace(CompileException=_errors.CompileException)
stream = types.SimpleNamespace(Stream=Stream, Event=Event, get_current_stream=get_current_stream)
device = types.SimpleNamespace(Device=Device)


def is_available():
    return runtime.getDeviceCount() > 0


def get_device_id():
    return runtime.getDevice()


__all__ = [
    "Device",
    "Event",
    "ExternalStream",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "PinnedMemory",
    "PinnedMemoryPointer",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "get_allocator",
    "get_current_stream",
    "get_device_id",
    "is_available",
    "runtime",
    "set_allocator",
    "using_allocator",
]
