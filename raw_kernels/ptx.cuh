/* The inline PTX of the kernels, and what stands in for it on sm_75.
 *
 * Fragments of mma.m16n8k16 (lane l, r = l/4, c = 2(l%4)):
 *   A reg i: row r + 8(i&1), columns c + 8(i>>1), +1      B reg i: k = c + 8i, +1; n = r
 *   C reg i: row r + 8(i>>1), column c + (i&1)
 * so that the C fragments of two n8 tiles are the A fragment of the next product's k16 step: no shuffle.
 *
 * Shared memory addresses are u32 (shared_address), in bytes.
 */
#ifndef BURST_PTX_CUH
#define BURST_PTX_CUH

#include "block.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800 && TYPE == BFLOAT16
#error "bfloat16 needs sm_80: this GPU has no bfloat16 tensor cores"
#endif

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

/* ---------------------------------------------------------------- tensor cores */

/* d = a b + c, 16x8x16, sums in float32.  On sm_75 two k8 steps. */
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4])
{
#if __CUDA_ARCH__ < 800
    asm("{.reg .f32 t0, t1, t2, t3;\n"
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {t0,t1,t2,t3}, {%4,%5}, {%8}, {%10,%11,%12,%13};\n"
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%6,%7}, {%9}, {t0,t1,t2,t3};}"
#elif TYPE == FLOAT16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
#endif
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/* d += a b */
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(d, a, b0, b1, d); }

/* Four 8x8 matrices of 16-bit numbers; lanes 8i to 8i+7 give the addresses of the rows of matrix i. */
DEVICE void ldmatrix(u32 (&r)[4], u32 address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

DEVICE void ldmatrix_trans(u32 (&r)[4], u32 address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

#if __CUDA_ARCH__ >= 900
DEVICE void stmatrix(u32 address, const u32 (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
#endif

/* ---------------------------------------------------------------- copies from global to shared memory */

/* 16 bytes of global memory.  As a load from an address of any kind, no later one would pass the store to shared memory. */
DEVICE uint4 global16(const void *global)
{
    uint4 x;
    asm("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(global) : "memory");
    return x;
}

/* 16 bytes, past L1.  On sm_75 a load and a store: done when it returns. */
DEVICE void copy16(u32 shared, const void *global)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared), "l"(global) : "memory");
#else
    const uint4 x = global16(global);
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" :: "r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
#endif
}

/* 16 bytes from global + OFFSET.  The offset is the instruction's own: else the compiler adds it to pointers it can see through. */
template <int OFFSET> DEVICE void copy16_from(u32 shared, const char *global)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1+%2], 16;" :: "r"(shared), "l"(global), "n"(OFFSET) : "memory");
#else
    copy16(shared, global + OFFSET);
#endif
}

/* 16 bytes, or zeros where `there` is false; the address is not read then. */
DEVICE void copy16_or_zero(u32 shared, const void *global, bool there)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared), "l"(global), "r"(there ? 16 : 0) : "memory");
#else
    uint4 x = {0, 0, 0, 0};
    if (there) x = *(const uint4 *)global;
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" :: "r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
#endif
}

/* pointer + step * times, as one instruction; the compiler would take two additions of 32 bits. */
DEVICE const char *stepped(const char *pointer, int step, int times)
{
    const char *x;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(x) : "r"(step), "r"(times), "l"(pointer));
    return x;
}

/* 8 bytes. */
DEVICE void copy8(u32 shared, const void *global)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(shared), "l"(global) : "memory");
#else
    const uint2 x = *(const uint2 *)global;
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" :: "r"(shared), "r"(x.x), "r"(x.y) : "memory");
#endif
}

/* 4 bytes. */
DEVICE void copy4(u32 shared, const void *global)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(shared), "l"(global) : "memory");
#else
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(shared), "r"(*(const u32 *)global) : "memory");
#endif
}

DEVICE void copies_commit()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Wait until at most N groups of this thread's copies are on their way; others' copies need a barrier as well. */
template <int N> DEVICE void copies_wait()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
#endif
}

/* ---------------------------------------------------------------- arithmetic */

DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_fast(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two floats as one register of TYPE; `low` is the column on the left. */
DEVICE u32 pack(float low, float high)
{
    u32 r;
#if __CUDA_ARCH__ < 800
    asm("{.reg .b16 low, high;\n"
        "cvt.rn.f16.f32 low, %2;\n"
        "cvt.rn.f16.f32 high, %1;\n"
        "mov.b32 %0, {low, high};}" : "=r"(r) : "f"(high), "f"(low));
#elif TYPE == FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}

/* ---------------------------------------------------------------- the compiler */

/* threadIdx.x, read again: cold code need not keep what follows from it in registers through a loop. */
DEVICE u32 thread_index()
{
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/* The same value, which ptxas cannot make again from the thread's number: it would recompute swizzled addresses in the
 * main loop rather than keep them.  The whole warp calls it. */
DEVICE u32 opaque(u32 x)
{
    u32 y, lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=r"(y) : "r"(x), "r"(lane));
    return y;
}

/* A condition that all lanes share, by a vote, so that ptxas knows: a branch on it needs no code for divergence. */
DEVICE bool agreed(bool x) { return __any_sync(~0u, x); }

#endif
