"""Branches, divergence and reconvergence, loops, calls, barriers, launches."""

import numpy as np
import pytest
from ptxmachine.faults import Fault, LaunchError
from ptxmachine.parser import PtxError
from ptxsupport import compiled, evaluate, launch, machine, ptx, same

LANES = np.arange(64)


def test_divergent_loop():
    """Each lane loops as often as it says; all come back together."""
    code = """.reg .pred %q; .reg .b32 %i; mov.u32 %d, 0; mov.u32 %i, 0;
              TOP: setp.ge.u32 %q, %i, %a; @%q bra OUT; add.u32 %d, %d, %i; add.u32 %i, %i, 1; bra.uni TOP; OUT: bar.warp.sync -1; activemask.b32 %e;"""
    out = evaluate(code, {"a": ("u32", LANES)}, {"d": "u32", "e": "u32"})
    same(out["d"], (LANES * (LANES - 1) // 2).astype(np.uint32))
    same(out["e"], np.full(64, 0xFFFFFFFF, np.uint32))


def test_nested_divergence_and_negated_predicates():
    code = """.reg .pred %p, %q; and.b32 %d, %a, 1; setp.eq.u32 %p, %d, 0; setp.gt.u32 %q, %a, 20;
              @%p bra EVEN; @!%q bra ODDLOW; mov.u32 %d, 4; bra END; ODDLOW: mov.u32 %d, 3; bra END;
              EVEN: @%q bra EVENHIGH; mov.u32 %d, 1; bra END; EVENHIGH: mov.u32 %d, 2; END:"""
    got = evaluate(code, {"a": ("u32", LANES)}, {"d": "u32"})
    same(
        got, np.where(LANES % 2 == 0, np.where(LANES > 20, 2, 1), np.where(LANES > 20, 4, 3)).astype(np.uint32)
    )


def test_brx():
    code = """.reg .b32 %k; rem.u32 %k, %a, 3; TABLE: .branchtargets L0, L1, L2; brx.idx %k, TABLE;
              L0: mov.u32 %d, 10; bra END; L1: mov.u32 %d, 11; bra END; L2: mov.u32 %d, 12; END:"""
    same(evaluate(code, {"a": ("u32", LANES)}, {"d": "u32"}), (10 + LANES % 3).astype(np.uint32))
    with pytest.raises(Fault, match="out of its table"):
        evaluate(code.replace("rem.u32 %k, %a, 3", "rem.u32 %k, %a, 4"), {"a": ("u32", LANES)}, {"d": "u32"})


def test_early_exit_and_ret():
    text = 'extern "C" __global__ void k(int* x, int n) { int i = threadIdx.x; if (i >= n) return; x[i] += 1; if (i & 1) return; x[i] += 1; }'
    (x, _), _ = launch(text, "k", (1,), (64,), [np.zeros(64, np.int32), 50])
    same(x, np.where(LANES < 50, np.where(LANES % 2, 1, 2), 0).astype(np.int32))
    code = (
        ".reg .pred %q; mov.u32 %d, 1; setp.gt.u32 %q, %a, 100; @%q exit; @%q ret; @%q trap; add.u32 %d, %d, 1;"
    )
    same(evaluate(code, {"a": ("u32", LANES)}, {"d": "u32"}), np.full(64, 2, np.uint32))
    with pytest.raises(Fault, match="trap"):
        evaluate("mov.u32 %d, 1; trap;", {"a": ("u32", [1])}, {"d": "u32"})


def test_calls_are_inlined_with_their_own_registers():
    text = """
__device__ __noinline__ int twice(int x) { return x > 10 ? 2 * x : x + 1; }
__device__ __noinline__ float mix(int a, float b, const int* p) { return twice(a) + b * p[a & 3]; }
extern "C" __global__ void k(float* out, const int* p) { int i = threadIdx.x; out[i] = mix(i, 0.5f, p) + twice(i + 5); }
"""
    p = np.array([2, 4, 6, 8], np.int32)
    assert "call" in compiled(text)
    (out, _), _ = launch(text, "k", (1,), (64,), [np.zeros(64, np.float32), p])
    twice = lambda x: np.where(x > 10, 2 * x, x + 1)
    same(out, (twice(LANES) + 0.5 * p[LANES & 3] + twice(LANES + 5)).astype(np.float32))


def test_recursion_is_refused():
    text = '__device__ __noinline__ int f(int n) { return n < 2 ? n : f(n - 1) + f(n - 2); }\nextern "C" __global__ void k(int* x) { x[0] = f(x[1]); }'
    with pytest.raises(PtxError, match="recursive call"):
        launch(text, "k", (1,), (32,), [np.zeros(2, np.int32)])


def test_local_arrays():
    text = """extern "C" __global__ void k(int* out, const int* order) {
  int a[8]; for (int i = 0; i < 8; i++) a[order[i]] = i * threadIdx.x;
  int s = 0; for (int i = 0; i < 8; i++) s = s * 3 + a[order[7 - i]]; out[threadIdx.x] = s; }"""
    order = np.array([3, 1, 4, 0, 5, 2, 6, 7], np.int32)
    assert ".local" in compiled(text)
    (out, _), _ = launch(text, "k", (1,), (64,), [np.zeros(64, np.int32), order])
    expected = np.zeros(64, np.int32)
    for i in range(8):
        expected = expected * 3 + (7 - i) * LANES.astype(np.int32)
    same(out, expected)


def test_grid_and_block_indices_in_three_dimensions():
    text = """extern "C" __global__ void k(int* out) {
  int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z), b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[b * blockDim.x * blockDim.y * blockDim.z + t] = 1000000 * blockIdx.z + 100000 * blockIdx.y + 10000 * blockIdx.x + 100 * threadIdx.z + 10 * threadIdx.y + threadIdx.x; }"""
    (out,), _ = launch(text, "k", (3, 2, 2), (5, 3, 2), [np.zeros(12 * 30, np.int32)], order="reverse")
    z, y, x, tz, ty, tx = np.meshgrid(range(2), range(2), range(3), range(2), range(3), range(5), indexing="ij")
    same(out, (1000000 * z + 100000 * y + 10000 * x + 100 * tz + 10 * ty + tx).ravel().astype(np.int32))


@pytest.mark.parametrize("max_lanes", (64, 96, 100000))
def test_chunks_of_blocks_give_the_same(max_lanes):
    text = """extern "C" __global__ void k(int* out) { __shared__ int s[64]; s[63 - threadIdx.x] = threadIdx.x * blockIdx.x; __syncthreads(); out[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x]; }"""
    (out,), _ = launch(text, "k", (7,), (64,), [np.zeros(448, np.int32)], max_lanes=max_lanes)
    same(out.reshape(7, 64), ((63 - LANES)[None] * np.arange(7)[:, None]).astype(np.int32))


# --- barriers -------------------------------------------------------------------------------------
def test_barrier_with_reduction():
    code = "bar.red.popc.u32 %d, 0, %p; barrier.red.aligned.and.pred %q, 0, %p; bar.red.or.pred %r, 0, !%p; barrier.sync.aligned 0; barrier.cta.sync 1;"
    out = evaluate(code, {"p": ("pred", LANES < 40)}, {"d": "u32", "q": "pred", "r": "pred"})
    assert (out["d"] == 40).all() and not out["q"].any() and out["r"].all()
    text = 'extern "C" __global__ void k(int* x) { x[threadIdx.x] = __syncthreads_count(threadIdx.x % 3 == 0) + 100 * __syncthreads_or(threadIdx.x == 5); }'
    (x,), _ = launch(text, "k", (2,), (96,), [np.zeros(96, np.int32)], check=False)
    assert (x == 132).all()


def test_named_barriers_order_their_warps_only():
    """Warps 0 and 1 hand over by barrier 1, warps 2 and 3 by barrier 2: no race; the wrong partner: a race."""
    text = """extern "C" __global__ void k(int* out) { __shared__ int s[128]; const int w = threadIdx.x / 32, id = 1 + w / 2;
  s[threadIdx.x] = threadIdx.x; asm volatile("bar.sync %0, 64;" :: "r"(id)); out[threadIdx.x] = s[threadIdx.x ^ MASK]; }"""
    (out,), _ = launch(text, "k", (1,), (128,), [np.zeros(128, np.int32)], options=("-DMASK=32",))
    same(out, (np.arange(128) ^ 32).astype(np.int32))
    with pytest.raises(Fault, match="race"):
        launch(text, "k", (1,), (128,), [np.zeros(128, np.int32)], options=("-DMASK=64",))


def test_arrive_and_sync():
    """A producer warp arrives and goes on, the consumer waits: ordered one way only."""
    text = """extern "C" __global__ void k(int* out) { __shared__ int s[32]; const int w = threadIdx.x / 32, l = threadIdx.x % 32;
  if (w == 0) { s[l] = l * 3; asm volatile("bar.arrive 1, 64;"); AFTER }
  else { asm volatile("bar.sync 1, 64;"); out[l] = s[31 - l]; } }"""
    (out,), _ = launch(text, "k", (1,), (64,), [np.zeros(32, np.int32)], options=("-DAFTER=",))
    same(out, (3 * np.arange(31, -1, -1)).astype(np.int32))
    with pytest.raises(Fault, match="race"):
        launch(text, "k", (1,), (64,), [np.zeros(32, np.int32)], options=("-DAFTER=s[l]=0;",))


@pytest.mark.parametrize(
    "body,detail",
    [
        ("if (threadIdx.x < 96) __syncthreads();", r"96 of 128 threads reached it, 32 have exited"),
        ("if (threadIdx.x >= 100) return; __syncthreads();", r"100 of 128 threads reached it, 28 have exited"),
        (
            "if (threadIdx.x < 64) { __syncthreads(); x[0] = 1; } else { x[1] = 1; __syncthreads(); }",
            "different barriers",
        ),
        ('if (threadIdx.x < 64) asm volatile("bar.sync 1, 96;");', "64 of 96 threads"),
        ('asm volatile("bar.sync 1, 40;");', "not one multiple of 32"),
    ],
)
def test_barriers_that_not_all_threads_reach(body, detail):
    text = 'extern "C" __global__ void k(volatile int* x) { %s }' % body
    with pytest.raises(Fault, match=detail) as caught:
        launch(text, "k", (2,), (128,), [np.zeros(4, np.int32)], check="different" not in detail)
    assert caught.value.kind == "barrier" and caught.value.source == ("kernel.cu", 1)


def test_an_endless_loop_ends():
    with pytest.raises(Fault, match="no end in sight"):
        evaluate("TOP: bra TOP; mov.u32 %d, 0;", {"a": ("u32", [1])}, {"d": "u32"}, max_steps=10000)


def test_launches_that_cuda_refuses():
    m = machine()
    module = m.load(ptx("", "", directives=" .maxntid 64, 1, 1"))
    for grid, block, error in (
        (1, 65, LaunchError),
        (0, 32, LaunchError),
        ((1, 70000), 32, LaunchError),
        (1, (1, 1, 65), LaunchError),
    ):
        with pytest.raises(error):
            m.launch(module, "t", grid, block)
    with pytest.raises(LaunchError, match="parameter bytes"):
        m.launch(module, "t", 1, 32, b"1234")
    with pytest.raises(KeyError, match="no kernel 'u'"):
        m.launch(module, "u", 1, 32)
    module = m.load(ptx("", "", directives=" .reqntid 64"))
    m.launch(module, "t", 1, 64)
    with pytest.raises(LaunchError):
        m.launch(module, "t", 1, 32)
