"""The CPU kernels against PyTorch's scaled_dot_product_attention and against the core's FMA peak, on one thread.

    python benchmarks/host.py                     # the table
    python benchmarks/host.py --case float32:64:causal --repeats 30
    python benchmarks/host.py --isa avx2          # or another of burstmpi.backends.host.ISAS
    python benchmarks/host.py --rules             # rules, grouped heads, odd head dims; --dtype bfloat16 for that type
    python benchmarks/host.py --threads           # two threads beside one; --case for others than float32:64:causal
    python benchmarks/host.py --beside=-DWEIGH_LATER=0   # beside the same sources built with this flag, and whether bits are the same
    python benchmarks/host.py --first             # the first call of a program, with an empty cache and with a full one

Machines are shared and clocks move: the two are run in turn, again and again, and a figure is the median of the
ratios of neighbours, never a quotient of two times from different minutes; rates are the best of a run.  Times are CPU
times of the process, but by the clock on the wall for --threads and --first.  With ``--isa avx512bf16``, ``avx512`` or
``avx2`` PyTorch is held to that instruction set too (``PEER``), and its products on AMX are always off: they die in some
guests.  It gets its own favourite layout, (batch, heads, rows, head_dim) contiguous; the kernels get (batch, rows, heads,
head_dim) as the library holds it.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # its AMX path dies in guests without CPUID leaf 0x1D

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

from burstmpi.backends import compile, host  # noqa: E402
from burstmpi.backends.base import Dims, Work  # noqa: E402
from burstmpi.checks import accumulator  # noqa: E402
from burstmpi.rules import Rules, Sight  # noqa: E402

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CASES = [
    *(f"float32:{d}:{rule}" for d in (64, 128) for rule in ("full", "causal")),
    *(f"bfloat16:{d}:{rule}" for d in (64, 128) for rule in ("full", "causal")),
    *(f"float64:{d}:{rule}" for d in (64, 128) for rule in ("full", "causal")),
]


def seconds(run, clock=time.process_time) -> float:
    start = clock()
    run()
    return clock() - start


class Peak:
    """Fused multiply-adds of one core, in GF/s; or vdpbf16ps, where ``dtype`` is bfloat16."""

    def __init__(self, isa, dtype="float32"):
        key = (isa, dtype) if (isa, dtype) in host.FLAGS else (isa, "float32")
        library = compile.load(f"peak-{'-'.join(key)}", host._sources() / "peak.c", [*host.BASE_FLAGS, *host.FLAGS[key]])
        self.run = library.burst_dot if key[1] == "bfloat16" else library.burst_fma
        self.run.restype, self.run.argtypes = ctypes.c_double, [ctypes.c_int64]

    def __call__(self) -> float:
        best = 0.0
        for _ in range(3):
            start = time.process_time()
            flops = self.run(1_000_000)
            best = max(best, flops / (time.process_time() - start) * 1e-9)
        return best


def fma_peak(isa, dtype="float32") -> Peak:
    """Of what an instruction set's vectors are: AMX has those of AVX-512."""
    return Peak("avx512" if isa.startswith(("amx", "avx512")) else isa, dtype)


class Ours:
    """A block as the ring hands it to the backend."""

    def __init__(self, backend, dtype, d, options, heads, rows, kv_heads=None):
        rng = np.random.default_rng(0)
        kv_heads = kv_heads or heads
        make = lambda h: rng.standard_normal((1, rows, h, d), np.float32).astype(DTYPES[dtype])  # noqa: E731
        self.q, self.k, self.v, self.dout = make(heads), make(kv_heads), make(kv_heads), make(heads)
        acc = accumulator(self.q.dtype)
        self.backend, rules = backend, Rules(**options)
        dims = Dims(1, heads, kv_heads, d, d, self.q.dtype, acc)
        self.at, self.lo, self.hi = rules.intervals(np.arange(rows), rows, rows)
        sight = Sight(self.at, self.lo, self.hi, np.arange(rows, dtype=np.int32))
        scores = rules.scores(d)
        need = max(backend.scratch_bytes(dims, scores, rows, rows, way) for way in (False, True))
        self.work = Work(sight, scores, backend.allocate(need))
        self.state, self.lse = backend.empty(self.q.shape, acc), backend.empty((1, heads, rows), acc)
        self.out = backend.empty(self.q.shape, self.q.dtype)
        self.delta = backend.empty(self.lse.shape, acc)
        self.dq, self.dk, self.dv = self.sums = [backend.empty(x.shape, acc) for x in (self.q, self.k, self.v)]
        self.rounded = None if self.q.dtype == acc else [backend.empty(x.shape, x.dtype) for x in (self.q, self.k, self.v)]
        pairs = float((self.hi.astype(np.int64) - self.lo).sum())
        self.flops = (4 * pairs * d * heads, 10 * pairs * d * heads)

    def forward(self):
        self.backend.attend(self.q, self.k, self.v, self.state, self.lse, self.work, first=True, final=self.out)

    def backward(self):
        """All that a backward call does on one rank: delta, and the kernel."""
        self.backend.delta(self.dout, self.out, self.delta)
        self.backend.attend_backward(
            self.dout, self.q, self.k, self.v, self.lse, self.delta, self.dq, self.dk, self.dv, self.work,
            fresh_q=True, fresh_kv=True, final=self.rounded or (None,) * 3,
        )  # fmt: skip

    def results(self):
        return self.out, self.lse, *(self.rounded or self.sums)


class Torch:
    """The same arrays in PyTorch."""

    def __init__(self, ours: Ours, causal):
        import torch

        torch.set_num_threads(1)

        def tensor(x):
            bits = x.transpose(0, 2, 1, 3)
            if x.dtype == ml_dtypes.bfloat16:
                return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(np.ascontiguousarray(bits))

        self.q, self.k, self.v, self.dout = (tensor(x) for x in (ours.q, ours.k, ours.v, ours.dout))
        self.causal = causal
        self.ops = torch.ops.aten

    def forward(self):
        self.out, self.lse = self.ops._scaled_dot_product_flash_attention_for_cpu(self.q, self.k, self.v, 0.0, self.causal)

    def backward(self):
        self.ops._scaled_dot_product_flash_attention_for_cpu_backward(
            self.dout, self.q, self.k, self.v, self.out, self.lse, 0.0, self.causal
        )


# What PyTorch may use beside an instruction set that is forced: what a CPU has whose best that is.  portable: whatever it likes.
PEER = {
    "avx512bf16": {"MKL_ENABLE_INSTRUCTIONS": "AVX512_E3", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {"MKL_ENABLE_INSTRUCTIONS": "AVX512_E2", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}

LIMITS = []  # what the instruction's own peak would be beside torch


def measure(case, backend, rows, heads, repeats):
    """One line of the table."""
    dtype, d, rule = case.split(":")
    d, causal = int(d), rule == "causal"
    ours = Ours(backend, dtype, d, {"causal": causal}, heads, rows)
    torch = Torch(ours, causal)
    peak = fma_peak(backend.isa, "float64" if dtype == "float64" else "float32")
    ratios, shares, rates = {}, {}, {}
    for way, flops in zip(("forward", "backward"), ours.flops):
        mine, theirs = getattr(ours, way), getattr(torch, way)
        mine(), theirs()
        ratio, share, rate = [], [], []
        for _ in range(repeats):
            a, b = seconds(mine), seconds(theirs)
            limit = peak()
            ratio.append(b / a)
            share.append(flops / a * 1e-9 / limit)
            rate.append((flops / a * 1e-9, flops / b * 1e-9))
        ratios[way], shares[way], rates[way] = statistics.median(ratio), share, rate
    cell = lambda way: (  # noqa: E731
        f"{ratios[way]:.2f} | {statistics.median(shares[way]):.0%} | {max(r[0] for r in rates[way]):.0f} | "
        f"{max(r[1] for r in rates[way]):.0f}"
    )
    print(f"| {dtype} d {d} {rule} | {cell('forward')} | {cell('backward')} |", flush=True)
    if dtype == "bfloat16" and backend.isa == "avx512bf16":
        dot, fma = Peak("avx512bf16", "bfloat16"), peak
        pairs = [(fma(), dot()) for _ in range(repeats)]
        share = statistics.median(b / a for a, b in pairs)
        reach = {way: share * ratios[way] / statistics.median(shares[way]) for way in ratios}
        LIMITS.append(
            f"{case}: vdpbf16ps peak {max(b for _, b in pairs):.0f} GF/s, {share:.0%} of the FMA peak: {reach['forward']:.2f} x torch "
            f"forward, {reach['backward']:.2f} x backward if nothing else took time"
        )


# Against the causal rate per visible pair, and odd head dims against the next native one.
RULES = {
    **{f"window {n}": lambda rows, n=n: {"causal": True, "window": (n, 0)} for n in (512, 1024, 2048)},
    **{f"documents of {n}": lambda rows, n=n: {"causal": True, "documents": tuple(range(0, rows + 1, n))} for n in (512, 1024, 2048)},
    "softcap": lambda rows: {"causal": True, "softcap": 30.0},
    "ALiBi": lambda rows: {"causal": True, "alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
}


def ratios_of(one, two, repeats):
    """Rate of one over rate of two, forward and backward, run in turn: medians."""
    medians = []
    for i, way in enumerate(("forward", "backward")):
        a, b = getattr(one, way), getattr(two, way)
        a(), b()
        ratios = []
        for _ in range(repeats):
            ratios.append((one.flops[i] / seconds(a)) / (two.flops[i] / seconds(b)))
        medians.append(statistics.median(ratios))
    return medians


def beside(name, one, two, repeats):
    """A line of the table of rules."""
    print(f"| {name} | {' | '.join(f'{x:.2f}' for x in ratios_of(one, two, repeats))} |", flush=True)


def rules(backend, repeats, dtype):
    """What rules, grouped heads, odd head dims, subnormal numbers and large logits cost.

    Rules that hide much do little of the causal call's work in 4096 tokens: a few ms, of which it takes a part until caches, address
    translation and branch prediction have come back from the call before.  So they are run with as many tokens as do the same work, too.
    """
    print("| rate per visible pair, beside | forward | backward |\n|---|---|---|")
    causal = Ours(backend, dtype, 64, {"causal": True}, 4, 4096)
    for name, options in RULES.items():
        few = Ours(backend, dtype, 64, options(4096), 4, 4096)
        beside(f"{name} / causal", few, causal, repeats)
        rows = round(causal.flops[0] / few.flops[0]) * 4096
        if rows > 4096:
            beside(f"{name}, {rows} tokens / causal", Ours(backend, dtype, 64, options(rows), 4, rows), causal, repeats)
    beside("1 key head for 4 / causal", Ours(backend, dtype, 64, {"causal": True}, 4, 4096, kv_heads=1), causal, repeats)
    for d, native in ((40, 64), (72, 128), (80, 128), (96, 128)):
        one, two = (Ours(backend, dtype, x, {}, 4, 2048) for x in (d, native))
        beside(f"d {d} / d {native}", one, two, repeats)
    tiny = Ours(backend, dtype, 64, {"causal": True}, 4, 4096)
    for x in (tiny.q, tiny.k, tiny.v, tiny.dout):
        x *= x.dtype.type(1e-309 if dtype == "float64" else 1e-39)
    beside("subnormal inputs / causal", tiny, causal, repeats)
    for gain in (8, 40, 200):  # a new maximum, and weights that vanish
        steep = Ours(backend, dtype, 64, {"causal": True}, 4, 4096)
        steep.q *= steep.q.dtype.type(gain)
        beside(f"logits x {gain} / causal", steep, causal, repeats)


def built_otherwise(backend, other, cases, rows, heads, repeats):
    """The kernels beside themselves, built with other flags: what a choice in the sources is worth."""
    print("| rate, beside the other build | forward | backward | bits |\n|---|---|---|---|")
    for case in cases:
        dtype, d, rule = case.split(":")
        one, two = (Ours(x, dtype, int(d), {"causal": rule == "causal"}, heads, rows) for x in (backend, other))
        cells = ratios_of(one, two, repeats)
        same = all(a.tobytes() == b.tobytes() for a, b in zip(one.results(), two.results()))
        print(f"| {dtype} d {d} {rule} | {' | '.join(f'{x:.3f}' for x in cells)} | {'the same' if same else 'others'} |", flush=True)


def threads(isa, repeats, cases):
    """Two threads against one, by the clock on the wall, and FMA on registers alone beside them: what two cores of this machine give."""
    backends = [host.HostBackend(isa, threads=n) for n in (1, 2)]
    peak, rounds, clock = fma_peak(backends[0].isa), 30_000_000, time.perf_counter

    def both():
        other = threading.Thread(target=peak.run, args=(rounds // 2,))
        other.start()
        peak.run(rounds // 2)
        other.join()

    for case, way in itertools.product(cases, ("forward", "backward")):
        dtype, d, rule = case.split(":")
        pair = [Ours(backend, dtype, int(d), {"causal": rule == "causal"}, 8, 4096) for backend in backends]
        for x in pair:
            x.forward(), getattr(x, way)()
        ratios, cores = [], []
        for _ in range(repeats):
            one, two = (seconds(getattr(x, way), clock) for x in pair)
            ratios.append(one / two)
            cores.append(seconds(lambda: peak.run(rounds), clock) / seconds(both, clock))
        print(
            f"two threads / one, {case} {way}: median {statistics.median(ratios):.2f}, best {max(ratios):.2f}; "
            f"FMA alone: median {statistics.median(cores):.2f}, best {max(cores):.2f}",
            flush=True,
        )


FIRST = """
import sys, time
import ml_dtypes, numpy as np
from mpi4py import MPI
from burstmpi import BurstAttention
q = np.ones((1, 64, 1, 64), ml_dtypes.bfloat16 if sys.argv[1] == "bfloat16" else sys.argv[1])
start = time.perf_counter()
attn = BurstAttention(MPI.COMM_SELF, backend="host")
out, lse = attn.forward(q, q, q)
forward = time.perf_counter()
attn.backward(q, q, q, q, out, lse)
print(forward - start, time.perf_counter() - forward)
"""


def first():
    """Seconds of a program's first forward, with all that comes before it but imports, and of its first backward then, by the clock on the wall: needs an idle machine."""
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as cache:
            environ = {**os.environ, "BURSTMPI_CACHE": cache}
            run = lambda: np.array(subprocess.run([sys.executable, "-c", FIRST, dtype], env=environ, check=True, capture_output=True).stdout.split(), float)  # noqa: B023, E731
            empty, full = run(), np.median([run() for _ in range(5)], axis=0)
        for way, of_machine, of_program in zip(("forward", "backward"), empty, full):
            print(f"{dtype}: first {way} of a machine {of_machine:.1f} s, of a later program {1000 * of_program:.0f} ms", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="dtype:head_dim:full|causal")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--isa", choices=list(host.ISAS))
    parser.add_argument("--flags", default="", help="more flags for the compiler, such as -DBURST_KEYS_FORWARD=96")
    parser.add_argument("--rules", action="store_true", help="rules, grouped heads and odd head dims, beside the plain case")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="of --rules")
    parser.add_argument("--threads", action="store_true", help="two threads beside one")
    parser.add_argument("--beside", metavar="FLAGS", help="beside the same sources built with these flags, in place of torch")
    parser.add_argument("--first", action="store_true", help="the first call of a program")
    args = parser.parse_args()
    modes = {"first": (), "rules": ("isa", "flags", "repeats", "dtype"), "threads": ("isa", "repeats", "case")}
    for mode, takes in modes.items():
        unused = [name for name, value in vars(args).items() if name not in (mode, *takes) and value != parser.get_default(name)]
        if getattr(args, mode) and unused:
            parser.error(f"--{mode} takes no --{unused[0]}")
    if args.first:
        return first()
    os.environ.update(PEER.get(args.isa, {}))
    backend = host.HostBackend(args.isa, threads=1, extra_flags=args.flags.split())
    if args.rules:
        return rules(backend, args.repeats, args.dtype)
    if args.beside:
        other = host.HostBackend(args.isa, threads=1, extra_flags=args.beside.split())
        return built_otherwise(backend, other, args.case or CASES, args.rows, args.heads, args.repeats)
    if args.threads:
        return threads(args.isa, args.repeats, args.case or ["float32:64:causal"])
    print(f"{backend.isa}, {args.rows} tokens, {args.heads} heads, one thread, median of {args.repeats}")
    print("| case | fwd / torch | of FMA peak | best GF/s | torch GF/s | bwd / torch | of FMA peak | best GF/s | torch GF/s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in args.case or CASES:
        measure(case, backend, args.rows, args.heads, args.repeats)
    print(*LIMITS, sep="\n")


if __name__ == "__main__":
    main()
