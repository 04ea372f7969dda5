"""One GPU as the ring sees it: streams, marks in them, memory of the device and pinned memory of the host, by CuPy.

Three streams work at the same time:

    compute   the caller's current stream: kernels; what the caller enqueued before is done before, results are in order
    out       copies from the device to pinned memory, on their way to other ranks
    into      copies from pinned memory to the device

Nothing is ordered between them but by a *mark* (an event) that one of them waits for.  The host does not wait for the
device, but where memory is given back (``finish``): it asks a mark whether it has come.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress

import numpy as np

from ..arrays import reason

__all__ = ["Enqueued", "Gpu", "GpuMemory", "Mark"]


class Mark:
    """A point in a stream: a ``base.Launch`` that is done when all that was enqueued before it is done."""

    __slots__ = ("event",)

    def __init__(self, event):
        self.event = event

    def done(self) -> bool:
        """Ask, and do not wait."""
        return self.event.done


class Enqueued:
    """The ``base.Launch`` of a verb: its place in the stream is all that the next verbs need."""

    __slots__ = ("gpu", "mark")
    in_order = True

    def __init__(self, gpu):
        self.gpu, self.mark = gpu, None

    def done(self) -> bool:
        """Whether all is done that is in the current stream when first asked, the verb's work among it."""
        if self.mark is None:
            self.mark = self.gpu.mark(self.gpu.cupy.cuda.get_current_stream())
        return self.mark.done()


class Gpu:
    """Streams and copies of the current device.

    compute : the caller's stream, of the call under way
    end : mark of the end of the last call; its kernels may still work in the workspace
    borrowed : arrays of other libraries, each call's with its mark, None before its end; who else holds them may let go
    """

    def __init__(self, cupy):
        self.cupy = cupy
        self.device = cupy.cuda.Device()
        self.out = cupy.cuda.Stream(non_blocking=True)
        self.into = cupy.cuda.Stream(non_blocking=True)
        self.compute = None
        self.end = None
        self.borrowed: list[tuple] = []

    def borrow(self, arrays) -> None:
        """Keep arrays of the call that begins until its kernels are done, and let go of those of calls that are."""
        before, self.borrowed = self.borrowed, []
        for mark, some in before:
            if mark is not None and not mark.done():
                self.borrowed.append((mark, some))
        if arrays:
            self.borrowed.append((None, arrays))

    def ended(self) -> None:
        """Mark the end of a call."""
        self.end = self.mark(self.compute)
        self.borrowed = [(self.end if mark is None else mark, some) for mark, some in self.borrowed]

    def mark(self, stream) -> Mark:
        """Mark what has been enqueued on a stream so far."""
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return Mark(event)

    def wait(self, stream, mark) -> None:
        """Let what is enqueued on a stream from now on wait for a mark (None: for nothing)."""
        if mark is not None:
            stream.wait_event(mark.event)

    def finish(self, mark) -> None:
        """Let the host wait for a mark: only where memory is given back."""
        if mark is not None:
            mark.event.synchronize()

    def to_host(self, target, source) -> Mark:
        """Copy device bytes to pinned bytes on the stream ``out``."""
        runtime = self.cupy.cuda.runtime
        kind = runtime.memcpyDeviceToHost
        runtime.memcpyAsync(target.ctypes.data, source.data.ptr, source.nbytes, kind, self.out.ptr)
        return self.mark(self.out)

    def to_device(self, target, source, stream) -> Mark:
        """Copy pinned bytes to the device on a stream."""
        runtime = self.cupy.cuda.runtime
        kind = runtime.memcpyHostToDevice
        runtime.memcpyAsync(target.data.ptr, source.ctypes.data, target.nbytes, kind, stream.ptr)
        return self.mark(stream)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Give pinned host memory, [nbytes] uint8.

        Raises
        ------
        MemoryError
            With the bytes asked for.
        """
        if not nbytes:
            return np.empty(0, np.uint8)
        try:
            return np.frombuffer(self.cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        except Exception as error:
            raise MemoryError(f"pinned host memory: {reason(error)}") from None

    def memory(self, nbytes: int):
        """Give device memory, [nbytes] uint8, by cudaMalloc itself: memory of a pool breaks CUDA's sharing of it.

        Raises
        ------
        MemoryError
            With the bytes that are free.
        """
        cuda = self.cupy.cuda
        for attempt in range(2):
            try:
                return self.cupy.ndarray((nbytes,), np.uint8, cuda.MemoryPointer(cuda.Memory(nbytes), 0))
            except Exception as error:  # OutOfMemoryError, or the runtime's own
                if "emory" not in str(error) or attempt:
                    raise MemoryError(self.lack(error)) from None
                self.cupy.get_default_memory_pool().free_all_blocks()  # what CuPy keeps and nobody uses

    def lack(self, error) -> str:
        """What there is of memory, and an error of who found too little of it."""
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return f"GPU {self.device.id}: {free} of {total} bytes are free; {reason(error)}"


class GpuMemory:
    """The verbs of ``base.Backend`` that are about memory, on a GPU; ``self.gpu`` is a Gpu.

    ``index_slots`` are pinned buffers in rotation, for vectors of positions on their way to the device.
    """

    slack = 0
    index_slots: tuple = ()

    def allocate(self, nbytes: int):
        """Give bytes of the device."""
        return self.gpu.memory(nbytes)

    def view(self, buffer, offset: int, shape, dtype):
        """See a part of such a buffer as an array."""
        return self._cupy.ndarray(tuple(shape), np.dtype(dtype), buffer.data + offset)

    def empty(self, shape, dtype):
        """Give a new array for a result, from CuPy's own allocator.

        Raises
        ------
        MemoryError
            With the bytes asked for, and those that are free.
        """
        try:
            return self._cupy.empty(shape, dtype)
        except MemoryError as error:
            raise MemoryError(f"a result of shape {tuple(shape)}: {self.gpu.lack(error)}") from None

    @contextmanager
    def on(self):
        """Make the device current, and its current stream the one that computes."""
        with self._cupy.cuda.Device(self.gpu.device.id):
            self.gpu.compute = self._cupy.cuda.get_current_stream()
            yield

    @contextmanager
    def call(self):
        """Hold the workspace for one call: after the last one, on whatever stream that was."""
        gpu = self.gpu
        with self.on():
            gpu.wait(gpu.compute, gpu.end)
            try:
                yield
            except BaseException:
                with suppress(Exception):  # a device that has failed; the call's own error counts
                    gpu.ended()
                raise
            gpu.ended()

    @property
    def index_bytes(self) -> int:
        """Bytes of a pinned buffer for index vectors; -1 before there is one."""
        return self.index_slots[0].bytes.nbytes if self.index_slots else -1

    def set_index_slots(self, nbytes: int) -> None:
        """Make two pinned buffers for index vectors; nothing may be under way."""
        self.index_slots = tuple(IndexSlot(self.gpu.pinned(nbytes)) for _ in range(2))

    def indices(self, targets, fill, progress=lambda: None):
        """Let ``fill`` write index vectors, [rows] int32 each, and bring them to the device in the caller's stream."""
        if self._modules.rehearsing:
            return targets
        slot, self.index_slots = self.index_slots[0], (*self.index_slots[1:], self.index_slots[0])
        while slot.mark is not None and not slot.mark.done():  # the copy of two steps ago still reads it
            progress()
        start, parts = 0, []
        for target in targets:
            parts.append(slot.bytes[start : start + target.nbytes].view(np.int32))
            start += target.nbytes
        fill(*parts)
        for target, part in zip(targets, parts):
            if target.nbytes:
                slot.mark = self.gpu.to_device(target, part, self.gpu.compute)
        return targets


class IndexSlot:
    """A pinned buffer, and the mark of the copy that reads it."""

    def __init__(self, buffer):
        self.bytes, self.mark = buffer, None

