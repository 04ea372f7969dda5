"""Train a tiny transformer on its own source, character by character, with the sequence cut over the ranks.

    ./mpi_run.sh -n 4 examples/tiny_transformer.py
    ./mpi_run.sh -n 1 examples/tiny_transformer.py          # the same curve, to the last digits

All layers are written out below, forward and backward, in NumPy and float64.  Only attention looks beyond a row, so
only attention talks to other ranks; everything else works on the rows that a rank holds.  Parameters are the same on
every rank, and one Allreduce a step sums their gradients.

    rows of a rank     zigzag: position r's run and its mirror's, so that a causal mask gives all ranks equal work
    x                  (batch, rows, width)
    q; k, v            (batch, rows, heads, d); (batch, rows, kv_heads, d), views of one fused product

The exit code is 1 on every rank where the gradient disagrees with finite differences or the loss does not fall.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import burstmpi

comm = MPI.COMM_WORLD

# ---------------------------------------------------------------- layers: forward gives (y, what backward needs)


def norm(x, gain):
    """y = gain (x - mean) / deviation, over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
    unit = centred * inverse
    return gain * unit, (unit, inverse, gain)


def norm_backward(dy, saved):
    """dx, dgain."""
    unit, inverse, gain = saved
    du = dy * gain
    dx = inverse * (du - du.mean(axis=-1, keepdims=True) - unit * np.mean(du * unit, axis=-1, keepdims=True))
    return dx, np.sum(dy * unit, axis=(0, 1))


def linear_backward(dy, x, weight):
    """y = x W  →  dx = dy Wᵀ, dW = xᵀ dy, summed over batch and rows."""
    return dy @ weight.T, x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def gelu(x):
    """y = x (1 + tanh(c (x + a x³))) / 2."""
    tanh = np.tanh(0.7978845608028654 * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + tanh), (x, tanh)


def gelu_backward(dy, saved):
    """dx."""
    x, tanh = saved
    inner = 0.7978845608028654 * (1 + 3 * 0.044715 * x**2)
    return dy * 0.5 * (1 + tanh + x * (1 - tanh**2) * inner)


def cross_entropy(logits, targets, count):
    """The sum of -ln p(target) over these rows, divided by the count of all rows on all ranks; and dlogits."""
    shifted = logits - logits.max(axis=-1, keepdims=True, initial=-np.inf)
    lse = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    log_p = shifted - lse
    at = targets[..., None]
    loss = -np.take_along_axis(log_p, at, axis=-1).sum() / count
    dlogits = np.exp(log_p)
    np.put_along_axis(dlogits, at, np.take_along_axis(dlogits, at, axis=-1) - 1, axis=-1)
    return loss, dlogits / count


# ---------------------------------------------------------------- the model


class Model:
    """Embedding, blocks of attention and a two-layer perceptron, and a linear readout.

    attn : causal BurstAttention;  length : tokens of a whole sequence
    """

    def __init__(self, attn, vocabulary, length, width=32, heads=4, kv_heads=2, layers=2, seed=0):
        self.attn, self.heads, self.kv_heads, self.layers = attn, heads, kv_heads, layers
        self.d = width // heads
        self.positions = attn.positions(length)  # of this rank's rows
        rng = np.random.default_rng(seed)  # the same on every rank
        matrix = lambda rows, columns: rng.standard_normal((rows, columns)) * rows**-0.5  # noqa: E731
        self.p = {"token": matrix(vocabulary, width), "position": 0.1 * matrix(length, width)}
        for i in range(layers):
            self.p[f"{i}.norm1"] = np.ones(width)
            self.p[f"{i}.qkv"] = matrix(width, (heads + 2 * kv_heads) * self.d)
            self.p[f"{i}.mix"] = matrix(width, width)
            self.p[f"{i}.norm2"] = np.ones(width)
            self.p[f"{i}.up"] = matrix(width, 4 * width)
            self.p[f"{i}.down"] = matrix(4 * width, width)
        self.p["norm"] = np.ones(width)
        self.p["readout"] = matrix(width, vocabulary)

    def split(self, qkv):
        """Views of q, k and v in a fused (batch, rows, heads + 2 kv_heads, d)."""
        a, b = self.heads, self.heads + self.kv_heads
        return qkv[:, :, :a], qkv[:, :, a:b], qkv[:, :, b:]

    def loss(self, tokens, targets, count, gradient=True):
        """This rank's share of the loss, and of the gradient of every parameter.

        tokens, targets : (batch, rows) int, this rank's columns;  count : tokens on all ranks
        """
        p, saved = self.p, []
        x = p["token"][tokens] + p["position"][self.positions]
        for i in range(self.layers):
            normed, for_norm1 = norm(x, p[f"{i}.norm1"])
            q, k, v = self.split((normed @ p[f"{i}.qkv"]).reshape(*tokens.shape, -1, self.d))
            out, lse = self.attn.forward(q, k, v)
            mixed = out.reshape(x.shape)
            x = x + mixed @ p[f"{i}.mix"]
            normed2, for_norm2 = norm(x, p[f"{i}.norm2"])
            hidden, for_gelu = gelu(normed2 @ p[f"{i}.up"])
            x = x + hidden @ p[f"{i}.down"]
            saved.append((normed, for_norm1, q, k, v, out, lse, mixed, normed2, for_norm2, hidden, for_gelu))
        normed, for_norm = norm(x, p["norm"])
        loss, dlogits = cross_entropy(normed @ p["readout"], targets, count)
        if not gradient:
            return loss, None

        g = {name: np.zeros_like(value) for name, value in p.items()}
        dnormed, g["readout"] = linear_backward(dlogits, normed, p["readout"])
        dx, g["norm"] = norm_backward(dnormed, for_norm)
        for i in reversed(range(self.layers)):
            normed, for_norm1, q, k, v, out, lse, mixed, normed2, for_norm2, hidden, for_gelu = saved[i]
            # x = x + gelu(norm(x) up) down
            dhidden, g[f"{i}.down"] = linear_backward(dx, hidden, p[f"{i}.down"])
            dnormed2, g[f"{i}.up"] = linear_backward(gelu_backward(dhidden, for_gelu), normed2, p[f"{i}.up"])
            d, g[f"{i}.norm2"] = norm_backward(dnormed2, for_norm2)
            dx = dx + d
            # x = x + attention(norm(x) qkv) mix
            dmixed, g[f"{i}.mix"] = linear_backward(dx, mixed, p[f"{i}.mix"])
            dqkv = np.empty((*tokens.shape, self.heads + 2 * self.kv_heads, self.d))
            dq, dk, dv = self.split(dqkv)  # backward writes straight into the fused gradient
            self.attn.backward(dmixed.reshape(out.shape), q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
            dnormed, g[f"{i}.qkv"] = linear_backward(dqkv.reshape(*tokens.shape, -1), normed, p[f"{i}.qkv"])
            d, g[f"{i}.norm1"] = norm_backward(dnormed, for_norm1)
            dx = dx + d
        np.add.at(g["token"], tokens, dx)
        g["position"][self.positions] = dx.sum(axis=0)  # each position lives on one rank only
        return loss, g


def everywhere(loss, gradient=None):
    """Sum loss and gradients over the ranks: one Allreduce of one vector."""
    parts = [] if gradient is None else list(gradient.values())
    vector = np.concatenate([[loss], *(part.reshape(-1) for part in parts)])
    comm.Allreduce(MPI.IN_PLACE, vector)
    if gradient is None:
        return float(vector[0]), None
    ends = np.cumsum([1] + [part.size for part in parts])
    pieces = np.split(vector, ends)[1:-1]
    return float(vector[0]), {name: piece.reshape(gradient[name].shape) for name, piece in zip(gradient, pieces)}


class Adam:
    """Kingma and Ba's optimiser, on a dict of arrays."""

    def __init__(self, parameters, rate):
        self.p, self.rate, self.t = parameters, rate, 0
        self.m = {name: np.zeros_like(x) for name, x in parameters.items()}
        self.v = {name: np.zeros_like(x) for name, x in parameters.items()}

    def step(self, gradient):
        self.t += 1
        for name, g in gradient.items():
            self.m[name] += 0.1 * (g - self.m[name])
            self.v[name] += 0.01 * (g**2 - self.v[name])
            mean, square = self.m[name] / (1 - 0.9**self.t), self.v[name] / (1 - 0.99**self.t)
            self.p[name] -= self.rate * mean / (np.sqrt(square) + 1e-8)


def gradient_check(model, batch, count, gradient, step=1e-5):
    """Compare the gradient along a random direction with central differences: (how far apart, how far allowed).

    D(h) = L' + c h² + ..., so (4 D(h/2) - D(h)) / 3 is L' but for h⁴; what it corrects bounds the rest, and the
    loss's own roundings, 8 at once, add eps |L| / h.
    """
    rng = np.random.default_rng(1)
    home = dict(model.p)
    direction = {name: rng.standard_normal(x.shape) for name, x in home.items()}

    def value(move):
        for name, u in direction.items():
            model.p[name] = home[name] + move * u
        return everywhere(model.loss(*batch, count, gradient=False)[0])[0]

    coarse, fine = ((value(h) - value(-h)) / (2 * h) for h in (step, step / 2))
    loss = value(0)
    model.p.update(home)
    ours = sum(float(np.sum(gradient[name] * u)) for name, u in direction.items())
    theirs = (4 * fine - coarse) / 3
    return abs(ours - theirs), abs(theirs - fine) + 8 * np.finfo(np.float64).eps * loss / step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=130, help="of a sequence; need not divide (default 130)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-2, help="learning rate (default 0.01)")
    parser.add_argument("--layout", default="zigzag", choices=("zigzag", "contiguous", "striped"))
    parser.add_argument("--json", action="store_true", help="print the curve as JSON and nothing else")
    args = parser.parse_args()
    if min(args.steps, args.tokens, args.batch) < 1:
        parser.error("--steps, --tokens and --batch: must be 1 or more")

    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8)
    letters, text = np.unique(text, return_inverse=True)
    rng = np.random.default_rng(0)
    count = args.batch * args.tokens
    losses, started = [], time.perf_counter()
    with burstmpi.BurstAttention(comm, causal=True, layout=args.layout) as attn:
        model = Model(attn, len(letters), args.tokens)
        adam = Adam(model.p, args.rate)
        for step in range(args.steps):
            starts = rng.integers(len(text) - args.tokens, size=args.batch)
            whole = np.stack([text[s : s + args.tokens + 1] for s in starts])
            batch = attn.shard(whole[:, :-1]), attn.shard(whole[:, 1:])  # (batch, rows): tokens and their successors
            loss, gradient = everywhere(*model.loss(*batch, count))
            if step == 0:
                apart, allowed = gradient_check(model, batch, count, gradient)
            adam.step(gradient)
            losses.append(loss)
            if comm.rank == 0 and not args.json and step % max(1, args.steps // 15) == 0:
                print(f"step {step:>4}   loss {loss:.12f}   {'█' * round(12 * loss)}", flush=True)
    fine, fell = apart <= allowed, args.steps < 20 or np.mean(losses[-5:]) < 0.75 * losses[0]
    if comm.rank == 0 and args.json:
        print(json.dumps({"ranks": comm.size, "losses": losses, "gradient": [apart, allowed]}))
    elif comm.rank == 0:
        size = sum(x.size for x in model.p.values())
        print(f"step {step:>4}   loss {loss:.12f}\n")
        ranks = f"{comm.size} rank{'s' * (comm.size > 1)}"
        print(f"{size} parameters, {args.batch} x {args.tokens} tokens a step, {args.layout} over {ranks}")
        print(f"{args.steps} steps in {time.perf_counter() - started:.2f} s")
        print(f"gradient and finite differences {apart:.1e} apart, {allowed:.1e} allowed   {'ok' if fine else 'WRONG'}")
        print(f"loss from {losses[0]:.3f} to {losses[-1]:.3f}   {'ok' if fell else 'WRONG: it should fall'}")
    sys.stdout.flush()
    return fine and fell


if __name__ == "__main__":
    right = main()
    comm.Barrier()  # a rank that leaves with 1 may end the job: let rank 0 print before
    sys.exit(0 if right else 1)
