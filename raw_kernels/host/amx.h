/* AMX: bfloat16 products of 16 x 16 tiles, and how their operands are laid out.
 *
 * PIECES is 1 for bfloat16 and 3 for float32: a float32 is the exact sum of three bfloat16, x = x0 + x1 + x2, each
 * about 2^-9 of the one before, and of the nine products of two such sums the six largest keep float32's accuracy:
 *
 *   x y ~ x2 y0 + x1 y0 + x1 y1 + x0 y1 + x0 y2 + x0 y0        (what is left out is about 2^-25 of it)
 *
 * Six products at sixteen times the speed are still 2.7 times the vector units, 2.2 times where the clock falls (docs/host-tried.md).
 * Pieces lie in planes, one after another.
 *
 * A tile product is C[16][16] += A[16][32] B[32][16]: A is 16 rows of 32 bfloat16; B is 16 rows of 16 words, word
 * (p, n) holding B[2p][n] and B[2p+1][n] ("paired rows"); C is float32.  The panel's lanes are the columns n, as
 * everywhere else, so that weights, masks and maxima are the vector code's:
 *
 *   S[key][lane]  = K[key][c] Q'[c][lane]     A: K's own rows         B: Q, pairs of columns c, once a panel
 *   O'[c][lane]  += V'[c][key] P[key][lane]   A: V turned, once a tile B: P, pairs of keys
 *   dV[key][c]   += P[key][q] dO[q][c]        A: P in rows            B: dO, pairs of queries, once a panel
 *
 * Products are summed in float32.  With one piece, what is rounded to bfloat16 is P and dS; with three, nothing is.
 */
#ifndef BURST_AMX_H
#define BURST_AMX_H

#include "state.h"

typedef uint16_t bf16;

/* Q carries the scale where that rounds to float32; bfloat16 stays as it is, and its scores are multiplied. */
#define QUERY_FACTOR(b) (PIECES == 1 ? 1 : factor_of(b))
#define SCORE_FACTOR(b) (PIECES == 1 ? factor_of(b) : 1)

#ifndef BURST_PIECES
#define BURST_PIECES 1
#endif
#define PIECES BURST_PIECES

/* A product as a score, rounded as `scale_block` rounds it: log2(e) comes in the FMA behind it, whose error the row's maximum shares. */
INLINE vec scored(vec product, float factor)
{
    if (PIECES == 1) product *= factor;
    return product;
}

#define STEP 32 /* bfloat16 that one tile product contracts over; what rows are padded to */
_Static_assert(NR % STEP == 0 && STEP % KR == 0, "panels and tiles are whole steps");

enum { NOT_FINITE = 0x7f80, TALL_BF16 = (71 + 127) << 7 }; /* exponents, where bfloat16 has them */

/* A factor in planes */
typedef struct { const bf16 *at; int64_t ld, plane; } rows_of;
typedef struct { const uint32_t *at; int64_t ld, plane; } pairs_of;

/* Tile registers rest when they are not used for some hundred cycles, and take as many to come back.  So scores are made for a
 * group of lanes at a time, and the vector code between two such products is kept short. */
#ifdef BURST_DOT
#include "dot.h"
#else
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
#define LOAD_A(a, ld)                                        \
    _tile_loadd(4, (a), (ld)*2);                             \
    _tile_loadd(5, (a) + 16 * (ld), (ld)*2)
#define LOAD_B(b, ld)                                        \
    _tile_loadd(6, (b), (ld)*4);                             \
    _tile_loadd(7, (b) + 16, (ld)*4)
#define PRODUCTS()                                           \
    _tile_dpbf16ps(0, 4, 6);                                 \
    _tile_dpbf16ps(1, 4, 7);                                 \
    _tile_dpbf16ps(2, 5, 6);                                 \
    _tile_dpbf16ps(3, 5, 7)

/* C += A B for one step of 32, A from row and column of a given offset */
INLINE void multiply(rows_of a, int64_t offset_a, pairs_of b, int64_t offset_b)
{
    const bf16 *x = a.at + offset_a;
    const uint32_t *y = b.at + offset_b;
#if PIECES == 1
    LOAD_A(x, a.ld);
    LOAD_B(y, b.ld);
    PRODUCTS();
#else
    LOAD_A(x + 2 * a.plane, a.ld);
    LOAD_B(y, b.ld);
    PRODUCTS(); /* 2, 0 */
    LOAD_A(x + a.plane, a.ld);
    PRODUCTS(); /* 1, 0 */
    LOAD_B(y + b.plane, b.ld);
    PRODUCTS(); /* 1, 1 */
    LOAD_A(x, a.ld);
    PRODUCTS(); /* 0, 1 */
    LOAD_B(y + 2 * b.plane, b.ld);
    PRODUCTS(); /* 0, 2 */
    LOAD_B(y, b.ld);
    PRODUCTS(); /* 0, 0 */
#endif
}

#define GROUP 32 /* lanes whose scores are made at a time */
#define TERMS_OF(n) ROUND_UP(n, STEP)   /* of a score of n columns: padding is zeros */
#define COLUMNS_OF(n) ROUND_UP(n, STEP) /* of a sum over keys */
_Static_assert(KR == STEP && GROUP == 2 * LANES, "a block is a whole tile, a group a pair of vectors");

INLINE int in_span(span s, int group) { return s.first <= group && group < s.last; }

/* s[32 keys][NR] = k[32 keys][depth] q[depth][NR], of the lanes [lane, lane + GROUP); depth a multiple of 32 */
NOINLINE void bf16_scores(rows_of k, pairs_of q, int64_t depth, float *s, int lane)
{
    ZERO_C();
    for (int64_t c = 0; c < depth; c += STEP) multiply(k, c, q, c / 2 * NR + lane);
    STORE_C(s + lane, NR);
}

/* What a panel sees of some blocks of a tile: products leave out the rest, where weights are 0 */
typedef struct {
    span pairs[(BURST_KEYS_FORWARD + KR - 1) / KR]; /* of vectors, of each block */
} parts;

NOINLINE void find_parts(parts *seen, const key_tile *t, const lanes *q, int64_t from, int64_t to)
{
    for (int64_t block = from; block < to; block++) {
        span s = {VR / 2, 0};
        for (int j = 0; j < VR; j++)
            if (vector_sees(t, q, block, j)) {
                s.first = MIN(s.first, j / 2);
                s.last = j / 2 + 1;
            }
        seen->pairs[block - from] = s;
    }
}

/* o[c][NR] += turned[c][keys] p[keys][NR], over `columns` (a multiple of 32) columns c; seen may be NULL */
NOINLINE void bf16_add_panel(rows_of turned, pairs_of p, int64_t keys, float *o, int64_t columns, const parts *seen)
{
    struct { int64_t from, to; } range[NR / GROUP]; /* of keys, for each group of lanes */
    for (int g = 0; g < NR / GROUP; g++) {
        range[g].from = 0;
        range[g].to = keys;
        if (!seen) continue;
        while (range[g].from < range[g].to && !in_span(seen->pairs[range[g].from / KR], g)) range[g].from += KR;
        while (range[g].from < range[g].to && !in_span(seen->pairs[range[g].to / KR - 1], g)) range[g].to -= KR;
    }
    for (int64_t c = 0; c < columns; c += 32)
        for (int g = 0; g < NR / GROUP; g++) {
            float *to = o + c * NR + g * GROUP;
            if (range[g].from == range[g].to) continue;
            LOAD_C(to, NR);
            for (int64_t key = range[g].from; key < range[g].to; key += STEP)
                multiply(turned, c * turned.ld + key, p, key / 2 * NR + g * GROUP);
            STORE_C(to, NR);
        }
}

/* g[keys][x.ld] += p[keys][NR] x[NR][x.ld], of n columns at least; seen may be NULL */
NOINLINE void bf16_add_rows(rows_of p, pairs_of x, float *g, int64_t keys, int64_t n, const parts *seen)
{
    const int64_t columns = x.ld;
    for (int64_t c = 0; c < n; c += 32)
        for (int64_t key = 0; key < keys; key += KR) {
            const span groups = seen ? seen->pairs[key / KR] : (span){0, NR / GROUP};
            if (groups.first >= groups.last) continue;
            LOAD_C(g + key * columns + c, columns);
            for (int q = groups.first * GROUP; q < groups.last * GROUP; q += STEP) multiply(p, key * NR + q, x, q / 2 * columns + c);
            STORE_C(g + key * columns + c, columns);
        }
}
#endif /* BURST_DOT */

/* ---------------------------------------------------------------- layouts */

/* The leading piece of each lane, to nearest, still in place of a float32: x - leading(x) is exact. */
INLINE vec leading(vec x) { return (vec)(((ivec)x + 0x8000) & (INT)0xffff0000); }

typedef bf16 vec_of_bf16 __attribute__((vector_size(64), aligned(2), may_alias));
typedef bf16 eight_of_bf16 __attribute__((vector_size(16), aligned(2), may_alias));

/* Has bit 15 where a number is of exponent `strange` or more: an infinity or a NaN is */
#define MARKED(x, strange) (((x) & 0x7f80) + (bf16)(0x8000 - (strange)))
INLINE int is_marked(vec_of_bf16 any_of) { return any((ivec)(any_of & 0x8000)); }

#if PIECES == 3
/* One row of the caller's float32, times a factor, in three planes, zeros up to `padded`. */
INLINE int copy_row(const char *src, int64_t step, int64_t n, int64_t padded, bf16 *dst, int64_t plane, float factor, bf16 strange)
{
    (void)strange;
    for (int64_t c = 0; c < padded; c += LANES) {
        vec x = zero();
        if (step == 4 && c + LANES <= n)
            x = loadu((const float *)(src + 4 * c));
        else
            for (int64_t i = c; i < MIN(n, c + LANES); i++) x[i - c] = *(const float *)(src + i * step);
        x *= factor;
        for (int piece = 0; piece < PIECES; piece++) {
            const vec head = leading(x);
            _mm256_storeu_si256((__m256i *)(dst + piece * plane + c),
                                _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)head, 16)));
            x -= head;
        }
    }
    return 0; /* such input does not come here: burst_tame */
}
#else
/* One row of the caller's, zeros up to `padded`; returns whether a number of `strange` or more is in it, an infinity or a NaN. */
INLINE int copy_row(const char *src, int64_t step, int64_t n, int64_t padded, bf16 *dst, int64_t plane, float factor, bf16 strange)
{
    int wild = 0;
    int64_t c = 0;
    (void)plane, (void)factor;
    if (step == 2) {
        vec_of_bf16 any_wild = {0};
        eight_of_bf16 some_wild = {0};
        for (; c + 32 <= n; c += 32) {
            const vec_of_bf16 x = *(const vec_of_bf16 *)(src + 2 * c);
            any_wild |= MARKED(x, strange);
            *(vec_of_bf16 *)(dst + c) = x;
        }
        for (; c + 8 <= n; c += 8) {
            const eight_of_bf16 x = *(const eight_of_bf16 *)(src + 2 * c);
            some_wild |= MARKED(x, strange);
            *(eight_of_bf16 *)(dst + c) = x;
        }
        UNROLL for (int i = 0; i < 8; i++) wild |= some_wild[i] >> 15;
        wild |= is_marked(any_wild);
    }
    for (; c < n; c++) {
        memcpy(dst + c, src + c * step, 2);
        wild |= (dst[c] & 0x7f80) >= strange;
    }
    memset(dst + n, 0, (size_t)(padded - n) * 2);
    return wild;
}
#endif

/* Rows [0, count) of the caller's, `apart` bytes from one to the next */
INLINE int copy_rows(const char *src, int64_t apart, int64_t step, int64_t count, int64_t n, int64_t padded, bf16 *dst, int64_t ld,
                     int64_t plane, float factor, bf16 strange)
{
    int wild = 0;
    int64_t row = 0;
#if PIECES == 1
    if (step == 2 && n == padded) { /* whole vectors, one look for what is strange: with rests in the same loop documents of 512 take 2% longer */
        vec_of_bf16 any_wild = {0};
        for (; row < count; row++)
            for (int64_t c = 0; c < n; c += 32) {
                const vec_of_bf16 x = *(const vec_of_bf16 *)(src + row * apart + 2 * c);
                any_wild |= MARKED(x, strange);
                *(vec_of_bf16 *)(dst + row * ld + c) = x;
            }
        wild = is_marked(any_wild);
    }
#endif
    for (; row < count; row++) wild |= copy_row(src + row * apart, step, n, padded, dst + row * ld, plane, factor, strange);
    return wild;
}

INLINE vec paired(const bf16 *a, const bf16 *b) /* words of 16 elements of two rows */
{
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)a));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)b));
    return (vec)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

/* Whether a row's n columns are what kernels take, where they lie */
INLINE int lies_ready(const burst_array *x, int64_t n)
{
    return PIECES == 1 && x->step[3] == 2 && x->step[1] % 2 == 0 && n % STEP == 0;
}

/* rows[NR][ld] -> words[depth / 2][NR]: pairs of columns.  Returns whether a number of `strange` or more is among them. */
NOINLINE int pair_columns(const bf16 *rows, int64_t ld, int64_t depth, uint32_t *words, bf16 strange)
{
    vec_of_bf16 any_of = {0};
    for (int j = 0; j < VR; j++)
        for (int64_t w = 0; w < depth / 2; w += 16) {
            vec r[16];
            UNROLL for (int i = 0; i < 16; i++) {
                r[i] = (vec)_mm512_loadu_si512(rows + (j * 16 + i) * ld + 2 * w); /* the caller's may start anywhere */
                any_of |= MARKED((vec_of_bf16)r[i], strange);
            }
            transpose(r);
            UNROLL for (int i = 0; i < 16; i++) storeu((float *)(words + (w + i) * NR + j * 16), r[i]);
        }
    return is_marked(any_of);
}

/* rows[NR][ld] -> words[NR / 2][columns]: pairs of rows */
NOINLINE void pair_rows(const bf16 *rows, int64_t ld, int64_t columns, uint32_t *words)
{
    for (int i = 0; i < NR / 2; i++)
        for (int64_t c = 0; c < columns; c += 16)
            storeu((float *)(words + i * columns + c), paired(rows + 2 * i * ld + c, rows + (2 * i + 1) * ld + c));
}

#ifdef BURST_DOT
/* rows[keys][ld] -> leaves of 8 columns, [keys / 2][8] pairs of rows, 8 ld_turned apart; returns the same */
#define TURNED_KEY DOT_ROWS /* bfloat16 from one key to the next */
NOINLINE int turn(const bf16 *rows, int64_t ld, int64_t keys, int64_t columns, bf16 *turned, int64_t ld_turned, bf16 strange)
{
    vec_of_bf16 any_of = {0};
    for (int64_t key = 0; key < keys; key += 2)
        for (int64_t c = 0; c < columns; c += 16) {
            const vec words = paired(rows + key * ld + c, rows + (key + 1) * ld + c);
            any_of |= MARKED((vec_of_bf16)words, strange);
            _mm256_storeu_si256((__m256i *)(turned + c * ld_turned + key * TURNED_KEY), _mm512_castsi512_si256((__m512i)words));
            _mm256_storeu_si256((__m256i *)(turned + (c + 8) * ld_turned + key * TURNED_KEY), _mm512_extracti64x4_epi64((__m512i)words, 1));
        }
    return is_marked(any_of);
}
#else
#define TURNED_KEY 1
/* rows[keys][ld] -> turned[columns][ld_turned]; returns the same */
NOINLINE int turn(const bf16 *rows, int64_t ld, int64_t keys, int64_t columns, bf16 *turned, int64_t ld_turned, bf16 strange)
{
    vec_of_bf16 any_of = {0};
    for (int64_t key = 0; key < keys; key += 32)
        for (int64_t c = 0; c < columns; c += 16) {
            vec r[16];
            UNROLL for (int i = 0; i < 16; i++) {
                r[i] = paired(rows + (key + 2 * i) * ld + c, rows + (key + 2 * i + 1) * ld + c);
                any_of |= MARKED((vec_of_bf16)r[i], strange);
            }
            transpose(r);
            UNROLL for (int i = 0; i < 16; i++) storeu((float *)(turned + (c + i) * ld_turned + key), r[i]);
        }
    return is_marked(any_of);
}
#endif

/* ---------------------------------------------------------------- a tile of keys */

typedef struct {
    key_tile at;                 /* positions only */
    bf16 *k, *v;                 /* [PIECES, keys, ld] rows */
    bf16 *turned;                /* [PIECES, dv, ld_turned] V (forward), [PIECES, d, ld_turned] K (backward) */
    int64_t ld_k, ld_v, ld_turned, plane_k, plane_v, plane_turned;
} bf16_tile;

INLINE void take_bf16_tile(arena *a, bf16_tile *t, const call *c, int backward)
{
    const burst_block *b = c->b;
    const int64_t keys = ROUND_UP(c->tile_keys, STEP);
    t->ld_k = ROUND_UP(b->d, STEP) + STEP;
    t->ld_v = ROUND_UP(b->dim_v, STEP) + STEP;
    t->ld_turned = keys + (TURNED_KEY == 1 ? STEP : 4); /* powers of two would alias in L1 */
    t->plane_k = keys * t->ld_k;
    t->plane_v = keys * t->ld_v;
    t->plane_turned = ROUND_UP(backward ? b->d : b->dim_v, STEP) * t->ld_turned;
    take_positions(a, &t->at, c);
    t->k = TAKE(a, bf16, PIECES * t->plane_k);
    t->v = TAKE(a, bf16, PIECES * t->plane_v);
    t->turned = TAKE(a, bf16, PIECES * t->plane_turned);
}

INLINE rows_of keys_of(const bf16_tile *t, int64_t block)
{
    return (rows_of){t->k + block * KR * t->ld_k, t->ld_k, t->plane_k};
}
INLINE rows_of values_of(const bf16_tile *t, int64_t block)
{
    return (rows_of){t->v + block * KR * t->ld_v, t->ld_v, t->plane_v};
}
INLINE rows_of turned_of(const bf16_tile *t, int64_t block)
{
    return (rows_of){t->turned + block * KR * TURNED_KEY, t->ld_turned, t->plane_turned};
}

/* Rows of K or V of a tile from `first` on, and zeros up to whole steps: P is 0 there, and 0 times what was left there must be 0.
 * Returns whether a number of `strange` or more is among them. */
INLINE int load_rows(const burst_array *x, int64_t batch, int64_t head, const key_tile *at, int64_t first, int64_t n, bf16 *rows, int64_t ld,
                     int64_t plane, bf16 strange)
{
    const int64_t padded = ROUND_UP(n, STEP);
    const int found = copy_rows(row_at(x, batch, at->first + first, head), x->step[1], x->step[3], at->live - first, n, padded, rows + first * ld, ld,
                                plane, 1, strange);
    for (int piece = 0; piece < PIECES; piece++)
        for (int64_t i = at->live; i < ROUND_UP(at->live, STEP); i++) memset(rows + piece * plane + i * ld, 0, (size_t)padded * 2);
    return found;
}

NOINLINE void load_bf16_tile(bf16_tile *t, const call *c, int64_t batch, int64_t head, int64_t index, int backward)
{
    const burst_block *b = c->b;
    load_positions(&t->at, c, index);
    const int64_t keys = ROUND_UP(t->at.live, STEP), depth = ROUND_UP(b->d, STEP), width = ROUND_UP(b->dim_v, STEP);
    t->at.wild_k = load_rows(&b->k, batch, head, &t->at, 0, b->d, t->k, t->ld_k, t->plane_k, NOT_FINITE);
    /* Forward wants V turned alone: whole steps of keys from where they lie */
    const int64_t lying = !backward && lies_ready(&b->v, b->dim_v) ? t->at.live / STEP * STEP : 0;
    int tall = lying && turn((const bf16 *)row_at(&b->v, batch, t->at.first, head), b->v.step[1] / 2, lying, width, t->turned, t->ld_turned, TALL_BF16);
    if (lying < keys) tall |= load_rows(&b->v, batch, head, &t->at, lying, b->dim_v, t->v, t->ld_v, t->plane_v, TALL_BF16);
    if (tall) t->at.wild_v = look_at_rows(&b->v, b->dim_v, (int)b->type, batch, head, t->at.first, t->at.first + t->at.live, &t->at.limit);
    for (int piece = 0; piece < PIECES; piece++) {
        bf16 *turned = t->turned + piece * t->plane_turned;
        if (backward)
            turn(t->k + piece * t->plane_k, t->ld_k, keys, depth, turned, t->ld_turned, NOT_FINITE);
        else
            turn(t->v + piece * t->plane_v + lying * t->ld_v, t->ld_v, keys - lying, width, turned + lying * TURNED_KEY, t->ld_turned, TALL_BF16);
    }
}

/* The keys of a task, tile by tile: see tile.h.  A tile is loaded at once. */
typedef struct {
    bf16_tile tile;
    shares ahead;
} key_feed;

INLINE void take_keys(arena *a, key_feed *f, const call *c, int backward) { take_bf16_tile(a, &f->tile, c, backward); }
INLINE void expect_keys(key_feed *f, const call *c, int64_t index) { (void)f, (void)c, (void)index; }
INLINE void bring_keys(key_feed *f, const call *c, const task *k, int64_t turn, int64_t turns)
{
    (void)f, (void)c, (void)k, (void)turn, (void)turns;
}
INLINE void turn_to_keys(key_feed *f, const call *c, const task *k, int64_t index, int backward)
{
    load_bf16_tile(&f->tile, c, k->batch, k->kv_head, index, backward);
}
INLINE void ask_for(key_feed *f, const stream *s, int n)
{
    memcpy(f->ahead.of, s, (size_t)n * sizeof *s);
    f->ahead.n = n;
}
INLINE const key_tile *tile_of(const key_feed *f) { return &f->tile.at; }

/* Rows of Q or dO as pairs of columns and, where wanted, as pairs of rows: by way of `rows`, [NR, ld] in planes, but for whole panels that
 * can be taken from where they lie. */
NOINLINE int load_factor(const burst_array *x, int64_t batch, int64_t head, int64_t row, int count, int64_t n, float factor,
                         bf16 *rows, int64_t ld, uint32_t *columns, uint32_t *rows_paired)
{
    const int64_t padded = ROUND_UP(n, STEP), plane = NR * ld;
    const char *from = row_at(x, batch, row, head);
    if (count == NR && lies_ready(x, n)) {
        const int wild = pair_columns((const bf16 *)from, x->step[1] / 2, n, columns, NOT_FINITE);
        if (rows_paired) pair_rows((const bf16 *)from, x->step[1] / 2, n, rows_paired);
        return wild;
    }
    const int wild = copy_rows(from, x->step[1], x->step[3], count, n, padded, rows, ld, plane, factor, NOT_FINITE);
    for (int piece = 0; piece < PIECES; piece++) {
        for (int i = count; i < NR; i++) memset(rows + piece * plane + i * ld, 0, (size_t)padded * 2);
        pair_columns(rows + piece * plane, ld, padded, columns + piece * (padded / 2 * NR), NOT_FINITE);
        if (rows_paired) pair_rows(rows + piece * plane, ld, padded, rows_paired + piece * (NR / 2 * padded));
    }
    return wild;
}

/* ---------------------------------------------------------------- weights to bfloat16 */

INLINE void put(void *p, vec x) { storeu((float *)p, x); }

/* a0 b0 a1 b1 ...: of the first (or last) 16 of 32 bfloat16 each */
INLINE vec interleave(vec a, vec b, const int last)
{
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                           36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return (vec)_mm512_permutex2var_epi16((__m512i)a, _mm512_add_epi16(order, _mm512_set1_epi16(16 * last)), (__m512i)b);
}

#if PIECES == 1
/* 32 bfloat16: low's 16, then high's */
INLINE vec rounded(vec low, vec high) { return (vec)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

/* Two keys' weights of 16 lanes, as a pair */
INLINE vec pair_of(vec a, vec b)
{
    const vec both = rounded(a, b);
    return interleave(both, (vec)_mm512_shuffle_f32x4((__m512)both, (__m512)both, 0xee), 0);
}
INLINE void put_pair(uint32_t *pairs, int64_t plane, vec a, vec b)
{
    (void)plane;
    put(pairs, pair_of(a, b));
}

/* Two keys' weights x[key][half] of 32 lanes, in rows and, where wanted, as pairs */
INLINE void put_both(bf16 *rows, int64_t plane_rows, uint32_t *pairs, int64_t plane_pairs, vec x[2][2])
{
    (void)plane_rows, (void)plane_pairs;
    const vec row0 = rounded(x[0][0], x[0][1]), row1 = rounded(x[1][0], x[1][1]);
    put(rows, row0);
    put(rows + NR, row1);
    if (pairs) {
        put(pairs, interleave(row0, row1, 0));
        put(pairs + LANES, interleave(row0, row1, 1));
    }
}
#else
/* Weights are cut off, not rounded: three pieces of 8 bits are all 24 of them, and a word's upper half needs no work.  The
 * other factor's pieces are rounded to nearest, so that what is left out (2^-16 by 2^-9 of the product) has no sign of its own. */
#define UPPER _mm512_set1_epi32((INT)0xffff0000)
INLINE vec rest(vec x) { return x - (vec)_mm512_and_si512((__m512i)x, UPPER); }
INLINE vec upper_halves(vec low, vec high) /* a pair: of low and of high */
{
    return (vec)_mm512_ternarylogic_epi32(_mm512_srli_epi32((__m512i)low, 16), (__m512i)high, UPPER, 0xf8); /* a | (b & c) */
}

INLINE void put_pair(uint32_t *pairs, int64_t plane, vec a, vec b)
{
    UNROLL for (int piece = 0; piece < PIECES; piece++) {
        put(pairs + piece * plane, upper_halves(a, b));
        a = rest(a);
        b = rest(b);
    }
}

INLINE void put_both(bf16 *rows, int64_t plane_rows, uint32_t *pairs, int64_t plane_pairs, vec x[2][2])
{
    const __m512i heads = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                           21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    UNROLL for (int piece = 0; piece < PIECES; piece++) {
        UNROLL for (int r = 0; r < 2; r++)
            put(rows + piece * plane_rows + r * NR,
                (vec)_mm512_permutex2var_epi16((__m512i)x[r][0], heads, (__m512i)x[r][1]));
        if (pairs) UNROLL for (int i = 0; i < 2; i++)
            put(pairs + piece * plane_pairs + i * LANES, upper_halves(x[0][i], x[1][i]));
        UNROLL for (int r = 0; r < 2; r++) UNROLL for (int i = 0; i < 2; i++) x[r][i] = rest(x[r][i]);
    }
}
#endif

#endif
