/* Backward in bfloat16 on AMX: see backward.h for the method and amx.h for the layouts. */
#ifndef BURST_AMX_BACKWARD_H
#define BURST_AMX_BACKWARD_H

#include "amx_forward.h"
#include "gradient.h"

typedef struct {
    gradient_panel panels[BURST_PANELS];
    bf16_tile tile;
    float *s, *dp;        /* [KR, NR] a block's scores, then P; dP, then dS */
    float *slopes;        /* [KR, NR] of the cap */
    bf16 *p, *ds;         /* [keys, NR] in rows */
    uint32_t *ds_pairs;   /* [keys / 2, NR] dS, pairs of keys */
    float *dk, *dv;       /* [keys, depth], [keys, width]: sums of this group for this tile */
    float *rows;          /* [NR, ld] */
    int64_t ld, depth, width;
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
    w->s = TAKE(a, float, KR * NR);
    w->dp = TAKE(a, float, KR * NR);
    w->slopes = TAKE(a, float, KR * NR);
    w->p = TAKE(a, bf16, keys * NR);
    w->ds = TAKE(a, bf16, keys * NR);
    w->ds_pairs = TAKE(a, uint32_t, keys / 2 * NR);
    w->dk = TAKE(a, float, keys * w->depth);
    w->dv = TAKE(a, float, keys * w->width);
    w->rows = TAKE(a, float, NR * w->ld);
    for (int64_t i = 0; i < c->group_panels; i++) {
        gradient_panel *p = &w->panels[i];
        take_gradient(a, p, b->d);
        p->query = TAKE(a, uint32_t, w->depth / 2 * NR);
        p->dout = TAKE(a, uint32_t, w->width / 2 * NR);
        p->query_rows = TAKE(a, uint32_t, NR / 2 * w->depth);
        p->dout_rows = TAKE(a, uint32_t, NR / 2 * w->width);
    }
}

/* Rows of Q or dO as pairs of columns and as pairs of rows */
INLINE void open_factor(gradient_panel *p, backward_room *w, const burst_array *x, int64_t batch, int64_t head, int64_t n,
                        uint32_t *columns, uint32_t *rows_paired)
{
    bf16 *rows = (bf16 *)w->rows;
    const int64_t padded = ROUND_UP(n, STEP);
    for (int i = 0; i < NR; i++) {
        if (i < p->count)
            p->wild |= copy_bf16(row_at(x, batch, p->row + i, head), x->step[3], n, padded, rows + i * w->ld);
        else
            memset(rows + i * w->ld, 0, (size_t)padded * 2);
    }
    pair_columns(rows, w->ld, padded, columns);
    pair_rows(rows, w->ld, padded, rows_paired);
}

/* Round P and dS of a block to bfloat16: rows of both, and pairs of keys of dS. */
INLINE void put_rounded(bf16 *p, bf16 *ds, uint32_t *pairs, const vec pv[2][2], const vec dsv[2][2])
{
    const vec row0 = rounded(dsv[0][0], dsv[0][1]), row1 = rounded(dsv[1][0], dsv[1][1]);
    put(p, rounded(pv[0][0], pv[0][1]));
    put(p + NR, rounded(pv[1][0], pv[1][1]));
    put(ds, row0);
    put(ds + NR, row1);
    put(pairs, interleave_low(row0, row1));
    put(pairs + LANES, interleave_high(row0, row1));
}

/* P = 2^(factor s - lse), dS = P (dP - delta), for a block that is seen in full and not bent */
NOINLINE void weigh_again(const float *s, const float *dp, float factor, const gradient_panel *q, bf16 *p, bf16 *ds,
                          uint32_t *pairs)
{
    for (int j = 0; j < VR; j += 2) {
        vec lse[2], low[2], delta[2];
        UNROLL for (int h = 0; h < 2; h++) {
            lse[h] = load(q->lse + (j + h) * LANES);
            low[h] = load(q->lse_low + (j + h) * LANES);
            delta[h] = load(q->delta + (j + h) * LANES);
        }
        for (int i = 0; i < KR; i += 2) {
            vec pv[2][2], dsv[2][2];
            UNROLL for (int r = 0; r < 2; r++) UNROLL for (int h = 0; h < 2; h++) {
                const int at = (i + r) * NR + (j + h) * LANES;
                pv[r][h] = exp2_vec(load(s + at) * factor - lse[h] - low[h]);
                dsv[r][h] = pv[r][h] * (load(dp + at) - delta[h]);
            }
            put_rounded(p + i * NR + j * LANES, ds + i * NR + j * LANES, pairs + i / 2 * NR + j * LANES, pv, dsv);
        }
    }
}

/* The same for any block: scores are bent and masked, and hidden pairs are 0 whatever came out there. */
NOINLINE void weigh_any(backward_room *w, const gradient_panel *q, int64_t block, int cut, bf16 *p, bf16 *ds, uint32_t *pairs)
{
    const key_tile *t = &w->tile.at;
    for (int i = 0; i < KR; i++)
        for (int j = 0; j < VR; j++) {
            const int at = i * NR + j * LANES;
            const vec x = exp2_vec(load(w->s + at) - load(q->lse + j * LANES) - load(q->lse_low + j * LANES));
            vec y = x * (load(w->dp + at) - load(q->delta + j * LANES));
            if (w->how.softcap != 0) y *= load(w->slopes + at);
            store(w->s + at, x);
            store(w->dp + at, y);
        }
    if (cut) {
        const int live = (int)MIN(KR, t->live - block * KR);
        hide_block(w->s, &q->q, t->pos + block * KR, live);
        hide_block(w->dp, &q->q, t->pos + block * KR, live);
    }
    for (int i = 0; i < KR; i += 2)
        for (int j = 0; j < VR; j += 2) {
            vec pv[2][2], dsv[2][2];
            UNROLL for (int r = 0; r < 2; r++) UNROLL for (int h = 0; h < 2; h++) {
                pv[r][h] = load(w->s + (i + r) * NR + (j + h) * LANES);
                dsv[r][h] = load(w->dp + (i + r) * NR + (j + h) * LANES);
            }
            put_rounded(p + i * NR + j * LANES, ds + i * NR + j * LANES, pairs + i / 2 * NR + j * LANES, pv, dsv);
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

NOINLINE int backward_tile(gradient_panel *p, backward_room *w, const call *c, int64_t batch, int64_t head)
{
    const burst_block *b = c->b;
    const bf16_tile *t = &w->tile;
    int64_t from, to;
    int full;
    seen_blocks(&t->at, &p->q, &from, &to, &full);
    if (from == to) return 0;
    const int capped = w->how.softcap != 0, plain = !capped && !w->how.alibi;
    for (int64_t block = from; block < to; block++) {
        const int64_t at = (block - from) * KR * NR;
        const int cut = block_sight(&t->at, &p->q, block) != FULL;
        amx_scores(t->v + block * KR * t->ld_v, t->ld_v, p->dout, w->width, w->dp);
        if (plain && !cut) {
            amx_scores(t->k + block * KR * t->ld_k, t->ld_k, p->query, w->depth, w->s);
            weigh_again(w->s, w->dp, factor_of(b), p, w->p + at, w->ds + at, w->ds_pairs + at / 2);
        } else {
            score_any(t, block, &p->q, p->query, b, &w->how, w->s, capped ? w->slopes : NULL);
            weigh_any(w, p, block, cut, w->p + at, w->ds + at, w->ds_pairs + at / 2);
        }
    }
    const int64_t keys = (to - from) * KR;
    if (!full && (t->at.wild_k || t->at.wild_v || p->wild)) {
        add_gradients_carefully(p, w, c, batch, head, from, to);
    } else {
        amx_add_rows(w->p, p->dout_rows, w->dv + from * KR * w->width, keys, w->width);
        amx_add_rows(w->ds, p->query_rows, w->dk + from * KR * w->depth, keys, w->depth);
        amx_add_panel(t->turned + from * KR, t->ld_turned, w->ds_pairs, keys, p->dq, w->depth);
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
    int64_t computed = 0, t;
    while ((t = atomic_fetch_add(&c->next, 1)) < c->tasks && carry_on(c, thread)) {
        int64_t batch, head, group;
        task_of(c, t, &batch, &head, &group);
        const int64_t first = group * c->group_panels, n = MIN(c->group_panels, c->panels - first);
        for (int64_t i = 0; i < n; i++) {
            gradient_panel *p = &w.panels[i];
            open_gradient(p, c, batch, head, first + i);
            open_factor(p, &w, &b->q, batch, head, b->d, p->query, p->query_rows);
            open_factor(p, &w, &b->dout, batch, head, b->dim_v, p->dout, p->dout_rows);
        }
        for (int64_t index = 0; index < c->tiles; index++) {
            if (!group_sees(c, group, index)) continue;
            load_bf16_tile(&w.tile, c, batch, head / share, index, 1);
            const int64_t keys = w.tile.at.blocks * KR;
            memset(w.dk, 0, keys * w.depth * sizeof(float));
            memset(w.dv, 0, keys * w.width * sizeof(float));
            for (int64_t i = 0; i < n; i++) {
                prefetch_tile(c, batch, head / share, index + 1, i, n);
                prefetch_rows(&b->dk, c, batch, head / share, index, b->d * 4, i, n);
                prefetch_rows(&b->dv, c, batch, head / share, index, b->dim_v * 4, i, n);
                computed += backward_tile(&w.panels[i], &w, c, batch, head);
                if (!carry_on(c, thread)) break;
            }
            if (!wait_for_turn(c, thread, batch, head, group, index)) break;
            for (int64_t i = 0; i < w.tile.at.live; i++) {
                const int64_t row = w.tile.at.first + i;
                add_row(row_at(&b->dk, batch, row, head / share), b->dk.step[3], b->d, w.dk + i * w.depth, (float)b->scale);
                add_row(row_at(&b->dv, batch, row, head / share), b->dv.step[3], b->dim_v, w.dv + i * w.width, 1);
            }
            pass_turn(c, batch, head, index);
        }
        for (int64_t i = 0; i < n; i++) close_gradient(&w.panels[i], c, batch, head, w.rows, w.ld);
    }
    _tile_release();
    atomic_fetch_add(&c->computed, computed);
}

#endif
