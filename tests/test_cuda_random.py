"""Random shapes, types, rules, layouts and hops through the CUDA backend's verbs, on the PTX machine."""

import cuda_kit
import host_kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import rules, slopes

from burstmpi.layout import place

# Few kinds in the short run, as each is a build of several seconds for each kernel; the long one takes all.
SHORT = [("bfloat16", 64, 64), ("float16", 40, 24), ("float32", 32, 32), ("float64", 32, 32)]
DIMS = [8, 24, 32, 40, 64, 72, 96, 128, 136, 192, 200, 256]


@st.composite
def cases(draw, kinds):
    dtype, d, dv = draw(kinds)
    nq = draw(st.integers(1, 150))
    nk = draw(st.just(nq) | st.integers(1, 200))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3)]))
    heads = kv_heads * group
    options = dict(draw(st.sampled_from(list(rules(nq, nk, heads).values()))))
    if "window" in options and draw(st.booleans()):
        options["window"] = (draw(st.integers(0, 150)), draw(st.none() | st.integers(0, 90)))
    if "softcap" in options or "alibi_slopes" in options:  # both or none: one build less
        options |= {"softcap": options.get("softcap", 3.0), "alibi_slopes": slopes(heads)}
    return {
        "shape": (1 + (heads == 1 and draw(st.booleans())), nq, nk, heads, kv_heads, d, dv, dtype),
        "options": options,
        "layout": draw(st.sampled_from(["contiguous", "zigzag", "striped", "shuffled"])),
        "hops": draw(st.integers(1, 4)),
        "gain": draw(st.sampled_from([1.0, 1.0, 8.0])),
        "deterministic": draw(st.booleans()),
        "splits": draw(st.sampled_from([1, 1, None, 5])),  # None cuts a small block until no part has two tiles
        "travels": draw(st.sampled_from(["q", "kv"])),
        "seed": draw(st.integers(0, 99)),
    }


def order(layout, rows, hops, rng):
    """Positions of all keys, rank by rank, and where one rank's end."""
    if layout == "shuffled":
        return rng.permutation(rows), np.sort(rng.integers(0, rows + 1, hops - 1))
    where = place(layout, rows, hops)
    parts = [where.positions(rank) for rank in range(hops)]
    return np.concatenate(parts), np.cumsum([len(part) for part in parts])[:-1]


def right(case, **switches):
    """Forward and backward of a case against the float64 oracle, held to the error of a naive run of the same type."""
    rng = np.random.default_rng(case["seed"])
    dtype, options = case["shape"][-1], case["options"]
    q, k, v, dout = host_kit.arrays(rng, *case["shape"], case["gain"])
    order_k, cuts = order(case["layout"], k.shape[1], case["hops"], rng)
    order_q, _ = order(case["layout"], q.shape[1], 3, rng)
    backend = cuda_kit.backend(deterministic=case["deterministic"], splits=case["splits"], **switches)
    how = {"cuts": cuts, "order_q": order_q, "order_k": order_k, **options}
    true = host_kit.exact(dout, q, k, v, **options)
    same = host_kit.naive(dout, q, k, v, narrow=dtype in ("float16", "bfloat16"), **options)
    size = host_kit.rms(true[1])
    out, lse = cuda_kit.forward(backend, q, k, v, **how)
    host_kit.check("out", out, true[0], same[0], dtype, 2.0, size, same[5][0])
    wide = "float64" if dtype == "float64" else "float32"
    host_kit.check("lse", lse, true[1], same[1], wide, 2.0, floor=same[5][4] + np.finfo(lse.dtype).eps)
    grads = cuda_kit.backward(backend, dout, q, k, v, out, lse, travels=case["travels"], **how)
    for name, got, want, near, floor in zip(("dq", "dk", "dv"), grads, true[2:], same[2:5], same[5][1:]):
        host_kit.check(name, got, want, near, dtype, 2.0, size, floor)


@given(case=cases(st.sampled_from(SHORT)))
@settings(max_examples=12)
def test_any_block(case):
    right(case)


@st.composite
def any_kind(draw):
    d = draw(st.sampled_from(DIMS))
    return draw(st.sampled_from(list(host_kit.DTYPES))), d, draw(st.just(d) | st.sampled_from(DIMS))


@pytest.mark.slow
@given(case=cases(any_kind()))
@settings(max_examples=400)
def test_many_blocks(case):
    right(case)
