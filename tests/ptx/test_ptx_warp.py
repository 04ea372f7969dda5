"""shfl, vote, match, redux, elect, activemask, bar.warp, special registers."""

import numpy as np
import pytest
from ptxmachine.faults import Fault
from ptxsupport import evaluate, same

LANES = np.arange(32)
FULL = 0xFFFFFFFF


def shuffle(mode, b, c, lanes=32):
    """Work out shfl for each lane from the manual's pseudo-code: (source lane, predicate)."""
    out = []
    for lane in range(lanes):
        bval, cval, mask = b & 31, c & 31, c >> 8 & 31
        top, bottom = (lane & mask) | (cval & ~mask), lane & mask
        j, p = {
            "up": (lane - bval, lane - bval >= top),
            "down": (lane + bval, lane + bval <= top),
            "bfly": (lane ^ bval, lane ^ bval <= top),
            "idx": (bottom | (bval & ~mask), (bottom | (bval & ~mask)) <= top),
        }[mode]
        if mode == "bfly":
            p = (lane ^ bval) <= top
        out.append((j if p else lane, p))
    return [j for j, _ in out], [p for _, p in out]


@pytest.mark.parametrize(
    "mode,c",
    [
        ("up", 0),
        ("up", 0x1800),
        ("down", 31),
        ("down", 0x181F),
        ("bfly", 31),
        ("bfly", 0x1C1F),
        ("idx", 31),
        ("idx", 0x101F),
    ],
)
@pytest.mark.parametrize("b", (0, 1, 3, 16, 31))
def test_shfl(mode, c, b):
    source, valid = shuffle(mode, b, c)
    value = np.arange(100, 132, dtype=np.uint32)
    out = evaluate(
        "shfl.sync.%s.b32 %%d|%%p, %%a, %d, %d, -1;" % (mode, b, c),
        {"a": ("u32", value)},
        {"d": "u32", "p": "pred"},
    )
    same(out["d"], value[source])
    same(out["p"], np.array(valid))
    got = evaluate(
        "shfl.sync.%s.b32 %%d, %%a, %%b, %%c, %%m;" % mode,
        {"a": ("u32", value), "b": ("u32", [b]), "c": ("u32", [c]), "m": ("u32", [FULL])},
        {"d": "u32"},
    )
    same(got, value[source])


def test_shfl_idx_by_lane_and_two_warps():
    value = np.arange(64, dtype=np.uint32)
    got = evaluate(
        "shfl.sync.idx.b32 %d, %a, %b, 31, -1;",
        {"a": ("u32", value), "b": ("u32", 31 - value % 32)},
        {"d": "u32"},
    )
    same(got, value.reshape(2, 32)[:, ::-1].ravel())


def test_vote():
    p = np.zeros(64, bool)
    p[[1, 5, 31]] = True
    p[32:] = True
    ins = {"p": ("pred", p)}
    same(
        evaluate("vote.sync.ballot.b32 %d, %p, -1;", ins, {"d": "u32"}),
        np.repeat(np.array([1 << 1 | 1 << 5 | 1 << 31, FULL], np.uint32), 32),
    )
    same(evaluate("vote.sync.any.pred %d, %p, -1;", ins, {"d": "pred"}), np.ones(64, bool))
    same(evaluate("vote.sync.all.pred %d, %p, -1;", ins, {"d": "pred"}), np.repeat([False, True], 32))
    same(evaluate("vote.sync.all.pred %d, !%p, -1;", ins, {"d": "pred"}), np.zeros(64, bool))
    same(evaluate("vote.sync.uni.pred %d, %p, -1;", ins, {"d": "pred"}), np.repeat([False, True], 32))


def test_member_masks_split_a_warp():
    """Two halves of a warp vote apart, in different branches."""
    code = """.reg .pred %lo; .reg .b32 %l; mov.u32 %l, %laneid; setp.lt.u32 %lo, %l, 16; mov.u32 %d, 0;
              @%lo bra LOW; vote.sync.ballot.b32 %d, %p, 0xFFFF0000; bra DONE;
              LOW: vote.sync.ballot.b32 %d, %p, 0x0000FFFF; DONE: bar.warp.sync -1; activemask.b32 %e;"""
    out = evaluate(code, {"p": ("pred", LANES % 2)}, {"d": "u32", "e": "u32"})
    same(out["d"], np.where(LANES < 16, 0x0000AAAA, 0xAAAA0000).astype(np.uint32))
    same(out["e"], np.full(32, FULL, np.uint32))


def test_match_redux_elect():
    a = np.array([1, 2] * 16, np.uint32)
    same(
        evaluate("match.any.sync.b32 %d, %a, -1;", {"a": ("u32", a)}, {"d": "u32"}),
        np.array([0x55555555, 0xAAAAAAAA] * 16, np.uint32),
    )
    out = evaluate(
        "match.all.sync.b32 %d|%p, %a, -1;", {"a": ("u32", np.repeat([7, 8], 32))}, {"d": "u32", "p": "pred"}
    )
    same(out["d"], np.full(64, FULL, np.uint32))
    assert out["p"].all()
    out = evaluate("match.all.sync.b32 %d|%p, %a, -1;", {"a": ("u32", a)}, {"d": "u32", "p": "pred"})
    assert not out["p"].any() and not out["d"].any()
    for op, expected in (("add", np.int32(LANES.sum() - 64)), ("min", np.int32(-2)), ("max", np.int32(29))):
        same(
            evaluate("redux.sync.%s.s32 %%d, %%a, -1;" % op, {"a": ("s32", LANES - 2)}, {"d": "s32"}),
            np.full(32, expected),
        )
    same(
        evaluate("redux.sync.or.b32 %d, %a, -1;", {"a": ("b32", 1 << (LANES % 4))}, {"d": "u32"}),
        np.full(32, 15, np.uint32),
    )
    same(
        evaluate("redux.sync.and.b32 %d, %a, -1;", {"a": ("b32", 7 | LANES << 4)}, {"d": "u32"}),
        np.full(32, 7, np.uint32),
    )
    same(
        evaluate("redux.sync.xor.b32 %d, %a, -1;", {"a": ("b32", LANES)}, {"d": "u32"}), np.zeros(32, np.uint32)
    )
    out = evaluate("elect.sync %d|%p, 0xFFFFFFFF;", {"a": ("u32", a)}, {"d": "u32", "p": "pred"})
    same(out["p"], LANES == 0)
    assert not out["d"].any()


def test_special_registers():
    code = "mov.u32 %d, %laneid; mov.u32 %e, %warpid; mov.u32 %f, %ntid.x; mov.u32 %g, %lanemask_lt; mov.u32 %h, %lanemask_ge; mov.u32 %i, %nctaid.x; mov.u32 %j, %lanemask_le; mov.u32 %k, %lanemask_gt; mov.u32 %l, %lanemask_eq;"
    out = evaluate(code, {"a": ("u32", np.zeros(64))}, dict.fromkeys("defghijkl", "u32"))
    lane = np.arange(64) % 32
    same(out["d"], lane.astype(np.uint32))
    same(out["e"], (np.arange(64) // 32).astype(np.uint32))
    same(out["f"], np.full(64, 64, np.uint32))
    same(out["g"], ((1 << lane) - 1).astype(np.uint32))
    same(out["h"], (FULL ^ ((1 << lane) - 1)).astype(np.uint32))
    same(out["i"], np.ones(64, np.uint32))
    same(out["j"], ((2 << lane) - 1).astype(np.uint32))
    same(out["k"], (FULL ^ ((2 << lane) - 1)).astype(np.uint32))
    same(out["l"], (1 << lane).astype(np.uint32))


# --- missing lanes --------------------------------------------------------------------------------
def test_shuffle_with_missing_lanes():
    code = ".reg .pred %q; setp.lt.u32 %q, %a, 16; mov.u32 %d, 0; @!%q bra END; shfl.sync.bfly.b32 %d, %a, 1, 31, -1; END:"
    with pytest.raises(Fault, match="missing lanes") as caught:
        evaluate(code, {"a": ("u32", LANES)}, {"d": "u32"})
    assert "0x0000ffff" in str(caught.value)


def test_shuffle_reads_a_lane_outside_its_mask():
    code = ".reg .pred %q; setp.lt.u32 %q, %a, 16; mov.u32 %d, 0; @!%q bra END; shfl.sync.bfly.b32 %d, %a, 16, 31, 0xFFFF; END:"
    with pytest.raises(Fault, match="reads lane 16"):
        evaluate(code, {"a": ("u32", LANES)}, {"d": "u32"})


def test_lane_outside_its_own_mask():
    with pytest.raises(Fault, match="not in its own member mask"):
        evaluate("vote.sync.any.pred %d, %p, 0xFFFF;", {"p": ("pred", LANES)}, {"d": "pred"})


def test_exited_lanes_are_missing():
    code = ".reg .pred %q; setp.ge.u32 %q, %a, 31; @%q exit; bar.warp.sync -1; mov.u32 %d, 1;"
    with pytest.raises(Fault, match=r"missing lanes.*exited: 0x80000000"):
        evaluate(code, {"a": ("u32", LANES)}, {"d": "u32"})


def test_lanes_that_come_late_are_waited_for():
    """The cold branch lies behind the code that shuffles: half the warp comes late, nothing is missing."""
    code = """.reg .pred %q; .reg .b32 %v; mov.u32 %v, %a; setp.lt.u32 %q, %a, 16; @%q bra COLD;
              BACK: shfl.sync.bfly.b32 %d, %v, 16, 31, -1; bra END;
              COLD: add.u32 %v, %v, 100; bra BACK; END:"""
    got = evaluate(code, {"a": ("u32", LANES)}, {"d": "u32"})
    value = np.where(LANES < 16, LANES + 100, LANES)
    same(got, value[LANES ^ 16].astype(np.uint32))


# --- masks that differ inside of a warp -----------------------------------------------------------
HALVES = np.where(LANES < 16, 0xFFFF, 0xFFFF0000).astype(np.uint32)  # as tiles of 16 lanes use them


def test_each_half_of_a_warp_votes_for_itself():
    odd = (LANES % 2 == 1).astype(np.uint32)
    inputs = {"p": ("pred", np.where(LANES < 16, odd, 1)), "m": ("u32", HALVES)}
    same(
        evaluate("vote.sync.ballot.b32 %d, %p, %m;", inputs, {"d": "u32"}),
        HALVES & np.where(LANES < 16, 0xAAAA, FULL),
    )
    same(evaluate("vote.sync.all.pred %d, %p, %m;", inputs, {"d": "pred"}), LANES >= 16)
    same(evaluate("vote.sync.uni.pred %d, %p, %m;", inputs, {"d": "pred"}), LANES >= 16)
    inputs["p"] = ("pred", LANES == 3)
    same(evaluate("vote.sync.any.pred %d, %p, %m;", inputs, {"d": "pred"}), LANES < 16)


def test_each_half_of_a_warp_reduces_matches_and_elects_for_itself():
    inputs = {"a": ("u32", LANES), "m": ("u32", HALVES), "z": ("u32", np.where(LANES < 16, LANES * 0, LANES))}
    low = LANES < 16
    for op, halves in (("add", (120, 376)), ("max", (15, 31)), ("min", (0, 16))):
        got = evaluate("redux.sync.%s.u32 %%d, %%a, %%m;" % op, inputs, {"d": "u32"})
        same(got, np.where(low, *halves).astype(np.uint32))
    got = evaluate("match.any.sync.b32 %d, %z, %m;", {**inputs, "z": ("u32", LANES * 0)}, {"d": "u32"})
    same(got, HALVES)
    out = evaluate("match.all.sync.b32 %d|%p, %z, %m;", inputs, {"d": "u32", "p": "pred"})
    same(out["d"], np.where(low, 0xFFFF, 0).astype(np.uint32))
    same(out["p"], low)
    out = evaluate("elect.sync %d|%p, %m;", inputs, {"d": "u32", "p": "pred"})
    same(out["d"], np.where(low, 0, 16).astype(np.uint32))
    same(out["p"], (LANES == 0) | (LANES == 16))


def test_shuffle_between_halves_with_masks_of_their_own():
    inputs = {"a": ("u32", LANES), "m": ("u32", HALVES)}
    same(evaluate("shfl.sync.bfly.b32 %d, %a, 8, 31, %m;", inputs, {"d": "u32"}), (LANES ^ 8).astype(np.uint32))
    with pytest.raises(Fault, match="reads lane 16, which does not take part"):
        evaluate("shfl.sync.bfly.b32 %d, %a, 16, 31, %m;", inputs, {"d": "u32"})


def test_masks_that_name_each_other_must_agree():
    masks = np.where(LANES < 16, FULL, 0xFFFF0000).astype(np.uint32)
    with pytest.raises(Fault, match="lane 0 names lane 16 in mask 0xffffffff, which has mask 0xffff0000"):
        evaluate("vote.sync.any.pred %d, %p, %m;", {"p": ("pred", LANES), "m": ("u32", masks)}, {"d": "pred"})
