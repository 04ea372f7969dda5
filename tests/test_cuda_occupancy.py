"""Blocks of threads on a multiprocessor: our arithmetic beside NVIDIA's own, for every row of the table."""

import random
import sys

import pytest
from cuda_kit import PTX

from burstmpi.backends import tiles

sys.path[:0] = [str(PTX), str(PTX.parent.parent / "benchmarks")]
import occupancy  # noqa: E402

needs_nvidia = pytest.mark.skipif(occupancy.missing() is not None, reason=str(occupancy.missing()))


def rows_of_the_table():
    """(arch, shared, warps, resident) of every kernel."""
    for arch in tiles.ARCHITECTURES:
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            if (arch, dtype) == ("75", "bfloat16"):
                continue
            for direction in ("forward", "backward", "backward_queries"):
                for d in tiles.HEAD_DIMS:
                    for dv in tiles.HEAD_DIMS:
                        tile = tiles.kernel(direction, arch, dtype, d, dv).tile
                        yield arch, tile.shared, tile.warps, tile.resident


@needs_nvidia
def test_every_row_with_any_number_of_registers():
    shapes = sorted({row[:3] for row in rows_of_the_table()})
    rows = [(arch, registers, shared, warps) for arch, shared, warps in shapes for registers in range(16, 256)]
    assert len(rows) > 10000
    ours, theirs = [occupancy.occupancy(*row) for row in rows], occupancy.by_nvidia(rows)
    wrong = [(row, mine, told) for row, mine, told in zip(rows, ours, theirs, strict=True) if mine != told]
    assert not wrong, (len(wrong), wrong[:5])


@needs_nvidia
def test_any_kernel():
    """Beyond the table: all numbers of warps, any shared memory, none too."""
    draw = random.Random(0)
    rows = []
    for arch in tiles.ARCHITECTURES:
        for _ in range(2000):
            warps = draw.randint(1, 32)
            registers = draw.randint(1, min(255, 65536 // (32 * warps)))
            rows.append((arch, registers, draw.choice([0, draw.randint(0, tiles.SHARED_LIMIT[arch])]), warps))
    ours, theirs = [occupancy.occupancy(*row) for row in rows], occupancy.by_nvidia(rows)
    wrong = [(row, mine, told) for row, mine, told in zip(rows, ours, theirs, strict=True) if mine != told]
    assert not wrong, (len(wrong), wrong[:5])


@needs_nvidia
def test_resident_blocks_have_room():
    """As many blocks as the table says fit side by side where a thread has the registers that __launch_bounds__ leaves it."""
    rows, wanted = [], []
    for arch, shared, warps, resident in sorted(set(rows_of_the_table())):
        registers = min(255, 65536 // (resident * warps * 32) // 8 * 8)
        rows.append((arch, registers, shared, warps))
        wanted.append((arch, shared, warps, resident))
    short = [(want, told) for want, told in zip(wanted, occupancy.by_nvidia(rows), strict=True) if told < want[3]]
    assert not short
