"""The ring on GPUs: rules × layouts × types × both backward ways × both transports, on the PTX machine or a GPU."""

from functools import cache
from itertools import product

import pytest
from gpu_kit import attention, check, gpu, run
from support import LAYOUTS, RULES, TYPES, layout_of, problem, rules, truth

pytestmark = pytest.mark.mpi(ranks=(1, 2, 3, 4))

LENGTH = 21


@cache
def case(rule, dtype, nk=LENGTH, d=8, dv=8):
    p = problem(LENGTH, nk, batch=1, heads=2, kv_heads=1, d=d, dv=dv, dtype=dtype, seed=nk)
    options = rules(LENGTH, nk, 2)[rule]
    return p, options, truth(p, options)


def with_kernels(comm, rule, layout, dtype, backward, transport, deterministic=False):
    """The library's own kernels, on the PTX machine or a GPU, as small as can be: there a kernel takes a second."""
    cupy = gpu()
    length = 7 * comm.size + 1
    p = problem(length, batch=1, heads=2, kv_heads=1, d=8, dv=8, dtype=dtype)
    options = rules(length, length, 2)[rule]
    more = {"layout": layout_of(layout, length, length, comm), "backward": backward, "deterministic": deterministic}
    with attention(comm, transport, stage=256, **options, **more) as attn:
        check(run(cupy, attn, p), truth(p, options))
        assert (attn.stats.backend, attn.stats.transport, attn.stats.travels) == ("cuda", transport, backward)


@pytest.mark.mpi(ranks=(1, 2))
@pytest.mark.parametrize(
    "rule, layout, dtype, backward, transport",
    [
        ("causal", "zigzag", "float32", "q", "staged"),
        ("everything", "explicit", "bfloat16", "kv", "direct"),
        ("window", "contiguous", "float64", "kv", "staged"),
    ],
)
def test_kernels_in_the_ring(comm, rule, layout, dtype, backward, transport):
    with_kernels(comm, rule, layout, dtype, backward, transport)


@pytest.mark.slow
@pytest.mark.mpi(ranks=(1, 2, 3, 4))
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("transport", ["staged", "direct"])
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rule, layout", [("causal", "zigzag"), ("everything", "explicit"), ("documents", "striped"), ("window", "mixed")])
def test_kernels_in_the_ring_with_every_type(comm, rule, layout, dtype, backward, transport, deterministic):
    with_kernels(comm, rule, layout, dtype, backward, transport, deterministic)


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
