/* Forward on AMX, in bfloat16 or in float32 by pieces: see forward.h for the method and amx.h for the layouts.
 *
 * The tile products are so fast that the exponential is most of the time: scores of 32 keys come from AMX into L1,
 * and leave as bfloat16 weights in the order in which the second product wants them.  By vdpbf16ps they
 * never reach L1 as scores.
 */
#ifndef BURST_AMX_FORWARD_H
#define BURST_AMX_FORWARD_H

#include "amx.h"

#define SHARES (TILE_REGISTERS ? 1 : VR / 3) /* of what is asked for, a block */
#define TOTALS (VR * (1 + ROUNDED_SUMS)) /* of a panel's weights and, behind them, of these as they are rounded */
#define SUMS_AT_ONCE (!TILE_REGISTERS) /* both */

/* sum + what is in 16 pairs of weights */
INLINE vec add_pairs(vec sum, vec words)
{
#if PIECES == 1
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)words, (__m512bh)_mm512_set1_epi32(0x3f803f80));
#else
    (void)words;
    return sum;
#endif
}

/* Weights of two keys as a pair, and the sum of what they are then */
INLINE void put_and_sum(uint32_t *pairs, int64_t plane, vec a, vec b, vec *rounded)
{
#if SUMS_AT_ONCE
    const vec words = pair_of(a, b);
    (void)plane;
    put(pairs, words);
    *rounded = add_pairs(*rounded, words);
#else
    (void)rounded;
    put_pair(pairs, plane, a, b);
#endif
}

/* The second sums, behind the first: of lanes whose weights of a tile outgrow all before.  Elsewhere no weight is more than half of its row, and
 * the first sum serves: where the largest weight is 1, as with a maximum, others of that share are rounded as well. */
NOINLINE void sum_rounded(const panel *p, const uint32_t *pairs, int64_t keys, vec *sum)
{
    enum { CHAINS_OF_SUMS = 4 };
    for (int j = 0; j < VR; j++) {
        const ivec outgrown = sum[j] > load(p->l + j * LANES);
        sum[TOTALS - VR + j] = sum[j];
        if (!any(outgrown)) continue;
        vec total[CHAINS_OF_SUMS] = {{0}};
        for (int64_t i = 0; i < keys / 2; i += CHAINS_OF_SUMS)
            UNROLL for (int c = 0; c < CHAINS_OF_SUMS; c++)
                total[c] = add_pairs(total[c], loadu((const float *)(pairs + (i + c) * NR + j * LANES)));
        sum[TOTALS - VR + j] = pick(outgrown, (total[0] + total[1]) + (total[2] + total[3]), sum[j]);
    }
}

typedef struct {
    panel panels[BURST_PANELS];
    key_feed keys;
    float *s;        /* [keys, NR] */
    uint32_t *p;     /* [PIECES, keys / 2, NR] P, pairs of keys */
    int64_t plane;
    float *rows;     /* [NR, ld], or [PIECES, NR, ld] of bfloat16: on the way in and out of a panel */
    int64_t ld;
    bend how;
} forward_room;

INLINE void take_forward(arena *a, forward_room *w, const call *c)
{
    const burst_block *b = c->b;
    const int64_t keys = ROUND_UP(c->tile_keys, KR);
    w->ld = ROUND_UP(MAX(b->d, b->dim_v), STEP) + STEP;
    take_keys(a, &w->keys, c, 0);
    w->s = TAKE(a, float, keys * NR);
    w->plane = keys / 2 * NR;
    w->p = TAKE(a, uint32_t, PIECES * w->plane);
    w->rows = TAKE(a, float, NR * w->ld * (PIECES > 2 ? 2 : 1));
    for (int64_t i = 0; i < c->most_panels; i++) {
        panel *p = &w->panels[i];
        take_state(a, p, b->dim_v);
        p->query = TAKE(a, uint32_t, PIECES * (ROUND_UP(b->d, STEP) / 2 * NR));
    }
}

NOINLINE void open_panel(panel *p, forward_room *w, const call *c, int64_t batch, int64_t head, int64_t index)
{
    const burst_block *b = c->b;
    open_state(p, c, batch, head, index, w->rows, w->ld);
    load_factor(&b->q, batch, head, p->row, p->count, b->d, QUERY_FACTOR(b), (bf16 *)w->rows, w->ld, p->query, NULL);
}

INLINE pairs_of columns_of(const void *panel, int64_t n)
{
    const int64_t padded = ROUND_UP(n, STEP);
    return (pairs_of){panel, NR, padded / 2 * NR};
}

/* P = 2^(factor s log2(e) - m) of `keys` keys and the lanes [lane, lane + count), as pairs of keys, and their sums; low only counts where the
 * panel is wide */
INLINE void weigh_lanes(const float *s, int64_t keys, float factor, const panel *state, uint32_t *pairs, int64_t plane,
                        vec *sum, int lane, int count, const int wide)
{
    for (int j = lane; j < lane + count; j += LANES) {
        const vec m = load(state->ref + j), low = wide ? load(state->low + j) : zero();
        vec even = zero(), odd = zero(), rounded = zero();
        for (int64_t i = 0; i < keys; i += 2) {
            vec a = fused(scored(load(s + i * NR + j), factor), LOG2E, m);
            vec b = fused(scored(load(s + (i + 1) * NR + j), factor), LOG2E, m);
            if (wide) {
                a -= low;
                b -= low;
            }
            a = exp2_vec(a);
            b = exp2_vec(b);
            even += a;
            odd += b;
            put_and_sum(pairs + i / 2 * NR + j, plane, a, b, &rounded);
        }
        sum[j / LANES] += even + odd;
        if (SUMS_AT_ONCE) sum[TOTALS - VR + j / LANES] += rounded;
    }
}

/* Of a block of KR keys */
NOINLINE void weigh(const float *s, float factor, const panel *state, uint32_t *pairs, int64_t plane, vec *sum, int lane)
{
    weigh_lanes(s, KR, factor, state, pairs, plane, sum, lane, GROUP, 0);
}

NOINLINE void weigh_wide(const float *s, int64_t keys, float factor, const panel *state, uint32_t *pairs, int64_t plane,
                         vec *sum)
{
    weigh_lanes(s, keys, factor, state, pairs, plane, sum, 0, NR, 1);
}

INLINE void scale_block(float *s, float factor) /* [KR, NR] */
{
    for (int i = 0; i < KR * VR; i++) store(s + i * LANES, load(s + i * LANES) * factor);
}

/* Products s of a block become scores, bent and masked; slopes as in bend_block.  Returns what they are still to be multiplied by. */
INLINE float bend_scores(const bf16_tile *t, int64_t block, const lanes *q, const burst_block *b, const bend *how, float *s,
                         float *slopes)
{
    const float factor = SCORE_FACTOR(b);
    const int cut = block_sight(&t->at, q, block) != FULL;
    if (!cut && how->softcap == 0 && !how->alibi) return factor;
    if (factor != 1) scale_block(s, factor);
    bend_block(s, slopes, q, how, t->at.pos + block * KR, (int)MIN(KR, t->at.live - block * KR), cut);
    return 1;
}

/* Blocks [from, to) the classic way: scores, their maximum, weights. */
NOINLINE void weigh_with_maximum(panel *p, forward_room *w, int64_t from, int64_t to, const burst_block *b, vec *sum)
{
    const int64_t keys = (to - from) * KR;
    const int even = w->how.softcap == 0 && !w->how.alibi && sees_all(&w->keys.tile.at, &p->q, from, to);
    const float factor = even ? SCORE_FACTOR(b) : 1; /* that is still to come */
    for (int64_t block = from; block < to; block++) {
        float *s = w->s + (block - from) * KR * NR;
        for (int lane = 0; lane < NR; lane += GROUP)
            bf16_scores(keys_of(&w->keys.tile, block), columns_of(p->query, b->d), TERMS_OF(b->d), s, lane);
        if (even) continue;
        const float left = bend_scores(&w->keys.tile, block, &p->q, b, &w->how, s, NULL);
        if (left != 1) scale_block(s, left);
    }
    raise_maximum(p, w->s, keys, factor, b->dim_v, 0);
    UNROLL for (int j = 0; j < TOTALS; j++) sum[j] = zero();
    weigh_wide(w->s, keys, factor, p, w->p, w->plane, sum);
    if (!SUMS_AT_ONCE) UNROLL for (int j = 0; j < VR; j++) sum[TOTALS - VR + j] = sum[j]; /* the largest weight is 1 */
}

/* Pair by pair: see scores.h. */
NOINLINE void add_values_carefully(panel *p, forward_room *w, const call *c, int64_t batch, int64_t head, int64_t from,
                                   int64_t to)
{
    const burst_block *b = c->b;
    const key_tile *t = &w->keys.tile.at;
    for (int64_t key = from * KR; key < MIN(to * KR, t->live); key++) {
        const char *v = row_at(&b->v, batch, t->first + key, head);
        for (int lane = 0; lane < NR; lane++)
            if (p->q.lo[lane] <= t->pos[key] && t->pos[key] < p->q.hi[lane]) {
                const uint32_t pair = w->p[(key - from * KR) / 2 * NR + lane];
                const float weight = from_bf16((bf16)(key % 2 ? pair >> 16 : pair));
                for (int64_t i = 0; i < b->dim_v; i++)
                    p->out[i * NR + lane] += weight * element(v + i * b->v.step[3], BURST_BF16);
            }
    }
}

INLINE void add_sums(panel *p, const vec *sum)
{
    UNROLL for (int j = 0; j < VR; j++) {
        store(p->l + j * LANES, load(p->l + j * LANES) + sum[j]);
        if (ROUNDED_SUMS) store(p->divisor + j * LANES, load(p->divisor + j * LANES) + sum[TOTALS - VR + j]);
    }
}

NOINLINE void forward_classic(panel *p, forward_room *w, const call *c, int64_t batch, int64_t head, int64_t from, int64_t to,
                              int careful)
{
    vec sum[TOTALS];
    ask_shares(&w->keys.ahead, (to - from) * SHARES);
    weigh_with_maximum(p, w, from, to, c->b, sum);
    add_sums(p, sum);
    if (careful)
        add_values_carefully(p, w, c, batch, head, from, to);
    else
        bf16_add_panel(turned_of(&w->keys.tile, from), (pairs_of){w->p, NR, w->plane}, (to - from) * KR, p->out,
                       COLUMNS_OF(c->b->dim_v), NULL);
}

#ifdef BURST_DOT
/* P of a block of KR keys as pairs of keys, and their sums, for NV vectors of lanes from `first`.  Where it is cut, hidden pairs are 0
 * whatever came out there. */
INLINE void weigh_dots(forward_room *w, int64_t block, const panel *p, const uint32_t *query, int64_t depth, float factor,
                       uint32_t *pairs, vec *sum, int first, const int NV, const int cut)
{
    const rows_of k = keys_of(&w->keys.tile, block);
    const INT *pos = w->keys.tile.at.pos + block * KR;
    vec s[DOT_ROWS][3];
    ask_shares(&w->keys.ahead, 1);
    dot_block(k.at, k.ld, query + first * LANES, NR, depth / 2, s, NV);
    UNROLL for (int j = 0; j < NV; j++) UNROLL for (int i = 0; i < DOT_ROWS; i++) s[i][j] = scored(s[i][j], factor);
    if (w->how.alibi)
        UNROLL for (int j = 0; j < NV; j++) UNROLL for (int i = 0; i < DOT_ROWS; i++) s[i][j] = tilted(&p->q, first + j, pos[i], s[i][j]);
    UNROLL for (int j = 0; j < NV; j++) {
        const int lane = (first + j) * LANES;
        const vec m = load(p->ref + lane);
        vec total = sum[first + j], rounded = sum[VR + first + j];
        UNROLL for (int i = 0; i < DOT_ROWS; i += 2) {
            vec x[2];
            UNROLL for (int r = 0; r < 2; r++) {
                x[r] = exp2_vec(fused(s[i + r][j], LOG2E, m));
                if (cut) x[r] = if_seen(&p->q, first + j, pos[i + r], x[r], zero());
                total += x[r];
            }
            put_and_sum(pairs + i / 2 * NR + lane, 0, x[0], x[1], &rounded);
        }
        sum[first + j] = total;
        sum[VR + first + j] = rounded;
    }
}
/* Of n blocks that all lanes see */
NOINLINE void weigh_full(forward_room *w, int64_t block, int64_t n, const panel *p, const uint32_t *query, int64_t depth, float factor,
                         uint32_t *pairs, vec *sum)
{
    for (int first = 0; first < VR; first += 3)
        for (int64_t i = 0; i < n; i++)
            weigh_dots(w, block + i, p, query, depth, factor, pairs + i * KR / 2 * NR, sum, first, 3, 0);
}
NOINLINE void weigh_cut(forward_room *w, int64_t block, const panel *p, const uint32_t *query, int64_t depth, float factor,
                        uint32_t *pairs, vec *sum, int first, span seen)
{
    first += seen.first;
    switch (seen.last - seen.first) {
    case 1: weigh_dots(w, block, p, query, depth, factor, pairs, sum, first, 1, 1); break;
    case 2: weigh_dots(w, block, p, query, depth, factor, pairs, sum, first, 2, 1); break;
    case 3: weigh_dots(w, block, p, query, depth, factor, pairs, sum, first, 3, 1); break;
    default: break;
    }
}

/* P of the blocks [from, to) and their sums.  Where `seen` is given and there is no softcap, vectors that see nothing of a block, nor lie
 * between some that do, get none; all else that is hidden is 0. */
INLINE void forward_weights(panel *p, forward_room *w, const burst_block *b, int64_t from, int64_t to, vec *sum, const parts *seen)
{
    enum { SOME = 4 }; /* blocks, of which K stays in L1 for all vectors */
    const bf16_tile *t = &w->keys.tile;
    const pairs_of query = columns_of(p->query, b->d);
    const int64_t depth = TERMS_OF(b->d);
    const int plain = w->how.softcap == 0;
    for (int64_t block = from, n; block < to; block += n) {
        uint32_t *pairs = w->p + (block - from) * KR / 2 * NR;
        for (n = 0; plain && n < MIN(SOME, to - block) && (!seen || block_sight(&t->at, &p->q, block + n) == FULL);) n++;
        if (n) {
            weigh_full(w, block, n, p, query.at, depth, SCORE_FACTOR(b), pairs, sum);
            continue;
        }
        n = 1;
        if (plain) {
            for (int i = 0; i < VR / 3; i++)
                weigh_cut(w, block, p, query.at, depth, SCORE_FACTOR(b), pairs, sum, 3 * i, seen->of[i].spans[block - from]);
        } else {
            ask_shares(&w->keys.ahead, SHARES);
            bf16_scores(keys_of(t, block), query, depth, w->s, 0);
            weigh(w->s, bend_scores(t, block, &p->q, b, &w->how, w->s, NULL), p, pairs, w->plane, sum, 0);
        }
    }
}
#else
/* P of the blocks [from, to) and their sums.  The products of the next block are made between the weights of this one, a group of
 * lanes at a time. */
INLINE void forward_weights(panel *p, forward_room *w, const burst_block *b, int64_t from, int64_t to, vec *sum, const parts *seen)
{
    (void)seen; /* hidden weights are 0 */
    const bf16_tile *t = &w->keys.tile;
    const pairs_of query = columns_of(p->query, b->d);
    const int64_t depth = TERMS_OF(b->d);
    float *s = w->s, *next = w->s + KR * NR;
    for (int lane = 0; lane < NR; lane += GROUP) bf16_scores(keys_of(t, from), query, depth, s, lane);
    for (int64_t block = from; block < to; block++) {
        uint32_t *pairs = w->p + (block - from) * KR / 2 * NR;
        const float factor = bend_scores(t, block, &p->q, b, &w->how, s, NULL);
        ask_shares(&w->keys.ahead, SHARES);
        for (int lane = 0; lane < NR; lane += GROUP) {
            if (block + 1 < to) bf16_scores(keys_of(t, block + 1), query, depth, next, lane);
            weigh(s, factor, p, pairs, w->plane, sum, lane);
        }
        float *done = s;
        s = next;
        next = done;
    }
}
#endif

/* Blocks [from, to) with the m that there is.  Returns the first block that is not added: to, or from where weights are too high. */
NOINLINE int64_t forward_blocks(panel *p, forward_room *w, const burst_block *b, int64_t from, int64_t to)
{
    vec sum[TOTALS];
    UNROLL for (int j = 0; j < TOTALS; j++) sum[j] = zero();
    parts parts_seen;
    const parts *seen = sees_all(&w->keys.tile.at, &p->q, from, to) ? NULL : &parts_seen;
    if (seen) find_parts(&parts_seen, &w->keys.tile.at, &p->q, from, to);
    forward_weights(p, w, b, from, to, sum, seen);
    if (too_high(sum, w->keys.tile.at.limit)) return from;
    if (ROUNDED_SUMS && !SUMS_AT_ONCE) sum_rounded(p, w->p, (to - from) * KR, sum);
    add_sums(p, sum);
    bf16_add_panel(turned_of(&w->keys.tile, from), (pairs_of){w->p, NR, w->plane}, (to - from) * KR, p->out, COLUMNS_OF(b->dim_v), seen);
    return to;
}

/* Blocks [from, to), in which some lane may wait for an m; where `classic`, all of them that way */
NOINLINE void forward_range(panel *p, forward_room *w, const call *c, int64_t batch, int64_t head, int64_t from, int64_t to, int classic,
                            int careful)
{
    const key_tile *t = &w->keys.tile.at;
    while (from < to) {
        int64_t end = from; /* of the blocks in which nobody waits for an m */
        if (!p->wide && !classic)
            while (end < to && !(p->unset && waits_for(p, t->block_min[end], t->block_max[end]))) end++;
        const int64_t added = end > from ? forward_blocks(p, w, c->b, from, end) : from;
        if (added == from) { /* a lane gets its m from the first block in which it sees something */
            if (end == from) end = p->wide || classic ? to : from + 1;
            forward_classic(p, w, c, batch, head, from, end, careful);
        }
        from = end;
    }
}

/* Returns how many counted tiles it computed. */
NOINLINE int forward_tile(panel *p, forward_room *w, const call *c, const task *of)
{
    const int64_t batch = of->batch, head = of->kv_head;
    const key_tile *t = &w->keys.tile.at;
    int64_t from, to;
    int full;
    seen_blocks(t, &p->q, &from, &to, &full);
    if (from == to) return 0;
    const int careful = t->wild_v && !full, classic = careful || p->steep;
    p->steep = MAX(0, p->steep - 1);
    share_out(&w->keys.ahead, (to - from) * SHARES);
    const int64_t lead = p->unset && !p->wide && !classic ? leading_block(t, &p->q, from, to, c->from_last) : from;
    if (lead > from) { /* all lanes get their m at once, so that nobody waits */
        forward_classic(p, w, c, batch, head, lead, lead + 1, 0);
        forward_range(p, w, c, batch, head, from, lead, 0, 0);
        forward_range(p, w, c, batch, head, lead + 1, to, 0, 0);
    } else {
        forward_range(p, w, c, batch, head, from, to, classic, careful);
    }
    return (int)((to * KR - 1) / BURST_KEYS_BACKWARD - from * KR / BURST_KEYS_BACKWARD + 1);
}

#endif
