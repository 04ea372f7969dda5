"""Gradients of a small loss with an explicit backward, checked by finite differences in float64.

    ./mpi_run.sh -n 4 examples/gradients.py

The loss compares attention's output with a target, each row with a weight of its own:

    loss = 1/2 Σ_i w_i |out_i - y_i|²      so that      dout_i = w_i (out_i - y_i)

Every rank holds some rows of all arrays and sums its rows' share of the loss; one Allreduce makes it whole.
`backward` then gives each rank the gradients of its own rows of q, k and v, and nothing else is to be reduced.
The exit code is 1 on every rank where a gradient is wrong.
"""

import argparse
import sys

import numpy as np
from mpi4py import MPI

import burstmpi

comm = MPI.COMM_WORLD


class Loss:
    """The loss of this rank's rows of (q, k, v); attention does the talking to other ranks."""

    def __init__(self, attn, target, weight):
        self.attn = attn
        self.target = target  # (batch, rows, heads, dv)
        self.weight = weight  # (batch, rows, 1, 1)

    def value(self, q, k, v):
        """The loss of all rows, the same number on every rank."""
        out, _ = self.attn.forward(q, k, v)
        return total(0.5 * np.sum(self.weight * (out - self.target) ** 2))

    def gradient(self, q, k, v):
        """dq, dk, dv, of this rank's rows."""
        out, lse = self.attn.forward(q, k, v)
        dout = self.weight * (out - self.target)
        return self.attn.backward(dout, q, k, v, out, lse)


def total(x):
    """Sum a number over the ranks."""
    return comm.allreduce(float(x), MPI.SUM)


def slope(loss, at, direction, step):
    """The loss's derivative along a direction by central differences, and how far that can be off.

    With D(h) = (L(x + h u) - L(x - h u)) / 2h = L' + c h² + ..., the combination (4 D(h/2) - D(h)) / 3 loses the
    h² term; its distance from D(h/2) bounds what is left, and L's roundings add eps |L| / h.
    """

    def difference(h):
        ahead, behind = ([x + sign * h * u for x, u in zip(at, direction)] for sign in (1, -1))
        values = loss.value(*ahead), loss.value(*behind)
        return (values[0] - values[1]) / (2 * h), max(map(abs, values))

    coarse, _ = difference(step)
    fine, largest = difference(step / 2)
    estimate = (4 * fine - coarse) / 3
    # A loss is a sum of many roundings, of either sign: 8 of them at once are more than we ever see.
    return estimate, abs(estimate - fine) + 8 * np.finfo(np.float64).eps * largest / step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=301, help="of the whole sequence (default 301)")
    parser.add_argument("--backward", default="auto", choices=("auto", "q", "kv"), help="what travels in backward")
    parser.add_argument("--step", type=float, default=1e-3, help="of the finite differences (default 0.001)")
    args = parser.parse_args()
    batch, heads, kv_heads, d, dv = 2, 4, 2, 16, 24

    rng = np.random.default_rng(7)  # the same on every rank
    normal = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    n = args.tokens
    q, k, v = normal(batch, n, heads, d), normal(batch, n, kv_heads, d), normal(batch, n, kv_heads, dv)
    target, weight = normal(batch, n, heads, dv), rng.random((batch, n, 1, 1)) / n

    # A rule of everything: two documents, a window into each row's past, capped scores, ALiBi.
    rules = {
        "causal": True,
        "window": (n // 2, None),
        "documents": (0, n // 3, n),
        "softcap": 5.0,
        "alibi_slopes": [2.0**-i for i in range(1, heads + 1)],
    }
    with burstmpi.BurstAttention(comm, backward=args.backward, **rules) as attn:
        loss = Loss(attn, attn.shard(target), attn.shard(weight))
        at = [attn.shard(x) for x in (q, k, v)]
        gradient = loss.gradient(*at)
        say(f"\nloss {loss.value(*at):.12f} on {comm.size} rank{'s' * (comm.size > 1)}, {n} tokens, {attn.stats.backend} backend\n")

        # Directions: all entries of one array at once, then all three arrays along the gradient itself.
        directions = {}
        for which, name in enumerate(("q", "k", "v")):
            u = attn.shard(normal(*(q, k, v)[which].shape))
            directions[f"random {name}"] = [u if i == which else np.zeros_like(x) for i, x in enumerate(at)]
        length = total(sum(np.sum(g**2) for g in gradient)) ** 0.5
        directions["steepest"] = [g / length for g in gradient]

        say(f"{'direction':<12}{'backward':>20}{'differences':>20}{'apart':>10}{'allowed':>10}")
        right = True
        for name, u in directions.items():
            ours = total(sum(np.sum(g * x) for g, x in zip(gradient, u)))
            theirs, allowed = slope(loss, at, u, args.step)
            fits = abs(ours - theirs) <= allowed
            right &= fits
            say(
                f"{name:<12}{ours:>20.12f}{theirs:>20.12f}{abs(ours - theirs):>10.1e}{allowed:>10.1e}"
                f"  {'ok' if fits else 'WRONG'}"
            )

        # What gradients are for: a step against it lowers the loss by step * |gradient|² to first order.
        before, after = loss.value(*at), loss.value(*(x - 0.1 * g for x, g in zip(at, gradient)))
        say(f"\na step of 0.1 down the gradient: {before:.8f} → {after:.8f} (first order {before - 0.1 * length**2:.8f})")
    right &= after < before
    say("\nRIGHT: backward agrees with finite differences" if right else "\nWRONG: see above")
    return right


def say(text):
    """Print on rank 0."""
    if comm.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    right = main()
    comm.Barrier()  # a rank that leaves with 1 may end the job: let rank 0 print before
    sys.exit(0 if right else 1)
