"""How long the machine takes: python tests/ptx/measure.py [heads] [length]

Runs the d-128 tensor-core attention forward (kernels/attention_mma.cu) with checks off, on, and with counters, one after
the other in one process, three times each, and prints the best wall time, the CPU time and the ratio to checks off.
"""

import os
import sys
import time

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # one core
    os.environ.setdefault(name, "1")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from ptxmachine import cupy  # noqa: E402
from ptxsupport import source  # noqa: E402

SHARED = 4 * 64 * 128 * 2


def run(heads, length, **switches):
    """Return (wall, CPU) seconds of one launch, the parsing and binding of the code included, compiling not."""
    q, k, v = (
        np.random.default_rng(i).standard_normal((heads, length, 128)).astype(ml_dtypes.bfloat16)
        for i in range(3)
    )
    cupy.reset(arch="80", memory=1 << 28, **switches)
    kernel = cupy.RawModule(code=source("attention_mma.cu")).get_function("attention")
    kernel.max_dynamic_shared_size_bytes = SHARED
    out, lse = cupy.empty((heads, length, 128), np.float32), cupy.empty((heads, length), np.float32)
    args = (*(cupy.asarray(x) for x in (q, k, v)), out, lse, length, length, np.float32(128**-0.5))
    cupy.cuda.Device().synchronize()
    start, cpu = time.perf_counter(), time.process_time()
    kernel((-(-length // 128), heads), (128,), args, shared_mem=SHARED)
    cupy.cuda.Device().synchronize()
    return time.perf_counter() - start, time.process_time() - cpu


def main(heads=4, length=1024):
    print("attention forward, d 128, bf16, %d × %d tokens, sm_80" % (heads, length))
    base = None
    for name, switches in (
        ("checks off", {"check": False}),
        ("checks on", {}),
        ("checks and counters", {"count": True}),
    ):
        times = [run(heads, length, **switches) for _ in range(3)]
        wall, cpu = min(t[0] for t in times), min(t[1] for t in times)
        base = base or cpu
        print("%-20s %6.2f s wall, %6.2f s CPU, %.2f ×" % (name, wall, cpu, cpu / base))


if __name__ == "__main__":
    main(*(int(x) for x in sys.argv[1:]))
