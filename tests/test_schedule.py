"""The schedule, with neither MPI nor GPU: every visible pair is computed exactly once, and nothing is sent in vain."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burstmpi import schedule
from burstmpi.checks import LAYOUTS
from burstmpi.layout import check_explicit, place
from burstmpi.rules import Rules, sees


def way_of(guests, order=None):
    """The way of a whole matrix guests[rank, traveller], reduced as the ranks would."""
    size = len(guests)
    used = np.max([schedule.used_offsets(guests[r], r, order) for r in range(size)], axis=0)
    offsets = schedule.offsets_of(used)
    last = np.max([schedule.stops_of(guests[r], r, offsets, order) for r in range(size)], axis=0)
    return schedule.Way(offsets, tuple(last.tolist()), order)


def run(guests, order=None):
    """Play all ranks' steps in lockstep; check every message against its counterpart.

    Returns
    -------
    met : [rank, traveller] how often each was computed;  sent, returned : cargo and partial messages of each traveller
    """
    size = len(guests)
    way = way_of(guests, order)
    steps = [way.steps(r, guests[r]) for r in range(size)]
    assert len({len(s) for s in steps}) == 1
    here = list(range(size))  # whose parcel is where
    partial = {}  # (rank, traveller): ranks whose share is in it
    home = {t: {t} if guests[t][t] else set() for t in range(size)}
    met, sent, returned = np.zeros((size, size), int), [0] * size, [0] * size
    for index in range(len(way.offsets)):
        now = [steps[r][index] for r in range(size)]
        shares = {}
        for r, step in enumerate(now):
            assert step.index == index and step.guest in (here[r], None)
            if step.guest is None:
                assert not step.compute and step.send_to is None and step.partial_to is None
                continue
            met[r, step.guest] += step.compute
            if index > 0:
                before = partial.pop((r, step.guest)) if step.partial_from is not None else set()
                shares[r] = before | ({r} if step.compute else set())
            if step.send_to is not None:
                sent[step.guest] += 1
                taker = now[step.send_to]
                assert taker.receive_from == r and taker.next_guest == step.guest
        for r, step in enumerate(now):
            if step.receive_from is not None:
                assert now[step.receive_from].send_to == r and now[step.receive_from].guest == step.next_guest
            if step.partial_to is not None:
                returned[step.guest] += 1
                if step.partial_to == step.guest:
                    assert way.host_of_last_step(step.guest) == r
                    home[step.guest] |= shares[r]
                else:
                    taker = steps[step.partial_to][index + 1]
                    assert taker.partial_from == r and taker.guest == step.guest
                    partial[step.partial_to, step.guest] = shares[r]
        here = [step.next_guest for step in now]
    assert not partial, "a partial was sent and never taken"
    for t in range(size):
        assert home[t] == {r for r in range(size) if guests[r][t]}, "a share of a gradient was lost"
    return way, met, sent, returned


@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.booleans(), min_size=n * n, max_size=n * n)))
@settings(max_examples=300)
def test_any_needs_are_met_exactly_once(flat):
    size = round(len(flat) ** 0.5)
    guests = np.array(flat, np.uint8).reshape(size, size)
    way, met, sent, returned = run(guests)
    np.testing.assert_array_equal(met, guests)
    for t in range(size):
        # A traveller stops where it is needed last: nothing goes on that nobody needs.
        if way.last[t]:
            assert guests[way.host_of_last_step(t)][t]
        assert sent[t] == returned[t] == way.last[t]
    for offset in way.offsets[1:]:
        assert any(guests[(t + offset) % size][t] for t in range(size)), "a stop that nobody needs"


@st.composite
def worlds(draw):
    size = draw(st.integers(1, 7))
    nq, nk = draw(st.integers(0, 30)), draw(st.integers(0, 30))
    side = st.none() | st.integers(0, 12)
    options = {"causal": draw(st.booleans()), "window": draw(st.none() | st.tuples(side, side))}
    if nq == nk and draw(st.booleans()):
        options["documents"] = [0, *sorted(draw(st.lists(st.integers(0, nq), max_size=3))), nq]

    def layout(length):
        name = draw(st.sampled_from((*LAYOUTS, "explicit")))
        if name != "explicit":
            return place(name, length, size)
        owner = np.array(draw(st.lists(st.integers(0, size - 1), min_size=length, max_size=length)), int)
        order = np.array(draw(st.permutations(range(length))), int)
        return place(check_explicit([order[owner[order] == r] for r in range(size)]), length, size)

    return layout(nq), layout(nk), Rules(**options)


@given(worlds())
@settings(max_examples=400)
def test_every_visible_pair_is_computed_exactly_once(world):
    where_q, where_k, rules = world
    size, nq, nk = where_q.size, where_q.length, where_k.length
    intervals = [rules.intervals(where_q.positions(r), nq, nk) for r in range(size)]
    seen = np.array([[sees(lo, hi, where_k.positions(j)) for j in range(size)] for _, lo, hi in intervals], np.uint8)
    j = np.arange(nk)
    _, lo, hi = rules.intervals(np.arange(nq), nq, nk)
    visible = (lo[:, None] <= j) & (j < hi[:, None])
    for guests, queries_stay in ((seen, True), (seen.T, False)):
        _, met, _, _ = run(guests)
        count = np.zeros((nq, nk), int)
        for rank in range(size):
            for guest in range(size):
                q, k = (rank, guest) if queries_stay else (guest, rank)
                count[np.ix_(where_q.positions(q), where_k.positions(k))] += met[rank, guest]
        np.testing.assert_array_equal(count[visible], 1)
        assert count.max(initial=0) <= 1


def guests_of(layout, size, length, **options):
    where, rules = place(layout, length, size), Rules(**options)
    intervals = [rules.intervals(where.positions(r), length, length) for r in range(size)]
    return np.array([[sees(lo, hi, where.positions(j)) for j in range(size)] for _, lo, hi in intervals], np.uint8)


@pytest.mark.parametrize(
    "layout, options, offsets, last",
    [
        ("contiguous", {}, (0, 1, 2, 3, 4), (4, 4, 4, 4, 4)),
        ("zigzag", {"causal": True}, (0, 1, 2, 3, 4), (4, 4, 4, 4, 4)),
        # Later ranks need earlier keys: the block of rank t stops at the last rank.
        ("contiguous", {"causal": True}, (0, 1, 2, 3, 4), (4, 3, 2, 1, 0)),
        # A window into the past reaches the neighbour only, one into both directions both neighbours.
        ("contiguous", {"causal": True, "window": (3, None)}, (0, 1), (1, 1, 1, 1, 0)),
        ("contiguous", {"window": (3, 3)}, (0, 1, 4), (1, 2, 2, 2, 2)),
        ("contiguous", {"window": (0, 3)}, (0, 4), (0, 1, 1, 1, 1)),
        # Documents that are cut as the ranks are need no message at all.
        ("contiguous", {"documents": [0, 8, 16, 24, 32, 40]}, (0,), (0, 0, 0, 0, 0)),
        ("striped", {"window": (0, 0)}, (0,), (0, 0, 0, 0, 0)),
    ],
)
def test_what_is_not_needed_is_not_sent(layout, options, offsets, last):
    way = way_of(guests_of(layout, 5, 40, **options))
    assert way.offsets == offsets and way.last == last


def test_bytes_on_the_wire():
    way = way_of(np.ones((4, 4), np.uint8))
    assert way.bytes_on_wire([10] * 4) == 4 * 3 * 10
    assert way.bytes_on_wire([10] * 4, [7] * 4) == 4 * 3 * 17
