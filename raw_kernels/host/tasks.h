/* Tasks, threads, scratch, and the calling thread's duty to MPI.
 *
 * A task is (batch, head, group of query panels); threads take the next one.  How rows fall into groups depends in backward
 * on the shapes alone, and forward gives the same bits with any groups: results do not depend on the number of threads, to the bit.
 */
#ifndef BURST_TASKS_H
#define BURST_TASKS_H

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#elif defined(BURST_PTHREADS) /* a compiler without OpenMP, or a sanitizer that does not understand it */
#include <pthread.h>
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

/* With base NULL it only counts: sizes are told and memory is cut by the same code.  With -DBURST_GUARD, for the address
 * sanitizer, a gap follows each buffer, and whoever touches it is reported. */
#ifdef BURST_GUARD
#include <sanitizer/asan_interface.h>
#define GAP 2048
#endif
typedef struct {
    char *base;
    int64_t used;
} arena;

INLINE void *take(arena *a, int64_t bytes)
{
    char *p = a->base ? a->base + a->used : NULL;
    a->used += ROUND_UP(bytes, ALIGNMENT);
#ifdef BURST_GUARD
    a->used += GAP;
    if (p) { /* the scratch may have been cut otherwise before */
        ASAN_UNPOISON_MEMORY_REGION(p, bytes);
        ASAN_POISON_MEMORY_REGION(p + bytes, a->base + a->used - p - bytes);
    }
#endif
    return p;
}
#define TAKE(arena, type, count) ((type *)take(arena, (int64_t)(count) * (int64_t)sizeof(type)))

/* ---------------------------------------------------------------- a call */

#if defined(BURST_PIECES) && BURST_PIECES > 1
#define BURST_SPLIT 1
#else
#define BURST_SPLIT 0
#endif
#ifndef BURST_PANELS /* of a group: a packed tile of keys serves that many */
#ifdef BURST_AMX
#define BURST_PANELS 16
#else
#define BURST_PANELS 24
#endif
#endif

#define KEYS_FROM_LAST (!TILE_REGISTERS)

/* What rows [from, to) see, all together. */
typedef struct {
    int32_t lo, hi;
} extent;

/* A group, and how many keys its rows see, in sixteenths of the heaviest group's */
typedef struct {
    int64_t weight, group;
} ranked;

typedef struct {
    burst_block *b;
    int64_t tile_keys;
    int from_last;                /* tiles are numbered from the last keys on: see plan_call */
    int64_t panels, group_panels, groups, tiles, tasks;
    int64_t most_panels;          /* of a group, in a block with as many rows or fewer: what scratch has room for */
    int32_t *tile_min, *tile_max; /* [tiles] extremes of the keys' positions */
    atomic_int *turn;             /* [batch * kv_heads * tiles] backward: how many groups have added to dK, dV */
    extent *groups_see;           /* [groups] backward */
    ranked *order;                /* [groups] heaviest first */
    atomic_long next;             /* task */
    atomic_int stop, working;
    atomic_long computed;
    int64_t heard, pause;         /* when progress was called last, and how long it may wait now, ns */
    unsigned modes;               /* of floating point, as the caller has them */
} call;

/* What the panels of a group may fill of L2.  More where it has 2 MB, as CPUs with AMX do: 1.07 forward by pieces at d 128.  In double a
 * tile of keys weighs twice as much beside its arithmetic: backward gains 1.04 at d 128 (float32 loses 2%). */
INLINE int64_t room_of(int backward)
{
    const int64_t small = (int64_t)1 << 20, large = (int64_t)3 << 19;
#if TILE_REGISTERS
    (void)backward, (void)small;
    return large;
#elif defined(_SC_LEVEL2_CACHE_SIZE)
    return sizeof(REAL) == 8 && backward && sysconf(_SC_LEVEL2_CACHE_SIZE) >= (long)2 << 20 ? large : small;
#else
    (void)backward, (void)large;
    return small;
#endif
}

/* Panels of a group at most: fewer where there would be few tasks, or where panels are large.  Forward gives the same bits with
 * any grouping, so it may look at the number of threads; backward must not.  More rows never give fewer. */
INLINE int64_t enough_tasks(const burst_block *b, int backward) { return backward ? 16 : 4 * b->threads; }
INLINE int64_t most_panels_of(const burst_block *b, int backward)
{
    const int64_t panels = ROUND_UP(b->rows_q, NR) / NR, enough = enough_tasks(b, backward);
    const int64_t room = room_of(backward), element = sizeof(REAL) + 2 * BURST_SPLIT;
    const int64_t panel_bytes = (b->d + b->dim_v) * NR * element * (1 + backward);
    int64_t n = MIN(BURST_PANELS, MAX(1, room / panel_bytes));
    while (n > 1 && b->batch * b->heads * (ROUND_UP(panels, n) / n) < enough) n /= 2;
    return MIN(n, panels);
}

INLINE void plan_call(call *c, burst_block *b, int64_t tile_keys, int backward, arena *a)
{
    c->b = b;
    c->tile_keys = tile_keys;
    c->panels = ROUND_UP(b->rows_q, NR) / NR;
    c->most_panels = most_panels_of(b, backward);
    const int64_t least = ROUND_UP(c->panels, c->most_panels) / c->most_panels;
    c->group_panels = ROUND_UP(c->panels, least) / least; /* as even as can be: a small group packs its tiles for few */
    c->groups = ROUND_UP(c->panels, c->group_panels) / c->group_panels;
    c->tiles = ROUND_UP(b->rows_k, tile_keys) / tile_keys;
    /* ALiBi makes near keys weigh most, and causal rows end with them: m is then that of the largest, and no tile is done twice. */
    c->from_last = KEYS_FROM_LAST && !backward && b->slopes != NULL;
    c->tasks = b->batch * b->heads * c->groups;
    c->tile_min = TAKE(a, int32_t, c->tiles);
    c->tile_max = TAKE(a, int32_t, c->tiles);
    const int64_t most_groups = MAX(least, 3 * enough_tasks(b, backward)); /* where groups were halved, once from 3 to 1 */
    c->order = TAKE(a, ranked, most_groups);
    if (backward) {
        c->turn = TAKE(a, atomic_int, b->batch * b->kv_heads * c->tiles);
        c->groups_see = TAKE(a, extent, most_groups);
    }
}

/* The first key of a tile */
INLINE int64_t tile_start(const call *c, int64_t tile) { return (c->from_last ? c->tiles - 1 - tile : tile) * c->tile_keys; }

/* Extremes of the keys' positions */
NOINLINE void survey_tiles(call *c)
{
    for (int64_t t = 0; t < c->tiles; t++) {
        const int64_t start = tile_start(c, t), end = MIN(start + c->tile_keys, c->b->rows_k);
        int32_t low = c->b->pos[start], high = low;
        for (int64_t j = start; j < end; j++) {
            low = MIN(low, c->b->pos[j]);
            high = MAX(high, c->b->pos[j]);
        }
        c->tile_min[t] = low;
        c->tile_max[t] = high;
    }
}

/* The heaviest first; where they are alike, the last: neighbours follow each other, and share tiles of keys */
static int by_weight(const void *x, const void *y)
{
    const ranked *a = x, *b = y;
    return a->weight != b->weight ? (a->weight < b->weight ? 1 : -1) : a->group < b->group ? 1 : -1;
}

/* Groups in the order in which threads take them: with a heavy one at the end, the others would wait for it. */
NOINLINE void rank_groups(call *c)
{
    const burst_block *b = c->b;
    const int64_t rows = c->group_panels * NR;
    int64_t low = INT32_MAX, high = INT32_MIN, most = 1;
    for (int64_t t = 0; t < c->tiles; t++) {
        low = MIN(low, c->tile_min[t]);
        high = MAX(high, c->tile_max[t] + (int64_t)1);
    }
    for (int64_t g = 0; g < c->groups; g++) {
        int64_t keys = 0;
        for (int64_t i = g * rows; i < MIN((g + 1) * rows, b->rows_q); i++) keys += MAX(0, MIN(high, b->hi[i]) - MAX(low, b->lo[i]));
        c->order[g] = (ranked){keys, g};
        most = MAX(most, keys);
    }
    for (int64_t g = 0; g < c->groups; g++) c->order[g].weight = c->order[g].weight * 16 / most;
    qsort(c->order, (size_t)c->groups, sizeof *c->order, by_weight);
}

INLINE void start_call(call *c, int threads)
{
    atomic_init(&c->next, 0);
    atomic_init(&c->stop, 0);
    atomic_init(&c->working, threads);
    atomic_init(&c->computed, 0);
    c->heard = 0;
    c->pause = c->b->interval_ns;
}

INLINE extent extent_of(const burst_block *b, int64_t from, int64_t to)
{
    extent seen = {INT32_MAX, INT32_MIN};
    for (int64_t i = from; i < MIN(to, b->rows_q); i++) {
        seen.lo = MIN(seen.lo, b->lo[i]);
        seen.hi = MAX(seen.hi, b->hi[i]);
    }
    return seen;
}
INLINE int sees_tile(const call *c, extent seen, int64_t tile)
{
    return c->tile_max[tile] >= seen.lo && c->tile_min[tile] < seen.hi;
}
/* The first tile of [tile, end) that is seen, or end */
INLINE int64_t next_tile(const call *c, extent seen, int64_t tile, int64_t end)
{
    while (tile < end && !sees_tile(c, seen, tile)) tile++;
    return tile;
}

/* A group of panels and what each sees.  Tiles that the group sees are [start, end), perhaps with gaps. */
typedef struct {
    int64_t number, batch, head, kv_head, first, n; /* panels first .. first + n of the block */
    int64_t start, end;
    extent all, sees[BURST_PANELS];
    char opened[BURST_PANELS];
} task;

/* Task t: the heaviest groups of all heads first.  Tasks that follow each other have different keys, so that threads which have them
 * add to different dK and dV and do not wait for each other: see wait_for_turn. */
INLINE int64_t group_of(const call *c, int64_t t) { return c->order[t / (c->b->batch * c->b->heads)].group; }

NOINLINE task task_of(const call *c, int64_t t)
{
    const burst_block *b = c->b;
    const int64_t keys = b->batch * b->kv_heads, share = b->heads / b->kv_heads;
    task k = {.number = t, .kv_head = t % b->kv_heads, .batch = t % keys / b->kv_heads};
    k.head = k.kv_head * share + t / keys % share;
    k.first = group_of(c, t) * c->group_panels;
    k.n = MIN(c->group_panels, c->panels - k.first);
    k.all = (extent){INT32_MAX, INT32_MIN};
    for (int64_t i = 0; i < k.n; i++) {
        k.sees[i] = extent_of(b, (k.first + i) * NR, (k.first + i + 1) * NR);
        k.all.lo = MIN(k.all.lo, k.sees[i].lo);
        k.all.hi = MAX(k.all.hi, k.sees[i].hi);
    }
    k.end = c->tiles;
    k.start = next_tile(c, k.all, 0, k.end);
    while (k.end > k.start && !sees_tile(c, k.all, k.end - 1)) k.end--;
    return k;
}

/* Whether panel i of a task sees no tile from `tile` on */
INLINE int sees_no_more(const call *c, const task *k, int64_t i, int64_t tile) { return next_tile(c, k->sees[i], tile, k->end) == k->end; }

/* Panels that see a tile */
INLINE int64_t panels_at(const call *c, const task *k, int64_t tile)
{
    int64_t n = 0;
    for (int64_t i = 0; i < k->n; i++) n += sees_tile(c, k->sees[i], tile);
    return n;
}

/* The first tile from `tile` on that some panel sees, or the end: a group may see tiles that none of its panels does */
INLINE int64_t next_shared(const call *c, const task *k, int64_t tile)
{
    while (tile < k->end && !panels_at(c, k, tile)) tile++;
    return tile;
}

/* The task that this thread takes behind task k, if threads take turns; with no tiles where there is none */
INLINE task task_behind(const call *c, const task *k)
{
    const int64_t t = k->number + MAX(1, MIN(c->b->threads, c->tasks));
    task behind = {0};
    if (t < c->tasks) behind = task_of(c, t);
    return behind;
}

INLINE int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Subnormals are taken as 0: they are below what float32 sums keep, and cost hundreds of cycles each. */
#if defined(__x86_64__)
#define FLUSH 0x8040u
INLINE unsigned get_modes(void) { return _mm_getcsr(); }
INLINE unsigned set_modes(unsigned modes)
{
    const unsigned old = _mm_getcsr();
    _mm_setcsr(modes);
    return old;
}
#else
#define FLUSH 0u
INLINE unsigned get_modes(void) { return 0; }
INLINE unsigned set_modes(unsigned modes) { return modes; }
#endif

#if TILE_REGISTERS
typedef struct {
    uint8_t palette, start, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* The palette is known: 8 tiles of 16 rows of 64 bytes.  (CPUID's leaves 0x1D and 0x1E may read zero in a guest.) */
INLINE void shape_tiles(void)
{
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = 16;
    }
    _tile_loadconfig(&shapes);
}
INLINE void release_tiles(void) { _tile_release(); }
#else
INLINE void shape_tiles(void) {}
INLINE void release_tiles(void) {}
#endif

/* Between tiles.  Thread 0 is the thread that called: it alone gives MPI its progress.  A call that took less than this
 * moved no message; then the next ones come up to four times as seldom, until one does.  Once nothing is under way they
 * come 40 times as seldom, however long one took: with cold caches that is more than this. */
#define MOVED_NS 20000

INLINE int stopped(call *c) { return atomic_load_explicit(&c->stop, memory_order_relaxed); }

INLINE int carry_on(call *c, int thread)
{
    if (thread == 0 && c->b->progress) {
        const int64_t now = now_ns();
        if (now - c->heard >= c->pause) {
            const unsigned modes = set_modes(c->modes); /* other people's code, which may use tile registers itself */
            const int told = c->b->progress();
            shape_tiles();
            set_modes(modes);
            if (told == BURST_STOP) atomic_store(&c->stop, 1);
            c->heard = now_ns();
            const int moved = c->heard - now > MOVED_NS;
            c->pause = told == BURST_CALM ? 40 * c->b->interval_ns : moved ? c->b->interval_ns : MIN(2 * c->pause, 4 * c->b->interval_ns);
        }
    }
    return !stopped(c);
}

/* ---------------------------------------------------------------- threads */

typedef void worker(call *c, int thread, arena scratch);

typedef struct {
    call *c;
    worker *work;
    char *scratch; /* of this thread */
    int thread;
} member;

/* One thread's part.  The calling thread, 0, then keeps MPI going until the last one has ended. */
static void *take_part(void *of)
{
    const member *m = of;
    const unsigned modes = set_modes(get_modes() | FLUSH);
    m->work(m->c, m->thread, (arena){m->scratch, 0});
    set_modes(modes);
    atomic_fetch_sub(&m->c->working, 1);
    while (m->thread == 0 && atomic_load(&m->c->working) > 0) {
        carry_on(m->c, 0);
        sched_yield();
    }
    release_tiles(); /* which progress has had shaped again */
    return NULL;
}

/* Run work on the threads, each with its own part of the scratch. */
static void run(call *c, worker *work, arena shared, int64_t bytes_per_thread)
{
    const int threads = (int)MAX(1, MIN(c->b->threads, c->tasks));
    char *scratch = shared.base + shared.used;
    c->modes = get_modes();
    start_call(c, threads);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        if (thread == 0) atomic_fetch_sub(&c->working, threads - team); /* OpenMP may give fewer */
        take_part(&(member){c, work, scratch + thread * bytes_per_thread, thread});
    }
#elif defined(BURST_PTHREADS)
    enum { MOST = 256 };
    pthread_t others[MOST];
    member team[MOST];
    int started = 1;
    for (; started < MIN(threads, MOST); started++) {
        team[started] = (member){c, work, scratch + started * bytes_per_thread, started};
        if (pthread_create(&others[started], NULL, take_part, &team[started])) break; /* then fewer do it */
    }
    atomic_fetch_sub(&c->working, threads - started);
    take_part(&(member){c, work, scratch, 0});
    for (int i = 1; i < started; i++) pthread_join(others[i], NULL);
#else
    atomic_store(&c->working, 1);
    take_part(&(member){c, work, scratch, 0});
#endif
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
    const int32_t *from[] = {b->lo + row, b->hi + row, b->at + row};
    INT *to[] = {q->lo, q->hi, q->at};
    const INT idle[] = {INT32_MAX, INT32_MIN, 0};
    INT low[3], high[3];
    for (int k = 0; k < 3; k++) {
        INT *restrict lane = to[k];
        for (int i = 0; i < count; i++) lane[i] = from[k][i];
        low[k] = high[k] = lane[0];
        for (int i = 1; i < count; i++) {
            low[k] = MIN(low[k], lane[i]);
            high[k] = MAX(high[k], lane[i]);
        }
        for (int i = count; i < NR; i++) lane[i] = idle[k];
    }
    q->lo_min = low[0];
    q->lo_max = high[0];
    q->hi_min = low[1];
    q->hi_max = high[1];
    for (int j = 0; j < VR; j++) {
        INT least = INT32_MAX, largest = INT32_MIN;
        for (int i = j * LANES; i < (j + 1) * LANES; i++) {
            least = MIN(least, to[0][i]);
            largest = MAX(largest, to[1][i]);
        }
        q->vector_lo[j] = least;
        q->vector_hi[j] = largest;
    }
    q->idle = count < NR;
    q->slope = b->slopes ? (REAL)b->slopes[head] : 0;
}

INLINE bend bend_of(const burst_block *b)
{
    return (bend){(REAL)b->softcap, b->slopes != NULL};
}
/* What Q is multiplied by while it is packed. */
INLINE REAL factor_of(const burst_block *b)
{
    return (REAL)(b->softcap != 0 ? b->scale / b->softcap : b->scale);
}

#endif
