"""The machine's memories: one global arena with guard zones, and the shared and local memory of running blocks.

An address is a 64-bit number.  Global memory starts at GLOBAL_BASE; shared and local memory appear in the generic
space as windows.  Every byte of global memory has a state: bit 0 allocated, bit 1 written.  Fresh memory is
filled with 0xff, which is NaN in every float format, so that what reads it cannot look right.
"""

import bisect

import numpy as np

GLOBAL_BASE = 0xA00000000000  # beyond what a host pointer can be
SHARED_WINDOW = 0x010000000000
LOCAL_WINDOW = 0x020000000000
PARAM_WINDOW = 0x030000000000
WINDOW_BYTES = 1 << 32
ALLOCATED, WRITTEN = 1, 2
ALIGN = 512  # as CuPy's pool
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class OutOfMemory(MemoryError):
    """The arena has no room; `asked` and `free` in bytes."""

    def __init__(self, asked, free):
        super().__init__("out of memory: %d bytes asked, %d bytes free" % (asked, free))
        self.asked, self.free = asked, free


def rows(array, nbytes, unit):
    """View a flat uint8 array as accesses of `nbytes` made of `unit`-byte words: (n,) or (n, nbytes/unit)."""
    whole = array[: array.size // nbytes * nbytes].view(UNITS[unit])
    return whole if nbytes == unit else whole.reshape(-1, nbytes // unit)


class GlobalMemory:
    """Device memory: `data` bytes, `state` per byte, `owner` per two bytes (the block that wrote it last)."""

    def __init__(self, capacity=1 << 30):
        self.capacity = capacity
        self.data = np.zeros(capacity, np.uint8)  # pages appear when they are touched
        self.state = np.zeros(capacity, np.uint8)
        self.owner = np.zeros(capacity // 2, np.uint32)
        self.owner_bytes = self.owner.view(np.uint8)
        self.stamp = 0  # owners above it belong to the running launch
        self.sizes = {}  # offset -> bytes asked for
        self.starts = []  # sorted offsets
        self.next = ALIGN * 16
        self.allocated = 0
        self.allocations = 0  # how often alloc was called
        self._views = {}

    def view(self, array, nbytes, unit):
        key = (array, nbytes, unit)
        if key not in self._views:
            self._views[key] = rows(getattr(self, array), nbytes, unit)
        return self._views[key]

    @staticmethod
    def _guard(size):
        return max(4096, min(-(-size // ALIGN) * ALIGN, 1 << 16))

    def _find(self, size):
        guard = self._guard(size)
        need = guard + -(-size // ALIGN) * ALIGN + guard
        if self.next + need <= self.capacity:  # freed addresses stay unused as long as possible
            offset = self.next + guard
            self.next += need - guard // 2
            return -(-offset // ALIGN) * ALIGN
        end = 0
        for start in self.starts + [self.capacity]:
            if start - end >= need + ALIGN:
                return -(-(end + guard) // ALIGN) * ALIGN
            end = start + -(-self.sizes.get(start, 0) // ALIGN) * ALIGN + guard // 2
        return None

    def alloc(self, size):
        """Allocate `size` bytes (512-byte aligned, unwritten) and return the address.

        Raises OutOfMemory.
        """
        offset = self._find(max(size, 1))
        if offset is None or self.allocated + size > self.capacity:
            raise OutOfMemory(size, self.capacity - self.allocated)
        self.data[offset : offset + size] = 0xFF
        self.state[offset : offset + size] = ALLOCATED
        self.owner[offset // 2 : (offset + size + 1) // 2] = 0
        self.sizes[offset] = size
        bisect.insort(self.starts, offset)
        self.allocated += size
        self.allocations += 1
        return GLOBAL_BASE + offset

    def free(self, address):
        """Free an allocation; accesses to it are out of bounds from now on."""
        offset = address - GLOBAL_BASE
        if offset not in self.sizes:
            raise ValueError("free: 0x%x is not the start of an allocation" % address)
        size = self.sizes.pop(offset)
        del self.starts[bisect.bisect_left(self.starts, offset)]
        self.state[offset : offset + size] = 0
        self.data[offset : offset + size] = 0xFF
        self.allocated -= size

    def span(self, address, size):
        """Return the bytes [address, address + size) as (data, state) views; refuse what is not allocated."""
        offset = address - GLOBAL_BASE
        if size and (
            offset < 0
            or offset + size > self.capacity
            or not (self.state[offset : offset + size] & ALLOCATED).all()
        ):
            raise ValueError("0x%x, %d bytes: %s" % (address, size, self.describe(address)))
        return self.data[offset : offset + size], self.state[offset : offset + size]

    def describe(self, address):
        """Say where `address` lies relative to the nearest allocation."""
        offset = int(address) - GLOBAL_BASE
        at = bisect.bisect_right(self.starts, offset) - 1
        texts = []
        if at >= 0:
            start = self.starts[at]
            size = self.sizes[start]
            if offset < start + size:
                return "byte %d of the allocation of %d bytes at 0x%x" % (
                    offset - start,
                    size,
                    GLOBAL_BASE + start,
                )
            texts.append(
                (
                    offset - start - size,
                    "%d bytes past the end of the allocation of %d bytes at 0x%x"
                    % (offset - start - size, size, GLOBAL_BASE + start),
                )
            )
        if at + 1 < len(self.starts):
            start = self.starts[at + 1]
            texts.append(
                (
                    start - offset,
                    "%d bytes before the allocation of %d bytes at 0x%x"
                    % (start - offset, self.sizes[start], GLOBAL_BASE + start),
                )
            )
        return min(texts)[1] if texts else "no allocation is near"

    def begin_launch(self, blocks):
        """Make owners of earlier launches void; return the stamp of block 0 of this one."""
        if self.stamp + blocks + 2 >= 1 << 32:
            self.owner[:] = 0
            self.stamp = 0
        first = self.stamp + 1
        self.stamp += blocks + 1  # the last one stands for atomics
        return first


class BlockMemory:
    """Shared or local memory of all blocks (or threads) of a chunk, one after the other in one array.

    `size` bytes are usable per block; `valid` (size,) says which of them belong to a variable.
    """

    def __init__(self, count, size, valid=None):
        self.size = size
        self.stride = -(-max(size, 1) // 128) * 128
        self.data = np.full(count * self.stride, 0xFF, np.uint8)
        self.valid = valid
        self._views = {}

    def view(self, nbytes, unit):
        if (nbytes, unit) not in self._views:
            self._views[nbytes, unit] = rows(self.data, nbytes, unit)
        return self._views[nbytes, unit]

    def reset(self):
        self.data[:] = 0xFF
