"""The memory that calls of one object work in, on one device: made before anything is sent, kept for later calls."""

from __future__ import annotations

__all__ = ["GpuWorkspace", "Workspace"]


class Workspace:
    """One run of bytes of the host."""

    why = "the arrays are on the host"

    def __init__(self, backend, transport):
        self.backend, self.transport = backend, transport
        self.arena = None

    def fits(self, plan, call) -> bool:
        """Whether a call needs nothing more."""
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

    def fits(self, plan, call) -> bool:
        enough = self.backend.index_bytes >= plan.index_bytes(call)
        return enough and super().fits(plan, call) and self.transport.fits(plan.lane_bytes(call))

    def reserve(self, plan, call) -> None:
        if self.fits(plan, call):
            return
        with self.backend.on():
            self._quiet()
            super().reserve(plan, call)
            if self.backend.index_bytes < plan.index_bytes(call):
                self.backend.set_index_slots(plan.index_bytes(call))
            self.transport.reserve(plan.lane_bytes(call))

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
