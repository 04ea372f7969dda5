/* How a task goes: a group of panels over the tiles of keys that it sees, tile by tile and panel by panel.  The same for all kernels, which bring
 *   key_feed       with take_keys, expect_keys, bring_keys, turn_to_keys, ask_for
 *   forward_room   with take_forward, open_panel, forward_tile
 *   backward_room  with take_backward, open_gradient_panel, backward_tile, clear_tile_sums, settle_tile_sums
 * A panel is opened before its own first tile and closed behind its own last one, while its rows are in L1.
 */
#ifndef BURST_WALK_H
#define BURST_WALK_H

#include "gradient.h"

/* Backward asks for lines ahead, but on AMX, where that took longer (docs/host-tried.md) */
#define ASKS_IN_BACKWARD (!TILE_REGISTERS)

INLINE void first_keys(key_feed *f, const call *c, const task *k, int64_t index, int backward)
{
    expect_keys(f, c, index);
    bring_keys(f, c, k, 0, 1);
    turn_to_keys(f, c, k, index, backward);
}

static int64_t forward_task(forward_room *w, call *c, int thread, task *k)
{
    const burst_block *b = c->b;
    const burst_array *to = b->final.data ? &b->final : &b->out;
    const int to_type = b->final.data ? (int)b->type : (int)TYPE_OF_REAL;
    const int64_t start = next_shared(c, k, k->start);
    int64_t computed = 0;
    for (int64_t i = 0; i < k->n; i++)
        if (sees_no_more(c, k, i, k->start)) {
            k->opened[i] = 1;
            if (!b->first && !b->final.data) continue; /* out and lse stay */
            open_panel(&w->panels[i], w, c, k->batch, k->head, k->first + i);
            close_panel(&w->panels[i], c, k->batch, k->head, w->rows, w->ld);
        }
    if (start < k->end) first_keys(&w->keys, c, k, start, 0);
    for (int64_t index = start, after; index < k->end; index = after) {
        const int64_t turns = panels_at(c, k, index);
        after = next_shared(c, k, index + 1);
        const int more = after < k->end;
        task behind = {0};
        if (more)
            expect_keys(&w->keys, c, after);
        else
            behind = task_behind(c, k);
        for (int64_t i = 0, turn = 0; i < k->n; i++) {
            panel *p = &w->panels[i];
            if (!sees_tile(c, k->sees[i], index)) continue;
            if (!k->opened[i]) open_panel(p, w, c, k->batch, k->head, k->first + i);
            k->opened[i] = 1;
            const int last = sees_no_more(c, k, i, index + 1), parting = !more && turn + 1 == turns; /* from this task */
            stream ahead[4] = {0}; /* K, V, Q, out */
            stream_keys(ahead, c, k, after, &behind, turn, turns);
            ahead[2] = stream_panel(&b->q, c, parting ? &behind : k, parting ? 0 : i + 1, b->d);
            ahead[3] = stream_of(to, k->batch, k->head, p->row, last ? p->row + p->count : p->row, b->dim_v, to_type);
            ask_for(&w->keys, ahead, 4);
            computed += forward_tile(p, w, c, k);
            if (more) bring_keys(&w->keys, c, k, turn, turns);
            if (last) close_panel(p, c, k->batch, k->head, w->rows, w->ld);
            if (!carry_on(c, thread)) return computed;
            turn++;
        }
        if (more) turn_to_keys(&w->keys, c, k, after, 0);
    }
    return computed;
}

static int64_t backward_task(backward_room *w, call *c, int thread, task *k, int64_t group)
{
    const burst_block *b = c->b;
    int64_t computed = 0;
    for (int64_t i = 0; i < k->n; i++)
        if (sees_no_more(c, k, i, k->start)) {
            open_gradient(&w->panels[i], c, k->batch, k->head, k->first + i);
            close_gradient(&w->panels[i], c, k->batch, k->head, w->rows, w->ld);
            k->opened[i] = 1;
        }
    if (k->start < k->end) first_keys(&w->keys, c, k, k->start, 1);
    for (int64_t index = k->start, after; index < k->end; index = after) {
        const int64_t turns = panels_at(c, k, index);
        const turns_of_tile mine = turns_at(c, k->head, group, index);
        after = next_tile(c, k->all, index + 1, k->end);
        const int more = after < k->end;
        task behind = {0};
        if (more)
            expect_keys(&w->keys, c, after);
        else if (ASKS_IN_BACKWARD)
            behind = task_behind(c, k);
        clear_tile_sums(w, c);
        for (int64_t i = 0, turn = 0; i < k->n; i++) {
            gradient_panel *p = &w->panels[i];
            if (!sees_tile(c, k->sees[i], index)) continue;
            if (!k->opened[i]) open_gradient_panel(p, w, c, k->batch, k->head, k->first + i);
            k->opened[i] = 1;
            const int last = sees_no_more(c, k, i, index + 1), parting = !more && turn + 1 == turns; /* from this task */
            if (ASKS_IN_BACKWARD) {
                stream ahead[MOST_STREAMS] = {0}; /* K, V, sums of dK and dV, results of both, Q, dO, dQ */
                stream_keys(ahead, c, k, after, &behind, turn, turns);
                stream_sums(ahead + 2, c, tile_of(&w->keys), mine, k->batch, k->kv_head, turn, turns);
                ahead[6] = stream_panel(&b->q, c, parting ? &behind : k, parting ? 0 : i + 1, b->d);
                ahead[7] = stream_panel(&b->dout, c, parting ? &behind : k, parting ? 0 : i + 1, b->dim_v);
                ahead[8] = stream_dq(b, k, p->row, last ? p->count : 0);
                ask_for(&w->keys, ahead, MOST_STREAMS);
            }
            computed += backward_tile(p, w, c, k);
            if (more) bring_keys(&w->keys, c, k, turn, turns);
            if (last) close_gradient(p, c, k->batch, k->head, w->rows, w->ld);
            if (!carry_on(c, thread)) return computed;
            turn++;
        }
        if (!turns && more) bring_keys(&w->keys, c, k, 0, 1); /* no panel sees this tile, but it has its turn */
        if (!wait_for_turn(c, thread, k->batch, k->kv_head, index, mine)) return computed;
        settle_tile_sums(w, c, k, mine);
        pass_turn(c, k->batch, k->kv_head, index);
        if (more) turn_to_keys(&w->keys, c, k, after, 1);
    }
    return computed;
}

/* A thread takes tasks until none is left. */
static void forward_worker(call *c, int thread, arena scratch)
{
    forward_room w;
    take_forward(&scratch, &w, c);
    w.how = bend_of(c->b);
    shape_tiles();
    int64_t computed = 0, t;
    while ((t = atomic_fetch_add(&c->next, 1)) < c->tasks && carry_on(c, thread)) {
        task k = task_of(c, t);
        computed += forward_task(&w, c, thread, &k);
    }
    release_tiles();
    atomic_fetch_add(&c->computed, computed);
}

static void backward_worker(call *c, int thread, arena scratch)
{
    backward_room w;
    take_backward(&scratch, &w, c);
    w.how = bend_of(c->b);
    shape_tiles();
    int64_t computed = 0, t;
    while ((t = atomic_fetch_add(&c->next, 1)) < c->tasks && carry_on(c, thread)) {
        task k = task_of(c, t);
        computed += backward_task(&w, c, thread, &k, group_of(c, t));
    }
    release_tiles();
    atomic_fetch_add(&c->computed, computed);
}

#endif
