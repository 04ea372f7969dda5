"""What the ring costs beside its arithmetic, what zigzag gains, and whether the bytes are those of the formulas.

    ./mpi_run.sh -n 2 benchmarks/ring.py
    ./mpi_run.sh -n 2 benchmarks/ring.py --tokens 8192 32768 --pairs 9 --json > ring.json
    ./mpi_run.sh -n 2 benchmarks/ring.py --shared     # and forward with K and V in a shared window, ranks of one node

Every figure is a ratio taken side by side in this run; absolute times are printed for orientation only.

    ring      forward or backward as a caller gets it
    tiles     the same kernels on the same blocks in the same order, on all ranks at once, so that they compete for
              memory and cores alike; no message, no packing, no agreement: every rank has all blocks beforehand
    cost      ring / tiles, each the slowest rank's time, measured as tiles, ring, tiles: the ring against the mean of
              its neighbours; the median over all such pairs, and the spread of the middle half
    noise     the second tiles / the first, the same way: what this machine makes of two equal things
    cpu       CPU seconds of the ring / of tiles, the mean over ranks: packing, Python, progress calls and waits that
              spin all count, other users of the machine hardly do
    compute   time in kernels of the ring (progress calls included) / tiles, the mean over ranks
    wait      share of the ring's time that ranks wait for each other, the mean over ranks
    bytes     bytes on the wire, all ranks together / what algorithm and types ask for:
                  forward             2 B Zk N d (G-1)                 elements of the inputs
                  backward, q         (2 B Z N d + [B Z N d + 2 B Z N]) (G-1)
                  backward, kv        (2 B Zk N d + [2 B Zk N d]) (G-1)    [in the type of sums]

The goal for 8192 tokens and more at 2 ranks: a cost within 3% where all is seen, within 5% where the rule is causal.
"""

import argparse
import json
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI

import burstmpi
from burstmpi.backends import choose
from burstmpi.backends.base import Dims, Work
from burstmpi.checks import accumulator
from burstmpi.layout import place
from burstmpi.rules import Rules, Sight, sees

comm = MPI.COMM_WORLD
GOAL = {"full": 1.03, "causal": 1.05}


class Tiles:
    """The arithmetic of one rank, with all blocks at hand.

    whole : q, k, v, dout, (batch, N, heads, d) each;  out, lse : whole as well
    """

    def __init__(self, whole, out, lse, layout, rules, backend):
        q, k, v, dout = whole
        self.backend = choose(backend)
        where = place(layout, q.shape[1], comm.size)
        self.order = [(comm.rank - step) % comm.size for step in range(comm.size)]  # as guests come by
        rows = [where.positions(r) for r in range(comm.size)]
        part = lambda x, r, axis=1: np.ascontiguousarray(np.take(x, rows[r], axis=axis))  # noqa: E731
        self.q, self.k, self.v, self.dout, self.out = ([part(x, r) for r in range(comm.size)] for x in (*whole, out))
        self.lse = [part(lse, r, 2) for r in range(comm.size)]
        acc = accumulator(q.dtype)
        self.delta = [np.empty(x.shape, acc) for x in self.lse]
        for r in range(comm.size):
            self.backend.delta(self.dout[r], self.out[r], self.delta[r])
        sight = [rules.intervals(p, q.shape[1], k.shape[1]) for p in rows]
        self.sight = {(i, j): Sight(*sight[i], rows[j]) for i in range(comm.size) for j in range(comm.size)}
        self.seen = {(i, j): sees(s.lo, s.hi, s.pos) for (i, j), s in self.sight.items()}
        self.scores = rules.scores(q.shape[3])
        dims = Dims(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, acc)
        longest = max(map(len, rows))
        self.scratch = self.backend.allocate(
            max(self.backend.scratch_bytes(dims, self.scores, longest, longest, way) for way in (False, True))
        )
        me = comm.rank
        self.result = np.empty_like(self.out[me])
        self.state = self.result if q.dtype == acc else np.empty(self.result.shape, acc)
        self.result_lse = np.empty_like(self.lse[me])
        longest = lambda xs: max(xs, key=lambda x: x.shape[1])  # noqa: E731
        self.sums = [np.empty(longest(xs).shape, acc) for xs in (self.q, self.k, self.v)]
        self.guest = [np.empty_like(x) for x in self.sums]
        self.results = [np.empty_like(x[me]) for x in (self.q, self.k, self.v)]

    def work(self, i, j):
        return Work(self.sight[i, j], self.scores, self.scratch)

    def forward(self):
        """Attend to every visible block of keys."""
        me = comm.rank
        todo = [j for j in self.order if self.seen[me, j]]
        for j in todo:
            last = j == todo[-1] and self.state is not self.result
            self.finish(self.backend.attend(
                self.q[me], self.k[j], self.v[j], self.state, self.result_lse, self.work(me, j),
                first=j == todo[0], final=self.result if last else None,
            ))  # fmt: skip

    def backward(self, travels):
        """Differentiate every visible pair of blocks, with what stays and what visits as in the ring."""
        me = comm.rank
        self.backend.delta(self.dout[me], self.out[me], self.delta[me])
        seen = (lambda j: self.seen[j, me]) if travels == "q" else (lambda j: self.seen[me, j])
        todo = [j for j in self.order if seen(j)]
        for j in todo:
            i, k = (j, me) if travels == "q" else (me, j)  # queries of i, keys of k
            visits = (True, False, False) if travels == "q" else (False, True, True)
            dq, dk, dv = (
                (self.guest if visit and j != me else self.sums)[n][:, : x.shape[1]]
                for n, (visit, x) in enumerate(zip(visits, (self.q[i], self.k[k], self.v[k])))
            )
            first = j == todo[0]
            self.finish(self.backend.attend_backward(
                self.dout[i], self.q[i], self.k[k], self.v[k], self.lse[i], self.delta[i], dq, dk, dv, self.work(i, k),
                fresh_q=visits[0] or first, fresh_kv=visits[1] or first,
            ))  # fmt: skip
        if self.q[me].dtype != self.sums[0].dtype:
            for result, total in zip(self.results, self.sums):
                self.backend.copy(result, total[:, : result.shape[1]])

    @staticmethod
    def finish(launch):
        while launch is not None and not launch.done():
            pass


class SharedTiles(Tiles):
    """Forward where K and V lie in a shared window: a rank copies its own there, and reads the others' in place.

    No message but a barrier.  What the ring adds to it (checks, agreement, Python) is left out, so that this is what a
    shared window could give at best.
    """

    def __init__(self, *args):
        super().__init__(*args)
        size = lambda r: self.k[r].nbytes + self.v[r].nbytes  # noqa: E731
        self.window = MPI.Win.Allocate_shared(size(comm.rank), 1, comm=comm)
        self.windows = []
        for r in range(comm.size):
            room = np.frombuffer(self.window.Shared_query(r)[0], np.uint8)
            cut, k, v = self.k[r].nbytes, self.k[r], self.v[r]
            self.windows.append((room[:cut].view(k.dtype).reshape(k.shape), room[cut : size(r)].view(v.dtype).reshape(v.shape)))
        self.window.Lock_all(MPI.MODE_NOCHECK)
        self.mine = self.k[comm.rank], self.v[comm.rank]

    def forward(self):
        """Copy, tell the others, attend to the own block, then to the others' as they lie."""
        for to, source in zip(self.windows[comm.rank], self.mine):
            np.copyto(to, source)
        self.window.Sync()
        told = comm.Ibarrier()
        me = comm.rank
        todo = [j for j in self.order if self.seen[me, j]]
        for j in todo:
            if j != me and told is not None:
                told.Wait()
                self.window.Sync()
                told = None
            k, v = self.mine if j == me else self.windows[j]
            last = j == todo[-1] and self.state is not self.result
            work = Work(self.sight[me, j], self.scores, self.scratch, progress=lambda: told is None or told.Test())
            self.finish(self.backend.attend(
                self.q[me], k, v, self.state, self.result_lse, work, first=j == todo[0], final=self.result if last else None,
            ))  # fmt: skip
        if told is not None:
            told.Wait()

    def close(self):
        self.window.Unlock_all()
        self.window.Free()


def timed(call):
    """Seconds of the slowest rank; their mean over ranks; CPU seconds, the mean over ranks."""
    comm.Barrier()
    start, cpu = time.perf_counter(), time.process_time()
    call()
    mine, cpu = time.perf_counter() - start, time.process_time() - cpu
    slowest, mean, cpu = comm.allreduce(mine, MPI.MAX), comm.allreduce(mine) / comm.size, comm.allreduce(cpu) / comm.size
    return np.array([slowest, mean, cpu])


def middle(values):
    """Median and the middle half's ends."""
    low, mid, high = np.percentile(values, (25, 50, 75))
    return [float(mid), float(low), float(high)]


class Case:
    """Arrays of one length and rule, as the ring and as tiles have them."""

    def __init__(self, args, tokens, causal):
        self.args, self.tokens, self.causal = args, tokens, causal
        rng = np.random.default_rng(0)
        self.whole = [
            rng.standard_normal((args.batch, tokens, heads, args.head_dim), np.float32).astype(args.dtype)
            for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)
        ]

    def open(self, layout, way="auto"):
        """A BurstAttention, its calls on this rank's rows; the first of each has been made."""
        attn = burstmpi.BurstAttention(
            comm, causal=self.causal, layout=layout, backward=way,
            backend=self.args.backend, deadline=self.args.deadline,
        )  # fmt: skip
        q, k, v, dout = (attn.shard(x) for x in self.whole)
        out, lse = attn.forward(q, k, v)
        grads = attn.backward(dout, q, k, v, out, lse)
        buffers = dict(zip(("dq", "dk", "dv"), grads))
        calls = {
            "forward": lambda: attn.forward(q, k, v, out=out, lse=lse),
            "backward": lambda: attn.backward(dout, q, k, v, out, lse, **buffers),
        }
        return attn, calls, out, lse

    def formula(self, call, travels):
        """Bytes on the wire of all ranks together, for a mask that spares no block."""
        a = self.args
        e, acc = np.dtype(a.dtype).itemsize, accumulator(a.dtype).itemsize
        queries, keys = a.batch * a.heads * self.tokens, a.batch * a.kv_heads * self.tokens
        d = a.head_dim
        if call == "forward":
            elements = 2 * e * keys * d
        elif travels == "q":
            elements = (2 * e + acc) * queries * d + 2 * acc * queries
        else:
            elements = (2 * e + 2 * acc) * keys * d
        return elements * (comm.size - 1)


def cost(args, tokens, causal):
    """Ring against tiles: forward and both backward ways."""
    case = Case(args, tokens, causal)
    rows = []
    rules = Rules(causal=causal)
    for call, way in (("forward", "q"), ("backward", "q"), ("backward", "kv")):
        attn, calls, out, lse = case.open("zigzag", way)
        with attn:
            tiles = Tiles(case.whole, attn.gather(out), attn.gather(lse, axis=2), "zigzag", rules, args.backend)
            bare = tiles.forward if call == "forward" else lambda tiles=tiles, way=way: tiles.backward(way)
            bare()
            samples = []
            for _ in range(args.pairs):
                before, ring, after = timed(bare), timed(calls[call]), timed(bare)
                stats = attn.stats
                wait, compute = (comm.allreduce(x) / comm.size for x in (stats.wait_seconds, stats.compute_seconds))
                ratio = ring / ((before + after) / 2)
                compute *= ratio[1] / ring[1]
                samples.append((ratio[0], after[0] / before[0], ratio[2], compute, wait / ring[1], ring[0]))
            sent = comm.allreduce(attn.stats.bytes_sent)
        ratio, noise, cpu, compute, wait, seconds = zip(*samples)
        rows.append({
            "tokens": tokens, "rule": "causal" if causal else "full", "call": call,
            "travels": "kv" if call == "forward" else way, "seconds": statistics.median(seconds), "cost": middle(ratio),
            "noise": middle(noise), "cpu": middle(cpu)[0], "compute": middle(compute)[0], "wait": middle(wait)[0],
            "bytes": sent, "bytes_of_formula": case.formula(call, way), "backend": attn.stats.backend,
        })  # fmt: skip
    return rows


def shared(args, tokens, causal):
    """Forward by the ring and by a shared window, each against tiles, in one run."""
    case, ratios = Case(args, tokens, causal), {"ring": [], "shared": []}
    attn, calls, out, lse = case.open("zigzag", "q")
    with attn:
        whole = attn.gather(out), attn.gather(lse, axis=2)
        tiles, window = (kind(case.whole, *whole, "zigzag", Rules(causal=causal), args.backend) for kind in (Tiles, SharedTiles))
        tiles.forward(), window.forward()
        wrong = comm.allreduce(float(np.abs(window.result - tiles.result).max()), MPI.MAX)
        if wrong:
            raise SystemExit(f"shared window: differs from tiles by {wrong}")
        for pair in range(args.pairs):
            before = timed(tiles.forward)
            order = [("ring", calls["forward"]), ("shared", window.forward)]
            times = {name: timed(call) for name, call in (order if pair % 2 else order[::-1])}
            base = (before + timed(tiles.forward)) / 2
            for name in ratios:
                ratios[name].append(times[name] / base)
        window.close()
    return {name: (middle([x[0] for x in values]), middle([x[2] for x in values])[0]) for name, values in ratios.items()}


def balance(args, tokens):
    """Causal contiguous against causal zigzag: how much faster the even share of work is."""
    case = Case(args, tokens, True)
    rows = []
    opened = {layout: case.open(layout) for layout in ("contiguous", "zigzag")}
    for call in ("forward", "backward"):
        ratios = []
        for pair in range(args.pairs):
            order = ("contiguous", "zigzag") if pair % 2 else ("zigzag", "contiguous")
            seconds = {layout: timed(opened[layout][1][call])[0] for layout in order}
            ratios.append(seconds["contiguous"] / seconds["zigzag"])
        most = {layout: comm.allreduce(opened[layout][0].stats.tiles, MPI.MAX) for layout in opened}
        rows.append({
            "tokens": tokens, "call": call, "gain": middle(ratios), "gain_of_tiles": most["contiguous"] / most["zigzag"],
        })  # fmt: skip
    for attn, *_ in opened.values():
        attn.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=("float64", "float32", "float16"))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--pairs", type=int, default=7, help="measurements of each ratio (default 7)")
    parser.add_argument("--deadline", type=float, default=300, help="seconds after which a wait is an error (default 300)")
    parser.add_argument("--shared", action="store_true", help="forward with K and V in a shared window, and nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    say = (lambda text: None) if args.json or comm.rank else (lambda text: print(text, flush=True))

    say(f"\n{comm.size} ranks, batch {args.batch}, {args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.dtype}")
    say("\nring against its own tiles without communication (middle half of the measurements in brackets)\n")
    say(
        f"{'tokens':>8} {'rule':<7}{'call':<9}{'travels':<8}{'ring':>10}{'cost':>8}{'':<16}{'noise':>7}{'':<16}"
        f"{'cpu':>7}{'compute':>9}{'wait':>7}{'bytes':>8}"
    )
    costs, gains = [], []
    if args.shared:
        for tokens in args.tokens:
            for causal in (False, True):
                for name, (cost_of, cpu) in shared(args, tokens, causal).items():
                    rule = "causal" if causal else "full"
                    say(f"{tokens:>8} {rule:<7}{name:<9}cost {cost_of[0]:.3f} [{cost_of[1]:.3f}, {cost_of[2]:.3f}], cpu {cpu:.3f}")
        return
    for tokens in args.tokens:
        for causal in (False, True):
            for row in cost(args, tokens, causal):
                costs.append(row)
                bracket = lambda x: f" [{x[1]:.3f}, {x[2]:.3f}]"  # noqa: E731
                wire = row["bytes"] / row["bytes_of_formula"] if row["bytes_of_formula"] else 1.0
                say(
                    f"{tokens:>8} {row['rule']:<7}{row['call']:<9}{row['travels']:<8}{row['seconds'] * 1e3:>7.0f} ms"
                    f"{row['cost'][0]:>8.3f}{bracket(row['cost']):<16}{row['noise'][0]:>7.3f}{bracket(row['noise']):<16}"
                    f"{row['cpu']:>7.3f}{row['compute']:>9.3f}{row['wait']:>7.1%}{wire:>8.4f}"
                )
    say("\ncausal: contiguous / zigzag, slowest rank's time\n")
    say(f"{'tokens':>8} {'call':<9}{'gain':>8}{'':<16}{'by tiles':>10}")
    for tokens in args.tokens:
        for row in balance(args, tokens):
            gains.append(row)
            gain = row["gain"]
            say(f"{tokens:>8} {row['call']:<9}{gain[0]:>8.3f} [{gain[1]:.3f}, {gain[2]:.3f}]{row['gain_of_tiles']:>10.3f}")
    long = [row for row in costs if row["tokens"] >= 8192]
    if long and comm.size == 2:
        met = sum(row["cost"][0] <= GOAL[row["rule"]] for row in long)
        goals = ", ".join(f"{goal} ({rule})" for rule, goal in GOAL.items())
        say(f"\ngoal, a cost of at most {goals} for 8192 tokens and more: met by {met} of {len(long)}")
    if args.json and comm.rank == 0:
        shape = {name: getattr(args, name) for name in ("batch", "heads", "kv_heads", "head_dim", "dtype", "pairs")}
        print(json.dumps({"ranks": comm.size, **shape, "cost": costs, "balance": gains}, indent=1))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
