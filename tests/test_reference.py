"""The oracle itself: against a naive run of other code, finite differences and known values."""

import numpy as np
import pytest
from support import NAMES, RULES, naive, problem, rules

from burstmpi.backends import reference


def oracle(p, options):
    out, lse = reference.forward(p.q, p.k, p.v, **options)
    return dict(zip(NAMES, (out, lse, *reference.backward(p.dout, p.q, p.k, p.v, out, lse, **options))))


@pytest.mark.parametrize("nk", [11, 7, 16])
@pytest.mark.parametrize("rule", RULES)
def test_agrees_with_naive_attention_in_extended_precision(rule, nk):
    p = problem(11, nk, seed=3)
    options = rules(11, nk, 4)[rule]
    for (name, got), want in zip(oracle(p, options).items(), naive(p, options, np.longdouble)):
        np.testing.assert_allclose(got, want.astype(float), rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_by_finite_differences(rule):
    p = problem(6, batch=1, d=3, dv=2, seed=5)
    options = rules(6, 6, 4)[rule]
    got = oracle(p, options)
    arrays = {"dq": p.q, "dk": p.k, "dv": p.v}
    rng = np.random.default_rng(0)
    for name, x in arrays.items():
        along = rng.standard_normal(x.shape)
        loss = []
        for step in (1e-6, -1e-6):
            moved = {key: value + step * along if key == name else value for key, value in arrays.items()}
            out, _ = reference.forward(moved["dq"], moved["dk"], moved["dv"], **options)
            loss.append((out * p.dout).sum())
        slope = (loss[0] - loss[1]) / 2e-6
        assert slope == pytest.approx((got[name] * along).sum(), rel=1e-6, abs=1e-8), name


def test_one_key_is_copied():
    p = problem(3, 1, heads=2, kv_heads=1)
    out, lse = reference.forward(p.q, p.k, p.v)
    np.testing.assert_allclose(out, np.broadcast_to(p.v, out.shape))
    np.testing.assert_allclose(lse, np.einsum("bihd,bjgd->bhi", p.q, p.k) * 8**-0.5)


def test_rows_that_see_nothing():
    p = problem(4, 2)
    got = oracle(p, {"causal": True})
    assert (got["out"][:, :2] == 0).all() and (got["lse"][:, :, :2] == -np.inf).all() and (got["dq"][:, :2] == 0).all()
    assert np.isfinite(got["out"]).all() and np.isfinite(got["dk"]).all()
