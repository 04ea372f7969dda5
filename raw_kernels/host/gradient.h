/* What every backward kernel shares: a panel's lse, delta and dQ, and the order in which groups add to dK and dV. */
#ifndef BURST_GRADIENT_H
#define BURST_GRADIENT_H

#include "state.h"

typedef struct {
    lanes q;
    void *query, *dout;           /* [d, NR] Q' times its factor; [dv, NR] dO'; see amx.h for bfloat16 */
    void *query_rows, *dout_rows; /* Q and dO as the right factor of dK and dV */
    REAL *dq;                     /* [d, NR] dQ' */
    REAL *lse, *lse_low, *delta;  /* [NR] lse * log2(e) in two parts */
    int64_t row;
    int count, wild;              /* wild: an infinity or NaN in Q or dO */
} gradient_panel;

INLINE void take_gradient(arena *a, gradient_panel *p, int64_t d)
{
    take_lanes(a, &p->q);
    p->dq = TAKE(a, REAL, OUT_ROWS(d) * NR);
    p->lse = TAKE(a, REAL, NR);
    p->lse_low = TAKE(a, REAL, NR);
    p->delta = TAKE(a, REAL, NR);
}

NOINLINE void open_gradient(gradient_panel *p, const call *c, int64_t batch, int64_t head, int64_t index)
{
    const burst_block *b = c->b;
    p->row = index * NR;
    p->count = (int)MIN(NR, b->rows_q - p->row);
    p->wild = 0;
    set_lanes(&p->q, b, head, p->row, p->count);
    for (int i = 0; i < NR; i++) {
        const REAL lse = i < p->count ? *entry_at(&b->lse, batch, head, p->row + i) : (REAL)-INFINITY;
        p->lse[i] = lse == (REAL)-INFINITY ? (REAL)INFINITY : reference_of(lse); /* such rows: P = 2^-inf = 0 */
        p->lse_low[i] = (REAL)rest_of(lse, p->lse[i]);
        p->delta[i] = i < p->count ? *entry_at(&b->delta, batch, head, p->row + i) * (REAL)b->dout_factor : 0;
    }
    memset(p->dq, 0, OUT_ROWS(b->d) * NR * sizeof(REAL));
}

/* A row's columns from `column` on: sum += src factor or, where that is `fresh`, sum = src factor; rounded to `final` in its place, where
 * that is not NULL.  Spoils src. */
INLINE void settle_row(const burst_array *sum, const burst_array *final, int type, int64_t batch, int64_t row, int64_t head, int64_t column,
                       int64_t n, REAL *src, REAL factor, int64_t fresh)
{
    char *at = row_at(sum, batch, row, head) + column * sum->step[3];
    if (!final) {
        (fresh ? put_row : add_row)(at, sum->step[3], n, src, factor);
        return;
    }
    if (!fresh) {
        for (int64_t c = 0; c < n; c++) src[c] = *(const REAL *)(at + c * sum->step[3]) + src[c] * factor;
        factor = 1;
    }
    store_row(row_at(final, batch, row, head) + column * final->step[3], final->step[3], n, src, factor, type);
}

/* Rows that a panel's dQ goes to, `count` of them */
INLINE stream stream_dq(const burst_block *b, const task *k, int64_t row, int64_t count)
{
    const int direct = b->fresh_q && b->final_dq.data;
    return stream_of(direct ? &b->final_dq : &b->dq, k->batch, k->head, row, row + count, b->d, direct ? (int)b->type : (int)TYPE_OF_REAL);
}

NOINLINE void close_gradient(gradient_panel *p, const call *c, int64_t batch, int64_t head, REAL *rows, int64_t ld)
{
    const burst_block *b = c->b;
    const burst_array *final = b->final_dq.data ? &b->final_dq : NULL;
    const int whole = b->fresh_q && p->count == NR;
    REAL scale[NR] __attribute__((aligned(VBYTES)));
    for (int i = 0; i < NR; i++) scale[i] = (REAL)(b->scale / b->dout_factor);
#if defined(BURST_AMX) && !BURST_SPLIT
    if (whole && final && b->type == BURST_BF16 && final->step[3] == 2 && b->d % 32 == 0) {
        panel_to_bf16_rows(p->dq, scale, b->d, row_at(final, batch, p->row, head), final->step[1]);
        return;
    }
#endif
    if (whole && !final && is_even(&b->dq, b->d, TYPE_OF_REAL)) {
        REAL *to = (REAL *)row_at(&b->dq, batch, p->row, head);
        panel_to_rows(p->dq, scale, b->d, to, b->dq.step[1] / (int64_t)sizeof(REAL));
        return;
    }
    panel_to_rows(p->dq, scale, b->d, rows, ld);
    for (int i = 0; i < p->count; i++)
        settle_row(&b->dq, final, (int)b->type, batch, p->row + i, head, 0, b->d, rows + i * ld, 1, b->fresh_q);
}

/* ---------------------------------------------------------------- dK and dV, in order */

/* All tasks that see a tile of a key head add their share one after another.  Where gradients start at 0 the first one stores its own; the
 * last one rounds, where results are wanted. */
typedef struct {
    int mine, all;
} turns_of_tile;

INLINE turns_of_tile turns_at(const call *c, int64_t head, int64_t group, int64_t tile)
{
    const int64_t share = c->b->heads / c->b->kv_heads;
    int before = 0, all = 0;
    for (int64_t i = 0; i < c->groups; i++) {
        const int64_t g = c->order[i].group;
        if (g == group) before = all;
        all += sees_tile(c, c->groups_see[g], tile);
    }
    return (turns_of_tile){before * (int)share + (int)(head % share), all * (int)share};
}
INLINE int is_fresh(const burst_block *b, turns_of_tile turn) { return turn.mine == 0 && b->fresh_kv; }
INLINE const burst_array *final_of(const burst_array *final, turns_of_tile turn)
{
    return final->data && turn.mine + 1 == turn.all ? final : NULL;
}

/* Part `part` of `parts` of the rows that this turn's sums of a tile will be added to and written to */
INLINE void stream_sums(stream s[4], const call *c, const key_tile *t, turns_of_tile turn, int64_t batch, int64_t kv_head, int64_t part,
                        int64_t parts)
{
    const burst_block *b = c->b;
    const int64_t from = t->first + part_start(t->live, part, parts), to = t->first + part_start(t->live, part + 1, parts);
    const burst_array *sums[] = {&b->dk, &b->dv}, *finals[] = {final_of(&b->final_dk, turn), final_of(&b->final_dv, turn)};
    for (int i = 0; i < 2; i++) {
        const int64_t n = i ? b->dim_v : b->d;
        if (!finals[i] || !is_fresh(b, turn)) s[i] = stream_of(sums[i], batch, kv_head, from, to, n, TYPE_OF_REAL);
        if (finals[i]) s[2 + i] = stream_of(finals[i], batch, kv_head, from, to, n, (int)b->type);
    }
}

/* Wait until all earlier tasks that see this tile of this key head have added their share.  Returns whether to go on. */
INLINE int wait_for_turn(call *c, int thread, int64_t batch, int64_t kv_head, int64_t tile, turns_of_tile wanted)
{
    atomic_int *turn = &c->turn[(batch * c->b->kv_heads + kv_head) * c->tiles + tile];
    while (atomic_load_explicit(turn, memory_order_acquire) != wanted.mine) {
        if (!carry_on(c, thread)) return 0;
        sched_yield();
    }
    return 1;
}

INLINE void pass_turn(call *c, int64_t batch, int64_t kv_head, int64_t tile)
{
    atomic_fetch_add_explicit(&c->turn[(batch * c->b->kv_heads + kv_head) * c->tiles + tile], 1, memory_order_release);
}

/* Before the tasks start: what each group sees, and gradients that nobody will touch. */
static void prepare_backward(call *c)
{
    const burst_block *b = c->b;
    for (int64_t g = 0; g < c->groups; g++)
        c->groups_see[g] = extent_of(b, g * c->group_panels * NR, (g + 1) * c->group_panels * NR);
    for (int64_t i = 0; i < b->batch * b->kv_heads * c->tiles; i++) atomic_init(&c->turn[i], 0);
    const burst_array *sums[] = {&b->dk, &b->dv}, *finals[] = {&b->final_dk, &b->final_dv};
    if (!b->fresh_kv && !b->final_dk.data) return;
    for (int64_t tile = 0; tile < c->tiles; tile++) {
        if (turns_at(c, 0, 0, tile).all) continue; /* somebody sees it */
        for (int64_t batch = 0; batch < b->batch; batch++)
            for (int64_t row = tile * c->tile_keys; row < MIN((tile + 1) * c->tile_keys, b->rows_k); row++)
                for (int64_t head = 0; head < b->kv_heads; head++)
                    for (int i = 0; i < 2; i++)
                        for (int64_t column = 0, n = i ? b->dim_v : b->d, some; column < n; column += some) {
                            REAL nothing[64] = {0};
                            some = MIN(64, n - column);
                            settle_row(sums[i], finals[i]->data ? finals[i] : NULL, (int)b->type, batch, row, head, column, some, nothing, 1,
                                       b->fresh_kv);
                        }
    }
}

#endif
