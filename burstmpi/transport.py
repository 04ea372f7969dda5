"""How bytes of a GPU get to MPI: directly, or through pinned memory.  Knows neither attention nor mpi4py.

    direct   MPI takes device pointers.  A message is posted when the GPU has finished with its buffer.
    staged   MPI takes host memory only.  A message goes in chunks through pinned slots in rotation:

                 out    | D2H 0 | D2H 1 | D2H 2 |               a slot is copied into again
                 wire           | send 0| send 1| send 2|       when MPI has taken its last chunk
                 into                   | H2D 0 | H2D 1 | H2D 2 |

Every hand-over of memory to MPI goes through ``hand_over``, which asks the mark of whoever wrote that memory (send) or
may still read it (receive).  A *journey* is one message under way; the ring calls its ``advance`` while it waits, and
nobody ever waits for the device as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

__all__ = ["Direct", "Lane", "OnHost", "Staged", "hand_over"]

SLOTS = 2  # of each kind of message: one is copied while the other one is on the wire
LANES = ("cargo out", "cargo in", "partial out", "partial in", "home in")


class Lane:
    """A buffer of bytes that messages leave or come into, and marks of the GPU's work on it.

    bytes : [nbytes] uint8
    written : the last write on the GPU, for whoever sends the bytes or, after a copy from the host, computes with them
    read : the last read on the GPU, for whoever receives into them
    landed : whether the last write was a copy on a stream other than compute's
    """

    __slots__ = ("bytes", "landed", "read", "written")

    def __init__(self, buffer, read=None):
        self.bytes, self.read = buffer, read
        self.written, self.landed = None, False


def hand_over(buffer, after, post):
    """Give memory to MPI as soon as the GPU has finished with it: the only way from one to the other.

    Parameters
    ----------
    after : the mark of the kernel or copy that writes the memory (to be sent) or reads it (to be received into), or None
    post : called with the buffer, gives MPI's request

    Returns
    -------
    The request, or None while the mark has not come: ask again.
    """
    if after is not None and not after.done():
        return None
    return post(buffer)


class Journey(ABC):
    """One message, in pieces.

    fenced : whether it waits for this rank's own GPU, not for another rank
    requests : all of MPI's requests so far
    """

    def __init__(self, transport, lane, pieces, post):
        self.transport, self.lane, self.post = transport, lane, post
        self.pieces = pieces  # (start, stop) in the lane
        self.messages = len(pieces)
        self.requests: list = []
        self.fenced = False

    @abstractmethod
    def advance(self) -> bool:
        """Do what can be done without waiting; tell whether the message is through."""


class OnHost:
    """Arrays of the host: MPI takes them as they are, and a kernel is done when it returns."""

    name = "host"
    pinned_bytes = 0

    def lane(self, buffer) -> Lane:
        return Lane(buffer)

    def compute_reads(self, lane) -> None:
        """Bytes that have been received are there."""

    def computed(self, *, reads=(), writes=()) -> None:
        """Kernels are done already."""

    def fits(self, sizes) -> bool:
        return True

    def reserve(self, sizes) -> None:
        """Nothing."""


# ---------------------------------------------------------------- what both ways of a GPU share


class _OnGpu:
    """Marks of the compute stream around the kernels of a call.

    gpu : backends.gpu.Gpu
    test : gives MPI progress on a list of requests, and tells whether all are complete
    """

    def __init__(self, gpu, test):
        self.gpu, self.test = gpu, test

    def lane(self, buffer) -> Lane:
        """A lane for one call; kernels of the last call may still work on its bytes."""
        return Lane(buffer, self.gpu.end)

    def compute_reads(self, lane) -> None:
        """Before kernels read a lane: a copy that brings its bytes must be done by then."""
        if lane.landed:
            self.gpu.wait(self.gpu.compute, lane.written)

    def computed(self, *, reads=(), writes=()) -> None:
        """After kernels that read and write lanes, where somebody will ask."""
        mark = self.gpu.mark(self.gpu.compute)
        for lane in reads:
            lane.read = mark
        for lane in writes:
            lane.written, lane.landed = mark, False


# ---------------------------------------------------------------- direct


class Direct(_OnGpu):
    """Device pointers to MPI."""

    name = "direct"
    pinned_bytes = 0

    def __init__(self, gpu, test, piece_bytes: int):
        super().__init__(gpu, test)
        self.piece_bytes = piece_bytes

    def fits(self, sizes) -> bool:
        """There is nothing to be prepared."""
        return True

    def reserve(self, sizes) -> None:
        """Nothing."""

    def send(self, name, lane, nbytes, post) -> Journey:
        """Send the first bytes of a lane when its last writer is done."""
        return _DirectJourney(self, lane, _cut(nbytes, self.piece_bytes), post, lane.written)

    def receive(self, name, lane, nbytes, post) -> Journey:
        """Receive into a lane when its last reader is done; afterwards kernels may read it at once."""
        fence, lane.written, lane.landed = lane.read, None, False
        return _DirectJourney(self, lane, _cut(nbytes, self.piece_bytes), post, fence)


class _DirectJourney(Journey):
    def __init__(self, transport, lane, pieces, post, fence):
        super().__init__(transport, lane, pieces, post)
        self.fence = fence

    def advance(self) -> bool:
        while len(self.requests) < len(self.pieces):
            start, stop = self.pieces[len(self.requests)]
            request = hand_over(self.lane.bytes[start:stop], self.fence, self.post)
            self.fenced = request is None
            if self.fenced:
                return False
            self.requests.append(request)
        return self.transport.test(self.requests)


# ---------------------------------------------------------------- staged


@dataclass
class _Slot:
    """Pinned memory for one chunk."""

    bytes: np.ndarray
    mark: object = None  # of the copy that last wrote it (out) or read it (into)
    request: object = None  # of the message that last took it (out) or fills it (in)


class Staged(_OnGpu):
    """Chunks through pinned memory.

    chunk_bytes : of a chunk, the same on all ranks
    slots : a few for each kind of message, so that none has to wait for another kind
    """

    name = "staged"

    def __init__(self, gpu, test, chunk_bytes: int):
        super().__init__(gpu, test)
        self.chunk_bytes = chunk_bytes
        self.slots: dict[str, list[_Slot]] = {}

    @property
    def pinned_bytes(self) -> int:
        return sum(slot.bytes.nbytes for slots in self.slots.values() for slot in slots)

    def _wanted(self, sizes) -> dict:
        return {name: min(self.chunk_bytes, sizes.get(name, 0)) for name in LANES}

    def fits(self, sizes) -> bool:
        """Whether there are slots for messages of these sizes, by kind."""
        has = {name: self.slots[name][0].bytes.nbytes if name in self.slots else 0 for name in LANES}
        return all(has[name] >= wanted for name, wanted in self._wanted(sizes).items())

    def reserve(self, sizes) -> None:
        """Make the slots that are missing; nothing may be under way."""
        for name, wanted in self._wanted(sizes).items():
            if wanted and (name not in self.slots or self.slots[name][0].bytes.nbytes < wanted):
                self.slots[name] = [_Slot(self.gpu.pinned(wanted)) for _ in range(SLOTS)]

    def send(self, name, lane, nbytes, post) -> Journey:
        """Copy the first bytes of a lane out, chunk by chunk, after its last writer, and send them."""
        return _Outbound(self, lane, _cut(nbytes, self.chunk_bytes), post, self.slots[name])

    def receive(self, name, lane, nbytes, post) -> Journey:
        """Receive chunks and copy them into a lane, after its last reader."""
        return _Inbound(self, lane, _cut(nbytes, self.chunk_bytes), post, self.slots[name])


class _StagedJourney(Journey):
    def __init__(self, transport, lane, pieces, post, slots):
        super().__init__(transport, lane, pieces, post)
        self.slots = slots
        self.copied = self.posted = 0  # chunks

    def _chunk(self, number):
        """A chunk's slot, its bytes in the slot, and those in the lane."""
        start, stop = self.pieces[number]
        slot = self.slots[number % len(self.slots)]
        return slot, slot.bytes[: stop - start], self.lane.bytes[start:stop]

    def _post(self) -> bool:
        """Hand the next chunk's slot to MPI, if the GPU has finished with it."""
        slot, pinned, _ = self._chunk(self.posted)
        request = hand_over(pinned, slot.mark, self.post)
        self.fenced = request is None
        if self.fenced:
            return False
        slot.request = request
        self.requests.append(request)
        self.posted += 1
        return True


class _Outbound(_StagedJourney):
    """D2H, then send."""

    def advance(self) -> bool:
        gpu, count = self.transport.gpu, len(self.pieces)
        while True:
            moved = False
            if self.copied < min(count, self.posted + len(self.slots)):
                slot, pinned, device = self._chunk(self.copied)
                if slot.request is None or self.transport.test([slot.request]):  # else MPI still reads it
                    if self.copied == 0:
                        gpu.wait(gpu.out, self.lane.written)
                    slot.request, slot.mark = None, gpu.to_host(pinned, device)
                    self.copied += 1
                    moved = True
            if self.posted < self.copied:
                moved |= self._post()
            if not moved:
                return self.posted == count and self.transport.test(self.requests)


class _Inbound(_StagedJourney):
    """Receive, then H2D; through when the last copy is enqueued: its mark is the lane's writer."""

    def advance(self) -> bool:
        gpu, lane, count = self.transport.gpu, self.lane, len(self.pieces)
        while self.copied < count:
            moved = False
            if self.posted < min(count, self.copied + len(self.slots)):
                moved |= self._post()
            if self.copied < self.posted:
                slot, pinned, device = self._chunk(self.copied)
                if self.transport.test([slot.request]):
                    if self.copied == 0:
                        gpu.wait(gpu.into, lane.read)
                    lane.written = slot.mark = gpu.to_device(device, pinned, gpu.into)
                    lane.landed = True
                    self.copied += 1
                    moved = True
            if not moved:
                return False
        return True


def _cut(nbytes: int, piece: int) -> list[tuple[int, int]]:
    return [(start, min(start + piece, nbytes)) for start in range(0, nbytes, piece)]
