"""What the tests share: inputs, rules, a naive dense attention in any type, and tolerances derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import host_kit as kit
import ml_dtypes
import numpy as np
import pytest

from burstmpi.backends import BACKENDS, choose, reference
from burstmpi.layout import placement_of
from burstmpi.rules import Rules

TYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Problem:
    """Whole arrays of one attention; the same on every rank."""

    q: np.ndarray  # (batch, Nq, heads, d)
    k: np.ndarray  # (batch, Nk, kv_heads, d)
    v: np.ndarray  # (batch, Nk, kv_heads, dv)
    dout: np.ndarray  # (batch, Nq, heads, dv)


def problem(nq=13, nk=None, *, batch=2, heads=4, kv_heads=2, d=8, dv=6, dtype="float64", seed=0, spread=1.0) -> Problem:
    """Draw normal inputs; ``spread`` widens the logits."""
    rng = np.random.default_rng(seed)
    nk = nq if nk is None else nk
    draw = lambda *shape: rng.standard_normal(shape).astype(TYPES[dtype])  # noqa: E731
    q = (rng.standard_normal((batch, nq, heads, d)) * spread).astype(TYPES[dtype])
    return Problem(q, draw(batch, nk, kv_heads, d), draw(batch, nk, kv_heads, dv), draw(batch, nq, heads, dv))


def slopes(heads):
    """ALiBi's own slopes for a power of two, and something like them for other numbers."""
    return [2.0 ** (-8 * (h + 1) / heads) for h in range(heads)]


def cut(length, *shares):
    """Document boundaries at these shares of a length."""
    return [0, *sorted(round(length * share) for share in shares), length]


def rules(nq, nk, heads):
    """Every rule of the library and many of their combinations, by name, for these lengths."""
    docs = cut(nq, 0.2, 0.2, 0.55) if nq == nk else (cut(nq, 0.2, 0.2, 0.55), cut(nk, 0.1, 0.4, 0.9))
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (3, 2)},
        "left window, causal": {"window": (4, None), "causal": True},
        "right window": {"window": (None, 2)},
        "documents": {"documents": docs},
        "documents, causal, window": {"documents": docs, "causal": True, "window": (3, None)},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": slopes(heads)},
        "scale": {"scale": 0.7},
        "everything": {
            "causal": True,
            "window": (9, None),
            "documents": docs,
            "softcap": 2.0,
            "alibi_slopes": slopes(heads),
            "scale": 0.4,
        },
    }


RULES = tuple(rules(4, 4, 4))


def naive(p: Problem, options, work, stored=None, seed=None, wobble=0, factors=None):
    """Compute attention and its gradients densely in the type ``work``, straight from the textbook.

    Parameters
    ----------
    stored : the type in which out is kept between forward and backward; ``work`` where not given
    seed : sum over queries and keys in another order, drawn from this seed
    wobble : shake each input, and each lse that is kept on the way, by a random relative error of at most this
    factors : the type to which weights and their gradients are rounded before they are multiplied, as tensor cores want it

    Returns
    -------
    out, lse, dq, dk, dv, all in ``work``; nothing here is shared with the library but the mask's definition.
    """
    rule = Rules(**options)
    nq, nk = p.q.shape[1], p.k.shape[1]
    mask, at = reference.visible(rule, nq, nk)
    rng = np.random.default_rng(seed)
    i, j = (np.arange(n) if seed is None else rng.permutation(n) for n in (nq, nk))
    group = p.q.shape[2] // p.k.shape[2]
    shaken = lambda x: x.astype(work) * (1 + work(wobble) * rng.uniform(-1, 1, x.shape).astype(work))  # noqa: E731
    # (batch, rows, heads, c) → (batch, heads, rows, c), rows in the order of i and j
    q, dout = (shaken(x)[:, i].transpose(0, 2, 1, 3) for x in (p.q, p.dout))
    k, v = (np.repeat(shaken(x)[:, j], group, axis=2).transpose(0, 2, 1, 3) for x in (p.k, p.v))
    scale = work(q.shape[3] ** -0.5 if rule.scale is None else rule.scale)
    s, slope = scale * (q @ k.swapaxes(2, 3)), work(1)
    if rule.softcap is not None:
        t = np.tanh(s / work(rule.softcap))
        s, slope = work(rule.softcap) * t, work(1) - t * t
    if rule.alibi_slopes is not None:
        s = s - np.array(rule.alibi_slopes, work)[:, None, None] * np.abs(at[i][:, None] - j).astype(work)
    s = np.where(mask[np.ix_(i, j)], s, work(-np.inf))
    top = s.max(axis=-1, keepdims=True, initial=work(-np.inf))
    top = np.where(top == -np.inf, work(0), top)
    e = np.exp(s - top)
    total = e.sum(axis=-1, keepdims=True)
    w = e / np.where(total == 0, work(1), total)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    if wobble:
        # Keys may come in two blocks: the lse of each is kept, rounded, until they are put together.
        size = np.abs(np.where(lse == -np.inf, 0, lse))[..., None]
        shares = 1 + work(wobble) * size * rng.uniform(-1, 1, (*lse.shape, 2)).astype(work)
        w = w * shares[..., rng.integers(0, 2, nk)]
        w = w / np.where(total == 0, work(1), w.sum(axis=-1, keepdims=True))
    factor = lambda x: x if factors is None else x.astype(factors).astype(work)  # noqa: E731
    out = factor(w) @ v
    # Backward has what forward kept: out in the stored type, and lse, from which the weights come again.
    w = np.exp(s - np.where(lse == -np.inf, work(np.inf), shaken(lse))[..., None])
    delta = (dout * out.astype(stored or work).astype(work)).sum(axis=-1, keepdims=True)
    ds = factor(w * (dout @ v.swapaxes(2, 3) - delta) * slope) * scale
    results = out, ds @ k, ds.swapaxes(2, 3) @ q, factor(w).swapaxes(2, 3) @ dout
    back_i, back_j = np.argsort(i), np.argsort(j)
    out, dq, dk, dv = (x.transpose(0, 2, 1, 3)[:, o] for x, o in zip(results, (back_i, back_i, back_j, back_j)))
    fold = lambda x: x.reshape(*x.shape[:2], p.k.shape[2], group, x.shape[3]).sum(axis=3)  # noqa: E731
    return out, lse[:, :, back_i], dq, fold(dk), fold(dv)


NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Truth:
    """True results in a wider type, and the error that each result may have."""

    values: dict
    allowed: dict


def truth(p: Problem, options, tries=3, tensor_cores=False) -> Truth:
    """Derive truth and tolerances from naive runs.

    Parameters
    ----------
    tensor_cores : whether the narrow runs round weights and their gradients to the inputs' type before they are multiplied

    The truth is naive attention of the same inputs in float64 (in extended precision for float64 inputs).  How far a
    result may be off follows from two kinds of runs, a few of each: naive runs with the library's type of sums, in
    several orders of summation, and exact runs whose inputs and lse are shaken by one rounding, which tell how ill-conditioned
    the problem is (a naive run of a handful of numbers may be lucky).  Three times the worst of them is allowed.
    Where a result is a difference that cancels altogether (one key: dq = 0) all of them are lucky; there the rounding
    of its terms is allowed: dout . v for gradients, the maximum and the logarithm for lse.
    """
    dtype = p.q.dtype
    wide, narrow = (np.longdouble, np.float64) if dtype == np.float64 else (np.float64, np.float32)
    rounding = np.finfo(narrow).eps
    exact = naive(p, options, wide)
    factors = dtype if tensor_cores and dtype.itemsize == 2 else None
    runs = [naive(p, options, narrow, stored=dtype, seed=seed, factors=factors) for seed in range(tries)]
    runs += [naive(p, options, wide, seed=seed, wobble=rounding) for seed in range(tries)]
    terms = dict.fromkeys(NAMES, 0.0)
    # lse = m + ln(sum), which may cancel; the sum is at most the number of keys.
    terms["lse"] = np.abs(exact[1][np.isfinite(exact[1])]).max(initial=0) + np.log(max(p.k.shape[1], 1))
    if p.q.size and p.k.size:
        reach = lambda x: np.abs(x.astype(wide)).max()  # noqa: E731
        spread = reach(p.dout) * reach(p.v) * np.sqrt(p.v.shape[3]) * Rules(**options).scores(p.q.shape[3]).scale
        terms |= {"dq": spread * reach(p.k), "dk": spread * reach(p.q)}
    values, allowed = {}, {}
    for name, true, *near in zip(NAMES, exact, *runs):
        result = narrow if name == "lse" else dtype
        finite = np.isfinite(true)
        far = lambda x: np.abs(x[finite].astype(result).astype(wide) - true[finite]).max(initial=0)  # noqa: B023, E731
        error = max(map(far, near))
        size = np.abs(true[finite]).max(initial=0)
        floor = size * ml_dtypes.finfo(result).eps + terms[name] * rounding
        values[name] = true
        allowed[name] = float(max(3 * error, floor))
    return Truth(values, allowed)


def check(got: dict, expected: Truth) -> None:
    """Compare results with the truth; infinities must match, and NaN is never right."""
    for name, value in got.items():
        true = expected.values[name]
        assert value.shape == true.shape, f"{name}: shape {value.shape}, expected {true.shape}"
        value = value.astype(true.dtype)
        assert not np.isnan(value).any(), f"{name}: {np.isnan(value).sum()} NaN"
        infinite = np.isinf(true)
        assert (value[infinite] == true[infinite]).all(), f"{name}: wrong infinities"
        assert np.isfinite(value[~infinite]).all(), f"{name}: infinities that should not be"
        error = np.abs(value[~infinite] - true[~infinite]).max(initial=0)
        assert error <= expected.allowed[name], f"{name}: error {error:.3g}, allowed {expected.allowed[name]:.3g}"


def forced(name, monkeypatch) -> str:
    """A backend's name; host-isa is "host", with that instruction set forced, in plain C where the CPU lacks it.

    Skips where it cannot be had on this machine.
    """
    name, _, isa = name.partition("-")
    if isa:
        monkeypatch.setenv("BURSTMPI_ISA", isa)
        monkeypatch.setitem(BACKENDS, "host", partial(kit.backend_of, isa, threads=None))
    try:
        made = choose(name)
    except ValueError as error:
        pytest.skip(str(error))
    assert not isa or made.isa == isa
    return name


def shards(attn, p: Problem):
    """This rank's rows: q, k, v, dout; as ``attn.shard`` gives them, but with no message."""
    q, dout = (x[:, attn.positions(x.shape[1])] for x in (p.q, p.dout))
    k, v = (x[:, attn.positions(x.shape[1], side="keys")] for x in (p.k, p.v))
    return q, k, v, dout


def collect(attn, out, lse, dq, dk, dv) -> dict:
    """Put the results of all ranks together, in one exchange; ``attn.gather`` would take five."""
    ring = attn._ring
    mine = {"out": out, "lse": lse.swapaxes(1, 2), "dq": dq, "dk": dk, "dv": dv}
    everyone = ring.exchange(mine)
    whole = {}
    for name in mine:
        parts = [theirs[name] for theirs in everyone]
        layout = attn._layouts[name in ("dk", "dv")]
        where = placement_of(layout, [part.shape[1] for part in parts], name)
        whole[name] = np.empty((parts[0].shape[0], where.length, *parts[0].shape[2:]), parts[0].dtype)
        for rank, part in enumerate(parts):
            whole[name][:, where.positions(rank)] = part
    whole["lse"] = whole["lse"].swapaxes(1, 2)
    return whole


def run(attn, p: Problem) -> dict:
    """Run forward and backward on this rank's rows and gather all results."""
    q, k, v, dout = shards(attn, p)
    out, lse = attn.forward(q, k, v)
    return collect(attn, out, lse, *attn.backward(dout, q, k, v, out, lse))


def explicit(length, size, rank, seed=0):
    """Positions of one rank when all are dealt out at random, unevenly; the last of several ranks gets none."""
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, max(1, size - 1), length)
    order = rng.permutation(length)
    return order[owner[order] == rank]


LAYOUTS = ("contiguous", "zigzag", "striped", "explicit", "mixed")


def layout_of(name, nq, nk, comm):
    """A layout by its name in the tests."""
    if name == "mixed":
        return "striped", "zigzag"
    if name == "explicit":
        of_queries = explicit(nq, comm.size, comm.rank)
        return of_queries if nq == nk else (of_queries, explicit(nk, comm.size, comm.rank, seed=1))
    return name
