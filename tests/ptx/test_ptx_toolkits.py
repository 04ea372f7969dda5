"""Code of three toolkits (12.8, 13.0, 13.4) parses, runs and agrees.

generated/ holds what the compilers make of our kernels (see generate_ptx.py).  With -m slow the toolkits themselves are
fetched and compile all kernels anew, for all architectures.
"""

import glob
import os

import numpy as np
import pytest
from generate_ptx import HERE, KERNELS, TOOLKITS, compile_with
from ptxmachine import cupy
from ptxmachine.machine import Machine, Run
from ptxmachine.memory import GlobalMemory
from ptxmachine.nvrtc import default_toolkit, fetched_toolkit

FILES = sorted(os.path.basename(path) for path in glob.glob(os.path.join(HERE, "generated", "*.ptx")))


def parts(name):
    """kernel.12.8.sm_80.ptx → (kernel, "12.8", "80")"""
    kernel, rest = name.split(".", 1)
    toolkit, arch = rest[:-4].split(".sm_")
    return kernel, toolkit, arch


def broad(module, n=300):
    """Run the kernel `broad` and return its outputs."""
    rng = np.random.default_rng(9)
    x, k = (rng.standard_normal(n) * 4).astype(np.float32), rng.integers(-5000, 5000, n).astype(np.int32)
    outputs = [cupy.zeros(n, t) for t in (np.float64, np.float32, np.int64)] + [cupy.zeros(8, np.uint32)]
    module.get_function("broad")(
        (-(-n // 96),), (96,), (cupy.asarray(x), cupy.asarray(k), *outputs, n), shared_mem=96 * 4
    )
    smooth, floats, integers, histogram = (a.get() for a in outputs)
    v = x.astype(np.float64)
    exact = np.exp(-v * v) + np.log1p(np.abs(v)) + np.sin(v) * 0.25 + (np.abs(v) + 1) ** 0.3
    assert np.abs(smooth / exact - 1).max() < 1e-14
    assert (histogram == np.bincount(k & 7, minlength=8)).all()
    return smooth, floats, integers


def test_all_files_are_there():
    assert {parts(name) for name in FILES} == {
        (kernel, toolkit, arch) for toolkit in TOOLKITS for kernel, archs in KERNELS.items() for arch in archs
    }


@pytest.mark.parametrize("name", FILES)
def test_generated_code_runs(name):
    kernel, toolkit, arch = parts(name)
    cupy.reset(arch=arch, memory=1 << 26)
    module = cupy.RawModule(path=os.path.join(HERE, "generated", name))
    if kernel == "broad":
        broad(module)
    elif kernel == "matmul":
        rng = np.random.default_rng(0)
        a, b, c = (
            rng.integers(-9, 9, (20, 32)).astype(np.float32),
            rng.integers(-9, 9, (32, 18)).astype(np.float32),
            cupy.empty((20, 18), np.float32),
        )
        module.get_function("matmul")((2, 2), (16, 16), (cupy.asarray(a), cupy.asarray(b), c, 20, 18, 32))
        assert (c.get() == a @ b).all()
    else:
        q = np.random.default_rng(0).standard_normal((40, 32)).astype(np.float32)
        out = cupy.empty((40, 32), np.float32)
        module.get_function("attention")(
            (2,),
            (128,),
            (
                *(cupy.asarray(q) for _ in range(3)),
                out,
                cupy.arange(2, dtype=np.int32),
                2,
                40,
                40,
                np.float32(1.0),
            ),
        )
        s = q.astype(np.float64) @ q.T.astype(np.float64) * np.log(2)
        p = np.exp(s - s.max(1, keepdims=True))
        assert np.abs(out.get() - p / p.sum(1, keepdims=True) @ q).max() < 1e-5


@pytest.mark.parametrize("arch", KERNELS["broad"])
def test_toolkits_agree(arch):
    results = []
    for name in FILES:
        if parts(name)[::2] == ("broad", arch):
            cupy.reset(arch=arch, memory=1 << 26)
            results.append(broad(cupy.RawModule(path=os.path.join(HERE, "generated", name))))
    assert len(results) == len(TOOLKITS)
    for other in results[1:]:
        assert (other[2] == results[0][2]).all()
        assert np.allclose(other[1], results[0][1], rtol=1e-5, atol=1e-5) and np.allclose(
            other[0], results[0][0], rtol=1e-14
        )


def binds(text):
    """Parse and bind every kernel: each instruction must be known."""
    machine = Machine(GlobalMemory(1 << 24))
    module = machine.load(text)
    for name in module.parsed.kernels:
        program = module.program(name)
        Run(machine, module, program, 1, min(128, program.function.max_threads or 128), 65536)


ARCHITECTURES = ("75", "80", "90", "120")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ("matmul", "broad", "attention_small", "attention_mma"))
def test_the_installed_toolkit(kernel, arch):
    if arch == "75" and kernel.startswith("attention"):
        pytest.skip("cp.async and bf16 products need sm_80")
    binds(compile_with(default_toolkit(), kernel, arch))


@pytest.mark.slow
@pytest.mark.parametrize("toolkit", TOOLKITS)
def test_fetched_toolkits(toolkit):
    found = fetched_toolkit(TOOLKITS[toolkit])
    if found is None:
        pytest.skip("the wheels cannot be reached")
    assert "%d.%d" % found.version == toolkit
    for kernel in ("matmul", "broad", "attention_small", "attention_mma"):
        for arch in ARCHITECTURES:
            if not (arch == "75" and kernel.startswith("attention")):
                binds(compile_with(found, kernel, arch))
