/* The intrinsics of AVX-512, AVX512_BF16 and AMX that raw_kernels/host uses, in plain C: its kernels for these instruction sets then run
 * on any x86 CPU.  Included before everything else (-include), with -mno-avx512f, so that no such instruction is left.
 *
 * What instructions do is taken from Intel's manual, in the order of its pseudo-code; avx512_main.c holds it against the instructions
 * themselves where there are any (BURST_BESIDE).  What a compiler makes of the real intrinsics is not seen here, nor how fast it is.
 */
#ifndef BURST_TESTS_AVX512_H
#define BURST_TESTS_AVX512_H

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && !defined(BURST_BESIDE)
#error "-mno-avx512f is missing: kernels would not be what is tested"
#endif

#define PLAIN static inline __attribute__((always_inline))

typedef union {
    __m512 ps;
    __m512d pd;
    __m512i si;
    __m512bh bh;
    float f[16];
    double d[8];
    int32_t i[16];
    uint32_t u[16];
    uint16_t h[32];
} plain512;

#define LANES_OF(type) for (int i = 0; i < 64 / (int)sizeof(type); i++)

/* ---------------------------------------------------------------- constants, copies */

#define SET1(name, result, field, type)            \
    PLAIN result name(type x)                      \
    {                                              \
        plain512 r;                                \
        LANES_OF(type) r.field[i] = (type)x;       \
        return *(result *)&r;                      \
    }
SET1(plain_set1_ps, __m512, f, float)
SET1(plain_set1_pd, __m512d, d, double)
SET1(plain_set1_epi32, __m512i, i, int32_t)
SET1(plain_set1_epi16, __m512i, h, uint16_t)

PLAIN __m512i plain_loadu(const void *p)
{
    plain512 r;
    memcpy(&r, p, 64);
    return r.si;
}

/* ---------------------------------------------------------------- integers and bits */

#define EACH(name, type, field, expression)         \
    PLAIN __m512i name(__m512i left, __m512i right) \
    {                                               \
        plain512 a = {.si = left}, b = {.si = right}, r; \
        LANES_OF(type) r.field[i] = (type)(expression);  \
        return r.si;                                \
    }
EACH(plain_and, uint32_t, u, a.u[i] & b.u[i])
EACH(plain_or, uint32_t, u, a.u[i] | b.u[i])
EACH(plain_add_epi16, uint16_t, h, a.h[i] + b.h[i])

PLAIN __m512i plain_slli_epi32(__m512i x, unsigned n)
{
    plain512 r = {.si = x};
    LANES_OF(uint32_t) r.u[i] = n > 31 ? 0 : r.u[i] << n;
    return r.si;
}
PLAIN __m512i plain_srli_epi32(__m512i x, unsigned n)
{
    plain512 r = {.si = x};
    LANES_OF(uint32_t) r.u[i] = n > 31 ? 0 : r.u[i] >> n;
    return r.si;
}

/* Bit by bit entry 4a + 2b + c of an 8-bit table */
PLAIN __m512i plain_ternarylogic(__m512i left, __m512i middle, __m512i right, int table)
{
    plain512 a = {.si = left}, b = {.si = middle}, c = {.si = right}, r;
    LANES_OF(uint32_t) {
        r.u[i] = 0;
        for (int entry = 0; entry < 8; entry++)
            if (table >> entry & 1)
                r.u[i] |= (entry & 4 ? a.u[i] : ~a.u[i]) & (entry & 2 ? b.u[i] : ~b.u[i]) & (entry & 1 ? c.u[i] : ~c.u[i]);
    }
    return r.si;
}

PLAIN __mmask16 plain_test(__m512i left, __m512i right)
{
    plain512 a = {.si = left}, b = {.si = right};
    unsigned mask = 0;
    LANES_OF(uint32_t) mask |= (unsigned)((a.u[i] & b.u[i]) != 0) << i;
    return (__mmask16)mask;
}
PLAIN __mmask16 plain_le(__m512i left, __m512i right)
{
    plain512 a = {.si = left}, b = {.si = right};
    unsigned mask = 0;
    LANES_OF(int32_t) mask |= (unsigned)(a.i[i] <= b.i[i]) << i;
    return (__mmask16)mask;
}
PLAIN __mmask16 plain_mask_gt(__mmask16 of, __m512i left, __m512i right) { return of & (__mmask16)~plain_le(left, right); }

PLAIN __m512 plain_blend(__mmask16 mask, __m512 zero, __m512 one)
{
    plain512 a = {.ps = zero}, b = {.ps = one}, r;
    LANES_OF(uint32_t) r.u[i] = mask >> i & 1 ? b.u[i] : a.u[i];
    return r.ps;
}

PLAIN __m512i plain_permutex2var(__m512i left, __m512i order, __m512i right)
{
    plain512 a = {.si = left}, b = {.si = right}, at = {.si = order}, r;
    LANES_OF(uint16_t) r.h[i] = at.h[i] & 32 ? b.h[at.h[i] & 31] : a.h[at.h[i] & 31];
    return r.si;
}
PLAIN __m512 plain_shuffle_f32x4(__m512 left, __m512 right, int order)
{
    plain512 a = {.ps = left}, b = {.ps = right}, r;
    for (int i = 0; i < 4; i++) memcpy(r.f + 4 * i, (i < 2 ? a.f : b.f) + 4 * (order >> 2 * i & 3), 16);
    return r.ps;
}

PLAIN __m512i plain_widen(__m256i x)
{
    uint16_t from[16];
    plain512 r;
    memcpy(from, &x, 32);
    LANES_OF(uint32_t) r.u[i] = from[i];
    return r.si;
}
PLAIN __m256i plain_narrow(__m512i x)
{
    plain512 a = {.si = x};
    uint16_t to[16];
    for (int i = 0; i < 16; i++) to[i] = (uint16_t)a.u[i];
    return _mm256_loadu_si256((const __m256i *)to);
}

/* ---------------------------------------------------------------- floating point */

#define FLOATS(suffix, result, real, field, FMA, FLOOR, LARGE)                                              \
    PLAIN result plain_max_##suffix(result left, result right)                                              \
    {                                                                                                       \
        plain512 a = {.suffix = left}, b = {.suffix = right}, r;                                            \
        LANES_OF(real) r.field[i] = a.field[i] > b.field[i] ? a.field[i] : b.field[i];                      \
        return r.suffix;                                                                                    \
    }                                                                                                       \
    PLAIN result plain_fmsub_##suffix(result left, result right, result less)                               \
    {                                                                                                       \
        plain512 a = {.suffix = left}, b = {.suffix = right}, c = {.suffix = less}, r;                      \
        LANES_OF(real) r.field[i] = FMA(a.field[i], b.field[i], -c.field[i]);                               \
        return r.suffix;                                                                                    \
    }                                                                                                       \
    /* x - floor x; 0 of an infinity */                                                                     \
    PLAIN result plain_reduce_##suffix(result x, int how)                                                   \
    {                                                                                                       \
        plain512 a = {.suffix = x}, r;                                                                      \
        if (how != 1) abort(); /* another rounding, or binary places */                                     \
        LANES_OF(real) r.field[i] = __builtin_isinf(a.field[i]) ? 0 : a.field[i] - FLOOR(a.field[i]);       \
        return r.suffix;                                                                                    \
    }                                                                                                       \
    /* p 2^floor(t), by two factors: each of them, and p by the first, is a normal number */                \
    PLAIN result plain_scalef_##suffix(result p, result t)                                                  \
    {                                                                                                       \
        plain512 a = {.suffix = p}, b = {.suffix = t}, r;                                                   \
        LANES_OF(real) {                                                                                    \
            real n = FLOOR(b.field[i]);                                                                     \
            n = n > LARGE ? LARGE : n < -LARGE ? -LARGE : n;                                                \
            const int whole = n == n ? (int)n : 0, half = whole / 2;                                        \
            const real product = a.field[i] * power_##suffix(half) * power_##suffix(whole - half);          \
            r.field[i] = n == n ? product : n;                                                              \
        }                                                                                                   \
        return r.suffix;                                                                                    \
    }
PLAIN float power_ps(int n)
{
    const int32_t bits = (n + 127) << 23;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
PLAIN double power_pd(int n)
{
    const int64_t bits = (int64_t)(n + 1023) << 52;
    double x;
    memcpy(&x, &bits, 8);
    return x;
}
FLOATS(ps, __m512, float, f, __builtin_fmaf, __builtin_floorf, 252)
FLOATS(pd, __m512d, double, d, __builtin_fma, __builtin_floor, 2044)

/* ---------------------------------------------------------------- bfloat16 */

PLAIN float plain_of_bf16(uint32_t bits)
{
    float x;
    bits <<= 16;
    memcpy(&x, &bits, 4);
    return x;
}
PLAIN uint16_t plain_to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    if (!(bits & 0x7f800000)) return (uint16_t)(bits >> 16 & 0x8000); /* subnormal: 0 */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
PLAIN __m512bh plain_cvtne2ps_pbh(__m512 upper, __m512 lower)
{
    plain512 a = {.ps = upper}, b = {.ps = lower}, r;
    LANES_OF(float) {
        r.h[i] = plain_to_bf16(b.f[i]);
        r.h[16 + i] = plain_to_bf16(a.f[i]);
    }
    return r.bh;
}
PLAIN __m512 plain_dpbf16(__m512 sum, __m512bh left, __m512bh right)
{
    plain512 a = {.bh = left}, b = {.bh = right}, r = {.ps = sum};
    LANES_OF(float) {
        r.f[i] = __builtin_fmaf(plain_of_bf16(a.u[i] >> 16), plain_of_bf16(b.u[i] >> 16), r.f[i]);
        r.f[i] = __builtin_fmaf(plain_of_bf16(a.u[i] & 0xffff), plain_of_bf16(b.u[i] & 0xffff), r.f[i]);
    }
    return r.ps;
}

/* ---------------------------------------------------------------- AMX */

/* 8 registers of 16 rows of 64 bytes, a thread's own.  To use one that is not configured is an error of its own, as on the CPU. */
static _Thread_local struct {
    float f[8][16][16];
    unsigned rows[8], bytes[8];
} plain_tiles;

PLAIN void plain_tile_release(void) { memset(&plain_tiles, 0, sizeof plain_tiles); }
PLAIN void plain_tile_loadconfig(const void *config)
{
    const uint8_t *at = config;
    plain_tile_release();
    if (at[0] != 1 || at[1] != 0) abort(); /* the palette; a load that was broken off */
    for (int i = 0; i < 8; i++) {
        plain_tiles.bytes[i] = at[16 + 2 * i] | at[17 + 2 * i] << 8;
        plain_tiles.rows[i] = at[48 + i];
        if (plain_tiles.bytes[i] > 64 || plain_tiles.rows[i] > 16) abort();
    }
}
PLAIN void plain_need_tile(int tile)
{
    if (!plain_tiles.rows[tile] || !plain_tiles.bytes[tile]) abort();
}
PLAIN void plain_tile_zero(int tile)
{
    plain_need_tile(tile);
    memset(plain_tiles.f[tile], 0, sizeof plain_tiles.f[tile]);
}
PLAIN void plain_tile_loadd(int tile, const void *from, int64_t stride)
{
    plain_tile_zero(tile);
    for (unsigned row = 0; row < plain_tiles.rows[tile]; row++)
        memcpy(plain_tiles.f[tile][row], (const char *)from + row * stride, plain_tiles.bytes[tile]);
}
PLAIN void plain_tile_stored(int tile, void *to, int64_t stride)
{
    plain_need_tile(tile);
    for (unsigned row = 0; row < plain_tiles.rows[tile]; row++)
        memcpy((char *)to + row * stride, plain_tiles.f[tile][row], plain_tiles.bytes[tile]);
}
typedef float plain_row __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t plain_words __attribute__((vector_size(64), aligned(4), may_alias));

/* Even and odd terms have sums of their own. */
static __attribute__((noinline)) void plain_tile_dpbf16ps(int c, int a, int b)
{
    plain_need_tile(c), plain_need_tile(a), plain_need_tile(b);
    const unsigned pairs = plain_tiles.bytes[a] / 4;
    if (pairs != plain_tiles.rows[b] || plain_tiles.bytes[c] != plain_tiles.bytes[b] || plain_tiles.rows[c] != plain_tiles.rows[a]) abort();
    plain_row low[16], high[16];
    for (unsigned k = 0; k < pairs; k++) {
        const plain_words both = *(const plain_words *)plain_tiles.f[b][k];
        low[k] = (plain_row)(both << 16);
        high[k] = (plain_row)(both & 0xffff0000);
    }
    for (unsigned m = 0; m < plain_tiles.rows[c]; m++) {
        const uint32_t *left = (const uint32_t *)memcpy((uint32_t[16]){0}, plain_tiles.f[a][m], 64);
        plain_row even = {0}, odd = {0};
        for (unsigned k = 0; k < pairs; k++) {
            even += plain_of_bf16(left[k] & 0xffff) * low[k];
            odd += plain_of_bf16(left[k] >> 16) * high[k];
        }
        *(plain_row *)plain_tiles.f[c][m] += even + odd;
    }
}

PLAIN __m512i plain_set_epi16(const uint16_t *x) /* from the last to the first */
{
    plain512 r;
    LANES_OF(uint16_t) r.h[i] = x[31 - i];
    return r.si;
}

/* ---------------------------------------------------------------- by their names */

#ifndef BURST_BESIDE
#define _mm512_set1_ps plain_set1_ps
#define _mm512_set1_pd plain_set1_pd
#define _mm512_set1_epi32 plain_set1_epi32
#define _mm512_set1_epi16 plain_set1_epi16
#define _mm512_loadu_si512 plain_loadu
#define _mm512_and_si512 plain_and
#define _mm512_or_si512 plain_or
#define _mm512_add_epi16 plain_add_epi16
#define _mm512_slli_epi32 plain_slli_epi32
#define _mm512_srli_epi32 plain_srli_epi32
#define _mm512_ternarylogic_epi32 plain_ternarylogic
#define _mm512_test_epi32_mask plain_test
#define _mm512_cmple_epi32_mask plain_le
#define _mm512_mask_cmpgt_epi32_mask plain_mask_gt
#define _mm512_mask_blend_ps plain_blend
#define _mm512_permutex2var_epi16 plain_permutex2var
#define _mm512_shuffle_f32x4 plain_shuffle_f32x4
#define _mm512_cvtepu16_epi32 plain_widen
#define _mm512_cvtepi32_epi16 plain_narrow
#define _mm512_max_ps plain_max_ps
#define _mm512_max_pd plain_max_pd
#define _mm512_fmsub_ps plain_fmsub_ps
#define _mm512_fmsub_pd plain_fmsub_pd
#define _mm512_reduce_ps plain_reduce_ps
#define _mm512_reduce_pd plain_reduce_pd
#define _mm512_scalef_ps plain_scalef_ps
#define _mm512_scalef_pd plain_scalef_pd
#define _mm512_cvtne2ps_pbh plain_cvtne2ps_pbh
#define _mm512_dpbf16_ps plain_dpbf16
#define _mm512_set_epi16(...) plain_set_epi16((const uint16_t[32]){__VA_ARGS__})

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig plain_tile_loadconfig
#define _tile_release plain_tile_release
#define _tile_zero plain_tile_zero
#define _tile_loadd plain_tile_loadd
#define _tile_stored plain_tile_stored
#define _tile_dpbf16ps plain_tile_dpbf16ps
#endif

#endif
