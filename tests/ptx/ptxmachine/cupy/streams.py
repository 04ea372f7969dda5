"""Streams, events and devices: lazy, and as strict as CUDA about who belongs where."""

import itertools

from .errors import CUDARuntimeError
from .state import ARCHITECTURES, simulation

_handles = itertools.count(0x5000, 0x10)


class Device:
    """One simulated device; `with Device(1):` makes it current."""

    def __init__(self, device=None):
        sim = simulation()
        self.id = sim.device if device is None else int(device)
        if not 0 <= self.id < sim.device_count:
            raise CUDARuntimeError(
                "cudaErrorInvalidDevice", "invalid device ordinal %d of %d" % (self.id, sim.device_count)
            )

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self):
        return hash(("device", self.id))

    def __repr__(self):
        return "<CUDA Device %d>" % self.id

    def __enter__(self):
        self._before = getattr(self, "_before", []) + [simulation().device]
        simulation().device = self.id
        return self

    def __exit__(self, *_):
        simulation().device = self._before.pop()

    def use(self):
        simulation().device = self.id

    def synchronize(self):
        if not simulation().skipped("Device.synchronize"):
            simulation().finish_device(self.id)

    @property
    def compute_capability(self):
        return simulation().arch

    @property
    def mem_info(self):
        """(free, total) bytes."""
        sim = simulation()
        return sim.memory_bytes - sim.used.get(self.id, 0), sim.memory_bytes

    @property
    def pci_bus_id(self):
        return "0000:%02X:00.0" % (self.id + 1)

    @property
    def attributes(self):
        arch = simulation().arch
        optin, per_sm, sms = ARCHITECTURES[arch]
        return {
            "MaxThreadsPerBlock": 1024,
            "MaxBlockDimX": 1024,
            "MaxBlockDimY": 1024,
            "MaxBlockDimZ": 64,
            "MaxGridDimX": 2**31 - 1,
            "MaxGridDimY": 65535,
            "MaxGridDimZ": 65535,
            "MaxSharedMemoryPerBlock": 48 << 10,
            "MaxSharedMemoryPerBlockOptin": optin,
            "MaxSharedMemoryPerMultiprocessor": per_sm,
            "MultiProcessorCount": sms,
            "L2CacheSize": 32 << 20,
            "WarpSize": 32,
            "ComputeCapabilityMajor": int(arch[:-1]),
            "ComputeCapabilityMinor": int(arch[-1]),
            "MaxRegistersPerBlock": 65536,
            "AsyncEngineCount": 2,
            "ConcurrentKernels": 1,
            "UnifiedAddressing": 1,
        }


class Event:
    """Marks a point in a stream.  An event that was never recorded counts as done, as in CUDA."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        simulation().check_alive()
        self.ptr, self.device_id, self._op, self._polls = next(_handles), simulation().device, None, 0

    def record(self, stream=None):
        sim = simulation()
        stream = get_current_stream() if stream is None else stream
        if stream.device_id != self.device_id:
            raise CUDARuntimeError(
                "cudaErrorInvalidResourceHandle",
                "event of device %d recorded on %s of device %d"
                % (self.device_id, stream.name, stream.device_id),
            )
        if sim.skipped("Event.record"):
            return
        self._op, self._polls = sim.enqueue(stream, "event", None), 0

    def synchronize(self):
        sim = simulation()
        if not sim.skipped("Event.synchronize") and self._op is not None:
            sim.finish(self._op)

    @property
    def done(self):
        """Poll: false for the first few times, then the work is done and the answer true."""
        return _poll(self, self._op)


def _poll(who, op):
    sim = simulation()
    sim.check_alive()
    if op is None or op.done:
        return True
    who._polls += 1
    if who._polls <= sim.polls:
        return False
    sim.finish(op)
    return True


class Stream:
    """A queue of work.  `with stream:` makes it current."""

    null = False

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        if ptds:
            raise ValueError("ptds: the per-thread default stream is not supported")
        sim = simulation()
        sim.check_alive()
        self.null, self.non_blocking, self.device_id = bool(null), bool(non_blocking), sim.device
        self.priority = priority
        self.ptr = 0 if null else next(_handles)
        number = 0 if null else next(sim.next_stream)
        self.name = "default stream" if null else "stream %d" % number
        self.pending_events, self._polls = [], 0
        self._before = []
        if self.ptr:
            sim.handles[self.ptr] = self

    def __repr__(self):
        return "<Stream %s (device %d)>" % (self.name, self.device_id)

    def __enter__(self):
        sim = simulation()
        self._before.append(sim.current_streams.get(sim.device))
        self.use()
        return self

    def __exit__(self, *_):
        simulation().current_streams[self.device_id] = self._before.pop()

    def use(self):
        sim = simulation()
        if sim.device != self.device_id:
            raise CUDARuntimeError(
                "cudaErrorInvalidResourceHandle",
                "%s of device %d used on device %d" % (self.name, self.device_id, sim.device),
            )
        sim.current_streams[self.device_id] = self
        return self

    def synchronize(self):
        sim = simulation()
        if not sim.skipped("Stream.synchronize"):
            sim.finish_stream(self)

    @property
    def done(self):
        sim = simulation()
        op = sim.last.get(self)
        if op is not getattr(self, "_polled", None):
            self._polled, self._polls = op, 0
        return _poll(self, op)

    def record(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        """Work enqueued from now on waits for the event."""
        sim = simulation()
        sim.check_alive()
        if not isinstance(event, Event):
            raise TypeError("event: an Event expected, got %r" % (event,))
        if sim.skipped("Stream.wait_event"):
            return
        if event._op is not None and not event._op.done:
            self.pending_events.append(event._op)

    def launch_host_func(self, callback, arg=None):
        simulation().enqueue(self, "host function", lambda: callback(arg))

    def add_callback(self, callback, arg=None):
        simulation().enqueue(self, "callback", lambda: callback(self, 0, arg))


class ExternalStream:
    """`ExternalStream(ptr)` is the stream with that handle, for arrays of other libraries."""

    def __new__(cls, ptr, device_id=-1):
        return stream_of(ptr)


def stream_of(handle):
    """Return the Stream of a handle: 0 and 1 are the default stream."""
    if handle in (0, 1):
        return default_stream()
    stream = simulation().handles.get(handle)
    if stream is None:
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle", "stream 0x%x is not known" % handle)
    return stream


def default_stream(device=None):
    sim = simulation()
    device = sim.device if device is None else device
    if device not in sim.default_streams:
        before, sim.device = sim.device, device
        sim.default_streams[device] = Stream(null=True)
        sim.device = before
    return sim.default_streams[device]


class _NullStream:
    """`Stream.null` is a class attribute in CuPy, and one stream a device."""

    def __get__(self, instance, owner):
        return instance.__dict__.get("null", False) if instance is not None else default_stream()

    def __set__(self, instance, value):
        instance.__dict__["null"] = value


Stream.null = _NullStream()


def get_current_stream(device_id=None):
    sim = simulation()
    device = sim.device if device_id is None else device_id
    return sim.current_streams.get(device) or default_stream(device)
