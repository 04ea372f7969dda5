"""cupy.cuda.runtime: the few CUDA runtime calls of low-level programs."""

from . import copies
from .errors import CUDARuntimeError
from .memory import Memory, alloc_pinned_memory
from .state import simulation
from .streams import Device, default_stream, stream_of

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)
is_hip = False


def getDeviceCount():
    return simulation().device_count


def getDevice():
    return simulation().device


def setDevice(device):
    Device(device).use()


def deviceSynchronize():
    Device().synchronize()


def memGetInfo():
    return Device().mem_info


def runtimeGetVersion():
    from ..nvrtc import default_toolkit

    major, minor = default_toolkit().version
    return 1000 * major + 10 * minor


driverGetVersion = runtimeGetVersion


def getDeviceProperties(device):
    attributes = Device(device).attributes
    return {
        "name": b"PTX machine sm_%s" % simulation().arch.encode(),
        "major": attributes["ComputeCapabilityMajor"],
        "minor": attributes["ComputeCapabilityMinor"],
        "multiProcessorCount": attributes["MultiProcessorCount"],
        "sharedMemPerBlockOptin": attributes["MaxSharedMemoryPerBlockOptin"],
        "totalGlobalMem": simulation().memory_bytes,
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
    }


_owned = {}


def malloc(size):
    memory = Memory(size)
    _owned[memory.ptr] = memory
    return memory.ptr


def free(ptr):
    if ptr not in _owned:
        raise CUDARuntimeError("cudaErrorInvalidValue", "0x%x was not allocated by malloc" % ptr)
    del _owned[ptr]
    simulation().check_alive()


def hostAlloc(size, flags=0):
    pointer = alloc_pinned_memory(size)
    _owned[pointer.ptr] = pointer
    return pointer.ptr


def freeHost(ptr):
    if _owned.pop(ptr, None) is None:
        raise CUDARuntimeError("cudaErrorInvalidValue", "0x%x was not allocated by hostAlloc" % ptr)


def memcpyAsync(dst, src, size, kind, stream):
    """Asynchronous copy; host memory must be pinned, `kind` must be right."""
    stream = stream_of(stream)
    if kind == memcpyHostToDevice:
        copies.host_to_device(dst, src, size, stream)
    elif kind == memcpyDeviceToHost:
        copies.device_to_host(dst, src, size, stream)
    elif kind == memcpyDeviceToDevice:
        copies.device_to_device(dst, src, size, stream)
    else:
        raise CUDARuntimeError("cudaErrorInvalidMemcpyDirection", "kind %r" % (kind,))


def memcpy(dst, src, size, kind):
    """Blocking copy on the default stream, from or to any host memory."""
    stream = default_stream()
    if kind == memcpyDeviceToDevice:
        copies.device_to_device(dst, src, size, stream)
    elif kind == memcpyHostToDevice:
        copies.host_to_device(dst, src, size, stream, pinned=False)
    elif kind == memcpyDeviceToHost:
        copies.device_to_host(dst, src, size, stream, pinned=False)
    else:
        raise CUDARuntimeError("cudaErrorInvalidMemcpyDirection", "kind %r" % (kind,))
    simulation().finish_stream(stream)


def memsetAsync(ptr, value, size, stream):
    copies.memset(ptr, value, size, stream_of(stream))


def streamSynchronize(stream):
    stream_of(stream).synchronize()
