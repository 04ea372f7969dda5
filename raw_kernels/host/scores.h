/* Scores that are more than a product: softcap, ALiBi, and who sees whom (see ../scores.h for the definition).
 *
 * The panel of Q carries the scale (scale / softcap where there is a cap), so that a score is a sum with no factor.
 * A weight is e^(s - m) = 2^(s log2(e) - m'), one FMA and one power of 2, with m' = m log2(e) rounded: that rounding
 * is the row's, so that it falls out of out, and lse = (m' + log2 l) ln 2 gives back exactly the scores' own unit.
 */
#ifndef BURST_HOST_SCORES_H
#define BURST_HOST_SCORES_H

#include "products.h"

/* What the lanes of a panel are and see.  A lane without a row is idle and has lo > hi. */
typedef struct {
    INT *lo, *hi, *at;                       /* [NR] */
    INT lo_min, lo_max, hi_min, hi_max;      /* over the rows */
    INT vector_lo[VR], vector_hi[VR];        /* least lo, largest hi of each vector's rows */
    REAL slope;                              /* ALiBi */
    int idle;                                /* some lanes are */
} lanes;

typedef struct {
    REAL softcap;  /* 0: none */
    int alibi;
} bend;

enum sight { HIDDEN, CUT, FULL };

INLINE enum sight sight_of(const lanes *q, INT pos_min, INT pos_max)
{
    if (pos_max < q->lo_min || pos_min >= q->hi_max) return HIDDEN;
    return pos_min >= q->lo_max && pos_max < q->hi_min ? FULL : CUT;
}

/* x in the lanes that see the key at pos, other elsewhere */
INLINE vec if_seen(const lanes *q, int j, INT pos, vec x, vec other)
{
    const ivec lo = loadi(q->lo + j * LANES), hi = loadi(q->hi + j * LANES);
#if defined(BURST_AVX512) && !defined(BURST_DOUBLE)
    const __m512i at = _mm512_set1_epi32(pos);
    const __mmask16 seen = _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask((__m512i)lo, at), (__m512i)hi, at);
    return (vec)_mm512_mask_blend_ps(seen, (__m512)other, (__m512)x);
#else
    return pick((lo <= pos) & (hi > pos), x, other);
#endif
}

INLINE vec to_real(ivec x) { return __builtin_convertvector(x, vec); }

/* ALiBi: x - slope |i - j| in the lanes of vector j.  The one place that rounds it, for forward and backward alike. */
INLINE vec tilted(const lanes *q, int j, INT pos, vec x)
{
    const vec apart = to_real((ivec)((uvec)loadi(q->at + j * LANES) - (UINT)pos)); /* of padding it may wrap; nobody sees that */
    return x - q->slope * (vec)((ivec)apart & ~(ivec)splat((REAL)-0.0));
}

/* s[i][lane]: products in, scores out, -inf where the lane does not see the key.  Keys from `live` on are padding.
 * Where slopes is given it gets d cap(x)/dx. */
NOINLINE void bend_block(REAL *s,         /* [KR, NR] */
                         REAL *slopes,    /* [KR, NR] or NULL */
                         const lanes *q, const bend *how, const INT *pos, int live, int cut)
{
    for (int i = 0; i < KR; i++)
        UNROLL for (int j = 0; j < VR; j++) {
            REAL *at = s + i * NR + j * LANES;
            vec x = load(at);
            if (how->softcap != 0) {
                const vec t = tanh_vec(x);
                if (slopes) store(slopes + i * NR + j * LANES, 1 - t * t);
                x = t * how->softcap;
            }
            if (how->alibi && i < live) x = tilted(q, j, pos[i], x);
            if (cut) x = i < live ? if_seen(q, j, pos[i], x, splat((REAL)-INFINITY)) : splat((REAL)-INFINITY);
            store(at, x);
        }
}

/* x = 0 where the lane does not see the key, whatever came out there */
NOINLINE void hide_block(REAL *x, const lanes *q, const INT *pos, int live)
{
    for (int i = 0; i < KR; i++)
        UNROLL for (int j = 0; j < VR; j++) {
            REAL *at = x + i * NR + j * LANES;
            store(at, i < live ? if_seen(q, j, pos[i], load(at), zero()) : zero());
        }
}

/* ---------------------------------------------------------------- infinities and NaN
 *
 * 0 * inf is NaN, so a hidden pair whose V (or K, Q, dO) is not finite would reach a row that must not see it.  Such
 * tiles, where they are cut, are added pair by pair.
 */
#ifndef BURST_AMX
NOINLINE void add_panel_carefully(const REAL *leaves, int64_t leaf, const REAL *p, int64_t keys, REAL *o, int64_t columns,
                                  const lanes *q, const INT *pos)
{
    for (int64_t c = 0; c < columns; c++)
        for (int64_t key = 0; key < keys; key++)
            for (int lane = 0; lane < NR; lane++)
                if (q->lo[lane] <= pos[key] && pos[key] < q->hi[lane])
                    o[c * NR + lane] += leaves[c / KR * leaf + key * KR + c % KR] * p[key * NR + lane];
}

NOINLINE void add_rows_carefully(const REAL *a, const REAL *r, REAL *g, int64_t first, int64_t keys, int64_t g_keys,
                                 int64_t columns, const lanes *q, const INT *pos)
{
    for (int s = 0; s < strips_of(columns); s++) {
        const int width = strip_width(columns, s) * LANES;
        for (int64_t key = 0; key < keys; key++)
            for (int lane = 0; lane < NR; lane++)
                if (q->lo[lane] <= pos[key] && pos[key] < q->hi[lane])
                    for (int c = 0; c < width; c++)
                        g[(first + key) * width + c] += a[key * NR + lane] * r[lane * width + c];
        r += (int64_t)NR * width;
        g += g_keys * width;
    }
}

#endif
#endif
