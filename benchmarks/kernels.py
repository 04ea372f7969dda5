"""All figures of the CUDA kernels that need no GPU, by one command: SASS, a model of time, occupancy, memory traffic.

    python benchmarks/kernels.py                         # float16 and bfloat16: what docs/kernels.md tells
    python benchmarks/kernels.py --arch 80 --dim 64 128  # some of it
    python benchmarks/kernels.py --no-counts             # without runs on the PTX machine

Columns: x, other instructions per HMMA on the hot path of the loop of full tiles (sass.py), and of the loop that masks;
cycles of a trip for a warp and its quarter of a multiprocessor, by what it uses:

    tensor   HMMA x cycles of one        issue   all instructions        EX2   MUFU x 8
    shared   512 bytes of each LDSM, LDS.128 and LDGSTS / 32 bytes a cycle (128 for four quarters)

The largest one bounds the loop.  A direction has a function `<direction>_loops(kernel, arch)` that tells how many HMMA
and copies a trip has; another kernel plugs in by one more entry of LOOPS.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import sass  # noqa: E402

from burstmpi.backends import tiles  # noqa: E402

# Cycles of an m16n8k16 HMMA on a quarter of a multiprocessor.  sm_80: 256 multiply-adds a cycle.  sm_90 does 512, but
# mma.sync is known to reach about 63% of that.  sm_86, 89, 120: float32 sums go at half of sm_80's rate.  sm_75: of k8.
HMMA_CYCLES = {"75": 8, "80": 8, "86": 16, "89": 16, "90": 4 / 0.63, "100": 4 / 0.63, "120": 16}

# Of a multiprocessor: registers, bytes of shared memory (1 KB a block is CUDA's), warps, blocks.
PROCESSOR = {
    "75": (65536, 64 << 10, 32, 16), "80": (65536, 164 << 10, 64, 32), "86": (65536, 100 << 10, 48, 16),
    "89": (65536, 100 << 10, 48, 24), "90": (65536, 228 << 10, 64, 32), "100": (65536, 228 << 10, 64, 32),
    "120": (65536, 100 << 10, 48, 24),
}  # fmt: skip

# FlashAttention-2's main loops, compiled with its own flags: instructions, HMMA, LDSM (+ 16 LDGSTS at d 64, 32 at 128), EX2
FLASH = {
    ("forward", "80", 64): (1185, 256, 72, 132), ("forward", "80", 128): (941, 256, 80, 68),
    ("forward", "90", 64): (1176, 256, 72, 132), ("forward", "90", 128): (939, 256, 80, 68),
    ("forward", "120", 64): (1337, 256, 72, 132), ("forward", "120", 128): (1112, 256, 80, 68),
    ("backward", "80", 64): (1127, 320, 144, 64), ("backward", "80", 128): (891, 320, 144, 32),
    ("backward", "90", 64): (1094, 320, 144, 64), ("backward", "90", 128): (875, 320, 144, 32),
}  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """What a trip round a loop must meet, so that sass.py finds its hot path."""

    hmma: int
    least: dict


def forward_loops(kernel, arch) -> dict[str, Loop]:
    """A trip of the main loop is two tiles; one of the loop that masks is one, with a comparison for each score."""
    told = kernel.defines
    d, dv, keys, slabs = told["HEAD_DIM"], told["HEAD_DIM_V"], told["TILE_K"], told["TILE_Q"] // told["WARPS"] // 16
    hmma = slabs * keys // 8 * (d // 16 + dv // 16) * (2 if arch == "75" else 1)  # m16n8k8 there
    copies = 0 if arch == "75" else keys * (d + dv) // 8 // kernel.tile.threads  # 16 bytes each
    scores = slabs * 4 * keys // 8  # of a thread
    return {
        "full": Loop(2 * hmma, {"LDGSTS": 2 * copies}),
        "cut": Loop(hmma, {"LDGSTS": copies, "FSEL": scores, "SHFL": slabs * 2 * -(-keys // 32)}),
    }


def gradient_loops(kernel, arch, products) -> dict[str, Loop]:
    """A trip is one tile of queries and one of keys; the loop that masks selects for each score."""
    told = kernel.defines
    hmma = told["TILE_Q"] * told["TILE_K"] * products // 2048 // told["WARPS"] * (2 if arch == "75" else 1)
    copies = {"STS": 2} if arch == "75" else {"LDGSTS": 2}
    return {"full": Loop(hmma, copies), "cut": Loop(hmma, {"FSEL": told["CHUNK"] // 4})}


def backward_loops(kernel, arch) -> dict[str, Loop]:
    """Five products: S, dP, dV, dK, dQ."""
    return gradient_loops(kernel, arch, 3 * kernel.defines["HEAD_DIM"] + 2 * kernel.defines["HEAD_DIM_V"])


def backward_queries_loops(kernel, arch) -> dict[str, Loop]:
    """Three products: S, dP, dQ."""
    return gradient_loops(kernel, arch, 2 * kernel.defines["HEAD_DIM"] + kernel.defines["HEAD_DIM_V"])


LOOPS = {"forward": forward_loops, "backward": backward_loops, "backward_queries": backward_queries_loops}


@dataclass(frozen=True)
class Figures:
    """What is known of a kernel of the table."""

    listing: sass.Listing
    full: sass.Way
    cut: sass.Way | None
    seconds: float
    occupancy: int


def occupancy(arch: str, registers: int, shared: int, warps: int) -> int:
    """Blocks of threads that a multiprocessor holds: as cuda_occupancy.h has it."""
    regs, memory, most_warps, most_blocks = PROCESSOR[arch]
    of_a_warp = -(-registers * 32 // 256) * 256
    by_registers = regs // 4 // of_a_warp * 4 // warps  # each quarter holds whole warps
    return min(by_registers, memory // (-(-shared // 1024) * 1024 + 1024), most_warps // warps, most_blocks)


def figures(direction: str, arch: str, dtype: str, d: int, dv: int | None = None) -> Figures:
    """Compile an entry of the table and read its SASS."""
    kernel = tiles.kernel(direction, arch, dtype, d, dv or d)
    cubin = sass.compiled(kernel, arch)
    listing = cubin.kernel(direction)
    loops = LOOPS[direction](kernel, arch)
    found = {name: listing.hot_path(loop.hmma, least=loop.least) for name, loop in loops.items()}
    blocks = occupancy(arch, listing.registers, kernel.tile.shared, kernel.tile.warps)
    return Figures(listing, found["full"], found.get("cut"), cubin.seconds, blocks)


def cycles(arch: str, instructions: int, hmma: int, ldsm: int, ex2: int) -> dict[str, float]:
    """The model: cycles of a quarter of a multiprocessor, by what is used."""
    return {"tensor": hmma * HMMA_CYCLES[arch], "issue": instructions, "EX2": 8 * ex2, "shared": 16 * ldsm}


def modelled(arch: str, path: sass.Way) -> dict[str, float]:
    wide = sum(sass.opcode(text) == "LDS" and ".128" in text for text in path.body)
    moved = path.count("LDSM", "LDGSTS") + wide
    return cycles(arch, len(path.body), path.hmma, moved, path.count("MUFU"))


def bound(model: dict[str, float]) -> str:
    return max(model, key=model.get)


def counts(d: int, arch="80", rows_q=256, rows_k=1024, **options) -> dict:
    """Run forward in bfloat16 on the PTX machine, one head, and count.

    Returns conflicts and sectors beyond the fewest of the main loop and of all, and bytes asked of global memory beside the formula
    tiles_q (TILE_Q d + rows_k (d + dv)) 2 + rows_q (dv 2 + 4): Q once, K and V once for each tile of queries, out and lse.
    """
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]
    import cuda_kit
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    backend = cuda_kit.backend(arch, splits=1, count=True, check=False)
    q, k, v = (rng.standard_normal((1, n, 1, d)).astype(ml_dtypes.bfloat16) for n in (rows_q, rows_k, rows_k))
    cuda_kit.forward(backend, q, k, v, **options)
    from ptxmachine import cupy

    told = next(c for c in reversed(cupy.simulation().machine.history) if c.program.name == "forward")
    loop = max(told.loops(), key=lambda loop: loop["mix"].get("tensor", 0))
    tile = tiles.forward(arch, "bfloat16", d, d).tile
    formula = -(-rows_q // tile.queries) * (tile.queries + 2 * rows_k) * d * 2 + rows_q * (2 * d + 4)
    return {
        "conflicts in the main loop": loop["bank_conflicts"],
        "conflicts": told.bank_conflicts,
        "sectors over the fewest": told.sectors - int(told.global_ideal.sum()),
        "sectors": told.sectors,
        "bytes": sum(told.bytes),
        "formula": formula,
    }


def table(archs, dims, dtypes, directions) -> None:
    head = ("kernel", "sm", "type", "d", "x", "x cut", "ratio", "LDL/STL", "regs", "stack", "blocks", "NOP", "s")
    print("%-16s %4s %-9s %7s %6s %6s %6s %8s %5s %6s %7s %4s %5s  cycles of a trip" % head)
    for direction in directions:
        for arch in archs:
            for d, dv in dims:
                for dtype in dtypes:
                    if arch == "75" and dtype == "bfloat16":
                        continue
                    f = figures(direction, arch, dtype, d, dv)
                    model = modelled(arch, f.full)
                    cut = f.cut.x if f.cut else float("nan")
                    row = (direction, arch, dtype, d if d == dv else f"{d}/{dv}", f.full.x_without_nops, cut, cut / f.full.x, f.full.local,
                           f.listing.registers, f.listing.stack, f.occupancy, f.full.nops, f.seconds)  # fmt: skip
                    text = ", ".join(f"{name} {value:.0f}" for name, value in model.items())
                    print("%-16s %4s %-9s %7s %6.3f %6.3f %6.2f %8d %5d %6d %7d %4d %5.1f  %s: %s" % (*row, text, bound(model)), flush=True)


def beside_flash(archs, directions) -> None:
    """The same model for FlashAttention-2's loops: cycles for a pair (query, key) of a quarter, times 1000."""
    print("\nBeside FlashAttention-2 (its main loop, its own flags): x, and the modelled cycles of a trip per HMMA")
    for (direction, arch, d), (instructions, hmma, ldsm, ex2) in FLASH.items():
        if arch not in archs or direction not in directions:
            continue
        theirs = cycles(arch, instructions, hmma, ldsm + 16 * d // 64, ex2)
        f = figures(direction, arch, "bfloat16", d)
        ours = modelled(arch, f.full)
        print("%-9s sm_%-4s d %-4d x %5.2f, theirs %5.2f;  %s %.2f, theirs %s %.2f;  issue %.2f, theirs %.2f" % (
            direction, arch, d, f.full.x_without_nops, (instructions - hmma) / hmma, bound(ours), max(ours.values()) / f.full.hmma,
            bound(theirs), max(theirs.values()) / hmma, ours["issue"] / f.full.hmma, theirs["issue"] / hmma), flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", nargs="+", default=["75", "80", "86", "89", "90", "100", "120"])
    parser.add_argument("--dim", nargs="+", default=["32", "64", "96", "128", "192/128", "192", "256"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--direction", nargs="+", default=list(LOOPS))
    parser.add_argument("--no-counts", action="store_true", help="do not run kernels on the PTX machine")
    args = parser.parse_args()
    if sass.nvdisasm() is None:
        sys.exit("nvdisasm: not found; pip install nvidia-cuda-nvdisasm")
    dims = [tuple(map(int, (text.split("/") * 2)[:2])) for text in args.dim]
    table(args.arch, dims, args.dtype, args.direction)
    beside_flash(args.arch, args.direction)
    if not args.no_counts and "forward" in args.direction:
        print("\nCounted on the PTX machine: forward, bfloat16, 256 queries, 1024 keys")
        for d in (64, 128):
            for name, options in (("full", {}), ("causal", {"causal": True})):
                told = counts(d, rows_k=1024 if name == "full" else 256, **options)
                print(f"d {d} {name}: " + ", ".join(f"{what} {n}" for what, n in told.items()), flush=True)


if __name__ == "__main__":
    main()
