"""The few verbs that a backend offers; everything else of the library is shared.

A backend computes on one rank's arrays and knows nothing of MPI.  The verbs are made so that a GPU can do them:
positions and rules are arguments and no global state; a running state (out, lse) goes from block to block with
no extra merge pass; and a verb may *launch* its work and return a ``Launch``, which the ring polls while it gives
MPI its progress.  A backend that has finished when it returns gives back None.

Shapes, everywhere: q (batch, rows_q, heads, d); k (batch, rows_k, kv_heads, d); v (batch, rows_k, kv_heads, dv);
out, dout (batch, rows_q, heads, dv); lse, delta (batch, heads, rows_q), natural log.  ``heads`` is a multiple of
``kv_heads``: query head h reads key head h // (heads // kv_heads).  The types of q, k, v, dout are the caller's;
states, lse, delta and gradients on the way are of the accumulator's type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np

from ..rules import Scores, Sight

__all__ = ["Backend", "Dims", "Launch", "Tally", "Work", "no_progress"]


@dataclass(frozen=True)
class Dims:
    """Sizes that all ranks share."""

    batch: int
    heads: int
    kv_heads: int
    d: int
    dv: int
    dtype: np.dtype  # of q, k, v
    accumulator: np.dtype  # of sums

    def describe(self) -> dict:
        """The sizes as short values: ranks compare these before the first message."""
        told = {f.name: getattr(self, f.name) for f in fields(self)}  # asdict would copy deeply, on every call
        return {**told, "dtype": self.dtype.name, "accumulator": self.accumulator.name}


@dataclass
class Tally:
    """What a call did: pairs (query tile, key tile) of a head that were computed."""

    tiles: int = 0


def no_progress() -> None:
    """Do nothing: the ``progress`` of work that nobody waits for, by which a backend knows that it need seldom ask."""


@dataclass
class Work:
    """What goes with every block: visibility, scores, room to work in, and whom to tell."""

    sight: Sight
    scores: Scores
    scratch: np.ndarray  # at least scratch_bytes(...) bytes, contents arbitrary
    # To be called between tiles, from the thread that called the verb; True: nothing is under way any more.
    progress: Callable[[], bool | None] = no_progress
    tally: Tally = field(default_factory=Tally)


class Launch(Protocol):
    """Work that goes on by itself.

    in_order : whether later verbs come after it anyway, as in a stream of a GPU: then nobody asks, and who hands memory
        to others sets a mark of its own (``transport``)
    """

    in_order: bool = False

    def done(self) -> bool:
        """Tell, without waiting, whether it has finished; raise what went wrong."""


class Backend(Protocol):
    """See the module's text."""

    name: str
    rounds_sums: bool  # whether attend_backward takes ``final``
    slack: int  # bytes that ``allocate`` takes beyond those it gives

    def on(self):
        """A context in which its memory may be made."""

    def call(self):
        """A context for one call of forward or backward."""

    def prepare(self, dtype, backward: bool) -> None:
        """Have what computes blocks of that type, or raise BuildError; asked of backends of the host, before all else.

        Kernels of a GPU are compiled by a rehearsal of the call (``workspace``).
        """

    def allocate(self, nbytes: int):
        """Give a one-dimensional buffer of bytes, aligned to buffers.ALIGN; raise MemoryError with the number."""

    def view(self, buffer, offset: int, shape, dtype):
        """See a part of such a buffer as an array."""

    def empty(self, shape, dtype):
        """Give a new array for a result."""

    def indices(self, targets, fill, progress):
        """Let ``fill(*vectors)`` write index vectors, and have them in ``targets``, [rows] int32 each."""

    def scratch_bytes(self, dims: Dims, scores: Scores, rows_q: int, rows_k: int, backward: bool) -> int:
        """Tell how much scratch a block of at most these rows needs."""

    def tile_count(self, dims: Dims, positions_q, positions_k) -> int:
        """Tell how many pairs of tiles an unmasked block of rows at these positions has, over batch and heads."""

    def copy(self, target, source) -> Launch | None:
        """target[...] = source, rounding once where the types differ."""

    def clear(self, target, value=0.0) -> Launch | None:
        """target[...] = value."""

    def add(self, target, source) -> Launch | None:
        """target += source, both of the accumulator's type."""

    def delta(self, dout, out, delta) -> Launch | None:
        """delta_i = Σ_c dout_ic out_ic, in the accumulator's type: (batch, heads, rows_q)."""

    def attend(self, q, k, v, out, lse, work: Work, *, first: bool, final=None) -> Launch | None:
        """(out, lse) ← (out, lse) ⊕ attend(q, k, v), for one block of keys.

        out : state, of the accumulator's type; lse likewise.  Both are read unless ``first`` and always written,
        except that the last block writes ``final`` (the caller's type) in place of ``out`` where it is given.
        A row that has seen nothing leaves with out = 0 and lse = -inf.
        """

    def attend_backward(
        self, dout, q, k, v, lse, delta, dq, dk, dv, work: Work, *, fresh_q: bool, fresh_kv: bool, final=(None, None, None)
    ) -> Launch | None:
        """Add this block's share to dq, dk and dv; a ``fresh`` one is overwritten, whatever it held.

            P = exp(S - lse);  dV += Pᵀ dO;  dP = dO Vᵀ;  dS = P ∘ (dP - delta);  dQ += scale dS K;  dK += scale dSᵀ Q

        with the final lse of the whole row, so that no merge is needed.  Rows with lse = -inf add nothing.

        final : for dq, dk and dv, an array of the caller's type, or None.  The last block of a sum writes the result there, rounded
        once, in place of the sum; dk and dv have both or none.  Given only where the backend ``rounds_sums``: otherwise, and for what
        other ranks add to later, sums are copied to results at the end.
        """
