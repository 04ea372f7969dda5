"""Threads change the time and nothing else; the calling thread keeps MPI going."""

from __future__ import annotations

import threading

import host_kit as kit
import numpy as np
import pytest

from burstmpi.backends import base, host
from burstmpi.backends.host import ISAS, HostBackend, missing


@pytest.fixture(params=list(ISAS))
def isa(request):
    lacks = missing(request.param)
    if lacks:
        pytest.skip(f"this CPU has no {', '.join(lacks)}")
    return request.param


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (60, 10)}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_same_bits_on_any_number_of_threads(isa, dtype, options):
    rng = np.random.default_rng(1)
    q, k, v, dout = kit.arrays(rng, 2, 1100, 700, 4, 2, 24, 40, dtype)
    seen = set()
    for threads in (1, 2, 4, 7, 2, 1):
        backend = HostBackend(isa, threads=threads)
        tally = base.Tally()
        out, lse = kit.forward(backend, q, k, v, cuts=(333,), tally=tally, **options)
        grads = kit.backward(backend, dout, q, k, v, out, lse, cuts=(333,), tally=tally, **options)
        seen.add((tuple(x.tobytes() for x in (out, lse, *grads)), tally.tiles))
    assert len(seen) == 1


def test_progress_comes_from_the_calling_thread_and_often(isa):
    rng = np.random.default_rng(2)
    q, k, v, _ = kit.arrays(rng, 1, 3000, 3000, 4, 4, 64, 64, "float32")
    for threads in (1, 3):
        calls = []
        kit.forward(HostBackend(isa, threads=threads), q, k, v, progress=lambda: calls.append(threading.get_ident()))
        assert set(calls) == {threading.get_ident()}
        assert len(calls) >= 10


class Stop(Exception):
    pass


@pytest.mark.parametrize("threads", [1, 3])
def test_what_progress_raises_stops_the_kernel(isa, threads):
    rng = np.random.default_rng(2)
    q, k, v, dout = kit.arrays(rng, 1, 6000, 6000, 8, 8, 64, 64, "float32")
    backend = HostBackend(isa, threads=threads)

    def progress():
        raise Stop("enough")

    dims = base.Dims(1, 8, 8, 64, 64, q.dtype, q.dtype)
    tally = base.Tally()
    with pytest.raises(Stop, match="enough"):
        kit.forward(backend, q, k, v, progress=progress, tally=tally)
    assert tally.tiles < backend.tile_count(dims, range(6000), range(6000)) / 2  # it did not go on to the end
    out, lse = kit.forward(backend, q[:, :600], k, v)
    tally = base.Tally()
    with pytest.raises(Stop, match="enough"):
        kit.backward(backend, dout[:, :600], q[:, :600], k, v, out, lse, progress=progress, tally=tally)
    assert tally.tiles < backend.tile_count(dims, range(600), range(6000)) / 2
    kit.forward(backend, q[:, :60], k, v)  # and the next call works


def test_number_of_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert host.threads_here() == 3 == HostBackend().threads
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert host.threads_here() == 5
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    assert host.threads_here() == 6  # bound: all its cores
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert host.threads_here() == 1  # not bound: shared among four ranks


def test_too_little_scratch_is_refused(isa):
    rng = np.random.default_rng(0)
    q, k, v, _ = kit.arrays(rng, 1, 64, 64, 1, 1, 16, 16, "float32")
    backend = HostBackend(isa, threads=1)
    backend.scratch_bytes = lambda *_: 1024
    with pytest.raises(ValueError, match="scratch: 1024 bytes"):
        kit.forward(backend, q, k, v)


def test_scratch_does_not_grow_with_the_sequence_as_an_array_would(isa):
    from burstmpi.rules import Rules

    backend = HostBackend(isa, threads=2)
    dims = base.Dims(1, 1, 1, 64, 64, np.dtype(np.float32), np.dtype(np.float32))
    for backward in (False, True):
        need = [backend.scratch_bytes(dims, Rules().scores(64), n, n, backward) for n in (1 << 16, 1 << 20)]
        assert need[1] - need[0] < 64 * (1 << 20) // 96 and need[1] < 32 << 20
