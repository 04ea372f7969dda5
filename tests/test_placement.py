"""Who stands where: ranks of one node side by side in the ring, one GPU a rank."""

import warnings

import numpy as np
import pytest
from gpu_kit import REAL, gpu, put, simulation
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LAYOUTS, check, layout_of, problem, rules, run, shards, truth
from test_schedule import run as play

from burstmpi import BurstAttention, placement, use_gpu


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_a_ring_enters_each_node_once(nodes):
    order = placement.ring_order(nodes) or tuple(range(len(nodes)))
    assert sorted(order) == list(range(len(nodes)))
    ring = [nodes[rank] for rank in order]
    crossings = sum(a != b for a, b in zip(ring, ring[1:] + ring[:1]))
    assert crossings == (len(set(nodes)) if len(set(nodes)) > 1 else 0)
    for node in set(nodes):  # ranks of a node in the order of their numbers
        inside = [rank for rank in order if nodes[rank] == node]
        assert inside == sorted(inside)


def test_ranks_in_order_stay_as_they_are():
    assert placement.ring_order(["a", "a", "b", "b"]) is None and placement.ring_order(["x"] * 5) is None
    assert placement.ring_order(["b", "a", "b", "a"]) == (0, 2, 1, 3)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.permutations(range(n)), st.lists(st.booleans(), min_size=n * n, max_size=n * n))))
@settings(max_examples=300)
def test_any_order_of_the_ring_meets_all_needs(world):
    order, flat = world
    guests = np.array(flat, np.uint8).reshape(len(order), len(order))
    way, met, sent, returned = play(guests, tuple(order))
    np.testing.assert_array_equal(met, guests)
    assert sent == returned == list(way.last)


@pytest.mark.parametrize(
    "environ, local",
    [
        ({}, None),
        ({"SLURM_LOCALID": "3"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 1),  # mpirun inside Slurm: one daemon a node
        ({"MPI_LOCALRANKID": "2"}, 2),
        ({"SLURM_LOCALID": "x"}, None),
    ],
)
def test_local_rank(environ, local):
    assert placement.local_rank(environ) == local


def test_device_of():
    assert [placement.device_of(local, 4) for local in range(6)] == [0, 1, 2, 3, 0, 1]  # more ranks than GPUs
    assert [placement.device_of(local, 1) for local in range(3)] == [0, 0, 0]  # bound to one by the launcher
    with pytest.raises(RuntimeError, match="GPU: this process sees none"):
        placement.device_of(0, 0)


@pytest.mark.skipif(REAL, reason="counts devices of the PTX machine")
def test_use_gpu(monkeypatch):
    for name in placement.LOCAL_RANK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_LOCALID", "5")
    cupy = gpu(devices=4)
    assert use_gpu() == 1 and cupy.cuda.runtime.getDevice() == 1
    gpu(devices=1)
    assert use_gpu() == 0


def test_who_shares_a_gpu():
    seats = [("a", "0000:01"), ("a", "0000:01"), ("b", "0000:01"), ("a", "0000:02")]
    assert "rank 0 shares GPU 0000:01 of a with rank 1:" in placement.sharing(seats, 0)
    assert placement.sharing(seats, 2) == placement.sharing(seats, 3) == ""


# ---------------------------------------------------------------- under MPI


class Spy:
    """A communicator that counts messages to other nodes."""

    def __init__(self, comm, nodes):
        self.comm, self.nodes, self.crossings, self.inside = comm, nodes, 0, 0

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Isend(self, message, to, tag):
        if self.nodes[to] != self.nodes[self.comm.rank]:
            self.crossings += 1
        else:
            self.inside += 1
        return self.comm.Isend(message, to, tag)


@pytest.mark.mpi
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_launcher_that_deals_ranks_out_in_turn(comm, layout, backward, nodes, monkeypatch):
    """Ranks 0, 2, 4 on one node and 1, 3, 5 on another: right results, and the network is crossed once a node."""
    monkeypatch.setenv("BURSTMPI_NODE", f"node{comm.rank % nodes}")
    for rule in ("causal", "window", "full"):
        p = problem(23)
        options = rules(23, 23, 4)[rule]
        with BurstAttention(comm, layout=layout_of(layout, 23, 23, comm), backward=backward, **options) as attn:
            check(run(attn, p), truth(p, options))
            if rule == "full" and layout in ("contiguous", "zigzag") and comm.size > 2:
                names = [f"node{rank % nodes}" for rank in range(comm.size)]
                q, k, v, _ = shards(attn, p)
                spy = attn._ring.comm = Spy(attn._ring.comm, names)
                attn.forward(q, k, v)
                attn._ring.comm = spy.comm
                used = min(nodes, comm.size)
                assert comm.allreduce(spy.crossings) == used * (comm.size - 1)  # in each step once a node
                assert comm.allreduce(spy.inside) == (comm.size - used) * (comm.size - 1)


@pytest.mark.mpi(min_size=2)
def test_two_ranks_on_one_gpu_are_warned(comm, monkeypatch):
    simulation()
    cupy = gpu()
    p = problem(8, batch=1, heads=1, kv_heads=1, d=8, dv=8, dtype="float32")
    from gpu_kit import quick_backend

    monkeypatch.setattr("burstmpi.backends.cuda.CudaBackend", quick_backend())
    with BurstAttention(comm) as attn:
        q, k, v, _ = put(cupy, *shards(attn, p))
        with pytest.warns(RuntimeWarning, match=f"rank {comm.rank} shares GPU .* call burstmpi.use_gpu"):
            attn.forward(q, k, v)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attn.forward(*put(cupy, *shards(attn, problem(9, batch=1, heads=1, kv_heads=1, d=8, dv=8, dtype="float32"))[:3]))
    monkeypatch.setenv("BURSTMPI_NODE", f"node{comm.rank}")
    with BurstAttention(comm) as attn, warnings.catch_warnings():
        warnings.simplefilter("error")
        attn.forward(q, k, v)


