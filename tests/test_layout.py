"""Layouts: every row has one place, and lengths that contradict a layout are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstmpi import layout
from burstmpi.checks import LAYOUTS


@given(st.sampled_from(LAYOUTS), st.integers(0, 60), st.integers(1, 9))
def test_every_position_once(name, length, size):
    where = layout.place(name, length, size)
    parts = [where.positions(rank) for rank in range(size)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(length))
    assert where.rows == [len(part) for part in parts] and where.length == length and where.size == size
    assert max(where.rows) - min(where.rows) <= (2 if name == "zigzag" else 1)
    # Rows that ranks hold lead back to the same placement.
    assert layout.placement_of(name, where.rows, "keys") == where


def test_the_picture_in_the_text():
    pictures = {name: [layout.place(name, 8, 2).positions(r).tolist() for r in (0, 1)] for name in LAYOUTS}
    assert pictures == {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
    }


def test_positions_are_written_where_asked():
    out = np.full(4, -1, np.int32)
    for where in (layout.place("zigzag", 8, 2), layout.place(layout.check_explicit([[1, 0, 2, 7], [3, 4, 5, 6]]), 8, 2)):
        assert where.positions(0, out=out) is out
        np.testing.assert_array_equal(out, where.positions(0))


@given(st.sampled_from(LAYOUTS), st.integers(0, 60), st.integers(1, 9))
def test_named_layouts_ascend(name, length, size):
    """No rank's keys need sorting on a GPU, but for explicit ones."""
    assert layout.place(name, length, size).ascending == [True] * size


def test_explicit_positions_that_fall():
    given = [np.array(x, np.int32) for x in ([0, 1, 5, 6], [2, 4, 3, 7], [9, 8], [10], [])]
    assert layout.place(layout.check_explicit(given), 11, 5).ascending == [True, False, False, True, True]


def test_zigzag_balances_a_causal_mask():
    length, size = 64, 4
    where = layout.place("zigzag", length, size)
    work = [int((where.positions(rank) + 1).sum()) for rank in range(size)]
    assert len(set(work)) == 1


def test_contiguous_takes_any_cut():
    where = layout.placement_of("contiguous", [5, 0, 2], "queries")
    assert [where.positions(r).tolist() for r in range(3)] == [[0, 1, 2, 3, 4], [], [5, 6]]


@pytest.mark.parametrize(
    "name, rows, text",
    [
        ("striped", [3, 4], "keys: striped over 2 ranks of 7 rows puts 4 rows on rank 0, it has 3"),
        ("zigzag", [5, 2, 2], "keys: zigzag over 3 ranks of 9 rows puts 3 rows on rank 0, it has 5"),
    ],
)
def test_rows_that_contradict_the_layout(name, rows, text):
    with pytest.raises(ValueError, match=text):
        layout.placement_of(name, rows, "keys")


def test_rows_that_contradict_explicit_positions():
    given_positions = layout.check_explicit([np.array([0, 2]), np.array([1])])
    with pytest.raises(ValueError, match="queries: the layout's explicit vector puts 2 rows on rank 0, it has 1"):
        layout.placement_of(given_positions, [1, 2], "queries")
    with pytest.raises(ValueError, match="layout: explicit positions are 3, but there are 4 rows"):
        layout.place(given_positions, 4, 2)


@pytest.mark.parametrize(
    "positions, text",
    [
        ([[0, 1], [1]], "position 1 is held by rank 0 and by rank 1"),
        ([[0, 3], [1]], "rank 0 holds position 3, but all ranks together hold 3 rows"),
        ([[0], [2, 2]], "position 2 is held twice by rank 1"),
    ],
)
def test_explicit_positions_must_be_each_once(positions, text):
    with pytest.raises(ValueError, match=text):
        layout.check_explicit([np.array(p, np.int64) for p in positions])


def test_too_many_rows_for_int32():
    with pytest.raises(ValueError, match="queries: 2200000000 rows in all, positions go up to"):
        layout.placement_of("contiguous", [1_100_000_000] * 2, "queries")
