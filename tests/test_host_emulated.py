"""The kernels of AVX-512, vdpbf16ps and AMX on an emulated CPU that has them, whatever this one has: cross/bochs.py tells how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_host_cross import BESIDE, CASES, attend, beside, build, build_beside, check

from burstmpi.backends import host

CROSS = Path(__file__).resolve().parent / "cross"
EMULATED = [sys.executable, str(CROSS / "bochs.py")]
LARGER = [  # several groups of panels and tiles of keys
    (1, 700, 900, 1, 1, 128, 128, {"causal": True, "documents": ((0, 200, 410, 700), (0, 300, 520, 900))}),
    (1, 450, 700, 2, 2, 96, 80, {"causal": True, "window": (300, 0), "softcap": 8.0, "alibi_slopes": (0.05, 0.3)}),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("BURSTMPI_BOCHS" not in os.environ, reason="BURSTMPI_BOCHS names no folder with an emulator: tests/cross/bochs.py --get makes one"),
    pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("gcc"), reason="no gcc for x86"),
]


@pytest.mark.parametrize(
    "isa, dtype",
    [
        *(("avx512", dtype) for dtype in ("float32", "float64", "float16", "bfloat16")),
        ("avx512bf16", "bfloat16"),
        ("amx", "bfloat16"),
        ("amx", "float32"),
    ],
)
def test_on_an_emulated_cpu(isa, dtype, tmp_path):
    """Against the float64 reference; one instruction that the emulator gets wrong is replaced by two that it does not (cross/bochs.h)."""
    narrow = isa != "avx512" and dtype == "bfloat16"
    flags = [*host.FLAGS[host.variant(isa, dtype)], "-include", str(CROSS / "bochs.h")] if narrow else host.FLAGS[host.variant(isa, dtype)]
    program = build(["gcc"], tmp_path, "-static", *flags, "-pthread", "-DBURST_PTHREADS")
    for case in (*CASES, *LARGER):
        check(*attend([*EMULATED, str(program)], tmp_path, case, dtype), dtype, narrow)


@pytest.mark.parametrize("isa", list(BESIDE))
def test_plain_c_does_what_emulated_instructions_do(isa, tmp_path):
    """Two that know nothing of each other: cross/avx512.h and Bochs."""
    program = build_beside(tmp_path, "-static", *BESIDE[isa], *(() if isa == "avx512" else ("-include", str(CROSS / "bochs.h"))))
    assert beside([*EMULATED, str(program)], tmp_path) == "0 differ\n"


ECHO = """
#include <stdio.h>
int main(int argc, char **argv)
{
    FILE *in = fopen(argv[1], "rb"), *to = fopen(argv[2], "wb");
    for (int c; (c = getc(in)) != EOF;) {
        if (c == '!') __builtin_trap();
        putc(c, to);
    }
    return fclose(to) ? 1 : 7;
}
"""


def test_the_emulated_machine_tells_how_a_program_ends(tmp_path):
    """By its exit status, or, for a fault, by the machine's log."""
    source, program, given, got = (tmp_path / name for name in ("echo.c", "echo", "input", "output"))
    source.write_text(ECHO)
    subprocess.run(["gcc", "-static", str(source), "-o", str(program)], check=True)
    words = [*EMULATED, str(program), str(given), str(got)]
    sent = bytes(range(ord("!"))) * 1000
    given.write_bytes(sent)
    assert subprocess.run(words, timeout=60).returncode == 7 and got.read_bytes() == sent
    given.write_bytes(sent + b"!")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "exception with no resolution" in done.stderr
