"""A long sequence in a sliding window: one million tokens, forward and backward, and the memory that it takes.

    ./mpi_run.sh -n 2 benchmarks/long.py
    ./mpi_run.sh -n 2 benchmarks/long.py --tokens 65536 --window 1024

Inputs and results are the caller's and are there beforehand.  What the two calls add to this rank's resident memory at
its highest is set beside `workspace_bytes`: beside those of its pages that were written, by the call that writes more of them, as the
system counts them (a page that nobody writes to takes no memory); part by part for backward.  Some rows are checked against dense float64 attention over
their own window.  The exit code is 1 where a row is wrong, where the workspace is not what was told to the byte, or where
the memory is more than 5% or 16 MiB away from the pages that were written.
"""

import argparse
import os
import sys
import time

import numpy as np
from mpi4py import MPI

import burstmpi

comm = MPI.COMM_WORLD


def resident(what):
    """VmRSS or VmHWM of this process, bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what))


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def written(array):
    """Pages of an array that are in memory: [pages] bool, and the address of the first."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = array.ctypes.data // page, -(-(array.ctypes.data + array.nbytes) // page)
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first)), np.uint64)
    return (entries >> np.uint64(62)) > 0, first * page


def parts_of(attn):
    """{part: (bytes told, bytes written)} of the workspace as backward cuts it, and all bytes that it has."""
    (space,), plan = attn._spaces.values(), list(attn._plans.values())[-1]
    there, start = written(space.arena)
    page, parts = os.sysconf("SC_PAGE_SIZE"), {}
    for name, (offset, shape, dtype) in plan.room("backward").fields.items():
        size = int(np.prod(shape)) * dtype.itemsize
        at = space.arena.ctypes.data + offset - start
        parts[name] = (size, int(there[at // page : -(-(at + size) // page)].sum()) * page if size else 0)
    return parts, space.arena.nbytes, int(there.sum()) * page


def rows_of(rng, first, rows, d):
    """Rows of a global array that any rank can make again: (1, rows, 1, d) float32."""
    blocks = np.arange(first // 4096, -(-(first + rows) // 4096))
    made = np.concatenate([np.random.default_rng((rng, int(b))).standard_normal((4096, d), np.float32) for b in blocks])
    return np.ascontiguousarray(made[first - blocks[0] * 4096 :][:rows][None, :, None])


def dense_row(i, window, d):
    """out and lse of row i in float64, from its window alone."""
    low = max(0, i - window)
    q, k, v = rows_of(0, i, 1, d)[0, 0, 0], rows_of(1, low, i + 1 - low, d)[0, :, 0], rows_of(2, low, i + 1 - low, d)[0, :, 0]
    s = k.astype(np.float64) @ q.astype(np.float64) / np.sqrt(d)
    lse = s.max() + np.log(np.exp(s - s.max()).sum())
    return np.exp(s - lse) @ v, lse


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layout", default="contiguous", choices=("contiguous", "zigzag", "striped"))
    parser.add_argument("--deadline", type=float, default=1200)
    args = parser.parse_args()
    n, d = args.tokens, args.head_dim
    if n % (2 * comm.size):
        sys.exit(f"--tokens: must be a multiple of {2 * comm.size}, got {n}")
    with burstmpi.BurstAttention(
        comm, causal=True, window=(args.window, 0), layout=args.layout, deadline=args.deadline
    ) as attn:
        small = np.ones((1, 2 * comm.size * 64, 1, d), np.float32)
        part = attn.shard(small)
        out, lse = attn.forward(part, part, part)  # compiles, and makes what a process makes once
        attn.backward(out, part, part, part, out, lse)
        where = attn.positions(n)
        rows = len(where)
        pieces = np.split(where, np.flatnonzero(np.diff(where) != 1) + 1) if args.layout != "striped" else None
        make = lambda which: (  # noqa: E731
            np.concatenate([rows_of(which, int(p[0]), len(p), d) for p in pieces], axis=1)
            if pieces is not None
            else np.ascontiguousarray(rows_of(which, 0, n, d)[:, where])
        )
        q, k, v, dout = (make(which) for which in range(4))
        out, lse = np.zeros_like(q), np.zeros((1, 1, rows), np.float32)
        grads = {name: np.zeros_like(q) for name in ("dq", "dk", "dv")}
        for x in (out, lse, *grads.values()):
            x.fill(1)  # its pages are there before memory is counted
        told = attn.workspace_bytes(q.shape, k.shape, v.shape, q.dtype)
        forget_peak()
        before, times, touched = resident("VmRSS"), [], 0
        for call in (
            lambda: attn.forward(q, k, v, out=out, lse=lse),
            lambda: attn.backward(dout, q, k, v, out, lse, **grads),
        ):
            comm.Barrier()
            start = time.perf_counter()
            call()
            times.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
            parts, held, now = parts_of(attn)
            touched = max(touched, now)  # backward may need more than forward, and then has a workspace of its own
        grown = resident("VmHWM") - before
    bad = 0.0
    for at in np.linspace(0, rows - 1, 25).astype(int):
        true, true_lse = dense_row(int(where[at]), args.window, d)
        bad = max(bad, np.abs(out[0, at, 0] - true).max() / np.abs(true).max(), abs(lse[0, 0, at] - true_lse) / 10)
    bad = comm.allreduce(bad, MPI.MAX)
    finite = all(np.isfinite(x).all() for x in grads.values())
    # Σ_i dq_i q_i = Σ_j dk_j k_j, as both are Σ_ij dS_ij s_ij / scale: true of the whole, over all ranks
    one, two = (comm.allreduce(float(np.vdot(a.astype(np.float64), b))) for a, b in ((grads["dq"], q), (grads["dk"], k)))
    size = comm.allreduce(float(np.sqrt(np.sum((grads["dq"].astype(np.float64) * q) ** 2))))
    good = bad < 1e-5 and finite and abs(one - two) < 1e-4 * size
    pairs = sum(min(i + 1, args.window + 1) for i in range(min(n, args.window))) + max(0, n - args.window) * (args.window + 1)
    near = abs(grown - touched) <= max(touched // 20, 16 << 20)
    fits = comm.allreduce(bool(near and abs(told - held) <= 4096), MPI.LAND)
    for rank in range(comm.size):
        comm.Barrier()
        if rank == comm.rank:
            mib = lambda n: f"{n / 2**20:.1f}"  # noqa: E731
            print(
                f"rank {rank}: workspace_bytes said {mib(told)} MiB, {mib(held)} MiB were allocated and at most {mib(touched)} MiB of them "
                f"written to by a call; memory grew by {mib(grown)} MiB\n  MiB written of those told, in backward: "
                + ", ".join(f"{name} {mib(b)} of {mib(a)}" for name, (a, b) in parts.items() if a >= 1 << 20),
                flush=True,
            )
    if comm.rank == 0:
        rate = [f * pairs * d / t * 1e-9 for f, t in zip((4, 10), times)]
        print(
            f"{n} tokens, window {args.window}, d {d}, {comm.size} ranks, {args.layout}: forward {times[0]:.1f} s "
            f"({rate[0]:.0f} GF/s), backward {times[1]:.1f} s ({rate[1]:.0f} GF/s)\n"
            f"largest error of 25 rows a rank {bad:.1e}, Σ dq·q = {one:.4f}, Σ dk·k = {two:.4f}: {'right' if good else 'WRONG'}"
        )
    sys.exit(0 if good and fits else 1)


if __name__ == "__main__":
    main()
