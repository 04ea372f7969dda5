/* Forward: a group of query panels against the tiles of keys that it sees, into the running (out, lse).
 *
 *   S = K Q'                      in registers, KR keys x a panel at a time
 *   P = 2^(S - m),  l += sum P    still in registers; P to L1
 *   O' += V' P                    from L1
 *
 * There is no maximum in this loop: m is that of the first tile a lane sees, and stays.  A lane whose sum over a tile
 * reaches LIMIT has that tile done again by `tile_with_maximum`, the classic way, which also does first tiles.
 */
#ifndef BURST_FORWARD_H
#define BURST_FORWARD_H

#include "convert.h"
#include "products.h"
#include "tasks.h"

#ifndef BURST_KEYS_FORWARD
#define BURST_KEYS_FORWARD 192
#endif
#ifndef BURST_KEYS_BACKWARD
#define BURST_KEYS_BACKWARD 96 /* the unit in which tiles are counted */
#endif
_Static_assert(BURST_KEYS_FORWARD % BURST_KEYS_BACKWARD == 0, "a forward tile is whole backward tiles");
#define LIMIT ((REAL)0x1p40)

typedef struct {
    lanes q;
    REAL *query;    /* [d, NR] Q' times its factor */
    REAL *out;      /* [dv, NR] O', not yet divided by l */
    REAL *top, *l;  /* [NR] m, or -inf where the lane has seen no score above -inf; sum of P */
    REAL *ref;      /* [NR] m, or 0 there */
    int64_t row;    /* first row */
    int count;      /* rows */
    int unset;      /* some lane has no m yet */
} panel;

typedef struct {
    panel panels[BURST_PANELS];
    key_tile tile;
    REAL *p;         /* [keys, NR] */
    REAL *rows;      /* [NR, ld] on the way in and out of a panel */
    int64_t ld;
    bend how;
} forward_room;

INLINE void take_forward(arena *a, forward_room *w, const call *c)
{
    const burst_block *b = c->b;
    w->ld = ROUND_UP(MAX(b->d, b->dim_v), LANES) + LANES;
    take_tile(a, &w->tile, c, 0);
    w->p = TAKE(a, REAL, ROUND_UP(c->tile_keys, KR) * NR);
    w->rows = TAKE(a, REAL, NR * w->ld);
    for (int64_t i = 0; i < c->group_panels; i++) {
        panel *p = &w->panels[i];
        take_lanes(a, &p->q);
        p->query = TAKE(a, REAL, b->d * NR);
        p->out = TAKE(a, REAL, ROUND_UP(b->dim_v, KR) * NR);
        p->top = TAKE(a, REAL, NR);
        p->l = TAKE(a, REAL, NR);
        p->ref = TAKE(a, REAL, NR);
    }
}

/* ---------------------------------------------------------------- in and out of a panel */

NOINLINE void open_panel(panel *p, forward_room *w, const call *c, int64_t batch, int64_t head, int64_t index)
{
    const burst_block *b = c->b;
    p->row = index * NR;
    p->count = (int)MIN(NR, b->rows_q - p->row);
    set_lanes(&p->q, b, head, p->row, p->count);
    for (int i = 0; i < p->count; i++)
        load_row(row_at(&b->q, batch, p->row + i, head), b->q.step[3], b->d, w->rows + i * w->ld, (int)b->type);
    rows_to_panel(w->rows, w->ld, p->count, b->d, factor_of(b), p->query);
    memset(p->out, 0, ROUND_UP(b->dim_v, KR) * NR * sizeof(REAL));
    p->unset = 0;
    for (int i = 0; i < NR; i++) {
        const REAL lse = i >= p->count ? 0 : b->first ? (REAL)-INFINITY : *entry_at(&b->lse, batch, head, p->row + i);
        const int none = lse == (REAL)-INFINITY;
        const double exact = (double)lse * LOG2E;
        p->top[i] = (REAL)exact;
        p->ref[i] = none ? 0 : p->top[i];
        /* out stands for weight 2^exact; what rounding took from m goes into l */
        p->l[i] = none ? 0 : isinf(exact) ? 1 : (REAL)exp2(exact - (double)p->top[i]);
        p->unset |= none;
    }
    if (b->first) return;
    for (int i = 0; i < p->count; i++) {
        REAL *row = w->rows + i * w->ld;
        load_row(row_at(&b->out, batch, p->row + i, head), b->out.step[3], b->dim_v, row, TYPE_OF_REAL);
        for (int64_t j = 0; j < b->dim_v; j++) row[j] = p->l[i] == 0 ? 0 : row[j] * p->l[i];
    }
    rows_to_panel(w->rows, w->ld, p->count, b->dim_v, 1, p->out);
}

NOINLINE void close_panel(panel *p, forward_room *w, const call *c, int64_t batch, int64_t head)
{
    const burst_block *b = c->b;
    REAL inverse[NR] __attribute__((aligned(VBYTES)));
    for (int i = 0; i < NR; i++) inverse[i] = p->l[i] == 0 ? 1 : 1 / p->l[i];
    panel_to_rows(p->out, inverse, b->dim_v, w->rows, w->ld);
    const burst_array *to = b->final.data ? &b->final : &b->out;
    const int type = b->final.data ? (int)b->type : TYPE_OF_REAL;
    for (int i = 0; i < p->count; i++) {
        store_row(row_at(to, batch, p->row + i, head), to->step[3], b->dim_v, w->rows + i * w->ld, 1, type);
        *entry_at(&b->lse, batch, head, p->row + i) = (REAL)(((double)p->ref[i] + log2((double)p->l[i])) / LOG2E);
    }
}

/* ---------------------------------------------------------------- a tile */

/* P of a block that all lanes see in full and that no rule bends: registers only. */
NOINLINE void weigh_full(const REAL *k, int64_t ld, const REAL *query, int64_t d, const REAL *ref, REAL *p, vec *sum)
{
    vec s[KR][VR];
    score_block(k, ld, query, d, s);
    UNROLL for (int j = 0; j < VR; j++) {
        const vec m = load(ref + j * LANES);
        vec total = sum[j];
        UNROLL for (int i = 0; i < KR; i++) {
            const vec weight = exp2_vec(s[i][j] - m);
            store(p + i * NR + j * LANES, weight);
            total += weight;
        }
        sum[j] = total;
    }
}

/* Scores of a block into memory, bent and masked. */
NOINLINE void score_any(const key_tile *t, int64_t block, const lanes *q, const REAL *query, int64_t d, const bend *how,
                        REAL *s, REAL *slopes)
{
    vec acc[KR][VR];
    score_block(t->k + block * KR * t->ld_k, t->ld_k, query, d, acc);
    UNROLL for (int i = 0; i < KR; i++) UNROLL for (int j = 0; j < VR; j++) store(s + i * NR + j * LANES, acc[i][j]);
    const int cut = block_sight(t, q, block) != FULL;
    if (cut || how->softcap != 0 || how->alibi)
        bend_block(s, slopes, q, how, t->pos + block * KR, (int)MIN(KR, t->live - block * KR), cut);
}

NOINLINE void weigh_stored(REAL *p, int64_t keys, const REAL *ref, vec *sum)
{
    for (int j = 0; j < VR; j++) {
        const vec m = load(ref + j * LANES);
        for (int64_t i = 0; i < keys; i++) {
            const vec weight = exp2_vec(load(p + i * NR + j * LANES) - m);
            store(p + i * NR + j * LANES, weight);
            sum[j] += weight;
        }
    }
}

/* The classic way: scores to memory, their maximum, all that was summed so far to the new maximum, then P. */
NOINLINE void tile_with_maximum(panel *p, forward_room *w, int64_t from, int64_t to, int64_t d, int64_t dv, vec *sum)
{
    const int64_t keys = (to - from) * KR;
    for (int64_t block = from; block < to; block++)
        score_any(&w->tile, block, &p->q, p->query, d, &w->how, w->p + (block - from) * KR * NR, NULL);
    p->unset = 0;
    for (int j = 0; j < VR; j++) {
        const vec old = load(p->top + j * LANES);
        vec top = old;
        for (int64_t i = 0; i < keys; i++) top = larger(load(w->p + i * NR + j * LANES), top);
        const ivec none = top == (REAL)-INFINITY;
        const vec fade = pick(top == old, splat(1), exp2_vec(old - top));
        store(p->top + j * LANES, top);
        store(p->ref + j * LANES, pick(none, splat(0), top));
        store(p->l + j * LANES, load(p->l + j * LANES) * fade);
        for (int64_t c = 0; c < dv; c++) {
            REAL *o = p->out + c * NR + j * LANES;
            store(o, load(o) * fade);
        }
        p->unset |= any(none);
        sum[j] = (vec){0};
    }
    weigh_stored(w->p, keys, p->ref, sum);
}

INLINE int waits_for(const panel *p, const key_tile *t)
{
    INT low = t->block_min[0], high = t->block_max[0];
    for (int64_t i = 1; i < t->blocks; i++) low = MIN(low, t->block_min[i]), high = MAX(high, t->block_max[i]);
    for (int i = 0; i < NR; i++)
        if (p->top[i] == (REAL)-INFINITY && p->q.lo[i] <= high && p->q.hi[i] > low) return 1;
    return 0;
}

/* Returns how many counted tiles it computed. */
NOINLINE int forward_tile(panel *p, forward_room *w, const burst_block *b)
{
    const key_tile *t = &w->tile;
    int64_t from, to;
    int full;
    seen_blocks(t, &p->q, &from, &to, &full);
    if (from == to) return 0;
    const int plain = w->how.softcap == 0 && !w->how.alibi;
    vec sum[VR];
    UNROLL for (int j = 0; j < VR; j++) sum[j] = (vec){0};
    if (p->unset && waits_for(p, t)) {
        tile_with_maximum(p, w, from, to, b->d, b->dim_v, sum);
    } else {
        for (int64_t block = from; block < to; block++) {
            REAL *weights = w->p + (block - from) * KR * NR;
            if (plain && block_sight(t, &p->q, block) == FULL) {
                weigh_full(t->k + block * KR * t->ld_k, t->ld_k, p->query, b->d, p->ref, weights, sum);
            } else {
                score_any(t, block, &p->q, p->query, b->d, &w->how, weights, NULL);
                weigh_stored(weights, KR, p->ref, sum);
            }
        }
        ivec high = (ivec){0};
        UNROLL for (int j = 0; j < VR; j++) high |= ~(sum[j] < LIMIT); /* NaN as well */
        if (any(high)) tile_with_maximum(p, w, from, to, b->d, b->dim_v, sum);
    }
    UNROLL for (int j = 0; j < VR; j++) store(p->l + j * LANES, load(p->l + j * LANES) + sum[j]);
    const REAL *values = t->chunks + from * KR * KR;
    if (t->wild_v && !full)
        add_panel_carefully(values, t->chunk_stride, w->p, MIN(to * KR, t->live) - from * KR, p->out, b->dim_v, &p->q,
                            t->pos + from * KR);
    else
        add_panel(values, t->chunk_stride, w->p, (to - from) * KR, p->out, b->dim_v);
    return (int)((to * KR - 1) / BURST_KEYS_BACKWARD - from * KR / BURST_KEYS_BACKWARD + 1);
}

static void forward_worker(call *c, int thread, arena scratch)
{
    const burst_block *b = c->b;
    forward_room w;
    take_forward(&scratch, &w, c);
    w.how = bend_of(b);
    const int64_t share = b->heads / b->kv_heads;
    int64_t computed = 0, t;
    while ((t = atomic_fetch_add(&c->next, 1)) < c->tasks && carry_on(c, thread)) {
        int64_t batch, head, group;
        task_of(c, t, &batch, &head, &group);
        const int64_t first = group * c->group_panels, n = MIN(c->group_panels, c->panels - first);
        INT low = INT32_MAX, high = INT32_MIN;
        for (int64_t i = 0; i < n; i++) {
            open_panel(&w.panels[i], &w, c, batch, head, first + i);
            low = MIN(low, w.panels[i].q.lo_min);
            high = MAX(high, w.panels[i].q.hi_max);
        }
        for (int64_t index = 0; index < c->tiles; index++) {
            if (c->tile_max[index] < low || c->tile_min[index] >= high) continue;
            load_tile(&w.tile, c, batch, head / share, index, 0);
            for (int64_t i = 0; i < n; i++) {
                prefetch_tile(c, batch, head / share, index + 1, i, n);
                computed += forward_tile(&w.panels[i], &w, b);
                if (!carry_on(c, thread)) break;
            }
        }
        for (int64_t i = 0; i < n; i++) close_panel(&w.panels[i], &w, c, batch, head);
    }
    atomic_fetch_add(&c->computed, computed);
}

#endif
