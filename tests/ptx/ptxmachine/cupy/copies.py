"""Copies and fills in stream order, with the written-state of every byte."""

import ctypes

import numpy as np

from ..faults import Fault
from ..memory import WRITTEN
from .memory import is_pinned
from .state import simulation


def _stream(stream):
    from .streams import Stream, get_current_stream

    if stream is None:
        return get_current_stream()
    if not isinstance(stream, Stream):
        raise TypeError("stream: a Stream expected, got %r" % (stream,))
    return stream


def _host_bytes(address, size):
    return (
        np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)) if size else np.empty(0, np.uint8)
    )


def _need_pinned(address, size, verb):
    if size and not is_pinned(address, size):
        raise ValueError(
            "%s: host memory 0x%x, %d bytes, is not pinned: an asynchronous copy would block or race"
            % (verb, address, size)
        )


def check_written(state, what):
    missing = np.flatnonzero((state & WRITTEN) == 0)
    if len(missing) and simulation().host_reads:
        raise Fault(
            "uninitialised read",
            "%s: %d of %d bytes were never written, the first is byte %d"
            % (what, len(missing), state.size, missing[0]),
        )


def device_to_device(dst, src, size, stream=None):
    """Enqueue a copy between device pointers."""
    memory, dst_ptr, src_ptr = simulation().machine.memory, int(dst), int(src)

    def action():
        to, to_state = memory.span(dst_ptr, size)
        data, state = memory.span(src_ptr, size)
        data, state = data.copy(), state.copy()
        to[:], to_state[:] = data, state

    simulation().enqueue(
        _stream(stream),
        "copy D2D %d" % size,
        action,
        ((dst_ptr, dst_ptr + size, True), (src_ptr, src_ptr + size, False)),
    )


def host_to_device(dst, host, size, stream=None, pinned=True):
    """Enqueue a copy from pinned memory: its bytes are read when the copy runs."""
    memory, dst_ptr = simulation().machine.memory, int(dst)
    address = host if isinstance(host, int) else getattr(host, "value", None) or int(host)
    if pinned:
        _need_pinned(address, size, "copy to the device")

    def action():
        if pinned:
            _need_pinned(address, size, "copy to the device, memory freed in flight")
        to, state = memory.span(dst_ptr, size)
        to[:] = _host_bytes(address, size)
        state[:] |= WRITTEN

    simulation().enqueue(
        _stream(stream),
        "copy H2D %d" % size,
        action,
        ((dst_ptr, dst_ptr + size, True), (address, address + size, False)),
    )


def device_to_host(host, src, size, stream=None, pinned=True):
    """Enqueue a copy into pinned memory."""
    memory, src_ptr = simulation().machine.memory, int(src)
    address = host if isinstance(host, int) else getattr(host, "value", None) or int(host)
    if pinned:
        _need_pinned(address, size, "copy to the host")

    def action():
        data, state = memory.span(src_ptr, size)
        check_written(state, "copy to the host")
        if pinned:
            _need_pinned(address, size, "copy to the host, memory freed in flight")
        _host_bytes(address, size)[:] = data

    simulation().enqueue(
        _stream(stream),
        "copy D2H %d" % size,
        action,
        ((src_ptr, src_ptr + size, False), (address, address + size, True)),
    )


def memset(dst, value, size, stream=None):
    memory, ptr = simulation().machine.memory, int(dst)

    def action():
        to, state = memory.span(ptr, size)
        to[:] = value
        state[:] |= WRITTEN

    simulation().enqueue(_stream(stream), "memset %d" % size, action, ((ptr, ptr + size, True),))
