/* Rows of the caller's type to rows of REAL and back: the only place that knows element types, but for amx.h.
 *
 * float16 and bfloat16 go through integers, so that every compiler takes them, they vectorise everywhere, and
 * flush-to-zero (see tasks.h) touches no float16 subnormal on its way in; but for rows of out where there is an instruction for it.
 */
#ifndef BURST_CONVERT_H
#define BURST_CONVERT_H

#include "abi.h"
#include "vec.h"

INLINE float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

INLINE float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

INLINE uint16_t to_bf16(float x)
{
    const uint32_t u = bits_of(x);
    const uint32_t rounded = u + 0x7fff + (u >> 16 & 1); /* to nearest, ties to even */
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? (u >> 16 | 0x40) : rounded >> 16);
}

INLINE float from_f16(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    const uint32_t normal = rest + ((127 - 15) << 23);
    const uint32_t special = rest + ((255 - 31) << 23); /* inf and NaN */
    const uint32_t tiny = bits_of(float_of(rest + ((127 - 14) << 23)) - 0x1p-14f);
    const uint32_t value = rest >= 0x0f800000 ? special : rest < 0x00800000 ? tiny : normal;
    return float_of(sign | value);
}

INLINE uint16_t to_f16(float x)
{
    const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
    const uint32_t normal = (size - ((127 - 15) << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    /* below 2^-14: adding 1/2 leaves the subnormal's bits, rounded to nearest even, at the bottom */
    const uint32_t tiny = bits_of(float_of(size) + 0.5f) - 0x3f000000;
    const uint32_t special = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t value = size >= 0x477ff000 ? special : size < 0x38800000 ? tiny : normal;
    return (uint16_t)(sign | value);
}

#ifdef BURST_DOUBLE
INLINE uint64_t magnitude(REAL x) { uint64_t u; memcpy(&u, &x, 8); return u & 0x7fffffffffffffff; }
#define INFINITE 0x7ff0000000000000u
typedef uint64_t word;
#else
INLINE uint32_t magnitude(REAL x) { return bits_of(x) & 0x7fffffff; }
#define INFINITE 0x7f800000u
typedef uint32_t word;
#endif

INLINE REAL element(const char *p, int type)
{
    switch (type) {
    case BURST_F64: { double x; memcpy(&x, p, 8); return (REAL)x; }
    case BURST_F32: { float x; memcpy(&x, p, 4); return (REAL)x; }
    case BURST_F16: { uint16_t x; memcpy(&x, p, 2); return from_f16(x); }
    default: { uint16_t x; memcpy(&x, p, 2); return from_bf16(x); }
    }
}

INLINE void put_element(char *p, int type, REAL value)
{
    switch (type) {
    case BURST_F64: { const double x = value; memcpy(p, &x, 8); break; }
    case BURST_F32: { const float x = (float)value; memcpy(p, &x, 4); break; }
    case BURST_F16: { const uint16_t x = to_f16((float)value); memcpy(p, &x, 2); break; }
    default: { const uint16_t x = to_bf16((float)value); memcpy(p, &x, 2); break; }
    }
}

static const int64_t SIZE_OF_TYPE[] = {8, 4, 2, 2};
#define TYPE_OF_REAL (sizeof(REAL) == 8 ? BURST_F64 : BURST_F32)

#ifndef BURST_DOUBLE
typedef uint16_t words_of_vec __attribute__((vector_size(VBYTES / 2), aligned(1), may_alias));
typedef float vec_anywhere __attribute__((vector_size(VBYTES), aligned(1), may_alias));

/* LANES numbers of a type, one after another */
INLINE vec fetch(const char *src, const int type)
{
    if (type == BURST_F32) return *(const vec_anywhere *)src;
    const ivec x = __builtin_convertvector(*(const words_of_vec *)src, ivec);
    if (type == BURST_BF16) return (vec)(x << 16);
    const ivec sign = (x & 0x8000) << 16, rest = (x & 0x7fff) << 13; /* see from_f16 */
    const vec normal = (vec)(rest + ((127 - 15) << 23)), special = (vec)(rest + ((255 - 31) << 23));
    const vec tiny = (vec)(rest + ((127 - 14) << 23)) - 0x1p-14f;
    return (vec)(sign | (ivec)pick(rest >= 0x0f800000, special, pick(rest < 0x00800000, tiny, normal)));
}
#endif

INLINE word load_row_typed(const char *src, int64_t step, int64_t n, REAL *dst, const int type, const int dense)
{
    word top = 0;
    const int64_t stride = dense ? (type == BURST_F64 ? 8 : type == BURST_F32 ? 4 : 2) : step;
    for (int64_t c = 0; c < n; c++) {
        dst[c] = element(src + c * stride, type);
        const word size = magnitude(dst[c]);
        top = size > top ? size : top;
    }
    return top;
}

/* The caller's type is REAL and rows are dense: whole vectors. */
INLINE int load_rows_same(const REAL *src, int64_t step, int64_t rows, int64_t n, REAL *dst, int64_t ld)
{
    vec spoilt[4] = {{0}}; /* sums of 0 x: NaN where an x is infinite or NaN */
    REAL rest = 0;
    for (; rows > 0; rows--, src += step, dst += ld) {
        int64_t c = 0;
        for (; c + 4 * LANES <= n; c += 4 * LANES)
            UNROLL for (int i = 0; i < 4; i++) {
                const vec x = loadu(src + c + i * LANES);
                spoilt[i] += x * 0;
                storeu(dst + c + i * LANES, x);
            }
        for (; c + LANES <= n; c += LANES) {
            const vec x = loadu(src + c);
            spoilt[0] += x * 0;
            storeu(dst + c, x);
        }
        for (; c < n; c++) {
            dst[c] = src[c];
            rest += src[c] * 0;
        }
    }
    return any((spoilt[0] + spoilt[1]) + (spoilt[2] + spoilt[3]) != 0) || rest != 0;
}

/* dst[0..n) = src; returns whether an infinity or a NaN is among them. */
INLINE int load_row(const char *src, int64_t step, int64_t n, REAL *restrict dst, int type)
{
    word top;
    if (step == sizeof(REAL) && type == (int)TYPE_OF_REAL) return load_rows_same((const REAL *)src, 0, 1, n, dst, 0);
    if (step != SIZE_OF_TYPE[type])
        top = load_row_typed(src, step, n, dst, type, 0);
    else if (type == BURST_F64)
        top = load_row_typed(src, 0, n, dst, BURST_F64, 1);
    else if (type == BURST_F32)
        top = load_row_typed(src, 0, n, dst, BURST_F32, 1);
    else if (type == BURST_F16)
        top = load_row_typed(src, 0, n, dst, BURST_F16, 1);
    else
        top = load_row_typed(src, 0, n, dst, BURST_BF16, 1);
    return top >= INFINITE;
}

/* dst = src[0..n) * factor, rounded once to the caller's type */
NOINLINE void store_row(char *dst, int64_t step, int64_t n, const REAL *restrict src, REAL factor, int type)
{
    if (step != SIZE_OF_TYPE[type])
        for (int64_t c = 0; c < n; c++) put_element(dst + c * step, type, src[c] * factor);
    else if (type == (int)TYPE_OF_REAL && n % LANES == 0)
        for (int64_t c = 0; c < n; c += LANES) storeu((REAL *)dst + c, loadu(src + c) * factor);
    else if (type == BURST_F64)
        for (int64_t c = 0; c < n; c++) put_element(dst + 8 * c, BURST_F64, src[c] * factor);
    else if (type == BURST_F32)
        for (int64_t c = 0; c < n; c++) put_element(dst + 4 * c, BURST_F32, src[c] * factor);
    else if (type == BURST_F16)
        for (int64_t c = 0; c < n; c++) put_element(dst + 2 * c, BURST_F16, src[c] * factor);
    else
        for (int64_t c = 0; c < n; c++) put_element(dst + 2 * c, BURST_BF16, src[c] * factor);
}

/* dst += src[0..n) * factor, both REAL */
NOINLINE void add_row(char *dst, int64_t step, int64_t n, const REAL *restrict src, REAL factor)
{
    if (step == sizeof(REAL)) {
        REAL *restrict d = (REAL *)dst;
        for (int64_t c = 0; c < n; c++) d[c] += src[c] * factor;
    } else {
        for (int64_t c = 0; c < n; c++) *(REAL *)(dst + c * step) += src[c] * factor;
    }
}

/* The same where nothing is there yet */
NOINLINE void put_row(char *dst, int64_t step, int64_t n, const REAL *restrict src, REAL factor)
{
    if (step == sizeof(REAL)) {
        REAL *restrict d = (REAL *)dst;
        for (int64_t c = 0; c < n; c++) d[c] = src[c] * factor;
    } else {
        for (int64_t c = 0; c < n; c++) *(REAL *)(dst + c * step) = src[c] * factor;
    }
}

/* Rows of REAL with no gaps between columns */
INLINE int is_dense(const burst_array *x, int type)
{
    return type == (int)TYPE_OF_REAL && x->step[3] == sizeof(REAL) && x->step[1] % (int64_t)sizeof(REAL) == 0;
}

/* Rows that can be read and written where they lie: dense, in whole vectors. */
INLINE int is_even(const burst_array *x, int64_t n, int type)
{
    return is_dense(x, type) && n % LANES == 0;
}

/* rows [NR, n] of REAL at row stride ld -> panel[c][lane]: the first `count` lanes; others become 0 */
NOINLINE void rows_to_panel(const REAL *rows, int64_t ld, int count, int64_t n, REAL factor, REAL *panel)
{
    for (int j = 0; j < VR; j++)
        for (int64_t c = 0; c < n; c += LANES) {
            vec r[VBYTES / sizeof(REAL)];
            const REAL *from = rows + j * LANES * ld + c;
            REAL *to = panel + c * NR + j * LANES;
            if ((j + 1) * LANES <= count && c + LANES <= n) {
                UNROLL for (int i = 0; i < LANES; i++) r[i] = loadu(from + i * ld) * factor;
                transpose(r);
                UNROLL for (int i = 0; i < LANES; i++) store(to + i * NR, r[i]);
                continue;
            }
            for (int i = 0; i < LANES; i++) {
                r[i] = zero();
                if (j * LANES + i < count) r[i] = loadu(from + i * ld) * factor;
            }
            transpose(r);
            for (int i = 0; i < LANES && c + i < n; i++) store(to + i * NR, r[i]);
        }
}

/* The other way round: panel[c][lane] * factor[lane] -> rows. */
NOINLINE void panel_to_rows(const REAL *panel, const REAL *factor, int64_t n, REAL *rows, int64_t ld)
{
    for (int j = 0; j < VR; j++) {
        const vec f = load(factor + j * LANES);
        for (int64_t c = 0; c < n; c += LANES) {
            vec r[VBYTES / sizeof(REAL)];
            UNROLL for (int i = 0; i < LANES; i++) {
                r[i] = zero();
                if (c + i < n) r[i] = load(panel + (c + i) * NR + j * LANES) * f;
            }
            transpose(r);
            UNROLL for (int i = 0; i < LANES; i++) storeu(rows + (j * LANES + i) * ld + c, r[i]);
        }
    }
}

#if defined(BURST_AMX) && !(defined(BURST_PIECES) && BURST_PIECES > 1)
typedef uint16_t words_of_row __attribute__((vector_size(64), aligned(2), may_alias));

/* The same, rounded to rows of bfloat16, `apart` bytes from one to the next; n is a multiple of 32 */
NOINLINE void panel_to_bf16_rows(const REAL *panel, const REAL *factor, int64_t n, char *rows, int64_t apart)
{
    for (int j = 0; j < VR; j++, panel += LANES, rows += LANES * apart) {
        const vec f = load(factor + j * LANES);
        for (int64_t c = 0; c < n; c += 2 * LANES) {
            vec low[VBYTES / sizeof(REAL)], high[VBYTES / sizeof(REAL)];
            UNROLL for (int i = 0; i < LANES; i++) low[i] = load(panel + (c + i) * NR) * f;
            transpose(low);
            UNROLL for (int i = 0; i < LANES; i++) high[i] = load(panel + (c + LANES + i) * NR) * f;
            transpose(high);
            UNROLL for (int i = 0; i < LANES; i++)
                *(words_of_row *)(rows + i * apart + 2 * c) = (words_of_row)_mm512_cvtne2ps_pbh((__m512)high[i], (__m512)low[i]);
        }
    }
}
#endif

#endif
