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
    """Two of the sixteen ways for each pair of rule and layout; the slow run has all."""
    number = 3 * RULES.index(rule) + 2 * LAYOUTS.index(layout)
    for way in (number % 16, (number + 5 + 8) % 16):
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
