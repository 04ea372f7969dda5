/* Tasks, threads, scratch, and the calling thread's duty to MPI.
 *
 * A task is (batch, head, group of query panels).  How rows fall into panels and groups depends on the shapes alone,
 * never on the number of threads; threads only take the next task.  So results do not depend on them, to the bit.
 */
#ifndef BURST_TASKS_H
#define BURST_TASKS_H

#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "convert.h"
#include "scores.h"

#define ALIGNMENT 128
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define ROUND_UP(n, m) (((n) + (m)-1) / (m) * (m))

/* ---------------------------------------------------------------- scratch */

/* With base NULL it only counts: sizes are told and memory is cut by the same code. */
typedef struct {
    char *base;
    int64_t used;
} arena;

INLINE void *take(arena *a, int64_t bytes)
{
    char *p = a->base ? a->base + a->used : NULL;
    a->used += ROUND_UP(bytes, ALIGNMENT);
    return p;
}
#define TAKE(arena, type, count) ((type *)take(arena, (int64_t)(count) * (int64_t)sizeof(type)))

/* ---------------------------------------------------------------- a call */

#ifndef BURST_PANELS
#define BURST_PANELS 16 /* panels of a group: a packed tile of keys serves that many */
#endif

typedef struct {
    burst_block *b;
    int64_t tile_keys;
    int64_t panels, group_panels, groups, tiles, tasks;
    int32_t *tile_min, *tile_max; /* [tiles] extremes of the keys' positions */
    atomic_int *turn;             /* [batch * kv_heads * tiles] backward: how many groups have added to dK, dV */
    int32_t *group_lo, *group_hi; /* [groups] least lo, largest hi: backward */
    atomic_long next;             /* task */
    atomic_int stop, working;
    atomic_long computed;
    int64_t heard;                /* when progress was called last, ns */
} call;

/* Fewer panels a group where there would be few tasks, or where panels are large.  Forward gives the same bits with
 * any grouping, so it may look at the number of threads; backward must not. */
INLINE int64_t group_panels_of(const burst_block *b, int backward)
{
    const int64_t panels = ROUND_UP(b->rows_q, NR) / NR, enough = backward ? 16 : 4 * b->threads;
    const int64_t room = (int64_t)1 << 20, panel_bytes = (b->d + b->dim_v) * NR * (int64_t)sizeof(REAL) * (1 + backward);
    int64_t n = MIN(BURST_PANELS, MAX(1, room / panel_bytes));
    while (n > 1 && b->batch * b->heads * (ROUND_UP(panels, n) / n) < enough) n /= 2;
    return n;
}

INLINE void plan_call(call *c, burst_block *b, int64_t tile_keys, int backward, arena *a)
{
    c->b = b;
    c->tile_keys = tile_keys;
    c->panels = ROUND_UP(b->rows_q, NR) / NR;
    c->group_panels = group_panels_of(b, backward);
    c->groups = ROUND_UP(c->panels, c->group_panels) / c->group_panels;
    c->tiles = ROUND_UP(b->rows_k, tile_keys) / tile_keys;
    c->tasks = b->batch * b->heads * c->groups;
    c->tile_min = TAKE(a, int32_t, c->tiles);
    c->tile_max = TAKE(a, int32_t, c->tiles);
    if (backward) {
        c->turn = TAKE(a, atomic_int, b->batch * b->kv_heads * c->tiles);
        c->group_lo = TAKE(a, int32_t, c->groups);
        c->group_hi = TAKE(a, int32_t, c->groups);
    }
}

INLINE void start_call(call *c, int threads)
{
    for (int64_t t = 0; t < c->tiles; t++) {
        const int64_t end = MIN((t + 1) * c->tile_keys, c->b->rows_k);
        int32_t low = c->b->pos[t * c->tile_keys], high = low;
        for (int64_t j = t * c->tile_keys; j < end; j++) {
            low = MIN(low, c->b->pos[j]);
            high = MAX(high, c->b->pos[j]);
        }
        c->tile_min[t] = low;
        c->tile_max[t] = high;
    }
    atomic_init(&c->next, 0);
    atomic_init(&c->stop, 0);
    atomic_init(&c->working, threads);
    atomic_init(&c->computed, 0);
    c->heard = 0;
}

/* Task t: heads outermost, so that a head's keys stay in cache; late queries first, as causal rows are longest there. */
INLINE void task_of(const call *c, int64_t t, int64_t *batch, int64_t *head, int64_t *group)
{
    *group = c->groups - 1 - t % c->groups;
    *head = t / c->groups % c->b->heads;
    *batch = t / c->groups / c->b->heads;
}

INLINE int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Between tiles.  Thread 0 is the thread that called: it alone gives MPI its progress. */
INLINE int carry_on(call *c, int thread)
{
    if (thread == 0 && c->b->progress) {
        const int64_t now = now_ns();
        if (now - c->heard >= c->b->interval_ns) {
            if (c->b->progress()) atomic_store(&c->stop, 1);
            c->heard = now_ns();
        }
    }
    return !atomic_load_explicit(&c->stop, memory_order_relaxed);
}

/* ---------------------------------------------------------------- threads */

/* Subnormals are taken as 0: they are below what float32 sums keep, and cost hundreds of cycles each. */
INLINE unsigned flush_subnormals(void)
{
#if defined(__x86_64__)
    const unsigned old = _mm_getcsr();
    _mm_setcsr(old | 0x8040);
    return old;
#else
    return 0;
#endif
}
INLINE void restore_subnormals(unsigned old)
{
#if defined(__x86_64__)
    _mm_setcsr(old);
#else
    (void)old;
#endif
}

typedef void worker(call *c, int thread, arena scratch);

/* Run work on the threads, each with its own part of the scratch, and keep MPI going until the last one has ended. */
static void run(call *c, worker *work, arena shared, int64_t bytes_per_thread)
{
    const int threads = (int)MAX(1, MIN(c->b->threads, c->tasks));
    start_call(c, threads);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        if (thread == 0) atomic_fetch_sub(&c->working, threads - team); /* OpenMP may give fewer */
#else
    {
        const int thread = 0;
        atomic_store(&c->working, 1);
#endif
        const unsigned old = flush_subnormals();
        const arena mine = {shared.base + shared.used + thread * bytes_per_thread, 0};
        work(c, thread, mine);
        restore_subnormals(old);
        atomic_fetch_sub(&c->working, 1);
        while (thread == 0 && atomic_load(&c->working) > 0) {
            carry_on(c, 0);
            sched_yield();
        }
    }
    c->b->tiles = atomic_load(&c->computed);
}

/* ---------------------------------------------------------------- rows and lanes */

INLINE char *row_at(const burst_array *x, int64_t batch, int64_t row, int64_t head)
{
    return x->data + batch * x->step[0] + row * x->step[1] + head * x->step[2];
}
INLINE REAL *entry_at(const burst_vector *x, int64_t batch, int64_t head, int64_t row)
{
    return (REAL *)(x->data + batch * x->step[0] + head * x->step[1] + row * x->step[2]);
}

INLINE void take_lanes(arena *a, lanes *q)
{
    q->lo = TAKE(a, INT, NR);
    q->hi = TAKE(a, INT, NR);
    q->at = TAKE(a, INT, NR);
}

/* Rows row .. row + count of the block become lanes.  The others are idle: they see nothing, and hold zeros that do no
 * harm where a tile is full for all rows, so that only the rows decide what is full. */
INLINE void set_lanes(lanes *q, const burst_block *b, int64_t head, int64_t row, int count)
{
    for (int i = 0; i < NR; i++) {
        q->lo[i] = i < count ? b->lo[row + i] : INT32_MAX;
        q->hi[i] = i < count ? b->hi[row + i] : INT32_MIN;
        q->at[i] = i < count ? b->at[row + i] : 0;
    }
    q->lo_min = q->lo_max = q->lo[0];
    q->hi_min = q->hi_max = q->hi[0];
    for (int i = 1; i < count; i++) {
        q->lo_min = MIN(q->lo_min, q->lo[i]);
        q->lo_max = MAX(q->lo_max, q->lo[i]);
        q->hi_min = MIN(q->hi_min, q->hi[i]);
        q->hi_max = MAX(q->hi_max, q->hi[i]);
    }
    q->idle = count < NR;
    q->slope = b->slopes ? (REAL)(b->slopes[head] * LOG2E) : 0;
}

INLINE bend bend_of(const burst_block *b)
{
    return (bend){(REAL)(b->softcap * LOG2E), b->slopes != NULL};
}
/* What Q is multiplied by while it is packed. */
INLINE REAL factor_of(const burst_block *b)
{
    return (REAL)(b->softcap != 0 ? b->scale / b->softcap : b->scale * LOG2E);
}

/* ---------------------------------------------------------------- a tile of keys */

typedef struct {
    REAL *k;              /* [keys, ld_k] rows */
    REAL *v;              /* [keys, ld_v] rows: backward */
    REAL *chunks;         /* columns of V (forward) or K (backward) in chunks: see products.h */
    REAL *row;            /* one row */
    INT *pos;             /* [keys] */
    INT *block_min, *block_max; /* [blocks] */
    int64_t ld_k, ld_v, chunk_stride;
    int64_t first, live, blocks; /* first key, keys, blocks of KR keys */
    int wild_k, wild_v;   /* an infinity or NaN is among them */
} key_tile;

INLINE void take_tile(arena *a, key_tile *t, const call *c, int backward)
{
    const burst_block *b = c->b;
    const int64_t keys = ROUND_UP(c->tile_keys, KR), line = 64 / (int64_t)sizeof(REAL);
    t->ld_k = ROUND_UP(b->d, line) + line;
    t->ld_v = ROUND_UP(b->dim_v, line) + line;
    t->chunk_stride = CHUNK_STRIDE(keys);
    t->k = TAKE(a, REAL, keys * t->ld_k);
    t->v = backward ? TAKE(a, REAL, keys * t->ld_v) : NULL;
    t->chunks = TAKE(a, REAL, ROUND_UP(backward ? b->d : b->dim_v, KR) / KR * t->chunk_stride);
    t->row = TAKE(a, REAL, MAX(t->ld_k, t->ld_v));
    t->pos = TAKE(a, INT, keys);
    t->block_min = TAKE(a, INT, keys / KR);
    t->block_max = TAKE(a, INT, keys / KR);
}

INLINE void chunk_row(const key_tile *t, int64_t key, const REAL *row, int64_t columns)
{
    for (int64_t c = 0; c < columns; c += KR)
        memcpy(t->chunks + c / KR * t->chunk_stride + key * KR, row + c, KR * sizeof(REAL));
}

/* Bring keys and values of tile `index` into scratch as REAL. */
NOINLINE void load_tile(key_tile *t, const call *c, int64_t batch, int64_t head, int64_t index, int backward)
{
    const burst_block *b = c->b;
    const int type = (int)b->type;
    const int64_t columns = ROUND_UP(backward ? b->d : b->dim_v, KR);
    t->first = index * c->tile_keys;
    t->live = MIN(c->tile_keys, b->rows_k - t->first);
    t->blocks = ROUND_UP(t->live, KR) / KR;
    t->wild_k = t->wild_v = 0;
    for (int64_t i = 0; i < t->live; i++) {
        const char *k = row_at(&b->k, batch, t->first + i, head), *v = row_at(&b->v, batch, t->first + i, head);
        REAL *k_row = t->k + i * t->ld_k;
        t->wild_k |= load_row(k, b->k.step[3], b->d, k_row, type);
        if (backward) {
            for (int64_t j = b->d; j < columns; j++) k_row[j] = 0;
            chunk_row(t, i, k_row, columns);
            t->wild_v |= load_row(v, b->v.step[3], b->dim_v, t->v + i * t->ld_v, type);
        } else {
            t->wild_v |= load_row(v, b->v.step[3], b->dim_v, t->row, type);
            for (int64_t j = b->dim_v; j < columns; j++) t->row[j] = 0;
            chunk_row(t, i, t->row, columns);
        }
        t->pos[i] = b->pos[t->first + i];
    }
    for (int64_t i = t->live; i < t->blocks * KR; i++) { /* P is 0 there, and 0 times what was left there must be 0 */
        memset(t->row, 0, columns * sizeof(REAL));
        chunk_row(t, i, t->row, columns);
    }
    for (int64_t block = 0; block < t->blocks; block++) {
        INT low = t->pos[block * KR], high = low;
        for (int64_t i = block * KR; i < MIN((block + 1) * KR, t->live); i++) {
            low = MIN(low, t->pos[i]);
            high = MAX(high, t->pos[i]);
        }
        t->block_min[block] = low;
        t->block_max[block] = high;
    }
}

/* Ask for part `part` of `parts` of a tile's rows to come into L2: spread over the panels, so that the next tile is
 * there when it is packed.  Rows of one head lie far apart, and the hardware does not guess them. */
INLINE void prefetch_rows(const burst_array *x, const call *c, int64_t batch, int64_t head, int64_t index, int64_t bytes,
                          int64_t part, int64_t parts)
{
    const int64_t first = index * c->tile_keys, live = MIN(c->tile_keys, c->b->rows_k - first);
    for (int64_t i = live * part / parts; i < live * (part + 1) / parts; i++) {
        const char *row = row_at(x, batch, first + i, head);
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
    }
}

INLINE void prefetch_tile(const call *c, int64_t batch, int64_t head, int64_t index, int64_t part, int64_t parts)
{
    const burst_block *b = c->b;
    const int64_t size = SIZE_OF_TYPE[b->type];
    if (index >= c->tiles) return;
    if (b->k.step[3] == size) prefetch_rows(&b->k, c, batch, head, index, b->d * size, part, parts);
    if (b->v.step[3] == size) prefetch_rows(&b->v, c, batch, head, index, b->dim_v * size, part, parts);
}

INLINE enum sight block_sight(const key_tile *t, const lanes *q, int64_t block)
{
    const enum sight s = sight_of(q, t->block_min[block], t->block_max[block]);
    const int padded = (block + 1) * KR > t->live, wild = q->idle && (t->wild_k || t->wild_v); /* 0 * NaN is no zero */
    return s == FULL && (padded || wild) ? CUT : s;
}

/* The blocks that a panel must compute: [*from, *to); *full tells that no lane misses any key of them. */
INLINE void seen_blocks(const key_tile *t, const lanes *q, int64_t *from, int64_t *to, int *full)
{
    int64_t a = 0, z = t->blocks;
    while (a < z && block_sight(t, q, a) == HIDDEN) a++;
    while (z > a && block_sight(t, q, z - 1) == HIDDEN) z--;
    *full = 1;
    for (int64_t i = a; i < z; i++) *full &= block_sight(t, q, i) == FULL;
    *from = a;
    *to = z;
}

#endif
