"""The ring on GPUs under test: CuPy (the stand-in unless BURSTMPI_TEST_GPU=1), device arrays of a problem, an MPI that
takes device pointers, and a quick double of the kernels.

``gpu(...)`` gives CuPy and prepares the stand-in.  A test that looks into the stand-in asks for ``simulation()``, and
is skipped on a real GPU.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
from cuda_kit import PTX, REAL, device
from support import check, collect, shards, truth

from burstmpi import BurstAttention
from burstmpi.buffers import Blueprint
from burstmpi.ring import CARGO, HOME, PARTIAL

if str(PTX) not in sys.path:
    sys.path.insert(0, str(PTX))


def gpu(arch="80", **switches):
    """Give CuPy with a fresh device."""
    cupy = device(arch, **switches)
    if REAL:
        from burstmpi import use_gpu

        use_gpu()
    else:
        _excuse_gaps()
    return cupy


def simulation():
    """The state of the stand-in; on a real GPU the test is skipped."""
    if REAL:
        pytest.skip("looks into the PTX machine")
    from ptxmachine.cupy import simulation

    return simulation()


def _excuse_gaps():
    """Bytes between the arrays of a parcel are sent and mean nothing: the stand-in is told that they are written."""
    from ptxmachine.cupy import ndarray, simulation
    from ptxmachine.memory import WRITTEN

    if hasattr(Blueprint.views, "real"):
        return
    real = Blueprint.views

    def views(self, backend, buffer):
        if isinstance(buffer, ndarray) and buffer.size:
            end = 0
            for offset, shape, dtype in self.fields.values():
                size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                if size:
                    if offset > end:
                        simulation().machine.memory.span(buffer.data.ptr + end, offset - end)[1][:] |= WRITTEN
                    end = offset + size
        return real(self, backend, buffer)

    views.real = real
    Blueprint.views = views


# ---------------------------------------------------------------- arrays


def put(cupy, *arrays):
    """NumPy arrays to the device."""
    return tuple(cupy.asarray(np.ascontiguousarray(x)) for x in arrays)


def run(cupy, attn, p) -> dict:
    """Forward and backward of a problem on GPUs; results of all ranks, as NumPy arrays."""
    q, k, v, dout = put(cupy, *shards(attn, p))
    out, lse = attn.forward(q, k, v)
    results = (out, lse, *attn.backward(dout, q, k, v, out, lse))
    assert all(isinstance(x, cupy.ndarray) for x in results)
    return collect(attn, *(cupy.asnumpy(x) for x in results))


@contextmanager
def environment(**values):
    """Set variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


# ---------------------------------------------------------------- kernels that take no time


def quick_backend():
    """CudaBackend with NumPy's verbs in place of its kernels: enqueued on the same streams, touching the same bytes.

    The PTX machine takes seconds for a kernel.  What is under test here, streams, marks, memory and messages, is the
    backend's own; a kernel that runs too early or too late reads and writes what lies there then.
    """
    from ptxmachine.cupy.copies import check_written
    from ptxmachine.cupy.state import simulation
    from ptxmachine.memory import WRITTEN

    from burstmpi.backends.base import Dims, Tally, Work
    from burstmpi.backends.cuda import CudaBackend
    from burstmpi.backends.numpy import NumpyBackend
    from burstmpi.rules import Sight

    host = NumpyBackend()
    SIGHT = ("at", "lo", "hi", "pos")

    def vars_of(sight):
        return {name: getattr(sight, name) for name in SIGHT}

    def host_work(x, scores, backward):
        q, k, v = x["q"], x["k"], x["v"]
        dims = Dims(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, x["lse"].dtype)
        room = host.allocate(host.scratch_bytes(dims, scores, q.shape[1], k.shape[1], backward))
        return Work(Sight(*(x[name] for name in SIGHT)), scores, room, tally=Tally())

    class QuickCuda(CudaBackend):
        name = "cuda"

        def scratch_bytes(self, dims, scores, rows_q, rows_k, backward):
            return 64

        def _later(self, label, arrays, reads, writes, deed, scratch=()):
            """Enqueue ``deed(views by name)``; like a kernel it does not keep the arrays' memory alive."""
            if self._modules.rehearsing:
                return self._launched()
            raws = {name: x._raw() for name, x in arrays.items()}
            touches = [(*raws[name].span(), False) for name in reads]
            touches += [(*raws[name].span(), True) for name in writes]
            touches += [(*x._raw().span(), True) for x in scratch]

            def action():
                for name in reads:
                    check_written(raws[name].view("state"), f"{label}: {name}")
                deed({name: raw.view() for name, raw in raws.items()})
                for name in writes:
                    if raws[name].size:
                        raws[name].view("state")[...] |= WRITTEN

            simulation().enqueue(self._cupy.cuda.get_current_stream(), f"kernel {label}", action, touches)
            return self._launched()

        def copy(self, target, source):
            arrays = {"target": target, "source": source}
            return self._later("copy", arrays, ["source"], ["target"], lambda x: host.copy(x["target"], x["source"]))

        def clear(self, target, value=0.0):
            return self._later("clear", {"target": target}, [], ["target"], lambda x: host.clear(x["target"], value))

        def add(self, target, source):
            arrays = {"target": target, "source": source}
            return self._later("add", arrays, list(arrays), ["target"], lambda x: host.add(x["target"], x["source"]))

        def delta(self, dout, out, delta):
            arrays = {"dout": dout, "out": out, "delta": delta}
            return self._later("delta", arrays, ["dout", "out"], ["delta"], lambda x: host.delta(*x.values()))

        def attend(self, q, k, v, out, lse, work, *, first, final=None):
            arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **vars_of(work.sight)}
            if final is not None:
                arrays["final"] = final
            reads = ["q", "k", "v", *SIGHT] + ([] if first else ["out", "lse"])
            scores = work.scores

            def deed(x):
                state = np.zeros_like(x["out"]) if first and "final" in x else x["out"]
                there = host_work(x, scores, False)
                host.attend(x["q"], x["k"], x["v"], state, x["lse"], there, first=first, final=x.get("final"))

            return self._later("forward", arrays, reads, ["lse", "final" if final is not None else "out"], deed, [work.scratch])

        def attend_backward(self, dout, q, k, v, lse, delta, dq, dk, dv, work, *, fresh_q, fresh_kv):
            names = ("dout", "q", "k", "v", "lse", "delta", "dq", "dk", "dv")
            arrays = dict(zip(names, (dout, q, k, v, lse, delta, dq, dk, dv))) | vars_of(work.sight)
            reads = [*names[:6], *SIGHT] + ([] if fresh_q else ["dq"]) + ([] if fresh_kv else ["dk", "dv"])
            scores = work.scores

            def deed(x):
                there = host_work(x, scores, True)
                host.attend_backward(*(x[name] for name in names), there, fresh_q=fresh_q, fresh_kv=fresh_kv)

            return self._later("backward", arrays, reads, ["dq", "dk", "dv"], deed, [work.scratch])

    return QuickCuda


# ---------------------------------------------------------------- an MPI that takes device pointers


class Rendezvous:
    """A communicator whose sends end when they are received: an MPI may buffer small messages, and so hide a deadlock."""

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Isend(self, message, to, tag):
        return (self.comm.Issend if tag in (CARGO, PARTIAL, HOME) else self.comm.Isend)(message, to, tag)


class DeviceMpi:
    """A communicator whose Isend and Irecv take the stand-in's device memory, over an MPI that does not.

    It checks what a CUDA-aware MPI takes for granted: bytes are complete when Isend is called and do not change before
    the message is through; nothing on the GPU touches memory from Irecv until the message has come.
    """

    def __init__(self, comm):
        self.comm, self.sent, self.received = comm, 0, 0

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Isend(self, message, to, tag):
        array = message[0]
        if isinstance(array, np.ndarray):
            return self.comm.Isend(message, to, tag)
        writers = [op.label for op in _pending(array) if _writes(op, array)]
        assert not writers, f"Isend: {writers} still write these bytes"
        data, state = _span(array)
        from ptxmachine.memory import WRITTEN

        assert (state & WRITTEN).all(), "Isend: bytes that nobody wrote"
        copy = data.copy()
        self.sent += 1

        def ended():
            assert np.array_equal(_span(array)[0], copy), "Isend: bytes were changed before the message was through"

        return DeviceRequest(self.comm.Isend([copy, message[1]], to, tag), ended)

    def Irecv(self, message, source, tag):
        array = message[0]
        if isinstance(array, np.ndarray):
            return self.comm.Irecv(message, source, tag)
        users = [op.label for op in _pending(array)]
        assert not users, f"Irecv: {users} still use these bytes"
        data, state = _span(array)
        from ptxmachine.memory import WRITTEN

        data[:] = 0xEE  # whoever reads before the message has come reads this
        before = data.copy()
        room = np.empty(data.shape, np.uint8)
        self.received += 1

        def ended():
            assert not _pending(array), "Irecv: the GPU touches bytes before they have come"
            data, state = _span(array)
            assert np.array_equal(data, before), "Irecv: bytes were changed before they had come"
            data[:] = room
            state[:] |= WRITTEN

        return DeviceRequest(self.comm.Irecv([room, message[1]], source, tag), ended)


class DeviceRequest:
    """A request of the MPI below, and what happens at its end."""

    def __init__(self, request, ended):
        self.request, self.ended = request, ended

    def done(self):
        if self.ended is not None and self.request.Test():
            ended, self.ended = self.ended, None
            ended()
        return self.ended is None

    def Cancel(self):
        self.request.Cancel()

    def __eq__(self, other):
        return self.ended is None


def _span(array):
    from ptxmachine.cupy import simulation

    return simulation().machine.memory.span(array.data.ptr, array.nbytes)


def _pending(array):
    from ptxmachine.cupy import simulation

    return simulation().in_flight(array.data.ptr, array.nbytes)


def _writes(op, array):
    start, end = array.data.ptr, array.data.ptr + array.nbytes
    return any(writes and s < end and start < e for s, e, writes in op.touches)


def make_direct(attn) -> DeviceMpi | None:
    """Let an object send device pointers: to DeviceMpi, or on a real GPU to the real MPI, if that can take them."""
    aware, _ = attn._aware
    if REAL:
        if not aware:
            pytest.skip("this MPI is not CUDA-aware")
        return None
    attn._aware = (True, "DeviceMpi of the tests")
    ring = attn._ring
    wrapped = DeviceMpi(ring.comm)
    _wrap(ring, wrapped)

    def test(requests):
        plain = [r for r in requests if not isinstance(r, DeviceRequest)]
        others = [r.done() for r in requests if isinstance(r, DeviceRequest)]
        return type(ring).test(plain) and all(others)

    ring.test = test
    return wrapped


def _wrap(ring, wrapped) -> None:
    """Put a communicator of the tests in place of the ring's, until it is closed."""
    ring.comm = wrapped

    def close():
        while hasattr(ring.comm, "comm"):
            ring.comm = ring.comm.comm
        type(ring).close(ring)

    ring.close = close


@contextmanager
def attention(comm, transport="staged", stage=None, quick=False, rendezvous=False, **options):
    """A BurstAttention that sends the one way or the other; ``stage``: bytes of a staged chunk; ``quick``: with
    ``quick_backend`` in place of the kernels, where there is no GPU; ``rendezvous``: MPI buffers nothing."""
    if quick and not REAL:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("burstmpi.backends.cuda.CudaBackend", quick_backend())
            with attention(comm, transport, stage, rendezvous=rendezvous, **options) as attn:
                yield attn
        return
    values = {} if stage is None else {"BURSTMPI_STAGE_BYTES": str(stage)}
    if transport == "staged":
        values["BURSTMPI_CUDA_AWARE"] = "0"
    with environment(**values), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "burstmpi: rank .* shares GPU")
        with BurstAttention(comm, **options) as attn:
            if rendezvous and not REAL:
                _wrap(attn._ring, Rendezvous(attn._ring.comm))
            if transport == "direct":
                make_direct(attn)
            yield attn


__all__ = ["attention", "check", "collect", "environment", "gpu", "make_direct", "put", "run", "simulation", "truth"]
