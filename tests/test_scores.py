"""raw_kernels/scores.h, compiled by the system's C compiler, says what the rules say."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import burstmpi

# Inside the package where it is installed, beside it in a checkout.
PACKAGE = Path(burstmpi.__file__).parent
SOURCES = next(p for p in (PACKAGE / "raw_kernels", PACKAGE.parent / "raw_kernels") if p.is_dir())

SHIM = r"""
#include "scores.h"
int visible(int lo, int hi, int pos) { return burst_visible(lo, hi, pos); }
REAL score(REAL scaled, REAL cap, REAL slope, int at, int pos, REAL *slope_of_cap)
{
    return burst_score(scaled, cap, slope, at, pos, slope_of_cap);
}
"""


def build(folder, real, softcap, alibi):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here (cc, gcc, clang)")
    (folder / "shim.c").write_text(SHIM)
    flags = [f"-DREAL={real}", f"-DBURST_SOFTCAP={softcap}", f"-DBURST_ALIBI={alibi}"]
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", f"-I{SOURCES}", *flags]
    subprocess.run([*command, "shim.c", "-o", "shim.so", "-lm"], cwd=folder, check=True, timeout=60)
    library = ctypes.CDLL(str(folder / "shim.so"))
    kind = ctypes.c_double if real == "double" else ctypes.c_float
    library.score.restype = kind
    library.score.argtypes = [kind, kind, kind, ctypes.c_int, ctypes.c_int, ctypes.POINTER(kind)]
    return library, kind


@pytest.mark.parametrize("real", ["double", "float"])
@pytest.mark.parametrize("softcap", [0, 1])
@pytest.mark.parametrize("alibi", [0, 1])
def test_scores(tmp_path, real, softcap, alibi):
    library, kind = build(tmp_path, real, softcap, alibi)
    close = 1e-14 if real == "double" else 1e-6
    for scaled, cap, slope, at, pos in [(1.5, 2.0, 0.25, 7, 3), (-30.0, 5.0, 0.5, -2, 9), (0.0, 1.0, 1.0, 4, 4)]:
        derivative = kind(-1)
        got = library.score(scaled, cap, slope, at, pos, ctypes.byref(derivative))
        t = np.tanh(scaled / cap)
        expected = (cap * t if softcap else scaled) - (slope * abs(at - pos) if alibi else 0)
        assert got == pytest.approx(expected, rel=close, abs=close)
        assert derivative.value == pytest.approx(1 - t * t if softcap else 1, rel=close, abs=close)


def test_visible(tmp_path):
    library, _ = build(tmp_path, "float", 0, 0)
    assert [library.visible(2, 5, pos) for pos in range(1, 7)] == [0, 1, 1, 1, 0, 0]
    assert not library.visible(3, 3, 3)
