"""The whole way, under MPI: rules × layouts × types × both backward ways, against dense attention.

Of the instruction sets that this CPU has, one rank runs them all, and more ranks the first, with a part for the others.  Those that
it lacks run in plain C, with -m slow.
BURSTMPI_ISA=portable ./mpi_run.sh test -n 1,2,3,4,7 tests/test_ring.py runs all of it by that one.
The matrix is whole on one rank and, by the compiled kernels, on two; elsewhere each rule, layout and way has half of the types (lengths), from
four ranks on a third, and ./mpi_run.sh test -n 1,2,3,4,7 -m "slow or not slow" tests/test_ring.py has them all.
"""

import os
from functools import cache
from itertools import product

import host_kit as kit
import numpy as np
import pytest
from mpi4py import MPI
from support import LAYOUTS, RULES, TYPES, check, collect, forced, layout_of, problem, rules, run, shards, truth

import burstmpi
from burstmpi import BurstAttention
from burstmpi.backends import choose
from burstmpi.backends.host import available

pytestmark = pytest.mark.mpi

LENGTH = 29

# The ring does not know who computes: one rank has every backend, two the compiled one and NumPy, more the default one.
ONE = bool(os.environ.get("BURSTMPI_ISA"))
OTHERS = () if ONE else tuple(f"host-{isa}" for isa in available()[1:])
PLAIN = () if ONE else tuple(f"host-{isa}" for isa in kit.plain())
BACKENDS = {1: ("host", *OTHERS, *PLAIN, "numpy"), 2: ("host", "numpy")}.get(MPI.COMM_WORLD.size, ("auto",))
ANY_OTHER = [*OTHERS, *(pytest.param(name, marks=pytest.mark.slow) for name in PLAIN)]


@pytest.fixture
def backend(request, monkeypatch):
    return forced(request.param, monkeypatch)


@cache
def case(rule, nk, dtype, **shape):
    p = problem(LENGTH, nk, dtype=dtype, seed=nk)
    options = rules(LENGTH, nk, 4)[rule]
    return p, options, truth(p, options)


def matrix(last):
    """Rules × layouts × ways × these × backends; what is not in the default run is slow."""
    size = MPI.COMM_WORLD.size
    share = 3 if size >= 4 else 2
    for (i, rule), (j, layout), (n, way), (m, x), backend in product(*map(enumerate, (RULES, LAYOUTS, ("q", "kv"), last)), BACKENDS):
        whole = size == 1 or (size == 2 and backend == "host")
        kept = (i + j + n + m + size // 2) % share == 1
        marks = () if (whole or kept) and backend not in PLAIN else pytest.mark.slow
        yield pytest.param(rule, layout, way, x, backend, marks=marks)


@pytest.mark.parametrize("rule, layout, backward, dtype, backend", list(matrix(TYPES)), indirect=["backend"])
def test_self_attention(comm, rule, layout, dtype, backward, backend):
    p, options, expected = case(rule, LENGTH, dtype)
    options = options | {"backend": backend, "backward": backward}
    with BurstAttention(comm, layout=layout_of(layout, LENGTH, LENGTH, comm), **options) as attn:
        check(run(attn, p), expected)
        assert attn.stats.travels == backward


@pytest.mark.parametrize("rule, layout, backward, nk, backend", list(matrix([12, 40])), indirect=["backend"])
def test_cross_attention(comm, rule, layout, nk, backward, backend):
    p, options, expected = case(rule, nk, "float64")
    options = options | {"backend": backend, "backward": backward}
    with BurstAttention(comm, layout=layout_of(layout, LENGTH, nk, comm), **options) as attn:
        check(run(attn, p), expected)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("backend", ANY_OTHER, indirect=True)
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rule, layout", [("full", "mixed"), ("causal", "zigzag"), ("everything", "striped")])
def test_other_instruction_sets(comm, rule, layout, dtype, backward, backend):
    p, options, expected = case(rule, LENGTH, dtype)
    with BurstAttention(comm, layout=layout_of(layout, LENGTH, LENGTH, comm), backend=backend, backward=backward, **options) as attn:
        check(run(attn, p), expected)


LONG = {"causal": True, "window": (250, 0), "documents": (0, 90, 400, 600)}


@cache
def long_case(dtype):
    p = problem(600, batch=1, dtype=dtype)
    return p, truth(p, LONG)


@pytest.mark.mpi(ranks=3)
@pytest.mark.parametrize("backend", ["host", *ANY_OTHER], indirect=True)
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_blocks_of_several_panels_and_tiles(comm, layout, dtype, backward, backend):
    """Of the kernels, that is: elsewhere a block is a part of one."""
    p, expected = long_case(dtype)
    with BurstAttention(comm, layout=layout, backend=backend, backward=backward, **LONG) as attn:
        check(run(attn, p), expected)


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_of_several_threads(comm, dtype, backward, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    p, expected = long_case(dtype)
    with BurstAttention(comm, backend="host", backward=backward, **LONG) as attn:
        check(run(attn, p), expected)
        assert attn._backend.threads == 2


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("rule", RULES)
def test_reference_backend(comm, rule, backward):
    p, options, expected = case(rule, LENGTH, "float32")
    with BurstAttention(comm, backend="reference", backward=backward, **options) as attn:
        check(run(attn, p), expected)
        assert attn.stats.backend == "reference"


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nq, nk", [(1, 1), (7, 7), (8, 8), (9, 9), (1, 30), (30, 1), (0, 5), (5, 0), (0, 0)])
def test_any_length_on_any_number_of_ranks(comm, nq, nk, layout, backward):
    p = problem(nq, nk, batch=1, heads=2, kv_heads=1, d=4, dv=4)
    with BurstAttention(comm, layout=layout_of(layout, nq, nk, comm), backward=backward, causal=True) as attn:
        check(run(attn, p), truth(p, {"causal": True}))


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("backend", ["host", *ANY_OTHER], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_ranks_that_differ_by_a_row(comm, backward, dtype, backend):
    """Kernels of the CPU take queries in groups of panels; one row more makes two smaller groups of a large one."""
    rows = comm.size * 24 * choose(backend)._unit(dtype).tile_rows + 1
    p = problem(rows, 20, batch=1, heads=16, kv_heads=16, d=4, dv=4, dtype=dtype)
    with BurstAttention(comm, layout="contiguous", backend=backend, backward=backward) as attn:
        check(run(attn, p), truth(p, {}))


@pytest.mark.mpi(ranks=8)
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_token_on_eight_ranks(comm, layout, backward):
    p = problem(1)
    with BurstAttention(comm, layout=layout_of(layout, 1, 1, comm), backward=backward) as attn:
        check(run(attn, p), truth(p, {}))


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("heads, kv_heads, d, dv", [(1, 1, 1, 1), (6, 2, 5, 9), (4, 1, 16, 3), (3, 3, 40, 40)])
def test_heads_and_head_dims(comm, heads, kv_heads, d, dv, backward):
    p = problem(17, batch=3, heads=heads, kv_heads=kv_heads, d=d, dv=dv, dtype="float32")
    with BurstAttention(comm, backward=backward, causal=True) as attn:
        check(run(attn, p), truth(p, {"causal": True}))


@pytest.mark.parametrize("spread", [8.0, 40.0, 200.0])
def test_wide_logits(comm, spread):
    p = problem(LENGTH, spread=spread, dtype="float32")
    with BurstAttention(comm, causal=True) as attn:
        check(run(attn, p), truth(p, {"causal": True}))


def test_contiguous_rows_as_the_program_holds_them(comm):
    """Rows cut unevenly by the caller, some ranks with none."""
    rows = [(5 * r + 3) % 7 if r % 3 != 1 else 0 for r in range(comm.size)]
    start, stop = sum(rows[: comm.rank]), sum(rows[: comm.rank + 1])
    p = problem(sum(rows))
    expected = truth(p, {"window": (4, 1)})
    with BurstAttention(comm, layout="contiguous", window=(4, 1)) as attn:
        q, k, v, dout = (x[:, start:stop] for x in (p.q, p.k, p.v, p.dout))
        out, lse = attn.forward(q, k, v)
        check(collect(attn, out, lse, *attn.backward(dout, q, k, v, out, lse)), expected)


def test_one_tile_after_another(comm, monkeypatch):
    """Tiles much smaller than a block: empty, full and cut ones, tails on both sides."""
    monkeypatch.setattr("burstmpi.backends.numpy.ROWS", 8)
    monkeypatch.setattr("burstmpi.backends.numpy.KEYS", 5)
    monkeypatch.setattr("burstmpi.backends.numpy.LEAST", 3)
    for rule, options in rules(101, 101, 6).items():
        p = problem(101, heads=6, kv_heads=2, dtype="float32")
        with BurstAttention(comm, layout="contiguous", backend="numpy", **options) as attn:
            q, k, v, dout = shards(attn, p)
            out, lse = attn.forward(q, k, v)
            tiles, skipped = attn.stats.tiles, attn.stats.tiles_skipped
            results = collect(attn, out, lse, *attn.backward(dout, q, k, v, out, lse))
        try:
            check(results, truth(p, options))
        except AssertionError as error:
            raise AssertionError(f"{rule}: {error}") from None
        total_tiles, total_skipped = comm.allreduce(tiles), comm.allreduce(skipped)
        if rule in ("full", "softcap", "alibi", "scale"):
            assert total_skipped == 0 and total_tiles > 0
        if rule == "window":
            assert total_skipped > 4 * total_tiles  # at most a few diagonals of tiles are computed


def test_functions(comm):
    p, options, expected = case("causal", LENGTH, "float64")
    with BurstAttention(comm, layout="striped", causal=True) as attn:
        q, k, v, dout = shards(attn, p)
        out, lse = burstmpi.forward(comm, q, k, v, layout="striped", causal=True)
        grads = burstmpi.backward(comm, dout, q, k, v, out, lse, layout="striped", causal=True, backward="kv")
        check(collect(attn, out, lse, *grads), expected)


def test_the_same_call_twice_gives_the_same_bits(comm):
    p, options, _ = case("everything", LENGTH, "float32")
    with BurstAttention(comm, **options) as attn, BurstAttention(comm, **options) as other:
        first, second, third = run(attn, p), run(attn, p), run(other, p)
    for name in first:
        assert first[name].tobytes() == second[name].tobytes() == third[name].tobytes(), name


def test_shapes_may_change_from_call_to_call(comm):
    with BurstAttention(comm, causal=True) as attn:
        for length, dtype in ((5, "float32"), (40, "float16"), (5, "float32"), (11, "float64"), (40, "float16")):
            p = problem(length, dtype=dtype)
            check(run(attn, p), truth(p, {"causal": True}))


def test_cuts_may_change_on_some_ranks_only(comm):
    """A rank that holds as many rows as before must not take its old plan where another rank holds more."""
    with BurstAttention(comm, layout="contiguous", causal=True, deadline=20) as attn:
        for last in (4, 6, 4, 0, 6):
            rows = [4] * (comm.size - 1) + [last]
            start, stop = sum(rows[: comm.rank]), sum(rows[: comm.rank + 1])
            p = problem(sum(rows))
            q, k, v, dout = (x[:, start:stop] for x in (p.q, p.k, p.v, p.dout))
            out, lse = attn.forward(q, k, v)
            check(collect(attn, out, lse, *attn.backward(dout, q, k, v, out, lse)), truth(p, {"causal": True}))


@pytest.mark.parametrize("backward", ["q", "kv"])
def test_finite_differences(comm, backward):
    """The loss sum(out * dout) along a random direction, through the ring."""
    p = problem(15, batch=1, seed=8)
    options = rules(15, 15, 4)["everything"]
    rng = np.random.default_rng(1)
    with BurstAttention(comm, backward=backward, **options) as attn:
        q, k, v, dout = shards(attn, p)
        out, lse = attn.forward(q, k, v)
        gradients = attn.backward(dout, q, k, v, out, lse)
        for which, gradient in enumerate(gradients):
            along = attn.shard(rng.standard_normal((p.q, p.k, p.v)[which].shape))
            losses = []
            for step in (1e-6, -1e-6):
                moved = [x + step * along if i == which else x for i, x in enumerate((q, k, v))]
                losses.append(comm.allreduce((attn.forward(*moved)[0] * dout).sum()))
            slope = (losses[0] - losses[1]) / 2e-6
            assert slope == pytest.approx(comm.allreduce((gradient * along).sum()), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("rule", ["full", "documents, causal, window", "alibi"])
def test_dot(comm, rule, backward):
    """out is linear in v: <out(v), dout> = <v, dv(dout)>, exactly but for rounding."""
    p, options, _ = case(rule, LENGTH, "float64")
    with BurstAttention(comm, backward=backward, **options) as attn:
        q, k, v, dout = shards(attn, p)
        out, lse = attn.forward(q, k, v)
        _, _, dv = attn.backward(dout, q, k, v, out, lse)
    forward_side, backward_side = comm.allreduce((out * dout).sum()), comm.allreduce((v * dv).sum())
    size = comm.allreduce(np.abs(out * dout).sum())
    assert abs(forward_side - backward_side) <= 50 * np.finfo(float).eps * size
