/* AMX: bfloat16 products of 16 x 16 tiles, and how their operands are laid out.
 *
 * A tile product is C[16][16] += A[16][32] B[32][16]: A is 16 rows of 32 bfloat16; B is 16 rows of 16 words, word
 * (p, n) holding B[2p][n] and B[2p+1][n] ("paired rows"); C is float32.  The panel's lanes are the columns n, as
 * everywhere else, so that weights, masks and maxima are the vector code's:
 *
 *   S[key][lane]  = K[key][c] Q'[c][lane]     A: K's own rows         B: Q, pairs of columns c, once a panel
 *   O'[c][lane]  += V'[c][key] P[key][lane]   A: V turned, once a tile B: P, pairs of keys
 *   dV[key][c]   += P[key][q] dO[q][c]        A: P in rows            B: dO, pairs of queries, once a panel
 *
 * Inputs are exact; products are summed in float32.  What is rounded to bfloat16 is P and dS.
 */
#ifndef BURST_AMX_H
#define BURST_AMX_H

#include "state.h"

typedef uint16_t bf16;

#define STEP 32 /* bfloat16 that one tile product contracts over; keys of a block */
_Static_assert(NR % STEP == 0 && KR == STEP, "panels and blocks are whole tiles");

typedef struct {
    uint8_t palette, start, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* The palette is known: 8 tiles of 16 rows of 64 bytes.  (CPUID's leaves 0x1D and 0x1E may read zero in a guest.) */
INLINE void shape_tiles(void)
{
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = 16;
    }
    _tile_loadconfig(&shapes);
}

/* C0..C3 are tiles 0..3: two tiles of rows by two of columns; A is 4, 5 and B is 6, 7. */
#define LOAD_C(c, ld)                                        \
    _tile_loadd(0, (c), (ld)*4);                             \
    _tile_loadd(1, (c) + 16, (ld)*4);                        \
    _tile_loadd(2, (c) + 16 * (ld), (ld)*4);                 \
    _tile_loadd(3, (c) + 16 * (ld) + 16, (ld)*4)
#define STORE_C(c, ld)                                       \
    _tile_stored(0, (c), (ld)*4);                            \
    _tile_stored(1, (c) + 16, (ld)*4);                       \
    _tile_stored(2, (c) + 16 * (ld), (ld)*4);                \
    _tile_stored(3, (c) + 16 * (ld) + 16, (ld)*4)
#define ZERO_C()                                             \
    _tile_zero(0);                                           \
    _tile_zero(1);                                           \
    _tile_zero(2);                                           \
    _tile_zero(3)
#define MULTIPLY(a, ld_a, b, ld_b)                           \
    _tile_loadd(4, (a), (ld_a)*2);                           \
    _tile_loadd(6, (b), (ld_b)*4);                           \
    _tile_dpbf16ps(0, 4, 6);                                 \
    _tile_loadd(7, (b) + 16, (ld_b)*4);                      \
    _tile_dpbf16ps(1, 4, 7);                                 \
    _tile_loadd(5, (a) + 16 * (ld_a), (ld_a)*2);             \
    _tile_dpbf16ps(2, 5, 6);                                 \
    _tile_dpbf16ps(3, 5, 7)

/* s[32 keys][NR] = rows[32 keys][depth] panel[depth][NR]; depth a multiple of 32 */
NOINLINE void amx_scores(const bf16 *rows, int64_t ld, const uint32_t *panel, int64_t depth, float *s)
{
    for (int lane = 0; lane < NR; lane += 32) {
        ZERO_C();
        for (int64_t c = 0; c < depth; c += STEP) {
            MULTIPLY(rows + c, ld, panel + c / 2 * NR + lane, NR);
        }
        STORE_C(s + lane, NR);
    }
}

/* o[c][NR] += turned[c][keys] pairs[keys][NR], over `columns` (a multiple of 32) columns c */
NOINLINE void amx_add_panel(const bf16 *turned, int64_t ld, const uint32_t *pairs, int64_t keys, float *o, int64_t columns)
{
    for (int64_t c = 0; c < columns; c += 32)
        for (int lane = 0; lane < NR; lane += 32) {
            LOAD_C(o + c * NR + lane, NR);
            for (int64_t key = 0; key < keys; key += STEP) {
                MULTIPLY(turned + c * ld + key, ld, pairs + key / 2 * NR + lane, NR);
            }
            STORE_C(o + c * NR + lane, NR);
        }
}

/* g[keys][columns] += rows[keys][NR] pairs[NR][columns]; columns a multiple of 32 */
NOINLINE void amx_add_rows(const bf16 *rows, const uint32_t *pairs, float *g, int64_t keys, int64_t columns)
{
    for (int64_t c = 0; c < columns; c += 32)
        for (int64_t key = 0; key < keys; key += 32) {
            LOAD_C(g + key * columns + c, columns);
            for (int q = 0; q < NR; q += STEP) {
                MULTIPLY(rows + key * NR + q, NR, pairs + q / 2 * columns + c, columns);
            }
            STORE_C(g + key * columns + c, columns);
        }
}

/* ---------------------------------------------------------------- layouts */

/* One row of the caller's, zeros up to `padded`; returns whether an infinity or a NaN is in it. */
INLINE int copy_bf16(const char *src, int64_t step, int64_t n, int64_t padded, bf16 *dst)
{
    int wild = 0;
    if (step == 2)
        memcpy(dst, src, (size_t)n * 2);
    else
        for (int64_t c = 0; c < n; c++) memcpy(dst + c, src + c * step, 2);
    for (int64_t c = n; c < padded; c++) dst[c] = 0;
    for (int64_t c = 0; c < padded; c++) wild |= (dst[c] & 0x7f80) == 0x7f80;
    return wild;
}

INLINE vec paired(const bf16 *a, const bf16 *b) /* words of 16 elements of two rows */
{
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)a));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)b));
    return (vec)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

/* rows[NR][ld] -> words[depth / 2][NR]: pairs of columns */
NOINLINE void pair_columns(const bf16 *rows, int64_t ld, int64_t depth, uint32_t *words)
{
    for (int j = 0; j < VR; j++)
        for (int64_t w = 0; w < depth / 2; w += 16) {
            vec r[16];
            UNROLL for (int i = 0; i < 16; i++) r[i] = loadu((const float *)(rows + (j * 16 + i) * ld + 2 * w));
            transpose(r);
            UNROLL for (int i = 0; i < 16; i++) storeu((float *)(words + (w + i) * NR + j * 16), r[i]);
        }
}

/* rows[NR][ld] -> words[NR / 2][columns]: pairs of rows */
NOINLINE void pair_rows(const bf16 *rows, int64_t ld, int64_t columns, uint32_t *words)
{
    for (int i = 0; i < NR / 2; i++)
        for (int64_t c = 0; c < columns; c += 16)
            storeu((float *)(words + i * columns + c), paired(rows + 2 * i * ld + c, rows + (2 * i + 1) * ld + c));
}

/* rows[keys][ld] -> turned[columns][ld_turned] */
NOINLINE void turn(const bf16 *rows, int64_t ld, int64_t keys, int64_t columns, bf16 *turned, int64_t ld_turned)
{
    for (int64_t key = 0; key < keys; key += 32)
        for (int64_t c = 0; c < columns; c += 16) {
            vec r[16];
            UNROLL for (int i = 0; i < 16; i++)
                r[i] = paired(rows + (key + 2 * i) * ld + c, rows + (key + 2 * i + 1) * ld + c);
            transpose(r);
            UNROLL for (int i = 0; i < 16; i++) storeu((float *)(turned + (c + i) * ld_turned + key), r[i]);
        }
}

/* ---------------------------------------------------------------- a tile of keys */

typedef struct {
    key_tile at;                 /* positions only */
    bf16 *k, *v;                 /* [keys, ld] rows */
    bf16 *turned;                /* [dv, ld_turned] V (forward), [d, ld_turned] K (backward) */
    int64_t ld_k, ld_v, ld_turned;
} bf16_tile;

INLINE void take_bf16_tile(arena *a, bf16_tile *t, const call *c, int backward)
{
    const burst_block *b = c->b;
    const int64_t keys = ROUND_UP(c->tile_keys, STEP);
    t->ld_k = ROUND_UP(b->d, STEP) + STEP;
    t->ld_v = ROUND_UP(b->dim_v, STEP) + STEP;
    t->ld_turned = keys + STEP;
    take_positions(a, &t->at, c);
    t->k = TAKE(a, bf16, keys * t->ld_k);
    t->v = TAKE(a, bf16, keys * t->ld_v);
    t->turned = TAKE(a, bf16, ROUND_UP(backward ? b->d : b->dim_v, STEP) * t->ld_turned);
}

NOINLINE void load_bf16_tile(bf16_tile *t, const call *c, int64_t batch, int64_t head, int64_t index, int backward)
{
    const burst_block *b = c->b;
    const int64_t depth = ROUND_UP(b->d, STEP), width = ROUND_UP(b->dim_v, STEP);
    load_positions(&t->at, c, index);
    const int64_t keys = t->at.blocks * KR;
    for (int64_t i = 0; i < t->at.live; i++) {
        const int64_t row = t->at.first + i;
        t->at.wild_k |= copy_bf16(row_at(&b->k, batch, row, head), b->k.step[3], b->d, depth, t->k + i * t->ld_k);
        t->at.wild_v |= copy_bf16(row_at(&b->v, batch, row, head), b->v.step[3], b->dim_v, width, t->v + i * t->ld_v);
    }
    for (int64_t i = t->at.live; i < keys; i++) { /* P is 0 there, and 0 times what was left there must be 0 */
        memset(t->k + i * t->ld_k, 0, (size_t)depth * 2);
        memset(t->v + i * t->ld_v, 0, (size_t)width * 2);
    }
    if (backward)
        turn(t->k, t->ld_k, keys, depth, t->turned, t->ld_turned);
    else
        turn(t->v, t->ld_v, keys, width, t->turned, t->ld_turned);
}

/* ---------------------------------------------------------------- rounding to bfloat16 */

INLINE vec rounded(vec low, vec high) /* 32 bfloat16: low's 16, then high's */
{
    return (vec)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
INLINE vec interleave_low(vec a, vec b) /* a0 b0 a1 b1 ...: of the first 16 of 32 bfloat16 each */
{
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                           36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return (vec)_mm512_permutex2var_epi16((__m512i)a, order, (__m512i)b);
}
INLINE vec interleave_high(vec a, vec b)
{
    const __m512i order = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53,
                                           21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    return (vec)_mm512_permutex2var_epi16((__m512i)a, order, (__m512i)b);
}
INLINE void put(void *p, vec x) { storeu((float *)p, x); }

#endif
