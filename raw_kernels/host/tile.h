/* A tile of keys in scratch, and what a panel sees of it. */
#ifndef BURST_TILE_H
#define BURST_TILE_H

#include "convert.h"
#include "tasks.h"

#ifndef BURST_KEYS_FORWARD
#define BURST_KEYS_FORWARD 96
#endif
#ifndef BURST_KEYS_BACKWARD
#define BURST_KEYS_BACKWARD 96 /* the unit in which tiles are counted */
#endif
_Static_assert(BURST_KEYS_FORWARD % BURST_KEYS_BACKWARD == 0, "a forward tile is whole backward tiles");

typedef struct {
    REAL *k, *v;          /* [columns / KR][keys, KR], `leaf` apart: see pack_leaves */
    INT *pos;             /* [keys] */
    INT *block_min, *block_max; /* [blocks] */
    INT min, max;               /* of all */
    int64_t leaf;
    int64_t first, live, blocks; /* first key, keys, blocks of KR keys */
    int wild_k, wild_v;   /* an infinity or NaN is among them */
    REAL limit;           /* a lane whose sum of weights reaches this has the tile done again with a new m */
} key_tile;

/* The limit of most tiles; where V is TALL and more it is so much lower that O' stays finite over 2^13 tiles and more. */
#define LIMIT ((REAL)0x1p40)
#define TALL ((REAL)(sizeof(REAL) == 8 ? 0x1p967 : 0x1p71))
#define TO_OVERFLOW 0x1p57 /* TALL times this is infinite */

INLINE void take_positions(arena *a, key_tile *t, const call *c)
{
    const int64_t keys = ROUND_UP(c->tile_keys, KR);
    t->pos = TAKE(a, INT, keys);
    t->block_min = TAKE(a, INT, keys / KR);
    t->block_max = TAKE(a, INT, keys / KR);
}

INLINE void load_positions(key_tile *t, const call *c, int64_t index)
{
    t->first = tile_start(c, index);
    t->live = MIN(c->tile_keys, c->b->rows_k - t->first);
    t->blocks = ROUND_UP(t->live, KR) / KR;
    t->wild_k = t->wild_v = 0;
    t->limit = LIMIT;
    t->min = c->tile_min[index];
    t->max = c->tile_max[index];
    for (int64_t i = 0; i < t->live; i++) t->pos[i] = c->b->pos[t->first + i];
    for (int64_t i = t->live; i < t->blocks * KR; i++) t->pos[i] = INT32_MAX; /* nobody sees padding: hi is no more than that */
    for (int64_t block = 0; block < t->blocks; block++) {
        INT low = t->pos[block * KR], high = low;
        for (int64_t i = block * KR; i < MIN((block + 1) * KR, t->live); i++) {
            low = MIN(low, t->pos[i]);
            high = MAX(high, t->pos[i]);
        }
        t->block_min[block] = low;
        t->block_max[block] = high;
    }
}

/* Rows [from, to) of a tile, of K or V, hold something large or strange: whether an infinity or a NaN, and the limit that V's numbers ask for. */
NOINLINE int look_at_rows(const burst_array *x, int64_t n, int type, int64_t batch, int64_t head, int64_t from, int64_t to, REAL *limit)
{
    int wild = 0;
    word top = 0;
    for (int64_t row = from; row < to; row++)
        for (int64_t c = 0; c < n; c++) {
            const word size = magnitude(element(row_at(x, batch, row, head) + c * x->step[3], type));
            wild |= size >= INFINITE;
            top = MAX(top, size < INFINITE ? size : 0);
        }
    const int exponent = (int)(top >> MANTISSA) - (int)(magnitude(1) >> MANTISSA);
    if (limit && top >= magnitude(TALL)) *limit = MIN(*limit, (REAL)ldexp((double)LIMIT * (double)TALL, -exponent));
    return wild;
}

/* A group packs its next tile of keys piece by piece between its panels: `part` of `parts`, of pairs of keys. */
INLINE int64_t part_start(int64_t keys, int64_t part, int64_t parts) { return part == parts ? keys : keys * part / parts / 2 * 2; }

#ifndef BURST_AMX
INLINE void take_tile(arena *a, key_tile *t, const call *c)
{
    const burst_block *b = c->b;
    t->leaf = ROUND_UP(c->tile_keys, KR) * KR + 64 / (int64_t)sizeof(REAL); /* a line more: powers of two would alias in L1 */
    t->k = TAKE(a, REAL, ROUND_UP(b->d, KR) / KR * t->leaf);
    t->v = TAKE(a, REAL, ROUND_UP(b->dim_v, KR) / KR * t->leaf);
    take_positions(a, t, c);
}

/* Rows [from, to) of one head of an array, of any type and stride, as REAL.  Returns whether an infinity or a NaN is among
 * them. */
NOINLINE int pack_rows(const burst_array *x, int64_t n, int type, int64_t batch, int64_t head, int64_t first, int64_t from, int64_t to,
                     REAL *rows, int64_t ld)
{
    int wild = 0;
    if (is_dense(x, type))
        wild = load_rows_same((const REAL *)row_at(x, batch, first + from, head), x->step[1] / (int64_t)sizeof(REAL), to - from, n,
                              rows + from * ld, ld);
    else
        for (int64_t i = from; i < to; i++)
            wild |= load_row(row_at(x, batch, first + i, head), x->step[3], n, rows + i * ld, type);
    return wild;
}

/* Rows as leaves: KR columns of all rows, one row after another, then the next KR columns.  Both products read KR rows or KR columns
 * of a leaf at a time, from one address and in few lines; with whole rows one after another they would touch a line for each row. */
typedef REAL piece_of_row __attribute__((vector_size(KR * sizeof(REAL)), may_alias));
typedef REAL piece_unaligned __attribute__((vector_size(KR * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

/* The columns [first, n).  Returns whether an infinity, a NaN or a number near TALL is among them. */
INLINE int pack_pieces(const REAL *src, int64_t step, int64_t rows, int64_t first, int64_t n, REAL *to, int64_t leaf)
{
    piece_of_row spoilt[4] = {{0}}; /* sums that are not finite then */
    for (; rows > 0; rows--, src += step, to += KR) {
        REAL *at = to + first / KR * leaf;
        int64_t c = first;
        for (; c + 4 * KR <= n; c += 4 * KR)
            UNROLL for (int i = 0; i < 4; i++, at += leaf) {
                const piece_of_row x = *(const piece_unaligned *)(src + c + i * KR);
                spoilt[i] += x * (REAL)TO_OVERFLOW;
                *(piece_of_row *)at = x;
            }
        for (; c + KR <= n; c += KR, at += leaf) {
            const piece_of_row x = *(const piece_unaligned *)(src + c);
            spoilt[0] += x * (REAL)TO_OVERFLOW;
            *(piece_of_row *)at = x;
        }
        if (c < n) {
            piece_of_row x = {0};
            memcpy(&x, src + c, (size_t)(n - c) * sizeof(REAL));
            spoilt[0] += x * (REAL)TO_OVERFLOW;
            *(piece_of_row *)at = x;
        }
    }
    spoilt[0] += spoilt[1] + spoilt[2] + spoilt[3];
    int strange = 0;
    UNROLL for (int i = 0; i < KR; i++) strange |= spoilt[0][i] - spoilt[0][i] != 0;
    return strange;
}

#ifdef JOIN
/* Two rows at once, as their pieces are a vector; `whole` columns, in pairs of vectors */
INLINE int pack_pairs(const char *src, int64_t apart, int64_t pairs, int64_t whole, REAL *to, int64_t leaf, const int type)
{
    const int64_t size = SIZE_OF_TYPE[type];
    vec spoilt[4] = {{0}};
    for (; pairs > 0; pairs--, src += 2 * apart, to += 2 * KR) {
        REAL *at = to;
        for (int64_t c = 0; c < whole; c += 2 * LANES)
            UNROLL for (int i = 0; i < 2; i++, at += 2 * leaf) {
                const char *from = src + (c + i * LANES) * size;
                const vec a = fetch(from, type), b = fetch(from + apart, type);
                spoilt[2 * i] += a * (REAL)TO_OVERFLOW;
                spoilt[2 * i + 1] += b * (REAL)TO_OVERFLOW;
                storeu(at, JOIN(a, b, 0));
                storeu(at + leaf, JOIN(a, b, 1));
            }
    }
    spoilt[0] += spoilt[1] + spoilt[2] + spoilt[3];
    return any(spoilt[0] - spoilt[0] != 0);
}
#endif

/* Rows [from, to) of a tile, of any type and stride, their columns from `column` on */
INLINE int pack_rest(const burst_array *x, int64_t column, int64_t n, int type, int64_t batch, int64_t head, int64_t first, int64_t from,
                     int64_t to, REAL *leaves, int64_t leaf)
{
    enum { SOME = 64 };
    if (column >= n || from >= to) return 0;
    if (is_dense(x, type))
        return pack_pieces((const REAL *)row_at(x, batch, first + from, head), x->step[1] / (int64_t)sizeof(REAL), to - from, column, n,
                           leaves + from * KR, leaf);
    int strange = 0;
    for (int64_t i = from; i < to; i++) {
        const char *row = row_at(x, batch, first + i, head);
        for (int64_t c = column; c < n; c += SOME) {
            REAL room[SOME];
            const int64_t some = MIN(SOME, n - c);
            load_row(row + c * x->step[3], x->step[3], some, room, type);
            strange |= pack_pieces(room, 0, 1, 0, some, leaves + c / KR * leaf + i * KR, leaf);
        }
    }
    return strange;
}

/* Rows [from, to) of one head of an array; returns whether an infinity, a NaN or a number near TALL is among them. */
NOINLINE int pack_leaves(const burst_array *x, int64_t n, int type, int64_t batch, int64_t head, int64_t first, int64_t from, int64_t to,
                         REAL *leaves, int64_t leaf)
{
    int64_t whole = 0, paired = from; /* columns, and where rows end, that go two rows at once */
    int strange = 0;
#ifdef JOIN
    if (x->step[3] == SIZE_OF_TYPE[type] && n >= 2 * LANES) {
        const char *src = row_at(x, batch, first + from, head);
        const int64_t pairs = (to - from) / 2;
        REAL *at = leaves + from * KR;
        whole = n / (2 * LANES) * (2 * LANES);
        paired += 2 * pairs;
        if (type == BURST_F32)
            strange = pack_pairs(src, x->step[1], pairs, whole, at, leaf, BURST_F32);
        else if (type == BURST_F16)
            strange = pack_pairs(src, x->step[1], pairs, whole, at, leaf, BURST_F16);
        else
            strange = pack_pairs(src, x->step[1], pairs, whole, at, leaf, BURST_BF16);
    }
#endif
    strange |= pack_rest(x, whole, n, type, batch, head, first, from, paired, leaves, leaf);
    return strange | pack_rest(x, 0, n, type, batch, head, first, paired, to, leaves, leaf);
}

NOINLINE void pack_keys(key_tile *t, const call *c, int64_t batch, int64_t head, int64_t part, int64_t parts)
{
    const burst_block *b = c->b;
    const int64_t from = part_start(t->live, part, parts), to = part_start(t->live, part + 1, parts), padding = t->blocks * KR - t->live;
    if (pack_leaves(&b->k, b->d, (int)b->type, batch, head, t->first, from, to, t->k, t->leaf))
        t->wild_k |= look_at_rows(&b->k, b->d, (int)b->type, batch, head, t->first + from, t->first + to, NULL);
    if (pack_leaves(&b->v, b->dim_v, (int)b->type, batch, head, t->first, from, to, t->v, t->leaf))
        t->wild_v |= look_at_rows(&b->v, b->dim_v, (int)b->type, batch, head, t->first + from, t->first + to, &t->limit);
    if (to < t->live || !padding) return;
    /* P is 0 there, and 0 times it must be 0 */
    for (int64_t i = 0; i < b->d; i += KR) memset(t->k + i / KR * t->leaf + t->live * KR, 0, padding * KR * sizeof(REAL));
    for (int64_t i = 0; i < b->dim_v; i += KR) memset(t->v + i / KR * t->leaf + t->live * KR, 0, padding * KR * sizeof(REAL));
}
#endif

/* ---------------------------------------------------------------- rows that are wanted soon
 *
 * Rows of one head lie far apart, and the hardware does not guess them.  Their lines are asked for a few at a time,
 * between blocks: Zen 4 drops most of a burst of prefetches, and all that are for L2 alone.
 */
typedef struct {
    const char *at;                  /* row that is asked for now */
    int64_t step, line, lines, left; /* bytes to the next row; line of this row; lines of a row; lines that are left */
} stream;

INLINE stream stream_of(const burst_array *x, int64_t batch, int64_t head, int64_t from, int64_t to, int64_t n, int type)
{
    const int64_t size = SIZE_OF_TYPE[type];
    const char *at = row_at(x, batch, from, head);
    const int64_t over = (int64_t)((uintptr_t)at % 64); /* rows may start within a line, and then end within one more */
    const int64_t lines = x->step[3] == size ? (over + n * size + 63) / 64 : 0;
    return (stream){at - over, x->step[1], 0, lines, MAX(0, to - from) * lines};
}

INLINE void ask(stream *s, int64_t count)
{
    for (; count > 0 && s->left > 0; count--, s->left--) {
        __builtin_prefetch(s->at + 64 * s->line, 0, 3);
        if (++s->line == s->lines) {
            s->line = 0;
            s->at += s->step;
        }
    }
}

#ifndef BURST_AMX
typedef uintptr_t four __attribute__((vector_size(4 * sizeof(uintptr_t)), aligned(sizeof(uintptr_t)), may_alias));

/* Lines of `rows` rows, `lines` of each, and those behind up to `written`, which the next row overwrites */
INLINE const char **collect_rows(const char **to, const stream *s, int64_t rows, int64_t lines, const int64_t written)
{
    four at = (uintptr_t)s->at + (four){0, 64, 128, 192};
    for (; rows > 0; rows--, to += lines, at += (uintptr_t)s->step)
        for (int64_t line = 0; line < written; line += 4) *(four *)(to + line) = at + (uintptr_t)(64 * line);
    return to;
}

NOINLINE void collect(wishes *w, const stream *s, int n)
{
    const char **to = w->line;
    for (int i = 0; i < n; i++) {
        const int64_t lines = s[i].lines;
        if (!s[i].left) continue;
        const int64_t rows = MIN(s[i].left, w->line + MOST_LINES - to) / lines;
        if (lines <= 4) /* known lengths make loops with no end within */
            to = collect_rows(to, &s[i], rows, lines, 4);
        else if (lines <= 8)
            to = collect_rows(to, &s[i], rows, lines, 8);
        else
            to = collect_rows(to, &s[i], rows, lines, lines);
    }
    w->next = 0;
    w->n = to - w->line;
    for (int i = 0; i < MOST_SLOTS; i++) to[i] = (const char *)w;
}
#endif

enum { MOST_STREAMS = 9 }; /* that a panel asks for */

/* What is asked for in even shares, a turn each */
typedef struct {
    stream of[MOST_STREAMS];
    int64_t each[MOST_STREAMS];
    int n;
} shares;

INLINE void share_out(shares *s, int64_t turns)
{
    int n = 0;
    for (int i = 0; i < s->n; i++)
        if (s->of[i].left) {
            s->each[n] = (s->of[i].left + turns - 1) / turns;
            s->of[n++] = s->of[i];
        }
    s->n = n;
}
INLINE void ask_shares(shares *s, int64_t turns)
{
    for (int i = 0; i < s->n; i++) ask(&s->of[i], turns * s->each[i]);
}

/* Part `part` of `parts` of a tile, of K and V */
INLINE void stream_tile(stream s[2], const call *c, int64_t index, int64_t batch, int64_t kv_head, int64_t part, int64_t parts)
{
    const burst_block *b = c->b;
    const int64_t first = tile_start(c, index), live = MIN(c->tile_keys, b->rows_k - first);
    const int64_t from = first + part_start(live, part, parts), to = first + part_start(live, part + 1, parts);
    s[0] = stream_of(&b->k, batch, kv_head, from, to, b->d, (int)b->type);
    s[1] = stream_of(&b->v, batch, kv_head, from, to, b->dim_v, (int)b->type);
}

/* K and V of the tile `after` this one or, from a task's last tile on, of the first one of the task behind */
INLINE void stream_keys(stream s[2], const call *c, const task *k, int64_t after, const task *behind, int64_t turn, int64_t turns)
{
    if (after < k->end)
        stream_tile(s, c, after, k->batch, k->kv_head, turn, turns);
    else if (behind->start < behind->end)
        stream_tile(s, c, behind->start, behind->batch, behind->kv_head, turn, turns);
}

/* Rows of panel i, if it is still to be opened */
INLINE stream stream_panel(const burst_array *x, const call *c, const task *k, int64_t i, int64_t n)
{
    const int64_t row = (k->first + i) * NR, wanted = i < k->n && !k->opened[i];
    return stream_of(x, k->batch, k->head, row, wanted ? MIN(row + NR, c->b->rows_q) : row, n, (int)c->b->type);
}

INLINE enum sight block_sight(const key_tile *t, const lanes *q, int64_t block)
{
    const enum sight s = sight_of(q, t->block_min[block], t->block_max[block]);
    const int padded = (block + 1) * KR > t->live, wild = q->idle && (t->wild_k || t->wild_v); /* 0 * NaN is no zero */
    return s == FULL && (padded || wild) ? CUT : s;
}

/* Whether rows of vector j may see one of a block's keys */
INLINE int vector_sees(const key_tile *t, const lanes *q, int64_t block, int j)
{
    return t->block_max[block] >= q->vector_lo[j] && t->block_min[block] < q->vector_hi[j];
}

/* The block of a panel's first tile that gives each lane its m: one that all lanes see, as the largest of KR scores is seldom
 * far below that of the row, else the first.  With ALiBi the last such one: tiles come from the last keys on. */
INLINE int64_t leading_block(const key_tile *t, const lanes *q, int64_t from, int64_t to, int alibi)
{
    for (int64_t i = from; i < to; i++) {
        const int64_t block = alibi ? to - 1 - (i - from) : i;
        if (block_sight(t, q, block) == FULL) return block;
    }
    return from;
}

/* Whether all lanes see all keys of the blocks [from, to) */
INLINE int sees_all(const key_tile *t, const lanes *q, int64_t from, int64_t to)
{
    int all = 1;
    for (int64_t i = from; i < to; i++) all &= block_sight(t, q, i) == FULL;
    return all;
}

/* The blocks that a panel must compute: [*from, *to); *full tells that no lane misses any key of them. */
INLINE void seen_blocks(const key_tile *t, const lanes *q, int64_t *from, int64_t *to, int *full)
{
    int64_t a = 0, z = t->blocks;
    if (sight_of(q, t->min, t->max) == FULL && t->live == z * KR && !(q->idle && (t->wild_k || t->wild_v))) {
        *from = 0;
        *to = z;
        *full = 1;
        return;
    }
    while (a < z && block_sight(t, q, a) == HIDDEN) a++;
    while (z > a && block_sight(t, q, z - 1) == HIDDEN) z--;
    *full = sees_all(t, q, a, z);
    *from = a;
    *to = z;
}

#ifndef BURST_AMX
/* The keys of a task, tile by tile: the next one is packed, piece by piece, between the panels of this one.  The same verbs, in amx.h, are all that walk.h
 * knows of keys. */
typedef struct {
    key_tile tile, next;
    wishes soon; /* lines */
} key_feed;

INLINE void take_keys(arena *a, key_feed *f, const call *c, int backward)
{
    (void)backward;
    take_tile(a, &f->tile, c);
    take_tile(a, &f->next, c);
}

/* The tile behind this one is to be brought. */
INLINE void expect_keys(key_feed *f, const call *c, int64_t index) { load_positions(&f->next, c, index); }

/* Share `turn` of `turns` of it */
INLINE void bring_keys(key_feed *f, const call *c, const task *k, int64_t turn, int64_t turns)
{
    pack_keys(&f->next, c, k->batch, k->kv_head, turn, turns);
}

/* All of it is there. */
INLINE void turn_to_keys(key_feed *f, const call *c, const task *k, int64_t index, int backward)
{
    (void)c, (void)k, (void)index, (void)backward;
    const key_tile done = f->tile;
    f->tile = f->next;
    f->next = done;
}

INLINE void ask_for(key_feed *f, const stream *s, int n) { collect(&f->soon, s, n); }
INLINE const key_tile *tile_of(const key_feed *f) { return &f->tile; }
#endif

#if !TILE_REGISTERS
/* What three vectors of a panel see of the blocks [from, to) of a tile: of each one, and in runs of blocks that are alike. */
typedef struct {
    span spans[(BURST_KEYS_FORWARD + KR - 1) / KR];
    run_of_keys runs[(BURST_KEYS_FORWARD + KR - 1) / KR];
    int n;
} edges;

NOINLINE void find_edges(edges *e, const key_tile *t, const lanes *q, int64_t from, int64_t to, int vector)
{
    e->n = 0;
    for (int64_t block = from; block < to; block++) {
        span s = {3, 0};
        for (int j = 0; j < 3; j++)
            if (vector_sees(t, q, block, vector + j)) {
                s.first = MIN(s.first, j);
                s.last = j + 1;
            }
        if (block_sight(t, q, block) == FULL) s = (span){0, 3};
        e->spans[block - from] = s;
        run_of_keys *last = e->n ? &e->runs[e->n - 1] : NULL;
        if (last && last->seen.first == s.first && last->seen.last == s.last)
            last->keys += KR;
        else
            e->runs[e->n++] = (run_of_keys){KR, s};
    }
}
#endif

#endif
