"""The memory that calls of one object work in, on one device: made before anything is sent, kept for later calls."""

from __future__ import annotations

from .arrays import ALIGNED

__all__ = ["GpuWorkspace", "Workspace"]

REHEARSED = 256  # calls of different shapes and strides that are remembered


class Workspace:
    """One run of bytes of the host."""

    why = "the arrays are on the host"

    def __init__(self, backend, transport):
        self.backend, self.transport = backend, transport
        self.arena = None

    def fits(self, plan, call, arrays, results) -> bool:
        """Whether a call needs nothing more."""
        return self.has_room(plan, call)

    def has_room(self, plan, call) -> bool:
        """Whether the memory is large enough for a call."""
        nbytes = plan.nbytes(call)
        return nbytes == 0 or (self.arena is not None and len(self.arena) >= nbytes)

    def reserve(self, plan, call) -> None:
        """Make room for a call.

        Raises
        ------
        MemoryError
            With the bytes.
        """
        nbytes = plan.nbytes(call)
        if nbytes and (self.arena is None or len(self.arena) < nbytes):
            self.arena = None
            try:
                self.arena = self.backend.allocate(nbytes)
            except MemoryError as error:
                raise MemoryError(f"workspace: {nbytes} bytes could not be allocated ({error})") from None
        if self.arena is None:
            self.arena = self.backend.allocate(0)

    def rehearse(self, plan, call, arrays, results, deed) -> None:
        """Nothing has to be prepared."""

    def borrow(self, arrays) -> None:
        """A call is done with its arrays when it returns."""

    @property
    def pinned_bytes(self) -> int:
        """Of the host's memory, for a GPU."""
        return 0

    def close(self) -> None:
        """Give it back."""
        self.arena = None


class GpuWorkspace(Workspace):
    """Bytes of a device; pinned bytes of the host for index vectors, and for messages where they are staged.

    why : why this transport
    """

    def __init__(self, backend, transport, why):
        super().__init__(backend, transport)
        self.why = why
        self._rehearsed: set[tuple] = set()  # calls whose kernels are there

    def fits(self, plan, call, arrays, results) -> bool:
        return self.has_room(plan, call) and _key(plan, call, arrays, results) in self._rehearsed

    def has_room(self, plan, call) -> bool:
        enough = self.backend.index_bytes >= plan.index_bytes(call)
        return enough and super().has_room(plan, call) and self.transport.fits(plan.lane_bytes(call))

    def reserve(self, plan, call) -> None:
        if self.has_room(plan, call):
            return
        with self.backend.on():
            self._quiet()
            super().reserve(plan, call)
            if self.backend.index_bytes < plan.index_bytes(call):
                self.backend.set_index_slots(plan.index_bytes(call))
            self.transport.reserve(plan.lane_bytes(call))

    def rehearse(self, plan, call, arrays, results, deed) -> None:
        """Let ``deed`` go through a call that launches nothing, so that all its kernels are compiled.

        Raises
        ------
        KernelError
            With the reason.
        """
        key = _key(plan, call, arrays, results)
        if key not in self._rehearsed:
            with self.backend.on(), self.backend.rehearsal():
                deed()
            if len(self._rehearsed) >= REHEARSED:
                self._rehearsed.clear()
            self._rehearsed.add(key)

    def borrow(self, arrays) -> None:
        """Keep arrays of other libraries until the kernels of the call that begins are done: they know nothing of our stream."""
        self.backend.gpu.borrow(arrays)

    @property
    def pinned_bytes(self) -> int:
        return self.transport.pinned_bytes + sum(slot.bytes.nbytes for slot in self.backend.index_slots)

    def _quiet(self) -> None:
        """Kernels of the last call may still be at work here, and copies that they wait for."""
        self.backend.gpu.finish(self.backend.gpu.end)

    def close(self) -> None:
        with self.backend.on():
            self._quiet()
            self.arena = None
            self.backend.gpu.borrowed.clear()


def _key(plan, call, arrays, results) -> tuple:
    """What decides which kernels a call needs: its plan, and how its arrays lie in memory."""
    laid = tuple((x.strides, x.data.ptr % ALIGNED) for some in (arrays, results) for x in some.values())
    return (plan.number, call, laid)
