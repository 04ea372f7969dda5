"""What goes over the wire: bytes against the formulas, messages that are never sent, large messages."""

import numpy as np
import pytest
from support import TYPES, check, collect, forced, problem, run, shards, truth

from burstmpi import BurstAttention

pytestmark = pytest.mark.mpi

B, Z, D = 2, 4, 32  # batch, heads, head dim


def traffic(comm, rows=16, heads=Z, kv_heads=Z, dtype="float32", **options):
    """Stats of all ranks for forward and backward with ``rows`` rows a rank, and those that really were sent."""
    p = problem(rows * comm.size, batch=B, heads=heads, kv_heads=kv_heads, d=D, dv=D, dtype=dtype)
    with BurstAttention(comm, **options) as attn:
        q, k, v, dout = shards(attn, p)
        spy = attn._ring.comm = Spy(attn._ring.comm)
        out, lse = attn.forward(q, k, v)
        forward, seen_forward = attn.stats, spy.take()
        attn.backward(dout, q, k, v, out, lse)
        backward, seen_backward = attn.stats, spy.take()
        attn._ring.comm = spy.comm
    assert (forward.bytes_sent, forward.messages) == seen_forward
    assert (backward.bytes_sent, backward.messages) == seen_backward
    return comm.allgather((forward, backward))


class Spy:
    """A communicator that counts what goes through Isend."""

    def __init__(self, comm):
        self.comm, self.nbytes, self.messages = comm, 0, 0

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Isend(self, buffer, *args):
        self.nbytes += buffer[0].nbytes
        self.messages += 1
        return self.comm.Isend(buffer, *args)

    def take(self):
        seen = self.nbytes, self.messages
        self.nbytes = self.messages = 0
        return seen


@pytest.mark.mpi(ranks=(2, 4, 8))
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal zigzag"])
def test_bytes_equal_the_formulas(comm, options):
    rows, size = 16, comm.size
    whole = B * Z * (rows * size) * D  # BZNd elements
    vector = B * Z * (rows * size)  # BZN
    share = (size - 1) / size
    for way, elements in (("q", 3 * whole + 2 * vector), ("kv", 4 * whole)):
        for forward, backward in traffic(comm, rows, backward=way, **options):
            assert forward.bytes_sent == 4 * share * 2 * whole
            assert backward.bytes_sent == 4 * share * elements
            assert backward.travels == way
            both = forward.bytes_sent + backward.bytes_sent
            if way == "q":
                assert both == 4 * share * (0.625 * 8 * whole + 2 * vector)
            assert forward.messages == size - 1  # K and V of a rank in one message
            assert backward.messages == 2 * (size - 1)  # parcels, and the gradients that follow them


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "dtype, heads, kv_heads, expected",
    [
        ("float32", 4, 4, "q"),  # 3 + 2/d against 4
        ("float32", 4, 2, "kv"),  # 3 against 4/2
        ("float32", 4, 1, "kv"),
        ("bfloat16", 4, 4, "q"),  # 2 + 2 + 4 bytes against 2 + 2 + 4 + 4
        ("bfloat16", 4, 2, "kv"),
        ("float64", 4, 4, "q"),
    ],
)
def test_backward_takes_the_way_with_fewer_bytes(comm, dtype, heads, kv_heads, expected):
    sent = {}
    for way in ("auto", "q", "kv"):
        stats = [b for _, b in traffic(comm, dtype=dtype, heads=heads, kv_heads=kv_heads, backward=way)]
        sent[way] = sum(b.bytes_sent for b in stats)
        if way == "auto":
            assert {b.travels for b in stats} == {expected}
    assert sent["auto"] == min(sent["q"], sent["kv"]) == sent[expected]


@pytest.mark.mpi(ranks=2)
def test_of_two_equal_ways_backward_takes_the_papers(comm):
    """Head dim 2: 3·2 + 2 elements of a row against 4·2."""
    p = problem(64, batch=2, heads=4, kv_heads=4, d=2, dv=2, dtype="float32")
    sent = {}
    for way in ("q", "kv", "auto"):
        with BurstAttention(comm, backward=way) as attn:
            run(attn, p)
            sent[way] = attn.stats
    assert sent["q"].bytes_sent == sent["kv"].bytes_sent > 0 and sent["auto"].travels == "q"


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("backend", ["numpy", "host"])
def test_mpi_gets_its_progress_between_tiles(comm, monkeypatch, backend):
    """While a block is computed, the requests of the step are tested again and again."""
    from burstmpi import ring

    tested = []

    class Request(ring.MPI.Request):
        @classmethod
        def Testall(cls, requests, *args):
            tested.append(len(requests))
            return ring_request.Testall(requests, *args)

    ring_request = ring.MPI.Request
    monkeypatch.setattr(ring.MPI, "Request", Request)
    monkeypatch.setattr("burstmpi.backends.host.PROGRESS", 0)  # ns: between all tiles, in place of every 0.25 ms
    p = problem(64, dtype="float32")
    with BurstAttention(comm, backend=forced(backend, monkeypatch)) as attn:
        q, k, v, dout = shards(attn, p)
        out, lse = attn.forward(q, k, v)
        monkeypatch.setattr("burstmpi.backends.numpy.KEYS", 4)
        monkeypatch.setattr(attn._ring, "_wait", lambda pending: [p.request.Wait() for p in pending])
        tested.clear()
        attn.forward(q, k, v)  # the plan, and with it the room for tiles, is that of larger tiles
        tiles = attn.stats.tiles
        # one receive and one send, in every tile of step 0
        assert tiles >= 16 and sum(n == 2 for n in tested) >= 8
        tested.clear()
        attn.backward(dout, q, k, v, out, lse)
        assert sum(n == 3 for n in tested) >= 8  # the gradients that come home are awaited too


@pytest.mark.mpi(ranks=4)
def test_blocks_that_nobody_needs_are_not_sent(comm):
    window = [f.messages for f, _ in traffic(comm, layout="contiguous", causal=True, window=(3, None))]
    assert window == [1, 1, 1, 0]  # each block goes to the next rank only
    causal = [f.messages for f, _ in traffic(comm, layout="contiguous", causal=True)]
    assert sum(causal) == 3 + 2 + 1
    documents = traffic(comm, layout="contiguous", documents=[0, 16, 32, 48, 64])
    assert all(f.messages == b.messages == 0 for f, b in documents)
    both_sides = [f.messages for f, _ in traffic(comm, layout="contiguous", window=(3, 3))]
    assert sum(both_sides) == 1 + 2 + 2 + 2  # to the right neighbour, then to the left one
    assert all(f.tiles_skipped > 0 for f, _ in traffic(comm, layout="contiguous", window=(3, 3)))


@pytest.mark.mpi(min_size=2)
def test_large_messages_go_in_chunks(comm, monkeypatch):
    """Chunks of 1000 bytes in place of 1 GiB."""
    monkeypatch.setattr("burstmpi.ring.CHUNK", 1000)
    p = problem(37, dtype="float32")
    for way in ("q", "kv"):
        with BurstAttention(comm, backward=way, causal=True) as attn:
            check(run(attn, p), truth(p, {"causal": True}))
            assert attn.stats.messages > 2 * (comm.size - 1)


@pytest.mark.large
@pytest.mark.mpi(ranks=2)
def test_messages_above_two_gibibytes(comm):
    """A parcel of 2.25 GiB: with its buffers 16 GB on two ranks."""
    batch, rows, heads, d = 36, 128, 1024, 64  # k: 1.125 GiB in float32
    ones = np.ones((batch, rows, heads, d), np.float32)
    with BurstAttention(comm, layout="contiguous", window=(0, 1)) as attn:
        out, lse = attn.forward(ones * (comm.rank + 1), ones, ones)
        assert comm.rank == 0 or attn.stats.bytes_sent == 2 * ones.nbytes > 2**31
        assert np.isfinite(lse).all() and (out == 1).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_shard_and_gather(comm, dtype):
    for layout in ("contiguous", "zigzag", "striped", ("zigzag", "striped")):
        with BurstAttention(comm, layout=layout) as attn:
            for length in (0, 1, 7, 23):
                whole = np.arange(2 * length * 3).reshape(2, length, 3).astype(TYPES[dtype])
                for side in ("queries", "keys"):
                    mine = attn.shard(whole, side=side)
                    assert mine.flags.c_contiguous
                    np.testing.assert_array_equal(mine, whole[:, attn.positions(length, side=side)])
                    np.testing.assert_array_equal(attn.gather(mine, side=side), whole)
                    for root in range(comm.size):
                        again = attn.shard(whole if comm.rank == root else None, side=side, root=root)
                        np.testing.assert_array_equal(again, mine)
                        back = attn.gather(mine, side=side, root=root)
                        if comm.rank == root:
                            np.testing.assert_array_equal(back, whole)
                        else:
                            assert back is None
                turned = np.ascontiguousarray(whole.swapaxes(0, 1))
                np.testing.assert_array_equal(attn.gather(attn.shard(turned, axis=0), axis=0), turned)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["q", "kv"])
@pytest.mark.parametrize("views", ["none", "even ranks", "all"])
def test_large_arrays_are_sent_from_where_they_lie(comm, way, views, monkeypatch):
    """Each large array is a message of its own, and has not been copied where it is contiguous; views are packed."""
    monkeypatch.setattr("burstmpi.plan.LARGE", 1 << 12)  # q, k, v and dout are large, delta and lse are not
    p, options = problem(24 * comm.size, batch=1, heads=2, kv_heads=2, d=32, dv=32, dtype="float32"), {"causal": True}
    fused = views == "all" or (views == "even ranks" and comm.rank % 2 == 0)
    with BurstAttention(comm, backward=way, **options) as attn:
        q, k, v, dout = shards(attn, p)
        if fused:
            room = np.empty((*q.shape[:2], 4 * 2, 32), np.float32)
            for i, x in enumerate((q, k, v, dout)):
                room[:, :, 2 * i : 2 * i + 2] = x
            q, k, v, dout = (room[:, :, 2 * i : 2 * i + 2] for i in range(4))
        posted = []
        spy = attn._ring.comm = Spy(attn._ring.comm)
        spy.Isend = lambda buffer, *args: (posted.append(buffer[0]), Spy.Isend(spy, buffer, *args))[1]
        out, lse = attn.forward(q, k, v)
        assert attn.stats.messages == 2 * (comm.size - 1)
        lying = [any(np.shares_memory(x, y) for x in posted) for y in (k, v)]
        assert lying == [not fused] * 2
        posted.clear()
        grads = attn.backward(dout, q, k, v, out, lse)
        hops = comm.size - 1  # parcels of q, dout, (delta and lse), or of k and v; one message of gradients behind each
        assert attn.stats.messages == hops * (4 if way == "q" else 3)
        lying = [any(np.shares_memory(x, y) for x in posted) for y in ((q, dout) if way == "q" else (k, v))]
        assert lying == [not fused] * 2
        attn._ring.comm = spy.comm
        check(collect(attn, out, lse, *grads), truth(p, options))
