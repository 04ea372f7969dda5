"""Device memory, pools and pinned host memory of the stand-in."""

import bisect
import contextlib
import ctypes
import weakref

import numpy as np

from ..memory import GLOBAL_BASE, OutOfMemory
from .state import simulation


class OutOfMemoryError(MemoryError):
    """As CuPy's: bytes asked, bytes in use."""


class BaseMemory:
    """An allocation: `ptr`, `size`, `device_id`."""

    def __init__(self, ptr, size, device_id, stream):
        self.ptr, self.size, self.device_id, self.stream = ptr, size, device_id, stream


class Memory(BaseMemory):
    """Device memory by cudaMalloc that is freed with its last user; while work is under way on it, that is an error.

    `pooled`: as from CuPy's pool, which may give the bytes away again in the order of the stream that allocated them.
    Work of that stream is therefore safe; work of another stream is an error.  The next call reports it.
    """

    def __init__(self, size, pooled=False):
        sim = simulation()
        sim.check_alive()
        from .streams import get_current_stream

        size = int(size)
        if size < 0:
            raise ValueError("size: %d is negative" % size)
        used = sim.used.get(sim.device, 0)
        if used + size > sim.memory_bytes:
            raise OutOfMemoryError(
                "Out of memory allocating %d bytes (allocated so far: %d bytes)." % (size, used)
            )
        try:
            ptr = sim.machine.memory.alloc(size)
        except OutOfMemory:
            raise OutOfMemoryError(
                "Out of memory allocating %d bytes (allocated so far: %d bytes)." % (size, used)
            ) from None
        sim.used[sim.device] = used + size
        sim.parts = {at: n for at, n in sim.parts.items() if not ptr <= at < ptr + size}
        super().__init__(ptr, size, sim.device, get_current_stream())
        sim.trace.append(("alloc", "%d bytes" % size, self.stream.name))
        self._release = weakref.finalize(self, _free, sim, ptr, size, sim.device, self.stream, pooled)
        self._release.atexit = False

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return hash(self.ptr)


def _free(sim, ptr, size, device, stream, pooled):
    sim.used[device] -= size
    others = sim.in_flight(ptr, size, stream if pooled else None)
    if others and sim.error is None:
        names = sorted({"%s on %s" % (op.label, op.stream.name) for op in others})
        sim.error = RuntimeError(
            "memory of %d bytes was freed while still in use by %s" % (size, ", ".join(names))
        )
        return
    mine = sim.last.get(stream)
    if mine is None or mine.done or sim.error is not None:
        sim.machine.memory.free(ptr)
    else:
        sim.enqueue(
            stream, "free %d bytes" % size, lambda: sim.machine.memory.free(ptr), ((ptr, ptr + size, True),)
        )


class UnownedMemory(BaseMemory):
    """Memory that somebody else owns: keeps `owner` alive."""

    def __init__(self, ptr, size, owner, device_id=-1):
        sim = simulation()
        if device_id not in (-1, *range(sim.device_count)):
            raise ValueError("device_id: %d does not exist" % device_id)
        super().__init__(int(ptr), size, sim.device if device_id < 0 else device_id, None)
        self.owner = owner


class MemoryPointer:
    """A pointer into an allocation."""

    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + int(offset)
        self.device_id = mem.device_id

    @property
    def device(self):
        from .streams import Device

        return Device(self.device_id)

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def __int__(self):
        return self.ptr

    def copy_from_device_async(self, src, size, stream=None):
        from .copies import device_to_device

        device_to_device(self, src, size, stream)

    def copy_to_host_async(self, mem, size, stream=None):
        from .copies import device_to_host

        device_to_host(mem, self, size, stream)

    def copy_from_host_async(self, mem, size, stream=None):
        from .copies import host_to_device

        host_to_device(self, mem, size, stream)

    def memset_async(self, value, size, stream=None):
        from .copies import memset

        memset(self, value, size, stream)


class MemoryPool:
    """A pool in name: it counts, and gives out fresh memory each time."""

    def __init__(self, allocator=None):
        self._allocator = allocator

    def malloc(self, size):
        return MemoryPointer(Memory(size, pooled=True), 0)

    def used_bytes(self):
        return simulation().used.get(simulation().device, 0)

    def total_bytes(self):
        return self.used_bytes()

    def free_bytes(self):
        return 0

    def free_all_blocks(self, stream=None):
        pass


_allocator = [lambda size: MemoryPointer(Memory(size, pooled=True), 0)]


def alloc(size):
    """Allocate device memory by the current allocator; return a MemoryPointer."""
    return _allocator[0](size)


def set_allocator(allocator=None):
    """Set the function size -> MemoryPointer that arrays use; None: plain cudaMalloc."""
    _allocator[0] = allocator or (lambda size: MemoryPointer(Memory(size), 0))


@contextlib.contextmanager
def using_allocator(allocator=None):
    """Use an allocator for a while; None: plain cudaMalloc."""
    before = _allocator[0]
    set_allocator(allocator)
    try:
        yield
    finally:
        _allocator[0] = before


def get_allocator():
    return _allocator[0]


class PinnedMemory:
    """Page-locked host memory with the buffer protocol's numbers: `ptr`, `size`."""

    def __init__(self, size):
        sim = simulation()
        self.size = int(size)
        self._bytes = np.full(self.size + 4096, 0xFF, np.uint8)
        base = self._bytes.ctypes.data
        self._start = -base % 4096
        self.ptr = base + self._start
        sim.pinned[self.ptr] = self.size
        self._release = weakref.finalize(self, sim.pinned.pop, self.ptr, None)
        self._release.atexit = False


class PinnedMemoryPointer:
    """A pointer into pinned memory; `np.frombuffer(pointer, dtype, count)` makes an array of it.

    The object itself is a ctypes array over the bytes, which gives it the buffer protocol on every Python.
    """

    def __int__(self):
        return self.ptr

    def size(self):
        return self._length_


def _pinned_pointer(mem, offset):
    length = mem.size - offset
    kind = type(
        "PinnedMemoryPointer",
        (PinnedMemoryPointer, ctypes.Array),
        {"_type_": ctypes.c_uint8, "_length_": length},
    )
    pointer = kind.from_address(mem.ptr + offset)
    pointer.mem, pointer.ptr = mem, mem.ptr + offset
    return pointer


def alloc_pinned_memory(size):
    """Allocate page-locked host memory; return a PinnedMemoryPointer."""
    simulation().check_alive()
    return _pinned_pointer(PinnedMemory(size), 0)


def is_pinned(address, size):
    return any(
        start <= address and address + size <= start + length for start, length in simulation().pinned.items()
    )


def allocation_of(ptr):
    """Return (address, size) of the allocation that `ptr` points into, or None."""
    memory = simulation().machine.memory
    at = bisect.bisect_right(memory.starts, ptr - GLOBAL_BASE) - 1
    if at < 0:
        return None
    start = memory.starts[at]
    size = memory.sizes[start]
    return (GLOBAL_BASE + start, size) if ptr - GLOBAL_BASE < start + max(size, 1) else None
