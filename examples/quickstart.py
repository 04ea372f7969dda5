"""Compute attention, forward and backward, over the ranks of this run; check it and print a report.

    ./mpi_run.sh -n 4 examples/quickstart.py
    ./mpi_run.sh -n 4 examples/quickstart.py --tokens 4096 --kv-heads 8 --full --dtype float16

The heart of it is `attend` below.  The rest makes numbers, checks them against the dense float64 reference, and
prints.  The exit code is 1 on every rank where a result is wrong.
"""

import argparse
import contextlib
import os
import sys
import time

import numpy as np
from mpi4py import MPI

import burstmpi
from burstmpi.backends import reference

comm = MPI.COMM_WORLD
NAMES = ("out", "lse", "dq", "dk", "dv")
CHECKED = 4096  # tokens up to which the dense reference is computed: its memory grows with their square


def attend(attn, whole, repeats):
    """Run forward and backward; keep this rank's results, the best times and the figures of the last calls."""
    q, k, v, dout = (attn.shard(x) for x in whole)  # this rank's rows: (batch, rows, heads, head_dim)
    times = []
    for _ in range(repeats + 1):  # the first call plans and allocates, the others reuse
        comm.Barrier()
        start = time.perf_counter()
        out, lse = attn.forward(q, k, v)  # lse: (batch, heads, rows), natural log
        middle, after_forward = time.perf_counter(), attn.stats
        dq, dk, dv = attn.backward(dout, q, k, v, out, lse)
        times.append((middle - start, time.perf_counter() - middle))
    slowest = total(times[1:], MPI.MAX)  # a call lasts until its last rank is done
    return (out, lse, dq, dk, dv), slowest.min(axis=0), (after_forward, attn.stats)


def total(numbers, op=MPI.SUM):
    """Reduce float64 numbers over the ranks."""
    numbers = np.array(numbers, np.float64)
    comm.Allreduce(MPI.IN_PLACE, numbers, op)
    return numbers


def naive(dout, q, k, v, mask):
    """Attention of one key head as one writes it down, each array in the inputs' type: what rounding alone costs.

    Products of half-precision numbers are summed in float32 and rounded once, as matrix units do.

    q, dout : (rows, heads that read this key head, head_dim);  k, v : (rows, head_dim);  mask : (rows, rows)
    """
    dtype, heads = q.dtype, q.shape[1]
    wide = np.float64 if dtype == np.float64 else np.float32
    product = lambda a, b: (a.astype(wide) @ b.astype(wide)).astype(dtype)  # noqa: E731
    stack = lambda x: x.swapaxes(0, 1).reshape(-1, x.shape[2])  # noqa: E731  (heads * rows, head_dim)
    back = lambda x: x.reshape(heads, -1, x.shape[1]).swapaxes(0, 1)  # noqa: E731
    scale = dtype.type(q.shape[2] ** -0.5)
    Q, dO = stack(q) * scale, stack(dout)
    S = np.where(np.tile(mask, (heads, 1)), product(Q, k.T), dtype.type(-np.inf))
    top = S.max(axis=1, keepdims=True)
    P = np.exp(S - top)
    total = P.sum(axis=1, keepdims=True, dtype=wide)
    lse = top.astype(wide) + np.log(total)
    out = (product(P, v) / total).astype(dtype)
    P = np.exp(S - lse).astype(dtype)
    dS = P * (product(dO, v.T) - (dO * out).sum(axis=1, keepdims=True))
    return back(out), lse.reshape(heads, -1), back(product(dS, k) * scale), product(dS.T, Q), product(P.T, dO)


def check(attn, whole, mine, rules):
    """Compare with the dense float64 reference: {name: (largest error, error allowed)}, the same on every rank.

    A result may be off by three times what the naive run in the same type is off, or by a few roundings where the
    naive run happens to be exact.  Key heads are independent: the ranks share them out.
    """
    results = [attn.gather(x, axis=2 if name == "lse" else 1) for name, x in zip(NAMES, mine)]
    q, k, v, dout = whole
    batch, tokens, heads, head_dim = q.shape
    group = heads // k.shape[2]
    mask, _ = reference.visible(reference.Rules(**rules), tokens, tokens)
    errors, off = np.zeros((2, len(NAMES)))
    largest = np.zeros(len(NAMES))
    for task in range(comm.rank, batch * k.shape[2], comm.size):
        b, head = divmod(task, k.shape[2])
        some = np.s_[b : b + 1, :, head * group : (head + 1) * group]  # query heads that read this key head
        one = np.s_[b : b + 1, :, head : head + 1]
        out, lse = reference.forward(q[some], k[one], v[one], **rules)
        exact = (out, lse, *reference.backward(dout[some], q[some], k[one], v[one], out, lse, **rules))
        plain = naive(dout[some][0], q[some][0], k[one][0, :, 0], v[one][0, :, 0], mask)
        parts = (some, (some[0], some[2], some[1]), some, one, one)
        for i, (result, part, right, rough) in enumerate(zip(results, parts, exact, plain)):
            errors[i] = max(errors[i], np.abs(result[part].astype(np.float64) - right).max())
            off[i] = max(off[i], np.abs(rough.astype(np.float64).reshape(right.shape) - right).max())
            largest[i] = max(largest[i], np.abs(right).max())
    errors, off, largest = total([errors, off, largest], MPI.MAX)
    sums = resolution(mine[1].dtype)  # sums are made in the type of lse, and each result is rounded once
    few = np.array([4 * sums + resolution(x.dtype) / 2 for x in mine])
    allowed = np.maximum(3 * off, few * np.maximum(1, largest))
    return {name: (errors[i], off[i], allowed[i]) for i, name in enumerate(NAMES)}


def resolution(dtype):
    """The distance from 1 to the next number of a type, bfloat16 included."""
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


# ---------------------------------------------------------------- options and report


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048, help="of the whole sequence; any number (default 2048)")
    parser.add_argument("--heads", type=int, default=4, help="query heads (default 4)")
    parser.add_argument("--kv-heads", type=int, help="key heads, must divide --heads (default: as many)")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=("float64", "float32", "float16", "bfloat16"))
    parser.add_argument("--layout", default="zigzag", choices=("zigzag", "contiguous", "striped"))
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", default=True, help="each token sees those before it (default)")
    mask.add_argument("--full", dest="causal", action="store_false", help="each token sees all")
    parser.add_argument("--window", type=int, metavar="LEFT", help="each token sees at most LEFT tokens before it")
    parser.add_argument("--backward", default="auto", choices=("auto", "q", "kv"), help="what travels in backward")
    parser.add_argument("--backend", default="auto", help='"auto" takes the fastest that this machine has')
    parser.add_argument("--repeats", type=int, default=3, help="timed calls, the best counts (default 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-check", dest="check", action="store_false", help="skip the dense reference")
    try:
        with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
            if comm.rank:  # one usage message is enough
                stack.enter_context(contextlib.redirect_stderr(nowhere))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
            return complete(parser)
    except SystemExit:
        comm.Barrier()  # the first rank that leaves may end the job: let the message out before
        raise


def complete(parser):
    """Parse, and refuse what cannot be."""
    args = parser.parse_args()
    args.kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    for name in ("batch", "tokens", "heads", "kv_heads", "head_dim", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be 1 or more, got {getattr(args, name)}")
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads: {args.kv_heads} does not divide --heads {args.heads}")
    if args.window is not None and args.window < 0:
        parser.error(f"--window: must be 0 or more, got {args.window}")
    return args


def size(nbytes):
    """12345678 → "11.8 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024


def report(args, rows, times, stats, errors):
    """Print what happened; tell whether it was right."""
    nodes = len(set(comm.allgather(MPI.Get_processor_name())))
    rows = comm.allgather(rows)
    sums = [
        total([s.bytes_sent, s.messages, s.tiles, s.tiles_skipped, s.wait_seconds]) for s in stats
    ]
    right = all(error <= allowed for error, _, allowed in errors.values())  # NaN is not right either
    if comm.rank:
        return right
    tell = lambda name, text: print(f"  {name:<10}{text}")  # noqa: E731
    heads = f"{args.heads} heads" if args.heads == args.kv_heads else f"{args.heads} query and {args.kv_heads} key heads"
    each = f"{rows[0]} rows each" if len(set(rows)) == 1 else f"{min(rows)} to {max(rows)} rows each"
    rule = ("causal" if args.causal else "full") + ("" if args.window is None else f", window of {args.window} to the left")
    left = args.tokens if args.window is None else args.window
    i = np.arange(args.tokens)
    seen = i if args.causal else args.tokens - 1
    pairs = args.batch * args.heads * int(np.sum(np.minimum(i, left) + 1 + (seen - i)))
    print(f"\nburstmpi {burstmpi.__version__}: exact attention over {comm.size} rank{'s' * (comm.size > 1)}")
    print()
    tell("arrays", f"batch {args.batch}, {args.tokens} tokens, {heads} of {args.head_dim}, {args.dtype}")
    tell("rule", rule)
    tell("ranks", f"{comm.size} on {nodes} node{'s' * (nodes > 1)}, {args.layout}, {each}")
    tell("backend", stats[0].backend)
    print(f"\n  {'':<10}{'time':>10}{'rate':>16}{'on the wire':>14}{'messages':>10}{'tiles':>8}{'skipped':>9}{'waiting':>9}")
    for name, products, seconds, sum_ in zip(("forward", "backward"), (2, 5), times, sums):
        rate = products * 2 * pairs * args.head_dim / seconds / 1e9  # each product is 2 flops a pair and channel
        waiting = sum_[4] / comm.size / seconds
        print(
            f"  {name:<10}{seconds * 1e3:>7.1f} ms{rate:>9.2f} GFLOP/s{size(sum_[0]):>14}{sum_[1]:>10.0f}"
            f"{sum_[2]:>8.0f}{sum_[3]:>9.0f}{min(waiting, 1):>8.0%}"
        )
    if stats[1].bytes_sent:
        moved = {"kv": "K, V, dK, dV", "q": "Q, dO, delta, lse, dQ"}[stats[1].travels]
        print(f"\n  K, V travelled in forward, {moved} in backward; bytes and messages are sums over the ranks.")
    print()
    if not errors:
        why = "--no-check" if not args.check else f"the dense reference is for {CHECKED} tokens at most"
        print(f"NOT CHECKED: {why}")
        return right
    print(f"  {'':<10}{'error':>10}{'naive run':>12}{'allowed':>12}      against the dense float64 reference")
    for name, (error, off, allowed) in errors.items():
        print(f"  {name:<10}{error:>10.1e}{off:>12.1e}{allowed:>12.1e}      {'ok' if error <= allowed else 'WRONG'}")
    print("\nRIGHT: output and gradients agree with the reference" if right else "\nWRONG: see above")
    return right


def main():
    args = options()
    rng = np.random.default_rng(args.seed)  # the same numbers on every rank
    if args.dtype == "bfloat16":
        import ml_dtypes  # noqa: F401  (makes NumPy know the name)
    whole = [
        rng.standard_normal((args.batch, args.tokens, heads, args.head_dim), np.float32).astype(args.dtype)
        for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)
    ]  # q, k, v and dout, the gradient that comes from a loss
    rules = {"causal": args.causal, "window": None if args.window is None else (args.window, None)}
    with burstmpi.BurstAttention(
        comm, layout=args.layout, backward=args.backward, backend=args.backend, **rules
    ) as attn:
        mine, times, stats = attend(attn, whole, args.repeats)
        errors = check(attn, whole, mine, rules) if args.check and args.tokens <= CHECKED else {}
        return report(args, mine[0].shape[1], times, stats, errors)


if __name__ == "__main__":
    right = main()
    sys.stdout.flush()
    comm.Barrier()  # a rank that leaves with 1 may end the job: let rank 0 print before
    sys.exit(0 if right else 1)
