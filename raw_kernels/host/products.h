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

/* Which vectors [first, last) of three, or pairs of vectors of all, see something of a block of KR keys. */
typedef struct {
    int first, last;
} span;

/* Keys one after another of which the vectors [first, last) of three, and no others, see something. */
typedef struct {
    int64_t keys;
    span seen;
} run_of_keys;

#ifndef BURST_AMX /* which has its own: amx.h */

/* What a panel asks for while it computes a tile: a line every ASK columns or keys of its products, rather than many at once,
 * which would keep all of L1's fill buffers busy that the operands need. */
enum { ASK = 4, MOST_LINES = 1536, MOST_SLOTS = 128 };
typedef struct {
    int64_t next, n;
    const char *line[MOST_LINES + MOST_SLOTS]; /* behind the last one: lines that are there anyway */
} wishes;

/* The next lines for a product that has `slots` for them, or NULL; later products have `rest`.  What is too much for all of
 * them is asked for now, this product's share of it. */
INLINE const char *const *wish(wishes *w, int64_t slots, int64_t rest)
{
    if (w->next >= w->n || slots > MOST_SLOTS) return NULL;
    const int64_t over = w->n - w->next - slots - rest;
    if (over > 0)
        for (int64_t i = 0; i < over * slots; i += slots + rest) __builtin_prefetch(w->line[w->next++], 0, 3);
    const char *const *lines = w->line + w->next;
    w->next += slots;
    return lines;
}

/* sum[j] += *x b[j] for j < N, N up to 4.
 *
 * In assembly where x86 has FMA.  Left to the compiler, AVX2's 16 registers (12 sums, 3 of b, x) make it fetch b again for each sum, and
 * loads bind; with AVX-512 it orders loads and products worse.  One statement for all N: between two it moves sums from register to register.
 *
 * apart: each product fetches x itself, which is one instruction less and N - 1 loads more.  Of a column's broadcasts APART are taken so:
 * where a core's two threads share 4 instructions a cycle (Intel until Cascade Lake) they bind before FMA does. */
#ifndef APART
#define APART 2
#endif

/* In C where tests/cross has AVX-512 in C, and for the address sanitizer, which does not look into assembly */
#if !defined(BURST_GUARD) && (defined(BURST_AVX2) || (defined(BURST_AVX512) && defined(__AVX512F__)))
#define SUM(j) [s##j] "+&v"(sum[j])
#define FACTOR(j) [b##j] "v"(b[j])
#define ONCE BROADCAST " %[x], %[all]\n\t"
#define PRODUCT(j) MULTIPLY_ADD " %[b" #j "], %[all], %[s" #j "]\n\t"
#define PRODUCT_APART(j) MULTIPLY_ADD " %[x]" TO_ALL ", %[b" #j "], %[s" #j "]\n\t"

INLINE void add_multiples(vec *sum, const REAL *x, const vec *b, const int N, const int apart)
{
    vec all;
#ifdef BURST_AVX512
    switch (apart || N == 1 ? N : 0) {
    case 1: __asm__(PRODUCT_APART(0) : SUM(0) : [x] "m"(*x), FACTOR(0)); return;
    case 2: __asm__(PRODUCT_APART(0) PRODUCT_APART(1) : SUM(0), SUM(1) : [x] "m"(*x), FACTOR(0), FACTOR(1)); return;
    case 3:
        __asm__(PRODUCT_APART(0) PRODUCT_APART(1) PRODUCT_APART(2)
                : SUM(0), SUM(1), SUM(2) : [x] "m"(*x), FACTOR(0), FACTOR(1), FACTOR(2));
        return;
    case 4:
        __asm__(PRODUCT_APART(0) PRODUCT_APART(1) PRODUCT_APART(2) PRODUCT_APART(3)
                : SUM(0), SUM(1), SUM(2), SUM(3) : [x] "m"(*x), FACTOR(0), FACTOR(1), FACTOR(2), FACTOR(3));
        return;
    }
#endif
    (void)apart;
    switch (N) {
    case 1: __asm__(ONCE PRODUCT(0) : SUM(0), [all] "=&v"(all) : [x] "m"(*x), FACTOR(0)); return;
    case 2: __asm__(ONCE PRODUCT(0) PRODUCT(1) : SUM(0), SUM(1), [all] "=&v"(all) : [x] "m"(*x), FACTOR(0), FACTOR(1)); return;
    case 3:
        __asm__(ONCE PRODUCT(0) PRODUCT(1) PRODUCT(2)
                : SUM(0), SUM(1), SUM(2), [all] "=&v"(all) : [x] "m"(*x), FACTOR(0), FACTOR(1), FACTOR(2));
        return;
    case 4:
        __asm__(ONCE PRODUCT(0) PRODUCT(1) PRODUCT(2) PRODUCT(3)
                : SUM(0), SUM(1), SUM(2), SUM(3), [all] "=&v"(all) : [x] "m"(*x), FACTOR(0), FACTOR(1), FACTOR(2), FACTOR(3));
        return;
    }
}
#else
INLINE void add_multiples(vec *sum, const REAL *x, const vec *b, const int N, const int apart)
{
    (void)apart;
    const vec all = splat(*x);
    UNROLL for (int j = 0; j < N; j++) sum[j] += all * b[j];
}
#endif

/* One column's share of the scores */
INLINE void score_column(const REAL *k, const REAL *panel, vec acc[KR][VR], const int NV)
{
    vec b[VR];
    UNROLL for (int j = 0; j < NV; j++) b[j] = load(panel + j * LANES);
    UNROLL for (int i = 0; i < KR; i++) add_multiples(acc[i], k + i * KR, b, NV, i < APART);
}

INLINE void score_block(const REAL *k,     /* [d / KR][KR, KR], `leaf` apart */
                        int64_t leaf,
                        const REAL *panel, /* [d, NR], of which NV vectors count */
                        int64_t d, vec acc[KR][VR], const int NV,
                        const char *const *soon) /* [d / ASK]: lines that are asked for meanwhile, or NULL */
{
    UNROLL for (int i = 0; i < KR; i++) UNROLL for (int j = 0; j < NV; j++) acc[i][j] = (vec){0};
    for (; d >= KR; d -= KR, k += leaf, panel += KR * NR)
        UNROLL for (int c = 0; c < KR; c++) {
            if (c % ASK == 0 && soon) __builtin_prefetch(*soon++, 0, 3);
            score_column(k + c, panel + c * NR, acc, NV);
        }
    ONE_BY_ONE for (; d > 0; d--, k++, panel += NR) score_column(k, panel, acc, NV);
}

/* acc += a leaf's columns times p over keys, for the vectors [FIRST, LAST) of a panel */
INLINE void add_keys(const REAL *leaf, /* [keys, KR] */
                     const REAL *p,    /* [keys, NR]; keys is a multiple of ASK */
                     int64_t keys, vec acc[KR][VR], const int FIRST, const int LAST,
                     const char *const *soon) /* [keys / ASK] or NULL */
{
    for (int64_t key = 0; key < keys; key += ASK, leaf += ASK * KR, p += ASK * NR) {
        if (soon) __builtin_prefetch(*soon++, 0, 3);
        UNROLL for (int step = 0; step < ASK; step++) {
            vec b[VR];
            UNROLL for (int j = FIRST; j < LAST; j++) b[j] = load(p + step * NR + j * LANES);
            UNROLL for (int i = 0; i < KR; i++) add_multiples(acc[i] + FIRST, leaf + step * KR + i, b + FIRST, LAST - FIRST, i < APART);
        }
    }
}

INLINE void clear_sums(vec acc[KR][VR])
{
    UNROLL for (int i = 0; i < KR; i++) UNROLL for (int j = 0; j < VR; j++) acc[i][j] = (vec){0};
}
INLINE void add_sums(REAL *o, vec acc[KR][VR]) /* o: [KR, NR] */
{
    UNROLL for (int i = 0; i < KR; i++) UNROLL for (int j = 0; j < VR; j++) {
        REAL *at = o + i * NR + j * LANES;
        store(at, load(at) + acc[i][j]);
    }
}

/* o += rows' p; rows: [columns / KR][keys, KR], `leaf` apart, columns padded with zeros */
NOINLINE void add_panel(const REAL *rows, int64_t leaf, const REAL *p, int64_t keys, REAL *o, int64_t columns, wishes *w)
{
    for (int64_t c = 0; c < columns; c += KR, rows += leaf) {
        vec acc[KR][VR];
        clear_sums(acc);
        add_keys(rows, p, keys, acc, 0, VR, wish(w, keys / ASK, (columns - c - 1) / KR * (keys / ASK)));
        add_sums(o + c * NR, acc);
    }
}

_Static_assert(VR == 3, "the runs below");

/* The same where a panel sees the keys in part: what a whole vector does not see is not computed. */
NOINLINE void add_panel_runs(const REAL *rows, int64_t leaf, const REAL *p, int64_t keys, const run_of_keys *runs, int n, REAL *o,
                             int64_t columns, wishes *w)
{
    for (int64_t c = 0; c < columns; c += KR, rows += leaf) {
        vec acc[KR][VR];
        const REAL *row = rows, *weights = p;
        const char *const *soon = wish(w, keys / ASK, (columns - c - 1) / KR * (keys / ASK));
        clear_sums(acc);
        for (int i = 0; i < n; i++) {
            const int64_t some = runs[i].keys;
            switch (runs[i].seen.first * 4 + runs[i].seen.last) {
            case 1: add_keys(row, weights, some, acc, 0, 1, soon); break;
            case 2: add_keys(row, weights, some, acc, 0, 2, soon); break;
            case 3: add_keys(row, weights, some, acc, 0, 3, soon); break;
            case 6: add_keys(row, weights, some, acc, 1, 2, soon); break;
            case 7: add_keys(row, weights, some, acc, 1, 3, soon); break;
            case 11: add_keys(row, weights, some, acc, 2, 3, soon); break;
            default: break; /* nobody */
            }
            row += some * KR;
            weights += some * NR;
            if (soon) soon += some / ASK;
        }
        add_sums(o + c * NR, acc);
    }
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
                          int from, int to, /* of the NR rows of r: a is 0 elsewhere */
                          const int ROWS, const int NV)
{
    vec acc[12][4];
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < NV; j++) acc[i][j] = (vec){0};
    for (int q = from; q < to; q++) {
        vec b[4];
        UNROLL for (int j = 0; j < NV; j++) b[j] = load(r + (q * NV + j) * LANES);
        UNROLL for (int i = 0; i < ROWS; i++) add_multiples(acc[i], a + i * NR + q, b, NV, i < APART);
    }
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < NV; j++) {
        REAL *at = g + (i * NV + j) * LANES;
        store(at, load(at) + acc[i][j]);
    }
}

/* Lanes that count for the keys [key, key + n) */
NOINLINE span lanes_of(const span *spans, int64_t key, int64_t n)
{
    span s = spans[key / KR];
    for (int64_t block = key / KR + 1; block <= (key + n - 1) / KR; block++) {
        s.first = spans[block].first < s.first ? spans[block].first : s.first;
        s.last = spans[block].last > s.last ? spans[block].last : s.last;
    }
    return (span){s.first * LANES, s.last * LANES};
}

/* keys is a multiple of KR, hence even.  Without spans all lanes count: a loop of its own, whose length is known. */
#define ADD_STRIP(NV, ROWS)                                                                                    \
    NOINLINE void add_strip_##NV(const REAL *a, const REAL *r, REAL *g, int64_t keys)                          \
    {                                                                                                          \
        int64_t key = 0;                                                                                       \
        for (; key + ROWS <= keys; key += ROWS) add_row_block(a + key * NR, r, g + key * NV * LANES, 0, NR, ROWS, NV); \
        for (; key < keys; key += 2) add_row_block(a + key * NR, r, g + key * NV * LANES, 0, NR, 2, NV);       \
    }                                                                                                          \
    NOINLINE void add_strip_cut_##NV(const REAL *a, const REAL *r, REAL *g, int64_t keys, const span *spans)   \
    {                                                                                                          \
        int64_t key = 0;                                                                                       \
        for (; key + ROWS <= keys; key += ROWS) {                                                              \
            const span q = lanes_of(spans, key, ROWS);                                                         \
            add_row_block(a + key * NR, r, g + key * NV * LANES, q.first, q.last, ROWS, NV);                   \
        }                                                                                                      \
        for (; key < keys; key += 2) {                                                                         \
            const span q = lanes_of(spans, key, 2);                                                            \
            add_row_block(a + key * NR, r, g + key * NV * LANES, q.first, q.last, 2, NV);                      \
        }                                                                                                      \
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

/* g[strip][first + key][...] += a[key][q] r[strip][q][...], over all strips of a row; a strip of g has g_keys rows.  spans,
 * [keys / KR], may be NULL. */
INLINE void add_rows(const REAL *a, const REAL *r, REAL *g, int64_t first, int64_t keys, int64_t g_keys, int64_t columns,
                     const span *spans)
{
    for (int s = 0; s < strips_of(columns); s++) {
        const int nv = strip_width(columns, s);
        REAL *to = g + first * nv * LANES;
        switch (nv + (spans ? 4 : 0)) {
        case 1: add_strip_1(a, r, to, keys); break;
        case 2: add_strip_2(a, r, to, keys); break;
        case 3: add_strip_3(a, r, to, keys); break;
        case 5: add_strip_cut_1(a, r, to, keys, spans); break;
        case 6: add_strip_cut_2(a, r, to, keys, spans); break;
        case 7: add_strip_cut_3(a, r, to, keys, spans); break;
#if WIDE == 4
        case 4: add_strip_4(a, r, to, keys); break;
        case 8: add_strip_cut_4(a, r, to, keys, spans); break;
#endif
        }
        r += (int64_t)NR * nv * LANES;
        g += g_keys * nv * LANES;
    }
}

#endif
#endif
