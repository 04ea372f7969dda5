"""The same kernels by another way: their own text compiled by the C++ compiler, one fiber a thread.

Where the arithmetic is the same (integers, and floats without contraction), the results are equal to the bit.
"""

import ctypes
import os
import shutil
import subprocess

import numpy as np
import pytest
from ptxmachine import cupy
from ptxsupport import HERE, source

COMPILER = shutil.which("g++") or shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
KERNELS = {
    "matmul": (
        "matmul.cu",
        "const float* a, const float* b, float* c, int m, int n, int k",
        "a, b, c, m, n, k",
    ),
    "attention": (
        "attention_small.cu",
        "const float* q, const float* k, const float* v, float* out, const int* list, int tiles, int len_q, int len_k, float scale",
        "q, k, v, out, list, tiles, len_q, len_k, scale",
    ),
    "scan": ("scan.cu", "const int* x, int* sums, int* odd, int n", "x, sums, odd, n"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return load(name) -> the host function of a kernel."""
    folder, loaded = tmp_path_factory.mktemp("fibers"), {}

    def load(name):
        if name not in loaded:
            file, params, args = KERNELS[name]
            program = (
                '#include "fibers.h"\n#include "%s"\nextern "C" void launch(unsigned gx, unsigned gy, unsigned bx, unsigned by, int reverse, %s) {\n  fibers::run({gx, gy, 1}, {bx, by, 1}, reverse, [&] { %s(%s); });\n}\n'
                % (file, params, name, args)
            )
            path = folder / (name + ".cpp")
            path.write_text(program)
            target = str(folder / (name + ".so"))
            subprocess.run(
                [
                    COMPILER,
                    "-std=c++17",
                    "-O1",
                    "-ffp-contract=off",
                    "-shared",
                    "-fPIC",
                    "-w",
                    "-I",
                    os.path.join(HERE, "kernels"),
                    str(path),
                    "-o",
                    target,
                ],
                check=True,
            )
            loaded[name] = ctypes.CDLL(target).launch
        return loaded[name]

    return load


def on_host(function, grid, block, args, reverse):
    """Call with copies of the arrays; return the copies."""
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    values = [
        (
            ctypes.c_void_p(a.ctypes.data)
            if isinstance(a, np.ndarray)
            else ctypes.c_float(a) if isinstance(a, (float, np.floating)) else ctypes.c_int(int(a))
        )
        for a in copies
    ]
    function(*(ctypes.c_uint(n) for n in (*grid, *block)), ctypes.c_int(reverse), *values)
    return [a for a in copies if isinstance(a, np.ndarray)]


def on_machine(name, grid, block, args, **switches):
    cupy.reset(arch="80", memory=1 << 26, **switches)
    kernel = cupy.RawModule(code=source(KERNELS[name][0]), options=("-fmad=false",)).get_function(name)
    device = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
    kernel(grid, block, tuple(device))
    return [a.get() for a in device if isinstance(a, cupy.ndarray)]


def compare(name, library, grid, block, args):
    machine = on_machine(name, grid, block, args)
    for reverse in (False, True):
        host = on_host(library(name), grid, block, args, reverse)
        for ours, theirs in zip(machine, host):
            assert np.isfinite(ours).all() and (ours.view(np.uint32) == theirs.view(np.uint32)).all()
    return machine


@pytest.mark.parametrize("m,n,k", [(35, 37, 48), (16, 16, 16), (1, 50, 32)])
def test_matrix_product_to_the_bit(library, m, n, k):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    a.flat[::7] *= np.float32(1e-20)  # products that underflow
    b.flat[::5] *= np.float32(1e-20)
    compare(
        "matmul", library, (-(-n // 16), -(-m // 16)), (16, 16), [a, b, np.zeros((m, n), np.float32), m, n, k]
    )


@pytest.mark.parametrize("len_q,len_k", [(40, 70), (33, 20), (64, 128)])
def test_attention_to_the_bit(library, len_q, len_k):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((n, 32)).astype(np.float32) for n in (len_q, len_k, len_k))
    tiles = -(-len_k // 32)
    order = np.arange(tiles, dtype=np.int32)[::-1].copy()
    compare(
        "attention",
        library,
        (-(-len_q // 32), 1),
        (128, 1),
        [q, k, v, np.zeros((len_q, 32), np.float32), order, tiles, len_q, len_k, np.float32(0.3)],
    )


@pytest.mark.parametrize("n", (1, 255, 256, 700))
def test_scan_to_the_bit(library, n):
    x = np.random.default_rng(2).integers(-1000, 1000, n).astype(np.int32)
    _, sums, odd = compare(
        "scan", library, (-(-n // 256), 1), (256, 1), [x, np.zeros(n, np.int32), np.zeros(1, np.int32), n]
    )
    assert odd[0] == (x & 1).sum()
    for start in range(0, n, 256):
        assert (sums[start : start + 256] == np.cumsum(x[start : start + 256])).all()
