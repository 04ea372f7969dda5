"""The ring on GPUs: rules × layouts × types × both backward ways × both transports; NumPy computes in place of the kernels.

The same with the kernels themselves is in test_gpu_kernels.py.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest
from gpu_kit import attention, check, gpu, put, run, simulation
from support import LAYOUTS, RULES, TYPES, layout_of, problem, rules, shards, truth

from burstmpi import PeerError
from burstmpi.backends import tiles

pytestmark = pytest.mark.mpi(ranks=(1, 2, 3, 4))

LENGTH = 21


@cache
def case(rule, dtype, nk=LENGTH, d=8, dv=8):
    p = problem(LENGTH, nk, batch=1, heads=2, kv_heads=1, d=d, dv=dv, dtype=dtype, seed=nk)
    options = rules(LENGTH, nk, 2)[rule]
    return p, options, truth(p, options)


WAYS = list(product(TYPES, ("q", "kv"), ("staged", "direct")))  # 16: types × what travels × transports


def quickly(comm, rule, layout, dtype, backward, transport, rendezvous=False):
    """Streams, marks, memory and messages of the CUDA backend; the kernels themselves by NumPy."""
    cupy = gpu()
    p, options, expected = case(rule, dtype)
    options = options | {"layout": layout_of(layout, LENGTH, LENGTH, comm), "backward": backward}
    with attention(comm, transport, stage=200, quick=True, rendezvous=rendezvous, **options) as attn:
        check(run(cupy, attn, p), expected)
        assert (attn.stats.backend, attn.stats.transport, attn.stats.travels) == ("cuda", transport, backward)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_and_layout(comm, rule, layout):
    """Two of the sixteen ways for each pair of rule and layout, of which three ranks take one and four the other; the slow run has all."""
    number = 3 * RULES.index(rule) + 2 * LAYOUTS.index(layout)
    both = number % 16, (number + 5 + 8) % 16
    for way in {3: both[:1], 4: both[1:]}.get(comm.size, both):
        quickly(comm, rule, layout, *WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("dtype, backward, transport", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_layout_type_way_and_transport(comm, rule, layout, dtype, backward, transport):
    quickly(comm, rule, layout, dtype, backward, transport, rendezvous=True)


@pytest.mark.mpi(ranks=(3, 4))
@pytest.mark.parametrize("transport", ["staged", "direct"])
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_gradients_that_come_home_early(comm, backward, transport):
    """Some travellers end their way before others; their gradients, of many chunks, come home while the rest goes on."""
    cupy = gpu()
    length = 12 * comm.size
    p = problem(length, batch=1, heads=2, kv_heads=2, d=8, dv=8, dtype="float32")
    options = {"causal": True}
    more = {"layout": "contiguous", "backward": backward, "deadline": 15}
    with attention(comm, transport, 300, quick=True, rendezvous=True, **more, **options) as attn:
        check(run(cupy, attn, p), truth(p, options))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_tiles_are_counted(comm, backward, deterministic):
    """As the kernels walk over them, pair by pair; the host knows without asking the device."""
    cupy = gpu()
    length = 150 * comm.size + 7
    p = problem(length, batch=1, heads=2, kv_heads=1, d=8, dv=8, dtype="float32")
    for rule, layout in (("causal", "zigzag"), ("window", "contiguous"), ("documents", "explicit"), ("full", "striped")):
        options = rules(length, length, 2)[rule]
        more = {"layout": layout_of(layout, length, length, comm), "backward": backward, "deterministic": deterministic}
        with attention(comm, quick=True, **options, **more) as attn:
            q, k, v, dout = put(cupy, *shards(attn, p))
            out, lse = attn.forward(q, k, v)
            calls = {"forward": attn.stats}
            attn.backward(dout, q, k, v, out, lse)
            calls["backward"] = attn.stats
            (plan,) = attn._plans.values()
            for call, stats in calls.items():
                kernels = ["forward"] if call == "forward" else ["backward", "backward_queries"][: 1 + deterministic]
                counts = [pairs_of(plan, call, tiles.kernel(name, "80", "float32", 8, 8).tile) for name in kernels]
                assert stats.tiles == sum(seen for seen, _ in counts)
                assert stats.tiles + stats.tiles_skipped == sum(every for _, every in counts)
                assert rule != "full" or stats.tiles_skipped == 0


def pairs_of(plan, call, tile):
    """Pairs of tiles that this rank must compute, and all pairs; one by one, over two heads."""
    seen = every = 0
    travels = "kv" if call == "forward" else plan.travels
    for other in range(plan.size):
        a, b = (plan.rank, other) if travels == "kv" else (other, plan.rank)
        _, lo, hi = plan._intervals(a)
        pos = plan.where_k.positions(b)
        for i in range(0, len(lo), tile.queries):
            rows = np.flatnonzero(lo[i : i + tile.queries] < hi[i : i + tile.queries]) + i
            for j in range(0, len(pos), tile.keys):
                part = pos[j : j + tile.keys]
                every += 2
                seen += 2 * bool(len(rows) and part.max() >= lo[rows].min() and part.min() < hi[rows].max())
    return seen, every


# ---------------------------------------------------------------- when something goes wrong


def test_a_kernel_that_fails_on_one_rank(comm):
    """That rank raises what its GPU said, the others hear of it, and all can close."""
    simulation()
    cupy = gpu()
    p = problem(8 * comm.size, batch=1, heads=1, kv_heads=1, d=8, dv=8, dtype="float32")
    with attention(comm, "staged", 64, quick=True, deadline=20) as attn:
        q, k, v, _ = put(cupy, *shards(attn, p))
        attn.forward(q, k, v)
        cupy.cuda.Device().synchronize()
        (backend,) = attn._gpus.values()
        if comm.rank == comm.size - 1:

            def broken(*arrays, **options):
                raise RuntimeError("cudaErrorLaunchFailure: unspecified launch failure")

            backend.attend = broken
        kind, text = (RuntimeError, "launch failure") if comm.rank == comm.size - 1 else (PeerError, f"rank {comm.size - 1} stopped in")
        with pytest.raises(kind, match=text):
            attn.forward(q, k, v)
            attn.forward(q, k, v)  # a rank that needed nothing more hears of it now


@pytest.mark.mpi(min_size=2)
def test_memory_that_is_not_pinned_is_refused(comm, monkeypatch):
    """As CUDA would block, or race: the stand-in says so on the rank that did it."""
    simulation()
    cupy = gpu()
    p = problem(8 * comm.size, batch=1, heads=1, kv_heads=1, d=8, dv=8, dtype="float32")
    monkeypatch.setattr("burstmpi.backends.gpu.Gpu.pinned", lambda gpu, nbytes: np.empty(nbytes, np.uint8))
    with attention(comm, "staged", quick=True, deadline=20) as attn:
        q, k, v, _ = put(cupy, *shards(attn, p))
        with pytest.raises((ValueError, PeerError), match="is not pinned"):
            attn.forward(q, k, v)
