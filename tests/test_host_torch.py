"""Errors against float64, beside PyTorch's on the same arrays: at most one and a half times as large."""

from __future__ import annotations

import host_kit as kit
import ml_dtypes
import numpy as np
import pytest

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


@pytest.mark.parametrize("gain", [1, 8, 40, 200])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("isa", kit.isas())
def test_float32_error_beside_torch(isa, causal, gain):
    backend = kit.backend_of(isa)
    rng = np.random.default_rng(gain)
    q, k, v, dout = kit.arrays(rng, 1, 512, 512, 4, 4, 64, 64, "float32", gain)
    true = kit.exact(dout, q, k, v, causal=causal)
    out, lse = kit.forward(backend, q, k, v, causal=causal)
    grads = kit.backward(backend, dout, q, k, v, out, lse, causal=causal)
    theirs = torch_run(dout, q, k, v, causal)
    for name, mine, other, want in zip(("out", "dq", "dk", "dv"), (out, *grads), theirs, (true[0], *true[2:])):
        error, beside = kit.error(name, mine, want), kit.error(f"torch's {name}", other, want)
        assert error <= 1.5 * beside, f"{name}: error {error:.3g}, torch's {beside:.3g}"
