"""Errors, beside PyTorch's on the same arrays: at most one and a half times as large."""

from __future__ import annotations

import host_kit as kit
import ml_dtypes
import numpy as np
import pytest

from burstmpi.backends import host

pytestmark = pytest.mark.peer


def torch_run(dout, q, k, v, causal):
    """out, dq, dk, dv of scaled_dot_product_attention, as float64."""
    import torch  # not above: the tests on many ranks collect this file too

    torch.set_num_threads(1)

    def tensor(x):
        x = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    tq, tk, tv = (tensor(x).requires_grad_() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, is_causal=causal)
    grads = torch.autograd.grad(out, (tq, tk, tv), tensor(dout))
    return [x.detach().double().numpy().transpose(0, 2, 1, 3) for x in (out, *grads)]


def extended(dout, q, k, v, causal):
    """out, dq, dk, dv in the widest type of the machine, for an oracle of float64."""
    dout, q, k, v = (x.astype(np.longdouble).transpose(0, 2, 1, 3) for x in (dout, q, k, v))
    scale = 1 / np.sqrt(np.longdouble(q.shape[3]))
    s = q @ k.swapaxes(2, 3) * scale
    if causal:
        s = np.where(np.tri(*s.shape[2:], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(3, keepdims=True))
    p /= p.sum(3, keepdims=True)
    out = p @ v
    ds = p * (dout @ v.swapaxes(2, 3) - (dout * out).sum(3, keepdims=True)) * scale
    return [x.transpose(0, 2, 1, 3) for x in (out, ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout)]


@pytest.mark.parametrize("gain", [1, 8, 40, 200])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(kit.DTYPES))
@pytest.mark.parametrize("isa", kit.isas())
def test_error_beside_torch(isa, dtype, causal, gain):
    if dtype == "float64" and np.finfo(np.longdouble).eps > 2**-60:
        pytest.skip("this machine has no type wider than float64")
    backend = kit.backend_of(isa)
    if isa in kit.plain() and host.variant(isa, dtype)[0] != isa:
        pytest.skip(f"in plain C, {dtype} by {isa} is {dtype} by {host.variant(isa, dtype)[0]}")
    rng = np.random.default_rng(gain)
    rows, heads = (256, 2) if dtype == "float64" else (512, 4)
    q, k, v, dout = kit.arrays(rng, 1, rows, rows, heads, heads, 64, 64, dtype, gain)
    if dtype == "float64":
        true = extended(dout, q, k, v, causal)
    else:
        out, _, *grads = kit.exact(dout, q, k, v, causal=causal)
        true = [out, *grads]
    out, lse = kit.forward(backend, q, k, v, causal=causal)
    results = [out]
    for total, like in zip(kit.backward(backend, dout, q, k, v, out, lse, causal=causal), (q, k, v)):
        results.append(np.empty_like(like))
        backend.copy(results[-1], total)
    for name, mine, other, want in zip(("out", "dq", "dk", "dv"), results, torch_run(dout, q, k, v, causal), true):
        error, beside = kit.error(name, mine, want), kit.error(f"torch's {name}", other, want)
        assert error <= 1.5 * beside, f"{name}: error {error:.3g}, torch's {beside:.3g}"
