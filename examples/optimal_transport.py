"""Entropic optimal transport between two point clouds that are cut across ranks; no language model in sight.

    ./mpi_run.sh -n 4 examples/optimal_transport.py
    ./mpi_run.sh -n 4 examples/optimal_transport.py --points 4000 --epsilon 0.02

Cloud a has points x_i of mass a_i, cloud b points y_j of mass b_j.  Moving mass from x to y costs |x - y|²/2, and
the blur epsilon smooths the plan.  Sinkhorn's iteration in the log domain is two soft minima, each the *lse* of an
attention whose scores are

    s_ij = (x_i·y_j + h_j) / ε,    h_j = g_j - |y_j|²/2 + ε ln b_j      query (x_i, 1), key (y_j, h_j), scale 1/ε
    f_i = |x_i|²/2 - ε lse_i                                            and the same with the clouds exchanged for g

so that no N × M matrix exists, whatever the number of points.  With values v_j = y_j the output is the plan's
barycentre T(x_i) = Σ_j P_ij y_j: where the mass of x_i goes on average.  The transport plan is

    π_ij = a_i b_j exp((f_i + g_j - |x_i - y_j|²/2) / ε)

Cloud b is cloud a moved by a vector t, with a third of its points split in two: another number of points, the same
mass.  Then three things are known exactly, for every epsilon, and are checked:

    marginals    Σ_j π_ij = a_i,  Σ_i π_ij = b_j
    distance     OT(a, b) - OT(a, a)/2 - OT(b, b)/2 = |t|²/2       (the Sinkhorn divergence of a translation)
    map          T_ab(x_i) - T_aa(x_i) = t                         for every point

The exit code is 1 on every rank where one fails.
"""

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI

import burstmpi

comm = MPI.COMM_WORLD


class Cloud:
    """This rank's points of a cloud."""

    def __init__(self, points, mass):
        self.points = points  # (rows, dim)
        self.mass = mass  # (rows,), sums to 1 over all ranks
        self.half = 0.5 * np.sum(points**2, axis=1)  # |x|²/2

    def __len__(self):
        return len(self.points)


def softmin(attn, of, over, potential, epsilon):
    """The soft minimum over a cloud of cost minus potential, and the barycentres.

    of : the cloud whose points ask;  over : the one that is summed over;  potential : (rows of over,)

    Returns
    -------
    (rows of ``of``,)  -ε ln Σ_j m_j exp((potential_j - cost_ij) / ε)
    (rows of ``of``, dim)  the barycentre of the points that each point's mass goes to
    """
    four = lambda x: np.ascontiguousarray(x)[None, :, None, :]  # noqa: E731  (rows, d) → (1, rows, 1, d)
    q = four(np.column_stack([of.points, np.ones(len(of))]))
    k = four(np.column_stack([over.points, potential - over.half + epsilon * np.log(over.mass)]))
    out, lse = attn.forward(q, k, four(over.points))
    return of.half - epsilon * lse[0, 0], out[0, :, 0]


def sinkhorn(attn, a, b, epsilon, tolerance, most):
    """Solve for the potentials f of a and g of b: each in turn the soft minimum over the other.

    A cloud against itself has f = g; there the average of old and new converges in a few steps.

    Returns
    -------
    cost, barycentres of a's points, largest relative error of a marginal, iterations
    """
    f, g = np.zeros(len(a)), np.zeros(len(b))
    for iteration in range(1, most + 1):
        new, towards = softmin(attn, a, b, g, epsilon)
        # Σ_j π_ij / a_i = exp((f_i - new_i) / ε): the rows' error before this step comes for free.  The columns were
        # made right by the last one.
        wrong = np.inf if iteration == 1 else np.abs(np.expm1((f - new) / epsilon)).max(initial=0.0)
        wrong = comm.allreduce(float(wrong), MPI.MAX)
        if wrong <= tolerance:
            break
        if a is b:
            f = g = (g + new) / 2
        else:
            f = new
            g, _ = softmin(attn, b, a, f, epsilon)
    # At the optimum the dual value is <a, f> + <b, g>: the entropic term vanishes as the plan sums to 1.
    cost = comm.allreduce(float(a.mass @ f + b.mass @ g), MPI.SUM)
    return cost, towards, wrong, iteration


def clouds(points, dim, shift, seed):
    """Two whole clouds, the same on every rank: a mixture of blobs, and its translation with some points split."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(0, 1, (5, dim))
    x = centres[rng.integers(5, size=points)] + 0.05 * rng.standard_normal((points, dim))
    a = rng.uniform(0.5, 1.5, points)
    a /= a.sum()
    split = np.arange(points) % 3 == 0
    y = np.concatenate([x, x[split]]) + shift
    b = np.concatenate([np.where(split, 0.25 * a, a), 0.75 * a[split]])
    return (x, a), (y, b)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1000, help="of cloud a; b has a third more (default 1000)")
    parser.add_argument("--dim", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=0.1, help="blur, in units of squared length (default 0.1)")
    parser.add_argument("--tolerance", type=float, default=1e-10, help="of the marginals, relative (default 1e-10)")
    parser.add_argument("--iterations", type=int, default=500, help="at most (default 500)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    shift = 0.3 * np.arange(1, args.dim + 1) / args.dim
    (x, a), (y, b) = clouds(args.points, args.dim, shift, args.seed)
    started = time.perf_counter()
    # Points have no order, so any cut will do: contiguous.  Two lengths need no more than that.
    with burstmpi.BurstAttention(comm, layout="contiguous", scale=1 / args.epsilon) as attn:
        of_a = Cloud(attn.shard(x, axis=0), attn.shard(a, axis=0))
        of_b = Cloud(attn.shard(y, axis=0), attn.shard(b, axis=0))
        solve = lambda p, q: sinkhorn(attn, p, q, args.epsilon, args.tolerance, args.iterations)  # noqa: E731
        ab, to_b, *how_ab = solve(of_a, of_b)
        aa, to_a, *how_aa = solve(of_a, of_a)
        bb, _, *how_bb = solve(of_b, of_b)
        backend = attn.stats.backend
    seconds = time.perf_counter() - started

    divergence, known = ab - aa / 2 - bb / 2, 0.5 * float(shift @ shift)
    moved = np.abs(to_b - to_a - shift).max(initial=0.0)
    moved = comm.allreduce(float(moved), MPI.MAX)
    # Marginals that are right to δ leave potentials wrong by about ε δ κ, with κ the conditioning of the iteration:
    # it gains a factor ρ = δ^(1/iterations) a step, so that κ = 1 / (1 - ρ).
    marginal = max(how_ab[0], how_aa[0], how_bb[0])
    steps = max(how_ab[1], how_aa[1], how_bb[1])
    kappa = 1 / -np.expm1(np.log(args.tolerance) / steps)
    checks = {
        "marginals": (marginal, args.tolerance),
        "distance": (abs(divergence - known), 2 * args.epsilon * args.tolerance * kappa),
        "map": (moved, 2 * args.tolerance * kappa * np.abs(x - x.mean(axis=0)).max()),
    }
    right = all(error <= allowed for error, allowed in checks.values())
    if comm.rank == 0:
        print(f"\n{len(x)} points against {len(y)} in {args.dim} dimensions, epsilon {args.epsilon}, on {comm.size} rank{'s' * (comm.size > 1)}")
        print(f"{how_ab[1]} + {how_aa[1]} + {how_bb[1]} iterations in {seconds:.2f} s, {backend} backend, float64\n")
        print(f"Sinkhorn divergence  {divergence:.12f}")
        print(f"known: |t|²/2        {known:.12f}\n")
        for name, (error, allowed) in checks.items():
            print(f"{name:<12}{error:>10.1e} off,{allowed:>10.1e} allowed  {'ok' if error <= allowed else 'WRONG'}")
        print("\nRIGHT: the plan has its marginals, distance and map are the known ones" if right else "\nWRONG: see above")
        sys.stdout.flush()
    return right


if __name__ == "__main__":
    right = main()
    comm.Barrier()  # a rank that leaves with 1 may end the job: let rank 0 print before
    sys.exit(0 if right else 1)
