"""The oracle: dense attention in float64, forward and backward, written from the definitions.

``visible`` spells each rule out as a predicate on (query, key), without the intervals that the rest of the library
uses, so that one checks the other.  ``forward`` and ``backward`` take whole arrays on one process.  The class
``ReferenceBackend`` offers the ring's verbs on top of them, so that ``backend="reference"`` tells a wrong ring from
a wrong kernel.  Everything here is O(Nq · Nk) in memory.
"""

from __future__ import annotations

import numpy as np

from ..merge import merge
from ..rules import Rules, Scores
from .base import Work
from .numpy import NumpyBackend

__all__ = ["ReferenceBackend", "backward", "forward", "visible"]


def visible(rules: Rules, length_q: int, length_k: int):
    """Spell out who sees whom.

    Returns
    -------
    mask : (length_q, length_k) bool
    at : (length_q,) each query's position on the keys' axis
    """
    i, j = np.arange(length_q), np.arange(length_k)
    same = np.ones((length_q, length_k), bool)
    at = i + (length_k - length_q)
    if rules.documents is not None:
        of_queries, of_keys = rules.documents
        of_keys = of_keys or of_queries
        document_of = lambda n, b: np.array([max(d for d in range(len(b) - 1) if b[d] <= x) for x in range(n)], int)  # noqa: E731
        doc_q, doc_k = document_of(length_q, of_queries), document_of(length_k, of_keys)
        same = doc_q[:, None] == doc_k[None, :]
        at = np.array([x - of_queries[d + 1] + of_keys[d + 1] for x, d in zip(i, doc_q)], int)
    apart = j[None, :] - at[:, None]  # key minus query
    mask = same
    if rules.causal:
        mask = mask & (apart <= 0)
    if rules.window is not None:
        left, right = rules.window
        mask = mask & (left is None or apart >= -left) & (right is None or apart <= right)
    return mask, at


def _scores(q, k, scores: Scores, mask, at, pos):
    """Masked scores, (batch, heads, rows_q, rows_k), and the slope of the cap."""
    s = np.einsum("bihd,bjhd->bhij", q, _repeat(k, q)) * scores.scale
    slope = 1.0
    if scores.softcap is not None:
        tanh = np.tanh(s / scores.softcap)
        s, slope = scores.softcap * tanh, 1 - tanh**2
    if scores.slopes is not None:
        s = s - np.asarray(scores.slopes)[:, None, None] * np.abs(at[:, None] - pos[None, :])
    return np.where(mask, s, -np.inf), slope


def _repeat(k, q):
    return np.repeat(k, q.shape[2] // k.shape[2], axis=2)


def _fold(dk, kv_heads):
    """Sum the gradients of the query heads that share a key head."""
    batch, rows, heads, d = dk.shape
    return dk.reshape(batch, rows, kv_heads, heads // kv_heads, d).sum(axis=3)


def _sum(w, x, mask):
    """Σ_j w_ij x_j, (batch, rows_i, heads, c), to which hidden pairs add nothing, not even 0 · NaN."""
    strange = ~np.isfinite(x)
    total = np.einsum("bhij,bjhc->bihc", w, np.where(strange, 0, x))
    for j in np.flatnonzero(strange.any(axis=(0, 2, 3))):
        there = np.where(strange[:, j], x[:, j], 0)[:, None]  # (batch, 1, heads, c)
        total[:, mask[:, j]] += w[:, :, mask[:, j], j].swapaxes(1, 2)[..., None] * there
    return total


@np.errstate(all="ignore")  # weights that underflow are 0
def _attend(q, k, v, scores, mask, at, pos):
    """out (batch, rows_q, heads, dv) and lse (batch, heads, rows_q) of one block."""
    s, _ = _scores(q, k, scores, mask, at, pos)
    top = s.max(axis=3, initial=-np.inf)
    safe = np.where(np.isneginf(top), 0, top)
    p = np.exp(s - safe[..., None])
    total = p.sum(axis=3)
    out = _sum(p / np.where(total == 0, 1, total)[..., None], _repeat(v, q), mask)
    return out, safe + np.log(total)


@np.errstate(all="ignore")  # weights that underflow are 0
def _attend_backward(dout, q, k, v, lse, delta, scores, mask, at, pos):
    """dq, dk, dv of one block, from the final lse and delta."""
    s, slope = _scores(q, k, scores, mask, at, pos)
    p = np.where(mask, np.exp(s - np.where(np.isneginf(lse), np.inf, lse)[..., None]), 0)
    dp = np.einsum("bihc,bjhc->bhij", dout, _repeat(v, q))
    ds = np.where(mask, p * (dp - delta[..., None]) * slope * scores.scale, 0)
    dv = _sum(p.swapaxes(2, 3), dout, mask.T)
    dq = _sum(ds, _repeat(k, q), mask)
    dk = _sum(ds.swapaxes(2, 3), q, mask.T)
    return dq, _fold(dk, k.shape[2]), _fold(dv, k.shape[2])


def _float64(*arrays):
    return tuple(np.asarray(x).astype(np.float64) for x in arrays)


def forward(q, k, v, **options):
    """Compute attention of whole arrays, densely, in float64.

    Parameters
    ----------
    q : (batch, Nq, heads, d);  k : (batch, Nk, kv_heads, d);  v : (batch, Nk, kv_heads, dv)
    options : those of ``Rules``

    Returns
    -------
    out : (batch, Nq, heads, dv);  lse : (batch, heads, Nq), natural log
    """
    rules = Rules(**options)
    q, k, v = _float64(q, k, v)
    mask, at = visible(rules, q.shape[1], k.shape[1])
    return _attend(q, k, v, rules.scores(q.shape[3]), mask, at, np.arange(k.shape[1]))


def backward(dout, q, k, v, out, lse, **options):
    """Differentiate ``forward``: dq, dk, dv for a gradient dout of out."""
    rules = Rules(**options)
    dout, q, k, v, out, lse = _float64(dout, q, k, v, out, lse)
    mask, at = visible(rules, q.shape[1], k.shape[1])
    delta = np.einsum("bihc,bihc->bhi", dout, out)
    return _attend_backward(dout, q, k, v, lse, delta, rules.scores(q.shape[3]), mask, at, np.arange(k.shape[1]))


class ReferenceBackend(NumpyBackend):
    """The ring's verbs, each block dense in float64; memory and copies are NumPy's."""

    name = "reference"
    rounds_sums = False

    def scratch_bytes(self, dims, scores, rows_q, rows_k, backward) -> int:
        """None: dense arrays come and go."""
        return 0

    def tile_count(self, dims, positions_q, positions_k) -> int:
        """A block is one tile."""
        return int(len(positions_q) > 0 and len(positions_k) > 0)

    def _block(self, work: Work):
        sight = work.sight
        work.tally.tiles += 1
        mask = (sight.pos >= sight.lo[:, None]) & (sight.pos < sight.hi[:, None])
        return work.scores, mask, sight.at.astype(np.int64), sight.pos.astype(np.int64)

    def attend(self, q, k, v, out, lse, work: Work, *, first, final=None) -> None:
        """(out, lse) ← (out, lse) ⊕ attend(q, k, v)."""
        new = _attend(*_float64(q, k, v), *self._block(work))
        if not first:
            new = merge(*_float64(out, lse), *new)
        self.copy(out if final is None else final, new[0])
        self.copy(lse, new[1])
        work.progress()

    def attend_backward(self, dout, q, k, v, lse, delta, dq, dk, dv, work: Work, *, fresh_q, fresh_kv) -> None:
        """Add a block's share to dq, dk, dv."""
        shares = _attend_backward(*_float64(dout, q, k, v, lse, delta), *self._block(work))
        for target, share, fresh in zip((dq, dk, dv), shares, (fresh_q, fresh_kv, fresh_kv)):
            self.copy(target, share if fresh else target + share)
        work.progress()
