"""Run the CUDA backend's verbs on whole arrays, block of keys by block of keys, on the PTX machine or a real GPU.

``device(arch)`` gives a fresh stand-in, or the real CuPy where BURSTMPI_TEST_GPU=1; the tests do not know which.
Naive runs of the same type, the float64 oracle and ``check`` are host_kit's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from burstmpi.backends.base import Dims, Tally, Work
from burstmpi.checks import accumulator
from burstmpi.rules import Rules, Sight

PTX = Path(__file__).resolve().parent / "ptx"
REAL = os.environ.get("BURSTMPI_TEST_GPU") == "1"


def device(arch="80", **switches):
    """Give CuPy: the stand-in with a fresh device of that architecture, or the real one on the GPU at hand.

    switches : of the stand-in's ``reset``; a test that needs one is skipped on a real GPU
    """
    if REAL:
        import cupy

        if switches:
            pytest.skip("needs a switch of the PTX machine")
        if cupy.cuda.Device().compute_capability != arch and arch != "80":
            pytest.skip(f"this GPU is no sm_{arch}")
        return cupy
    if str(PTX) not in sys.path:
        sys.path.insert(0, str(PTX))
    from ptxmachine import cupy

    cupy.install()
    cupy.reset(arch=arch, **switches)
    return cupy


def backend(arch="80", *, deterministic=False, splits=None, **switches):
    """Give a CudaBackend on a fresh device."""
    device(arch, **switches)
    from burstmpi.backends.cuda import CudaBackend

    return CudaBackend(deterministic=deterministic, splits=splits)


class Bench:
    """A backend, and whole arrays on their way to it and back.

    cuts : where the keys are cut into blocks
    positions : of the keys, in the order of their rows; default their numbers.  Queries are in order
    """

    def __init__(self, backend, q, k, v, *, cuts=(), order_k=None, order_q=None, **options):
        self.backend, self.cupy = backend, backend._cupy
        self.rules = Rules(**options)
        self.dims = Dims(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, accumulator(q.dtype))
        self.rows_q, self.rows_k = q.shape[1], k.shape[1]
        self.order_q = np.arange(self.rows_q) if order_q is None else order_q
        order_k = np.arange(self.rows_k) if order_k is None else order_k
        self.blocks = np.split(order_k, cuts)
        self.tally = Tally()

    def put(self, x):
        """To the device, strides kept: a view of a larger array stays one."""
        base = x
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base is x or base.dtype != x.dtype or x.flags.c_contiguous:
            return self.cupy.asarray(np.ascontiguousarray(x))
        whole = self.cupy.asarray(np.ascontiguousarray(base))
        offset = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        return self.cupy.ndarray(x.shape, x.dtype, whole.data + offset, x.strides)

    def get(self, x):
        return self.cupy.asnumpy(x)

    def filled(self, shape, dtype):
        """Memory that holds NaN: whoever reads before writing is found."""
        return self.put(np.full(shape, np.nan, dtype))

    def works(self, backward):
        """The Work of each block of keys, and its rows."""
        at, lo, hi = self.rules.intervals(self.order_q, self.rows_q, self.rows_k)
        scores = self.rules.scores(self.dims.d)
        most = max(map(len, self.blocks))
        nbytes = self.backend.scratch_bytes(self.dims, scores, self.rows_q, most, backward)
        scratch = self.backend.allocate(max(nbytes, 1))
        at, lo, hi = (self.put(np.ascontiguousarray(x)) for x in (at, lo, hi))
        for rows in self.blocks:
            ascending = bool((np.diff(rows) > 0).all())
            sight = Sight(at, lo, hi, self.put(rows.astype(np.int32)), ascending)
            yield rows, Work(sight, scores, scratch, tally=self.tally)

    def wait(self, launch):
        while launch is not None and not launch.done():
            pass


def forward(backend, q, k, v, *, in_place=False, **options):
    """out, lse of whole arrays, the keys coming in blocks.

    in_place : hand the caller's own array over (with its strides) where there is one block
    """
    bench = Bench(backend, q, k, v, **options)
    queries = bench.put(q if in_place else q[:, bench.order_q])
    state = bench.filled((*q.shape[:3], v.shape[3]), bench.dims.accumulator)
    lse = bench.filled((q.shape[0], q.shape[2], q.shape[1]), bench.dims.accumulator)
    out = bench.filled(state.shape, q.dtype)
    for i, (rows, work) in enumerate(bench.works(False)):
        last = i == len(bench.blocks) - 1
        keys, values = (bench.put(x if in_place else x[:, rows]) for x in (k, v))
        final = out if last and out.dtype != state.dtype else None
        bench.wait(backend.attend(queries, keys, values, state, lse, work, first=i == 0, final=final))
    out, lse = bench.get(out if out.dtype != state.dtype else state), bench.get(lse)
    back = np.argsort(bench.order_q)
    return out[:, back], lse[:, :, back]


def backward(backend, dout, q, k, v, out, lse, *, in_place=False, travels="kv", **options):
    """dq, dk, dv of whole arrays in the accumulator's type, the keys coming in blocks.

    travels : "kv": dQ stays and is added to; "q": dK and dV are made afresh for each block and dQ summed by ``add``
    """
    bench = Bench(backend, q, k, v, **options)
    order = bench.order_q
    queries, grad, result = (bench.put(x if in_place else x[:, order]) for x in (q, dout, out))
    lse = bench.put(np.ascontiguousarray(lse[:, :, order]))
    acc = bench.dims.accumulator
    delta = bench.filled(lse.shape, acc)
    bench.wait(backend.delta(grad, result, delta))
    dq = bench.filled(q.shape, acc)
    dk, dv = (np.full(x.shape, np.nan, acc) for x in (k, v))
    for i, (rows, work) in enumerate(bench.works(True)):
        keys, values = (bench.put(x if in_place else x[:, rows]) for x in (k, v))
        part_k, part_v = (bench.filled((x.shape[0], len(rows), *x.shape[2:]), acc) for x in (k, v))
        into = dq if travels == "kv" or i == 0 else bench.filled(q.shape, acc)
        bench.wait(
            backend.attend_backward(
                grad, queries, keys, values, lse, delta, into, part_k, part_v, work,
                fresh_q=travels == "q" or i == 0, fresh_kv=True,
            )
        )  # fmt: skip
        if into is not dq:
            bench.wait(backend.add(dq, into))
        dk[:, rows], dv[:, rows] = bench.get(part_k), bench.get(part_v)
    return bench.get(dq)[:, np.argsort(order)], dk, dv
