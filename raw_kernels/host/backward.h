/* Backward: a group of query panels against the tiles of keys that it sees.
 *
 *   S = K Q',  P = 2^(S - lse)             as forward computes and rounds them
 *   dP = V dO',  dS = P (dP - delta)       in registers; P and dS to L1
 *   dV += P dO,  dK += dS Q                from L1, into a tile's own sums
 *   dQ' += K' dS                           from L1, into the panel's own sums
 *
 * dQ is the group's alone.  dK and dV of a tile are shared by all groups that see it: each adds its sum once, in the
 * order of the tasks, whichever thread has it (`wait_for_turn`), so that bits do not depend on the threads.
 */
#ifndef BURST_BACKWARD_H
#define BURST_BACKWARD_H

#include "forward.h"
#include "gradient.h"

typedef struct {
    gradient_panel panels[BURST_PANELS];
    key_feed keys;
    REAL *p, *ds;    /* [keys, NR] */
    REAL *dk, *dv;   /* strips of [keys, width]: sums of this group for this tile */
    REAL *rows;      /* [NR, ld] */
    int64_t ld;
    bend how;
} backward_room;

INLINE int64_t strips_size(int64_t rows, int64_t columns) { return rows * ROUND_UP(columns, LANES); }

INLINE void take_backward(arena *a, backward_room *w, const call *c)
{
    const burst_block *b = c->b;
    const int64_t keys = ROUND_UP(c->tile_keys, KR);
    w->ld = ROUND_UP(MAX(b->d, b->dim_v), LANES) + LANES;
    take_keys(a, &w->keys, c, 1);
    w->p = TAKE(a, REAL, keys * NR);
    w->ds = TAKE(a, REAL, keys * NR);
    w->dk = TAKE(a, REAL, strips_size(keys, b->d));
    w->dv = TAKE(a, REAL, strips_size(keys, b->dim_v));
    w->rows = TAKE(a, REAL, NR * w->ld);
    for (int64_t i = 0; i < c->most_panels; i++) {
        gradient_panel *p = &w->panels[i];
        take_gradient(a, p, b->d);
        p->query = TAKE(a, REAL, b->d * NR);
        p->dout = TAKE(a, REAL, b->dim_v * NR);
        p->query_rows = TAKE(a, REAL, strips_size(NR, b->d));
        p->dout_rows = TAKE(a, REAL, strips_size(NR, b->dim_v));
    }
}

/* The rows of a panel as strips, [NR, width] one after another, and times factor as panel [n, NR]; rows and columns beyond
 * become 0.  Returns whether an infinity or a NaN is among them. */
NOINLINE int rows_to_strips(const burst_array *x, const burst_block *b, int64_t batch, int64_t head, int64_t row, int count, int64_t n,
                            REAL factor, REAL *panel, REAL *strips)
{
    burst_array part = *x;
    int64_t left = n;
    int wild = 0;
    for (int s = 0; s < strips_of(n); s++) {
        const int64_t width = strip_width(n, s) * LANES, live = MIN(width, left);
        if (count < NR || live < width) memset(strips, 0, NR * width * sizeof(REAL));
        wild |= pack_rows(&part, live, (int)b->type, batch, head, row, 0, count, strips, width);
        rows_to_panel(strips, width, count, live, factor, panel);
        part.data += width * part.step[3];
        strips += NR * width;
        panel += NR * width;
        left -= width;
    }
    return wild;
}

NOINLINE void open_gradient_panel(gradient_panel *p, backward_room *w, const call *c, int64_t batch, int64_t head, int64_t index)
{
    const burst_block *b = c->b;
    (void)w;
    open_gradient(p, c, batch, head, index);
    p->wild = rows_to_strips(&b->q, b, batch, head, p->row, p->count, b->d, factor_of(b), p->query, p->query_rows);
    p->wild |= rows_to_strips(&b->dout, b, batch, head, p->row, p->count, b->dim_v, 1, p->dout, p->dout_rows);
}

/* ---------------------------------------------------------------- a tile */

INLINE void weights_of(const REAL *s, const gradient_panel *q, REAL *p)
{
    for (int i = 0; i < KR; i++)
        UNROLL for (int j = 0; j < VR; j++) {
            const vec x = fused(load(s + i * NR + j * LANES), LOG2E, load(q->lse + j * LANES));
            store(p + i * NR + j * LANES, exp2_vec(x - load(q->lse_low + j * LANES)));
        }
}

/* P of a block with no softcap; where it is cut, NV vectors from `first` see something of it, and hidden pairs are 0
 * whatever came out there */
INLINE void weigh_block_again(const REAL *k, int64_t leaf, int64_t d, const gradient_panel *q, REAL *p, const INT *pos, const int alibi,
                              const int cut, int first, const int NV, const char *const *soon)
{
    vec s[KR][VR];
    score_block(k, leaf, (const REAL *)q->query + first * LANES, d, s, NV, soon);
    if (alibi) UNROLL for (int j = 0; j < NV; j++) UNROLL for (int i = 0; i < KR; i++) s[i][j] = tilted(&q->q, first + j, pos[i], s[i][j]);
    UNROLL for (int j = 0; j < NV; j++) {
        const int64_t lane = (first + j) * LANES;
        const vec lse = load(q->lse + lane), low = load(q->lse_low + lane);
        UNROLL for (int i = 0; i < KR; i++) {
            vec weight = exp2_vec(fused(s[i][j], LOG2E, lse) - low);
            if (cut) weight = if_seen(&q->q, first + j, pos[i], weight, zero());
            store(p + i * NR + lane, weight);
        }
    }
}
/* P of n blocks, one after another, that all lanes see; behind them products have `rest` slots for wishes */
NOINLINE void weigh_again(const REAL *k, int64_t leaf, int64_t d, int64_t n, const gradient_panel *q, REAL *p, wishes *w, int64_t rest)
{
    const int64_t slots = d / ASK;
    if (WEIGH_LATER) {
        for (int64_t i = 0; i < n; i++)
            score_only(k + i * KR * KR, leaf, q->query, d, p + i * KR * NR, wish(w, slots, (n - 1 - i) * slots + rest));
        if (!weigh_scores(p, n * KR, q->lse, q->lse_low, NULL)) return;
    }
    for (int64_t i = 0; i < n; i++)
        weigh_block_again(k + i * KR * KR, leaf, d, q, p + i * KR * NR, NULL, 0, 0, 0, VR, wish(w, slots, (n - 1 - i) * slots + rest));
}
NOINLINE void weigh_again_tilted(const REAL *k, int64_t leaf, int64_t d, const gradient_panel *q, REAL *p, const INT *pos,
                                 const char *const *soon)
{
    weigh_block_again(k, leaf, d, q, p, pos, 1, 0, 0, VR, soon);
}
/* Vectors that see nothing of a block: dK and dV take their zeros, as they go by other blocks. */
INLINE void clear_unseen(REAL *p, span seen)
{
    UNROLL for (int j = 0; j < VR; j++)
        if (j < seen.first || j >= seen.last) UNROLL for (int i = 0; i < KR; i++) store(p + i * NR + j * LANES, zero());
}
NOINLINE void weigh_again_cut(const REAL *k, int64_t leaf, int64_t d, const gradient_panel *q, REAL *p, const INT *pos, span seen,
                              const char *const *soon)
{
    clear_unseen(p, seen);
    switch (seen.last - seen.first) {
    case 1: weigh_block_again(k, leaf, d, q, p, pos, 0, 1, seen.first, 1, soon); break;
    case 2: weigh_block_again(k, leaf, d, q, p, pos, 0, 1, seen.first, 2, soon); break;
    case 3: weigh_block_again(k, leaf, d, q, p, pos, 0, 1, 0, 3, soon); break;
    default: break;
    }
}

/* dS = P (dP - delta), times the cap's slope where slopes holds it */
INLINE void slope_any(const REAL *v, int64_t leaf, int64_t dv, const gradient_panel *q, const REAL *p, REAL *ds, const INT *pos,
                      const int capped, const int cut, int first, const int NV, const char *const *soon)
{
    vec dp[KR][VR];
    score_block(v, leaf, (const REAL *)q->dout + first * LANES, dv, dp, NV, soon);
    UNROLL for (int j = 0; j < NV; j++) {
        const vec delta = load(q->delta + (first + j) * LANES);
        UNROLL for (int i = 0; i < KR; i++) {
            const int64_t at = i * NR + (first + j) * LANES;
            vec x = load(p + at) * (dp[i][j] - delta);
            if (capped) x *= load(ds + at);
            if (cut) x = if_seen(&q->q, first + j, pos[i], x, zero()); /* delta may be NaN */
            store(ds + at, x);
        }
    }
}
NOINLINE void slope_blocks(const REAL *v, int64_t leaf, int64_t dv, int64_t n, const gradient_panel *q, const REAL *p, REAL *ds, wishes *w,
                           int64_t rest)
{
    const int64_t slots = dv / ASK;
    for (int64_t i = 0; i < n; i++)
        slope_any(v + i * KR * KR, leaf, dv, q, p + i * KR * NR, ds + i * KR * NR, NULL, 0, 0, 0, VR, wish(w, slots, (n - 1 - i) * slots + rest));
}
NOINLINE void slope_cut(const REAL *v, int64_t leaf, int64_t dv, const gradient_panel *q, const REAL *p, REAL *ds, const INT *pos,
                        span seen, const char *const *soon)
{
    clear_unseen(ds, seen);
    switch (seen.last - seen.first) {
    case 1: slope_any(v, leaf, dv, q, p, ds, pos, 0, 1, seen.first, 1, soon); break;
    case 2: slope_any(v, leaf, dv, q, p, ds, pos, 0, 1, seen.first, 2, soon); break;
    case 3: slope_any(v, leaf, dv, q, p, ds, pos, 0, 1, 0, 3, soon); break;
    default: break;
    }
}
NOINLINE void slope_capped(const REAL *v, int64_t leaf, int64_t dv, const gradient_panel *q, const REAL *p, REAL *ds)
{
    slope_any(v, leaf, dv, q, p, ds, NULL, 1, 0, 0, VR, NULL);
}

NOINLINE int backward_tile(gradient_panel *p, backward_room *w, const call *c, const task *of)
{
    const burst_block *b = c->b;
    (void)of;
    const key_tile *t = &w->keys.tile;
    int64_t from, to;
    int full;
    seen_blocks(t, &p->q, &from, &to, &full);
    if (from == to) return 0;
    const int capped = w->how.softcap != 0, alibi = w->how.alibi;
    const int64_t keys = (to - from) * KR, slots_behind = keys / ASK * (ROUND_UP(b->d, KR) / KR);
    edges edge;
    if (!full) find_edges(&edge, t, &p->q, from, to, 0);
    for (int64_t block = from, n; block < to; block += n) {
        const int64_t slots = b->d / ASK, slots_v = b->dim_v / ASK;
        REAL *weights = w->p + (block - from) * KR * NR, *ds = w->ds + (block - from) * KR * NR;
        const int cut = !full && block_sight(t, &p->q, block) != FULL;
        const REAL *k = t->k + block * KR * KR, *v = t->v + block * KR * KR;
        const INT *pos = t->pos + block * KR;
        n = 1; /* a run of blocks: one product after the other, so that L1 holds Q' and then dO', and never both */
        if (!capped && !cut && !alibi)
            while (block + n < to && (full || block_sight(t, &p->q, block + n) == FULL)) n++;
        const int64_t more = (to - block - n) * (slots + slots_v) + slots_behind;
        if (!capped && !cut && !alibi) {
            weigh_again(k, t->leaf, b->d, n, p, weights, &w->keys.soon, n * slots_v + more);
        } else if (!capped && !cut) {
            weigh_again_tilted(k, t->leaf, b->d, p, weights, pos, wish(&w->keys.soon, slots, slots_v + more));
        } else if (!capped && !alibi) {
            weigh_again_cut(k, t->leaf, b->d, p, weights, pos, edge.spans[block - from], wish(&w->keys.soon, slots, slots_v + more));
        } else {
            score_any(t, block, &p->q, p->query, b->d, &w->how, weights, capped ? ds : NULL, NULL);
            weights_of(weights, p, weights);
            if (cut) hide_block(weights, &p->q, pos, KR); /* a lane whose lse is NaN must not reach keys that it does not see */
        }
        if (capped) {
            slope_capped(v, t->leaf, b->dim_v, p, weights, ds);
            if (cut) hide_block(ds, &p->q, pos, KR);
        } else if (cut) {
            slope_cut(v, t->leaf, b->dim_v, p, weights, ds, pos, edge.spans[block - from], wish(&w->keys.soon, slots_v, more));
        } else {
            slope_blocks(v, t->leaf, b->dim_v, n, p, weights, ds, &w->keys.soon, more);
        }
    }
    const int64_t all = ROUND_UP(BURST_KEYS_BACKWARD, KR);
    const int careful = !full && (t->wild_k || t->wild_v || p->wild);
    const REAL *rows = t->k + from * KR * KR;
    if (careful) {
        const INT *pos = t->pos + from * KR;
        const int64_t live = MIN(to * KR, t->live) - from * KR;
        add_rows_carefully(w->p, p->dout_rows, w->dv, from * KR, live, all, b->dim_v, &p->q, pos);
        add_rows_carefully(w->ds, p->query_rows, w->dk, from * KR, live, all, b->d, &p->q, pos);
        add_panel_carefully(rows, t->leaf, w->ds, live, p->dq, b->d, &p->q, pos);
    } else {
        const span *spans = full ? NULL : edge.spans;
        add_rows(w->p, p->dout_rows, w->dv, from * KR, keys, all, b->dim_v, spans);
        add_rows(w->ds, p->query_rows, w->dk, from * KR, keys, all, b->d, spans);
        if (full)
            add_panel(rows, t->leaf, w->ds, keys, p->dq, b->d, &w->keys.soon);
        else
            add_panel_runs(rows, t->leaf, w->ds, keys, edge.runs, edge.n, p->dq, b->d, &w->keys.soon);
    }
    return 1;
}

NOINLINE void add_to_keys(const key_tile *t, REAL *strips, const burst_array *sum, int type, int64_t batch, int64_t head, int64_t n,
                          REAL factor, const burst_array *final, int fresh)
{
    int64_t column = 0;
    for (int s = 0; s < strips_of(n); s++) {
        const int width = strip_width(n, s) * LANES;
        for (int64_t i = 0; i < t->live; i++)
            settle_row(sum, final, type, batch, t->first + i, head, column, MIN(width, n - column), strips + i * width, factor, fresh);
        strips += (int64_t)ROUND_UP(BURST_KEYS_BACKWARD, KR) * width;
        column += width;
    }
}

INLINE void clear_tile_sums(backward_room *w, const call *c)
{
    const int64_t keys = ROUND_UP(c->tile_keys, KR);
    memset(w->dk, 0, strips_size(keys, c->b->d) * sizeof(REAL));
    memset(w->dv, 0, strips_size(keys, c->b->dim_v) * sizeof(REAL));
}

/* This task's share of dK and dV of the tile */
INLINE void settle_tile_sums(backward_room *w, const call *c, const task *k, turns_of_tile mine)
{
    const burst_block *b = c->b;
    const int type = (int)b->type, fresh = is_fresh(b, mine);
    add_to_keys(&w->keys.tile, w->dk, &b->dk, type, k->batch, k->kv_head, b->d, (REAL)b->scale, final_of(&b->final_dk, mine), fresh);
    add_to_keys(&w->keys.tile, w->dv, &b->dv, type, k->batch, k->kv_head, b->dim_v, 1, final_of(&b->final_dv, mine), fresh);
}

#endif
