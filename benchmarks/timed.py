"""Times on a real GPU: forward and backward by CUDA events, beside the device's peak, PyTorch and flash_attn.

    python benchmarks/kernels.py --gpu

A time is that of the backend's verb: the kernel and the small ones before and after it (survey, delta's is not in it, fold).  Products
count where a pair (query, key) is visible: 2 (d + dv) a pair forward, 2 (3 d + 2 dv) backward, whatever the kernel does twice.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from burstmpi.backends.base import Dims, Work  # noqa: E402
from burstmpi.checks import accumulator  # noqa: E402
from burstmpi.rules import Rules, Sight  # noqa: E402

# Operations of a multiprocessor and cycle: tensor cores with float32 sums (boards named GeForce from sm_86 on: half of it), FMA of
# float32, and of float64 the faster of FMA and tensor cores.  mma.sync alone reaches about 63% of sm_90's and less of sm_100's.
HALVES = {"75": 1024, "80": 2048, "86": 1024, "89": 1024, "90": 4096, "100": 8192, "120": 1024}
FLOATS = {"75": 128, "80": 128, "86": 256, "89": 256, "90": 256, "100": 256, "120": 256}
DOUBLES = {"75": 4, "80": 128, "86": 4, "89": 4, "90": 256, "100": 128, "120": 4}


@dataclass(frozen=True)
class Case:
    """One attention: (batch, rows, heads, d) of a type, with rules."""

    batch: int
    rows: int
    heads: int
    kv_heads: int
    d: int
    dtype: str
    options: tuple = ()  # of Rules, as pairs

    @property
    def rules(self) -> Rules:
        return Rules(**dict(self.options))


def peak(arch: str, name: str, processors: int, kilohertz: int, dtype: str) -> float:
    """Operations a second that the device could do in a type."""
    if dtype in ("float32", "float64"):
        of_a_cycle = (FLOATS if dtype == "float32" else DOUBLES)[arch]
    else:
        of_a_cycle = HALVES[arch] / (2 if "GeForce" in name and arch in ("86", "89", "120") else 1)
    return of_a_cycle * processors * kilohertz * 1e3


def pairs(case: Case) -> int:
    """Visible pairs (query, key) of one head."""
    _, lo, hi = case.rules.intervals(np.arange(case.rows), case.rows, case.rows)
    seen = np.clip(hi, 0, case.rows).astype(np.int64) - np.clip(lo, 0, case.rows)
    return int(np.maximum(seen, 0).sum())


def operations(case: Case) -> tuple[int, int]:
    """Of forward (S, O) and of backward (S, dP, dV, dK, dQ)."""
    all_pairs = case.batch * case.heads * pairs(case)
    return 4 * case.d * all_pairs, 10 * case.d * all_pairs


class Timer:
    """Seconds of a call by CUDA events, of CuPy or of torch.

    event : makes an event; record(event) puts it into the stream; elapsed(start, end) gives milliseconds; synchronize waits
    """

    def __init__(self, event, record, elapsed, synchronize, *, warm=5, repeats=30):
        self.event, self.record, self.elapsed, self.synchronize = event, record, elapsed, synchronize
        self.warm, self.repeats = warm, repeats

    def seconds(self, call) -> float:
        """Median over many runs, after some that are not counted."""
        for _ in range(self.warm):
            call()
        marks = []
        for _ in range(self.repeats):
            start, end = self.event(), self.event()
            self.record(start)
            call()
            self.record(end)
            marks.append((start, end))
        self.synchronize()
        return median(self.elapsed(start, end) for start, end in marks) / 1e3


def cupy_timer(cupy, **how) -> Timer:
    stream = cupy.cuda.get_current_stream()
    return Timer(cupy.cuda.Event, lambda e: e.record(stream), cupy.cuda.get_elapsed_time, stream.synchronize, **how)


def arrays(case: Case, seed=0):
    """q, k, v, dout as float32 of the host."""
    rng = np.random.default_rng(seed)
    rows = lambda heads: rng.standard_normal((case.batch, case.rows, heads, case.d), np.float32)  # noqa: E731
    return rows(case.heads), rows(case.kv_heads), rows(case.kv_heads), rows(case.heads)


def ours(cupy, case: Case, *, deterministic=False, seed=0):
    """forward and backward as calls that enqueue one block, and the arrays that they leave: out, lse, dq, dk, dv."""
    from burstmpi.backends.cuda import CudaBackend

    backend = CudaBackend(deterministic=deterministic)
    if case.dtype == "bfloat16":
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = np.dtype(case.dtype)
    acc = accumulator(dtype)
    q, k, v, dout = (cupy.asarray(x.astype(dtype)) for x in arrays(case, seed))
    state, out, lse = cupy.empty(q.shape, acc), cupy.empty(q.shape, dtype), cupy.empty((case.batch, case.heads, case.rows), acc)
    delta = cupy.empty(lse.shape, acc)
    dq, dk, dv = (cupy.empty(x.shape, acc) for x in (q, k, v))
    dims = Dims(case.batch, case.heads, case.kv_heads, case.d, case.d, dtype, acc)
    order = np.arange(case.rows)
    scores = case.rules.scores(case.d)
    sight = Sight(*(cupy.asarray(np.ascontiguousarray(x, np.int32)) for x in (*case.rules.intervals(order, case.rows, case.rows), order)), ascending=True)
    nbytes = max(backend.scratch_bytes(dims, scores, case.rows, case.rows, way) for way in (False, True))
    work = Work(sight, scores, backend.allocate(nbytes))
    last = state if dtype == acc else out

    def forward():
        backend.attend(q, k, v, state, lse, work, first=True, final=None if last is state else out)

    def backward():
        backend.attend_backward(dout, q, k, v, lse, delta, dq, dk, dv, work, fresh_q=True, fresh_kv=True)

    def prepare():
        backend.delta(dout, last, delta)

    return forward, prepare, backward, (last, lse, dq, dk, dv)


def torch_case(torch, case: Case, device="cuda", seed=0):
    """forward and backward of scaled_dot_product_attention on the same numbers; None where it has no such rule."""
    options = dict(case.options)
    if set(options) - {"causal"}:
        return None
    q, k, v, dout = (torch.from_numpy(x).to(device, getattr(torch, case.dtype)).transpose(1, 2) for x in arrays(case, seed))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    more = {"enable_gqa": True} if case.heads != case.kv_heads else {}

    def call():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(options.get("causal")), **more)

    return _autograd(torch, call, (q, k, v), dout)


def flash_case(torch, flash, case: Case, device="cuda", seed=0):
    """forward and backward of flash_attn_func on the same numbers; None where it has no such type or rule."""
    options = dict(case.options)
    if case.dtype in ("float32", "float64") or set(options) - {"causal", "window"}:
        return None
    q, k, v, dout = (torch.from_numpy(x).to(device, getattr(torch, case.dtype)) for x in arrays(case, seed))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    window = tuple(-1 if side is None else side for side in options.get("window") or (None, None))

    def call():
        return flash.flash_attn_func(q, k, v, causal=bool(options.get("causal")), window_size=window)

    return _autograd(torch, call, (q, k, v), dout)


def _autograd(torch, call, inputs, dout):
    """forward with no graph; backward through one that is made once."""
    result = call()

    def forward():
        with torch.no_grad():
            return call()

    def backward():
        return torch.autograd.grad(result, inputs, dout, retain_graph=True)

    return forward, backward


def torch_timer(torch, **how) -> Timer:
    event = lambda: torch.cuda.Event(enable_timing=True)  # noqa: E731
    return Timer(event, lambda e: e.record(), lambda a, b: a.elapsed_time(b), torch.cuda.synchronize, **how)


def others(case: Case):
    """(name, forward, backward, timer) of what else is installed and takes the case."""
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    found = torch_case(torch, case)
    if found:
        yield "torch", *found, torch_timer(torch)
    try:
        import flash_attn
    except ImportError:
        return
    found = flash_case(torch, flash_attn, case)
    if found:
        yield "flash_attn", *found, torch_timer(torch)


RULES = {"full": (), "causal": (("causal", True),), "window 1024": (("causal", True), ("window", (1023, 0)))}


def cases(dtypes, dims, tokens=16384, width=2048):
    """16384 tokens in batches of 1024, 4096 and 16384 rows, 2048 columns over all heads; float64 a quarter of it."""
    for dtype in dtypes:
        for d in dims:
            for rows in (1024, 4096, 16384):
                if dtype == "float64" and rows > 4096:
                    continue
                heads = max(1, (width if dtype != "float64" else width // 4) // d)
                for name, options in RULES.items():
                    yield name, Case(tokens // rows, rows, heads, heads, d, dtype, options)


def device_of(cupy) -> tuple[str, str, int, int] | None:
    """Architecture, name, multiprocessors, kHz of the current device; None where there is none."""
    from burstmpi.backends import tiles

    try:
        if not cupy.cuda.is_available():
            return None
        device = cupy.cuda.Device()
        name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        told = device.attributes
        return tiles.architecture(device.compute_capability), name, told["MultiProcessorCount"], told["ClockRate"]
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


def measured(cupy, case: Case, device, *, deterministic=False, timer=None):
    """Rows (name, TFLOP/s forward, backward, share of the peak of both) of ours and of what else is installed."""
    timer = timer or cupy_timer(cupy)
    most, work = peak(*device, case.dtype), operations(case)
    forward, prepare, backward, _ = ours(cupy, case, deterministic=deterministic)
    seconds = [timer.seconds(forward)]
    prepare()
    seconds.append(timer.seconds(backward))
    runs = [("burstmpi", seconds)] + [(name, [clock.seconds(f), clock.seconds(b)]) for name, f, b, clock in others(case)]
    for name, told in runs:
        rates = [count / second for count, second in zip(work, told)]
        yield name, *(rate / 1e12 for rate in rates), *(rate / most for rate in rates)


def main(dtypes, dims) -> int:
    """Print all; 1 where there is no GPU."""
    try:
        import cupy
    except ImportError as error:
        print(f"--gpu: {error}; pip install cupy-cuda13x")
        return 1
    device = device_of(cupy)
    if device is None:
        print("--gpu: CuPy finds no device")
        return 1
    arch, name, processors, kilohertz = device
    print(f"{name}: sm_{arch}, {processors} multiprocessors, {kilohertz / 1e6:.2f} GHz")
    for dtype in dtypes:
        print(f"  peak of {dtype}: {peak(*device, dtype) / 1e12:.1f} TFLOP/s")
    print("%-9s %4s %6s %-12s %-11s %22s %24s" % ("type", "d", "rows", "rule", "", "forward TFLOP/s (peak)", "backward TFLOP/s (peak)"))
    for rule, case in cases(dtypes, dims):
        if (arch, case.dtype) == ("75", "bfloat16"):
            continue
        for who, forward, backward, share, share_back in measured(cupy, case, device):
            print("%-9s %4d %6d %-12s %-11s %14.1f (%4.1f%%) %16.1f (%4.1f%%)" % (
                case.dtype, case.d, case.rows, rule, who, forward, 100 * share, backward, 100 * share_back), flush=True)  # fmt: skip
    return 0
