"""The kernels as a program of their own: on ARM under an emulator, and under the thread sanitizer."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import host_kit as kit
import numpy as np
import pytest

from burstmpi.backends import host
from burstmpi.rules import Rules

MAIN = Path(__file__).resolve().parent / "cross" / "attend_main.c"
FLAGS = [flag for flag in host.BASE_FLAGS if flag not in ("-shared", "-fPIC")]
CASES = [
    (1, 130, 201, 4, 2, 40, 24, {"causal": True}),
    (2, 97, 64, 2, 2, 64, 64, {"window": (30, 4), "softcap": 5.0}),
    (1, 300, 300, 2, 1, 33, 17, {"alibi_slopes": (0.5, 0.1), "documents": (0, 150, 300)}),
]


def build(command, tmp_path, *flags):
    program = tmp_path / "attend_main"
    words = [*command, *FLAGS, *flags, f"-I{host._sources()}", str(MAIN), "-o", str(program), "-lm"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return program


def attend(words, tmp_path, case, dtype, threads=1, **environ):
    """out, lse, dq, dk, dv and once more dq, dk, dv, rounded by the last block, as that program computes them, and its inputs."""
    batch, rows_q, rows_k, heads, kv_heads, d, dv, options = case
    rng = np.random.default_rng(rows_q)
    q, k, v, dout = kit.arrays(rng, batch, rows_q, rows_k, heads, kv_heads, d, dv, dtype)
    rules = Rules(**options)
    scores = rules.scores(d)
    numbers = [batch, rows_q, rows_k, heads, kv_heads, d, dv, threads, host.TYPES[dtype], scores.slopes is not None]
    parts = [np.array(numbers, np.int64), np.array([scores.scale, scores.softcap or 0.0])]
    parts += [np.asarray(x, np.int32) for x in (*rules.intervals(np.arange(rows_q), rows_q, rows_k), np.arange(rows_k))]
    if scores.slopes is not None:
        parts.append(np.array(scores.slopes, np.float64))
    given, got = tmp_path / "input", tmp_path / "output"
    given.write_bytes(b"".join(np.ascontiguousarray(x).tobytes() for x in (*parts, q, k, v, dout)))
    done = subprocess.run(
        [*words, str(given), str(got)], capture_output=True, text=True, timeout=600, env={**os.environ, **environ}
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    raw, results = got.read_bytes(), []
    real = np.float64 if dtype == "float64" else np.float32
    shapes = [((batch, rows_q, heads, dv), q.dtype), ((batch, heads, rows_q), real), (q.shape, real), (k.shape, real), (v.shape, real)]
    shapes += [(x.shape, x.dtype) for x in (q, k, v)]
    for shape, kind in shapes:
        count = int(np.prod(shape))
        results.append(np.frombuffer(raw, kind, count).reshape(shape))
        raw = raw[count * np.dtype(kind).itemsize :]
    assert not raw
    return results, (dout, q, k, v), options


def check_rounded(results):
    """To the bit what sums are that are rounded when all is done."""
    for name, total, rounded in zip(("dq", "dk", "dv"), results[2:], results[5:]):
        assert rounded.tobytes() == total.astype(rounded.dtype).tobytes(), name


def check(results, given, options, dtype, narrow=False):
    check_rounded(results)
    true, same = kit.exact(*given, **options), kit.naive(*given, narrow=narrow, **options)
    size = kit.rms(true[1])
    kinds = (dtype, "float64" if dtype == "float64" else "float32", dtype, dtype, dtype)
    floors = (same[5][0], np.finfo(results[1].dtype).eps, *same[5][1:])
    for name, got, want, near, kind, floor in zip(("out", "lse", "dq", "dk", "dv"), results, true, same, kinds, floors):
        kit.check(name, got, want, near, kind, 2.0, 0.0 if name == "lse" else size, floor)


@pytest.mark.parametrize("bits", [128, pytest.param(256, marks=pytest.mark.slow), 512])
@pytest.mark.parametrize("dtype", list(kit.DTYPES))
def test_on_arm(dtype, bits, tmp_path):
    """The portable path, which is NEON's 128 bits there, and the same sources for SVE's longer vectors."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not compiler or not emulator:
        pytest.skip("no aarch64-linux-gnu-gcc or no qemu-aarch64")
    more = ["-DBURST_DOUBLE"] if dtype == "float64" else []
    machine = ["-march=armv8-a"] if bits == 128 else host.sve_flags(bits // 8)
    program = build([compiler], tmp_path, "-static", *machine, "-pthread", "-DBURST_PTHREADS", *more)
    with_vectors = [] if bits == 128 else ["-cpu", f"max,sve-default-vector-length={bits // 8}"]
    for case in CASES:
        check(*attend([emulator, *with_vectors, str(program)], tmp_path, case, dtype, threads=2), dtype)


BESIDE = {"avx512": (), "avx512bf16": ("-mavx512bf16",), "amx": ("-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-DBURST_TILES")}


def build_beside(tmp_path, *flags):
    """cross/avx512_main.c"""
    program = tmp_path / "avx512_main"
    words = ["gcc", "-O2", "-Wno-psabi", "-ffp-contract=off", "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", *flags]
    done = subprocess.run([*words, str(MAIN.with_name("avx512_main.c")), "-o", str(program), "-lm"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return program


def beside(words, tmp_path):
    """What that program tells."""
    given, got = tmp_path / "input", tmp_path / "output"
    given.touch()
    done = subprocess.run([*words, str(given), str(got)], capture_output=True, text=True, timeout=600)
    assert got.exists(), f"{done.returncode}: {done.stderr[-3000:]}"
    return got.read_text()


@pytest.mark.parametrize("isa", list(BESIDE))
def test_plain_c_does_what_instructions_do(isa, tmp_path):
    """cross/avx512.h, by which kernels run where the CPU lacks AVX-512 or AMX, beside the instructions themselves."""
    if host.missing(isa):
        pytest.skip(f"this CPU has no {', '.join(host.missing(isa))}")
    assert beside([str(build_beside(tmp_path, *BESIDE[isa]))], tmp_path) == "0 differ\n"


FUSED = """
#include <stdio.h>
#include "vec.h"
int main(void)
{
    unsigned state = 1, wrong = 0;
    for (int n = 0; n < 20000; n++) {
        const REAL b = (REAL)1.44269504088896340736;
        vec a, c;
        for (int i = 0; i < LANES; i++) {
            state = state * 1664525u + 1013904223u;
            a[i] = (REAL)((int)state * 0x1p-20);
            c[i] = a[i] * b;
        }
        const vec got = fused(a, b, c);
        for (int i = 0; i < LANES; i++)
            wrong += got[i] != (REAL)(sizeof(REAL) == 8 ? fma((double)a[i], (double)b, -(double)c[i]) : (double)a[i] * (double)b - (double)c[i]);
    }
    return wrong != 0;
}
"""


@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize("more", [(), ("-mfma",), ("-mavx2", "-mfma", "-DBURST_AVX2")], ids=["portable", "fma", "avx2"])
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_a_product_and_a_difference_are_rounded_once(compiler, more, real, tmp_path):
    """Also where the compiler may contract: the product's rounding error must be in it once, neither never nor twice."""
    if shutil.which(compiler) is None or platform.machine() != "x86_64":
        pytest.skip(f"no {compiler} for x86")
    if more and host.missing("avx2"):
        pytest.skip("this CPU has no FMA")
    source, program = tmp_path / "fused.c", tmp_path / "fused"
    source.write_text(FUSED)
    words = [compiler, *FLAGS, *more, *(["-DBURST_DOUBLE"] if real == "double" else []), f"-I{host._sources()}", str(source), "-o", str(program), "-lm"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert subprocess.run([str(program)], timeout=60).returncode == 0


BUILDS = {"portable": ["float32", "float16", "bfloat16"], "portable-double": ["float64"], "avx2": ["float32", "float16", "bfloat16"], "avx2-double": ["float64"]}


@pytest.mark.parametrize("which", ["portable", *(pytest.param(name, marks=pytest.mark.slow) for name in BUILDS if name != "portable")])
def test_by_clang(which, tmp_path):
    """What clang makes of the sources, where it is installed; gcc is not asked."""
    compiler = shutil.which("clang")
    if compiler is None:
        pytest.skip("no clang")
    isa, _, double = which.partition("-")
    if host.missing(isa):
        pytest.skip(f"this CPU has no {', '.join(host.missing(isa))}")
    program = build([compiler], tmp_path, *host.FLAGS[isa, "float64" if double else "float32"], "-pthread", "-DBURST_PTHREADS")
    for dtype in BUILDS[which]:
        for case in CASES:
            check(*attend([str(program)], tmp_path, case, dtype, threads=2), dtype)


def compiler_with(sanitizer, *names):
    """The first of these compilers that is installed, if it has a sanitizer's library (clang always has); skips where there is none."""
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler and "clang" not in compiler:
        found = subprocess.run([compiler, f"-print-file-name=lib{sanitizer}.so"], capture_output=True, text=True).stdout.strip()
        compiler = compiler if os.path.isabs(found) else None
    return compiler or pytest.skip(f"no compiler with lib{sanitizer}")


def sown(tmp_path, name, old, new):
    """A copy of the sources with one text in place of another."""
    folder = tmp_path / "broken"
    shutil.copytree(host._sources(), folder)
    text = (folder / name).read_text()
    assert text.count(old) == 1
    (folder / name).write_text(text.replace(old, new))
    return folder


@pytest.mark.parametrize("isa", kit.isas())
def test_the_thread_sanitizer_reports_nothing(isa, tmp_path):
    """On POSIX threads: OpenMP's runtime is not instrumented, and its barriers would be reported."""
    plain = kit.flags_for(isa)
    compiler = compiler_with("tsan", "gcc", "clang")
    if isa.startswith("amx") and not plain:
        pytest.skip("AMX's tile registers are asked for by Python; the vector kernels share its threads and turns")
    dtype = "bfloat16" if isa in ("amx", "avx512bf16") else "float32"
    flags = [*host.FLAGS[host.variant(isa, dtype)], *plain, "-fsanitize=thread", "-g", "-O1", "-pthread", "-DBURST_PTHREADS"]
    program = build([compiler], tmp_path, *flags)
    for case in CASES:
        one, four = (attend([str(program)], tmp_path, case, dtype, threads, TSAN_OPTIONS="halt_on_error=1 exitcode=66")[0] for threads in (1, 4))
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), one, four):
            assert a.tobytes() == b.tobytes(), name
        check_rounded(one)
        check_rounded(four)


def test_the_thread_sanitizer_would_notice(tmp_path):
    """With the release of a turn made relaxed and its order thrown away, two groups add to one dK at once."""
    compiler = compiler_with("tsan", "gcc", "clang")
    broken = sown(tmp_path, "gradient.h", "memory_order_acquire) != wanted.mine", "memory_order_acquire) < 0 * wanted.mine")
    flags = ["-fsanitize=thread", "-g", "-O1", "-pthread", "-DBURST_PTHREADS", f"-I{broken}"]
    program = build([compiler], tmp_path, *flags)
    case = (1, 2000, 96, 4, 1, 16, 16, {})
    for _ in range(20):  # one thread may be done before the next has begun: on a busy machine a run can be without a race
        try:
            attend([str(program)], tmp_path, case, "float32", 4, TSAN_OPTIONS="halt_on_error=1 exitcode=66")
        except AssertionError as error:
            assert "data race" in str(error)
            return
    pytest.fail("twenty runs without a turn, and no race was reported")


TAKE = "#define TAKE(arena, type, count) ((type *)take(arena, (int64_t)(count) * (int64_t)sizeof(type)))"
SHORTER = """
#include <stdlib.h>
static int64_t shorter(int64_t count, int which)
{
    const char *sown = getenv("SOWN");
    return sown && atoi(sown) == which ? MAX(0, count - atoi(getenv("SHORTER"))) : count;
}
#define TAKE(arena, type, count) ((type *)take(arena, shorter(count, __COUNTER__) * (int64_t)sizeof(type)))
"""


def test_the_address_sanitizer_would_notice(tmp_path):
    """All buffers lie in one piece of memory, with gaps between them: each in its turn is too short by one number.

    Of some, the last numbers are the padding of a row, or room for other blocks, which nobody touches; those are made shorter by 64.
    """
    compiler = compiler_with("asan", "gcc")
    broken = sown(tmp_path, "tasks.h", TAKE, SHORTER)
    buffers = sum((broken / name).read_text().count(" = TAKE(") for name in ("tasks.h", "tile.h", "state.h", "gradient.h", "forward.h", "backward.h"))
    buffers -= 1  # divisor, which vdpbf16ps alone has
    flags = ["-fsanitize=address", "-g", "-O0", "-pthread", "-DBURST_PTHREADS", "-DBURST_GUARD", f"-I{broken}"]
    program = build([compiler], tmp_path, *flags)

    def caught(**sown):
        try:
            attend([str(program)], tmp_path, CASES[0], "float32", 2, ASAN_OPTIONS="detect_leaks=0 symbolize=0", **sown)
        except AssertionError as error:
            assert "use-after-poison" in str(error), error
            return True
        return False

    assert not caught() and not caught(SOWN=str(buffers), SHORTER="64")
    assert buffers > 30
    padded = [which for which in range(buffers) if not caught(SOWN=str(which), SHORTER="1")]
    assert len(padded) <= 6 and all(caught(SOWN=str(which), SHORTER="64") for which in padded), padded
