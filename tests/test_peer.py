"""Against a peer that nobody here wrote: PyTorch's scaled_dot_product_attention on the CPU, forward and backward.

PyTorch has no softcap, no lse, and NaN where a query sees nothing; all else of the rules goes in as a mask or a bias.
"""

import numpy as np
import pytest
from support import naive, problem, rules, run, truth

from burstmpi import BurstAttention
from burstmpi.backends import reference
from burstmpi.rules import Rules

pytestmark = [pytest.mark.peer, pytest.mark.mpi(ranks=(1, 3))]

RULES = [name for name, options in rules(8, 8, 4).items() if "softcap" not in options]
RESULTS = ("out", "dq", "dk", "dv")


def peer(p, options):
    """out, dq, dk, dv by PyTorch, in the problem's type."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    rule = Rules(**options)
    mask, at = reference.visible(rule, p.q.shape[1], p.k.shape[1])

    def tensor(x, grad=False):
        # (batch, rows, heads, c) → (batch, heads, rows, c); bfloat16 by its bits
        x = np.ascontiguousarray(x.swapaxes(1, 2))
        t = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype.name == "bfloat16" else torch.from_numpy(x)
        return t.requires_grad_(grad)

    q, k, v = (tensor(x, True) for x in (p.q, p.k, p.v))
    if rule.alibi_slopes is None:
        bias = torch.from_numpy(mask)
    else:
        apart = np.abs(at[:, None] - np.arange(p.k.shape[1]))
        bias = -np.array(rule.alibi_slopes)[:, None, None] * apart
        bias = torch.from_numpy(np.where(mask, bias, -np.inf)).to(q.dtype)
    plain = mask.all() and rule.alibi_slopes is None
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=None if plain else bias, scale=rule.scale, enable_gqa=True
    )
    out.backward(tensor(p.dout))
    results = (out.detach(), q.grad, k.grad, v.grad)
    return {name: x.to(torch.float64).numpy().swapaxes(1, 2) for name, x in zip(RESULTS, results)}


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("nk", [24, 31])
@pytest.mark.parametrize("rule", RULES)
def test_float64(comm, rule, nk, backward):
    """Equal to PyTorch's, but for as much rounding as each of the two may have."""
    p, options = problem(24, nk), rules(24, nk, 4)[rule]
    mask, _ = reference.visible(Rules(**options), 24, nk)
    expected, allowed = peer(p, options), truth(p, options).allowed
    with BurstAttention(comm, backward=backward, **options) as attn:
        got = run(attn, p)
    blind = ~mask.any(axis=1)
    for name in RESULTS:
        ours, theirs = got[name].astype(np.float64), expected[name]
        if blind.any():
            if name in ("dk", "dv"):
                continue  # PyTorch's NaN of the blind queries has gone into these
            assert (ours[:, blind] == 0).all()
            ours, theirs = ours[:, ~blind], theirs[:, ~blind]
        assert np.isfinite(theirs).all()
        assert np.abs(ours - theirs).max() <= 2 * allowed[name], name


@pytest.mark.parametrize("spread", [1.0, 8.0])
@pytest.mark.parametrize("rule", ["full", "causal", "documents, causal, window"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_error_is_no_larger_than_the_peers(comm, dtype, rule, spread):
    """Root mean square error against float64, over a ring of three too.

    With rules for which PyTorch takes a fused kernel, that is with an lse and a rounded out for backward as we do.
    """
    p = problem(160, batch=1, heads=4, kv_heads=4, d=32, dv=32, dtype=dtype, spread=spread)
    options = rules(160, 160, 4)[rule]
    exact = dict(zip(("out", "lse", "dq", "dk", "dv"), naive(p, options, np.float64)))
    theirs = peer(p, options)
    with BurstAttention(comm, **options) as attn:
        ours = run(attn, p)
    for name in RESULTS:
        error = lambda x: np.sqrt(np.mean((x.astype(np.float64) - exact[name]) ** 2))  # noqa: B023, E731
        assert error(ours[name]) <= 1.5 * error(theirs[name]), (name, error(ours[name]), error(theirs[name]))


