"""The interface as programs use it: communicators, buffers, strides, statistics."""

import linecache
import threading
import warnings

import numpy as np
import pytest
import support
from mpi4py import MPI
from support import check, collect, problem, run, shards, truth

import burstmpi
from burstmpi import BurstAttention, backends
from burstmpi.backends import BACKENDS, compile, host
from burstmpi.backends.numpy import NumpyBackend

pytestmark = pytest.mark.mpi


def test_sub_communicators(comm):
    """Two groups at the same time, each with its own sequence."""
    group = comm.Split(comm.rank % 2, key=-comm.rank)
    p = problem(10, seed=comm.rank % 2)
    with BurstAttention(group, causal=True) as attn:
        check(run(attn, p), truth(p, {"causal": True}))
    group.Free()


def test_cartesian_communicators(comm):
    cart = comm.Create_cart([comm.size], periods=[True], reorder=True)
    p = problem(10)
    with BurstAttention(cart, window=(3, 3)) as attn:
        check(run(attn, p), truth(p, {"window": (3, 3)}))
    cart.Free()


def test_comm_self(comm):
    p = problem(10, seed=comm.rank)
    with BurstAttention(MPI.COMM_SELF) as attn:
        check(run(attn, p), truth(p, {}))
        assert attn.stats.messages == attn.stats.bytes_sent == 0


def test_a_call_during_a_call(comm, monkeypatch):
    """Of another thread or under a signal's handler: it would compute in the same workspace, so it is refused, and the first one goes on."""
    p, refused = problem(10), []

    def meanwhile():
        for verb in (lambda: run(attn, p), lambda: attn.shard(p.q), lambda: attn.workspace_bytes(p.q.shape, p.k.shape, p.v.shape, p.q.dtype)):
            with pytest.raises(RuntimeError, match="called during another call"):
                verb()
        refused.append(threading.get_ident())

    def attend(self, *args, **options):
        meanwhile()
        other = threading.Thread(target=meanwhile)
        other.start(), other.join()
        return real(self, *args, **options)

    real = NumpyBackend.attend
    monkeypatch.setattr(NumpyBackend, "attend", attend)
    with BurstAttention(comm, causal=True, backend="numpy") as attn:
        check(run(attn, p), truth(p, {"causal": True}))
        monkeypatch.undo()
        check(run(attn, p), truth(p, {"causal": True}))
    assert len(set(refused)) == 2 or comm.size > 1  # some ranks have no block


def test_two_objects_at_once(comm):
    """Their messages do not mix: each has a communicator of its own, and the caller's is left alone."""
    p, other = problem(10), problem(13, seed=1)
    request = comm.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    with BurstAttention(comm, causal=True) as a, BurstAttention(comm, layout="striped", softcap=1.0) as b:
        first, second, third = run(a, p), run(b, other), run(a, other)
    check(first, truth(p, {"causal": True}))
    check(second, truth(other, {"softcap": 1.0}))
    check(third, truth(other, {"causal": True}))
    comm.send("mine", dest=comm.rank, tag=1)
    assert request.wait() == "mine"


def test_many_objects(comm):
    """Closing gives the communicator back: far more objects than an MPI has communicators of a size."""
    for _ in range(300):
        with BurstAttention(comm):
            pass


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_callers_buffers(comm, dtype, backward):
    p = problem(21, dtype=dtype)
    with BurstAttention(comm, causal=True, backward=backward) as attn:
        q, k, v, dout = shards(attn, p)
        accumulator = np.float32
        # Some of them strided: every second row of a larger array, and heads before rows.
        out = np.full((2, 2 * q.shape[1], 4, 6), np.nan, q.dtype)[:, ::2]
        lse = np.full((2, q.shape[1], 4), np.nan, accumulator).swapaxes(1, 2)
        got = attn.forward(q, k, v, out=out, lse=lse)
        assert got[0] is out and got[1] is lse
        dq = np.full((2, 4, q.shape[1], 8), np.nan, q.dtype).swapaxes(1, 2)
        dk, dv = np.full_like(k, np.nan), np.full_like(v, np.nan)
        grads = attn.backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
        assert grads[0] is dq and grads[1] is dk and grads[2] is dv
        check(collect(attn, out, lse, dq, dk, dv), truth(p, {"causal": True}))


def test_views_of_a_fused_array(comm):
    p = problem(18, heads=3, kv_heads=3, d=8, dv=8, dtype="float32")
    with BurstAttention(comm, layout="striped") as attn:
        q, k, v, dout = shards(attn, p)
        fused = np.stack([q, k, v], axis=2)  # (batch, rows, 3, heads, d), as a projection leaves it
        views = [fused[:, :, i] for i in range(3)]
        back = dout[:, ::-1][:, ::-1]
        out, lse = attn.forward(*views)
        check(collect(attn, out, lse, *attn.backward(back, *views, out, lse)), truth(p, {}))
        # Heads before rows, and a head dim that is not the fastest axis.
        turned = [np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) for x in (q, k, v)]
        again, _ = attn.forward(*turned)
        np.testing.assert_allclose(again, out, rtol=1e-5, atol=1e-6)


def test_inputs_are_left_alone(comm):
    p = problem(12)
    with BurstAttention(comm, causal=True) as attn:
        q, k, v, dout = shards(attn, p)
        out, lse = attn.forward(q, k, v)
        before = [x.copy() for x in (q, k, v, dout, out, lse)]
        for x in (q, k, v, dout, out, lse):
            x.flags.writeable = False
        attn.backward(dout, q, k, v, out, lse)
        for x, old in zip((q, k, v, dout, out, lse), before):
            np.testing.assert_array_equal(x, old)


def test_rows_that_see_nothing(comm):
    """Causal with fewer keys than queries: the first queries see no key."""
    p = problem(20, 6)
    with BurstAttention(comm, causal=True) as attn:
        got = run(attn, p)
    assert (got["out"][:, :14] == 0).all() and (got["lse"][:, :, :14] == -np.inf).all() and (got["dq"][:, :14] == 0).all()
    check(got, truth(p, {"causal": True}))


def test_more_shapes_than_plans_are_kept(comm):
    from burstmpi import attention

    with BurstAttention(comm, layout="contiguous", causal=True) as attn:
        for _ in range(2):
            for rows in range(1, attention.PLANS + 3):
                q = np.ones((1, rows, 1, 2))
                out, _ = attn.forward(q, q, q)
                np.testing.assert_allclose(out, 1)
        assert len(attn._plans) == attention.PLANS


def test_whole_numbers_of_numpy(comm):
    with BurstAttention(comm) as attn:
        mine = attn.shard(np.zeros((1, 5)), axis=np.int64(1) if comm.rank == 0 else 1)
        assert attn.gather(mine, root=np.int32(0) if comm.rank == 0 else 0) is None or comm.rank == 0


def test_stats(comm):
    p = problem(64, dtype="float32")
    with BurstAttention(comm, causal=True, layout="contiguous", backward="kv") as attn:
        assert attn.stats == burstmpi.Stats()
        q, k, v, dout = shards(attn, p)
        out, lse = attn.forward(q, k, v)
        forward = attn.stats
        attn.backward(dout, q, k, v, out, lse)
        backward = attn.stats
    assert (forward.call, forward.travels) == ("forward", "kv") and (backward.call, backward.travels) == ("backward", "kv")
    assert forward.compute_seconds > 0 and forward.wait_seconds >= 0 and backward.compute_seconds > 0
    if comm.size > 1:
        assert comm.allreduce(forward.tiles_skipped) > 0  # blocks above the diagonal
    assert forward.tiles > 0 and forward.bytes_sent % 4 == 0


@pytest.mark.mpi
def test_a_rank_with_no_rows_has_buffers_too(comm):
    """NumPy gives empty arrays strides that mean nothing."""
    rows = 0 if comm.rank == 0 else 4
    x = np.ones((2, rows, 3, 8), np.float32)
    with BurstAttention(comm, layout="contiguous") as attn:
        out, lse = np.empty_like(x), np.empty((2, 3, rows), np.float32)
        assert attn.forward(x, x, x, out=out, lse=lse)[0] is out
        attn.backward(x, x, x, x, out, lse, dq=np.empty_like(x), dk=np.empty_like(x), dv=np.empty_like(x))


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["host", "numpy", "reference"])
def test_the_callers_floating_point_errors_are_others(comm, backend):
    """Weights that underflow are no error."""
    x = np.full((1, 8, 1, 4), 30, np.float32) * np.arange(8, dtype=np.float32)[:, None, None]
    with np.errstate(all="raise"), BurstAttention(comm, layout="contiguous", backend=backend, alibi_slopes=[200.0]) as attn:
        out, lse = attn.forward(x, x, x)
        attn.backward(x, x, x, x, out, lse)


@pytest.mark.mpi(min_size=2)
def test_options_that_are_the_same_in_another_type(comm):
    words = ("contiguous", "q", "host") if comm.rank else map(np.str_, ("contiguous", "q", "host"))
    layout, backward, backend = words
    with BurstAttention(comm, layout=layout, backward=backward, backend=backend) as attn:
        x = np.zeros((1, 2, 1, 4), np.float32)
        attn.forward(x, x, x)
        attn.gather(x, axis=1 if comm.rank else np.int64(1), side="queries" if comm.rank else np.str_("queries"))


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["host", "numpy", "reference"])
def test_no_more_tiles_are_computed_than_there_are(comm, backend):
    """Documents of other lengths move queries on the keys' axis."""
    q, k = np.zeros((1, 64, 1, 4), np.float32), np.zeros((1, 400, 1, 4), np.float32)
    with BurstAttention(comm, backend=backend, layout="contiguous", documents=((0, 2, 64), (0, 62, 400))) as attn:
        q, k = attn.shard(q), attn.shard(k, side="keys")
        out, lse = attn.forward(q, k, k)
        assert attn.stats.tiles_skipped >= 0
        attn.backward(out, q, k, k, out, lse)
        assert attn.stats.tiles_skipped >= 0


class Stream(NumpyBackend):
    """A backend that launches: its verbs run later, one after another, as those of a GPU's stream."""

    def __init__(self):
        self.queue, self.ended = [], 0

    def launch(self, deed):
        self.queue.append(deed)
        return Launched(self, self.ended + len(self.queue))


class Launched:
    def __init__(self, stream, number):
        self.stream, self.number = stream, number

    def done(self):
        if self.stream.ended < self.number:
            self.stream.queue.pop(0)()
            self.stream.ended += 1
        return self.stream.ended >= self.number


def launched(verb):
    real = getattr(NumpyBackend, verb)
    return lambda self, *args, **kwargs: self.launch(lambda: real(self, *args, **kwargs))


for verb in ("copy", "clear", "add", "delta", "attend", "attend_backward"):
    setattr(Stream, verb, launched(verb))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 2)}], ids=str)
def test_a_backend_that_launches(comm, monkeypatch, options, backward, dtype):
    """Nothing is sent, read or returned before it has been computed."""
    p = problem(29, dtype=dtype)
    with BurstAttention(comm, layout="contiguous", backward=backward, **options) as attn:
        monkeypatch.setattr(attn, "_backend", Stream())
        got = run(attn, p)
        assert not attn._backend.queue
    check(got, truth(p, options))


def test_merge_of_parts_from_the_ring(comm):
    """Two calls over halves of the keys merge into one over all of them."""
    p = problem(8, 24)
    with BurstAttention(comm, layout="contiguous") as attn:
        q = attn.shard(p.q)
        parts = [attn.forward(q, attn.shard(p.k[:, part]), attn.shard(p.v[:, part])) for part in (slice(9), slice(9, 24))]
        out, lse = burstmpi.merge(*parts[0], *parts[1])
        got = {"out": attn.gather(out), "lse": attn.gather(lse, axis=2)}
    check(got, truth(p, {}))


def test_public_names():
    assert set(burstmpi.__all__) <= set(dir(burstmpi))
    assert burstmpi.__doc__ and all(getattr(burstmpi, name).__doc__ for name in burstmpi.__all__)


needs_compiler = pytest.mark.skipif(not any(map(compile.shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


@needs_compiler
def test_numpy_arrays_go_to_the_compiled_kernels(comm):
    with BurstAttention(comm) as attn:
        run(attn, problem(10))
        assert attn.stats.backend == "host"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of this rank, kernels that are compiled quickly, and warnings of this rank wherever it is."""
    monkeypatch.setattr(backends, "_TOLD", set())
    monkeypatch.setattr(backends, "first_here", lambda: True)
    monkeypatch.setenv("BURSTMPI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(host, "_LIBRARIES", {})
    monkeypatch.setitem(BACKENDS, "host", lambda: host.HostBackend("portable", threads=1, extra_flags=("-O0",)))
    return tmp_path / "cache"


@needs_compiler
@pytest.mark.mpi(ranks=(1, 2))
def test_a_call_waits_for_its_own_kernels_alone(comm, cache):
    p = problem(10)
    with BurstAttention(comm, causal=True) as attn:
        q, k, v, _ = shards(attn, p)
        attn.forward(q, k, v)
        assert [path.name.split("-")[3] for path in cache.glob("host-*.so")] == ["forward"]


@needs_compiler
@pytest.mark.mpi(ranks=(1, 2))
@pytest.mark.parametrize("backend", ["auto", "host"])
def test_kernels_of_another_type_that_cannot_be_built(comm, cache, monkeypatch, backend):
    """The last rank loses its compiler between two calls; the cache has what the first one needed."""
    ours, theirs = problem(10, dtype="float32"), problem(10)
    poor = comm.rank == comm.size - 1
    with BurstAttention(comm, causal=True, backend=backend) as attn:
        check(run(attn, ours), truth(ours, {"causal": True}))
        if poor:
            monkeypatch.setenv("PATH", "")
            monkeypatch.delenv("CC", raising=False)
        if backend == "host":
            with pytest.raises(ValueError, match="backend: 'host' cannot be used: no C compiler"):
                run(attn, theirs)
        else:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                check(run(attn, theirs), truth(theirs, {"causal": True}))
                check(run(attn, theirs), truth(theirs, {"causal": True}))
            assert [x for x in told if "NumPy serves" in str(x.message)] == told and len(told) == poor
            assert all(x.filename == support.__file__ for x in told)  # the line that calls forward
            assert attn.stats.backend == ("numpy" if poor else "host")
        check(run(attn, ours), truth(ours, {"causal": True}))
        assert attn.stats.backend == "host"


@pytest.mark.mpi(ranks=(1, 2))
@pytest.mark.parametrize("call", ["forward", "workspace_bytes"])
def test_numpy_for_want_of_a_compiler_is_told_at_the_callers_line(comm, cache, monkeypatch, call):
    """Once in a process, however many objects there are; every rank here counts as its node's first."""
    monkeypatch.setenv("CC", "false")
    p = problem(10)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            with BurstAttention(comm) as attn:
                q, k, v, _ = shards(attn, p)
                if call == "forward":
                    attn.forward(q, k, v)  # here
                else:
                    attn.workspace_bytes(q.shape, k.shape, v.shape, q.dtype)  # here
    (warning,) = told
    assert warning.filename == __file__ and linecache.getline(warning.filename, warning.lineno).endswith("# here\n")
