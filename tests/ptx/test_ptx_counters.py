"""Counters against numbers worked out by hand."""

import numpy as np
import pytest
from ptxsupport import launch

F32 = np.zeros(4096, np.float32)


def count(body, args=None, grid=(1,), block=(32,), shared=0, params="float* x, float* y, int n", **options):
    """Run a kernel with counters and return them."""
    text = 'extern "C" __global__ void k(%s) { const int t = threadIdx.x; %s }' % (params, body)
    _, sim = launch(text, "k", grid, block, args or [F32, F32, 1], shared=shared, count=True, **options)
    return sim.machine.counters


def access(counters, opcode):
    found = [a for a in counters.accesses() if a["opcode"].startswith(opcode)]
    assert len(found) == 1, found
    return found[0]


# --- sectors --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "index,sectors,ideal",
    [
        ("t", 4, 4),
        ("t + 1", 5, 4),
        ("t * 2", 8, 4),
        ("t * 8", 32, 4),
        ("t * 32", 32, 4),
        ("0", 1, 1),
        ("31 - t", 4, 4),
        ("t % 8", 1, 1),
    ],
)
def test_sectors_of_a_load(index, sectors, ideal):
    c = count("y[t] = x[%s];" % index)
    a = access(c, "ld.global")
    assert (a["sectors"], a["ideal_sectors"], a["global_requests"]) == (sectors, ideal, 1)
    assert a["bytes_read"] == 128 and access(c, "st.global")["bytes_written"] == 128 and c.bytes == (128, 128)


def test_sectors_of_vectors_and_several_warps():
    c = count("((float4*)y)[t] = ((float4*)x)[t];", block=(96,), grid=(2,), check=False)
    a = access(c, "ld.global")
    assert (
        a["global_requests"] == 6
        and a["sectors"] == a["ideal_sectors"] == 6 * 16
        and a["bytes_read"] == 192 * 16
    )
    assert c.sector_efficiency == 1.0
    c = count("if (t < 5) y[t] = x[t];")
    assert access(c, "ld.global")["sectors"] == 1 and access(c, "ld.global")["bytes_read"] == 20


# --- bank conflicts -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "index,ways",
    [
        ("t", 1),
        ("t * 2", 2),
        ("t * 4", 4),
        ("t * 32", 32),
        ("t * 33", 1),
        ("0", 1),
        ("t / 2", 1),
        ("t * 31", 1),
        ("(t % 4) * 32", 4),
    ],
)
def test_conflicts_of_words(index, ways):
    c = count(
        "extern __shared__ float s[]; for (int i = t; i < 1056; i += 32) s[i] = x[i]; __syncthreads(); y[t] = s[%s];"
        % index,
        shared=4224,
    )
    a = access(c, "ld.shared")
    assert (a["wavefronts"], a["conflicts"]) == (ways, ways - 1)


@pytest.mark.parametrize(
    "kind,index,wavefronts,conflicts",
    [
        ("float2", "t", 2, 0),
        ("float2", "t * 2", 4, 2),
        ("float4", "t", 4, 0),
        ("float4", "t * 2", 8, 4),
        ("float4", "(t % 8) * 8 + t / 8", 32, 28),
        ("float4", "(t % 8) * 8 + (t / 8 ^ t % 8)", 4, 0),
    ],
)
def test_conflicts_of_wide_accesses_go_by_half_and_quarter_warps(kind, index, wavefronts, conflicts):
    c = count(
        "extern __shared__ __align__(16) float s[]; for (int i = t; i < 1024; i += 32) s[i] = x[i]; __syncthreads(); %s v = ((%s*)s)[%s]; y[t] = v.x + v.y;"
        % (kind, kind, index),
        shared=4096,
    )
    a = [a for a in c.accesses() if a["opcode"].startswith("ld.shared")][-1]
    assert (a["wavefronts"], a["conflicts"]) == (wavefronts, conflicts)


@pytest.mark.parametrize("swizzle,conflicts", [("", 28), (" ^ t % 8", 0)])
def test_conflicts_of_ldmatrix_phases(swizzle, conflicts):
    """Eight rows of 128 bytes: without a swizzle all of a phase hit the same four banks."""
    body = (
        """extern __shared__ __align__(16) char s[]; for (int i = t; i < 256; i += 32) ((float4*)s)[i] = ((float4*)x)[i]; __syncthreads();
      unsigned a, b, c, d, at = (unsigned)__cvta_generic_to_shared(s) + (t %% 8) * 128 + ((t / 8 %s) << 4);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%%0,%%1,%%2,%%3}, [%%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at)); y[t] = a + b + c + d;"""
        % swizzle
    )
    a = access(count(body, shared=4096), "ldmatrix")
    assert (a["shared_requests"], a["wavefronts"], a["conflicts"]) == (1, 4 + conflicts, conflicts)


# --- instructions ---------------------------------------------------------------------------------
def test_mix_and_loops():
    body = 'float s = 0; _Pragma("unroll 1") for (int i = 0; i < n; i++) { s = fmaf(s, 1.5f, x[i]); } y[t] = s;'
    c = count(body, [F32, F32, 10], block=(64,))
    loops = c.loops()
    assert (
        len(loops) == 1
        and loops[0]["trips"] == 20
        and loops[0]["mix"]["float"] == 20
        and loops[0]["mix"]["global"] == 20
    )
    assert loops[0]["instructions"] == sum(loops[0]["mix"].values()) and c.opcodes()["fma.rn.ftz.f32"] == 20
    assert c.instructions == sum(c.mix().values()) == sum(c.opcodes().values())
    assert loops[0]["source"][0] == "kernel.cu"


def test_divergent_lanes_count_once_per_warp():
    c = count(
        "if (t % 2) { if (t % 4 == 1) atomicAdd(&y[t], 1.f); else atomicMax((int*)y + t, 3); }", block=(64,)
    )
    assert (
        sorted(n for op, n in c.opcodes().items() if op.startswith(("red", "atom"))) == [2, 2]
        and c.atomics == 32
    )


def test_atomics():
    c = count("atomicAdd(&x[t & 3], 1.f);", block=(64,), grid=(3,))
    assert c.atomics == 192 and c.mix()["atomic"] == 6
    assert count("y[t] = 1;").atomics == 0


def test_tensor_share_and_table():
    from test_ptx_attention import run

    error, sim = run(128, 64, 1, count=True)
    c = sim.machine.counters
    main = max(c.loops(), key=lambda loop: loop["mix"].get("tensor", 0))
    assert (
        main["mix"]["tensor"] == 4 * 256
        and main["bank_conflicts"] == 0
        and main["sectors"] == main["ideal_sectors"]
    )
    assert 0.1 < main["tensor_share"] < 0.3 and c.tensor_share <= main["tensor_share"]
    assert c.bank_conflicts == 0 and c.sector_efficiency == 1.0
    assert c.bytes == (2 * 128 * (128 + 64 + 64), 4 * 128 * 129)  # Q, K, V once in bf16; out and lse in float32
    text = c.table()
    for word in ("tensor share", "bank conflicts 0", "ldmatrix", "cp.async", "loop PTX", "bytes read"):
        assert word in text
