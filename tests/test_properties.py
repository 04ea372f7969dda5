"""Random shapes, rules, layouts and types through the ring, on the ranks of the run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LAYOUTS, TYPES, check, layout_of, problem, run, slopes, truth

from burstmpi import BurstAttention

pytestmark = pytest.mark.mpi


@st.composite
def attentions(draw):
    nq = draw(st.integers(0, 40))
    nk = draw(st.just(nq) | st.integers(0, 40))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = {
        "batch": draw(st.integers(1, 2)),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "d": draw(st.integers(1, 17)),
        "dv": draw(st.integers(1, 17)),
        "dtype": draw(st.sampled_from(list(TYPES))),
        "seed": draw(st.integers(0, 99)),
        "spread": draw(st.sampled_from([1.0, 5.0])),
    }
    side = st.none() | st.integers(0, 12)
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.tuples(side, side)),
        "softcap": draw(st.none() | st.sampled_from([0.5, 3.0])),
        "scale": draw(st.none() | st.sampled_from([0.1, 1.0])),
        "alibi_slopes": draw(st.none() | st.just(tuple(slopes(kv_heads * group)))),
    }
    if draw(st.booleans()):
        count = draw(st.integers(0, 3))
        inner = lambda n: sorted(draw(st.lists(st.integers(0, n), min_size=count, max_size=count)))  # noqa: E731
        options["documents"] = ([0, *inner(nq), nq], [0, *inner(nk), nk])
    options["backend"] = draw(st.sampled_from(["auto", "numpy"]))
    return nq, nk, shape, options, draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(["q", "kv", "auto"]))


def right(comm, case):
    nq, nk, shape, options, layout, backward = case
    p = problem(nq, nk, **shape)
    rules = {name: value for name, value in options.items() if name != "backend"}
    with BurstAttention(comm, layout=layout_of(layout, nq, nk, comm), backward=backward, **options) as attn:
        check(run(attn, p), truth(p, rules))


@given(case=attentions())
@settings(max_examples=60)
def test_any_attention(comm, case):
    right(comm, case)


@pytest.mark.slow
@given(case=attentions())
@settings(max_examples=1500)
def test_many_attentions(comm, case):
    right(comm, case)
