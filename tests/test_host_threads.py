"""Threads change the time and nothing else; the calling thread keeps MPI going."""

from __future__ import annotations

import itertools
import os
import platform
import signal
import subprocess
import sys
import threading
import time

import host_kit as kit
import ml_dtypes
import numpy as np
import pytest
from launching import launch, not_under_mpi

from burstmpi.backends import base, compile, host
from burstmpi.backends.host import ISAS, HostBackend, missing
from burstmpi.rules import Rules, Scores, Sight


@pytest.fixture(params=list(ISAS))
def isa(request):
    lacks = missing(request.param)
    if lacks:
        pytest.skip(f"this CPU has no {', '.join(lacks)}")
    return request.param


every_isa = pytest.mark.parametrize("isa", kit.isas())


ALL_RULES = {"causal": True, "documents": ((0, 600, 1100), (0, 400, 700)), "softcap": 9.0, "alibi_slopes": (0.2, 0.0, 0.5, 0.1)}
SAME_BITS = [
    *itertools.product(["float32", "bfloat16", "float64"], [{}, {"causal": True}, {"window": (60, 10)}]),
    *itertools.product(kit.DTYPES, [ALL_RULES]),
    ("float16", {"causal": True}),
]


@every_isa
@pytest.mark.parametrize("dtype, options", SAME_BITS, ids=str)
def test_same_bits_on_any_number_of_threads(isa, dtype, options):
    rng = np.random.default_rng(1)
    q, k, v, dout = kit.arrays(rng, 2, 1100, 700, 4, 2, 24, 40, dtype)
    seen = set()
    for threads in (1, 2, 3, 4, 7, 2, 1):
        backend = kit.backend_of(isa, threads)
        tally = base.Tally()
        out, lse = kit.forward(backend, q, k, v, cuts=(333,), tally=tally, **options)
        grads = kit.backward(backend, dout, q, k, v, out, lse, cuts=(333,), tally=tally, **options)
        seen.add((tuple(x.tobytes() for x in (out, lse, *grads)), tally.tiles))
    assert len(seen) == 1


@every_isa
def test_the_heaviest_rows_come_first(isa, monkeypatch):
    """A long document among short ones: the first rows that are done are its own, so that no thread begins it when others are through."""
    monkeypatch.setattr(host, "PROGRESS", 1)  # asked between all tiles
    rows, ends = 4000, (*range(0, 1000, 100), 1000, 2600, *range(2700, 4001, 100))
    rng = np.random.default_rng(4)
    q, k, v, dout = kit.arrays(rng, 1, rows, rows, 1, 1, 64, 64, "float32")
    backend, rules = kit.backend_of(isa), Rules(causal=True, documents=ends)
    dims, scores = base.Dims(1, 1, 1, 64, 64, q.dtype, q.dtype), rules.scores(64)
    sight = Sight(*rules.intervals(np.arange(rows), rows, rows), np.arange(rows, dtype=np.int32))
    scratch = backend.allocate(max(backend.scratch_bytes(dims, scores, rows, rows, way) for way in (False, True)))
    out, lse, delta, dq, dk, dv = (np.full((1, rows, 1, 64), np.nan, np.float32) for _ in range(6))
    lse, delta = (x[..., 0].transpose(0, 2, 1) for x in (lse, delta))

    def first_rows(run, watched):
        done = []
        run(base.Work(sight, scores, scratch, lambda: done.append(np.flatnonzero(np.isfinite(watched).all(axis=-1)))))
        return next(x for x in done if len(x))

    forward = first_rows(lambda work: backend.attend(q, k, v, out, lse, work, first=True), out[0, :, 0])
    backend.delta(dout, out, delta)
    fresh = {"fresh_q": True, "fresh_kv": True}
    backward = first_rows(lambda work: backend.attend_backward(dout, q, k, v, lse, delta, dq, dk, dv, work, **fresh), dq[0, :, 0])
    for first in (forward, backward):
        assert 1000 <= first.min() and first.max() < 2600


@every_isa
@pytest.mark.parametrize("dtype, options", [("bfloat16", ALL_RULES), ("bfloat16", {}), ("float16", {"causal": True}), ("float32", {"window": (60, 10)})], ids=str)
def test_same_bits_of_gradients_that_the_last_block_rounds(isa, dtype, options):
    rng = np.random.default_rng(1)
    q, k, v, dout = kit.arrays(rng, 2, 1100, 700, 4, 2, 24, 40, dtype)
    out, lse = kit.forward(kit.backend_of(isa), q, k, v, **options)
    ways = [("after", 1), *(("within", threads) for threads in (1, 2, 3, 4, 7))]
    results = [kit.rounded_gradients(kit.backend_of(isa, threads), dout, q, k, v, out, lse, 500, 333, way, **options) for way, threads in ways]
    assert all(np.isfinite(x.astype(float)).all() for x in results[0])
    assert len({tuple(x.tobytes() for x in each) for each in results}) == 1


TEAM = """
import os, sys, time
sys.path.insert(0, {here!r})
import host_kit as kit, numpy as np
from burstmpi.backends.host import HostBackend

backend = HostBackend('portable', threads=3, extra_flags={flags!r})
q, k, v, dout = kit.arrays(np.random.default_rng(2), 1, 1000, 1000, 8, 8, 64, 64, 'float32')
before, seen = {{}}, {{}}

def look():
    for thread in map(int, os.listdir('/proc/self/task')):
        try:
            seen[thread] = time.clock_gettime((~thread << 3) | 6)  # its CPU time: see pthread_getcpuclockid
        except OSError:
            pass  # it has ended

def shares():
    look()
    spent = [seen[thread] - before.get(thread, 0) for thread in seen]
    before.update(seen)
    return [x / sum(spent) for x in spent]

shares()
out, lse = kit.forward(backend, q, k, v, progress=look)
print(*shares())
kit.backward(backend, dout, q, k, v, out, lse, progress=look)
print(*shares())
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system tells nothing of threads")
@pytest.mark.parametrize("flags", [(), ("-U_OPENMP", "-DBURST_PTHREADS", "-pthread")], ids=["OpenMP", "POSIX"])
def test_as_many_threads_compute_as_are_asked_for(flags):
    """By the CPU time that each has spent, looked up while they compute, as POSIX threads then end; those that wait sleep.  One core will do."""
    program = TEAM.format(here=os.path.dirname(kit.__file__), flags=flags)
    environ = {**os.environ, "OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert sum(float(share) > 0.1 for share in line.split()) == 3, done.stdout
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_progress_comes_from_the_calling_thread_and_often(isa, dtype, monkeypatch):
    """At least every 2 ms of that thread's own time: four intervals, and a tile; short calls may have bad luck.  Tasks are few and long."""
    q, k, v, dout = kit.arrays(np.random.default_rng(2), 1, 160, 100000, 1, 1, 64, 64, dtype)
    calls, real = [], HostBackend._run

    def timed(*args):
        calls.clear()
        began = time.thread_time()
        real(*args)
        assert len(calls) + 4 >= (time.thread_time() - began) / 2e-3
        assert set(calls) == {threading.get_ident()}

    monkeypatch.setattr(HostBackend, "_run", timed)
    for threads in (1, 3):
        backend, progress = HostBackend(isa, threads=threads), lambda: calls.append(threading.get_ident())
        out, lse = kit.forward(backend, q, k, v, progress=progress)
        kit.backward(backend, dout, q, k, v, out, lse, progress=progress)


def test_progress_comes_seldom_once_nothing_is_under_way():
    """Every 10 ms."""
    q, k, v, _ = kit.arrays(np.random.default_rng(2), 1, 2000, 2000, 8, 8, 64, 64, "float32")
    backend, calls = HostBackend("portable", threads=2), []
    backend.prepare(q.dtype, False)
    began, own = time.perf_counter(), time.thread_time()
    kit.forward(backend, q, k, v, progress=lambda: calls.append(0) or True)
    assert (time.thread_time() - own) / 0.02 <= len(calls) <= (time.perf_counter() - began) / 0.01 + 2


WAITING = """
#include <stdio.h>
#include "gradient.h"
enum { GO_ON_CALLS = 20, CALM_CALLS = 5 };
static atomic_int calls;
static int answer;
static int progress(void) { return atomic_fetch_add(&calls, 1), answer; }
static void until_called(void) /* or until 5 s are over */
{
    const int64_t began = now_ns();
    while (atomic_load(&calls) < (answer == BURST_CALM ? CALM_CALLS : GO_ON_CALLS) && now_ns() - began < 5000000000) usleep(100);
}
static void at_the_end(call *c, int thread, arena scratch)
{
    (void)c, (void)scratch;
    if (thread) until_called();
}
static void for_a_turn(call *c, int thread, arena scratch)
{
    (void)scratch;
    if (!thread) wait_for_turn(c, 0, 0, 0, 0, (turns_of_tile){1, 2});
    if (thread) until_called(), pass_turn(c, 0, 0, 0);
}
int main(void)
{
    worker *const works[] = {at_the_end, for_a_turn};
    for (int i = 0; i < 4; i++) {
        burst_block b = {.threads = 2, .kv_heads = 1, .progress = progress, .interval_ns = 250000};
        atomic_int turn = 0;
        call c = {.b = &b, .tasks = 2, .tiles = 1, .turn = &turn};
        answer = i / 2 ? BURST_CALM : BURST_GO_ON;
        atomic_store(&calls, 0);
        const int64_t began = now_ns();
        run(&c, works[i % 2], (arena){0}, 0);
        printf("%d %f\\n", calls, 1e-9 * (now_ns() - began));
    }
}
"""


@pytest.mark.parametrize("flags", [("-fopenmp",), ("-DBURST_PTHREADS", "-pthread")], ids=["OpenMP", "POSIX"])
def test_progress_comes_while_the_calling_thread_waits(flags, tmp_path):
    """For the others' end, and for its turn to add to a tile: the others wait until they see it."""
    source, program = tmp_path / "waiting.c", tmp_path / "waiting"
    source.write_text(WAITING)
    words = [*compile.compiler(), "-std=gnu11", "-O1", f"-I{host._sources()}", str(source), "-o", str(program), *flags, "-lm"]
    subprocess.run(words, check=True, timeout=60)
    told = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert len(told) == 4
    for (calls, seconds), (least, interval) in zip(map(str.split, told), [(20, 0.00025)] * 2 + [(5, 0.01)] * 2):
        assert int(calls) >= least and float(seconds) >= (int(calls) - 1) * interval, told


def test_a_call_is_seldom_left_where_nobody_waits(monkeypatch):
    """Only signals are to be seen then."""
    backend, seen = HostBackend("portable", threads=1), []
    (library,) = backend._of(np.dtype(np.float32), backward=False)
    real = library.attend
    monkeypatch.setattr(library, "attend", lambda block: seen.append(block.interval_ns) or real(block))
    q, k, v, _ = kit.arrays(np.random.default_rng(2), 1, 5, 5, 1, 1, 8, 8, "float32")
    for progress in (None, base.no_progress, lambda: None):
        kit.forward(backend, q, k, v, progress=progress)
    assert seen == [host.IDLE, host.IDLE, host.PROGRESS]


class Stop(Exception):
    pass


@every_isa
@pytest.mark.parametrize("threads", [1, 3])
def test_what_progress_raises_stops_the_kernel(isa, threads):
    rng = np.random.default_rng(2)
    q, k, v, dout = kit.arrays(rng, 1, 6000, 6000, 8, 8, 64, 64, "float32")
    backend = kit.backend_of(isa, threads)

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


def test_a_signal_stops_the_kernel(isa):
    """Ctrl-C comes at any time: mostly while C computes, and its handler then runs when Python is called next."""
    q, k, v, _ = kit.arrays(np.random.default_rng(2), 1, 6000, 6000, 8, 8, 64, 64, "float32")
    backend, tally = HostBackend(isa, threads=1), base.Tally()

    def handler(*_):
        raise Stop("a signal")

    old = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Stop, match="a signal"):
            kit.forward(backend, q, k, v, tally=tally)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert tally.tiles < backend.tile_count(base.Dims(1, 8, 8, 64, 64, q.dtype, q.dtype), range(6000), range(6000))
    kit.forward(backend, q[:, :60], k, v)


FUNNELED = """
import os
os.environ["OMP_NUM_THREADS"] = "2"
import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
from burstmpi import BurstAttention
from burstmpi.ring import Ring
from support import check, problem, run, truth

asked, real = [], Ring.progress
Ring.progress = lambda self: (asked.append(MPI.Is_thread_main()), real(self))[1]
options = {"causal": True}
for dtype in ("float32", "bfloat16"):
    p = problem(600, batch=1, dtype=dtype)
    for way in ("q", "kv"):
        with BurstAttention(MPI.COMM_WORLD, backend="host", backward=way, **options) as attn:
            check(run(attn, p), truth(p, options))
            assert attn._backend.threads == 2
assert asked and all(asked)
told = MPI.COMM_WORLD.gather(mpi4py.rc.thread_level == "funneled" and MPI.Query_thread() >= MPI.THREAD_FUNNELED)
print(*(told or ()))
"""


@not_under_mpi
def test_an_mpi_that_allows_threads_beside_the_main_one_is_enough(tmp_path, monkeypatch):
    """MPI_THREAD_FUNNELED, whatever MPI then gives."""
    program = tmp_path / "funneled.py"
    program.write_text(FUNNELED)
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(kit.__file__), prepend=os.pathsep)
    done = launch(2, program)
    assert done.returncode == 0 and done.stdout.split() == ["True", "True"], f"{done.stdout}\n{done.stderr}"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86 has such a switch")
@pytest.mark.parametrize("dtype", list(kit.DTYPES))
def test_subnormals_count_as_zero(isa, dtype):
    """Those of the sums' type: float16's are normal numbers there."""
    q, k, v, dout = kit.arrays(np.random.default_rng(2), 1, 150, 200, 2, 2, 40, 24, dtype)
    low, high = {"float64": (-1026, 1020), "float16": (-18, 10)}.get(dtype, (-130, 124))
    small, large, fair = (lambda x, by=by: np.ldexp(x.astype(float), by).astype(x.dtype) for by in (low, high, high - 24))
    for x in (k, v, dout):
        assert small(x).any() and np.abs(small(x)).max() < ml_dtypes.finfo(x.dtype).tiny
    backend = HostBackend(isa, threads=2)
    one, two = (kit.forward(backend, large(q), x, v) for x in (small(k), 0 * k))  # products that are no subnormals
    assert all((a == b).all() == (dtype != "float16") for a, b in zip(one, two))
    out, lse = kit.forward(backend, q, k, small(v))
    if dtype == "float16":
        np.testing.assert_allclose(out.astype(float), kit.exact(dout, q, k, small(v))[0], rtol=0, atol=2**-24)
    assert out.any() == (dtype == "float16")
    for values in (v, fair(v)):  # delta, that is, as dP from which it is taken
        out, lse = kit.forward(backend, q, k, values)
        for gradient in kit.backward(backend, small(dout), q, k, values, out, lse):
            assert gradient.any() == (dtype == "float16")


def test_subnormals_are_others_affair(isa):
    """They count as zero inside the kernels, not in what progress calls, nor afterwards."""
    q, k, v, dout = kit.arrays(np.random.default_rng(2), 1, 1500, 1500, 4, 4, 64, 64, "float32")
    tiny, backend = np.full(4, 5e-324), HostBackend(isa, threads=2)

    def kept(verb, *args):
        seen = set()
        results = verb(backend, *args, progress=lambda: seen.add(bool((tiny * 2 > 0).all())))
        assert seen == {True} and (tiny * 2 > 0).all()
        return results

    kept(kit.backward, dout, q, k, v, *kept(kit.forward, q, k, v))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_computes_too(isa):
    """OpenMP's threads do not follow into it."""
    program = (
        "import os, signal, sys\n"
        f"sys.path.insert(0, {os.path.dirname(kit.__file__)!r})\n"
        "import host_kit as kit, numpy as np\n"
        "from burstmpi.backends.host import HostBackend\n"
        "q, k, v, dout = kit.arrays(np.random.default_rng(2), 1, 300, 300, 4, 4, 32, 32, 'float32')\n"
        f"backend = HostBackend({isa!r}, threads=2)\n"
        "def both():\n"
        "    out, lse = kit.forward(backend, q, k, v)\n"
        "    return b''.join(x.tobytes() for x in (out, lse, *kit.backward(backend, dout, q, k, v, out, lse)))\n"
        "before = both()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    signal.alarm(60)\n"
        "    os._exit(both() != before)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert both() == before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_computes_where_another_library_had_threads(tmp_path):
    """OpenMP's threads are one team for all libraries of a process, and the child waits for those that another one had started."""
    source = tmp_path / "other.c"
    source.write_text("#include <omp.h>\nvoid start(int *n)\n{\n#pragma omp parallel num_threads(3)\n    n[omp_get_thread_num()] = 1;\n}\n")
    program = (
        "import ctypes, os, signal, sys\n"
        f"sys.path.insert(0, {os.path.dirname(kit.__file__)!r})\n"
        "import host_kit as kit, numpy as np\n"
        "from burstmpi.backends.host import HostBackend\n"
        f"ctypes.CDLL({str(tmp_path / 'other.so')!r}).start((ctypes.c_int * 3)())\n"
        "if not os.fork():\n"
        "    signal.alarm(60)\n"
        "    q, k, v, _ = kit.arrays(np.random.default_rng(2), 1, 300, 300, 4, 4, 32, 32, 'float32')\n"
        "    os._exit(not np.isfinite(kit.forward(HostBackend(threads=2), q, k, v)[0]).all())\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
    )
    built = subprocess.run([*compile.compiler(), "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(tmp_path / "other.so")], capture_output=True)
    if built.returncode:
        pytest.skip("the compiler has no OpenMP")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("heads, threads", [(1, 1), (2, 3), (16, 2)])
def test_scratch_is_enough_for_fewer_rows(isa, heads, threads, backward):
    """A rank's blocks differ by a row, and their scratch is the largest's."""
    backend = HostBackend(isa, threads=threads)
    for dtype, d in (("float32", 64), ("float64", 128), ("bfloat16", 32)):
        dims = base.Dims(1, heads, heads, d, d, np.dtype(kit.DTYPES[dtype]), np.dtype("float64" if dtype == "float64" else "float32"))
        sizes = [backend.scratch_bytes(dims, Scores(0.1), rows, 200, backward) for rows in range(1, 1500, 3)]
        assert sizes == sorted(sizes)
        sizes = [backend.scratch_bytes(dims, Scores(0.1), 200, rows, backward) for rows in range(1, 1500, 31)]
        assert sizes == sorted(sizes)


def test_scratch_is_enough_for_a_forked_process(isa):
    """It has one thread, and forward's groups are larger then."""
    many, one = HostBackend(isa, threads=2), HostBackend(isa, threads=1)
    for dtype, heads, d, rows in (("float32", 1, 32, 1776), ("bfloat16", 2, 40, 1584), ("float64", 1, 16, 1000)):
        dims = base.Dims(1, heads, heads, d, d, np.dtype(kit.DTYPES[dtype]), np.dtype("float64" if dtype == "float64" else "float32"))
        sizes = lambda backend: [backend.scratch_bytes(dims, Scores(0.1), n, n, False) for n in range(rows - 400, rows + 400, 24)]  # noqa: B023, E731
        assert all(a >= b for a, b in zip(sizes(many), sizes(one)))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system tells nothing of threads")
def test_a_pass_over_few_rows_starts_no_threads():
    program = (
        "import os, sys\n"
        f"sys.path.insert(0, {os.path.dirname(kit.__file__)!r})\n"
        "import host_kit as kit, numpy as np\n"
        "from burstmpi.backends.host import HostBackend\n"
        "q = kit.arrays(np.random.default_rng(2), 1, 8, 8, 1, 1, 16, 16, 'bfloat16')[0]\n"
        "backend = HostBackend(threads=500)\n"
        "backend.prepare(q.dtype, True)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "backend.delta(q, q, np.zeros((1, 1, 8), np.float32))\n"
        "backend.copy(q, q.astype(np.float32))\n"
        "assert len(os.listdir('/proc/self/task')) == before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("isa, dtype", [("amx", "bfloat16"), ("avx512", "float32")])
def test_progress_may_compute(isa, dtype, monkeypatch):
    """So may a signal's handler or a finalizer that comes meanwhile; on AMX it takes the thread's tile registers."""
    monkeypatch.setattr(host, "PROGRESS", 0)
    backend = kit.backend_of(isa)
    q, k, v, dout = kit.arrays(np.random.default_rng(2), 1, 300, 700, 1, 1, 32, 32, dtype)
    calls = []

    def progress():
        calls.append(None)
        if len(calls) % 3 == 2:
            kit.forward(backend, q[:, :40], k[:, :40], v[:, :40])

    results = []
    for how in ({}, {"progress": progress}):
        out, lse = kit.forward(backend, q, k, v, **how)
        results.append((out, lse, *kit.backward(backend, dout, q, k, v, out, lse, **how)))
    assert len(calls) > 2 and all(a.tobytes() == b.tobytes() for a, b in zip(*results))


def test_number_of_threads(monkeypatch):
    for told, want in (("100000", 1024), ("2147483648", 1024), (" 7 ", 7)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert host.threads_here() == want
    for told in ("", "0", "many", "-3", "\u00b2", "9" * 30):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert 1 <= host.threads_here() <= (os.cpu_count() or 1)
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


@pytest.mark.parametrize(
    "environ, cores, want, paid",
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),4", "SLURM_NODEID": "1", "SLURM_CPUS_ON_NODE": "12"}, 12, 6, 1),  # the job's cores, shared
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),4", "SLURM_NODEID": "2", "SLURM_CPUS_ON_NODE": "12"}, 16, 3, 1),  # and no more than these
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),4", "SLURM_NODEID": "0", "SLURM_CPUS_ON_NODE": "12"}, 5, 5, 1),  # bound by srun
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "SLURM_CPUS_ON_NODE": "16"}, 16, 2, 1),  # mpirun in Slurm
        ({"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "5"}, 16, 16, 2),  # nothing that can be believed
        ({"MPI_LOCALNRANKS": "4"}, 16, 4, 1),
        ({}, 16, 16, 2),
    ],
    ids=str,
)
def test_threads_under_a_launcher(monkeypatch, environ, cores, want, paid):
    """paid: where a quota pays for 2.5 cores"""
    for name in [x for x in os.environ if x.startswith(("OMP", "SLURM", "MPI_", "MV2_"))]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setattr(host, "_quota", lambda: float("inf"))
    assert host.threads_here() == want
    monkeypatch.setattr(host, "_quota", lambda: 2.5)
    assert host.threads_here() == paid


@pytest.mark.parametrize("outer, inner, want", [("max", "max", np.inf), ("300000", "max", 3), ("300000", "150000", 1.5), (None, "50000", 0.5)])
def test_a_containers_quota(tmp_path, outer, inner, want):
    deep = tmp_path / "cgroup" / "pod" / "box"
    deep.mkdir(parents=True)
    for folder, most in ((deep.parent, outer), (deep, inner)):
        if most:
            (folder / "cpu.max").write_text(f"{most} 100000\n")
    (tmp_path / "self").write_text("1:name=systemd:/x\n0::/pod/box\n")
    assert host._quota(tmp_path / "cgroup", tmp_path / "self") == want
    assert host._quota(tmp_path / "cgroup", tmp_path / "nothing") == np.inf


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
