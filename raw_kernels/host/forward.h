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

#include "products.h"
#include "state.h"

typedef struct {
    panel panels[BURST_PANELS];
    key_tile tile, next; /* of keys: that which is computed, that which is packed meanwhile */
    REAL *p;         /* [keys, NR] */
    REAL *rows;      /* [NR, ld] on the way in and out of a panel */
    int64_t ld;
    stream ahead[3]; /* K, V, Q */
    bend how;
} forward_room;

INLINE void take_forward(arena *a, forward_room *w, const call *c)
{
    const burst_block *b = c->b;
    w->ld = ROUND_UP(MAX(b->d, b->dim_v), LANES) + LANES;
    take_tile(a, &w->tile, c, 0);
    take_tile(a, &w->next, c, 0);
    w->p = TAKE(a, REAL, ROUND_UP(c->tile_keys, KR) * NR);
    w->rows = TAKE(a, REAL, NR * w->ld);
    for (int64_t i = 0; i < c->group_panels; i++) {
        panel *p = &w->panels[i];
        take_state(a, p, b->dim_v);
        p->query = TAKE(a, REAL, b->d * NR);
    }
}

NOINLINE void open_panel(panel *p, forward_room *w, const call *c, int64_t batch, int64_t head, int64_t index)
{
    const burst_block *b = c->b;
    open_state(p, c, batch, head, index, w->rows, w->ld);
    for (int i = 0; i < p->count; i++)
        load_row(row_at(&b->q, batch, p->row + i, head), b->q.step[3], b->d, w->rows + i * w->ld, (int)b->type);
    rows_to_panel(w->rows, w->ld, p->count, b->d, factor_of(b), p->query);
}

/* ---------------------------------------------------------------- a tile */

/* P of a block that no rule bends: registers only.  Where it is cut, hidden pairs are 0 whatever came out there. */
INLINE void weigh_block(const REAL *k, int64_t ld, const REAL *query, int64_t d, const REAL *ref, REAL *p, vec *sum,
                        const lanes *q, const INT *pos, const int cut)
{
    vec s[KR][VR];
    score_block(k, ld, query, d, s);
    UNROLL for (int j = 0; j < VR; j++) {
        const vec m = load(ref + j * LANES);
        vec total = sum[j];
        UNROLL for (int i = 0; i < KR; i++) {
            vec weight = exp2_vec(fused(s[i][j], LOG2E, m));
            if (cut) weight = if_seen(q, j, pos[i], weight, zero());
            store(p + i * NR + j * LANES, weight);
            total += weight;
        }
        sum[j] = total;
    }
}

NOINLINE void weigh_full(const REAL *k, int64_t ld, const REAL *query, int64_t d, const REAL *ref, REAL *p, vec *sum)
{
    weigh_block(k, ld, query, d, ref, p, sum, NULL, NULL, 0);
}

NOINLINE void weigh_cut(const REAL *k, int64_t ld, const REAL *query, int64_t d, const REAL *ref, REAL *p, vec *sum,
                        const lanes *q, const INT *pos)
{
    weigh_block(k, ld, query, d, ref, p, sum, q, pos, 1);
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

NOINLINE void weigh_stored(REAL *p, int64_t keys, const panel *state, vec *sum)
{
    for (int j = 0; j < VR; j++) {
        const vec m = load(state->ref + j * LANES), low = load(state->low + j * LANES);
        for (int64_t i = 0; i < keys; i++) {
            const vec weight = exp2_vec(fused(load(p + i * NR + j * LANES), LOG2E, m) - low);
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
    raise_maximum(p, w->p, keys, dv);
    UNROLL for (int j = 0; j < VR; j++) sum[j] = zero();
    weigh_stored(w->p, keys, p, sum);
}

/* A panel's first tile: any block that all lanes see gives each an m, and spares the tile the classic way. */
NOINLINE void first_maximum(panel *p, forward_room *w, int64_t from, int64_t to, const burst_block *b)
{
    while (from < to && block_sight(&w->tile, &p->q, from) != FULL) from++;
    if (from == to) return;
    score_any(&w->tile, from, &p->q, p->query, b->d, &w->how, w->p, NULL);
    raise_maximum(p, w->p, KR, b->dim_v);
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
    if (p->unset) first_maximum(p, w, from, to, b);
    if (p->wide || (p->unset && waits_for(p, t))) {
        tile_with_maximum(p, w, from, to, b->d, b->dim_v, sum);
    } else {
        for (int64_t block = from; block < to; block++) {
            ask_all(w->ahead, 3, to - block);
            REAL *weights = w->p + (block - from) * KR * NR;
            const REAL *k = t->k + block * KR * t->ld_k;
            if (plain && (full || block_sight(t, &p->q, block) == FULL)) {
                weigh_full(k, t->ld_k, p->query, b->d, p->ref, weights, sum);
            } else if (plain) {
                weigh_cut(k, t->ld_k, p->query, b->d, p->ref, weights, sum, &p->q, t->pos + block * KR);
            } else {
                score_any(t, block, &p->q, p->query, b->d, &w->how, weights, NULL);
                weigh_stored(weights, KR, p, sum);
            }
        }
        if (too_high(sum)) tile_with_maximum(p, w, from, to, b->d, b->dim_v, sum);
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

/* A task: panels are opened before their first tile and closed behind their last one, while their rows are in L1. */
static int64_t forward_task(forward_room *w, call *c, int thread, int64_t batch, int64_t head, int64_t group)
{
    const burst_block *b = c->b;
    const int64_t first = group * c->group_panels, n = MIN(c->group_panels, c->panels - first), kv_head = head / (b->heads / b->kv_heads);
    const extent seen = extent_of(b, first * NR, (first + n) * NR);
    int64_t computed = 0, index = next_tile(c, seen, 0);
    if (index == c->tiles)
        for (int64_t i = 0; i < n; i++) {
            open_panel(&w->panels[i], w, c, batch, head, first + i);
            close_panel(&w->panels[i], c, batch, head, w->rows, w->ld);
        }
    else {
        load_positions(&w->tile, c, index);
        pack_forward(&w->tile, c, batch, kv_head, 0, 1);
    }
    for (int opened = 0; index < c->tiles; opened = 1) {
        const int64_t after = next_tile(c, seen, index + 1);
        if (after < c->tiles) load_positions(&w->next, c, after);
        for (int64_t i = 0; i < n; i++) {
            panel *p = &w->panels[i];
            w->ahead[0].left = w->ahead[1].left = w->ahead[2].left = 0;
            if (after < c->tiles) stream_keys(w->ahead, &w->next, c, batch, kv_head, i, n);
            if (!opened) {
                open_panel(p, w, c, batch, head, first + i);
                const int64_t row = p->row + NR;
                w->ahead[2] = stream_of(&b->q, batch, head, row, i + 1 < n ? MIN(row + NR, b->rows_q) : row, b->d, (int)b->type);
            }
            computed += forward_tile(p, w, b);
            if (after < c->tiles)
                pack_forward(&w->next, c, batch, kv_head, i, n);
            else
                close_panel(p, c, batch, head, w->rows, w->ld);
            if (!carry_on(c, thread)) return computed;
        }
        const key_tile done = w->tile;
        w->tile = w->next;
        w->next = done;
        index = after;
    }
    return computed;
}

static void forward_worker(call *c, int thread, arena scratch)
{
    forward_room w;
    take_forward(&scratch, &w, c);
    w.how = bend_of(c->b);
    int64_t computed = 0, t;
    while ((t = atomic_fetch_add(&c->next, 1)) < c->tasks && carry_on(c, thread)) {
        int64_t batch, head, group;
        task_of(c, t, &batch, &head, &group);
        computed += forward_task(&w, c, thread, batch, head, group);
    }
    atomic_fetch_add(&c->computed, computed);
}

#endif
