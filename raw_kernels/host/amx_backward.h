/* Backward on AMX, in bfloat16 or in float32 by pieces, or by vdpbf16ps: see backward.h for the method and amx.h for the layouts. */
#ifndef BURST_AMX_BACKWARD_H
#define BURST_AMX_BACKWARD_H

#include "amx_forward.h"
#include "gradient.h"

typedef struct {
    gradient_panel panels[BURST_PANELS];
    key_feed keys;
    float *s[2], *dp[2];  /* [KR, NR] a block's scores, then P; dP, then dS; of this block and the next */
    float *slopes;        /* [KR, NR] of the cap */
    bf16 *p, *ds;         /* [PIECES, keys, NR] in rows */
    uint32_t *ds_pairs;   /* [PIECES, keys / 2, NR] dS, pairs of keys */
    int64_t plane;        /* keys * NR */
    float *dk, *dv;       /* [keys, depth], [keys, width]: sums of this group for this tile */
    float *rows;          /* [NR, ld], or [PIECES, NR, ld] of bfloat16 */
    int64_t ld, depth, width; /* of rows of Q and dO, padded */
    int64_t terms_k, terms_v; /* of a score, of a dP */
    bend how;
} backward_room;

INLINE void take_backward(arena *a, backward_room *w, const call *c)
{
    const burst_block *b = c->b;
    const int64_t keys = ROUND_UP(c->tile_keys, KR);
    w->depth = ROUND_UP(b->d, STEP);
    w->width = ROUND_UP(b->dim_v, STEP);
    w->ld = MAX(w->depth, w->width) + STEP;
    w->terms_k = TERMS_OF(b->d);
    w->terms_v = TERMS_OF(b->dim_v);
    take_keys(a, &w->keys, c, 1);
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
    const key_tile *t = &w->keys.tile.at;
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
NOINLINE void add_gradients_carefully(gradient_panel *p, backward_room *w, const call *c, const task *of, int64_t from, int64_t to)
{
    const burst_block *b = c->b;
    const key_tile *t = &w->keys.tile.at;
    const int64_t batch = of->batch, head = of->head;
    for (int64_t key = from * KR; key < MIN(to * KR, t->live); key++)
        for (int lane = 0; lane < p->count; lane++) {
            if (t->pos[key] < p->q.lo[lane] || t->pos[key] >= p->q.hi[lane]) continue;
            const int64_t at = (key - from * KR) * NR + lane;
            const float weight = from_bf16(w->p[at]), slope = from_bf16(w->ds[at]);
            const char *q = row_at(&b->q, batch, p->row + lane, head), *dout = row_at(&b->dout, batch, p->row + lane, head);
            const char *k = row_at(&b->k, batch, t->first + key, of->kv_head);
            for (int64_t i = 0; i < b->dim_v; i++)
                w->dv[key * w->width + i] += weight * element(dout + i * b->dout.step[3], BURST_BF16);
            for (int64_t i = 0; i < b->d; i++) {
                w->dk[key * w->depth + i] += slope * element(q + i * b->q.step[3], BURST_BF16);
                p->dq[i * NR + lane] += slope * element(k + i * b->k.step[3], BURST_BF16);
            }
        }
}

#ifdef BURST_DOT
/* P and dS of a block without a softcap, of two vectors of lanes, in registers.  Hidden pairs of a cut block are 0 whatever came out there. */
INLINE void weigh_dots_again(backward_room *w, int64_t block, const gradient_panel *p, float factor, int64_t start, int lane, const int cut)
{
    const rows_of k = keys_of(&w->keys.tile, block), v = values_of(&w->keys.tile, block);
    const uint32_t *query = p->query, *dout = p->dout;
    const INT *pos = w->keys.tile.at.pos + block * KR;
    const int first = lane / LANES;
    vec s[DOT_ROWS][3], weight[DOT_ROWS][2];
    dot_block(k.at, k.ld, query + lane, NR, w->terms_k / 2, s, 2);
    UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < DOT_ROWS; i++) s[i][h] = scored(s[i][h], factor);
    if (w->how.alibi)
        UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < DOT_ROWS; i++) s[i][h] = tilted(&p->q, first + h, pos[i], s[i][h]);
    UNROLL for (int h = 0; h < 2; h++) {
        const vec lse = load(p->lse + lane + h * LANES), low = load(p->lse_low + lane + h * LANES);
        UNROLL for (int i = 0; i < DOT_ROWS; i++) {
            vec x = exp2_short(fused(s[i][h], LOG2E, lse) - low);
            if (cut) x = if_seen(&p->q, first + h, pos[i], x, zero());
            weight[i][h] = x;
        }
    }
    dot_block(v.at, v.ld, dout + lane, NR, w->terms_v / 2, s, 2);
    UNROLL for (int i = 0; i < DOT_ROWS; i += 2) {
        vec pv[2][2], dsv[2][2];
        UNROLL for (int r = 0; r < 2; r++) UNROLL for (int h = 0; h < 2; h++) {
            pv[r][h] = weight[i + r][h];
            dsv[r][h] = pv[r][h] * (s[i + r][h] - load(p->delta + lane + h * LANES));
            if (cut) dsv[r][h] = if_seen(&p->q, first + h, pos[i + r], dsv[r][h], zero()); /* delta may be NaN */
        }
        put_weights(w, start, i, lane, pv, dsv);
    }
}
/* Of n blocks that all lanes see */
NOINLINE void weigh_full_again(backward_room *w, int64_t block, int64_t n, const gradient_panel *p, float factor, int64_t start)
{
    for (int lane = 0; lane < NR; lane += 2 * LANES)
        for (int64_t i = 0; i < n; i++) {
            ask_shares(&w->keys.ahead, 1);
            weigh_dots_again(w, block + i, p, factor, start + i * KR * NR, lane, 0);
        }
}
NOINLINE void weigh_cut_again(backward_room *w, int64_t block, const gradient_panel *p, float factor, int64_t start, span seen)
{
    ask_shares(&w->keys.ahead, VR / 2);
    for (int pair = seen.first; pair < seen.last; pair++) {
        const int lane = pair * 2 * LANES;
        if (vector_sees(&w->keys.tile.at, &p->q, block, 2 * pair) || vector_sees(&w->keys.tile.at, &p->q, block, 2 * pair + 1)) {
            weigh_dots_again(w, block, p, factor, start, lane, 1);
        } else {
            vec none[2][2] = {{{0}}};
            for (int i = 0; i < KR; i += 2) put_weights(w, start, i, lane, none, none);
        }
    }
}

/* P and dS of the blocks [from, to).  Where `seen` is given and there is no softcap, vectors that see nothing of a block, nor
 * lie between some that do, get none; all else that is hidden is 0. */
NOINLINE void weigh_blocks(const gradient_panel *p, backward_room *w, const burst_block *b, int64_t from, int64_t to, const parts *seen)
{
    enum { SOME = 4 }; /* blocks of which K and V stay in L1 for all vectors */
    const bf16_tile *t = &w->keys.tile;
    const int capped = w->how.softcap != 0;
    share_out(&w->keys.ahead, (to - from) * (VR / 2));
    for (int64_t block = from, n; block < to; block += n) {
        const int64_t start = (block - from) * KR * NR;
        for (n = 0; !capped && n < MIN(SOME, to - block) && (!seen || block_sight(&t->at, &p->q, block + n) == FULL);) n++;
        if (n) {
            weigh_full_again(w, block, n, p, SCORE_FACTOR(b), start);
            continue;
        }
        n = 1;
        if (!capped) {
            weigh_cut_again(w, block, p, SCORE_FACTOR(b), start, pairs_seen(seen, block - from));
            continue;
        }
        bf16_scores(keys_of(t, block), columns_of(p->query, b->d), w->terms_k, w->s[0], 0);
        bf16_scores(values_of(t, block), columns_of(p->dout, b->dim_v), w->terms_v, w->dp[0], 0);
        ask_shares(&w->keys.ahead, VR / 2);
        bend_scores(t, block, &p->q, b, &w->how, w->s[0], w->slopes);
        weigh_any(w, w->s[0], w->dp[0], p, block, block_sight(&t->at, &p->q, block) != FULL, start);
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
NOINLINE void weigh_blocks(const gradient_panel *p, backward_room *w, const burst_block *b, int64_t from, int64_t to, const parts *seen)
{
    const bf16_tile *t = &w->keys.tile;
    const int capped = w->how.softcap != 0, plain = !capped && !w->how.alibi;
    const pairs_of query = columns_of(p->query, b->d), dout = columns_of(p->dout, b->dim_v);
    for (int lane = 0; lane < NR; lane += GROUP) {
        bf16_scores(keys_of(t, from), query, w->terms_k, w->s[0], lane);
        bf16_scores(values_of(t, from), dout, w->terms_v, w->dp[0], lane);
    }
    for (int64_t block = from; block < to; block++) {
        const int now = (block - from) & 1, next = 1 - now, more = block + 1 < to;
        const int64_t at = (block - from) * KR * NR;
        const int cut = seen && block_sight(&t->at, &p->q, block) != FULL, even = plain && !cut;
        const float factor = bend_scores(t, block, &p->q, b, &w->how, w->s[now], capped ? w->slopes : NULL);
        if (!even) weigh_any(w, w->s[now], w->dp[now], p, block, cut, at);
        for (int lane = 0; lane < NR; lane += GROUP) {
            if (more) bf16_scores(keys_of(t, block + 1), query, w->terms_k, w->s[next], lane);
            if (even) weigh_again(w, w->s[now], w->dp[now], factor, p, at, lane, 0, KR / 2);
            if (more) bf16_scores(values_of(t, block + 1), dout, w->terms_v, w->dp[next], lane);
            if (even) weigh_again(w, w->s[now], w->dp[now], factor, p, at, lane, KR / 2, KR);
        }
    }
}
#endif

NOINLINE int backward_tile(gradient_panel *p, backward_room *w, const call *c, const task *of)
{
    const burst_block *b = c->b;
    const bf16_tile *t = &w->keys.tile;
    int64_t from, to;
    int full;
    seen_blocks(&t->at, &p->q, &from, &to, &full);
    if (from == to) return 0;
    const int64_t keys = (to - from) * KR;
    parts parts_seen;
    const parts *seen = full ? NULL : &parts_seen;
    if (seen) find_parts(&parts_seen, &t->at, &p->q, from, to);
    weigh_blocks(p, w, b, from, to, seen);
    if (!full && (t->at.wild_k || t->at.wild_v || p->wild)) {
        add_gradients_carefully(p, w, c, of, from, to);
        return 1;
    }
    const rows_of weights = {w->p, NR, w->plane}, slopes = {w->ds, NR, w->plane};
    bf16_add_rows(weights, paired_rows_of(p->dout_rows, w->width), w->dv + from * KR * w->width, keys, b->dim_v, seen);
    bf16_add_rows(slopes, paired_rows_of(p->query_rows, w->depth), w->dk + from * KR * w->depth, keys, b->d, seen);
    bf16_add_panel(turned_of(t, from), (pairs_of){w->ds_pairs, NR, w->plane / 2}, keys, p->dq, COLUMNS_OF(b->d), seen);
    return 1;
}

NOINLINE void open_gradient_panel(gradient_panel *p, backward_room *w, const call *c, int64_t batch, int64_t head, int64_t index)
{
    const burst_block *b = c->b;
    bf16 *rows = (bf16 *)w->rows;
    open_gradient(p, c, batch, head, index);
    p->wild = load_factor(&b->q, batch, head, p->row, p->count, b->d, QUERY_FACTOR(b), rows, w->ld, p->query, p->query_rows);
    p->wild |= load_factor(&b->dout, batch, head, p->row, p->count, b->dim_v, (float)b->dout_factor, rows, w->ld, p->dout, p->dout_rows);
}

INLINE void clear_tile_sums(backward_room *w, const call *c)
{
    const int64_t keys = w->keys.tile.at.blocks * KR;
    (void)c;
    memset(w->dk, 0, keys * w->depth * sizeof(float));
    memset(w->dv, 0, keys * w->width * sizeof(float));
}

/* This task's share of dK and dV of the tile */
INLINE void settle_tile_sums(backward_room *w, const call *c, const task *k, turns_of_tile mine)
{
    const burst_block *b = c->b;
    const burst_array *final_dk = final_of(&b->final_dk, mine), *final_dv = final_of(&b->final_dv, mine);
    const int type = (int)b->type, fresh = is_fresh(b, mine);
    const float scale_v = (float)(1 / b->dout_factor), scale_k = (float)(b->scale / QUERY_FACTOR(b) / b->dout_factor); /* Q brings the rest */
    for (int64_t i = 0; i < w->keys.tile.at.live; i++) {
        const int64_t row = w->keys.tile.at.first + i;
        settle_row(&b->dk, final_dk, type, k->batch, row, k->kv_head, 0, b->d, w->dk + i * w->depth, scale_k, fresh);
        settle_row(&b->dv, final_dv, type, k->batch, row, k->kv_head, 0, b->dim_v, w->dv + i * w->width, scale_v, fresh);
    }
}

#endif
