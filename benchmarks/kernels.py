"""All figures of the CUDA kernels by one command: SASS, a model of time, occupancy, memory traffic, errors; and times where there is a GPU.

    python benchmarks/kernels.py                         # all that docs/kernels.md tells; 40 minutes of one core
    python benchmarks/kernels.py --arch 80 --dim 64 128  # some of it
    python benchmarks/kernels.py --no-counts             # without runs on the PTX machine
    python benchmarks/kernels.py --scores alibi softcap  # backward of the half types with these, and nothing else
    python benchmarks/kernels.py --without-dq            # backward that leaves dQ to backward_queries, and nothing else
    python benchmarks/kernels.py --machine               # only runs on it: bank conflicts, sectors, bytes, errors
    python benchmarks/kernels.py --gpu                   # times on the GPU at hand, beside its peak, PyTorch and flash_attn

float16 and bfloat16: x, other instructions per HMMA on the hot path of the loop of full tiles (sass.py), and of the loop that masks, and
what the latter is of the former; LDL/STL on the hot paths of both; "forward-sorted" is the variant for keys that are out of order, its ratio that to the plain one's full tiles;
"fill" are instructions of that loop that do nothing (NOP, or a predicate that is never true), which x counts but for NOPs;
cycles of a trip for a warp and its quarter of a multiprocessor, by what it uses:

    tensor   HMMA x cycles of one        issue   all instructions        EX2   MUFU x 8
    shared   512 bytes of each LDSM, LDS.128 and LDGSTS / 32 bytes a cycle (128 for four quarters), as it is known of
             FlashAttention-2; in brackets with stores and narrower loads as well

The largest one bounds the loop.  A direction has a function `<direction>_loops(kernel, arch)` that tells how many HMMA
and copies a trip has; another kernel plugs in by one more entry of LOOPS.

float32 and float64: each product is a loop of its own; its FFMA, DFMA or DMMA, its LDS, all instructions, and the same model.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import sass  # noqa: E402
from counted import WIDE, counts, print_counts, print_errors  # noqa: E402, F401
from occupancy import by_nvidia, missing, occupancy  # noqa: E402

from burstmpi.backends import tiles  # noqa: E402

# Cycles of an m16n8k16 HMMA on a quarter of a multiprocessor.  sm_80: 256 multiply-adds a cycle.  sm_90 does 512, but
# mma.sync is known to reach about 63% of that.  sm_86, 89, 120: float32 sums go at half of sm_80's rate.  sm_75: of k8.
HMMA_CYCLES = {"75": 8, "80": 8, "86": 16, "89": 16, "90": 4 / 0.63, "100": 4 / 0.63, "120": 16}

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
    rows = told["TILE_Q" if kernel.source == "backward" else "TILE_K"]  # of a tile that is copied
    copies = {"LDG": rows * (told["HEAD_DIM"] + told["HEAD_DIM_V"]) // 8 // kernel.tile.threads} if arch == "75" else {"LDGSTS": 2}
    return {"full": Loop(hmma, copies), "cut": Loop(hmma, {"FSEL": told["CHUNK"] // 4})}


def backward_loops(kernel, arch) -> dict[str, Loop]:
    """Five products: S, dP, dV, dK, dQ; the last one not with WITH_DQ=0."""
    told = kernel.defines
    return gradient_loops(kernel, arch, (2 + told.get("WITH_DQ", 1)) * told["HEAD_DIM"] + 2 * told["HEAD_DIM_V"])


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


@cache
def figures(direction: str, arch: str, dtype: str, d: int, dv: int | None = None, **defines) -> Figures:
    """Compile an entry of the table and read its SASS."""
    kernel = tiles.kernel(direction, arch, dtype, d, dv or d)
    cubin = sass.compiled(kernel, arch, **defines)
    listing = cubin.kernel(direction)
    loops = LOOPS[direction](replace(kernel, defines={**kernel.defines, **defines}), arch)
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


def all_shared(path: sass.Way) -> float:
    """Cycles of shared memory with every access in it: its lanes' bytes, as if none were common to two lanes."""
    cycles_of = lambda text: 16 if "LDSM" in text or "STSM" in text or ".128" in text else 8 if ".64" in text else 4  # noqa: E731
    return sum(cycles_of(text) for text in path.body if sass.opcode(text) in ("LDSM", "STSM", "LDS", "STS", "LDGSTS"))


def bound(model: dict[str, float]) -> str:
    return max(model, key=model.get)


SCORES = {"plain": {}, "alibi": {"BURST_ALIBI": 1}, "softcap": {"BURST_SOFTCAP": 1}}


def rows_of(direction, scores, without_dq):
    """Names and -D of the rows of a direction; forward, which has other loops with other scores, has plain ones alone."""
    if direction == "forward":
        return {"forward": {}, "forward-sorted": {"SORTED": 1}}
    if without_dq and direction != "backward":
        return {}
    name, more = (f"{direction}-no-dq", {"WITH_DQ": 0}) if without_dq else (direction, {})
    return {name + (f"-{which}" if SCORES[which] else ""): {**SCORES[which], **more} for which in scores}


def table(archs, dims, dtypes, directions, scores=("plain",), without_dq=False) -> None:
    head = ("kernel", "sm", "type", "d", "x", "x cut", "ratio", "LDL/STL", "regs", "stack", "blocks", "NOP", "fill", "s")
    print("%-24s %4s %-9s %7s %6s %6s %6s %8s %5s %6s %7s %4s %4s %5s  cycles of a trip" % head)
    for direction in directions:
        for arch in archs:
            for d, dv in dims:
                for dtype in dtypes:
                    if arch == "75" and dtype == "bfloat16":
                        continue
                    found = {name: figures(direction, arch, dtype, d, dv, **more) for name, more in rows_of(direction, scores, without_dq).items()}
                    for name, f in found.items():
                        model = modelled(arch, f.full)
                        cut, left = (f.cut.x, f.cut.local) if f.cut else (float("nan"), "-")
                        beside = found["forward"] if direction == "forward" else f
                        row = (name, arch, dtype, d if d == dv else f"{d}/{dv}", f.full.x_without_nops, cut, cut / beside.full.x, f"{f.full.local}, {left}",
                               f.listing.registers, f.listing.stack, f.occupancy, f.full.nops, f.full.fillers, f.seconds)  # fmt: skip
                        text = ", ".join(f"{name} {value:.0f}" for name, value in model.items()) + f" ({all_shared(f.full):.0f})"
                        print("%-24s %4s %-9s %7s %6.3f %6.3f %6.2f %8s %5d %6d %7d %4d %4d %5.1f  %s: %s" % (*row, text, bound(model)), flush=True)


def flash_modelled(direction: str, arch: str, d: int) -> dict[str, float]:
    """The same model for FlashAttention-2's loop."""
    instructions, hmma, ldsm, ex2 = FLASH[direction, arch, d]
    return cycles(arch, instructions, hmma, ldsm + 16 * d // 64, ex2)


def times_beside_flash(direction: str, arch: str, d: int, path: sass.Way) -> tuple[float, float]:
    """Modelled cycles per HMMA, ours and FlashAttention-2's."""
    return max(modelled(arch, path).values()) / path.hmma, max(flash_modelled(direction, arch, d).values()) / FLASH[direction, arch, d][1]


def beside_flash(archs, directions) -> None:
    """x, and the same model for FlashAttention-2's loops."""
    print("\nBeside FlashAttention-2 (its main loop, its own flags): x, and the modelled cycles of a trip per HMMA")
    for (direction, arch, d), (instructions, hmma, _, _) in FLASH.items():
        if arch not in archs or direction not in directions:
            continue
        f = figures(direction, arch, "bfloat16", d)
        ours, theirs = modelled(arch, f.full), flash_modelled(direction, arch, d)
        mine, other = times_beside_flash(direction, arch, d, f.full)
        print("%-9s sm_%-4s d %-4d x %5.2f, theirs %5.2f;  %s %.2f, theirs %s %.2f;  issue %.2f, theirs %.2f" % (
            direction, arch, d, f.full.x_without_nops, (instructions - hmma) / hmma, bound(ours), mine,
            bound(theirs), other, ours["issue"] / f.full.hmma, theirs["issue"] / hmma), flush=True)  # fmt: skip


# ---------------------------------------------------------------- float32 and float64

# Cycles of a warp's instruction on a quarter of a multiprocessor.  FFMA2 is two FFMA.
LANES = {"75": 16, "80": 16, "86": 32, "89": 32, "90": 32, "100": 32, "120": 32}  # float32, of a quarter
DOUBLES = {"75": 0.5, "80": 8, "86": 0.5, "89": 0.5, "90": 16, "100": 16, "120": 0.5}  # float64
TENSOR_DOUBLES = {"80": 16, "90": 32, "100": 16}  # float64 multiply-adds of the tensor cores
FMA = ("FFMA", "FFMA2", "DFMA", "DMMA")


def fma_cycles(arch: str, text: str) -> float:
    """Cycles of one of FMA; DMMA.16x8x16 of sm_90 has 2048 multiply-adds, DMMA.8x8x4 256."""
    kind = sass.opcode(text)
    if kind == "DMMA":
        return (256 if "884" in text or "8x8x4" in text else 2048) / TENSOR_DOUBLES[arch]
    return 32 / DOUBLES[arch] if kind == "DFMA" else (2 if kind == "FFMA2" else 1) * 32 / LANES[arch]


def wide_modelled(arch: str, loop: sass.Way) -> dict[str, float]:
    """Cycles of a trip: products, issue, shared memory as the PTX machine counts it (16 bytes a lane in quarter-warps)."""
    products = sum(fma_cycles(arch, text) for text in loop.body if sass.opcode(text) in FMA)
    loads = [16 if ".128" in text else 8 if ".64" in text else 4 for text in loop.body if sass.opcode(text) == "LDS"]
    return {"product": products, "issue": len(loop.body), "shared": sum(loads)}


def wide_figures(direction: str, arch: str, dtype: str, d: int, dv: int | None = None):
    """Compile an entry of the table; the listing, the loops of its products, seconds, blocks on a multiprocessor, and its shape."""
    kernel = tiles.kernel(direction, arch, dtype, d, dv or d)
    cubin = sass.compiled(kernel, arch, WITH_DQ=1)
    listing = cubin.kernel(direction)
    blocks = occupancy(arch, listing.registers, kernel.tile.shared, kernel.tile.warps)
    return listing, listing.inner_loops(*FMA), cubin.seconds, blocks, kernel


def wide_table(archs, dims, dtypes, directions) -> None:
    head = ("kernel", "sm", "type", "d", "tile", "LDL/STL", "regs", "stack", "blocks", "s", "share")
    print("\n%-16s %4s %-8s %7s %13s %8s %5s %6s %7s %5s %6s  FMA/LDS/all of each loop; cycles of the slowest, per product" % head)
    for direction in directions:
        for arch in archs:
            for d, dv in dims:
                for dtype in dtypes:
                    listing, loops, seconds, blocks, kernel = wide_figures(direction, arch, dtype, d, dv)
                    tile = kernel.tile
                    parts = [(loop.count(*FMA), loop.count("LDS"), len(loop.body)) for loop in loops]
                    share = sum(part[0] for part in parts) / max(1, sum(part[2] for part in parts))
                    models = [wide_modelled(arch, loop) for loop in loops]
                    slow = max(models, key=lambda m: max(m.values()) / m["product"], default=None)
                    text = ", ".join("%d/%d/%d" % part for part in parts)
                    if slow:
                        text += ";  " + ", ".join(f"{name} {value:.0f}" for name, value in slow.items()) + f": {bound(slow)}"
                    shape = f"{tile.queries}x{tile.keys}/{tile.warps}/{tile.stages}"
                    row = (direction, arch, dtype, d if d == dv else f"{d}/{dv}", shape, listing.count("LDL", "STL"), listing.registers,
                           listing.stack, blocks, seconds, 100 * share, text)  # fmt: skip
                    print("%-16s %4s %-8s %7s %13s %8d %5d %6d %7d %5.1f %5.0f%%  %s" % row, flush=True)


def agreement(archs, dims, dtypes, directions) -> None:
    """Whether NVIDIA's own arithmetic gives the same blocks, for the tiles above and any number of registers."""
    if missing():
        print(f"\nOccupancy was not compared with cuda_occupancy.h: {missing()}")
        return
    told = set()
    for direction in directions:
        for arch in archs:
            for dtype in dtypes:
                if (arch, dtype) != ("75", "bfloat16"):
                    tile = [tiles.kernel(direction, arch, dtype, d, dv).tile for d, dv in dims]
                    told |= {(arch, registers, t.shared, t.warps) for t in tile for registers in range(16, 256)}
    rows = sorted(told)
    other = sum(occupancy(*row) != blocks for row, blocks in zip(rows, by_nvidia(rows)))
    print(f"\nBlocks beside cuda_occupancy.h: {len(rows)} kernels (tile, registers), {other} differ")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", nargs="+", default=["75", "80", "86", "89", "90", "100", "120"])
    parser.add_argument("--dim", nargs="+", default=["32", "64", "96", "128", "192/128", "192", "256"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--direction", nargs="+", default=list(LOOPS))
    parser.add_argument("--scores", nargs="+", choices=list(SCORES), help="only backward of float16 and bfloat16 with these")
    parser.add_argument("--without-dq", action="store_true", help="only backward of float16 and bfloat16 that makes no dQ")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--no-counts", action="store_true", help="do not run kernels on the PTX machine")
    only.add_argument("--machine", action="store_true", help="only run kernels on the PTX machine")
    only.add_argument("--gpu", action="store_true", help="only time kernels on the GPU at hand; fails where there is none")
    args = parser.parse_args()
    if args.gpu:
        import timed

        sys.exit(timed.main(args.dtype, [int(text.split("/")[0]) for text in args.dim]))
    dims = [tuple(map(int, (text.split("/") * 2)[:2])) for text in args.dim]
    halves, wide = ([x for x in args.dtype if (x in WIDE) == is_wide] for is_wide in (False, True))
    if not args.machine:
        if sass.nvdisasm() is None:
            sys.exit("nvdisasm: not found; pip install nvidia-cuda-nvdisasm")
        if args.scores or args.without_dq:
            table(args.arch, dims, halves, [x for x in args.direction if x != "forward"], args.scores or ["plain"], args.without_dq)
            return
        if halves:
            table(args.arch, dims, halves, args.direction)
        if "bfloat16" in halves:
            beside_flash(args.arch, args.direction)
        if wide:
            wide_table(args.arch, dims, wide, args.direction)
        agreement(args.arch, dims, args.dtype, args.direction)
    if not args.no_counts:
        print_counts([d for d, dv in dims if d == dv and d in (64, 128)], args.dtype, args.direction)
        print_errors(args.dtype)


if __name__ == "__main__":
    main()
