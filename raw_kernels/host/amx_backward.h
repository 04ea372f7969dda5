/* Backward on AMX, in bfloat16 or in float32 by pieces, or by vdpbf16ps: see backward.h for the method and amx.h for the layouts. */
#ifndef BURST_AMX_BACKWARD_H
#define BURST_AMX_BACKWARD_H

#include "amx_forward.h"
#include "gradient.h"

typedef struct {
    gradient_panel panels[BURST_PANELS];
    bf16_tile tile;
    float *s[2], *dp[2];  /* [KR, NR] a block's scores, then P; dP, then dS; of this block and the next */
    float *slopes;        /* [KR, NR] of the cap */
    bf16 *p, *ds;         /* [PIECES, keys, NR] in rows */
    uint32_t *ds_pairs;   /* [PIECES, keys / 2, NR] dS, pairs of keys */
    int64_t plane;        /* keys * NR */
    float *dk, *dv;       /* [keys, depth], [keys, width]: sums of this group for this tile */
    float *rows;          /* [NR, ld], or [PIECES, NR, ld] of bfloat16 */
    int64_t ld, depth, width;
#ifdef BURST_DOT
    shares ahead;         /* of the next tile's K and V and this tile's dK and dV */
#endif
    bend how;
} backward_room;

INLINE void take_backward(arena *a, backward_room *w, const call *c)
{
    const burst_block *b = c->b;
    const int64_t keys = ROUND_UP(c->tile_keys, KR);
    w->depth = ROUND_UP(b->d, STEP);
    w->width = ROUND_UP(b->dim_v, STEP);
    w->ld = MAX(w->depth, w->width) + STEP;
    take_bf16_tile(a, &w->tile, c, 1);
    for (int i = 0; i < (GROUP == NR ? 1 : 2); i++) { /* nothing is made between the weights where all lanes are one group */
        w->s[i] = TAKE(a, float, KR * NR);
        w->dp[i] = TAKE(a, float, KR * NR);
    }
    w->slopes = TAKE(a, float, KR * NR);
    w->plane = keys * NR;
    w->p = TAKE(a, bf16, PIECES * w->plane);
    w->ds = TAKE(a, bf16, PIECES * w->plane);
    w->ds_pairs = TAKE(a, uint32_t, PIECES * w->plane / 2);
    w->dk = TAKE(a, float, keys * w->depth);
    w->dv = TAKE(a, float, keys * w->width);
    w->rows = TAKE(a, float, NR * w->ld * (PIECES > 2 ? 2 : 1));
    for (int64_t i = 0; i < c->most_panels; i++) {
        gradient_panel *p = &w->panels[i];
        take_gradient(a, p, b->d);
        p->query = TAKE(a, uint32_t, PIECES * (w->depth / 2 * NR));
        p->dout = TAKE(a, uint32_t, PIECES * (w->width / 2 * NR));
        p->query_rows = TAKE(a, uint32_t, PIECES * (NR / 2 * w->depth));
        p->dout_rows = TAKE(a, uint32_t, PIECES * (NR / 2 * w->width));
    }
}

INLINE pairs_of paired_rows_of(const void *panel, int64_t padded) { return (pairs_of){panel, padded, NR / 2 * padded}; }

/* Weights of keys i, i + 1 and 32 lanes of a block that starts at `start` in the tile's arrays */
INLINE void put_weights(const backward_room *w, int64_t start, int i, int lane, vec p[2][2], vec ds[2][2])
{
    const int64_t at = start + i * NR + lane;
    put_both(w->p + at, w->plane, NULL, 0, p);
    put_both(w->ds + at, w->plane, w->ds_pairs + (start + i * NR) / 2 + lane, w->plane / 2, ds);
}

/* P = 2^(s log2(e) - lse), dS = P (dP - delta) of a block, whatever it is: scores are bent and masked, and hidden pairs are 0 whatever came out there. */
NOINLINE void weigh_any(backward_room *w, float *s, float *dp, const gradient_panel *q, int64_t block, int cut, int64_t start)
{
    const key_tile *t = &w->tile.at;
    for (int i = 0; i < KR; i++)
        for (int j = 0; j < VR; j++) {
            const int at = i * NR + j * LANES;
            const vec x = exp2_vec(fused(load(s + at), LOG2E, load(q->lse + j * LANES)) - load(q->lse_low + j * LANES));
            vec y = x * (load(dp + at) - load(q->delta + j * LANES));
            if (w->how.softcap != 0) y *= load(w->slopes + at);
            store(s + at, x);
            store(dp + at, y);
        }
    if (cut) {
        const int live = (int)MIN(KR, t->live - block * KR);
        hide_block(s, &q->q, t->pos + block * KR, live);
        hide_block(dp, &q->q, t->pos + block * KR, live);
    }
    for (int i = 0; i < KR; i += 2)
        for (int j = 0; j < VR; j += 2) {
            vec pv[2][2], dsv[2][2];
            UNROLL for (int r = 0; r < 2; r++) UNROLL for (int h = 0; h < 2; h++) {
                pv[r][h] = load(s + (i + r) * NR + (j + h) * LANES);
                dsv[r][h] = load(dp + (i + r) * NR + (j + h) * LANES);
            }
            put_weights(w, start, i, j * LANES, pv, dsv);
        }
}

/* Pair by pair: see scores.h. */
NOINLINE void add_gradients_carefully(gradient_panel *p, backward_room *w, const call *c, int64_t batch, int64_t head,
                                      int64_t from, int64_t to)
{
    const burst_block *b = c->b;
    const key_tile *t = &w->tile.at;
    const int64_t kv_head = head / (b->heads / b->kv_heads);
    for (int64_t key = from * KR; key < MIN(to * KR, t->live); key++)
        for (int lane = 0; lane < p->count; lane++) {
            if (t->pos[key] < p->q.lo[lane] || t->pos[key] >= p->q.hi[lane]) continue;
            const int64_t at = (key - from * KR) * NR + lane;
            const float weight = from_bf16(w->p[at]), slope = from_bf16(w->ds[at]);
            const char *q = row_at(&b->q, batch, p->row + lane, head), *dout = row_at(&b->dout, batch, p->row + lane, head);
            const char *k = row_at(&b->k, batch, t->first + key, kv_head);
            for (int64_t i = 0; i < b->dim_v; i++)
                w->dv[key * w->width + i] += weight * element(dout + i * b->dout.step[3], BURST_BF16);
            for (int64_t i = 0; i < b->d; i++) {
                w->dk[key * w->depth + i] += slope * element(q + i * b->q.step[3], BURST_BF16);
                p->dq[i * NR + lane] += slope * element(k + i * b->k.step[3], BURST_BF16);
            }
        }
}

#ifdef BURST_DOT
/* P and dS of a block that is not bent, two vectors of lanes at a time, in registers but for P as dS wants it.  Hidden pairs of a cut
 * block are 0 whatever came out there. */
INLINE void weigh_dots_again(backward_room *w, int64_t block, const gradient_panel *p, float factor, int64_t start, const int cut)
{
    const rows_of k = keys_of(&w->tile, block), v = values_of(&w->tile, block);
    const uint32_t *query = p->query, *dout = p->dout;
    const INT *pos = w->tile.at.pos + block * KR;
    for (int lane = 0; lane < NR; lane += 2 * LANES) {
        const int first = lane / LANES;
        if (cut && !vector_sees(&w->tile.at, &p->q, block, first) && !vector_sees(&w->tile.at, &p->q, block, first + 1)) {
            vec none[2][2] = {{{0}}};
            for (int i = 0; i < KR; i += 2) put_weights(w, start, i, lane, none, none);
            ask_shares(&w->ahead, KR / DOT_ROWS);
            continue;
        }
        for (int key = 0; key < KR; key += DOT_ROWS) {
            vec s[DOT_ROWS][3], weight[DOT_ROWS][2];
            ask_shares(&w->ahead, 1);
            dot_block(k.at + key * k.ld, k.ld, query + lane, NR, w->depth / 2, s, 2);
            UNROLL for (int h = 0; h < 2; h++) {
                const vec lse = load(p->lse + lane + h * LANES), low = load(p->lse_low + lane + h * LANES);
                UNROLL for (int i = 0; i < DOT_ROWS; i++) {
                    vec x = exp2_short(fused(scored(s[i][h], factor), LOG2E, lse) - low);
                    if (cut) x = if_seen(&p->q, first + h, pos[key + i], x, zero());
                    weight[i][h] = x;
                }
            }
            dot_block(v.at + key * v.ld, v.ld, dout + lane, NR, w->width / 2, s, 2);
            UNROLL for (int i = 0; i < DOT_ROWS; i += 2) {
                vec pv[2][2], dsv[2][2];
                UNROLL for (int r = 0; r < 2; r++) UNROLL for (int h = 0; h < 2; h++) {
                    pv[r][h] = weight[i + r][h];
                    dsv[r][h] = pv[r][h] * (s[i + r][h] - load(p->delta + lane + h * LANES));
                    if (cut) dsv[r][h] = if_seen(&p->q, first + h, pos[key + i + r], dsv[r][h], zero()); /* delta may be NaN */
                }
                put_weights(w, start, key + i, lane, pv, dsv);
            }
        }
    }
}
NOINLINE void weigh_full_again(backward_room *w, int64_t block, const gradient_panel *p, float factor, int64_t start)
{
    weigh_dots_again(w, block, p, factor, start, 0);
}
NOINLINE void weigh_cut_again(backward_room *w, int64_t block, const gradient_panel *p, float factor, int64_t start)
{
    weigh_dots_again(w, block, p, factor, start, 1);
}

/* P and dS of the blocks [from, to) */
NOINLINE void weigh_blocks(const gradient_panel *p, backward_room *w, const burst_block *b, int64_t from, int64_t to, int full)
{
    const bf16_tile *t = &w->tile;
    const int capped = w->how.softcap != 0, plain = !capped && !w->how.alibi;
    const int64_t turns = KR / DOT_ROWS * (VR / 2);
    share_out(&w->ahead, (to - from) * turns);
    for (int64_t block = from; block < to; block++) {
        const int64_t start = (block - from) * KR * NR;
        const int cut = !full && block_sight(&t->at, &p->q, block) != FULL;
        if (plain) {
            (cut ? weigh_cut_again : weigh_full_again)(w, block, p, SCORE_FACTOR(b), start);
            continue;
        }
        bf16_scores(keys_of(t, block), columns_of(p->query, b->d), w->depth, w->s[0], 0);
        bf16_scores(values_of(t, block), columns_of(p->dout, b->dim_v), w->width, w->dp[0], 0);
        ask_shares(&w->ahead, turns);
        bend_scores(t, block, &p->q, b, &w->how, w->s[0], capped ? w->slopes : NULL);
        weigh_any(w, w->s[0], w->dp[0], p, block, cut, start);
    }
}
#else
/* P = 2^(factor s log2(e) - lse), dS = P (dP - delta), for keys [from, to) and GROUP lanes of a block that is seen in full and not bent */
NOINLINE void weigh_again(const backward_room *w, const float *s, const float *dp, float factor, const gradient_panel *q,
                          int64_t start, int lane, int from, int to)
{
    for (int j = lane; j < lane + GROUP; j += 2 * LANES) {
        vec lse[2], low[2], delta[2];
        UNROLL for (int h = 0; h < 2; h++) {
            lse[h] = load(q->lse + j + h * LANES);
            low[h] = load(q->lse_low + j + h * LANES);
            delta[h] = load(q->delta + j + h * LANES);
        }
        for (int i = from; i < to; i += 2) {
            vec pv[2][2], dsv[2][2];
            UNROLL for (int r = 0; r < 2; r++) UNROLL for (int h = 0; h < 2; h++) {
                const int at = (i + r) * NR + j + h * LANES;
                pv[r][h] = exp2_vec(fused(scored(load(s + at), factor), LOG2E, lse[h]) - low[h]);
                dsv[r][h] = pv[r][h] * (load(dp + at) - delta[h]);
            }
            put_weights(w, start, i, j, pv, dsv);
        }
    }
}

/* P and dS of the blocks [from, to).  The products of the next block are made between the weights of this one. */
NOINLINE void weigh_blocks(const gradient_panel *p, backward_room *w, const burst_block *b, int64_t from, int64_t to, int full)
{
    const bf16_tile *t = &w->tile;
    const int capped = w->how.softcap != 0, plain = !capped && !w->how.alibi;
    const pairs_of query = columns_of(p->query, b->d), dout = columns_of(p->dout, b->dim_v);
    for (int lane = 0; lane < NR; lane += GROUP) {
        bf16_scores(keys_of(t, from), query, w->depth, w->s[0], lane);
        bf16_scores(values_of(t, from), dout, w->width, w->dp[0], lane);
    }
    for (int64_t block = from; block < to; block++) {
        const int now = (block - from) & 1, next = 1 - now, more = block + 1 < to;
        const int64_t at = (block - from) * KR * NR;
        const int cut = !full && block_sight(&t->at, &p->q, block) != FULL, even = plain && !cut;
        const float factor = bend_scores(t, block, &p->q, b, &w->how, w->s[now], capped ? w->slopes : NULL);
        if (!even) weigh_any(w, w->s[now], w->dp[now], p, block, cut, at);
        for (int lane = 0; lane < NR; lane += GROUP) {
            if (more) bf16_scores(keys_of(t, block + 1), query, w->depth, w->s[next], lane);
            if (even) weigh_again(w, w->s[now], w->dp[now], factor, p, at, lane, 0, KR / 2);
            if (more) bf16_scores(values_of(t, block + 1), dout, w->width, w->dp[next], lane);
            if (even) weigh_again(w, w->s[now], w->dp[now], factor, p, at, lane, KR / 2, KR);
        }
    }
}
#endif

NOINLINE int backward_tile(gradient_panel *p, backward_room *w, const call *c, int64_t batch, int64_t head)
{
    const burst_block *b = c->b;
    const bf16_tile *t = &w->tile;
    int64_t from, to;
    int full;
    seen_blocks(&t->at, &p->q, &from, &to, &full);
    if (from == to) return 0;
    weigh_blocks(p, w, b, from, to, full);
    const int64_t keys = (to - from) * KR;
    if (!full && (t->at.wild_k || t->at.wild_v || p->wild)) {
        add_gradients_carefully(p, w, c, batch, head, from, to);
    } else {
        const rows_of weights = {w->p, NR, w->plane}, slopes = {w->ds, NR, w->plane};
        const pairs_of slope_pairs = {w->ds_pairs, NR, w->plane / 2};
        bf16_add_rows(weights, paired_rows_of(p->dout_rows, w->width), w->dv + from * KR * w->width, keys, w->width);
        bf16_add_rows(slopes, paired_rows_of(p->query_rows, w->depth), w->dk + from * KR * w->depth, keys, w->depth);
        bf16_add_panel(turned_of(t, from), slope_pairs, keys, p->dq, w->depth);
    }
    return 1;
}

static void backward_worker(call *c, int thread, arena scratch)
{
    const burst_block *b = c->b;
    backward_room w;
    take_backward(&scratch, &w, c);
    w.how = bend_of(b);
    shape_tiles();
    const int64_t share = b->heads / b->kv_heads;
    const float scale_k = (float)b->scale / QUERY_FACTOR(b); /* Q brings the rest */
    int64_t computed = 0, t;
    while ((t = atomic_fetch_add(&c->next, 1)) < c->tasks && carry_on(c, thread)) {
        const task k = task_of(c, t);
        const int64_t batch = k.batch, head = k.head, group = group_of(c, t), first = k.first, n = k.n;
        for (int64_t i = 0; i < n; i++) {
            gradient_panel *p = &w.panels[i];
            open_gradient(p, c, batch, head, first + i);
            p->wild |= load_factor(&b->q, batch, head, p->row, p->count, b->d, QUERY_FACTOR(b), (bf16 *)w.rows, w.ld, p->query,
                                   p->query_rows);
            p->wild |= load_factor(&b->dout, batch, head, p->row, p->count, b->dim_v, 1, (bf16 *)w.rows, w.ld, p->dout,
                                   p->dout_rows);
        }
        for (int64_t index = k.start; index < k.end; index++) {
            if (!sees_tile(c, k.all, index)) continue;
            load_bf16_tile(&w.tile, c, batch, head / share, index, 1);
            const int64_t keys = w.tile.at.blocks * KR;
#ifdef BURST_DOT
            const int64_t after = next_tile(c, k.all, index + 1, k.end);
#endif
            memset(w.dk, 0, keys * w.depth * sizeof(float));
            memset(w.dv, 0, keys * w.width * sizeof(float));
            for (int64_t i = 0; i < n; i++) {
#ifdef BURST_DOT
                stream_next(w.ahead.of, c, batch, head / share, after, k.end, i, n);
                stream_sums(w.ahead.of + 2, c, &w.tile.at, batch, head / share, i, n);
#endif
                computed += backward_tile(&w.panels[i], &w, c, batch, head);
                if (!carry_on(c, thread)) break;
            }
            const enum turn mine = wait_for_turn(c, thread, batch, head, group, index);
            if (mine == STOPPED) break;
            for (int64_t i = 0; i < w.tile.at.live; i++) {
                const int64_t row = w.tile.at.first + i;
                char *dk = row_at(&b->dk, batch, row, head / share), *dv = row_at(&b->dv, batch, row, head / share);
                (mine == FIRST ? put_row : add_row)(dk, b->dk.step[3], b->d, w.dk + i * w.depth, scale_k);
                (mine == FIRST ? put_row : add_row)(dv, b->dv.step[3], b->dim_v, w.dv + i * w.width, 1);
            }
            pass_turn(c, batch, head, index);
        }
        for (int64_t i = 0; i < n; i++) close_gradient(&w.panels[i], c, batch, head, w.rows, w.ld);
    }
    release_tiles();
    atomic_fetch_add(&c->computed, computed);
}

#endif
