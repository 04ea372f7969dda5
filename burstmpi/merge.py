"""The algebra of partial attention: (out, lse) ⊕ (out, lse).

A pair (out, lse) says what a query has seen so far: ``lse = ln Σ_j exp(s_j)`` and ``out = Σ_j exp(s_j - lse) v_j``.
Pairs over disjoint sets of keys merge exactly, in any order:

    lse = ln(exp(lse_a) + exp(lse_b)),    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The empty pair (0, -inf) is the neutral element.  Kernels of the ring carry the pair from block to block without
this function; it serves callers who merge parts of their own, and the reference backend.
"""

from __future__ import annotations

import numpy as np

from . import checks

__all__ = ["merge"]


def merge(out_a, lse_a, out_b, lse_b):
    """Merge what the same queries have seen of two disjoint sets of keys.

    Parameters
    ----------
    out_a, out_b : (batch, rows, heads, dv)
    lse_a, lse_b : (batch, heads, rows), natural log; -inf where nothing was seen

    Returns
    -------
    out, lse : new arrays, of the shapes and dtypes of out_a and lse_a

    Raises
    ------
    TypeError, ValueError
        Shapes that do not fit, or a dtype that is none of float64, float32, float16, bfloat16.
    """
    checks.array("out_a", out_a)
    checks.array("out_b", out_b, out_a.shape)
    checks.array("lse_a", lse_a, (out_a.shape[0], out_a.shape[2], out_a.shape[1]), ndim=3)
    checks.array("lse_b", lse_b, lse_a.shape, ndim=3)
    for name, x in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        checks.element_type(name, x.dtype)
    with np.errstate(all="ignore"):  # a weight that underflows is 0; what it silences may be infinite
        return _merge(out_a, lse_a, out_b, lse_b)


def _merge(out_a, lse_a, out_b, lse_b):
    top = np.maximum(lse_a, lse_b)
    safe = np.where(np.isneginf(top), 0, top)  # -inf - -inf would be NaN
    weight_a, weight_b = np.exp(lse_a - safe), np.exp(lse_b - safe)
    total = weight_a + weight_b
    lse = safe + np.log(total)
    share_b = weight_b / np.where(total == 0, 1, total)
    share_a = weight_a / np.where(total == 0, 1, total)
    across = lambda x: np.swapaxes(x, 1, 2)[..., None]  # noqa: E731  (batch, heads, rows) → (batch, rows, heads, 1)
    # A weight of 0 must silence its part even where that part holds an infinity.
    out = np.where(across(share_a) > 0, across(share_a) * out_a, 0) + np.where(
        across(share_b) > 0, across(share_b) * out_b, 0
    )
    out = np.where(np.isnan(across(lse)), np.nan, out)
    return out.astype(out_a.dtype), lse.astype(lse_a.dtype)
