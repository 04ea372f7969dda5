"""A long sequence in a sliding window: one million tokens, forward and backward, and the memory that it takes.

    ./mpi_run.sh -n 2 benchmarks/long.py
    ./mpi_run.sh -n 2 benchmarks/long.py --tokens 65536 --window 1024

Inputs and results are the caller's and are there beforehand.  What the two calls add to this rank's resident memory at
its highest is set beside `workspace_bytes`: beside those of its pages that were written, by the call that writes more of them, as the
system counts them (a page that nobody writes to takes no memory); part by part for backward.  Some rows of every result are checked against dense
float64 attention over what they see and what sees them.  The exit code is 1 where a row is wrong, where the workspace is
not what was told (but for alignment: 4 KiB), or where the memory is more than 5% or 16 MiB away from the pages that were
written.
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


def dense(rows, window, n, d, work):
    """out, lse, dq, dk, dv of these rows in the type ``work``: from the queries that see one of them, and from all keys that those see."""
    queries = np.unique(np.concatenate([np.arange(row, min(row + window + 1, n)) for row in rows]))
    out, dq, dk, dv = (np.zeros((len(rows), d), work) for _ in range(4))
    lse = np.zeros(len(rows), work)
    for run in np.split(queries, np.flatnonzero(np.diff(queries) != 1) + 1):
        for at in np.split(run, np.arange(512, len(run), 512)):
            first, last = max(0, int(at[0]) - window), int(at[-1]) + 1
            q, dout = (rows_of(which, int(at[0]), len(at), d)[0, :, 0].astype(work) for which in (0, 3))
            k, v = (rows_of(which, first, last - first, d)[0, :, 0].astype(work) for which in (1, 2))
            s = q @ k.T / work(np.sqrt(d))
            apart = at[:, None] - np.arange(first, last)
            s[(apart < 0) | (apart > window)] = -np.inf
            top = s.max(axis=1)
            p = np.exp(s - top[:, None])
            logs = top + np.log(p.sum(axis=1))
            p /= p.sum(axis=1, keepdims=True)
            made = p @ v
            delta = (made * dout).sum(axis=1, keepdims=True)
            _, here, mine = np.intersect1d(at, rows, return_indices=True)
            out[mine], lse[mine] = made[here], logs[here]
            dq[mine] = (p[here] * (dout[here] @ v.T - delta[here])) @ k / work(np.sqrt(d))
            seen = np.flatnonzero((rows >= first) & (rows < last))
            part = p[:, rows[seen] - first]
            dk[seen] += (part * (dout @ v[rows[seen] - first].T - delta)).T @ q / work(np.sqrt(d))
            dv[seen] += part.T @ dout
    return out, lse, dq, dk, dv


def worst(results, where, window, n, d):
    """Largest error of 25 of this rank's rows in each result, in units of what is allowed: three times what a naive run in float32 is
    off, or one rounding where that is more."""
    errors = np.zeros((5, 3))  # of the results, of the naive run, largest true number
    for start in np.linspace(0, max(0, len(where) - 5), 5).astype(int):
        rows = np.sort(where[start : start + 5])
        at = start + np.argsort(where[start : start + 5])
        for i, (got, true, near) in enumerate(zip(results, *(dense(rows, window, n, d, work) for work in (np.float64, np.float32)))):
            far = [np.abs(x - true).max() for x in (got[at], near)]
            errors[i] = np.maximum(errors[i], [*far, np.abs(true).max()])  # NaN stays
    allowed = np.maximum(3 * errors[:, 1], np.finfo(np.float32).eps * errors[:, 2])
    return (errors[:, 0] / allowed).max()


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
    results = (out[0, :, 0], lse[0, 0], *(grads[name][0, :, 0] for name in ("dq", "dk", "dv")))
    bad = np.max(comm.allgather(worst(results, where, args.window, n, d)))
    finite = all(np.isfinite(x).all() for x in grads.values())
    # Σ_i dq_i q_i = Σ_j dk_j k_j, as both are Σ_ij dS_ij s_ij / scale: true of the whole, over all ranks
    one, two = (comm.allreduce(float(np.vdot(a.astype(np.float64), b))) for a, b in ((grads["dq"], q), (grads["dk"], k)))
    size = comm.allreduce(float(np.sqrt(np.sum((grads["dq"].astype(np.float64) * q) ** 2))))
    good = bad <= 1 and finite and abs(one - two) < 1e-4 * size
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
            f"largest error of 25 rows a rank {bad:.2f} of what is allowed, Σ dq·q = {one:.4f}, Σ dk·k = {two:.4f}: {'right' if good else 'WRONG'}"
        )
    sys.exit(0 if good and fits else 1)


if __name__ == "__main__":
    main()
