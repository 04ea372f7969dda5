"""Each kind of fault in its smallest kernel, with the place that the report names."""

import re

import numpy as np
import pytest
from ptxmachine import cupy
from ptxmachine.faults import Fault
from ptxsupport import launch

F32 = np.zeros(256, np.float32)


def report(body, args, block=(64,), grid=(1,), params="float* x, float* y, int n", shared=0, **switches):
    """Run a kernel with `body` and return the Fault; the last line of the body is the guilty one."""
    text = 'extern "C" __global__ void k(%s) {\n%s\n}' % (params, body)
    with pytest.raises(Fault) as caught:
        launch(text, "k", grid, block, args, shared=shared, **switches)
    fault = caught.value
    assert fault.kernel == "k" and fault.line > 0 and fault.source[0] == "kernel.cu"
    return fault


def quiet(body, args, block=(64,), grid=(1,), params="float* x, float* y, int n", shared=0, **switches):
    return launch(
        'extern "C" __global__ void k(%s) {\n%s\n}' % (params, body),
        "k",
        grid,
        block,
        args,
        shared=shared,
        **switches,
    )[0]


# --- bounds ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body,detail",
    [
        ("y[threadIdx.x] = x[threadIdx.x + 193];", "0 bytes past the end"),
        ("y[threadIdx.x] = x[(int)threadIdx.x - 1];", "4 bytes before"),
        ("x[threadIdx.x * 5] = 1;", "past the end"),
        ("atomicAdd(&x[threadIdx.x * 9], 1.f);", "past the end"),
        ("x[0] = *(float*)(size_t)threadIdx.x;", "no allocation|misaligned|before"),
        ("*(float*)(size_t)n = 1;", "before|no allocation"),
    ],
)
def test_global_out_of_bounds(body, detail):
    fault = report(body, [F32, F32, 0])
    assert fault.kind in ("out of bounds", "misaligned access") and re.search(detail, str(fault)), fault
    assert fault.source[1] == 2 and fault.block == (0, 0, 0)


def test_the_lane_is_named():
    fault = report("if (threadIdx.x == 45 && blockIdx.y == 2) x[n] = 1;", [F32, F32, 256], grid=(2, 3))
    assert fault.block == (0, 2, 0) and (fault.warp, fault.lane) == (1, 13) and fault.thread == (45, 0, 0)


@pytest.mark.parametrize(
    "body",
    [
        "y[0] = *(float*)((char*)x + 2);",
        "*(float4*)(x + 1) = make_float4(1, 2, 3, 4);",
        "y[0] = (float)*(double*)(x + 1);",
    ],
)
def test_global_misaligned(body):
    assert report(body, [F32, F32, 0]).kind == "misaligned access"


def test_shared_out_of_bounds_and_misaligned():
    assert (
        report("__shared__ float s[64]; s[threadIdx.x + n] = 1; x[0] = s[0];", [F32, F32, 1]).kind
        == "out of bounds"
    )
    # two variables: the end of the first is guarded although the second follows
    fault = report(
        "__shared__ float s[60]; __shared__ float t[64]; t[threadIdx.x] = 1;\ns[threadIdx.x] = 2;\n__syncthreads(); x[threadIdx.x] = s[0] + t[threadIdx.x];",
        [F32, F32, 1],
    )
    assert fault.kind == "out of bounds" and fault.source[1] == 3 and (fault.warp, fault.lane) == (1, 28)
    assert (
        report("extern __shared__ float s[]; s[threadIdx.x] = 1; x[0] = s[0];", [F32, F32, 0], shared=252).kind
        == "out of bounds"
    )
    quiet(
        "extern __shared__ float s[]; s[threadIdx.x] = 1; x[threadIdx.x] = s[threadIdx.x];",
        [F32, F32, 0],
        shared=256,
    )
    fault = report(
        "extern __shared__ __align__(16) float s[]; *(float2*)(s + 1 + 2 * threadIdx.x) = make_float2(1, 2); x[0] = s[0];",
        [F32, F32, 0],
        shared=4096,
    )
    assert fault.kind == "misaligned access"


def test_local_out_of_bounds():
    body = "float a[8]; for (int i = 0; i < 8; i++) a[i] = x[i];\na[(int)y[0] + threadIdx.x] = 1;\nx[threadIdx.x] = a[(int)y[1]] + a[(int)y[2]];"
    fault = report(body, [F32, F32, 0], block=(32,))
    assert (
        fault.kind == "out of bounds" and "local" in fault.detail and fault.lane == 8 and fault.source[1] == 3
    )


def test_freed_memory_is_out_of_bounds():
    cupy.reset(arch="80", memory=1 << 26)
    kernel = cupy.RawModule(
        code='extern "C" __global__ void k(unsigned long long at, float* y) { y[0] = *(float*)at; }'
    ).get_function("k")
    x, y = cupy.zeros(64, np.float32), cupy.zeros(1, np.float32)
    at = x.data.ptr
    cupy.cuda.Device().synchronize()
    del x
    kernel((1,), (1,), (np.uint64(at), y))
    with pytest.raises(Fault, match="out of bounds"):
        y.get()


# --- never written --------------------------------------------------------------------------------
def test_uninitialised_reads():
    fault = report(
        "__shared__ float s[64]; if (threadIdx.x != 7) s[threadIdx.x] = 1;\n__syncthreads();\nx[threadIdx.x] = s[threadIdx.x];",
        [F32, F32, 0],
    )
    assert fault.kind == "uninitialised read" and fault.lane == 7 and fault.source[1] == 4
    cupy.reset(arch="80", memory=1 << 26)
    kernel = cupy.RawModule(
        code='extern "C" __global__ void k(const float* x, float* y) {\ny[threadIdx.x] = x[threadIdx.x]; }'
    ).get_function("k")
    x, y = cupy.empty(64, np.float32), cupy.empty(64, np.float32)
    x[:60] = 1.0
    kernel((1,), (64,), (x, y))
    with pytest.raises(Fault, match="uninitialised read.*never written") as caught:
        y.get()
    assert (caught.value.warp, caught.value.lane) == (1, 28)


def test_the_host_reads_what_nobody_wrote():
    cupy.reset(arch="80", memory=1 << 26)
    x = cupy.empty(64, np.float32)
    x[:60] = 1.0
    with pytest.raises(Fault, match="16 of 256 bytes were never written"):
        x.get()
    cupy.reset(arch="80", memory=1 << 26, host_reads=False)
    assert np.isnan(cupy.empty(64, np.float32).get()).all()  # NaN cannot look right


def test_shared_memory_does_not_survive_a_block():
    body = "__shared__ float s[64]; if (blockIdx.x == 0) s[threadIdx.x] = 1;\n__syncthreads(); x[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x];"
    for lanes in (64, 8192):
        fault = report(body, [F32, F32, 0], grid=(2,), max_lanes=lanes)
        assert fault.kind == "uninitialised read" and fault.block == (1, 0, 0)


# --- races ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body,ok",
    [
        ("s[t] = 1; BAR x[t] = s[t ^ 32];", "__syncthreads();"),  # read after write
        (
            "s[t] = 1; __syncthreads(); x[t] = s[t ^ 32]; BAR s[t] = 2; x[t] += s[t];",
            "__syncthreads();",
        ),  # write after read
        ("s[t] = 1; BAR s[t ^ 32] = 2; __syncthreads(); x[t] = s[t];", "__syncthreads();"),
    ],
)  # write after write
def test_races_between_warps(body, ok):
    text = "__shared__ float s[64]; const int t = threadIdx.x; " + body
    quiet(text.replace("BAR", ok), [F32, F32, 0])
    assert report(text.replace("BAR", ""), [F32, F32, 0]).kind == "race"
    assert report(text.replace("BAR", "__syncwarp();"), [F32, F32, 0]).kind == "race"  # orders lanes, not warps


def test_same_warp_is_no_race_and_halves_of_a_word_are_two_places():
    quiet(
        "__shared__ float s[64]; const int t = threadIdx.x; s[t] = t; __syncwarp(); x[t] = s[t ^ 1];",
        [F32, F32, 0],
    )
    quiet(
        "__shared__ unsigned short s[64]; const int t = threadIdx.x; s[(t % 32) * 2 + t / 32] = t; __syncthreads(); x[t] = s[t];",
        [F32, F32, 0],
    )


@pytest.mark.parametrize(
    "body", ["s[t] = t; BAR x[t] = s[t ^ 1];", "s[t] = t; BAR s[t ^ 1] = 2; __syncthreads(); x[t] = s[t];"]
)
def test_races_between_lanes_of_a_warp(body):
    text = "__shared__ volatile float s[64]; const int t = threadIdx.x; " + body
    quiet(text.replace("BAR", "__syncwarp();"), [F32, F32, 0])
    fault = report(text.replace("BAR", ""), [F32, F32, 0])
    assert fault.kind == "race" and "__syncwarp" in fault.detail
    quiet(text.replace("BAR", ""), [F32, F32, 0], warp_races=False)
    quiet(
        "__shared__ volatile float s[64]; const int t = threadIdx.x; s[t] = t; x[t] = s[t]; s[t] = 2; x[t] += s[t];",
        [F32, F32, 0],
    )


MATRIX = """__shared__ __align__(16) unsigned s[256]; const int t = threadIdx.x; for (int i = 0; i < 4; i++) s[4 * t + i] = t; unsigned r = 5, at = (unsigned)__cvta_generic_to_shared(s + 4 * t);
%s x[t] = r;"""


def test_matrix_loads_and_stores_mix_lanes():
    load, store = (
        'asm volatile("%smatrix.sync.aligned.m8n8.x1.shared.b16 %s;" %s : "r"(at) %s);' % parts
        for parts in (("ld", "{%0}, [%1]", ': "=r"(r)', ""), ("st", "[%0], {%1}", ":", ', "r"(r)'))
    )
    quiet(MATRIX % ("__syncwarp(); " + load), [F32, F32, 0], block=(32,), arch="90")
    assert report(MATRIX % load, [F32, F32, 0], block=(32,), arch="90").kind == "race"
    quiet(
        MATRIX % ("__syncwarp();" + store + "__syncwarp(); r = s[4 * t];"),
        [F32, F32, 0],
        block=(32,),
        arch="90",
    )
    assert (
        report(MATRIX % ("__syncwarp();" + store + "r = s[4 * t];"), [F32, F32, 0], block=(32,), arch="90").kind
        == "race"
    )


def test_a_copy_is_its_own_lanes_until_a_barrier():
    body = ASYNC + 'COPY(t, t); asm volatile("cp.async.wait_all;"); BAR y[t] = s[t ^ 1];'
    quiet(body.replace("BAR", "__syncwarp();"), [F32, F32, 0])
    assert report(body.replace("BAR", ""), [F32, F32, 0]).kind == "race"
    quiet(body.replace("BAR", "").replace("t ^ 1", "t"), [F32, F32, 0])


def test_two_values_in_one_instruction():
    assert (
        report(
            "__shared__ float s[1]; s[0] = threadIdx.x; __syncthreads(); x[threadIdx.x] = s[0];",
            [F32, F32, 0],
            block=(32,),
        ).kind
        == "race"
    )
    assert report("x[0] = threadIdx.x;", [F32, F32, 0], block=(32,)).kind == "race"
    quiet("x[0] = 3;", [F32, F32, 0], block=(32,))


def test_shared_atomics():
    init = "__shared__ int s[2]; const int t = threadIdx.x; if (t < 2) s[t] = 0; __syncthreads();"
    quiet(init + "atomicAdd(&s[t & 1], 1); __syncthreads(); x[t] = s[t & 1];", [F32, F32, 0])
    assert report(init + "atomicAdd(&s[t & 1], 1); x[t] = s[t & 1];", [F32, F32, 0]).kind == "race"
    assert report(init + "atomicAdd(&s[t & 1], 1); if (t == 40) s[0] = 5;", [F32, F32, 0]).kind == "race"
    assert (
        report(
            "__shared__ int s[2]; atomicAdd(&s[threadIdx.x & 1], 1); __syncthreads(); x[threadIdx.x] = s[0];",
            [F32, F32, 0],
        ).kind
        == "uninitialised read"
    )


ASYNC = """#define COPY(i, j) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"((unsigned)__cvta_generic_to_shared(s + (i))), "l"(x + (j)))
__shared__ float s[128]; const int t = threadIdx.x;
"""


@pytest.mark.parametrize(
    "body,ok",
    [
        (
            "COPY(t, t); BAR; __syncthreads(); y[t] = s[t ^ 32];",
            'asm volatile("cp.async.wait_all;")',
        ),  # late landing: read too early
        (
            'COPY(t, t); asm volatile("cp.async.wait_all;"); BAR; y[t] = s[t ^ 32];',
            "__syncthreads()",
        ),  # waited, but only by its own thread
        (
            's[t] = 1; __syncthreads(); y[t] = s[t ^ 32]; BAR; COPY(t, t); asm volatile("cp.async.wait_all;");',
            "__syncthreads()",
        ),  # early landing: overwrites what is read
        (
            "COPY(t, t); BAR; s[t] = 1; __syncthreads(); y[t] = s[t];",
            'asm volatile("cp.async.wait_all;")',
        ),  # a write under way
        (
            'COPY(t, t); asm volatile("cp.async.commit_group;"); COPY(t + 64, t); asm volatile("cp.async.commit_group;"); BAR; __syncthreads(); y[t] = s[t + 64];',
            'asm volatile("cp.async.wait_group 0;")',
        ),
        (
            'COPY(t, t); asm volatile("cp.async.commit_group;"); COPY(t + 64, t); asm volatile("cp.async.commit_group;"); BAR; __syncthreads(); y[t] = s[t];',
            'asm volatile("cp.async.wait_group 1;")',
        ),
    ],
)
@pytest.mark.parametrize("mode", ("late", "early"))
def test_races_with_copies_in_flight(body, ok, mode):
    quiet(ASYNC + body.replace("BAR", ok), [F32, F32, 0], cp_async=mode)
    wrong = 'asm volatile("cp.async.wait_group 1;")' if "wait_group 0" in ok else ""
    assert report(ASYNC + body.replace("BAR", wrong), [F32, F32, 0], cp_async=mode).kind == "race"


# --- blocks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("lanes", (64, 8192))
def test_two_blocks_write_one_word(lanes):
    fault = report("x[blockIdx.x * 63 + threadIdx.x] = 1;", [F32, F32, 0], grid=(3,), max_lanes=lanes)
    assert fault.kind == "two blocks write"
    quiet(
        "x[blockIdx.x * 64 + threadIdx.x] = 1; x[blockIdx.x * 64 + threadIdx.x] = 2;",
        [F32, F32, 0],
        grid=(3,),
        max_lanes=lanes,
    )
    quiet("atomicAdd(&x[threadIdx.x], 1.f);", [F32, F32, 0], grid=(3,), max_lanes=lanes)
    fault = report(
        "if (blockIdx.x == 0) x[threadIdx.x] = 1; else atomicAdd(&x[threadIdx.x], 1.f);",
        [F32, F32, 0],
        grid=(3,),
        max_lanes=lanes,
    )
    assert fault.kind == "two blocks write"
    quiet(
        "((unsigned short*)x)[blockIdx.x * 65 + threadIdx.x] = 1;", [F32, F32, 0], grid=(3,), max_lanes=lanes
    )  # halves of a word


def test_two_launches_may_write_one_word():
    cupy.reset(arch="80", memory=1 << 26)
    kernel = cupy.RawModule(
        code='extern "C" __global__ void k(float* x, int s) { x[(blockIdx.x + s) % 2 * 64 + threadIdx.x] = s; }'
    ).get_function("k")
    x = cupy.zeros(128, np.float32)
    kernel((2,), (64,), (x, 0))
    kernel((2,), (64,), (x, 1))
    assert (x.get() == 1).all()


def test_checks_off_still_keep_the_machine_whole():
    """Without checks an address far off still is an error, never a crash."""
    assert (
        report("*(float*)(size_t)(threadIdx.x * 4096) = 1;", [F32, F32, 0], check=False).kind == "out of bounds"
    )
    assert (
        report(
            "__shared__ float s[64]; s[threadIdx.x + 64 * n] = 1; x[0] = s[0];", [F32, F32, 100], check=False
        ).kind
        == "out of bounds"
    )


def test_atomics_of_some_warps_are_ordered_by_their_own_barrier():
    body = """__shared__ int s; if (threadIdx.x == 0) s = 0; __syncthreads();
              if (threadIdx.x < 64) { atomicAdd(&s, 1); %s if (threadIdx.x == 0) y[0] = s; }"""
    barrier = 'asm volatile("bar.sync 1, 64;" ::: "memory");'
    out = quiet(body % barrier, [F32, F32, 0], block=(128,))
    assert out[1][0] == 64
    assert report(body % "", [F32, F32, 0], block=(128,)).kind == "race"
    # warps 2 and 3 add too, and are not in the barrier
    others = body.replace("if (threadIdx.x < 64) {", "if (threadIdx.x >= 64) atomicAdd(&s, 1); else {")
    assert report(others % barrier, [F32, F32, 0], block=(128,)).kind == "race"


def test_syncwarp_orders_the_lanes_of_its_mask():
    body = """__shared__ int s[32]; int t = threadIdx.x; s[t] = t;
              if (t < 16) { __syncwarp(0xffff); y[t] = s[%s - t]; }"""
    assert list(quiet(body % "15", [F32, F32, 0], block=(32,))[1][:16]) == list(range(15, -1, -1))
    body = """__shared__ int s[32]; int t = threadIdx.x; s[t] = t;
              if (t < 16) __syncwarp(0xffff);
              y[t] = ((volatile int*)s)[31 - t];"""
    fault = report(body, [F32, F32, 0], block=(32,))
    assert fault.kind == "race" and "__syncwarp" in str(fault)


@pytest.mark.parametrize("index", ["t", "0"])
def test_a_lane_reads_what_atomics_of_its_warp_wrote(index):
    body = """__shared__ int s[32]; int t = threadIdx.x; s[t] = 0; __syncwarp();
              atomicAdd(&s[%s], 1); %s
              y[t] = ((volatile int*)s)[%s];"""
    other = "31 - t" if index == "t" else "0"
    assert report(body % (index, "", other), [F32, F32, 0], block=(32,)).kind == "race"
    quiet(body % (index, "__syncwarp();", other), [F32, F32, 0], block=(32,))
    quiet(body % ("t", "", "t"), [F32, F32, 0], block=(32,))  # its own


@pytest.mark.parametrize("size", [8, 16])
def test_a_part_of_a_copy_is_aligned_as_the_whole(size):
    body = """__shared__ float4 s[32]; unsigned at = __cvta_generic_to_shared(&s[threadIdx.x]);
              asm volatile("cp.async.ca.shared.global [%%0], [%%1], 16, %%2;" :: "r"(at), "l"(x + %d), "r"(n));"""
    assert report(body % 1, [F32, F32, size], block=(1,)).kind == "misaligned access"
    quiet(body % 4, [F32, F32, size], block=(1,))


@pytest.mark.parametrize("first", [0, 1])
def test_who_spins_does_not_starve_whom_it_waits_for(first):
    """Whichever side's code comes first: between blocks, and between warps of one block."""
    spin = "while (atomicAdd((int*)x, 0) == 0);"
    give = "atomicExch((int*)x, 1);"
    for block, grid, who in (((32,), (2,), "blockIdx.x"), ((64,), (1,), "threadIdx.x / 32")):
        body = "if (%s == %d && threadIdx.x %% 32 == 0) { %s } else { %s }" % (who, first, give, spin)
        quiet(body, [F32, F32, 0], block=block, grid=grid, max_steps=1_000_000)
