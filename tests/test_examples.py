"""The examples, run as users run them: each in an MPI job of its own, checked by exit code and by what it prints.

A sabotaged library must make each of them fail: an example that cannot say WRONG proves nothing.
"""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest
from launching import ROOT, launch, not_under_mpi

EXAMPLES = ROOT / "examples"

pytestmark = not_under_mpi


def good(ranks, name, *options) -> str:
    """Run an example that must succeed; returns what it printed."""
    done = launch(ranks, EXAMPLES / name, *options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def sabotaged(tmp_path):
    """Make a script that runs an example with a library that is a little wrong on its last rank."""

    def write(name, what, which=slice(None), factor=1 + 1e-4):
        script = tmp_path / "wrong.py"
        script.write_text(
            "import runpy, sys\n"
            "from mpi4py import MPI\n"
            "import burstmpi\n"
            f"sys.argv[0] = {str(EXAMPLES / name)!r}\n"
            f"right = burstmpi.BurstAttention.{what}\n"
            "def wrong(self, *arrays, **options):\n"
            "    results = right(self, *arrays, **options)\n"
            "    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:\n"
            f"        for x in results[{which!r}]:\n"
            f"            x *= {factor!r}\n"
            "    return results\n"
            f"burstmpi.BurstAttention.{what} = wrong\n"
            f"runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')\n",
            encoding="utf-8",
        )
        return script

    return write


# ---------------------------------------------------------------- quickstart


def size(text) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_quickstart(ranks):
    tokens, heads, dim = 256, 2, 32
    shape = ("--tokens", tokens, "--heads", heads, "--head-dim", dim)
    text = good(ranks, "quickstart.py", *shape, "--full", "--backward", "q")
    assert f"over {ranks} rank" in text
    assert f"{tokens} tokens, {heads} heads of {dim}, float32" in text
    assert "RIGHT" in text and "WRONG" not in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    for name in ("out", "lse", "dq", "dk", "dv"):
        error, naive, allowed = map(float, rows[name].split()[1:4])
        assert 0 < error <= allowed and 0 < naive
    # All ranks together: 2 B Z N d elements times (G-1) in forward, 3 B Z N d + 2 B Z N in backward.
    whole = heads * tokens * 4 * (ranks - 1)
    for name, nbytes in (("forward", 2 * dim * whole), ("backward", (3 * dim + 2) * whole)):
        shown = re.search(r"([\d.]+ \w*B)\s+(\d+)", rows[name].split("GFLOP/s")[1])
        assert size(shown[1]) == pytest.approx(nbytes, rel=1e-2)
        assert (int(shown[2]) > 0) == (ranks > 1)


def test_quickstart_options():
    text = good(
        3, "quickstart.py", "--tokens", 97, "--kv-heads", 1, "--batch", 2, "--dtype", "float16", "--layout", "striped",
        "--window", 20, "--repeats", 1,
    )  # fmt: skip
    assert "4 query and 1 key heads" in text and "causal, window of 20" in text and "32 to 33 rows each" in text
    assert "RIGHT" in text


def test_quickstart_says_when_it_does_not_check():
    text = good(2, "quickstart.py", "--tokens", 64, "--no-check", "--repeats", 1)
    assert "NOT CHECKED" in text and "RIGHT" not in text


def test_quickstart_refuses():
    done = launch(2, EXAMPLES / "quickstart.py", "--heads", 4, "--kv-heads", 3)
    assert done.returncode != 0
    assert done.stderr.count("--kv-heads: 3 does not divide --heads 4") == 1


# ---------------------------------------------------------------- the others


@pytest.mark.parametrize("ranks, way", [(1, "auto"), (2, "q"), (4, "kv")])
def test_gradients(ranks, way):
    text = good(ranks, "gradients.py", "--tokens", 61, "--backward", way)
    assert len(re.findall(r"^(?:random|steepest).* ok$", text, re.MULTILINE)) == 4
    assert "RIGHT" in text


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_optimal_transport(ranks):
    text = good(ranks, "optimal_transport.py", "--points", 50, "--epsilon", 0.5)
    divergence = float(re.search(r"divergence\s+([\d.]+)", text)[1])
    shift = 0.3 * np.arange(1, 4) / 3
    assert divergence == pytest.approx(0.5 * shift @ shift, abs=1e-10)
    assert len(re.findall(r"^(?:marginals|distance|map) .* ok$", text, re.MULTILINE)) == 3


@pytest.mark.parametrize("ranks", [1, 4])
def test_mean_shift(ranks):
    text = good(ranks, "mean_shift.py", "--points", 200)
    assert "RIGHT" in text
    assert re.search(r"found 5 clusters of 5", text)


def test_transformer_learns_the_same_on_any_number_of_ranks():
    curves = {}
    for ranks in (1, 4):
        told = json.loads(good(ranks, "tiny_transformer.py", "--steps", 20, "--tokens", 50, "--json"))
        assert told["ranks"] == ranks
        apart, allowed = told["gradient"]
        assert apart <= allowed
        curves[ranks] = np.array(told["losses"])
    assert len(curves[1]) == 20 and np.isfinite(curves[1]).all()
    assert curves[1][-5:].mean() < 0.8 * curves[1][0]
    np.testing.assert_allclose(curves[4], curves[1], rtol=0, atol=1e-10)


# ---------------------------------------------------------------- they notice what is wrong


@pytest.mark.parametrize(
    "name, what, options",
    [
        ("quickstart.py", "forward", ["--tokens", 64, "--repeats", 1]),
        ("quickstart.py", "backward", ["--tokens", 64, "--repeats", 1]),
        ("gradients.py", "backward", ["--tokens", 61]),
        ("optimal_transport.py", "forward", ["--points", 30, "--epsilon", 0.3, "--iterations", 60]),
        ("tiny_transformer.py", "backward", ["--steps", 1, "--tokens", 20]),
    ],
)
def test_examples_notice_a_wrong_library(sabotaged, name, what, options):
    done = launch(2, sabotaged(name, what), *options)
    assert done.returncode != 0
    assert "WRONG" in done.stdout, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr


LONG = "../benchmarks/long.py", "--tokens", 4096, "--window", 256
counts_pages = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not tell what memory was written to")


@counts_pages
def test_a_long_sequence():
    text = good(2, *LONG, "--layout", "zigzag")
    assert ": right" in text and float(re.search(r"a rank ([\d.]+) of what is allowed", text)[1]) <= 1


@counts_pages
@pytest.mark.parametrize("what, which", [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1), ("backward", 2)])
def test_a_long_sequence_notices_one_wrong_result(sabotaged, what, which):
    """Of one rank, and by less than sums over all rows tell."""
    done = launch(2, sabotaged(LONG[0], what, slice(which, which + 1), 1 + 2e-5), *LONG[1:])
    assert done.returncode == 1 and ": WRONG" in done.stdout, f"{done.stdout}\n{done.stderr}"
