"""The float32 and float64 kernels on the PTX machine with all its checks: shapes, rules, hops, splits, strides, faults."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import cuda_kit
import host_kit
import numpy as np
import pytest
from support import check, naive, problem, rules, truth

from burstmpi.backends import modules, tiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

TYPES = ("float32", "float64")
ARCHES = ("75", "80", "90", "120")


class Device:
    """One device for many tests: what was compiled and read in stays."""

    def __init__(self, arch, **switches):
        self.arch, self.switches, self.backends = arch, switches, {}

    def backend(self, deterministic=False, splits=1):
        """One part of the keys unless told: small problems would be cut until no block has a second tile."""
        from burstmpi.backends.cuda import CudaBackend

        if not self.backends:
            self.backends[False, 1] = cuda_kit.backend(self.arch, splits=1, **self.switches)
        key = deterministic, splits
        if key not in self.backends:
            self.backends[key] = CudaBackend(deterministic=deterministic, splits=splits)
            self.backends[key]._modules = self.backends[False, 1]._modules
        return self.backends[key]


@pytest.fixture(scope="module", params=ARCHES)
def device(request):
    return Device(request.param)


@pytest.fixture(scope="module")
def sm80():
    return Device("80")


def run(backend, p, travels="kv", **how):
    """Forward and backward of a problem, as a dict."""
    out, lse = cuda_kit.forward(backend, p.q, p.k, p.v, **how)
    dq, dk, dv = cuda_kit.backward(backend, p.dout, p.q, p.k, p.v, out, lse, travels=travels, **how)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def right(backend, p, options, **how):
    """Hold a run against the truth, within what naive runs of the same type are off; returns it."""
    got = run(backend, p, **options, **how)
    check(got, truth(p, options))
    return got


# ---------------------------------------------------------------- every architecture


@pytest.mark.parametrize("dtype", TYPES)
def test_tails_and_hops(device, dtype):
    """Ragged ends on both sides; then the keys come in three blocks, shuffled, and the state goes from hop to hop."""
    p = problem(33, 33, batch=1, heads=2, kv_heads=1, d=24, dv=32, dtype=dtype)
    right(device.backend(True), p, {"causal": True})
    p = problem(9, 70, batch=1, heads=1, kv_heads=1, d=24, dv=32, dtype=dtype)
    order = np.random.default_rng(1).permutation(70)
    right(device.backend(), p, {"causal": True}, cuts=(33, 64), order_k=order)


# ---------------------------------------------------------------- one architecture

SHAPES = [(1, 1), (1, 65), (7, 33), (31, 127), (33, 7), (63, 64), (64, 63), (65, 65), (127, 31)]


@pytest.mark.parametrize("nq, nk", SHAPES)
def test_shapes_that_hurt(sm80, nq, nk):
    p = problem(nq, nk, batch=1, heads=2, kv_heads=1, d=32, dv=24, dtype="float32", seed=nq)
    right(sm80.backend(nq % 4 == 3), p, {"causal": True} if nk % 2 else {})


@pytest.mark.parametrize("nq, nk", [(1, 1), (9, 33), (33, 9)])
def test_shapes_of_float64(sm80, nq, nk):
    p = problem(nq, nk, batch=1, heads=1, kv_heads=1, d=24, dv=32, dtype="float64", seed=nq)
    right(sm80.backend(nq == 9), p, {"causal": True})


@pytest.mark.parametrize("rule", list(rules(4, 4, 4)))
def test_rules(sm80, rule):
    """Every rule, two batches, two groups of two heads; the queries travel or the keys."""
    p = problem(37, 37, batch=2, heads=4, kv_heads=2, d=24, dv=16, dtype="float32")
    right(sm80.backend(rule in ("everything", "window")), p, rules(37, 37, 4)[rule], cuts=(20,))


@pytest.mark.parametrize("rule", ["softcap", "everything"])
def test_rules_of_float64(sm80, rule):
    p = problem(19, 19, batch=1, heads=2, kv_heads=1, d=8, dv=16, dtype="float64")
    right(sm80.backend(), p, rules(19, 19, 2)[rule])


def test_rows_that_see_nothing(sm80):
    """More queries than keys: the first rows have out 0, lse -inf and no gradient."""
    p = problem(70, 9, batch=1, heads=1, kv_heads=1, d=32, dv=32, dtype="float32")
    got = right(sm80.backend(), p, {"causal": True}, cuts=(4,))
    assert (got["lse"][..., :61] == -np.inf).all() and not got["out"][:, :61].any() and not got["dq"][:, :61].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_error_does_not_grow_over_eight_hops(sm80, dtype):
    n = 96 if dtype == "float32" else 40
    p = problem(17, n, batch=1, heads=1, kv_heads=1, d=32, dv=32, dtype=dtype)
    cuts = tuple(range(n // 8, n, n // 8))
    right(sm80.backend(), p, {}, cuts=cuts, travels="q" if dtype == "float64" else "kv")


@pytest.mark.parametrize("splits", [1, 2])
def test_last_block_writes_the_result(sm80, splits):
    """The last hop leaves the result in an array of its own, and the state as it was."""
    p = problem(5, 130, batch=1, heads=1, kv_heads=1, d=32, dv=32, dtype="float32")
    backend = sm80.backend(splits=splits)
    bench = cuda_kit.Bench(backend, p.q, p.k, p.v, cuts=(66,))
    q, state = bench.put(p.q), bench.filled((1, 5, 1, 32), np.float32)
    lse, final = bench.filled((1, 1, 5), np.float32), bench.filled((1, 5, 1, 32), np.float32)
    kept = None
    for i, (rows, work) in enumerate(bench.works(False)):
        keys, values = (bench.put(np.ascontiguousarray(x[:, rows])) for x in (p.k, p.v))
        bench.wait(backend.attend(q, keys, values, state, lse, work, first=i == 0, final=final if i else None))
        kept = bench.get(state) if i == 0 else kept
    check({"out": bench.get(final), "lse": bench.get(lse)}, truth(p, {}))
    assert bench.get(state).tobytes() == kept.tobytes()


@pytest.mark.parametrize("dtype", TYPES)
def test_splits_are_exact_and_repeat(sm80, dtype):
    """Parts of the keys that are joined give what one part gives, in the first hop and in later ones."""
    n = 200 if dtype == "float32" else 100
    p = problem(11, n, batch=1, heads=2, kv_heads=1, d=32, dv=32, dtype=dtype)
    for cuts in ((), (n - 37,)):
        expected = truth(p, {"causal": True})
        parts = None if cuts else 3  # None: as many as fill the device
        got = [cuda_kit.forward(sm80.backend(splits=parts), p.q, p.k, p.v, causal=True, cuts=cuts) for _ in range(2)]
        check({"out": got[0][0], "lse": got[0][1]}, expected)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(*got))


@pytest.mark.parametrize("dtype", TYPES)
def test_fused_qkv_changes_no_bit(sm80, dtype):
    """q, k and v as views of one array (batch, rows, 3, heads, d)."""
    rng = np.random.default_rng(2)
    fused = rng.standard_normal((2, 21, 3, 2, 24)).astype(dtype)
    dout = rng.standard_normal((2, 21, 2, 24)).astype(dtype)
    views = fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]
    plain = [np.ascontiguousarray(x) for x in views]
    results = []
    for q, k, v in (views, plain):
        out, lse = cuda_kit.forward(sm80.backend(True), q, k, v, in_place=True, causal=True)
        grads = cuda_kit.backward(sm80.backend(True), dout, q, k, v, out, lse, in_place=True, causal=True)
        results.append((out, lse, *grads))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*results))


DIMS = [(64, 64), (128, 128), (40, 72)]
MORE_DIMS = [(8, 8), (96, 96), (192, 128), (192, 192), (136, 200), (256, 256), (32, 256), (256, 32)]


@pytest.mark.parametrize("d, dv", DIMS, ids=str)
def test_head_dims(sm80, d, dv):
    p = problem(9, 35, batch=1, heads=1, kv_heads=1, d=d, dv=dv, dtype="float32")
    right(sm80.backend(d == 40), p, {"causal": True})


@pytest.mark.slow
@pytest.mark.parametrize("d, dv", DIMS + MORE_DIMS, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_all_head_dims(device, dtype, d, dv):
    p = problem(9, 35 if dtype == "float32" else 19, batch=1, heads=1, kv_heads=1, d=d, dv=dv, dtype=dtype)
    for deterministic in (False, True):
        right(device.backend(deterministic), p, {"causal": True})


@pytest.mark.parametrize("gain", [8, 40, 200])
def test_large_logits(sm80, gain):
    """The error of out and of each gradient is at most 1.2 × that of a naive float32 run, however large the scores."""
    rng = np.random.default_rng(gain)
    q, k, v, dout = host_kit.arrays(rng, 1, 48, 80, 2, 2, 64, 64, "float32", gain)
    true, near = host_kit.exact(dout, q, k, v), host_kit.naive(dout, q, k, v)
    out, lse = cuda_kit.forward(sm80.backend(), q, k, v, cuts=(50,))
    got = (out, lse, *cuda_kit.backward(sm80.backend(), dout, q, k, v, out, lse, cuts=(50,)))
    for name, mine, want, naive in zip(("out", "lse", "dq", "dk", "dv"), got, true, near):
        error, allowed = host_kit.error(name, mine, want), host_kit.error(f"naive {name}", naive, want)
        assert error <= 1.2 * allowed, f"{name}: error {error:.3g}, naive {allowed:.3g}"


@pytest.mark.parametrize("dtype, gain", [("float32", 40), ("float32", 200), ("float64", 40)])
def test_large_logits_beside_torch(sm80, dtype, gain):
    """Two hops have at most 1.2 x the error of PyTorch's attention on the CPU in the same type, against extended precision.

    Six heads: of scores as large as these, few rows have an error to speak of.
    """
    torch = pytest.importorskip("torch")
    p = problem(48, 96, batch=1, heads=6, kv_heads=6, d=64, dv=64, dtype=dtype, seed=gain, spread=gain)
    true = naive(p, {}, np.longdouble)
    inputs = [torch.from_numpy(x).transpose(1, 2).requires_grad_() for x in (p.q, p.k, p.v)]
    result = torch.nn.functional.scaled_dot_product_attention(*inputs)
    grads = torch.autograd.grad(result, inputs, torch.from_numpy(p.dout).transpose(1, 2))
    theirs = dict(zip(("out", "dq", "dk", "dv"), (x.detach().transpose(1, 2).numpy() for x in (result, *grads))))
    ours = run(sm80.backend(), p, cuts=(48,))
    for name, want in zip(("out", "lse", "dq", "dk", "dv"), true):
        if name != "lse":
            error, allowed = (host_kit.error(name, x[name], want) for x in (ours, theirs))
            assert error <= 1.2 * allowed, f"{name}: error {error:.3g}, PyTorch's {allowed:.3g}"


def test_order_of_blocks_changes_no_bit():
    """dK, dV and deterministic dQ do not depend on the order in which blocks run; out and lse neither."""
    p = problem(70, 70, batch=1, heads=2, kv_heads=1, d=8, dv=8, dtype="float32")
    results = {}
    for order in ("forward", "reverse"):
        switches = {} if order == "forward" else {"order": order}
        for deterministic in (True, False):
            got = run(cuda_kit.backend("80", deterministic=deterministic, splits=1, **switches), p, causal=True)
            results[order, deterministic] = got
    first = results["forward", True]
    for (_, deterministic), got in results.items():
        for name in first:
            if deterministic or name != "dq":
                assert got[name].tobytes() == first[name].tobytes(), name


# ---------------------------------------------------------------- counters


COUNTED = [("80", "float32"), ("90", "float32"), ("80", "float64"), ("86", "float64")]


@pytest.mark.parametrize("arch, dtype", COUNTED)
def test_no_bank_conflict_and_whole_sectors(arch, dtype):
    """Full tiles: no shared access conflicts, and every global access moves full 32-byte sectors."""
    device = Device(arch, count=True)
    tile = tiles.wide_backward(arch, dtype, 32, 32).tile
    n = 2 * max(tile.keys, tile.queries)
    p = problem(n, n, batch=1, heads=1, kv_heads=1, d=32, dv=32, dtype=dtype)
    for deterministic in (False, True):
        run(device.backend(deterministic), p)
    seen = set()
    for counters in device.backend()._cupy.simulation().machine.history:
        name = counters.program.name
        if name.startswith(("forward", "backward", "delta")):
            seen.add(name)
            assert counters.bank_conflicts == 0, counters.table()
            assert counters.sector_efficiency == 1.0, counters.table()
    assert {"forward", "backward", "backward_fold", "backward_queries", "delta"} <= seen


# ---------------------------------------------------------------- the compiler


def compiled_clean(arch, dtype, d, dv, **defines):
    import sass

    if sass.nvdisasm() is None:
        pytest.skip("nvdisasm is missing (wheel nvidia-cuda-nvdisasm)")
    for entry, name, more in (
        (tiles.wide_forward, "forward", {}),
        (tiles.wide_backward, "backward", {"WITH_DQ": 1}),
        (tiles.wide_backward, "backward", {"WITH_DQ": 0}),
        (tiles.wide_backward_queries, "backward_queries", {}),
    ):
        cubin = sass.compiled(entry(arch, dtype, d, dv), arch, **more, **defines)
        listing = cubin.kernel(name)
        told = f"sm_{arch} {dtype} {d}/{dv} {name} {more} {defines}"
        assert listing.stack == 0 and listing.spills == 0 and listing.count("LDL", "STL") == 0, told
        assert "warning" not in cubin.log.lower(), cubin.log
        assert cubin.seconds < 10, told
        if dtype == "float64":
            assert (listing.count("DMMA") > 0) == (arch in tiles.WIDE_DMMA), told


@pytest.mark.parametrize("dtype", TYPES)
def test_no_spills(dtype):
    compiled_clean("80", dtype, 64, 64)
    compiled_clean("80", dtype, 128, 128)


@pytest.mark.slow
@pytest.mark.parametrize("arch", tiles.ARCHITECTURES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bends", [{}, {"BURST_SOFTCAP": 1}, {"BURST_ALIBI": 1}], ids=lambda b: "".join(b) or "plain")
def test_no_spills_anywhere(arch, dtype, bends):
    for d, dv in [(d, d) for d in tiles.HEAD_DIMS] + [(192, 128)]:
        compiled_clean(arch, dtype, d, dv, **bends)


def fits(kernel):
    """Whether every product of a kernel can be cut among its warps and lanes, as the static_asserts of wide.cuh want it."""
    told, tile = kernel.defines, kernel.tile
    dmma, q, k, warps = told["DMMA"], tile.queries, tile.keys, tile.warps
    if "KEY_WARPS" in told:
        along_k, along_q = told["KEY_WARPS"], told["QUERY_WARPS"]
        cuts = [(q, k, told["SCORE_WARPS"], told["WARPS_K"])]
        cuts += [(k, told[x], along_k, warps // along_k) for x in ("HEAD_DIM", "HEAD_DIM_V")]
        cuts += [(q, told["HEAD_DIM"], along_q, warps // along_q)]
        depths = (q, k)
    else:
        cuts = [(q, n, warps, 1) for n in (k, told["HEAD_DIM"], told["HEAD_DIM_V"])]
        depths = (k,)
    rows = 8 if dmma else 4
    whole = all(m % (wm * rows) == 0 and n % (wn * 8) == 0 and wm * wn <= warps for m, n, wm, wn in cuts)
    return whole and all(depth % (16 if dmma else 4) == 0 for depth in depths)


def test_every_shape_has_a_tile():
    for arch in tiles.ARCHITECTURES:
        for dtype in TYPES:
            for d in tiles.HEAD_DIMS:
                for dv in tiles.HEAD_DIMS:
                    for entry in (tiles.wide_forward, tiles.wide_backward, tiles.wide_backward_queries):
                        kernel = entry(arch, dtype, d, dv)
                        assert kernel.tile.shared <= tiles.SHARED_LIMIT[arch]
                        assert fits(kernel), (arch, dtype, d, dv, kernel)
    with pytest.raises(ValueError, match="got 20"):
        tiles.wide_forward("80", "float32", 20, 32)


# ---------------------------------------------------------------- faults

BARRIER, WAIT = "__syncthreads(); /* ", "copies_wait<0>();\n        __syncthreads(); /* "
FORWARD, BACKWARD = "wide_forward.cu", "wide_backward.cu"


def less(mark):
    """One stage less is waited for before the barrier with this comment."""
    return WAIT + mark, WAIT.replace("<0>", "<1>") + mark


FAULTS = {
    # name: (file, text, what it becomes, deterministic)
    "no barrier before S": (FORWARD, BARRIER + "K is there", "/* K is there", False),
    "no barrier before O": (FORWARD, BARRIER + "V and P", "__syncwarp(); /* V and P", False),
    "K is not waited for": (FORWARD, *less("K"), False),
    "V is not waited for": (FORWARD, *less("V"), False),
    "mask off by one": ("scores.h", "lo <= pos && pos < hi", "lo <= pos && pos <= hi", False),
    "mask off by one on the left": ("scores.h", "lo <= pos && pos < hi", "lo < pos && pos < hi", False),
    "O is not rescaled": (FORWARD, "fma(o[i][j], shrink[i], pv[i][j])", "o[i][j] + pv[i][j]", False),
    "l is not rescaled": (FORWARD, "fma(l[i], shrink[i], sum)", "l[i] + sum", False),
    "a tile of keys too few": (FORWARD, "bool more = next(", "walk.end--; bool more = next(", False),
    "ragged keys are seen": ("wide.cuh", "block.pos[key] : -1;", "block.pos[key] : 139;", False),
    "no barrier before dV": (BACKWARD, BARRIER + "P and dS are there", "/* P and dS are there", False),
    "no barrier before the stage": (BACKWARD, BARRIER + "this stage is there; P", "/* this stage is there; P", False),
    "the stage is not waited for": (BACKWARD, *less("this stage is there; P"), False),
    "dS without delta": (BACKWARD, "(dp[i][j] - delta)", "dp[i][j]", False),
    "dS from lane to lane": (BACKWARD, "ds_smem, ds);\n        __syncwarp();", "ds_smem, ds);", True),
    "K and V are not waited for": (BACKWARD, *less("this stage is there; the"), True),
    "no barrier before K and V": (BACKWARD, BARRIER + "this stage is there; the", "/* this stage is there; the", True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault, tmp_path, monkeypatch):
    """A kernel with a fault sown into it does not pass: the machine reports it, or the numbers do."""
    name, before, after, deterministic = FAULTS[fault]
    folder = tmp_path / "raw_kernels"
    shutil.copytree(modules.folder(), folder, ignore=shutil.ignore_patterns("host"))
    source = (folder / name).read_text()
    assert source.count(before) == 1, f"{fault}: the text is there {source.count(before)} times"
    (folder / name).write_text(source.replace(before, after))
    monkeypatch.setattr(modules, "folder", lambda: folder)
    with pytest.raises(Exception) as caught:  # a Fault or a comparison
        case_of_faults(name == BACKWARD, deterministic)
    assert caught.type.__name__ in ("Fault", "AssertionError", "CUDADriverError"), caught.value


@pytest.mark.parametrize("backward, deterministic", [(False, False), (True, False), (True, True)])
def test_the_case_of_faults_is_right_without_one(backward, deterministic):
    case_of_faults(backward, deterministic)


def case_of_faults(backward, deterministic):
    """Three tiles of keys and ragged ends; some rows see nothing of the first tile."""
    p = problem(70, 140, batch=1, heads=1, kv_heads=1, d=8, dv=8, dtype="float32", spread=3.0)
    options = {"window": (30, 60)}
    backend = cuda_kit.backend("80", deterministic=deterministic, splits=1)
    expected = truth(p, options)
    if backward:
        out, lse = (expected.values[x].astype(np.float32) for x in ("out", "lse"))
        got = dict(zip(("dq", "dk", "dv"), cuda_kit.backward(backend, p.dout, p.q, p.k, p.v, out, lse, **options)))
    else:
        got = dict(zip(("out", "lse"), cuda_kit.forward(backend, p.q, p.k, p.v, **options)))
    check(got, expected)
