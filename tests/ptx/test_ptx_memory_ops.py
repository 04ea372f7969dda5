"""ld, st, cp.async, atom, red: values, vectors, spaces, zero-fill, order."""

import struct

import numpy as np
import pytest
from ptxmachine.faults import Fault
from ptxmachine.parser import PtxError
from ptxsupport import bfloat, bits32, download, evaluate, half, machine, pair, ptx, same, upload


def run(body, *arrays, threads=32, blocks=1, shared=0, prologue="", outputs=(), **switches):
    """Run a kernel whose parameters p0, p1, ... point to `arrays`; return the arrays as they are afterwards."""
    m = machine(**switches)
    params = ", ".join(".param .u64 p%d" % i for i in range(len(arrays)))
    setup = [
        ".reg .b64 %a<9>; .reg .b32 %t, %r<20>; .reg .f32 %f<9>; .reg .b64 %d<9>, %g<9>; .reg .b16 %h<9>; .reg .pred %p<9>; mov.u32 %t, %tid.x;"
    ]
    setup += ["ld.param.u64 %%a%d, [p%d];" % (i, i) for i in range(len(arrays))]
    module = m.load(ptx("\n".join(setup) + body, params, prologue=prologue))
    at = [upload(m, a) for a in arrays]
    m.launch(module, "t", blocks, threads, struct.pack("<%dQ" % len(at), *at), shared)
    return [download(m, p, a.size, a.dtype) for p, a in zip(at, arrays)], m


def test_load_extends_by_type():
    body = """mul.wide.u32 %d0, %t, 1; add.u64 %d1, %a0, %d0; mul.wide.u32 %d2, %t, 4; add.u64 %d3, %a1, %d2; add.u64 %d4, %a2, %d2;
              ld.global.s8 %r1, [%d1]; st.global.u32 [%d3], %r1; ld.global.u8 %r2, [%d1]; st.global.u32 [%d4], %r2;"""
    x = np.arange(32, dtype=np.int8) - 16
    (_, s, u), _ = run(body, x, np.zeros(32, np.int32), np.zeros(32, np.uint32))
    same(s, x.astype(np.int32))
    same(u, x.view(np.uint8).astype(np.uint32))
    body = "mul.wide.u32 %d0, %t, 2; add.u64 %d1, %a0, %d0; mul.wide.u32 %d2, %t, 8; add.u64 %d3, %a1, %d2; ld.global.s16 %d4, [%d1]; st.global.u64 [%d3], %d4;"
    (_, wide), _ = run(body, np.arange(-16, 16, dtype=np.int16), np.zeros(32, np.int64))
    same(wide, np.arange(-16, 16))


def test_vectors_and_offsets():
    body = """mul.wide.u32 %d0, %t, 16; add.u64 %d1, %a0, %d0; add.u64 %d2, %a1, %d0;
              ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1]; st.global.v2.b32 [%d2+8], {%r1, %r2}; st.global.v2.u32 [%d2], {%r3, %r4};"""
    x = np.arange(128, dtype=np.uint32)
    (_, y), _ = run(body, x, np.zeros(128, np.uint32))
    same(y.reshape(32, 4), x.reshape(32, 4)[:, [2, 3, 0, 1]])
    body = "mul.wide.u32 %d0, %t, 16; add.u64 %d1, %a0, %d0; add.u64 %d2, %a1, %d0; ld.global.nc.L1::no_allocate.v2.f64 {%d3, %d4}, [%d1]; st.global.cs.v2.f64 [%d2+0], {%d4, %d3};".replace(
        "%d3", "%g3"
    ).replace(
        "%d4", "%g4"
    )
    (_, y), _ = run(body, np.arange(64.0), np.zeros(64))
    same(y.reshape(32, 2), np.arange(64.0).reshape(32, 2)[:, ::-1])
    body = "mul.wide.u32 %d0, %t, 32; add.u64 %d1, %a0, %d0; add.u64 %d2, %a1, %d0; ld.global.v8.b32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%d1]; st.global.v8.b32 [%d2], {%r8,%r7,%r6,%r5,%r4,%r3,%r2,%r1};"
    (_, y), _ = run(body, np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32))
    same(y.reshape(32, 8), np.arange(256, dtype=np.uint32).reshape(32, 8)[:, ::-1])


def test_shared_local_const_param():
    body = """.shared .align 4 .b8 s[128]; .local .align 4 .b8 l[8];
              mov.u32 %r1, s; shl.b32 %r2, %t, 2; add.s32 %r3, %r1, %r2; st.shared.u32 [%r3], %t;
              st.local.u32 [l+4], %t; bar.sync 0; xor.b32 %r4, %r2, 124; add.s32 %r4, %r4, %r1; ld.shared.u32 %r5, [%r4]; ld.local.u32 %r6, [l+4];
              mul.lo.s32 %r5, %r5, 100; add.s32 %r5, %r5, %r6; ld.const.u32 %r7, [table+4]; add.s32 %r5, %r5, %r7;
              mul.wide.u32 %d0, %t, 4; add.u64 %d1, %a0, %d0; st.global.u32 [%d1], %r5;"""
    (y,), _ = run(body, np.zeros(32, np.uint32), prologue=".const .align 4 .u32 table[2] = {5, 70000};")
    t = np.arange(32)
    same(y, (31 - t) * 100 + t + 70000)


def test_parameters_by_register_and_vector():
    text = ptx(
        """.reg .b64 %d<5>; .reg .b32 %r<5>; mov.b64 %d0, p0; ld.param.v2.u32 {%r0, %r1}, [%d0+8]; ld.param.u64 %d1, [p0]; add.s32 %r2, %r0, %r1;
                  ldu.global.u32 %r3, [%d1]; add.s32 %r2, %r2, %r3; st.global.u32 [%d1], %r2;""",
        ".param .align 8 .b8 p0[16]",
    )
    m = machine()
    at = upload(m, np.array([1], np.uint32))
    m.launch(m.load(text), "t", 1, 1, struct.pack("<QII", at, 30, 4))
    same(download(m, at, 1, np.uint32), [35])


@pytest.mark.parametrize("mode", ("late", "early"))
def test_cp_async_copies_and_zero_fills(mode):
    """16, 8 and 4 bytes; src-size cuts and fills with zeros; a size of 0 reads nothing, not even from a wild address."""
    body = """.shared .align 16 .b8 s[1024]; mov.u32 %r1, s; shl.b32 %r2, %t, 4; add.s32 %r3, %r1, %r2; mul.wide.u32 %d0, %t, 16; add.u64 %d1, %a0, %d0;
              and.b32 %r4, %t, 15; setp.eq.u32 %p0, %r4, 0; selp.b64 %d2, 64, %d1, %p0;
              cp.async.cg.shared.global [%r3], [%d2], 16, %r4; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
              ld.shared.v4.u32 {%r5,%r6,%r7,%r8}, [%r3]; add.u64 %d3, %a1, %d0; st.global.v4.u32 [%d3], {%r5,%r6,%r7,%r8};"""
    x = np.arange(1, 513, dtype=np.uint16).view(np.uint8)[:512].copy()
    (_, y), _ = run(body, x, np.zeros(512, np.uint8), cp_async=mode)
    expected = x.reshape(32, 16).copy()
    for lane in range(32):
        expected[lane, lane % 16 :] = 0
    same(y.reshape(32, 16), expected)
    body = """.shared .align 16 .b8 s[1024]; mov.u32 %r1, s; shl.b32 %r2, %t, 3; add.s32 %r3, %r1, %r2; mul.wide.u32 %d0, %t, 8; add.u64 %d1, %a0, %d0; setp.lt.u32 %p0, %t, 16;
              cp.async.ca.shared.global [%r3], [%d1], 4; cp.async.ca.shared.global.L2::128B [%r3+4], [%d1+4], 4, %p0; cp.async.wait_all; ld.shared.v2.u32 {%r5,%r6}, [%r3];
              add.u64 %d3, %a1, %d0; st.global.v2.u32 [%d3], {%r5,%r6};"""
    (_, y), _ = run(body, np.arange(1, 65, dtype=np.uint32), np.zeros(64, np.uint32), cp_async=mode)
    expected = np.arange(1, 65, dtype=np.uint32).reshape(32, 2)
    expected[:16, 1] = 0  # the predicate ignores the source
    same(y.reshape(32, 2), expected)


def test_cp_async_groups_land_in_order():
    """wait_group N leaves the last N groups in flight: what they bring is not there yet."""
    body = """.shared .align 16 .b8 s[64]; mov.u32 %r1, s;
              cp.async.ca.shared.global [%r1], [%a0], 4; cp.async.commit_group; cp.async.ca.shared.global [%r1+4], [%a0+4], 4; cp.async.commit_group;
              cp.async.wait_group 1; ld.shared.u32 %r2, [%r1]; ld.shared.u32 %r3, [%r1+4]; st.global.v2.u32 [%a1], {%r2, %r3};"""
    (_, y), _ = run(body, np.array([7, 8], np.uint32), np.zeros(2, np.uint32), threads=1, check=False)
    same(y, [7, 0xFFFFFFFF])
    (_, y), _ = run(
        body, np.array([7, 8], np.uint32), np.zeros(2, np.uint32), threads=1, check=False, cp_async="early"
    )
    same(y, [7, 8])
    with pytest.raises(Fault, match="cp.async"):
        run(body, np.array([7, 8], np.uint32), np.zeros(2, np.uint32), threads=1)


def test_cp_async_size_is_checked():
    body = ".shared .align 16 .b8 s[64]; mov.u32 %r1, s; cp.async.cg.shared.global [%r1], [%a0], 8;"
    with pytest.raises(PtxError, match="cp.async of 8 bytes"):
        run(body, np.zeros(4, np.uint32))
    with pytest.raises(PtxError, match="unknown instruction cp.async.bulk"):
        run("cp.async.bulk.commit_group;", np.zeros(4, np.uint32))


# --- atomics --------------------------------------------------------------------------------------
def atom(op, kind, start, values, extra="", dtype=np.uint32):
    """All lanes hit one word, one after the other; return (the word, what each lane got back)."""
    size = np.dtype(dtype).itemsize
    bits = "b%d" % (8 * size)
    reg = "%r1" if size == 4 else "%d5"
    back = "%r2" if size == 4 else "%d6"
    body = (
        "mul.wide.u32 %%d0, %%t, %d; add.u64 %%d1, %%a1, %%d0; add.u64 %%d2, %%a2, %%d0; ld.global.%s %s, [%%d1]; atom.global.%s.%s %s, [%%a0], %s%s; st.global.%s [%%d2], %s;"
        % (size, bits, reg, op, kind, back, reg, extra, bits, back)
    )
    values = np.array(values, dtype)
    (word, _, old), _ = run(
        body, np.array([start], dtype), values, np.zeros(len(values), dtype), threads=len(values)
    )
    return word[0], old


@pytest.mark.parametrize(
    "op,kind,start,values,word,old",
    [
        ("add", "u32", 10, [1, 2, 3], 16, [10, 11, 13]),
        ("min", "u32", 5, [7, 3, 4], 3, [5, 5, 3]),
        ("max", "u32", 5, [7, 3, 9], 9, [5, 7, 7]),
        ("and", "b32", 0xFF, [0xF0, 0x3C], 0x30, [0xFF, 0xF0]),
        ("or", "b32", 1, [2, 4], 7, [1, 3]),
        ("xor", "b32", 1, [3, 3], 1, [1, 2]),
        ("exch", "b32", 1, [5, 6], 6, [1, 5]),
        ("inc", "u32", 2, [3, 3, 3], 1, [2, 3, 0]),
        ("dec", "u32", 1, [5, 5, 5], 4, [1, 0, 5]),
    ],
)
def test_atomics_take_turns(op, kind, start, values, word, old):
    got, back = atom(op, kind, start, values)
    assert got == word
    same(back, np.array(old, np.uint32))


def test_atomic_signed_64_and_cas():
    got, back = atom("min", "s32", 5, np.array([7, -3, 4], np.int32), dtype=np.int32)
    assert got == -3
    got, back = atom("add", "u64", 2**40, [1, 2], dtype=np.uint64)
    assert got == 2**40 + 3
    got, back = atom("cas", "b32", 5, [5, 5, 9], extra=", 9")
    assert got == 9 and back.tolist() == [5, 9, 9]


def test_atomic_float_rounds_each_time_and_flushes_in_global_only():
    got, _ = atom(
        "add", "f32", 2.0**24, [1.0, 1.0, 2.0], dtype=np.float32
    )  # each 1 is a tie that rounds to even
    assert got == 2.0**24 + 2
    got, _ = atom("add", "f32", 0.0, [bits32(0x00400000)[0]], dtype=np.float32)
    assert got == 0.0
    body = ".shared .align 4 .b8 s[4]; mov.u32 %r1, s; mov.u32 %r2, 0; st.shared.u32 [%r1], %r2; mov.b32 %f1, 0x00400000; red.shared.add.f32 [%r1], %f1; ld.shared.u32 %r3, [%r1]; st.global.u32 [%a0], %r3;"
    (y,), _ = run(body, np.zeros(1, np.uint32), threads=1)
    same(y, [0x00400000])
    got, _ = atom("add", "f64", 1.0, [2.0**-53, 1.0], dtype=np.float64)
    assert got == 2.0


def test_red_vectors_and_pairs():
    body = "mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000; red.global.add.v4.f32 [%a0], {%f1, %f2, %f1, %f2}; red.global.add.v2.f32 [%a0+8], {%f1, %f1};"
    (y,), _ = run(body, np.zeros(4, np.float32), threads=3)
    same(y, [3, 6, 6, 9])
    body = "ld.global.u32 %r1, [%a1]; red.global.add.noftz.f16x2 [%a0], %r1; ld.global.u32 %r1, [%a1+4]; red.global.add.noftz.bf16x2 [%a0+4], %r1;"
    start = np.array([pair(half(1), half(2))[0], pair(bfloat(1), bfloat(2))[0]], np.uint32)
    add = np.array([pair(half(0.5), half(-2))[0], pair(bfloat(0.5), bfloat(-2))[0]], np.uint32)
    (y, _), _ = run(body, start, add, threads=2)
    same(y, [pair(half(2), half(-2))[0], pair(bfloat(2), bfloat(-2))[0]])
    body = "mov.u32 %r1, 3; red.relaxed.gpu.global.max.u32 [%a0], %r1; red.add.u32 [%a0], 1;"
    (y,), _ = run(body, np.array([2], np.uint32), threads=2)
    same(y, [5])


def test_hints_do_nothing():
    body = """prefetch.global.L2 [%a0]; membar.gl; fence.acq_rel.gpu; createpolicy.fractional.L2::evict_first.b64 %d0, 0f3F800000; discard.global.L2 [%a0], 128; nanosleep.u32 20; applypriority.global.L2::evict_normal [%a0], 128;
              ld.global.L2::cache_hint.u32 %r1, [%a0], %d0; prefetchu.L1 [%a0]; pmevent 1; griddepcontrol.wait; brkpt; st.global.u32 [%a0+4], %r1;"""
    (y,), _ = run(body, np.array([9, 0], np.uint32), threads=1)
    same(y, [9, 9])


def test_order_of_blocks_changes_the_order_of_float_atomics():
    body = ".reg .f32 %x; mov.u32 %r1, %ctaid.x; cvt.rn.f32.u32 %x, %r1; add.f32 %x, %x, 0f3E99999A; red.global.add.f32 [%a0], %x;"
    results = {
        order: run(body, np.zeros(1, np.float32), threads=1, blocks=500, order=order)[0][0][0]
        for order in ("forward", "reverse", 1, 2)
    }
    assert len(set(results.values())) > 1 and np.ptp(list(results.values())) < 1.0


def test_assert_and_printf():
    from ptxsupport import launch

    text = """extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
              extern "C" __global__ void k(int* x) { if (x[threadIdx.x] != 0) __assertfail("x == 0", "k.cu", 1, "k", 1); }"""
    launch(text, "k", (1,), (32,), [np.zeros(32, np.int32)])
    with pytest.raises(Fault, match="assert"):
        launch(text, "k", (1,), (32,), [np.arange(32, dtype=np.int32)])
    with pytest.raises(PtxError, match="call of vprintf is not supported"):
        launch(
            'extern "C" __global__ void k(int* x) { printf("%d", x[0]); }',
            "k",
            (1,),
            (32,),
            [np.zeros(32, np.int32)],
        )


def test_evaluate_runs_predicated_instructions_for_their_lanes_only():
    got = evaluate(
        "mov.u32 %d, 1; @%p mov.u32 %d, 2; @!%p add.u32 %d, %d, 10;",
        {"p": ("pred", [0, 1, 0, 1])},
        {"d": "u32"},
    )
    same(got, [11, 2, 11, 2])


def test_generic_float_atomics_follow_the_memory_that_they_hit():
    """Subnormals: global memory flushes them, shared memory keeps them, whatever the instruction says."""
    code = """.shared .align 4 .b32 word; .reg .b64 %g, %s; .reg .f32 %o, %t; .reg .pred %q;
              mov.b32 %t, 4; st.shared.f32 [word], %t; mov.u64 %s, word; cvta.shared.u64 %g, %s;
              atom.add.f32 %o, [%g], %t; ld.shared.b32 %d, [word];"""
    same(evaluate(code, {"a": ("u32", [0])}, {"d": "u32"}), np.array([8], np.uint32))
    code = ".reg .f32 %o, %t; mov.b32 %t, 4; atom.add.f32 %o, [%base_], %t; ld.global.b32 %d, [%base_];"
    same(evaluate(code, {"a": ("u32", [4])}, {"d": "u32"}), np.array([0], np.uint32))
