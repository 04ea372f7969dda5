"""What benchmarks/kernels.py prints of the kernels, kept true: traffic of each kernel, loops of the float32 and float64 products."""

import subprocess
import sys

import cuda_kit
import pytest

from burstmpi.backends import tiles

BENCHMARKS = cuda_kit.PTX.parent.parent / "benchmarks"
sys.path[:0] = [str(cuda_kit.PTX), str(BENCHMARKS)]
import counted  # noqa: E402
import kernels  # noqa: E402

DIRECTIONS = ("forward", "backward", "backward_queries")
FEW = [("backward_queries", "bfloat16", 64), *((direction, "float32", 64) for direction in DIRECTIONS), ("forward", "float64", 64)]
ALL = [(direction, dtype, d) for direction in DIRECTIONS for dtype in ("bfloat16", "float16", "float32", "float64") for d in (64, 128)]
needs_nvdisasm = pytest.mark.skipif(kernels.sass.nvdisasm() is None, reason="nvdisasm is missing (wheel nvidia-cuda-nvdisasm)")


@pytest.mark.skipif(cuda_kit.REAL, reason="counted by the PTX machine")
@pytest.mark.parametrize("direction, dtype, d", [*FEW, *(pytest.param(*x, marks=pytest.mark.slow) for x in ALL if x not in FEW)])
def test_memory_is_moved_as_the_formula_says(direction, dtype, d):
    """No bank conflict, whole sectors, and bytes within 5% of the tile formula."""
    told = counted.counted(direction, dtype, d)
    assert told["conflicts"] == 0 and told["sectors over the fewest"] == 0, told
    assert told["sectors"] > 0 and told["written"] == told["formula of written"], told
    assert abs(told["bytes"] / told["formula"] - 1) < 0.05, told


@needs_nvdisasm
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype, d", [("float32", 64), ("float32", 128), ("float64", 64)])
def test_loops_of_products(direction, dtype, d):
    """One loop a product at least, little beside products and loads in it, bound by the products on sm_80, d 64; blocks as the table says."""
    listing, loops, seconds, blocks, kernel = kernels.wide_figures(direction, "80", dtype, d)
    assert len(loops) == {"forward": 2, "backward": 5, "backward_queries": 3}[direction]
    assert listing.count("LDL", "STL") == 0 and listing.stack == 0 and seconds < 10
    assert blocks >= kernel.tile.resident
    for loop in loops:
        products, loads = loop.count(*kernels.FMA), loop.count("LDS")
        assert products and len(loop.body) - products - loads <= 8, loop.mix()
        if d == 64:  # at d 128 three loops of float32 are bound by shared memory, if quarter-warps are served one by one
            assert kernels.bound(kernels.wide_modelled("80", loop)) == "product"
        if dtype == "float32":
            assert products >= 0.75 * len(loop.body)


def test_inner_loops_of_a_listing():
    """Two loops in a loop: the inner ones, in the order of the text."""
    text = ["MOV", "LDS", "FFMA", "@P0 BRA `(.L_b)", "DMMA", "@P1 BRA `(.L_c)", "FFMA", "@P2 BRA `(.L_a)", "EXIT"]
    listing = kernels.sass.Listing("f", text, {".L_a": 0, ".L_b": 1, ".L_c": 4}, 8, 0, 0)
    assert [loop.body for loop in listing.inner_loops("FFMA", "DMMA")] == [text[1:4], text[4:6]]
    assert [loop.body for loop in listing.inner_loops("LDS")] == [text[1:4]]


@needs_nvdisasm
def test_the_command():
    """One architecture and head dim of the whole table."""
    told = subprocess.run(
        [sys.executable, str(BENCHMARKS / "kernels.py"), "--arch", "80", "--dim", "64", "--dtype", "bfloat16", "float32",
         "--direction", "forward", "--no-counts"], capture_output=True, text=True, check=True).stdout  # fmt: skip
    rows = [line.split() for line in told.splitlines() if line.startswith("forward")]
    assert [row[:4] for row in rows[:1]] == [["forward", "80", "bfloat16", "64"]]
    assert any(row[:4] == ["forward", "80", "float32", "64"] for row in rows)
    assert "Beside FlashAttention-2" in told
    assert kernels.missing() or " 0 differ" in told


def test_every_tile_has_a_formula():
    for direction in DIRECTIONS:
        for dtype, item in (("bfloat16", 2), ("float32", 4), ("float64", 8)):
            kernel = tiles.kernel(direction, "80", dtype, 64, 64)
            read, written = counted.formula(direction, kernel, kernel.tile.queries, kernel.tile.keys, 64, item)
            rows = kernel.tile.queries + kernel.tile.keys
            assert read >= rows * 64 * item and written > 0  # each row is read at least once
