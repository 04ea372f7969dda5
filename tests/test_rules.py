"""Rules: intervals against the predicates that define them, and options that are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstmpi import boundaries
from burstmpi.backends import reference
from burstmpi.rules import Rules, sees


@st.composite
def lengths_and_options(draw):
    """(Nq, Nk, options) over all masks and their combinations."""
    nq, nk = draw(st.integers(0, 24)), draw(st.integers(0, 24))
    side = st.none() | st.integers(0, 30)
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.tuples(side, side)),
    }
    if draw(st.booleans()):
        count = draw(st.integers(0, 4))
        inner = lambda n: sorted(draw(st.lists(st.integers(0, n), min_size=count, max_size=count)))  # noqa: E731
        options["documents"] = ([0, *inner(nq), nq], [0, *inner(nk), nk])
    return nq, nk, options


@given(lengths_and_options())
def test_intervals_say_what_the_predicates_say(case):
    nq, nk, options = case
    rules = Rules(**options)
    at, lo, hi = rules.intervals(np.arange(nq), nq, nk)
    mask, expected_at = reference.visible(rules, nq, nk)
    j = np.arange(nk)
    np.testing.assert_array_equal((lo[:, None] <= j) & (j < hi[:, None]), mask)
    np.testing.assert_array_equal(at, expected_at)
    assert ((0 <= lo) & (lo <= hi) & (hi <= nk)).all()


@given(lengths_and_options(), st.integers(0, 2**32 - 1))
def test_sees_is_exact(case, seed):
    nq, nk, options = case
    rng = np.random.default_rng(seed)
    some = lambda n: rng.permutation(n)[: rng.integers(0, n + 1)]  # noqa: E731
    queries, keys = some(nq), some(nk).astype(np.int32)
    rules = Rules(**options)
    _, lo, hi = rules.intervals(queries, nq, nk)
    mask, _ = reference.visible(rules, nq, nk)
    assert sees(lo, hi, keys) == mask[np.ix_(queries, keys)].any()


def test_long_vectors_go_in_chunks(monkeypatch):
    rules = Rules(causal=True, window=(5, None), documents=[0, 40, 100])
    expected = rules.intervals(np.arange(100), 100, 100)
    monkeypatch.setattr("burstmpi.rules.CHUNK", 7)
    for got, want in zip(rules.intervals(np.arange(100), 100, 100), expected):
        np.testing.assert_array_equal(got, want)
    assert sees(expected[1], expected[2], np.array([99], np.int32))


def test_causal_is_aligned_at_the_end():
    mask, _ = reference.visible(Rules(causal=True), 2, 5)
    np.testing.assert_array_equal(mask, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    mask, _ = reference.visible(Rules(causal=True), 3, 2)
    np.testing.assert_array_equal(mask, [[0, 0], [1, 0], [1, 1]])


def test_an_open_window_reaches_past_int32():
    at, lo, hi = Rules(window=(2**62, 2**40)).intervals(np.arange(4), 4, 4)
    assert lo.tolist() == [0] * 4 and hi.tolist() == [4] * 4


@pytest.mark.parametrize(
    "ids, expected",
    [([5, 5, 2, 2, 2], (0, 2, 5)), ([1], (0, 1)), ([], (0,)), ([3, 1, 2], (0, 1, 2, 3)), ([7, 7, 7], (0, 3)), ([2**40, 2**40, -1], (0, 2, 3))],
)
def test_boundaries(ids, expected):
    assert boundaries(np.array(ids, int)) == expected


def test_boundaries_refuse_an_id_that_comes_back():
    with pytest.raises(ValueError, match="id 4 comes back"):
        boundaries([4, 4, 1, 4])


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"causal": 1}, TypeError, "causal: must be True or False, got 1"),
        ({"window": 3}, TypeError, r"window: must be a pair \(left, right\), got 3"),
        ({"window": (1, 2, 3)}, TypeError, "window: must be a pair"),
        ({"window": (1.5, 2)}, TypeError, r"window: each side must be a whole number or None, got \(1.5, 2\)"),
        ({"window": (True, 2)}, TypeError, "window: each side"),
        ({"window": (-1, 2)}, ValueError, r"window: each side must be 0 or more, got \(-1, 2\)"),
        ({"softcap": float("nan")}, ValueError, "softcap: must be finite and above 0, got nan"),
        ({"softcap": 0}, ValueError, "softcap: must be finite and above 0, got 0.0"),
        ({"softcap": 1e31}, ValueError, "softcap: must be from 1e-18 to 1e.30, got 1e.31"),
        ({"softcap": 9e-19}, ValueError, "softcap: must be from 1e-18 to 1e.30, got 9e-19"),
        ({"softcap": "30"}, TypeError, "softcap: must be a number or None, got '30'"),
        ({"scale": float("inf")}, ValueError, "scale: must be finite and above 0, got inf"),
        ({"scale": -1.0}, ValueError, "scale: must be finite and above 0, got -1.0"),
        ({"scale": True}, TypeError, "scale: must be a number"),
        ({"scale": 1e-31}, ValueError, "scale: must be from 1e-30 to 1e.30, got 1e-31"),
        ({"scale": 1e31}, ValueError, "scale: must be from 1e-30 to 1e.30, got 1e.31"),
        ({"scale": 1e30, "softcap": 1e-8}, ValueError, "scale: must be from 1e-37 to 1e37 times the softcap, got 1e.30 and a softcap of 1e-08"),
        ({"alibi_slopes": [0.5, -1e31]}, ValueError, "alibi_slopes: must be from -1e.30 to 1e.30, got -1e.31 among them"),
        ({"alibi_slopes": [0.5, float("nan")]}, ValueError, "alibi_slopes: must be finite, got nan"),
        ({"alibi_slopes": [[0.5]]}, ValueError, r"alibi_slopes: must have shape \(heads,\), got shape \(1, 1\)"),
        ({"alibi_slopes": "steep"}, TypeError, "alibi_slopes: must be a vector of numbers, got 'steep'"),
        ({"documents": [1, 5]}, ValueError, r"documents: boundaries start at 0, got \[1 5\]"),
        ({"documents": []}, ValueError, "documents: boundaries start at 0"),
        ({"documents": [0, 5, 3]}, ValueError, "documents: boundaries must not fall, got 5 before 3"),
        ({"documents": [0.0, 5.0]}, TypeError, "documents: must be whole numbers, got float64"),
        ({"documents": [[0, 5], [0, 2, 5]]}, ValueError, "documents: as many for the queries as for the keys, got 1 and 2"),
        ({"documents": [0, 2**40]}, ValueError, "documents: must be at most 2147483646, got 1099511627776"),
    ],
)
def test_wrong_options_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        Rules(**options)


def test_documents_must_fit_the_lengths():
    with pytest.raises(ValueError, match="documents: boundaries of the queries end at 5, but there are 6 queries"):
        Rules(documents=[0, 5]).check_lengths(6, 6)
    with pytest.raises(ValueError, match="documents: 5 queries and 7 keys need a pair"):
        Rules(documents=[0, 5]).check_lengths(5, 7)
    with pytest.raises(ValueError, match="documents: boundaries of the keys end at 8, but there are 7 keys"):
        Rules(documents=([0, 5], [0, 8])).check_lengths(5, 7)
    Rules(documents=([0, 5], [0, 7])).check_lengths(5, 7)


def test_rules_are_hashable_values():
    assert hash(Rules(causal=True, documents=[0, 3])) == hash(Rules(causal=True, documents=np.array([0, 3])))
    assert Rules(window=[1, None]) == Rules(window=(1, None)) != Rules(window=(1, 1))
