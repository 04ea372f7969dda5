"""What the PTX machine counts and computes, with no GPU: bank conflicts, sectors, bytes beside a formula, errors beside a naive run's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from burstmpi.backends import tiles  # noqa: E402

WIDE = ("float32", "float64")


def tests():
    """The tests' own kits: naive runs, the oracle, and verbs on whole arrays.  They need the test dependencies."""
    import cuda_kit
    import host_kit

    return cuda_kit, host_kit


# ---------------------------------------------------------------- memory


def formula(direction: str, kernel, rows_q: int, rows_k: int, d: int, item: int) -> tuple[int, int]:
    """Bytes that a kernel must read and write, one head, everything visible, whole tiles: tiles of what passes, for each tile of what stays."""
    acc, tile, columns = max(item, 4), kernel.tile, 2 * d
    tiles_q, tiles_k = -(-rows_q // tile.queries), -(-rows_k // tile.keys)
    lines = 2 * acc if item > 2 else 16  # lse and delta of a query, or the front of a record of backward_prepare
    if direction == "forward":  # Q once, K and V for each tile of queries; out and lse
        return (rows_q + tiles_q * rows_k * 2) * d * item, rows_q * (d * item + acc)
    if direction == "backward":  # K, V and positions once, Q and dO and lines for each tile of keys; dK, dV, and sums of dQ
        read = rows_k * (columns * item + 4) + tiles_k * rows_q * (columns * item + lines)
        return read, rows_k * columns * acc + tiles_k * rows_q * d * acc
    read = rows_q * (columns * item + lines) + tiles_q * rows_k * (columns * item + 4)
    return read, rows_q * d * acc


def counted(direction: str, dtype: str, d: int, *, arch="80", rows_q=None, rows_k=None, **options) -> dict:
    """Run one head of a kernel of the table and count.

    Returns conflicts and sectors beyond the fewest, of the loops with most products and of the whole kernel, and bytes read from and
    written to global memory beside ``formula``, which is of no mask.
    """
    cuda_kit, host_kit = tests()
    kernel = tiles.kernel(direction, arch, dtype, d, d)
    # six tiles of what passes, two of what stays
    stays, passes = (kernel.tile.keys, kernel.tile.queries) if direction == "backward" else (kernel.tile.queries, kernel.tile.keys)
    stay, pass_ = 2 * stays, 6 * passes
    rows_q = rows_q or (pass_ if direction == "backward" else stay)
    rows_k = rows_k or (stay if direction == "backward" else pass_)
    q, k, v, dout = host_kit.arrays(np.random.default_rng(0), 1, rows_q, rows_k, 1, 1, d, d, dtype)
    backend = cuda_kit.backend(arch, splits=1, deterministic=direction == "backward_queries", count=True, check=False)
    if direction == "forward":
        cuda_kit.forward(backend, q, k, v, **options)
    else:
        out, lse = host_kit.exact(dout, q, k, v, **options)[:2]
        lse = lse.astype(np.float64 if dtype == "float64" else np.float32)
        cuda_kit.backward(backend, dout, q, k, v, out.astype(q.dtype), lse, **options)
    from ptxmachine import cupy

    told = next(c for c in reversed(cupy.simulation().machine.history) if c.program.name == direction)
    hot = "tensor" if dtype not in WIDE or kernel.defines["DMMA"] else "float"
    loops = [loop for loop in told.loops() if loop["mix"].get(hot)]
    most = max(loop["mix"][hot] for loop in loops)
    main = [loop for loop in loops if 10 * loop["mix"][hot] >= most]
    read, written = told.bytes
    should_read, should_write = formula(direction, kernel, rows_q, rows_k, d, q.dtype.itemsize)
    return {
        "conflicts in the main loop": sum(loop["bank_conflicts"] for loop in main),
        "conflicts": told.bank_conflicts,
        "sectors over the fewest in the main loop": sum(loop["sectors"] - loop["ideal_sectors"] for loop in main),
        "sectors over the fewest": told.sectors - int(told.global_ideal.sum()),
        "sectors": told.sectors,
        "read": read, "formula of read": should_read, "written": written, "formula of written": should_write,
        "bytes": read + written, "formula": should_read + should_write,
    }  # fmt: skip


def counts(d: int, arch="80", rows_q=256, rows_k=1024, **options) -> dict:
    """The same of forward in bfloat16."""
    return counted("forward", "bfloat16", d, arch=arch, rows_q=rows_q, rows_k=rows_k, **options)


def print_counts(dims, dtypes, directions) -> None:
    print("\nCounted on the PTX machine, sm_80, one head, two tiles of what stays and six of what passes")
    print("%-16s %-9s %4s  %s" % ("kernel", "type", "d", "conflicts, sectors over the fewest (main loop / kernel); bytes read and written / formula"))
    for direction in directions:
        for dtype in dtypes:
            for d in dims:
                n = counted(direction, dtype, d)
                print("%-16s %-9s %4d  %d / %d, %d / %d of %d;  read %d / %d (%+.1f%%), written %d / %d (%+.1f%%), all %+.1f%%" % (
                    direction, dtype, d, n["conflicts in the main loop"], n["conflicts"], n["sectors over the fewest in the main loop"],
                    n["sectors over the fewest"], n["sectors"], n["read"], n["formula of read"], 100 * (n["read"] / n["formula of read"] - 1),
                    n["written"], n["formula of written"], 100 * (n["written"] / n["formula of written"] - 1),
                    100 * (n["bytes"] / n["formula"] - 1)), flush=True)  # fmt: skip


# ---------------------------------------------------------------- accuracy

NAMES = ("out", "lse", "dq", "dk", "dv")


def errors(dtype: str, hops: int, *, d=64, rows_q=64, rows_k=512, batch=2, heads=8, gain=1.0, seed=0, deterministic=False, **options) -> dict:
    """Errors of a run on the PTX machine beside those of a naive run of the same type, both against float64 (longdouble for float64).

    The naive run is dense: P and dS rounded to the type where it is a half one, sums in the accumulator's type.  Gradients
    are compared as the kernels leave them, in the accumulator's type.  The keys come in ``hops`` blocks, the gradients of queries are
    added up over them.  batch x heads problems are independent: the largest error of one is luck, so the mean of theirs is told.

    Returns {name: (rms, mean of the largest, the largest of all)}, each as (ours, naive).
    """
    cuda_kit, host_kit = tests()
    q, k, v, dout = host_kit.arrays(np.random.default_rng(seed), batch, rows_q, rows_k, heads, heads, d, d, dtype, gain)
    cuts = tuple(rows_k * i // hops for i in range(1, hops))
    backend = cuda_kit.backend(splits=1, check=False, deterministic=deterministic)
    out, lse = cuda_kit.forward(backend, q, k, v, cuts=cuts, **options)
    got = (out, lse, *cuda_kit.backward(backend, dout, q, k, v, out, lse, cuts=cuts, **options))
    same = list(host_kit.naive(dout, q, k, v, narrow=dtype not in WIDE, **options)[:5])
    same[0] = same[0].astype(q.dtype)
    true = host_kit.exact(dout, q, k, v, **options) if dtype != "float64" else longdouble(dout, q, k, v, options)
    found = {}
    for name, *runs, want in zip(NAMES, got, same, true):
        rows = []
        for run in runs:
            far = np.abs(run.astype(want.dtype) - want)
            axes = (2,) if name == "lse" else (1, 3)  # all but batch and heads
            rows.append((float(np.sqrt((far**2).mean())), float(far.max(axis=axes).mean()), float(far.max())))
        found[name] = list(zip(*rows))
    return found


def longdouble(dout, q, k, v, options):
    """out, lse, dq, dk, dv in extended precision."""
    from support import Problem, naive

    return naive(Problem(q, k, v, dout), options, np.longdouble)


def print_errors(dtypes, hops=(1, 8)) -> None:
    print("\nError over that of a naive run of the same type: rms, mean of the largest of 16 heads, the largest (in brackets: of ours)")
    for dtype in dtypes:
        for count in hops:
            told = errors(dtype, count)
            text = "; ".join(
                f"{name} " + ", ".join(f"{ours / naive:.2f}" for ours, naive in told[name]) + f" ({told[name][2][0]:.1e})" for name in NAMES
            )
            print(f"{dtype:9} {count} hop{'s' if count > 1 else ''}: {text}", flush=True)
