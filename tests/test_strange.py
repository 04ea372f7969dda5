"""NaN and infinities in the input reach the rows that see them, and no others."""

import host_kit as kit
import numpy as np
import pytest
from support import forced, problem, rules, run

from burstmpi import BurstAttention
from burstmpi.backends import reference
from burstmpi.backends.host import available
from burstmpi.rules import Rules

LENGTH = 22


def spoil(p, what, row, value):
    getattr(p, what)[:, row] = value
    return p


def reached(what, row, options):
    """Which rows of out and dq, and of dk and dv, may notice what is strange in one row."""
    mask, _ = reference.visible(Rules(**options), LENGTH, LENGTH)
    if what in ("k", "v"):
        queries = mask[:, row]
        keys = mask[queries].any(axis=0)  # through delta and the softmax of the queries that saw it
        keys[row] = True
    else:
        queries = np.arange(LENGTH) == row
        keys = mask[row]
    return queries, keys


def spoiled_rows(results):
    bad = {name: ~np.isfinite(x.astype(float)).all(axis=(0, 2, 3)) for name, x in results.items() if name != "lse"}
    return bad["out"] | bad["dq"], bad["dk"] | bad["dv"]


CASES = [(what, value) for what in ("q", "k", "v", "dout") for value in (np.nan, np.inf)]


@pytest.mark.parametrize("rule", ["window", "documents", "documents, causal, window", "causal"])
@pytest.mark.parametrize("what, value", CASES)
def test_reference(rule, what, value):
    options = rules(LENGTH, LENGTH, 4)[rule]
    clean, dirty = problem(LENGTH), spoil(problem(LENGTH), what, 9, value)
    queries, keys = reached(what, 9, options)
    got = []
    for p in (clean, dirty):
        with np.errstate(all="ignore"):
            out, lse = reference.forward(p.q, p.k, p.v, **options)
            dq, dk, dv = reference.backward(p.dout, p.q, p.k, p.v, out, lse, **options)
        got.append({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})
    bad_queries, bad_keys = spoiled_rows(got[1])
    assert bad_queries.any() or bad_keys.any()
    assert not (bad_queries & ~queries).any() and not (bad_keys & ~keys).any()
    for name, rows in (("out", ~queries), ("dq", ~queries), ("dk", ~keys), ("dv", ~keys)):
        np.testing.assert_array_equal(got[1][name][:, rows], got[0][name][:, rows])


def expected_of(p, options):
    with np.errstate(all="ignore"):
        out, lse = reference.forward(p.q, p.k, p.v, **options)
        dq, dk, dv = reference.backward(p.dout, p.q, p.k, p.v, out, lse, **options)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def same(got, expected, loose):
    """NaN and infinities where the reference has them, number by number, and all others as if nothing had happened."""
    for name, want in expected.items():
        assert got[name].shape == want.shape
        np.testing.assert_allclose(got[name], want, rtol=loose, atol=loose / 100, err_msg=name)


@pytest.mark.mpi(ranks=(1, 3))
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("layout, backend", [("zigzag", "auto"), ("striped", "auto"), ("zigzag", "numpy")])
@pytest.mark.parametrize("rule", ["window", "documents, causal, window"])
@pytest.mark.parametrize("what, value", CASES)
def test_ring(comm, rule, layout, what, value, backward, backend):
    options = rules(LENGTH, LENGTH, 4)[rule]
    dirty = spoil(problem(LENGTH), what, 9, value)
    with BurstAttention(comm, layout=layout, backward=backward, backend=backend, **options) as attn:
        same(run(attn, dirty), expected_of(dirty, options), 1e-10)


@pytest.mark.mpi(ranks=1)
@pytest.mark.parametrize(
    "backend", ["numpy", *(f"host-{isa}" for isa in available()), *(pytest.param(f"host-{isa}", marks=pytest.mark.slow) for isa in kit.plain())]
)
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("rule", ["window", "documents, causal, window", "everything"])
@pytest.mark.parametrize("what, value", [*CASES, ("q", -np.inf), ("k", -np.inf)])
def test_ring_of_float32(comm, rule, what, value, backward, backend, monkeypatch):
    options = rules(LENGTH, LENGTH, 4)[rule]
    dirty = spoil(problem(LENGTH, dtype="float32"), what, 9, value)
    with BurstAttention(comm, backward=backward, backend=forced(backend, monkeypatch), **options) as attn:
        same(run(attn, dirty), expected_of(dirty, options), 2e-4)


@pytest.mark.mpi(ranks=(1, 2))
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_the_callers_seterr_stops_no_rank(comm, backward):
    """Gradients beyond float16 become infinities, also where the caller lets NumPy raise on overflow."""
    x = np.full((1, 4, 1, 4), 6e4, np.float16)
    with BurstAttention(comm, layout="contiguous", backward=backward, deadline=20) as attn, np.errstate(all="raise"):
        out, lse = attn.forward(x, x, x)
        _, _, dv = attn.backward(x, x, x, x, out, lse)
    assert (out == x).all() and np.isfinite(lse).all() and not np.isnan(dv.astype(np.float32)).any()
    other = np.float16(6e4) * np.eye(4, dtype=np.float16)[None, :, None]  # one key takes the gradient of all queries
    with BurstAttention(comm, layout="contiguous", backward=backward, deadline=20) as attn, np.errstate(all="raise"):
        keys = other if comm.rank == 0 else other * 0
        one = np.zeros_like(x)
        one[..., 0] = 60
        out, lse = attn.forward(one, keys, x)
        _, _, dv = attn.backward(x, one, keys, x, out, lse)
    assert comm.rank or np.isinf(dv[0, 0]).all()
