/* Vectors of REAL: GCC/clang vector extensions everywhere, intrinsics only where an instruction has no C spelling.
 *
 *   LANES   elements of a vector          VR   vectors of a panel: its lanes are NR = VR * LANES queries
 *   KR      rows of a register block, of all VR vectors (by vdpbf16ps of 3 or 2)
 *   WIDE    vectors of a row block in the products that make dK and dV
 */
#ifndef BURST_VEC_H
#define BURST_VEC_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "2^x and tests for NaN need IEEE arithmetic: this compiler insists on -ffast-math"
#endif

#ifdef BURST_DOUBLE
typedef double REAL;
typedef int64_t INT;
typedef uint64_t UINT;
#define MANTISSA 52
#else
typedef float REAL;
typedef int32_t INT;
typedef uint32_t UINT;
#define MANTISSA 23
#endif

/* Whether products go by AMX's tile registers; vdpbf16ps has AMX's layouts and none of these */
#if defined(BURST_AMX) && !defined(BURST_DOT)
#define TILE_REGISTERS 1
#else
#define TILE_REGISTERS 0
#endif

#if defined(BURST_AMX) /* on top of AVX-512; panels and blocks are whole AMX tiles: see amx.h, and dot.h for BURST_DOT */
#include <immintrin.h>
#define VBYTES 64
#ifdef BURST_DOT
#define KR 8
#else
#define KR 32
#endif
#ifdef BURST_PANEL_VECTORS
#define VR BURST_PANEL_VECTORS
#elif defined(BURST_DOT)
#define VR 6
#elif defined(BURST_PIECES) && BURST_PIECES > 1
#define VR 4
#else
#define VR 8
#endif
#define WIDE 4
#elif defined(BURST_AVX512)
#include <immintrin.h>
#define VBYTES 64
#define KR 8
#define VR 3
#define WIDE 4
#elif defined(BURST_AVX2)
#include <immintrin.h>
#define VBYTES 32
#define KR 4
#define VR 3
#define WIDE 3
#elif defined(__aarch64__)
#ifdef BURST_SVE /* its bytes: what -msve-vector-bits says, 8 times */
#define VBYTES BURST_SVE
#else
#define VBYTES 16
#endif
#define KR 8
#define VR 3
#define WIDE 4
#else
#define VBYTES 16
#define KR 4
#define VR 3
#define WIDE 3
#endif

/* for assembly */
#ifdef BURST_DOUBLE
#define BROADCAST "vbroadcastsd"
#define TO_ALL "%{1to8%}"
#define MULTIPLY_ADD "vfmadd231pd"
#else
#define BROADCAST "vbroadcastss"
#define TO_ALL "%{1to16%}"
#define MULTIPLY_ADD "vfmadd231ps"
#endif

#define LANES ((int)(VBYTES / sizeof(REAL)))
#define NR (VR * LANES)

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 64")
#define ONE_BY_ONE _Pragma("GCC unroll 1") /* a rest that is seldom there: not worth its code, nor the time to compile it */

typedef REAL vec __attribute__((vector_size(VBYTES), may_alias));
typedef INT ivec __attribute__((vector_size(VBYTES), may_alias));
typedef UINT uvec __attribute__((vector_size(VBYTES), may_alias));
typedef REAL vec_unaligned __attribute__((vector_size(VBYTES), aligned(sizeof(REAL)), may_alias));

INLINE vec load(const REAL *p) { return *(const vec *)p; }
INLINE void store(REAL *p, vec x) { *(vec *)p = x; }
INLINE vec loadu(const REAL *p) { return *(const vec_unaligned *)p; }
INLINE void storeu(REAL *p, vec x) { *(vec_unaligned *)p = x; }
INLINE ivec loadi(const INT *p) { return *(const ivec *)p; }
INLINE vec splat(REAL x) { return x - (vec){0}; }
INLINE vec zero(void) { return (vec){0}; }

/* where ? a : b; where is all ones or all zeros in each lane */
INLINE vec pick(ivec where, vec a, vec b) { return (vec)((where & (ivec)a) | (~where & (ivec)b)); }
/* The larger; a NaN in a is passed over (as x86's max does with its first operand). */
INLINE vec larger(vec a, vec b)
{
#if defined(BURST_AVX512) && !defined(BURST_DOUBLE)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(BURST_AVX512)
    return (vec)_mm512_max_pd((__m512d)a, (__m512d)b);
#else
    return pick(a > b, a, b);
#endif
}

#if defined(BURST_AVX512) || defined(BURST_AVX2) || (defined(__FP_FAST_FMA) && defined(__FP_FAST_FMAF)) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FUSED_REACH INFINITY
#else
#define FUSED_REACH 1e30
#endif

/* a b - c, rounded once, of products up to FUSED_REACH, and beyond it the difference of the rounded product.  Contraction is the compiler's
 * choice; where a b and c cancel it must not be. */
INLINE vec fused(vec a, REAL b, vec c)
{
#if defined(BURST_AVX512) && defined(BURST_DOUBLE)
    return (vec)_mm512_fmsub_pd((__m512d)a, _mm512_set1_pd(b), (__m512d)c);
#elif defined(BURST_AVX512)
    return (vec)_mm512_fmsub_ps((__m512)a, _mm512_set1_ps(b), (__m512)c);
#elif defined(BURST_AVX2) && defined(BURST_DOUBLE)
    return (vec)_mm256_fmsub_pd((__m256d)a, _mm256_set1_pd(b), (__m256d)c);
#elif defined(BURST_AVX2)
    return (vec)_mm256_fmsub_ps((__m256)a, _mm256_set1_ps(b), (__m256)c);
#elif defined(__FP_FAST_FMA) || defined(__FMA__) || defined(__ARM_FEATURE_FMA) /* clang has only the last two */
    vec r;
    UNROLL for (int i = 0; i < LANES; i++)
        r[i] = sizeof(REAL) == 8 ? (REAL)__builtin_fma(a[i], b, -c[i]) : (REAL)__builtin_fmaf((float)a[i], (float)b, (float)-c[i]);
    return r;
#else
    /* The product's rounding error by halves of the factors (Dekker); huge a would overflow and needs no such care. */
    const REAL half = sizeof(REAL) == 8 ? (REAL)134217729.0 : (REAL)4097.0;
    const REAL b1 = b * half - (b * half - b), b0 = b - b1;
    const vec product = a * b, t = a * half, a1 = t - (t - a), a0 = a - a1;
    const vec error = ((a1 * b1 - product) + a1 * b0 + a0 * b1) + a0 * b0;
    const ivec safe = (product < (REAL)FUSED_REACH) & (product > (REAL)-FUSED_REACH);
    return (product - c) + (vec)((ivec)error & safe);
#endif
}

INLINE int any(ivec where)
{
#ifdef BURST_AVX512
    return _mm512_test_epi32_mask((__m512i)where, (__m512i)where) != 0;
#endif
    INT sum = 0;
    UNROLL for (int i = 0; i < LANES; i++) sum |= where[i];
    return sum != 0;
}

/* ---------------------------------------------------------------- 2^x */

/* Minimax polynomials of 2^r with p(0) = 1: relative error below 3e-9 (float) and 2e-17 (double) before rounding.
 * AVX-512 has r = t - floor(t) in one instruction and p * 2^floor(t) in another: r in [0, 1).  Elsewhere |r| <= 1/2. */
#if defined(BURST_DOUBLE) && defined(BURST_AVX512)
static const REAL EXP2[] = {
    1.0, 0.693147180559945928, 0.240226506959063302, 0.0555041086656022533, 0.00961812909955079557,
    0.00133335586295667552, 0.000154035123096286604, 0.000015253175055562796, 1.32083672889511404e-6,
    1.02532124357219342e-7, 6.55952932277052837e-9, 6.26346614229602101e-10};
#elif defined(BURST_DOUBLE)
static const REAL EXP2[] = {
    1.0, 0.693147180559945697, 0.24022650695910098, 0.0555041086647903945, 0.00961812910760700262,
    0.00133335581534399697, 0.000154035304415718501, 0.0000152527273851897748, 1.32154426754528552e-6,
    1.01806476605730693e-7, 7.07257039454079943e-9, 4.07807178609287042e-10};
#elif defined(BURST_AVX512)
static const REAL EXP2[] = {
    1.0f, 0.693147044443398266f, 0.240229305553523956f, 0.0554852806079473485f, 0.00967545159358604257f,
    0.00124678461738658441f, 0.000216129159441027802f};
#else
static const REAL EXP2[] = {
    1.0f, 0.693147214967884963f, 0.240226527828761768f, 0.0555031055120698058f, 0.00961769297614318723f,
    0.00134066438474800602f, 0.000155946770151054106f};
#endif
#define EXP2_DEGREE ((int)(sizeof EXP2 / sizeof *EXP2) - 1)

#ifndef BURST_AVX512
/* A number that is added to this has, as bits, its nearest integer and the bias of an exponent at the low end. */
#ifdef BURST_DOUBLE
#define ROUNDER (0x1.8p52 + 1023)
#define EXP2_LOW (-1023.0)
#define EXP2_HIGH 1024.0
#else
#define ROUNDER (0x1.8p23f + 127)
#define EXP2_LOW (-127.0f)
#define EXP2_HIGH 128.0f
#endif

/* t from EXP2_LOW to EXP2_HIGH; NaN stays NaN */
INLINE vec within_exp2(vec t)
{
#if defined(BURST_AVX2) && defined(BURST_DOUBLE)
    return (vec)_mm256_min_pd(_mm256_set1_pd(EXP2_HIGH), _mm256_max_pd(_mm256_set1_pd(EXP2_LOW), (__m256d)t));
#elif defined(BURST_AVX2)
    return (vec)_mm256_min_ps(_mm256_set1_ps(EXP2_HIGH), _mm256_max_ps(_mm256_set1_ps(EXP2_LOW), (__m256)t));
#else
    t = pick(t < EXP2_LOW, splat(EXP2_LOW), t);
    return pick(t > EXP2_HIGH, splat(EXP2_HIGH), t);
#endif
}
#endif

/* NaN gives NaN, -inf gives 0, +inf gives inf; results below the normal numbers may be 0, those above half of the largest inf. */
INLINE vec exp2_vec(vec t)
{
#ifdef BURST_AVX512
#ifdef BURST_DOUBLE
    const vec r = (vec)_mm512_reduce_pd((__m512d)t, 1);
#else
    const vec r = (vec)_mm512_reduce_ps((__m512)t, 1);
#endif
    vec p = splat(EXP2[EXP2_DEGREE]);
    UNROLL for (int i = EXP2_DEGREE - 1; i >= 0; i--) p = p * r + EXP2[i];
#ifdef BURST_DOUBLE
    return (vec)_mm512_scalef_pd((__m512d)p, (__m512d)t);
#else
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)t);
#endif
#else
    t = within_exp2(t);
    const vec shifted = t + ROUNDER;
    const vec r = t - (shifted - ROUNDER);
    vec p = splat(EXP2[EXP2_DEGREE]);
    UNROLL for (int i = EXP2_DEGREE - 1; i >= 0; i--) p = p * r + EXP2[i];
    return p * (vec)((uvec)shifted << MANTISSA); /* 2^n: 0 at the low end, inf at the high one */
#endif
}

#if defined(BURST_AVX512) && !defined(BURST_DOUBLE)
/* The same for what is rounded to bfloat16 right away: relative error below 3e-6 */
INLINE vec exp2_short(vec t)
{
    const vec r = (vec)_mm512_reduce_ps((__m512)t, 1);
    const vec p = (((r * 0.0134266970f + 0.0522424539f) * r + 0.2412802142f) * r + 0.6930448437f) * r + 1;
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)t);
}
#endif

/* ---------------------------------------------------------------- log2 x */

/* For x >= 0; 0 gives -inf, infinities and NaN stay what they are.  Where REAL is float it is right to 1e-11, which is
 * far below one rounding of lse, and loops over it are vectors. */
INLINE double log2_of(double x)
{
#ifdef BURST_DOUBLE
    return log2(x);
#else
    uint64_t bits;
    memcpy(&bits, &x, 8);
    const uint64_t above = bits - 0x3fe6a09e667f3bcd; /* sqrt(1/2): x = 2^e f, f in [sqrt(1/2), sqrt(2)) */
    const int64_t e = (int64_t)above >> 52;
    bits -= (uint64_t)e << 52;
    double f;
    memcpy(&f, &bits, 8);
    const double r = (f - 1) / (f + 1), z = r * r; /* ln f = 2 atanh r, |r| < 0.172 */
    const double p = ((((z / 11 + 1.0 / 9) * z + 1.0 / 7) * z + 1.0 / 5) * z + 1.0 / 3) * z + 1;
    const double value = (double)e + r * p * (2 * 1.44269504088896340736);
    return x == 0 ? -INFINITY : x - x == 0 ? value : x;
#endif
}

/* ---------------------------------------------------------------- tanh */

/* Rounded to REAL once and for all: what forward multiplies by, lse divides by and backward multiplies by again. */
#define LOG2E ((REAL)1.44269504088896340736)

/* Relative accuracy near 0, where cap * tanh(x / cap) is almost x: a polynomial there, 1 - 2/(e^{2x} + 1) elsewhere. */
INLINE vec tanh_vec(vec x)
{
    const ivec sign = (ivec)splat((REAL)-0.0);
    const vec size = (vec)((ivec)x & ~sign);
    const vec z = x * x;
#ifdef BURST_DOUBLE
    const vec p = (-9.64399179425052238628E-1 * z - 9.92877231001918586564E1) * z - 1.61468768441708447952E3;
    const vec q = ((z + 1.12811678491632931402E2) * z + 2.23548839060100448583E3) * z + 4.84406305325125486048E3;
    const vec small = x + x * z * (p / q);
#else
    const vec p = (((-5.70498872745E-3f * z + 2.06390887954E-2f) * z - 5.37397155531E-2f) * z + 1.33314422036E-1f) * z
                  - 3.33332819422E-1f;
    const vec small = x + x * z * p;
#endif
    const vec large = 1 - 2 / (exp2_vec(size * (2 * LOG2E)) + 1);
    const vec signed_large = (vec)((ivec)large | ((ivec)x & sign));
    return pick(size < (REAL)0.625, small, pick(size > 20, (vec)((ivec)splat(1) | ((ivec)x & sign)), signed_large));
}

/* ---------------------------------------------------------------- transposition */

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE __builtin_shufflevector
#endif
#endif

/* The first (or last) halves of a and of b, where blocks of KR keys are half a vector */
#if defined(SHUFFLE) && !defined(BURST_DOUBLE) && VBYTES == 64 && KR == 8
#define JOIN(a, b, last) SHUFFLE(a, b, 8 * last, 8 * last + 1, 8 * last + 2, 8 * last + 3, 8 * last + 4, 8 * last + 5, 8 * last + 6, 8 * last + 7, \
                                 16 + 8 * last, 17 + 8 * last, 18 + 8 * last, 19 + 8 * last, 20 + 8 * last, 21 + 8 * last, 22 + 8 * last, 23 + 8 * last)
#elif defined(SHUFFLE) && !defined(BURST_DOUBLE) && VBYTES == 32 && KR == 4
#define JOIN(a, b, last) SHUFFLE(a, b, 4 * last, 4 * last + 1, 4 * last + 2, 4 * last + 3, 8 + 4 * last, 9 + 4 * last, 10 + 4 * last, 11 + 4 * last)
#endif

/* LANES x LANES, in place.  Interleaving row i with row i + LANES/2, log2(LANES) times, transposes. */
INLINE void transpose(vec r[])
{
#ifdef SHUFFLE
    UNROLL for (int round = 1; round < LANES; round *= 2) {
        vec t[VBYTES / sizeof(REAL)];
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            const vec a = r[i], b = r[i + LANES / 2];
#if VBYTES == 64 && !defined(BURST_DOUBLE)
            t[2 * i] = SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            t[2 * i + 1] = SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif VBYTES / 8 == 8 || (VBYTES == 32 && !defined(BURST_DOUBLE))
            t[2 * i] = SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
            t[2 * i + 1] = SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#elif VBYTES == 32 || !defined(BURST_DOUBLE)
            t[2 * i] = SHUFFLE(a, b, 0, 4, 1, 5);
            t[2 * i + 1] = SHUFFLE(a, b, 2, 6, 3, 7);
#else
            t[2 * i] = SHUFFLE(a, b, 0, 2);
            t[2 * i + 1] = SHUFFLE(a, b, 1, 3);
#endif
        }
        UNROLL for (int i = 0; i < LANES; i++) r[i] = t[i];
    }
#else
    vec t[VBYTES / sizeof(REAL)];
    for (int i = 0; i < LANES; i++) t[i] = r[i];
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) r[i][j] = t[j][i];
#endif
}

#endif
