"""The error of the CUDA kernels beside that of a naive run of the same type, in one hop and over a ring of eight.

A largest error is one number's luck: of two runs that round alike, one's is easily 1.3 of the other's.  So 16 heads, each a
problem of its own, are held by the mean of their largest errors, and by the root mean square of all.
"""

import sys

import cuda_kit
import numpy as np
import pytest

sys.path[:0] = [str(cuda_kit.PTX.parent.parent / "benchmarks")]
import counted  # noqa: E402

pytestmark = pytest.mark.skipif(cuda_kit.REAL, reason="counted on the PTX machine")
SIZES = {"float64": {"rows_q": 48, "rows_k": 256, "d": 32}}  # slower to run
MORE = [pytest.param(dtype, 1, False, marks=pytest.mark.slow) for dtype in ("float16", "bfloat16", "float32", "float64")]
MORE += [pytest.param(dtype, 8, True, marks=pytest.mark.slow) for dtype in ("float16", "bfloat16", "float32", "float64")]
MORE += [pytest.param("float64", 8, False, marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    "dtype, hops, deterministic",
    [("bfloat16", 1, True), ("bfloat16", 8, False), ("float16", 8, False), ("float32", 8, False), *MORE],
)
def test_error_is_at_most_that_of_a_naive_run(dtype, hops, deterministic):
    """1.2 x for out, dq, dk, dv.  lse: what rounding it on each hop can add, and no more."""
    told = counted.errors(dtype, hops, deterministic=deterministic, **SIZES.get(dtype, {}))
    for name in ("out", "dq", "dk", "dv"):
        (rms, naive_rms), (largest, naive_largest), _ = told[name]
        assert naive_rms > 0 and rms <= 1.2 * naive_rms, f"{name}: rms {rms:.3g}, naive {naive_rms:.3g}"
        assert largest <= 1.2 * naive_largest, f"{name}: largest {largest:.3g}, naive {naive_largest:.3g}"
    # lse is about 6: rounded up to three times a hop (to log2 and back, and after the sum), half a unit each; what hop j of n
    # adds has the weight j / n in the end.
    unit = np.spacing(np.array(7, "float64" if dtype == "float64" else "float32"))
    steps = 1.5 * float(unit) * (hops + 1) / 2
    largest, naive = told["lse"][2]
    assert largest <= 1.2 * naive + steps, f"lse: {largest:.3g}, naive {naive:.3g}"
