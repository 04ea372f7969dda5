"""The simulated devices and their lazy queues.

Work that a program gives to a stream becomes an `Operation`.  It runs only when something waits for it: a
synchronisation, a blocking copy, or a poll that has been repeated often enough.  What it must wait for are the
operations before it in its stream, the events its stream waited for, and, for the legacy default stream, all
blocking streams.
"""

import itertools
import os
import weakref

from ..faults import Fault
from ..machine import Machine
from ..memory import GlobalMemory

# Opt-in shared memory per block, per SM, and the number of SMs of one well-known part of each architecture.
ARCHITECTURES = {
    "75": (64 << 10, 64 << 10, 40),
    "80": (163 << 10, 164 << 10, 108),
    "86": (99 << 10, 100 << 10, 84),
    "89": (99 << 10, 100 << 10, 128),
    "90": (227 << 10, 228 << 10, 132),
    "100": (227 << 10, 228 << 10, 148),
    "120": (99 << 10, 100 << 10, 170),
}


class Operation:
    """A unit of work in a stream.  `touches` are the bytes [start, end) that it reads or writes: (start, end, writes)."""

    __slots__ = ("stream", "label", "action", "waits_for", "done", "touches", "serial")

    def __init__(self, stream, label, action, waits_for, touches):
        self.stream, self.label, self.action = stream, label, action
        self.waits_for, self.done, self.touches, self.serial = waits_for, False, touches, next(_serials)


_serials = itertools.count(1)


class Simulation:
    """All devices of the process, and the switches of the stand-in.

    arch            compute capability without its dot, e.g. "80"
    devices         number of devices
    streams         "lazy", or "eager": everything happens at once (to show what laziness finds)
    polls           a query answers "not yet" so often before the work is done
    host_reads      a copy to the host of bytes that nobody wrote is a fault
    hazards         work that touches the same bytes as pending work of another stream, one of them writing, with no
                    event between, is a fault at once
    memory          bytes of each device
    """

    def __init__(
        self,
        arch=None,
        devices=None,
        streams=None,
        polls=2,
        host_reads=True,
        hazards=True,
        memory=None,
        **switches
    ):
        self.arch = str(arch or os.environ.get("PTX_MACHINE_ARCH", "80"))
        if self.arch not in ARCHITECTURES:
            raise ValueError("arch: one of %s expected, got %r" % (sorted(ARCHITECTURES), self.arch))
        self.device_count = int(devices or os.environ.get("PTX_MACHINE_DEVICES", 1))
        self.streams = streams or os.environ.get("PTX_MACHINE_STREAMS", "lazy")
        if self.streams not in ("lazy", "eager"):
            raise ValueError("streams: 'lazy' or 'eager' expected, got %r" % (self.streams,))
        self.polls, self.host_reads, self.hazards = polls, host_reads, hazards
        self.memory_bytes = int(memory or os.environ.get("PTX_MACHINE_MEMORY", 1 << 29))
        self.machine = Machine(
            GlobalMemory(2 * self.memory_bytes * self.device_count + (1 << 26)), **switches
        )  # room for guards
        self.device = 0  # current device
        self.error = None  # sticky, as in CUDA: what ended the device's life
        self.last = {}  # stream -> last Operation
        self.last_default = {}  # device -> last Operation of the default stream
        self.live = {}  # serial -> pending Operation
        self.default_streams, self.current_streams = {}, {}
        self.handles = weakref.WeakValueDictionary()  # stream.ptr -> Stream
        self.trace = []  # ("enqueue" | "run", label, stream name)
        self.skips, self.calls = {}, {}
        self.used = {}  # device -> bytes
        self.next_stream = itertools.count(1)
        self.parts = {}  # address -> bytes of the array that was last laid there by hand, inside of an allocation
        self.pinned = {}  # address -> bytes of pinned host memory

    # --- switches for tests -----------------------------------------------------------------------
    def skipped(self, kind):
        """Count a call of `kind` and say whether the test asked to leave this one out."""
        number = self.calls.get(kind, 0)
        self.calls[kind] = number + 1
        return number in self.skips.get(kind, ())

    # --- queues -----------------------------------------------------------------------------------
    def check_alive(self):
        if self.error is not None:
            raise self.error

    def enqueue(self, stream, label, action, touches=(), extra=()):
        """Append work to a stream; return its Operation."""
        self.check_alive()
        waits = [op for op in extra if not op.done]
        previous = self.last.get(stream)
        if previous is not None and not previous.done:
            waits.append(previous)
        waits += [op for op in stream.pending_events if not op.done]
        stream.pending_events = []
        if stream.null:  # legacy default stream: after all blocking streams
            waits += [
                op
                for other, op in self.last.items()
                if other is not stream
                and not other.non_blocking
                and other.device_id == stream.device_id
                and not op.done
            ]
        elif not stream.non_blocking:
            default = self.last_default.get(stream.device_id)
            if default is not None and not default.done:
                waits.append(default)
        op = Operation(stream, label, action, waits, tuple(touches))
        if self.hazards:
            self._check_order(op)
        self.last[stream] = op
        if stream.null:
            self.last_default[stream.device_id] = op
        self.live[op.serial] = op
        self.trace.append(("enqueue", label, stream.name))
        if self.streams == "eager":
            self.finish(op)
        return op

    def _check_order(self, op):
        """Refuse work that conflicts with pending work that it does not wait for.

        Work that is done was waited for by the host, so it comes before all that is enqueued now.
        """
        clashes = [
            other
            for other in list(self.live.values())  # freeing memory may end one of them meanwhile
            for start, end, writes in op.touches
            for s, e, w in other.touches
            if start < e and s < end and (writes or w)
        ]
        if not clashes:
            return
        before, stack = set(), list(op.waits_for)
        while stack:
            other = stack.pop()
            if other.serial not in before:
                before.add(other.serial)
                stack.extend(o for o in other.waits_for if not o.done)
        for other in clashes:
            if other.serial not in before and not other.done:
                raise Fault(
                    "stream race",
                    "%s on %s and %s on %s touch the same bytes, no event between"
                    % (other.label, other.stream.name, op.label, op.stream.name),
                )

    def finish(self, op):
        """Run `op` and all that it waits for."""
        self.check_alive()
        stack = [op]
        while stack:
            top = stack[-1]
            if top.done:
                stack.pop()
                continue
            missing = [other for other in top.waits_for if not other.done]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            self.trace.append(("run", top.label, top.stream.name))
            try:
                if top.action is not None:
                    top.action()
            except Exception as error:
                self.error = error  # from now on every call fails, as after a CUDA launch failure
                raise
            top.done = True
            self.live.pop(top.serial, None)
            top.action, top.waits_for = None, ()  # last: what the action held may be freed now, which is work too

    def finish_stream(self, stream):
        self.check_alive()
        for op in stream.pending_events:  # a wait with nothing behind it still is a wait
            self.finish(op)
        op = self.last.get(stream)
        if op is not None:
            self.finish(op)
        if stream.null:
            for other, op in list(self.last.items()):
                if not other.non_blocking and other.device_id == stream.device_id:
                    self.finish(op)

    def finish_device(self, device):
        self.check_alive()
        for stream in list(self.last):
            if stream.device_id == device:
                self.finish_stream(stream)

    def in_flight(self, start, size, but=None):
        """Return the pending operations that touch the bytes [start, start + size), without those of stream `but`."""
        return [
            op
            for op in list(self.live.values())
            if op.stream is not but and any(s < start + size and start < e for s, e, _ in op.touches)
        ]


_simulation = None


def simulation():
    """Return the process' Simulation; made at first use."""
    global _simulation
    if _simulation is None:
        _simulation = Simulation()
    return _simulation


def reset(**switches):
    """Start over with fresh devices; see Simulation for the switches (Machine's, such as check=, too)."""
    global _simulation
    _simulation = Simulation(**switches)
    return _simulation
