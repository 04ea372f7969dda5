"""Tiled attention in NumPy: BLAS for the products, no array of size rows_q × rows_k ever.

A tile is ``heads of one group × query rows`` against ``key rows``: the query heads that share a key head are
stacked, so that grouped heads are one larger product and K and V are never repeated.

    for batch, key head, query tile:                    # Q·scale and the state come into scratch once
        for key tile that the rule does not hide:
            S = Qs Kᵀ → cap, ALiBi, mask where the tile is cut
            m' = max(m, rowmax S);  P = exp(S - m');  l = l e^{m-m'} + rowsum P;  O = O e^{m-m'} + P V
        O / l, m + ln l → state
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from math import prod

import numpy as np

from ..buffers import ALIGN, Blueprint
from ..rules import Scores
from .base import Dims, Work

__all__ = ["NumpyBackend"]

ROWS = 512  # rows of a score tile (query rows × heads of a group)
KEYS = 512  # keys of a score tile
LEAST = 16  # query rows that a tile has at least, however many heads share a key head


class NumpyBackend:
    """The verbs of ``base.Backend`` in NumPy."""

    name = "numpy"
    rounds_sums = False
    slack = ALIGN

    # ------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> np.ndarray:
        """Give nbytes bytes whose address is a multiple of ALIGN."""
        raw = np.empty(nbytes + self.slack if nbytes else 0, np.uint8)
        start = -raw.ctypes.data % ALIGN if nbytes else 0
        return raw[start : start + nbytes]

    def view(self, buffer, offset, shape, dtype):
        """See bytes of a buffer as an array."""
        dtype = np.dtype(dtype)
        size = prod(shape) * dtype.itemsize
        return buffer[offset : offset + size].view(dtype).reshape(shape)

    def prepare(self, dtype, backward):
        """Nothing is compiled."""

    def on(self):
        """There is nowhere else to be."""
        return nullcontext()

    call = on

    def empty(self, shape, dtype) -> np.ndarray:
        """Give a new array, aligned to ALIGN: NumPy's own start 16 bytes behind a line, and then every vector of a row lies in two."""
        return self.view(self.allocate(prod(shape) * np.dtype(dtype).itemsize), 0, shape, dtype)

    def indices(self, targets, fill, progress=None):
        """Write index vectors where they are wanted."""
        fill(*targets)
        return targets

    def copy(self, target, source) -> None:
        """target[...] = source, rounded once."""
        with np.errstate(all="ignore"):  # a gradient beyond float16 becomes an infinity, as in the kernels
            np.copyto(target, source, casting="unsafe")

    def clear(self, target, value=0.0) -> None:
        """target[...] = value."""
        target.fill(value)

    def add(self, target, source) -> None:
        """target += source."""
        with np.errstate(all="ignore"):
            np.add(target, source, out=target)

    def scratch_bytes(self, dims: Dims, scores: Scores, rows_q: int, rows_k: int, backward: bool) -> int:
        """Room for one tile of each kind."""
        return self._blueprint(dims, scores, rows_q, rows_k, backward).nbytes

    def tile_count(self, dims: Dims, positions_q, positions_k) -> int:
        """Pairs of tiles of a block with no mask, over batch and heads."""
        tile_q, tile_k = tile_shape(dims.heads // dims.kv_heads, len(positions_q), len(positions_k))
        return dims.batch * dims.heads * len(tile_starts(positions_q, tile_q)) * len(tile_starts(positions_k, tile_k))

    def _blueprint(self, dims: Dims, scores, rows_q, rows_k, backward) -> Blueprint:
        tile_q, tile_k = tile_shape(dims.heads // dims.kv_heads, rows_q, rows_k)
        rows = dims.heads // dims.kv_heads * tile_q
        acc = dims.accumulator
        plan = Blueprint()
        plan.add("s", (rows * tile_k,), acc)
        plan.add("hidden", (2 * tile_q * tile_k,), np.bool_)
        if scores.slopes is not None:
            plan.add("distance", (2 * tile_q * tile_k,), acc)
        plan.add("q", (rows * dims.d,), acc)
        plan.add("k", (tile_k * dims.d,), acc)
        plan.add("v", (tile_k * dims.dv,), acc)
        plan.add("wide", (rows * max(dims.d, dims.dv),), acc)
        plan.add("product", (max(rows, tile_k) * max(dims.d, dims.dv),), acc)
        if backward:
            plan.add("dp", (rows * tile_k,), acc)
            if scores.softcap is not None:
                plan.add("slope", (rows * tile_k,), acc)
            plan.add("dout", (rows * dims.dv,), acc)
        return plan

    # ------------------------------------------------------------ forward

    def attend(self, q, k, v, out, lse, work: Work, *, first, final=None) -> None:
        """(out, lse) ← (out, lse) ⊕ attend(q, k, v); see ``base.Backend.attend``."""
        target = out if final is None else final
        with np.errstate(all="ignore"):  # infinities and NaN of the input go where IEEE sends them
            for tile in _query_tiles(self, q, k, v, work, backward=False):
                b, rows, heads = tile.where
                m, total, acc = tile.m, tile.total, tile.take("wide", tile.rows, v.shape[3])
                if first:
                    m.fill(-np.inf)
                    total.fill(0)
                    acc.fill(0)
                else:
                    m[:] = lse[b, heads, rows].reshape(-1)
                    total[:] = m != -np.inf
                    acc.reshape(tile.group, -1, v.shape[3])[:] = out[b, rows, heads].swapaxes(0, 1)
                for keys in tile.key_tiles():
                    s = keys.scores()
                    top = np.maximum(m, s.max(axis=1))
                    safe = np.where(top == -np.inf, 0, top)  # -inf - -inf would be NaN
                    fade = np.exp(m - safe)
                    p = np.exp(np.subtract(s, safe[:, None], out=s), out=s)
                    total *= fade
                    total += p.sum(axis=1)
                    acc *= fade[:, None]
                    acc += keys.product(p, keys.values(), tile.take("product", tile.rows, v.shape[3]))
                    m[:] = top
                    work.progress()
                acc /= np.where(total == 0, 1, total)[:, None]
                lse[b, heads, rows] = (np.where(m == -np.inf, 0, m) + np.log(total)).reshape(tile.group, -1)
                target[b, rows, heads] = acc.reshape(tile.group, -1, v.shape[3]).swapaxes(0, 1)

    # ------------------------------------------------------------ backward

    def delta(self, dout, out, delta) -> None:
        """delta_i = Σ_c dout_ic out_ic."""
        acc = delta.dtype
        batch, length, heads, width = dout.shape
        few = max(1, (1 << 16) // (heads * width))  # rows at a time: temporaries stay small
        for b in range(batch):
            for start in range(0, length, few):
                rows = slice(start, start + few)
                # (rows, heads, dv) → (heads, rows)
                with np.errstate(all="ignore"):
                    product = dout[b, rows].astype(acc) * out[b, rows].astype(acc)
                    delta[b, :, rows] = product.sum(axis=2).T

    def attend_backward(self, dout, q, k, v, lse, delta, dq, dk, dv, work: Work, *, fresh_q, fresh_kv) -> None:
        """Add a block's share to dq, dk, dv; see ``base.Backend.attend_backward``."""
        d, width = q.shape[3], v.shape[3]
        if fresh_kv:
            dk.fill(0)
            dv.fill(0)
        with np.errstate(all="ignore"):
            for tile in _query_tiles(self, q, k, v, work, backward=True):
                b, rows, heads = tile.where
                dout_tile = tile.take("dout", tile.rows, width)
                dout_tile.reshape(tile.group, -1, width)[:] = dout[b, rows, heads].swapaxes(0, 1)
                row_lse = lse[b, heads, rows].reshape(-1)
                row_lse = np.where(row_lse == -np.inf, np.inf, row_lse)[:, None]  # such rows: P = exp(-inf) = 0
                row_delta = delta[b, heads, rows].reshape(-1, 1)
                total = tile.q.sum() + dout_tile.sum() + row_delta.sum()
                tile.strange = np.isnan(row_lse).any() or not np.isfinite(total)
                dq_tile = tile.take("wide", tile.rows, d)
                dq_tile.fill(0)
                for keys in tile.key_tiles():
                    s = keys.scores()
                    p = np.exp(np.subtract(s, row_lse, out=s), out=s)
                    into = keys.where
                    if keys.strange:
                        keys.hide(p, 0)
                    # out = P V  →  dV = Pᵀ dO,  dP = dO Vᵀ
                    dv[into] += keys.product(p.T, dout_tile, tile.take("product", keys.count, width))
                    dp = np.matmul(dout_tile, keys.values().T, out=tile.take("dp", tile.rows, keys.count))
                    # P = softmax(S)  →  dS = P ∘ (dP - delta)
                    dp -= row_delta
                    ds = np.multiply(p, dp, out=dp)
                    if work.scores.softcap is not None:
                        ds *= tile.take("slope", tile.rows, keys.count)
                    if keys.strange:
                        keys.hide(ds, 0)
                    # S = (scale Q) Kᵀ  →  dQ = scale dS K,  dK = dSᵀ (scale Q)
                    dq_tile += keys.product(ds, keys.keys(), tile.take("product", tile.rows, d))
                    dk[into] += keys.product(ds.T, tile.q, tile.take("product", keys.count, d))
                    work.progress()
                dq_tile *= work.scores.scale
                share = dq_tile.reshape(tile.group, -1, d).swapaxes(0, 1)
                if fresh_q:
                    dq[b, rows, heads] = share
                else:
                    dq[b, rows, heads] += share


# ---------------------------------------------------------------- tiles


def tile_shape(group: int, rows_q: int, rows_k: int) -> tuple[int, int]:
    """Query rows and keys of a tile: about ROWS × KEYS scores, heads of the group counted as rows."""
    return max(1, min(max(LEAST, ROWS // group), rows_q)), max(1, min(KEYS, rows_k))


def _query_tiles(backend, q, k, v, work, backward):
    """Walk over (batch, key head, query tile)."""
    batch, rows_q, heads, d = q.shape
    rows_k, kv_heads = k.shape[1:3]
    acc = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    dims = Dims(batch, heads, kv_heads, d, v.shape[3], q.dtype, acc)
    scratch = backend._blueprint(dims, work.scores, rows_q, rows_k, backward).views(backend, work.scratch)
    tile_q, tile_k = tile_shape(heads // kv_heads, rows_q, rows_k)
    cuts = _Cuts(work.sight, tile_q, tile_k)
    for b in range(batch):
        for head in range(kv_heads):
            for index in range(len(cuts.starts_q)):
                yield _QueryTile(q, k, v, work, scratch, cuts, b, head, index)


class _Cuts:
    """Which pairs of tiles are empty, full or cut: from the extremes of lo, hi and of the keys' positions."""

    def __init__(self, sight, tile_q, tile_k):
        self.starts_q, self.starts_k = tile_starts(sight.at, tile_q), tile_starts(sight.pos, tile_k)
        self.spans_q = _spans(self.starts_q, len(sight.at))
        self.spans_k = _spans(self.starts_k, len(sight.pos))
        if len(self.starts_q):
            self.lo_min, self.lo_max = _extremes(sight.lo, self.starts_q)
            self.hi_min, self.hi_max = _extremes(sight.hi, self.starts_q)
        if len(self.starts_k):
            self.pos_min, self.pos_max = _extremes(sight.pos, self.starts_k)

    def row(self, index):
        """For one query tile: the key tiles that it must compute, and whether each is full."""
        if not len(self.starts_k):
            return []
        visible = (self.pos_max >= self.lo_min[index]) & (self.pos_min < self.hi_max[index])
        full = (self.pos_min >= self.lo_max[index]) & (self.pos_max < self.hi_min[index])
        return [(int(j), bool(full[j])) for j in np.flatnonzero(visible)]


def tile_starts(positions, tile: int) -> np.ndarray:
    """Tell where tiles of at most ``tile`` rows begin: afresh where positions jump, so that none straddles two runs.

    A zigzag block is two runs far apart; a tile over both would look half visible to everybody.  Positions in no
    order at all jump everywhere: those are cut evenly.
    """
    jumps = np.flatnonzero(np.abs(np.diff(positions)) > tile) + 1
    if len(jumps) * 4 * LEAST > len(positions):
        jumps = jumps[:0]
    edges = [0, *jumps.tolist(), len(positions)]
    return np.concatenate([np.arange(a, b, tile) for a, b in zip(edges, edges[1:])])


def _spans(starts, length) -> list[slice]:
    edges = [*starts.tolist(), length]
    return [slice(a, b) for a, b in zip(edges, edges[1:])]


def _extremes(vector, starts):
    return np.minimum.reduceat(vector, starts), np.maximum.reduceat(vector, starts)


class _QueryTile:
    """Rows of one query tile: Q·scale in scratch, stacked over the heads of a group."""

    def __init__(self, q, k, v, work, scratch, cuts, b, head, index):
        self.k, self.v, self.work, self.scratch = k, v, work, scratch
        self.cuts, self.head, self.index = cuts, head, index
        self.group = q.shape[2] // k.shape[2]
        self.span = cuts.spans_q[index]
        self.where = (b, self.span, slice(head * self.group, (head + 1) * self.group))
        self.rows = self.group * (self.span.stop - self.span.start)
        self.q = self.take("q", self.rows, q.shape[3])
        # (rows, group, d) → (group, rows, d)
        stacked = self.q.reshape(self.group, -1, q.shape[3])
        np.copyto(stacked, q[self.where].swapaxes(0, 1), casting="unsafe")
        self.q *= self.q.dtype.type(work.scores.scale)
        self.strange = False  # NaN or infinities among what belongs to the queries
        self.m = np.empty(self.rows, self.q.dtype)
        self.total = np.empty(self.rows, self.q.dtype)

    def take(self, name, rows, columns):
        """A part of a scratch array as a contiguous matrix."""
        return self.scratch[name][: rows * columns].reshape(rows, columns)

    def key_tiles(self):
        """Walk over the key tiles that this query tile must see."""
        todo = self.cuts.row(self.index)
        self.work.tally.tiles += self.group * len(todo)
        for j, full in todo:
            yield _KeyTile(self, self.cuts.spans_k[j], full)


class _KeyTile:
    """One key tile as a query tile sees it."""

    def __init__(self, tile: _QueryTile, span: slice, full: bool):
        self.tile, self.span, self.full = tile, span, full
        self.count = span.stop - span.start
        self.where = (tile.where[0], self.span, tile.head)
        self._keys = None
        self.hidden = None  # (query rows, keys) bool, after scores(), where the tile is cut

    def _wide(self, source, name):
        """Rows of K or V in the accumulator's type: the caller's memory where BLAS can read it."""
        part = source[self.where]
        if part.dtype == self.tile.q.dtype and part.strides[1] == part.itemsize:
            return part
        target = self.tile.take(name, *part.shape)
        np.copyto(target, part, casting="unsafe")
        return target

    def keys(self):
        """K, (keys, d)."""
        if self._keys is None:
            self._keys = self._wide(self.tile.k, "k")
        return self._keys

    def values(self):
        """V, (keys, dv)."""
        return self._wide(self.tile.v, "v")

    def scores(self):
        """S, (rows, keys): product, cap, ALiBi, mask; forward and backward round alike, as it is the same code."""
        tile, scores, sight = self.tile, self.tile.work.scores, self.tile.work.sight
        s = np.matmul(tile.q, self.keys().T, out=tile.take("s", tile.rows, self.count))
        if scores.softcap is not None:
            cap = s.dtype.type(scores.softcap)
            np.tanh(np.divide(s, cap, out=s), out=s)
            if "slope" in tile.scratch:  # d cap(x)/dx = 1 - tanh², needed in backward
                slope = np.multiply(s, s, out=tile.take("slope", tile.rows, self.count))
                np.subtract(1, slope, out=slope)
            s *= cap
        if scores.slopes is None and self.full:
            return s
        stacked = s.reshape(tile.group, -1, self.count)
        pos = sight.pos[None, self.span]
        if scores.slopes is not None:
            distance, bias = tile.take("distance", 2 * stacked.shape[1], self.count).reshape(2, *stacked.shape[1:])
            np.abs(np.subtract(sight.at[tile.span, None], pos, out=distance, casting="unsafe"), out=distance)
            for row, head in enumerate(range(tile.head * tile.group, (tile.head + 1) * tile.group)):
                stacked[row] -= np.multiply(distance, s.dtype.type(scores.slopes[head]), out=bias)
        if not self.full:
            rows = stacked.shape[1]
            flags = tile.scratch["hidden"][: 2 * rows * self.count].reshape(2, rows, self.count)
            np.less(pos, sight.lo[tile.span, None], out=flags[0])
            np.greater_equal(pos, sight.hi[tile.span, None], out=flags[1])
            self.hidden = np.logical_or(flags[0], flags[1], out=flags[0])
            self.hide(s, -np.inf)
        return s

    def hide(self, s, value) -> None:
        """Put a value where a pair (row, key) is hidden."""
        if self.hidden is not None:
            np.copyto(s.reshape(self.tile.group, -1, self.count), value, where=self.hidden)

    def product(self, weights, x, out):
        """weights @ x, to which hidden pairs add nothing: their weight is 0, but 0 · NaN would be NaN.

        weights : (rows, keys), C-contiguous, and x : (keys, c); or the transpose of such, and x : (rows, c)
        """
        if not self.strange:
            return np.matmul(weights, x, out=out)
        visible = np.tile(~self.hidden, (self.tile.group, 1))
        visible = visible if weights.shape == visible.shape and weights.flags.c_contiguous else visible.T
        strange = np.flatnonzero(~np.isfinite(x).all(axis=1))
        clean = x.copy()
        clean[strange] = 0
        np.matmul(weights, clean, out=out)
        for j in strange:
            rows = visible[:, j]
            out[rows] += weights[rows, j, None] * x[j]
        return out

    @cached_property
    def strange(self) -> bool:
        """Whether NaN or infinities meet hidden pairs here; a sum that overflows counts, and costs time only."""
        if self.hidden is None:
            return False
        return self.tile.strange or not np.isfinite(self.keys().sum() + self.values().sum())
