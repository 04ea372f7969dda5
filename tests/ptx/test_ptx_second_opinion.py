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


# --- random expressions ---------------------------------------------------------------------------
TYPES = {
    "int": np.int32,
    "unsigned": np.uint32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "float": np.float32,
    "double": np.float64,
}
BITS = {"int": 32, "unsigned": 32, "long long": 64, "unsigned long long": 64}


def expression(rng, kind, depth):
    """Return the text of a random C expression of type `kind` with no undefined behaviour, over a0..a5 (one a type)."""
    names = list(TYPES)
    if depth == 0:
        return "a%d" % names.index(kind)
    left, right = (lambda k=kind: expression(rng, k, depth - 1)), (lambda k=kind: expression(rng, k, depth - 1))
    if kind in BITS:
        unsigned = (
            kind
            if "unsigned" in kind
            else "unsigned " + kind.replace("int", "").strip() if kind != "int" else "unsigned"
        )
        wrap = lambda text: "(%s)(%s)" % (kind, text)  # signed overflow is undefined: go by unsigned
        shift = BITS[kind] - 1
        choices = [
            lambda: wrap(
                "(%s)%s %s (%s)%s" % (unsigned, left(), rng.choice(["+", "-", "*"]), unsigned, right())
            ),
            lambda: "(%s %s %s)" % (left(), rng.choice(["&", "|", "^"]), right()),
            lambda: "(%s >> (%s & %d))" % (left(), right("unsigned"), shift),
            lambda: wrap("(%s)%s << (%s & %d)" % (unsigned, left(), right("unsigned"), shift)),
            lambda: "(%s / ((%s & 1023) + 1))" % (left(), right()),
            lambda: "(%s %% ((%s & 1023) + 1))" % (left(), right()),
            lambda: "(%s < %s ? %s : ~%s)" % (left(), right(), left(), right()),
            lambda: "(%s)%s" % (kind, expression(rng, str(rng.choice(list(BITS))), depth - 1)),
            lambda: "(%s)(short)%s" % (kind, left("int")),
            lambda: "(%s)(unsigned char)%s" % (kind, left("int")),
            lambda: "(%s)(signed char)(%s >> 3)" % (kind, left("int")),
            lambda: "(%s)__popc((unsigned)%s)" % (kind, left("unsigned")),
            lambda: "(%s)__clz((int)%s)" % (kind, left("int")),
            lambda: "(%s)(long long)(%s %s %s)"
            % (kind, left("float"), rng.choice(["<", "<=", "==", "!="]), right("float")),
        ]
    else:
        suffix = "f" if kind == "float" else ""
        choices = [
            lambda: "(%s %s %s)" % (left(), rng.choice(["+", "-", "*"]), right()),
            lambda: "(%s / (%s * %s + (%s)1))" % (left(), (x := right()), x, kind),
            lambda: "fma%s(%s, %s, %s)" % (suffix, left(), right(), left()),
            lambda: "sqrt%s(fabs%s(%s))" % (suffix, suffix, left()),
            lambda: "(%s > %s ? %s : -%s)" % (left(), right(), left(), right()),
            lambda: "(%s)%s" % (kind, expression(rng, str(rng.choice(list(BITS))), depth - 1)),
            lambda: "(%s)%s" % (kind, expression(rng, "double" if kind == "float" else "float", depth - 1)),
            lambda: "floor%s(%s)" % (suffix, left()),
        ]
    return choices[rng.integers(len(choices))]()


def random_kernel(seed, count=24):
    rng = np.random.default_rng(seed)
    names = list(TYPES)
    kinds = [names[i % len(names)] for i in range(count)]
    loads = "".join("  const %s a%d = p%d[i];\n" % (k, j, j) for j, k in enumerate(names))
    stores = "".join(
        "  { %s r = %s; memcpy(&out[%d * n + i], &r, sizeof r); }\n" % (k, expression(rng, k, 4), j)
        for j, k in enumerate(kinds)
    )
    params = (
        ", ".join("const %s* p%d" % (k, j) for j, k in enumerate(names)) + ", unsigned long long* out, int n"
    )
    head = 'extern "C" __global__ void __launch_bounds__(256) random_kernel(%s) {\n' % params
    return (
        head + "  const int i = threadIdx.x;\n  if (i >= n) return;\n" + loads + stores + "}\n",
        params,
        kinds,
    )


@pytest.mark.parametrize("seed", [0, 1] + [pytest.param(s, marks=pytest.mark.slow) for s in range(2, 30)])
def test_random_expressions_to_the_bit(seed, tmp_path):
    """Integers of all widths, float and double: what NVRTC and the machine make of it equals what the C++ compiler does."""
    text, params, kinds = random_kernel(seed)
    n, rng = 200, np.random.default_rng(100 + seed)
    inputs = []
    for kind, dtype in TYPES.items():
        if kind in BITS:
            info = np.iinfo(dtype)
            x = rng.integers(info.min, info.max, n, dtype=dtype, endpoint=True)
            x[:8] = np.array([0, 1, 2, 255, info.max, info.max - 1, info.min, info.min + 1], dtype)
            x[8:60] = rng.integers(0, 100, 52).astype(dtype)
        else:
            x = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 5, n)).astype(dtype)
            x[:4] = [0.0, 1.0, -1.0, 0.5]
        inputs.append(x)
    out = np.zeros((len(kinds), n), np.uint64)
    (tmp_path / "k.cu").write_text(text)
    names = ", ".join(["p%d" % i for i in range(len(TYPES))] + ["out", "n"])
    (tmp_path / "k.cpp").write_text(
        '#include "fibers.h"\n#include "k.cu"\nextern "C" void launch(unsigned gx, unsigned gy, unsigned bx, unsigned by, int reverse, %s) {\n'
        "  fibers::run({gx, gy, 1}, {bx, by, 1}, reverse, [&] { random_kernel(%s); });\n}\n" % (params, names)
    )
    target = str(tmp_path / "k.so")
    subprocess.run(
        [
            COMPILER,
            "-std=c++17",
            "-O1",
            "-fwrapv",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            "-w",
            "-I",
            os.path.join(HERE, "kernels"),
            str(tmp_path / "k.cpp"),
            "-o",
            target,
        ],
        check=True,
    )
    host = on_host(ctypes.CDLL(target).launch, (1, 1), (256, 1), [*inputs, out, n], False)[-1]
    cupy.reset(arch="80", memory=1 << 24)
    device = cupy.zeros(out.shape, np.uint64)
    cupy.RawModule(code=text, options=("-fmad=false",)).get_function("random_kernel")(
        (1,), (256,), (*(cupy.asarray(x) for x in inputs), device, n)
    )
    machine = device.get()
    for row, kind in enumerate(kinds):
        ours, theirs = (
            x[row].view(TYPES[kind])[:: 8 // np.dtype(TYPES[kind]).itemsize] for x in (machine, host)
        )
        equal = (
            (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
            if kind in ("float", "double")
            else ours == theirs
        )
        at = np.flatnonzero(~equal)
        assert not len(at), "row %d (%s): machine %r, host %r for lane %d" % (
            row,
            kind,
            ours[at[0]],
            theirs[at[0]],
            at[0],
        )
