"""merge: exact, commutative, associative, with a neutral element that never makes NaN."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstmpi import merge
from burstmpi.backends import reference


def parts(seed, cuts, n=9):
    """Attention of the same queries over disjoint sets of keys, and over all of them."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((2, 5, 3, 4)) * 3, rng.standard_normal((2, n, 3, 4)), rng.standard_normal((2, n, 3, 2))
    edges = [0, *sorted(cuts), n]
    return [reference.forward(q, k[:, a:b], v[:, a:b]) for a, b in zip(edges, edges[1:])], reference.forward(q, k, v)


@given(st.integers(0, 1000), st.lists(st.integers(0, 9), max_size=4), st.randoms())
def test_parts_merge_to_the_whole_in_any_order(seed, cuts, random):
    pieces, (out, lse) = parts(seed, cuts)
    random.shuffle(pieces)
    total = pieces[0]
    for piece in pieces[1:]:
        total = merge(*total, *piece)
    np.testing.assert_allclose(total[0], out, rtol=0, atol=1e-13)
    np.testing.assert_allclose(total[1], lse, rtol=1e-13)


def test_two_empty_states_stay_empty():
    out, lse = np.zeros((1, 2, 1, 3)), np.full((1, 1, 2), -np.inf)
    got = merge(out, lse, out, lse)
    assert (got[0] == 0).all() and (got[1] == -np.inf).all()


def test_far_apart_states_do_not_overflow():
    out = np.ones((1, 1, 1, 1), np.float32)
    lse = np.full((1, 1, 1), 1e4, np.float32)
    got = merge(out, lse, 2 * out, -lse)
    assert got[0].item() == 1 and got[1].item() == 1e4 and got[0].dtype == got[1].dtype == np.float32


def test_empty_rows_give_way_to_full_ones():
    out, lse = np.full((1, 1, 2, 1), 5.0), np.array([[[2.0], [-np.inf]]])
    other = np.full((1, 1, 2, 1), 7.0), np.array([[[-np.inf], [3.0]]])
    got = merge(out, lse, *other)
    assert got[0].ravel().tolist() == [5, 7] and got[1].ravel().tolist() == [2, 3]


def test_shapes_must_fit():
    out, lse = np.zeros((1, 2, 3, 4)), np.zeros((1, 3, 2))
    with pytest.raises(ValueError, match=r"lse_a: shape must be \(1, 3, 2\), got \(1, 2, 3\)"):
        merge(out, np.zeros((1, 2, 3)), out, lse)
    with pytest.raises(ValueError, match="out_b: shape must be"):
        merge(out, lse, out[:, :1], lse)
    with pytest.raises(TypeError, match="out_a: must be a NumPy array, got list"):
        merge(out.tolist(), lse, out, lse)


def test_what_an_empty_part_holds_makes_no_noise():
    """Under warnings that are errors, and floating point that is told to raise."""
    out, lse = np.ones((1, 1, 1, 2), np.float32), np.zeros((1, 1, 1), np.float32)
    with np.errstate(all="raise"):
        for other in (np.full_like(lse, -np.inf), lse - 1e4):
            got = merge(out, lse, np.full_like(out, np.inf), other)
            assert (got[0] == 1).all() and (got[1] == 0).all()


def test_whole_numbers_are_refused():
    out, lse = np.ones((1, 1, 1, 2)), np.zeros((1, 1, 1))
    with pytest.raises(TypeError, match="lse_b: dtype must be one of float64, .*, got dtype..int64"):
        merge(out, lse, out, lse.astype(np.int64))
