/* Forward: a group of query panels against the tiles of keys that it sees, into the running (out, lse).
 *
 *   S = K Q'                      in registers, KR keys x a panel at a time
 *   P = 2^(S - m),  l += sum P    still in registers; P to L1 (with 16 registers: from L1 to L1, weigh.h)
 *   O' += V' P                    from L1
 *
 * There is no maximum in this loop: m is that of the first block a lane computes (`leading_block`), and stays.  A lane whose sum
 * over a tile reaches LIMIT has that tile done again by `tile_with_maximum`, the classic way, which raises it.
 */
#ifndef BURST_FORWARD_H
#define BURST_FORWARD_H

#include "products.h"
#include "state.h"
#include "weigh.h"

typedef struct {
    panel panels[BURST_PANELS];
    key_feed keys;
    REAL *p;         /* [keys, NR] */
    REAL *rows;      /* [NR, ld] on the way in and out of a panel */
    int64_t ld;
    bend how;
} forward_room;

INLINE void take_forward(arena *a, forward_room *w, const call *c)
{
    const burst_block *b = c->b;
    w->ld = ROUND_UP(MAX(b->d, b->dim_v), LANES) + LANES;
    take_keys(a, &w->keys, c, 0);
    w->p = TAKE(a, REAL, ROUND_UP(c->tile_keys, KR) * NR);
    w->rows = TAKE(a, REAL, NR * w->ld);
    for (int64_t i = 0; i < c->most_panels; i++) {
        panel *p = &w->panels[i];
        take_state(a, p, b->dim_v);
        p->query = TAKE(a, REAL, b->d * NR);
    }
}

NOINLINE void open_panel(panel *p, forward_room *w, const call *c, int64_t batch, int64_t head, int64_t index)
{
    const burst_block *b = c->b;
    open_state(p, c, batch, head, index, w->rows, w->ld);
    if (is_even(&b->q, b->d, (int)b->type)) {
        const REAL *rows = (const REAL *)row_at(&b->q, batch, p->row, head);
        rows_to_panel(rows, b->q.step[1] / (int64_t)sizeof(REAL), p->count, b->d, factor_of(b), p->query);
        return;
    }
    pack_rows(&b->q, b->d, (int)b->type, batch, head, p->row, 0, p->count, w->rows, w->ld);
    rows_to_panel(w->rows, w->ld, p->count, b->d, factor_of(b), p->query);
}

/* ---------------------------------------------------------------- a tile */

/* P of a block with no softcap: registers only.  Where it is cut, NV vectors from `first` see something of it, and
 * hidden pairs are 0 whatever came out there. */
INLINE void weigh_block(const REAL *k, int64_t leaf, const REAL *query, int64_t d, const REAL *ref, REAL *p, vec *sum,
                        const lanes *q, const INT *pos, const int alibi, const int cut, int first, const int NV, const char *const *soon)
{
    vec s[KR][VR];
    score_block(k, leaf, query + first * LANES, d, s, NV, soon);
    if (alibi) UNROLL for (int j = 0; j < NV; j++) UNROLL for (int i = 0; i < KR; i++) s[i][j] = tilted(q, first + j, pos[i], s[i][j]);
    UNROLL for (int j = 0; j < NV; j++) {
        const vec m = load(ref + (first + j) * LANES);
        vec total = sum[first + j];
        UNROLL for (int i = 0; i < KR; i++) {
            vec weight = exp2_vec(fused(s[i][j], LOG2E, m));
            if (cut) weight = if_seen(q, first + j, pos[i], weight, zero());
            store(p + i * NR + (first + j) * LANES, weight);
            total += weight;
        }
        sum[first + j] = total;
    }
}

/* Scores of a block as they are, into memory */
INLINE void score_only(const REAL *k, int64_t leaf, const REAL *query, int64_t d, REAL *s, const char *const *soon)
{
    vec acc[KR][VR];
    score_block(k, leaf, query, d, acc, VR, soon);
    UNROLL for (int i = 0; i < KR; i++) UNROLL for (int j = 0; j < VR; j++) store(s + i * NR + j * LANES, acc[i][j]);
}

/* P of n blocks, one after another, that all lanes see.  Returns whether the tile must be done again; behind them products have
 * `rest` slots for wishes. */
NOINLINE int weigh_full(const REAL *k, int64_t leaf, const REAL *query, int64_t d, int64_t n, const REAL *ref, REAL *p, vec *sum, wishes *w,
                        int64_t rest)
{
    const int64_t slots = d / ASK;
    for (int64_t i = 0; i < n; i++) {
        const REAL *keys = k + i * KR * KR;
        REAL *to = p + i * KR * NR;
        const char *const *soon = wish(w, slots, (n - 1 - i) * slots + rest);
        if (WEIGH_LATER)
            score_only(keys, leaf, query, d, to, soon);
        else
            weigh_block(keys, leaf, query, d, ref, to, sum, NULL, NULL, 0, 0, 0, VR, soon);
    }
    return WEIGH_LATER && weigh_scores(p, n * KR, ref, NULL, sum);
}

NOINLINE void weigh_tilted(const REAL *k, int64_t leaf, const REAL *query, int64_t d, const REAL *ref, REAL *p, vec *sum,
                           const lanes *q, const INT *pos, const char *const *soon)
{
    weigh_block(k, leaf, query, d, ref, p, sum, q, pos, 1, 0, 0, VR, soon);
}

NOINLINE void weigh_cut(const REAL *k, int64_t leaf, const REAL *query, int64_t d, const REAL *ref, REAL *p, vec *sum,
                        const lanes *q, const INT *pos, span seen, const char *const *soon)
{
    switch (seen.last - seen.first) {
    case 1: weigh_block(k, leaf, query, d, ref, p, sum, q, pos, 0, 1, seen.first, 1, soon); break;
    case 2: weigh_block(k, leaf, query, d, ref, p, sum, q, pos, 0, 1, seen.first, 2, soon); break;
    case 3: weigh_block(k, leaf, query, d, ref, p, sum, q, pos, 0, 1, 0, 3, soon); break;
    default: break;
    }
}

/* Scores of a block into memory, bent and masked. */
NOINLINE void score_any(const key_tile *t, int64_t block, const lanes *q, const REAL *query, int64_t d, const bend *how,
                        REAL *s, REAL *slopes, const char *const *soon)
{
    score_only(t->k + block * KR * KR, t->leaf, query, d, s, soon);
    const int cut = block_sight(t, q, block) != FULL;
    if (cut || how->softcap != 0 || how->alibi)
        bend_block(s, slopes, q, how, t->pos + block * KR, (int)MIN(KR, t->live - block * KR), cut);
}

NOINLINE void weigh_stored(REAL *p, int64_t keys, const panel *state, vec *sum)
{
    for (int j = 0; j < VR; j++) {
        const vec m = load(state->ref + j * LANES), low = load(state->low + j * LANES);
        vec total = sum[j];
        for (int64_t i = 0; i < keys; i++) {
            const vec weight = exp2_vec(fused(load(p + i * NR + j * LANES), LOG2E, m) - low);
            store(p + i * NR + j * LANES, weight);
            total += weight;
        }
        sum[j] = total;
    }
}

/* The classic way: scores to memory, their maximum, all that was summed so far to the new maximum, then P. */
NOINLINE void tile_with_maximum(panel *p, forward_room *w, int64_t from, int64_t to, int64_t d, int64_t dv, vec *sum, int64_t slots_behind)
{
    const int64_t keys = (to - from) * KR, slots = d / ASK;
    for (int64_t block = from; block < to; block++)
        score_any(&w->keys.tile, block, &p->q, p->query, d, &w->how, w->p + (block - from) * KR * NR, NULL,
                  wish(&w->keys.soon, slots, (to - block - 1) * slots + slots_behind));
    raise_maximum(p, w->p, keys, 1, dv, 0);
    UNROLL for (int j = 0; j < VR; j++) sum[j] = zero();
    weigh_stored(w->p, keys, p, sum);
}

/* Returns how many counted tiles it computed. */
NOINLINE int forward_tile(panel *p, forward_room *w, const call *c, const task *of)
{
    const burst_block *b = c->b;
    (void)of;
    const key_tile *t = &w->keys.tile;
    int64_t from, to;
    int full;
    seen_blocks(t, &p->q, &from, &to, &full);
    if (from == to) return 0;
    const int plain = w->how.softcap == 0, alibi = w->how.alibi;
    const int64_t keys = (to - from) * KR, slots_behind = keys / ASK * (ROUND_UP(b->dim_v, KR) / KR);
    edges edge;
    if (!full) find_edges(&edge, t, &p->q, from, to, 0);
    vec sum[VR];
    UNROLL for (int j = 0; j < VR; j++) sum[j] = (vec){0};
    if (p->wide || p->steep) {
        p->steep = MAX(0, p->steep - 1);
        tile_with_maximum(p, w, from, to, b->d, b->dim_v, sum, slots_behind);
    } else {
        const int64_t lead = p->unset ? leading_block(t, &p->q, from, to, alibi) : from;
        int strange = 0;
        for (int64_t i = from, n; i < to; i += n) {
            const int64_t block = i == from ? lead : i <= lead ? i - 1 : i;
            const int waits = p->unset && waits_for(p, t->block_min[block], t->block_max[block]);
            const int64_t slots = b->d / ASK, rest = (to - i - 1) * slots + slots_behind;
            REAL *weights = w->p + (block - from) * KR * NR;
            const REAL *k = t->k + block * KR * KR;
            const INT *pos = t->pos + block * KR;
            const int seen = full || block_sight(t, &p->q, block) == FULL;
            n = 1;
            if (plain && !waits && seen && !alibi) {
                if (!p->unset && i >= lead) while (i + n < to && (full || block_sight(t, &p->q, block + n) == FULL)) n++;
                strange |= weigh_full(k, t->leaf, p->query, b->d, n, p->ref, weights, sum, &w->keys.soon, (to - i - n) * slots + slots_behind);
            } else if (plain && !waits && seen) {
                weigh_tilted(k, t->leaf, p->query, b->d, p->ref, weights, sum, &p->q, pos, wish(&w->keys.soon, slots, rest));
            } else if (plain && !waits && !alibi) {
                weigh_cut(k, t->leaf, p->query, b->d, p->ref, weights, sum, &p->q, pos, edge.spans[block - from],
                          wish(&w->keys.soon, slots, rest));
            } else {
                score_any(t, block, &p->q, p->query, b->d, &w->how, weights, NULL, wish(&w->keys.soon, slots, rest));
                if (waits) raise_maximum(p, weights, KR, 1, b->dim_v, 1);
                weigh_stored(weights, KR, p, sum);
            }
        }
        if (p->wide || strange || too_high(sum, t->limit)) tile_with_maximum(p, w, from, to, b->d, b->dim_v, sum, slots_behind);
    }
    UNROLL for (int j = 0; j < VR; j++) store(p->l + j * LANES, load(p->l + j * LANES) + sum[j]);
    const REAL *values = t->v + from * KR * KR;
    if (t->wild_v && !full)
        add_panel_carefully(values, t->leaf, w->p, MIN(to * KR, t->live) - from * KR, p->out, b->dim_v, &p->q,
                            t->pos + from * KR);
    else if (full)
        add_panel(values, t->leaf, w->p, keys, p->out, b->dim_v, &w->keys.soon);
    else
        add_panel_runs(values, t->leaf, w->p, keys, edge.runs, edge.n, p->out, b->dim_v, &w->keys.soon);
    return (int)((to * KR - 1) / BURST_KEYS_BACKWARD - from * KR / BURST_KEYS_BACKWARD + 1);
}

#endif
