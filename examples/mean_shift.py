"""Mean-shift clustering of a point cloud that is cut across ranks: attention as a kernel density estimate.

    ./mpi_run.sh -n 4 examples/mean_shift.py
    ./mpi_run.sh -n 4 examples/mean_shift.py --points 20000

Each point climbs the density of all points, smoothed by a Gaussian of width h:

    x ← Σ_j w_j(x) y_j,    w_j(x) ∝ exp(-|x - y_j|²/2h²)

which is attention with query (x, 1), key (y, -|y|²/2), value y and scale 1/h².  Its lse is the log density, but for
a constant: ln p(x) = lse - |x|²/2h².  Points that end on the same peak are a cluster; nobody says how many there are.

Three things are known and checked: the density never falls along a path (the theorem behind mean shift), peaks are
fixed points, and the clusters are the blobs that the cloud was drawn from.  The exit code is 1 on every rank where
one fails.
"""

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI

import burstmpi

comm = MPI.COMM_WORLD


def blobs(points, dim, count, seed):
    """Draw a cloud from ``count`` round blobs on a circle: (points, dim), and each point's blob."""
    rng = np.random.default_rng(seed)
    angle = 2 * np.pi * np.arange(count) / count
    centres = np.zeros((count, dim))
    centres[:, 0], centres[:, 1] = np.cos(angle), np.sin(angle)
    label = np.arange(points) % count  # so that no blob is empty
    return centres[label] + 0.08 * rng.standard_normal((points, dim)), label


def climb(attn, cloud, width, tolerance, most):
    """Move every point of this rank uphill until none moves any more.

    Returns
    -------
    peaks : (rows, dim);  the largest fall of a log density on the way;  the last step's length;  iterations
    """
    four = lambda *columns: np.column_stack(columns)[None, :, None, :]  # noqa: E731  (1, rows, 1, channels)
    largest = lambda x: comm.allreduce(float(np.max(x, initial=0.0)), MPI.MAX)  # noqa: E731
    keys, values = four(cloud, -0.5 * np.sum(cloud**2, axis=1)), four(cloud)  # the cloud itself stays
    x, density, fall = cloud, np.full(len(cloud), -np.inf), 0.0
    for iteration in range(1, most + 1):
        out, lse = attn.forward(four(x, np.ones(len(x))), keys, values)
        before, density = density, lse[0, 0] - 0.5 * np.sum(x**2, axis=1) / width**2
        fall = max(fall, largest(before - density))
        moved = largest(np.abs(out[0, :, 0] - x))
        x = out[0, :, 0]
        if moved <= tolerance:
            break
    return x, fall, moved, iteration


def group(peaks, apart):
    """Number the clusters: points whose peaks are closer than ``apart``."""
    label, found = np.full(len(peaks), -1), []
    for i, peak in enumerate(peaks):
        near = [c for c, other in enumerate(found) if np.sum((peak - other) ** 2) < apart**2]
        label[i] = near[0] if near else len(found)
        if not near:
            found.append(peak)
    return label, np.array(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=3, help="2 or more (default 3)")
    parser.add_argument("--clusters", type=int, default=5, help="up to 12 (default 5)")
    parser.add_argument("--width", type=float, default=0.15, help="of the kernel (default 0.15)")
    parser.add_argument("--tolerance", type=float, default=1e-9, help="a point at rest moves less (default 1e-9)")
    parser.add_argument("--iterations", type=int, default=500, help="at most (default 500)")
    args = parser.parse_args()
    if args.dim < 2 or not 1 <= args.clusters <= 12 or args.points < args.clusters:
        parser.error("needs 2 dimensions, 1 to 12 clusters, and a point for each cluster")

    cloud, truth = blobs(args.points, args.dim, args.clusters, seed=3)
    started = time.perf_counter()
    with burstmpi.BurstAttention(comm, layout="contiguous", scale=args.width**-2) as attn:
        peaks, fall, moved, iterations = climb(
            attn, attn.shard(cloud, axis=0), args.width, args.tolerance, args.iterations
        )
        seconds, backend = time.perf_counter() - started, attn.stats.backend
        label, found = group(attn.gather(peaks, axis=0), apart=args.width / 10)
    # Two partitions are the same where each pair (ours, true) that occurs is a one-to-one match.
    same = len(set(zip(label, truth))) == len(found) == args.clusters
    # A log density is a sum of |x|²/2h² and lse: a rounding of each, and a sum over the points, in float64.
    largest = np.abs(cloud).max() ** 2 * args.dim / args.width**2 + np.log(args.points)
    checks = {
        "density": (fall, 8 * np.finfo(np.float64).eps * largest, "largest fall of ln p on a path"),
        "peaks": (moved, args.tolerance, "largest move in the last step"),
    }
    right = same and all(error <= allowed for error, allowed, _ in checks.values())
    if comm.rank == 0:
        ranks = f"{comm.size} rank{'s' * (comm.size > 1)}"
        print(f"\n{args.points} points in {args.dim} dimensions on {ranks}, kernel width {args.width}")
        print(f"{iterations} iterations in {seconds:.2f} s, {backend} backend, float64\n")
        for name, (error, allowed, what) in checks.items():
            print(f"{name:<10}{error:>10.1e},{allowed:>9.1e} allowed  {'ok' if error <= allowed else 'WRONG'}   ({what})")
        print(f"clusters  found {len(found)} clusters of {args.clusters}       {'ok' if same else 'WRONG'}\n")
        for c, peak in enumerate(found[:12]):
            print(f"  {np.sum(label == c):>6} points at ({', '.join(f'{v:+.3f}' for v in peak)})")
        print("\nRIGHT: the clusters are the blobs that were drawn" if right else "\nWRONG: see above")
        sys.stdout.flush()
    return right


if __name__ == "__main__":
    right = main()
    comm.Barrier()  # a rank that leaves with 1 may end the job: let rank 0 print before
    sys.exit(0 if right else 1)
