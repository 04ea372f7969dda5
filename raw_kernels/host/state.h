/* The running state (out, lse) of a panel of queries: in, out, and from one maximum to the next. */
#ifndef BURST_STATE_H
#define BURST_STATE_H

#include <float.h>

#include "convert.h"
#include "tile.h"

typedef struct {
    lanes q;
    void *query;    /* Q' as the kernel wants it: [d, NR] of REAL times its factor; see amx.h for bfloat16 */
    REAL *out;      /* [dv, NR] O', not yet divided by l */
    REAL *top, *l;  /* [NR] m, or -inf where the lane has seen no score above -inf; sum of P */
    REAL *divisor;  /* [NR] what O' is divided by: l, or the sum of P as it is multiplied (ROUNDED_SUMS) */
    REAL *ref;      /* [NR] m log2(e), or 0 there */
    REAL *low;      /* [NR] what rounding took from ref, where that is more than a weight can stand, else 0 */
    int64_t row;    /* first row */
    int count;      /* rows */
    int unset;      /* some lane has no m yet */
    int wide;       /* some lane's low is not 0 */
    int steep;      /* tiles that are still done the classic way at once: one of the last outgrew m by far */
} panel;

/* Beyond this, half a rounding of ref is no longer small beside 1, and 2^(s log2(e) - ref) of the largest score might be
 * 0 or infinite.  Such panels go the classic way, tile by tile, with ref + low in place of ref. */
#if defined(BURST_AMX) && !BURST_SPLIT /* a weight that is not 1 where it should be is rounded to bfloat16 then, and l is not */
#define FAR_SCORE 0x1p13f
#else
#define FAR_SCORE ((REAL)(sizeof(REAL) == 8 ? 0x1p50 : 0x1p21))
#endif

/* Whether weights, which are rounded to bfloat16, have a second sum, of what they are then.  lse is of the first; out, divided by the second,
 * does not feel the rounding of a weight that outgrows all others of its row.  By vdpbf16ps it is taken with the first: one more instruction for
 * 64 products of d 64.  On AMX, where 2^x is most of the time, that would be a seventh of it: see sum_rounded. */
#if defined(BURST_AMX) && !BURST_SPLIT
#define ROUNDED_SUMS 1
#else
#define ROUNDED_SUMS 0
#endif

/* Columns of O' are padded to whole register blocks, on AMX to whole tiles. */
#ifdef BURST_AMX
#define OUT_ROWS(dv) ROUND_UP(dv, 32)
#else
#define OUT_ROWS(dv) ROUND_UP(dv, KR)
#endif

/* score log2(e), rounded; where that is beyond the largest number and the score is not, that number: the rest goes into low */
#define LARGEST ((REAL)(sizeof(REAL) == 8 ? DBL_MAX : FLT_MAX))
INLINE REAL reference_of(REAL score)
{
    const double exact = (double)score * LOG2E;
    return isfinite(score) && fabs(exact) > LARGEST ? (REAL)copysign(LARGEST, exact) : (REAL)exact;
}

/* What is missing in it; 0 where that is not finite, or cannot be told */
INLINE double rest_of(REAL score, REAL reference)
{
    const double exact = (double)score * LOG2E;
    if (!isfinite(reference) || !(fabs(exact) <= FUSED_REACH)) return 0;
    return sizeof(REAL) == 8 ? fma((double)score, LOG2E, -(double)reference) : exact - reference;
}

INLINE void take_state(arena *a, panel *p, int64_t dv)
{
    take_lanes(a, &p->q);
    p->out = TAKE(a, REAL, OUT_ROWS(dv) * NR);
    p->top = TAKE(a, REAL, NR);
    p->l = TAKE(a, REAL, NR);
#if ROUNDED_SUMS
    p->divisor = TAKE(a, REAL, NR);
#else
    p->divisor = p->l;
#endif
    p->ref = TAKE(a, REAL, NR);
    p->low = TAKE(a, REAL, NR);
}

/* Panel `index` of the block's rows, and what earlier blocks left of them.  rows: [NR, ld] to work in. */
NOINLINE void open_state(panel *p, const call *c, int64_t batch, int64_t head, int64_t index, REAL *rows, int64_t ld)
{
    const burst_block *b = c->b;
    p->row = index * NR;
    p->count = (int)MIN(NR, b->rows_q - p->row);
    set_lanes(&p->q, b, head, p->row, p->count);
    memset(p->out, 0, OUT_ROWS(b->dim_v) * NR * sizeof(REAL));
    p->unset = p->wide = p->steep = 0;
    if (b->first) { /* nothing yet; lanes without a row have m = 0, l = 1 */
        for (int i = 0; i < NR; i++) {
            p->top[i] = i < p->count ? (REAL)-INFINITY : 0;
            p->l[i] = i < p->count ? 0 : 1;
            p->ref[i] = p->low[i] = 0;
            p->divisor[i] = p->l[i];
        }
        p->unset = 1;
        return;
    }
    for (int i = 0; i < NR; i++) {
        const REAL lse = i >= p->count ? 0 : *entry_at(&b->lse, batch, head, p->row + i);
        const int none = lse == (REAL)-INFINITY;
        p->top[i] = lse;
        p->ref[i] = none ? 0 : reference_of(lse);
        /* out stands for weight 2^exact; what rounding took from that goes into l, or into low */
        const double rest = none ? 0 : rest_of(lse, p->ref[i]);
        const int wide = !none && fabs((double)lse * LOG2E) >= FAR_SCORE && isfinite(p->ref[i]);
        p->low[i] = wide ? (REAL)rest : 0;
        p->divisor[i] = p->l[i] = none ? 0 : wide ? 1 : (REAL)exp2(rest);
        p->unset |= none;
        p->wide |= p->low[i] != 0;
    }
    for (int i = 0; i < p->count; i++) {
        REAL *row = rows + i * ld;
        load_row(row_at(&b->out, batch, p->row + i, head), b->out.step[3], b->dim_v, row, TYPE_OF_REAL);
        for (int64_t j = 0; j < b->dim_v; j++) row[j] = p->l[i] == 0 ? 0 : row[j] * p->l[i];
    }
    rows_to_panel(rows, ld, p->count, b->dim_v, 1, p->out);
}

/* (ref + rest) / LOG2E, rounded once: where REAL is double too, as at scores of some hundreds an error of lse is what P errs by. */
INLINE REAL in_scores_unit(REAL ref, double rest)
{
    const double sum = (double)ref + rest, whole = sum / LOG2E;
#ifdef BURST_DOUBLE
    const double back = sum - ref, lost = (ref - (sum - back)) + (rest - back); /* ref + rest = sum + lost, exactly */
    const double more = whole + (fma(-whole, LOG2E, sum) + lost) / LOG2E;
    return isfinite(sum) ? more : isfinite(ref) ? ref / LOG2E + rest / LOG2E : whole;
#else
    return (REAL)whole;
#endif
}

/* out /= divisor, and the inverse that is left to do */
NOINLINE void divide_out(panel *p, int64_t dv, REAL *inverse)
{
    for (int j = 0; j < VR; j++) {
        vec by = load(p->divisor + j * LANES);
        by = pick(by == 0, splat(1), by);
        for (int64_t c = 0; c < dv; c++) store(p->out + c * NR + j * LANES, load(p->out + c * NR + j * LANES) / by);
        store(inverse + j * LANES, splat(1));
    }
}

NOINLINE void close_panel(panel *p, const call *c, int64_t batch, int64_t head, REAL *rows, int64_t ld)
{
    const burst_block *b = c->b;
    REAL inverse[NR] __attribute__((aligned(VBYTES)));
    for (int i = 0; i < NR; i++) inverse[i] = p->divisor[i] == 0 ? 1 : 1 / p->divisor[i];
    if (!b->first) divide_out(p, b->dim_v, inverse); /* l times its rounded inverse is not 1: over many hops out would drift */
    const burst_array *to = b->final.data ? &b->final : &b->out;
    const int type = b->final.data ? (int)b->type : TYPE_OF_REAL;
    int direct = p->count == NR && is_even(to, b->dim_v, type);
#if defined(BURST_AMX) && !BURST_SPLIT
    if (type == BURST_BF16 && p->count == NR && to->step[3] == 2 && b->dim_v % 32 == 0) {
        panel_to_bf16_rows(p->out, inverse, b->dim_v, row_at(to, batch, p->row, head), to->step[1]);
        direct = 1;
    } else
#endif
    if (direct)
        panel_to_rows(p->out, inverse, b->dim_v, (REAL *)row_at(to, batch, p->row, head), to->step[1] / (int64_t)sizeof(REAL));
    else
        panel_to_rows(p->out, inverse, b->dim_v, rows, ld);
    REAL lse[NR];
    for (int i = 0; i < NR; i++) lse[i] = in_scores_unit(p->ref[i], (double)p->low[i] + log2_of((double)p->l[i]));
    for (int i = 0; i < p->count; i++) {
        if (!direct) store_row(row_at(to, batch, p->row + i, head), to->step[3], b->dim_v, rows + i * ld, 1, type);
        *entry_at(&b->lse, batch, head, p->row + i) = lse[i];
    }
}

/* A tile that outgrows its m is done twice.  Behind one such, where scores are far apart, more come: the next ones start with their maximum,
 * which costs a tenth, until STEEP_TILES of them would not have needed it. */
#ifndef STEEP_TILES
#define STEEP_TILES 2
#endif
#define STEEP_FADE ((REAL)0x1p-36) /* of what was summed before: about 1 / LIMIT, as a tile's sum has many weights */

/* Scores s [keys, NR] times factor are there: take their maximum, and bring all that was summed so far to it.  Where `settled`, lanes that
 * have an m keep it. */
NOINLINE void raise_maximum(panel *p, const REAL *s, int64_t keys, REAL factor, int64_t dv, int settled)
{
    p->unset = p->wide = 0;
    for (int j = 0; j < VR; j++) {
        const vec old = load(p->top + j * LANES);
        vec tops[4]; /* keys come in blocks of KR */
        UNROLL for (int k = 0; k < 4; k++) tops[k] = splat((REAL)-INFINITY);
        for (int64_t i = 0; i < keys; i += 4)
            UNROLL for (int k = 0; k < 4; k++) tops[k] = larger(load(s + (i + k) * NR + j * LANES), tops[k]);
        vec top = larger(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])) * factor, old);
        const ivec nothing = old == (REAL)-INFINITY;
        if (settled) top = pick(nothing, top, old);
        const ivec none = top == (REAL)-INFINITY;
        const vec old_ref = load(p->ref + j * LANES), old_low = load(p->low + j * LANES);
        const vec product = top * LOG2E, largest = pick(top < 0, splat(-LARGEST), splat(LARGEST));
        const ivec beyond = (top - top == 0) & (product - product != 0);
        const vec ref = pick(none, splat(0), pick(beyond, largest, product));
        const ivec far = ((ref >= FAR_SCORE) | (ref <= -FAR_SCORE)) & (ref - ref == 0); /* and finite */
        const vec low = pick(far, fused(top, LOG2E, ref), splat(0));
        const vec fade = pick(nothing | (top == old), splat(1), exp2_vec((old_ref - ref) + (old_low - low)));
        store(p->top + j * LANES, top);
        store(p->ref + j * LANES, pick(top == old, old_ref, ref));
        store(p->low + j * LANES, pick(top == old, old_low, low));
        p->wide |= any(far);
        if (any(fade < STEEP_FADE)) p->steep = STEEP_TILES;
        store(p->l + j * LANES, load(p->l + j * LANES) * fade);
        if (ROUNDED_SUMS) store(p->divisor + j * LANES, load(p->divisor + j * LANES) * fade);
        if (any(fade != 1)) for (int64_t c = 0; c < dv; c++) {
            REAL *o = p->out + c * NR + j * LANES;
            store(o, load(o) * fade);
        }
        p->unset |= any(none);
    }
}

/* Whether some sum is above a tile's limit, or NaN */
INLINE int too_high(const vec *sum, REAL limit)
{
    ivec high = (ivec){0};
    UNROLL for (int j = 0; j < VR; j++) high |= ~(sum[j] < limit);
    return any(high);
}

/* Whether a lane that has no m yet may see one of the keys at positions min to max */
INLINE int waits_for(const panel *p, INT min, INT max)
{
    ivec waits = (ivec){0};
    UNROLL for (int j = 0; j < VR; j++)
        waits |= (load(p->top + j * LANES) == (REAL)-INFINITY) & (loadi(p->q.lo + j * LANES) <= max) & (loadi(p->q.hi + j * LANES) > min);
    return any(waits);
}

#endif
