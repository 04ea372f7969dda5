"""A small CUDA backend in the manner of a ring: blocks arrive in pinned memory, two streams, every fence needed.

host      pinned[s] ← block i         after its copy of two steps ago has landed                       (A)
copy      device[s] ← pinned[s]       after the kernel that read device[s] two steps ago               (B)
          landed[s].record                                                                              (C)
compute   total += weight_i · device[s]   after landed[s]                                              (D)
          used[s].record                                                                               (E)
host      reads total                 after the compute stream is done                                 (F)
"""

import numpy as np

SOURCE = r"""
extern "C" __global__ void add(const float* __restrict__ x,   // [n]
                               float* __restrict__ total,     // [n]
                               float weight, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) total[i] += weight * x[i];
}
"""


def weighted_sum(cp, empty_pinned, blocks, weights):
    """Return sum of weights[i] * blocks[i], blocks a list of equal float32 vectors, staged through the device."""
    n = blocks[0].size
    kernel = cp.RawModule(code=SOURCE).get_function("add")
    compute, copy = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    pinned = [empty_pinned(n, np.float32) for _ in range(2)]
    result = empty_pinned(n, np.float32)
    with compute:
        device = [cp.empty(n, np.float32) for _ in range(2)]
        total = cp.zeros(n, np.float32)
    landed, used = [cp.cuda.Event() for _ in range(2)], [cp.cuda.Event() for _ in range(2)]
    for i, (block, weight) in enumerate(zip(blocks, weights)):
        s = i % 2
        if i >= 2:
            landed[s].synchronize()  # A
        pinned[s][:] = block
        if i >= 2:
            copy.wait_event(used[s])  # B
        device[s].set(pinned[s], stream=copy)
        landed[s].record(copy)  # C
        compute.wait_event(landed[s])  # D
        with compute:
            kernel((-(-n // 128),), (128,), (device[s], total, np.float32(weight), n))
        if i + 2 < len(blocks):
            used[s].record(compute)  # E
    total.get(stream=compute, out=result, blocking=False)
    compute.synchronize()  # F
    return result.copy()
