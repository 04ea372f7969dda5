/* The products of amx.h by vdpbf16ps, for CPUs that have that instruction at the rate of an FMA and no AMX (Zen 4).
 *
 * Layouts are AMX's: a word of 32 bits is a pair of bfloat16 along the sum, so that one instruction takes two terms of
 * 16 sums.  A pair of the left factor is broadcast, the right factor's pairs are a vector, 8 x 3 sums (or 8 x 2, or 8 x 1) stay
 * in registers.  Sums are float32; subnormal products count as 0.  But V and K "turned" need not be: they lie in leaves, 8 columns of all pairs
 * of keys, then the next 8, so that a block reads one stream, and pairing rows is all that makes them.
 */
#ifndef BURST_DOT_H
#define BURST_DOT_H

#define DOT_ROWS 8
_Static_assert(NR % (3 * LANES) == 0 && NR % (2 * LANES) == 0 && KR == DOT_ROWS, "panels and blocks are whole register blocks");

typedef uint32_t pair __attribute__((may_alias, aligned(2)));

/* acc[i][j] += sum over `pairs` of a[i][pair] b[pair][j], for the vectors [FIRST, LAST); a[i][pair] is row i words and `step` times as many pairs
 * away */
INLINE void dot_more(const pair *a, int64_t row, const int step, const uint32_t *b, int64_t ld_b, int64_t pairs, vec acc[DOT_ROWS][3],
                     const int FIRST, const int LAST)
{
    for (int64_t n = 0; n < pairs; n++) {
        __m512bh right[3];
        UNROLL for (int j = FIRST; j < LAST; j++) right[j] = (__m512bh)_mm512_loadu_si512(b + n * ld_b + j * LANES);
        UNROLL for (int i = 0; i < DOT_ROWS; i++) {
            const __m512bh left = (__m512bh)_mm512_set1_epi32((int)a[i * row + n * step]);
            UNROLL for (int j = FIRST; j < LAST; j++) acc[i][j] = (vec)_mm512_dpbf16_ps((__m512)acc[i][j], left, right[j]);
        }
    }
}

INLINE void dot_clear(vec acc[DOT_ROWS][3], const int NV)
{
    UNROLL for (int i = 0; i < DOT_ROWS; i++) UNROLL for (int j = 0; j < NV; j++) acc[i][j] = (vec){0};
}

/* acc = a b, of NV vectors */
INLINE void dot_block(const bf16 *a, int64_t ld_a, const uint32_t *b, int64_t ld_b, int64_t pairs, vec acc[DOT_ROWS][3], const int NV)
{
    dot_clear(acc, NV);
    dot_more((const pair *)a, ld_a / 2, 1, b, ld_b, pairs, acc, 0, NV);
}

/* c += acc */
INLINE void dot_put(vec acc[DOT_ROWS][3], float *c, int64_t ld_c, const int NV)
{
    UNROLL for (int i = 0; i < DOT_ROWS; i++) UNROLL for (int j = 0; j < NV; j++) {
        float *at = c + i * ld_c + j * LANES;
        store(at, load(at) + acc[i][j]);
    }
}

INLINE void dot_add(const bf16 *a, int64_t ld_a, const uint32_t *b, int64_t ld_b, int64_t pairs, float *c, int64_t ld_c, const int NV)
{
    vec acc[DOT_ROWS][3];
    dot_block(a, ld_a, b, ld_b, pairs, acc, NV);
    dot_put(acc, c, ld_c, NV);
}

#define GROUP NR /* lanes whose scores are made at a time */
#define TERMS_OF(n) ROUND_UP(n, 2)          /* of a score of n columns: padding is zeros */
#define COLUMNS_OF(n) ROUND_UP(n, DOT_ROWS) /* of a sum over keys */

/* s[KR keys][NR] = k[KR keys][depth] q[depth][NR] */
NOINLINE void bf16_scores(rows_of k, pairs_of q, int64_t depth, float *s, int lane)
{
    for (; lane < NR; lane += 3 * LANES) {
        vec acc[DOT_ROWS][3];
        dot_block(k.at, k.ld, q.at + lane, q.ld, depth / 2, acc, 3);
        UNROLL for (int i = 0; i < DOT_ROWS; i++) UNROLL for (int j = 0; j < 3; j++) store(s + i * NR + lane + j * LANES, acc[i][j]);
    }
}

/* What a panel sees of some blocks of a tile: products leave out the rest, and P and dS need not be there */
typedef struct {
    edges of[VR / 3];
} parts;

INLINE void find_parts(parts *seen, const key_tile *t, const lanes *q, int64_t from, int64_t to)
{
    for (int i = 0; i < VR / 3; i++) find_edges(&seen->of[i], t, q, from, to, 3 * i);
}

/* Pairs of vectors that see something of a block, with those between them */
INLINE span pairs_seen(const parts *seen, int64_t block)
{
    span all = {VR, 0};
    for (int i = 0; i < VR / 3; i++) {
        const span s = seen->of[i].spans[block];
        if (s.first >= s.last) continue;
        all.first = MIN(all.first, 3 * i + s.first);
        all.last = 3 * i + s.last;
    }
    return (span){all.first / 2, (all.last + 1) / 2};
}

/* acc[c][j] += turned[c][keys] p[keys][j] of three vectors, run by run */
INLINE void dot_runs(const pair *a, const uint32_t *b, int64_t ld_b, const edges *edge, vec acc[DOT_ROWS][3])
{
    for (int i = 0; i < edge->n; i++) {
        const int64_t pairs = edge->runs[i].keys / 2;
        switch (edge->runs[i].seen.first * 4 + edge->runs[i].seen.last) {
        case 1: dot_more(a, 1, DOT_ROWS, b, ld_b, pairs, acc, 0, 1); break;
        case 2: dot_more(a, 1, DOT_ROWS, b, ld_b, pairs, acc, 0, 2); break;
        case 3: dot_more(a, 1, DOT_ROWS, b, ld_b, pairs, acc, 0, 3); break;
        case 6: dot_more(a, 1, DOT_ROWS, b, ld_b, pairs, acc, 1, 2); break;
        case 7: dot_more(a, 1, DOT_ROWS, b, ld_b, pairs, acc, 1, 3); break;
        case 11: dot_more(a, 1, DOT_ROWS, b, ld_b, pairs, acc, 2, 3); break;
        default: break; /* nobody */
        }
        a += DOT_ROWS * pairs;
        b += pairs * ld_b;
    }
}
NOINLINE void bf16_add_panel_runs(rows_of turned, pairs_of p, float *o, int64_t columns, const parts *seen)
{
    for (int i = 0; i < VR / 3; i++)
        for (int64_t c = 0; c < columns; c += DOT_ROWS) {
            const int lane = 3 * i * LANES;
            vec acc[DOT_ROWS][3];
            dot_clear(acc, 3);
            dot_runs((const pair *)(turned.at + c * turned.ld), p.at + lane, p.ld, &seen->of[i], acc);
            dot_put(acc, o + c * NR + lane, NR, 3);
        }
}

/* o[c][NR] += turned[c][keys] p[keys][NR]; seen may be NULL */
NOINLINE void bf16_add_panel(rows_of turned, pairs_of p, int64_t keys, float *o, int64_t columns, const parts *seen)
{
    if (seen) return bf16_add_panel_runs(turned, p, o, columns, seen);
    for (int lane = 0; lane < NR; lane += 3 * LANES)
        for (int64_t c = 0; c < columns; c += DOT_ROWS) {
            vec acc[DOT_ROWS][3];
            dot_clear(acc, 3);
            dot_more((const pair *)(turned.at + c * turned.ld), 1, DOT_ROWS, p.at + lane, p.ld, keys / 2, acc, 0, 3);
            dot_put(acc, o + c * NR + lane, NR, 3);
        }
}

/* g[keys][x.ld] += p[keys][NR] x[NR][x.ld], of n columns at least; seen may be NULL */
NOINLINE void bf16_add_rows(rows_of p, pairs_of x, float *g, int64_t keys, int64_t n, const parts *seen)
{
    for (int64_t c = 0; c < n; c += 2 * LANES)
        for (int64_t key = 0; key < keys; key += DOT_ROWS) {
            const span of = seen ? pairs_seen(seen, key / KR) : (span){0, VR / 2};
            const int64_t lane = of.first * 2 * LANES, pairs = (of.last - of.first) * LANES;
            if (pairs <= 0) continue;
            const bf16 *a = p.at + key * p.ld + lane;
            const uint32_t *b = x.at + lane / 2 * x.ld + c;
            if (n - c > LANES)
                dot_add(a, p.ld, b, x.ld, pairs, g + key * x.ld + c, x.ld, 2);
            else
                dot_add(a, p.ld, b, x.ld, pairs, g + key * x.ld + c, x.ld, 1);
        }
}

#endif
