/* The products, on operands that lie in L1 and L2 as the registers want them.
 *
 *   score_block   S[key][lane]  = sum_c K[key][c] Q'[c][lane]        KR keys x a panel
 *   add_panel     O'[c][lane]  += sum_key V[key][c] P[key][lane]     KR columns x a panel  (forward; dQ)
 *   add_rows      G[key][c]    += sum_q P[key][q] R[q][c]            keys x WIDE vectors   (dV, dK)
 *
 * Lanes are queries: a panel is NR = VR * LANES of them, so that neither a row maximum nor a row sum ever crosses
 * lanes, and P is never transposed.  Each product starts from zero in registers and is added to memory once a tile:
 * blocked summation, which costs no time and triples the accuracy of long rows.
 */
#ifndef BURST_PRODUCTS_H
#define BURST_PRODUCTS_H

#include "vec.h"

#ifndef BURST_AMX /* which has its own: amx.h */

INLINE void score_block(const REAL *k,     /* [KR, d], row stride ld */
                        int64_t ld,
                        const REAL *panel, /* [d, NR] */
                        int64_t d, vec acc[KR][VR])
{
    UNROLL for (int i = 0; i < KR; i++) UNROLL for (int j = 0; j < VR; j++) acc[i][j] = (vec){0};
    for (int64_t c = 0; c < d; c++) {
        vec b[VR];
        UNROLL for (int j = 0; j < VR; j++) b[j] = load(panel + c * NR + j * LANES);
        UNROLL for (int i = 0; i < KR; i++) {
            const vec x = splat(k[i * ld + c]);
            UNROLL for (int j = 0; j < VR; j++) acc[i][j] += x * b[j];
        }
    }
}

/* Columns of V or K in chunks of KR: chunk[key][KR], so that one key's broadcasts share a cache line. */
#define CHUNK_STRIDE(keys) ((int64_t)(keys)*KR + 64 / (int)sizeof(REAL)) /* padded: powers of two would alias in L1 */

INLINE void add_chunk(const REAL *chunk, /* [keys, KR] */
                      const REAL *p,     /* [keys, NR] */
                      int64_t keys,
                      REAL *o)           /* [KR, NR] */
{
    vec acc[KR][VR];
    UNROLL for (int i = 0; i < KR; i++) UNROLL for (int j = 0; j < VR; j++) acc[i][j] = (vec){0};
    for (int64_t key = 0; key < keys; key++) {
        vec b[VR];
        UNROLL for (int j = 0; j < VR; j++) b[j] = load(p + key * NR + j * LANES);
        UNROLL for (int i = 0; i < KR; i++) {
            const vec x = splat(chunk[key * KR + i]);
            UNROLL for (int j = 0; j < VR; j++) acc[i][j] += x * b[j];
        }
    }
    UNROLL for (int i = 0; i < KR; i++) UNROLL for (int j = 0; j < VR; j++) {
        REAL *at = o + i * NR + j * LANES;
        store(at, load(at) + acc[i][j]);
    }
}

NOINLINE void add_panel(const REAL *chunks, int64_t stride, const REAL *p, int64_t keys, REAL *o, int64_t columns)
{
    for (int64_t c = 0; c * KR < columns; c++) add_chunk(chunks + c * stride, p, keys, o + c * KR * NR);
}

/* ---------------------------------------------------------------- dV and dK */

/* Rows are cut into strips of at most WIDE vectors, as even as can be: 5 vectors are 3 + 2, not 4 + 1. */
INLINE int strips_of(int64_t columns)
{
    const int64_t vectors = (columns + LANES - 1) / LANES;
    return (int)((vectors + WIDE - 1) / WIDE);
}
INLINE int strip_width(int64_t columns, int strip)
{
    const int64_t vectors = (columns + LANES - 1) / LANES, n = strips_of(columns);
    return (int)(vectors / n + (strip < vectors % n));
}

INLINE void add_row_block(const REAL *a,  /* [ROWS, NR] */
                          const REAL *r,  /* [NR, NV vectors] */
                          REAL *g,        /* [ROWS, NV vectors] */
                          const int ROWS, const int NV)
{
    vec acc[12][4];
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < NV; j++) acc[i][j] = (vec){0};
    for (int q = 0; q < NR; q++) {
        vec b[4];
        UNROLL for (int j = 0; j < NV; j++) b[j] = load(r + (q * NV + j) * LANES);
        UNROLL for (int i = 0; i < ROWS; i++) {
            const vec x = splat(a[i * NR + q]);
            UNROLL for (int j = 0; j < NV; j++) acc[i][j] += x * b[j];
        }
    }
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < NV; j++) {
        REAL *at = g + (i * NV + j) * LANES;
        store(at, load(at) + acc[i][j]);
    }
}

/* keys is a multiple of KR, hence even */
#define ADD_STRIP(NV, ROWS)                                                                          \
    NOINLINE void add_strip_##NV(const REAL *a, const REAL *r, REAL *g, int64_t keys)                \
    {                                                                                                \
        int64_t key = 0;                                                                             \
        for (; key + ROWS <= keys; key += ROWS)                                                      \
            add_row_block(a + key * NR, r, g + key * NV * LANES, ROWS, NV);                          \
        for (; key < keys; key += 2) add_row_block(a + key * NR, r, g + key * NV * LANES, 2, NV);    \
    }
#if WIDE == 4
ADD_STRIP(1, 12)
ADD_STRIP(2, 12)
ADD_STRIP(3, 8)
ADD_STRIP(4, 6)
#else
ADD_STRIP(1, 8)
ADD_STRIP(2, 6)
ADD_STRIP(3, 4)
#endif

/* g[strip][first + key][...] += a[key][q] r[strip][q][...], over all strips of a row; a strip of g has g_keys rows */
INLINE void add_rows(const REAL *a, const REAL *r, REAL *g, int64_t first, int64_t keys, int64_t g_keys, int64_t columns)
{
    for (int s = 0; s < strips_of(columns); s++) {
        const int nv = strip_width(columns, s);
        REAL *to = g + first * nv * LANES;
        switch (nv) {
        case 1: add_strip_1(a, r, to, keys); break;
        case 2: add_strip_2(a, r, to, keys); break;
#if WIDE == 4
        case 4: add_strip_4(a, r, to, keys); break;
#endif
        default: add_strip_3(a, r, to, keys);
        }
        r += (int64_t)NR * nv * LANES;
        g += g_keys * nv * LANES;
    }
}

#endif
#endif
