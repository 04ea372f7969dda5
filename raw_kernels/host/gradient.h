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
        const double exact = (double)lse * LOG2E;
        p->lse[i] = lse == (REAL)-INFINITY ? (REAL)INFINITY : (REAL)exact; /* such rows: P = 2^-inf = 0 */
        const double lost = sizeof(REAL) == 4 ? exact - (double)p->lse[i] : fma((double)lse, LOG2E, -exact);
        p->lse_low[i] = isfinite(p->lse[i]) && fabs(exact) < FUSED_REACH ? (REAL)lost : 0;
        p->delta[i] = i < p->count ? *entry_at(&b->delta, batch, head, p->row + i) : 0;
    }
    memset(p->dq, 0, OUT_ROWS(b->d) * NR * sizeof(REAL));
}

NOINLINE void close_gradient(gradient_panel *p, const call *c, int64_t batch, int64_t head, REAL *rows, int64_t ld)
{
    const burst_block *b = c->b;
    REAL scale[NR] __attribute__((aligned(VBYTES)));
    for (int i = 0; i < NR; i++) scale[i] = (REAL)b->scale;
    if (b->fresh_q && p->count == NR && is_even(&b->dq, b->d, TYPE_OF_REAL)) {
        REAL *to = (REAL *)row_at(&b->dq, batch, p->row, head);
        panel_to_rows(p->dq, scale, b->d, to, b->dq.step[1] / (int64_t)sizeof(REAL));
        return;
    }
    panel_to_rows(p->dq, scale, b->d, rows, ld);
    for (int i = 0; i < p->count; i++) {
        char *to = row_at(&b->dq, batch, p->row + i, head);
        if (b->fresh_q)
            store_row(to, b->dq.step[3], b->d, rows + i * ld, 1, TYPE_OF_REAL);
        else
            add_row(to, b->dq.step[3], b->d, rows + i * ld, 1);
    }
}

/* ---------------------------------------------------------------- dK and dV, in order */

/* Part `part` of `parts` of the rows of dK and dV that a tile's sums will be added to */
INLINE void stream_sums(stream s[2], const call *c, const key_tile *t, int64_t batch, int64_t kv_head, int64_t part, int64_t parts)
{
    const burst_block *b = c->b;
    const int64_t from = t->first + part_start(t->live, part, parts), to = t->first + part_start(t->live, part + 1, parts);
    s[0] = stream_of(&b->dk, batch, kv_head, from, to, b->d, TYPE_OF_REAL);
    s[1] = stream_of(&b->dv, batch, kv_head, from, to, b->dim_v, TYPE_OF_REAL);
}

enum turn { STOPPED, FIRST, LATER };

/* Wait until all earlier tasks that see this tile of this key head have added their share.  Where gradients start at 0,
 * the first stores its own. */
INLINE enum turn wait_for_turn(call *c, int thread, int64_t batch, int64_t head, int64_t group, int64_t tile)
{
    const burst_block *b = c->b;
    const int64_t share = b->heads / b->kv_heads;
    int before = 0;
    for (int64_t g = group + 1; g < c->groups; g++) before += sees_tile(c, c->groups_see[g], tile); /* late groups come first */
    atomic_int *turn = &c->turn[(batch * b->kv_heads + head / share) * c->tiles + tile];
    const int mine = before * (int)share + (int)(head % share);
    while (atomic_load_explicit(turn, memory_order_acquire) != mine) {
        if (!carry_on(c, thread)) return STOPPED;
        sched_yield();
    }
    return mine == 0 && b->fresh_kv ? FIRST : LATER;
}

INLINE void pass_turn(call *c, int64_t batch, int64_t head, int64_t tile)
{
    const int64_t kv_head = head / (c->b->heads / c->b->kv_heads);
    atomic_fetch_add_explicit(&c->turn[(batch * c->b->kv_heads + kv_head) * c->tiles + tile], 1, memory_order_release);
}

INLINE void clear_row(char *row, int64_t step, int64_t n)
{
    if (step == sizeof(REAL))
        memset(row, 0, (size_t)n * sizeof(REAL));
    else
        for (int64_t i = 0; i < n; i++) *(REAL *)(row + i * step) = 0;
}

/* Before the tasks start: what each group sees, and gradients that nobody will touch. */
static void prepare_backward(call *c)
{
    const burst_block *b = c->b;
    for (int64_t g = 0; g < c->groups; g++)
        c->groups_see[g] = extent_of(b, g * c->group_panels * NR, (g + 1) * c->group_panels * NR);
    for (int64_t i = 0; i < b->batch * b->kv_heads * c->tiles; i++) atomic_init(&c->turn[i], 0);
    if (!b->fresh_kv) return;
    for (int64_t tile = 0; tile < c->tiles; tile++) { /* what somebody sees is stored by the first who does */
        int seen = 0;
        for (int64_t g = 0; g < c->groups && !seen; g++) seen = sees_tile(c, c->groups_see[g], tile);
        if (seen) continue;
        for (int64_t batch = 0; batch < b->batch; batch++)
            for (int64_t row = tile * c->tile_keys; row < MIN((tile + 1) * c->tile_keys, b->rows_k); row++)
                for (int64_t head = 0; head < b->kv_heads; head++) {
                    clear_row(row_at(&b->dk, batch, row, head), b->dk.step[3], b->d);
                    clear_row(row_at(&b->dv, batch, row, head), b->dv.step[3], b->dim_v);
                }
    }
}

#endif
