/* The verbs of the CPU backend.  Compiled once for each instruction set, accumulator and direction:
 *
 *   -DBURST_AMX (bfloat16; with -DBURST_PIECES=3 float32, with -DBURST_DOT by vdpbf16ps) | -DBURST_AVX512 | -DBURST_AVX2 | -DBURST_SVE=bytes | (nothing: portable)
 *   -DBURST_DOUBLE | (nothing: float)
 *   -DBURST_ONLY_FORWARD | -DBURST_ONLY_BACKWARD | (nothing: both): verbs that are not there take no time to compile
 */
#ifdef BURST_AMX
#include "amx_backward.h"
#else
#include "backward.h"
#endif
#include "walk.h"

int64_t burst_abi(void) { return BURST_ABI * 1000 + (int64_t)sizeof(burst_block); }

/* Queries of a panel and keys of a counted tile. */
void burst_tile(int64_t *rows, int64_t *keys)
{
    *rows = NR;
    *keys = BURST_KEYS_BACKWARD;
}

static int64_t forward_bytes(call *c, burst_block *b, arena *shared)
{
    arena mine = {NULL, 0};
    forward_room w;
    plan_call(c, b, BURST_KEYS_FORWARD, 0, shared);
    take_forward(&mine, &w, c);
    return mine.used;
}

static int64_t backward_bytes(call *c, burst_block *b, arena *shared)
{
    arena mine = {NULL, 0};
    backward_room w;
    plan_call(c, b, BURST_KEYS_BACKWARD, 1, shared);
    take_backward(&mine, &w, c);
    return mine.used;
}

/* Scratch for a block of these sizes or smaller ones, all threads together. */
int64_t burst_scratch_bytes(burst_block *b, int64_t backward)
{
    call c;
    arena shared = {NULL, 0};
    if (!b->batch || !b->rows_q || !b->rows_k) return 0;
    const int64_t each = backward ? backward_bytes(&c, b, &shared) : forward_bytes(&c, b, &shared);
    return shared.used + MAX(1, MIN(b->threads, b->batch * b->heads * c.panels)) * each;
}

#ifndef BURST_ONLY_BACKWARD
/* 0: done; 1: progress asked to stop; 2: too little scratch */
int burst_attend(burst_block *b)
{
    call c;
    arena shared = {b->scratch, 0};
    if (burst_scratch_bytes(b, 0) > b->scratch_bytes) return 2;
    const int64_t each = forward_bytes(&c, b, &shared);
    survey_tiles(&c);
    rank_groups(&c);
    run(&c, forward_worker, shared, each);
    return atomic_load(&c.stop);
}
#endif

/* n numbers as REAL: where they lie, if they are that already, else in room [n] */
INLINE const REAL *as_real(const char *src, int64_t step, int64_t n, REAL *room, int type)
{
    if (type == (int)TYPE_OF_REAL && step == sizeof(REAL)) return (const REAL *)src;
    load_row(src, step, n, room, type);
    return room;
}

/* Threads for a pass over batch x rows_q rows of that many numbers: all, or one, as starting them takes some time.  (Other numbers in between
 * would make OpenMP end threads, and start them anew for the next kernel.) */
INLINE int team_for(const burst_block *b, int64_t numbers)
{
    return b->batch * b->rows_q * numbers < 1 << 16 ? 1 : (int)MAX(1, b->threads);
}

/* final = out, rounded once; where heads follow each other in both, all of a row at once */
void burst_round(burst_block *b)
{
    const int64_t size = SIZE_OF_TYPE[b->type], real = (int64_t)sizeof(REAL);
    const int dense = b->out.step[3] == real && b->final.step[3] == size && b->out.step[2] == b->dim_v * real && b->final.step[2] == b->dim_v * size;
    const int64_t heads = dense ? 1 : b->heads, n = dense ? b->heads * b->dim_v : b->dim_v;
#ifdef _OPENMP
#pragma omp parallel for collapse(2) num_threads(team_for(b, b->heads * b->dim_v))
#endif
    for (int64_t batch = 0; batch < b->batch; batch++)
        for (int64_t row = 0; row < b->rows_q; row++)
            for (int64_t head = 0; head < heads; head++) {
                const char *from = row_at(&b->out, batch, row, head);
                char *to = row_at(&b->final, batch, row, head);
                REAL room[64];
                for (int64_t c = 0, some; c < n; c += some) {
                    some = b->out.step[3] == real ? n : MIN(64, n - c);
                    const REAL *x = as_real(from + c * b->out.step[3], b->out.step[3], some, room, TYPE_OF_REAL);
                    store_row(to + c * b->final.step[3], b->final.step[3], some, x, 1, (int)b->type);
                }
            }
}

#ifndef BURST_ONLY_FORWARD
int burst_attend_backward(burst_block *b)
{
    call c;
    arena shared = {b->scratch, 0};
    if (burst_scratch_bytes(b, 1) > b->scratch_bytes) return 2;
    const int64_t each = backward_bytes(&c, b, &shared);
    survey_tiles(&c);
    rank_groups(&c);
    prepare_backward(&c);
    run(&c, backward_worker, shared, each);
    return atomic_load(&c.stop);
}

/* delta_i = sum_c dout_ic out_ic of a row, for all heads */
NOINLINE void delta_of_row(burst_block *b, int64_t batch, int64_t row)
{
    for (int64_t head = 0; head < b->heads; head++) {
        const char *from_x = row_at(&b->dout, batch, row, head), *from_y = row_at(&b->final, batch, row, head);
        REAL room[2][64], rest = 0;
        vec sum[4] = {{0}};
        for (int64_t c = 0; c < b->dim_v; c += 64) {
            const int64_t n = MIN(64, b->dim_v - c);
            const REAL *x = as_real(from_x + c * b->dout.step[3], b->dout.step[3], n, room[0], (int)b->type);
            const REAL *y = as_real(from_y + c * b->final.step[3], b->final.step[3], n, room[1], (int)b->type);
            int64_t i = 0;
            for (; i + 4 * LANES <= n; i += 4 * LANES)
                UNROLL for (int j = 0; j < 4; j++) sum[j] += loadu(x + i + j * LANES) * loadu(y + i + j * LANES);
            for (; i + LANES <= n; i += LANES) sum[0] += loadu(x + i) * loadu(y + i);
            for (; i < n; i++) rest += x[i] * y[i];
        }
        vec all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        UNROLL for (int half = LANES / 2; half > 0; half /= 2)
            UNROLL for (int i = 0; i < half; i++) all[i] += all[i + half];
        *entry_at(&b->delta, batch, head, row) = all[0] + rest;
    }
}

/* Of all rows; out is `final` here, both of the caller's type.  Subnormals count as 0, as in dP, from which delta is taken. */
void burst_delta(burst_block *b)
{
#ifdef _OPENMP
#pragma omp parallel for collapse(2) num_threads(team_for(b, b->heads * b->dim_v))
#endif
    for (int64_t batch = 0; batch < b->batch; batch++)
        for (int64_t row = 0; row < b->rows_q; row++) {
            const unsigned modes = set_modes(get_modes() | FLUSH);
            delta_of_row(b, batch, row);
            set_modes(modes);
        }
}
#endif

/* What the numbers of an array span: their largest magnitude, NaN and infinities too, and the least of those that are normal numbers, or infinity */
typedef struct {
    double top, least;
} reach;

INLINE void look_at_row(const char *from, int64_t step, int64_t n, word normal, word *top, word *least)
{
    for (int64_t i = 0; i < n; i++) {
        const word size = magnitude(*(const REAL *)(from + i * step));
        *top = MAX(*top, size);
        *least = MIN(*least, size - normal);
    }
}

static double of_magnitude(word size)
{
    REAL x;
    memcpy(&x, &size, sizeof x);
    return (double)x;
}

static reach reach_of(const burst_array *x, const burst_block *b, int64_t rows, int64_t heads, int64_t n)
{
    const word normal = magnitude((REAL)(sizeof(REAL) == 8 ? 0x1p-1022 : 0x1p-126));
    word top = 0, least = (word)-1; /* the least is of what magnitudes are beyond the least normal number: less than that wraps */
#ifdef _OPENMP
#pragma omp parallel for collapse(2) reduction(max : top) reduction(min : least) num_threads(team_for(b, heads * n))
#endif
    for (int64_t batch = 0; batch < b->batch; batch++)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < heads; head++) {
                const char *from = row_at(x, batch, row, head);
                word largest = 0, smallest = (word)-1;
                if (x->step[3] == sizeof(REAL))
                    look_at_row(from, sizeof(REAL), n, normal, &largest, &smallest);
                else
                    look_at_row(from, x->step[3], n, normal, &largest, &smallest);
                top = MAX(top, largest);
                least = MIN(least, smallest);
            }
    return (reach){of_magnitude(top), least < INFINITE - normal ? of_magnitude(least + normal) : INFINITY};
}

#define SMALL 0x1p-60       /* products of numbers that are all below this, and of their pieces, might be subnormal */
#define LAST_PIECE 0x1p-102 /* the last piece of numbers below this would be */

/* Whether numbers times factor are finite and neither huge nor so tiny that their last piece would be subnormal, nor the largest of them
 * small: then float32 may be split.  Zeros may be; subnormals count as such. */
INLINE int tame(reach x, double factor)
{
    const double top = x.top * factor;
    return x.top == 0 || (x.top < (double)TALL && top < (double)TALL && top >= SMALL && x.least * factor >= LAST_PIECE);
}

INLINE int exponent_of(double x) { return x > 0 && isfinite(x) ? ilogb(x) : 0; }

/* What dout, which spans x, is multiplied by: 1, or where pieces of small numbers would be lost as much as is safe.  Neither must sums of products
 * with V, Q and K overflow (2^32 terms), nor what results are multiplied by in the end, the smaller of 1, scale and scale / factor over this, be
 * subnormal. */
static double factor_of_dout(const burst_block *b, reach x, double v_top, double qk_top)
{
    if (x.top == 0 || (x.top >= SMALL && x.least >= LAST_PIECE)) return 1;
    const int room = 126 - 32 - MAX(0, exponent_of(v_top)) - MAX(0, exponent_of(qk_top)) - exponent_of(x.top);
    const int back = 126 + MIN(0, exponent_of(MIN(b->scale, b->scale / factor_of(b))));
    return ldexp(1, MAX(0, MIN(room, back)));
}

/* Of q, k and v, all of type REAL: by these alone, as forward and backward must round scores alike.  dout is brought into range by a power of
 * 2; only where it holds infinities, NaN or huge numbers backward goes another way. */
int burst_tame(burst_block *b)
{
    const reach q = reach_of(&b->q, b, b->rows_q, b->heads, b->d), k = reach_of(&b->k, b, b->rows_k, b->kv_heads, b->d);
    const reach v = reach_of(&b->v, b, b->rows_k, b->kv_heads, b->dim_v);
    if (!tame(q, factor_of(b)) || !tame(k, 1) || !tame(v, 1)) return 0;
    if (!b->dout.data) return 1;
    const reach x = reach_of(&b->dout, b, b->rows_q, b->heads, b->dim_v);
    if (!(x.top < (double)TALL)) return 0;
    b->dout_factor = factor_of_dout(b, x, v.top, MAX(q.top * factor_of(b), k.top));
    return 1;
}
