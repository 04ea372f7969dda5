"""What a pair (query, key) may do: visibility and scores, on global positions.

Every mask is an *interval of keys per query*: the query at global position ``i`` sees the keys at global
positions ``lo[i] <= j < hi[i]``.  ``Rules.intervals`` turns the caller's options into these two vectors and
nothing below this module knows more about masks.  With ``i' = i + (Nk - Nq)``, the query's position on the
keys' axis (aligned at the end; within each document where documents are given)::

    full        [0, Nk)
    causal      [0, i' + 1)
    window      [i' - left, i' + right + 1)
    documents   [first key of i's document, its end)

and a combination is the intersection, one interval again.  A score is

    s_ij = cap(scale * q_i . k_j) - slope * abs(i' - j),     cap(x) = softcap * tanh(x / softcap)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from . import checks

__all__ = ["Rules", "Scores", "Sight", "boundaries", "sees"]

CHUNK = 1 << 12  # rows of index arithmetic at a time: larger temporaries are pages of their own, mapped and cleared each time (5 times as slow)


@dataclass(frozen=True)
class Scores:
    """How a raw product q.k becomes a score; what a kernel gets beside a ``Sight``."""

    scale: float
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None  # (heads,), one ALiBi slope a query head


@dataclass
class Sight:
    """What the rows of one block of queries may see of one block of keys.

    The pair (i, j) is visible where ``lo[i] <= pos[j] < hi[i]``; ALiBi uses ``abs(at[i] - pos[j])``.
    """

    at: np.ndarray  # [rows_q] int32, the query's position on the keys' axis
    lo: np.ndarray  # [rows_q] int32
    hi: np.ndarray  # [rows_q] int32
    pos: np.ndarray  # [rows_k] int32, global positions of the keys
    ascending: bool = False  # whether pos is known never to fall: a GPU need not sort the keys then


@dataclass(frozen=True)
class Rules:
    """The caller's options, checked, frozen and hashable.

    Parameters
    ----------
    causal : bool
        Key j is seen by query i only where j <= i'.
    window : (left, right) or None
        Key j is seen by query i only where -left <= j - i' <= right; None on a side leaves it open.
    documents : boundaries 0 = b0 <= b1 <= ... = N, or a pair (of queries, of keys), or None
        Queries see keys of their own document only.
    softcap : float or None
    alibi_slopes : (heads,) floats or None
    scale : float or None
        None stands for head_dim ** -0.5.

    Raises
    ------
    TypeError, ValueError
        With the option's name and value.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: object = field(default=None, repr=False)  # None or (boundaries of queries, of keys or None)
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    scale: float | None = None
    _edges: object = field(init=False, default=None, repr=False, compare=False)  # of documents, as arrays

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen)
        put("causal", checks.flag("causal", self.causal))
        put("window", checks.window(self.window))
        put("documents", checks.documents(self.documents))
        put("softcap", checks.softcap(self.softcap))
        put("alibi_slopes", checks.slopes(self.alibi_slopes))
        put("scale", checks.scale(self.scale, self.softcap))
        put("_edges", None if self.documents is None else _pair(*(b if b is None else np.asarray(b) for b in self.documents)))

    def describe(self) -> dict:
        """Options as short, comparable values: ranks compare these before the first message."""
        return {
            "causal": self.causal,
            "window": self.window,
            "documents": self.documents,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "scale": self.scale,
        }

    def scores(self, head_dim: int) -> Scores:
        """What a kernel needs to know of scores, for this head dim."""
        scale = head_dim**-0.5 if self.scale is None else self.scale
        return Scores(scale, self.softcap, self.alibi_slopes)

    def check_lengths(self, length_q: int, length_k: int) -> None:
        """Refuse documents that do not end where the sequences end."""
        checks.document_lengths(self.documents, length_q, length_k)

    def intervals(self, positions, length_q: int, length_k: int, at=None, lo=None, hi=None):
        """Turn the global positions of some queries into the keys that each may see.

        Parameters
        ----------
        positions : [rows] int, global positions of queries
        length_q, length_k : the whole numbers of queries and keys
        at, lo, hi : [rows] int32, written; allocated where not given

        Returns
        -------
        at, lo, hi : [rows] int32, with 0 <= lo <= hi <= length_k
        """
        rows = len(positions)
        at, lo, hi = (np.empty(rows, np.int32) if x is None else x for x in (at, lo, hi))
        for start in range(0, rows, CHUNK):
            part = slice(start, min(start + CHUNK, rows))
            at[part], lo[part], hi[part] = self._intervals(positions[part], length_q, length_k)
        return at, lo, hi

    def _intervals(self, positions, length_q, length_k):
        i = np.asarray(positions, np.int64)
        if self.documents is None:
            first, end, aligned = np.zeros_like(i), np.full_like(i, length_k), i + (length_k - length_q)
        else:
            of_queries, of_keys = self._edges
            doc = np.searchsorted(of_queries, i, side="right") - 1
            first, end = of_keys[doc], of_keys[doc + 1]
            aligned = i + (end - of_queries[doc + 1])
        lo, hi = first, end
        if self.causal:
            hi = np.minimum(hi, aligned + 1)
        if self.window is not None:
            left, right = self.window
            if left is not None:
                lo = np.maximum(lo, aligned - left)
            if right is not None:
                hi = np.minimum(hi, aligned + right + 1)
        lo = np.clip(lo, 0, length_k)
        return aligned, lo, np.clip(hi, lo, length_k)


def _pair(of_queries, of_keys):
    """Boundaries of queries and of keys: the same ones in self-attention."""
    return of_queries, (of_queries if of_keys is None else of_keys)


def boundaries(ids) -> tuple[int, ...]:
    """Turn a document id per token into boundaries for ``documents=``.

    Parameters
    ----------
    ids : (N,) integers, equal ids adjacent: [5, 5, 2, 2, 2] are two documents

    Returns
    -------
    (0, b1, ..., N) : [5, 5, 2, 2, 2] gives (0, 2, 5)

    Raises
    ------
    ValueError
        An id comes back after another one: a document is one run of tokens.
    """
    ids = checks.integer_vector("ids", ids, most=2**63 - 1)
    edges = np.flatnonzero(ids[1:] != ids[:-1]) + 1
    starts = ids[np.concatenate(([0], edges))] if len(ids) else ids
    values, counts = np.unique(starts, return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"ids: id {values[counts > 1][0]} comes back after another one; a document must be one run of tokens"
        )
    return (0, *(int(e) for e in edges), len(ids)) if len(ids) else (0,)


def sees(lo, hi, positions) -> bool:
    """Tell exactly whether any query with interval [lo, hi) sees any of the keys at these positions."""
    if not len(lo) or not len(positions):
        return False
    keys = positions if (np.diff(positions) > 0).all() else np.sort(positions)
    if hi.max() <= keys[0] or lo.min() > keys[-1]:
        return False
    for start in range(0, len(lo), CHUNK):
        part = slice(start, start + CHUNK)
        if (np.searchsorted(keys, lo[part]) < np.searchsorted(keys, hi[part])).any():
            return True
    return False
