/* Runs stretches of PTX instructions over all lanes: what machine.py does with NumPy, one call a stretch.
 *
 * A register is an array over lanes; a slot is its address and the bytes from lane to lane (0: one value for all).
 * A record is one operation on slots under a predicate.  Arithmetic is elementwise (ops.h): operands are brought
 * into rows of CHUNK lanes, the operation runs without a mask, the result is put back under it.
 *
 * Memory accesses are done only where every check of access.py and sanitizer.py passes for all active lanes.  Where
 * one does not, nothing has been changed and the run stops before that record: the NumPy path takes it and reports.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef unsigned __int128 u128;
typedef __int128 s128;
typedef float f32;
typedef double f64;

enum { CHUNK = 512, OPERANDS = 6, SLOTS = 24 };

/* --- bits and floats ------------------------------------------------------------------------------------ */
static inline u32 bits32(f32 x) { u32 u; memcpy(&u, &x, 4); return u; }
static inline f32 float32(u32 u) { f32 x; memcpy(&x, &u, 4); return x; }
static inline u64 bits64(f64 x) { u64 u; memcpy(&u, &x, 8); return u; }
static inline f64 float64(u64 u) { f64 x; memcpy(&x, &u, 8); return x; }

static inline u32 flush_bits(u32 u) { return u & 0x7f800000u ? u : u & 0x80000000u; }
static inline f32 fl(f32 x) { return float32(flush_bits(bits32(x))); }
static inline f32 nan32(f32 x) { u32 u = bits32(x); return float32((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffffffu : u); }
static inline f64 nan64(f64 x)
{
    u64 u = bits64(x);
    return float64((u & 0x7fffffffffffffffu) > 0x7ff0000000000000u ? 0x7ff8000000000000u : u);
}
static inline f32 one(f32 x) { return x > 0 ? (x < 1 ? x : 1) : 0; }

/* -0 < +0; a NaN loses, or wins (_nan). */
#define EXTREMES(T, U, W, bits, real)                                                                                  \
    static inline T min##W(T a, T b)                                                                                   \
    {                                                                                                                  \
        if (a != a) return b;                                                                                          \
        if (b != b) return a;                                                                                          \
        return a == b ? real(bits(a) | bits(b)) : a < b ? a : b;                                                       \
    }                                                                                                                  \
    static inline T max##W(T a, T b)                                                                                   \
    {                                                                                                                  \
        if (a != a) return b;                                                                                          \
        if (b != b) return a;                                                                                          \
        return a == b ? real(bits(a) & bits(b)) : a > b ? a : b;                                                       \
    }                                                                                                                  \
    static inline T min##W##_nan(T a, T b) { return a != a ? a : b != b ? b : min##W(a, b); }                          \
    static inline T max##W##_nan(T a, T b) { return a != a ? a : b != b ? b : max##W(a, b); }
EXTREMES(f32, u32, 32, bits32, float32)
EXTREMES(f64, u64, 64, bits64, float64)

/* Beyond 2**126 the divisor's reciprocal underflows: 0, or NaN for an infinity. */
static inline f32 div_approx(f32 x, f32 y)
{
    f32 out = x / y, size = fabsf(y);
    if (size > 0x1p126f && size < INFINITY)
        out = fabsf(x) < INFINITY ? copysignf(0, out) : NAN;
    return out;
}
static inline f64 rsqrt(f64 x) { return x == 0 ? copysign(INFINITY, x) : 1.0 / sqrt(x); }
static inline s64 to_s64(f64 v, f64 low, f64 high, s64 least, s64 most, s64 nan)
{
    return v != v ? nan : v <= low ? least : v >= high ? most : (s64)v;
}

static inline f32 of_bf16(u16 h) { return float32((u32)h << 16); }
static inline u16 to_bf16(f32 x)
{
    u32 u = bits32(x);
    return x != x ? 0x7fff : (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline f32 of_f16(u16 h)
{
    u32 sign = (u32)(h & 0x8000) << 16, size = h & 0x7fff;
    if (size >= 0x7c00) return float32(sign | 0x7f800000u | (size & 0x3ff) << 13);
    return float32(sign | bits32(float32(size << 13) * 0x1p112f)); /* exact, subnormals too */
}
static inline u16 to_f16(f32 x)
{
    u32 u = bits32(x), sign = u >> 16 & 0x8000;
    f32 size = fabsf(x);
    if (x != x) return 0x7fff;
    if (size >= 65520.0f) return (u16)(sign | 0x7c00);
    if (size < 0x1p-14f) return (u16)(sign | (u32)(s32)rintf(size * 0x1p24f)); /* a multiple of 2**-24 */
    u &= 0x7fffffffu;
    u += 0xfff + (u >> 13 & 1);
    return (u16)(sign | ((u >> 13) - (112u << 10)));
}
/* a·b + c of halves, in float64 rounded to odd, as float32 rounded to odd: a later rounding to at most 22 bits is
 * that of the exact value.  The product is exact. */
static inline f32 fma_odd(f32 a, f32 b, f32 c)
{
    f64 p = (f64)a * b, q = c, s = p + q, t = s - p, error = (p - (s - t)) + (q - t);
    if (!(fabs(s) < INFINITY)) return (f32)s;
    if (error != 0) {
        u64 u = bits64(s);
        if (s != 0 && (error < 0) == (s > 0)) u -= 1;
        s = float64(u | 1);
    }
    f32 out = (f32)s;
    if (fabsf(out) < INFINITY ? (f64)out == s : 0) return out;
    u32 v = bits32(out);
    if (fabs((f64)out) > fabs(s)) v -= 1; /* towards zero; from infinity to the largest */
    return float32(v | 1);
}
static inline u16 fma_f16(u16 a, u16 b, u16 c) { return to_f16(fma_odd(of_f16(a), of_f16(b), of_f16(c))); }
static inline u16 fma_bf16(u16 a, u16 b, u16 c) { return to_bf16(fma_odd(of_bf16(a), of_bf16(b), of_bf16(c))); }

static inline u32 tf32(u32 u)
{
    u32 size = u & 0x7fffffffu;
    return size > 0x7f800000u ? 0x7fffffffu : size == 0x7f800000u ? u : (u + 0x1000) & 0xffffe000u;
}

static inline u32 lop3(u32 a, u32 b, u32 c, u32 table)
{
    u32 out = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return out;
}
static inline u32 prmt(u32 a, u32 b, u32 select)
{
    u64 both = (u64)b << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) {
        u32 code = select >> 4 * i & 15, byte = both >> 8 * (code & 7) & 0xff;
        if (code & 8) byte = byte & 0x80 ? 0xff : 0;
        out |= byte << 8 * i;
    }
    return out;
}
static inline u64 reverse(u64 v)
{
    v = (v >> 1 & 0x5555555555555555u) | (v & 0x5555555555555555u) << 1;
    v = (v >> 2 & 0x3333333333333333u) | (v & 0x3333333333333333u) << 2;
    v = (v >> 4 & 0x0f0f0f0f0f0f0f0fu) | (v & 0x0f0f0f0f0f0f0f0fu) << 4;
    return __builtin_bswap64(v);
}
static inline u64 ones(s64 n) { return n >= 64 ? ~(u64)0 : ((u64)1 << n) - 1; }
static inline u64 bfe(u64 raw, u32 pos, u32 len, s64 width, int is_signed)
{
    s64 p = pos & 0xff, n = len & 0xff, top = p + n - 1 < width - 1 ? p + n - 1 : width - 1;
    u64 out = (p < width ? raw >> p : 0) & ones(n);
    if (is_signed && n && raw >> (top < 0 ? 0 : top) & 1) {
        s64 there = width - p < 0 ? 0 : width - p < n ? width - p : n; /* bits that were really there */
        out |= ~ones(there);
    }
    return out;
}
static inline u64 bfi(u64 x, u64 y, u32 pos, u32 len, s64 width)
{
    s64 p = pos & 0xff, n = len & 0xff, shift = p > 63 ? 63 : p;
    u64 mask = p >= width ? 0 : ones(n) << shift;
    return (y & ~mask) | (x << shift & mask);
}

/* --- elementwise operations --------------------------------------------------------------------------------- */
typedef void Function(s64 n, char *const *p);
typedef struct {
    const char *name;
    Function *function;
    u8 sources, size[OPERANDS]; /* bytes of d, a, b, c, e */
} Operation;

#define ROW(T, i) T *p##i = (T *)p[i]
#define EACH _Pragma("GCC ivdep") for (s64 i = 0; i < n; i++)
#define OP1(name, D, A, x)                                                                                             \
    static void run_##name(s64 n, char *const *p)                                                                      \
    { ROW(D, 0); ROW(A, 1); EACH { const A a = p1[i]; p0[i] = (x); } }
#define OP2(name, D, A, B, x)                                                                                          \
    static void run_##name(s64 n, char *const *p)                                                                      \
    { ROW(D, 0); ROW(A, 1); ROW(B, 2); EACH { const A a = p1[i]; const B b = p2[i]; p0[i] = (x); } }
#define OP3(name, D, A, B, C, x)                                                                                       \
    static void run_##name(s64 n, char *const *p)                                                                      \
    { ROW(D, 0); ROW(A, 1); ROW(B, 2); ROW(C, 3); EACH { const A a = p1[i]; const B b = p2[i]; const C c = p3[i]; p0[i] = (x); } }
#define OP4(name, D, A, B, C, E, x)                                                                                    \
    static void run_##name(s64 n, char *const *p)                                                                      \
    { ROW(D, 0); ROW(A, 1); ROW(B, 2); ROW(C, 3); ROW(E, 4);                                                           \
      EACH { const A a = p1[i]; const B b = p2[i]; const C c = p3[i]; const E e = p4[i]; p0[i] = (x); } }
#include "ops.h"
#undef OP1
#undef OP2
#undef OP3
#undef OP4
#define OP1(name, D, A, x) {#name, run_##name, 1, {sizeof(D), sizeof(A)}},
#define OP2(name, D, A, B, x) {#name, run_##name, 2, {sizeof(D), sizeof(A), sizeof(B)}},
#define OP3(name, D, A, B, C, x) {#name, run_##name, 3, {sizeof(D), sizeof(A), sizeof(B), sizeof(C)}},
#define OP4(name, D, A, B, C, E, x) {#name, run_##name, 4, {sizeof(D), sizeof(A), sizeof(B), sizeof(C), sizeof(E)}},
static const Operation operations[] = {
#include "ops.h"
};

enum { COUNT = sizeof operations / sizeof *operations };

/* The name and the operand sizes of operation i, or NULL behind the last. */
const char *lanes_name(s64 i, u8 *sizes)
{
    if (i < 0 || i >= COUNT) return NULL;
    memcpy(sizes, operations[i].size, OPERANDS);
    return operations[i].name;
}

/* --- slots and records ----------------------------------------------------------------------------------------- */
typedef struct { char *base; s64 stride; } Slot;
typedef struct {
    s32 op, predicate; /* op < 0: a verb; predicate: its slot, or -1 */
    u8 negate, flip;   /* negate the predicate; bit i: negate source i (a predicate) */
    u8 kind, bytes, words, is_signed, wide, mode; /* kind: space + 16 · verb; the rest as the verb says */
    s64 offset;
    s32 slot[SLOTS]; /* results, then sources; the last one is an access' address */
} Record;

static void gather(char *to, const char *from, s64 stride, s64 n, int size, int flip)
{
    switch (size) {
#define COPY(T) { T *t = (T *)to; for (s64 i = 0; i < n; i++) t[i] = *(const T *)(from + i * stride); } break
    case 1: for (s64 i = 0; i < n; i++) to[i] = from[i * stride] ^ flip; break;
    case 2: COPY(u16);
    case 4: COPY(u32);
    case 8: COPY(u64);
#undef COPY
    }
}

static void scatter(char *to, s64 stride, const char *from, s64 n, int size, const u8 *mask)
{
    switch (size) {
#define COPY(T)                                                                                                        \
    { const T *f = (const T *)from;                                                                                    \
      if (mask == NULL) for (s64 i = 0; i < n; i++) *(T *)(to + i * stride) = f[i];                                    \
      else if (stride == sizeof(T)) { T *t = (T *)to; for (s64 i = 0; i < n; i++) t[i] = mask[i] ? f[i] : t[i]; }      \
      else for (s64 i = 0; i < n; i++) if (mask[i]) *(T *)(to + i * stride) = f[i]; } break
    case 1: COPY(u8);
    case 2: COPY(u16);
    case 4: COPY(u32);
    case 8: COPY(u64);
#undef COPY
    }
}

/* Return the mask of the lanes that the predicate lets through: `mask` itself, or `room` filled. */
static const u8 *narrow(const Record *r, const Slot *slots, const u8 *mask, u8 *room, s64 start, s64 n)
{
    if (r->predicate < 0) return mask;
    const u8 *p = (const u8 *)slots[r->predicate].base + start, negate = r->negate;
    if (mask == NULL) for (s64 i = 0; i < n; i++) room[i] = p[i] ^ negate;
    else for (s64 i = 0; i < n; i++) room[i] = mask[i] & (p[i] ^ negate);
    return room;
}

static void elementwise(const Record *r, const Slot *slots, s64 lanes, const u8 *mask)
{
    static _Thread_local u64 rows[OPERANDS][CHUNK];
    u8 room[CHUNK];
    const Operation *op = &operations[r->op];
    for (s64 start = 0; start < lanes; start += CHUNK) {
        s64 n = lanes - start < CHUNK ? lanes - start : CHUNK;
        const u8 *m = narrow(r, slots, mask ? mask + start : NULL, room, start, n);
        if (m != NULL && memchr(m, 1, n) == NULL) continue;
        char *p[OPERANDS];
        for (int i = 1; i <= op->sources; i++) {
            const Slot *s = &slots[r->slot[i]];
            char *from = s->base + start * s->stride;
            int flip = r->flip >> (i - 1) & 1;
            if (s->stride == op->size[i] && !flip) p[i] = from;
            else gather(p[i] = (char *)rows[i], from, s->stride, n, op->size[i], flip);
        }
        const Slot *d = &slots[r->slot[0]];
        char *to = d->base + start * d->stride;
        if (m == NULL && d->stride == op->size[0]) {
            p[0] = to;
            op->function(n, p);
        } else {
            p[0] = (char *)rows[0];
            op->function(n, p);
            scatter(to, d->stride, p[0], n, op->size[0], m);
        }
    }
}

/* --- memory ----------------------------------------------------------------------------------------------------- */
enum { GLOBAL, SHARED, LOCAL, PARAM };
enum { LOAD, STORE, ADD, MULTIPLY, MATRICES, SHUFFLE };
enum { ANY_LANE = 255, ATOMIC = 64, MANY = 255 };
static const u32 NEVER = 0xffffffffu, IN_FLIGHT = 0xfffffffeu;

/* The memories of a run and its sanitiser; the fields are those of memory.py and sanitizer.py. */
typedef struct {
    u64 base, capacity; /* global */
    u8 *data, *state;
    u32 *owner;
    u32 first, atomic;        /* owner of block 0 of this launch, and of atomics */
    const s64 *block;         /* [lane]: linear number of its block */
    s64 lanes_per_block, check;
    u8 *shared;
    s64 shared_size, shared_stride;
    const u8 *shared_valid;
    u8 *local;
    s64 local_size, local_stride;
    const u8 *local_valid;
    s64 shadow, warps, granule, total, between_lanes; /* shadow: 0 without a sanitiser */
    u32 *wrote, *read, *clock, *known, *floor, *turn, *turns;
    u8 *writer, *author;
    const u8 *params;
    s64 param_bytes;
    s64 waiting;  /* lanes wait at some instruction: the NumPy path may have to merge them */
    u64 *scratch; /* [12][lanes] */
} Memory;

/* Whether all bytes of [at, at + bytes) have the bits `want`. */
static inline int has(const u8 *state, u64 at, int bytes, u8 want)
{
    u64 word, wanted = 0x0101010101010101u * want;
    switch (bytes) {
    case 1: return (state[at] & want) == want;
    case 2: { u16 v; memcpy(&v, state + at, 2); return (v & (u16)wanted) == (u16)wanted; }
    case 4: { u32 v; memcpy(&v, state + at, 4); return (v & (u32)wanted) == (u32)wanted; }
    }
    for (int i = 0; i < bytes; i += 8) {
        memcpy(&word, state + at + i, 8);
        if ((word & wanted) != wanted) return 0;
    }
    return 1;
}

/* A write of clock `value` < NEVER, IN_FLIGHT is before what this lane does now (sanitizer._unordered, _same_turn). */
static inline int ordered(const Memory *m, s64 g, u32 value, s64 warp, s64 lane, int whole)
{
    s64 local = warp % m->warps, who = m->writer[g];
    if (who == MANY) return 0; /* the NumPy path knows */
    s64 author = who % ATOMIC;
    if (author != local) return value < m->known[warp * m->warps + author];
    if (!m->between_lanes || value != m->clock[warp]) return 1;
    if (!whole) return m->turn[g] < m->turns[lane] || (m->author[g] == lane % 32 && m->author[g] != ANY_LANE);
    for (s64 i = 32 * warp; i < 32 * warp + 32; i++)
        if (m->turn[g] >= m->turns[i]) return 0;
    return 1;
}

/* whole: the warp as a whole reads, not the lane. */
static int may_read(const Memory *m, s64 g, s64 per, s64 lane, int whole)
{
    s64 warp = lane / 32;
    for (s64 i = g; i < g + per; i++) {
        u32 value = m->wrote[i];
        if (value >= m->floor[warp] && (value >= IN_FLIGHT || !ordered(m, i, value, warp, lane, whole))) return 0;
    }
    return 1;
}

static int may_write(const Memory *m, s64 g, s64 per, s64 lane)
{
    s64 warp = lane / 32, local = warp % m->warps;
    for (s64 i = g; i < g + per; i++) {
        u32 value = m->wrote[i];
        if (value >= m->floor[warp] && value != NEVER && (value == IN_FLIGHT || !ordered(m, i, value, warp, lane, 0)))
            return 0;
        for (s64 other = 0; other < m->warps; other++)
            if (other != local && m->read[other * m->total + i] > m->known[warp * m->warps + other]) return 0;
    }
    return 1;
}

static inline void copy(void *to, const void *from, int bytes)
{
    switch (bytes) {
    case 1: memcpy(to, from, 1); break;
    case 2: memcpy(to, from, 2); break;
    case 4: memcpy(to, from, 4); break;
    case 8: memcpy(to, from, 8); break;
    default: memcpy(to, from, 16);
    }
}
static inline int differ(const void *a, const void *b, int bytes)
{
    switch (bytes) {
    case 1: return memcmp(a, b, 1) != 0;
    case 2: return memcmp(a, b, 2) != 0;
    case 4: return memcmp(a, b, 4) != 0;
    case 8: return memcmp(a, b, 8) != 0;
    }
    return memcmp(a, b, 16) != 0;
}

/* Fill at[k] with where lane[k], the k-th active one, reads or writes; -1 if one of them may not, as `want` of the
 * state says for global memory. */
static s64 place(const Record *r, const Memory *m, const Slot *slots, s64 lanes, const u8 *mask, u8 want, u64 *at, u64 *who)
{
    const Slot *base = &slots[r->slot[SLOTS - 1]];
    int space = r->kind & 15, bytes = r->bytes * r->words;
    u64 offset = (u64)r->offset, odd = (u64)bytes - 1;
    s64 n = 0;
    for (s64 lane = 0; lane < lanes; lane++) {
        if (mask && !mask[lane]) continue;
        const char *p = base->base + lane * base->stride;
        u64 address = r->wide ? *(const u64 *)p + offset : (u32)(*(const u32 *)p + (u32)offset);
        if (address & odd && space != PARAM) return -1;
        if (space == PARAM) {
            if (address > (u64)m->param_bytes || address + bytes > (u64)m->param_bytes) return -1;
        } else if (space == GLOBAL) {
            address -= m->base;
            if (address > m->capacity - bytes) return -1;
            if (m->check && !has(m->state, address, bytes, want)) return -1;
        } else {
            s64 size = space == SHARED ? m->shared_size : m->local_size;
            const u8 *valid = space == SHARED ? m->shared_valid : m->local_valid;
            if (size < bytes || address > (u64)(size - bytes)) return -1;
            if (valid && !(valid[address] & valid[address + bytes - 1])) return -1;
            address += space == SHARED ? lane / m->lanes_per_block * m->shared_stride : lane * m->local_stride;
        }
        at[n] = address;
        who[n++] = lane;
    }
    return n;
}

/* Check and note reads of shared memory; 0, and nothing noted, where one is not right. */
static int note_reads(const Memory *m, const u64 *at, const u64 *who, s64 n, int bytes, int whole)
{
    if (!m->shadow) return 1;
    s64 per = bytes / m->granule;
    for (s64 k = 0; k < n; k++)
        if (!may_read(m, at[k] / m->granule, per, who[k], whole)) return 0;
    for (s64 k = 0; k < n; k++) {
        s64 warp = who[k] / 32;
        u32 *seen = m->read + warp % m->warps * m->total + at[k] / m->granule, stamp = m->clock[warp] + 1;
        for (s64 i = 0; i < per; i++) seen[i] = stamp;
    }
    return 1;
}

static int load(const Record *r, const Memory *m, const Slot *slots, s64 lanes, const u8 *mask)
{
    u64 *at = m->scratch, *who = at + lanes;
    int space = r->kind & 15, bytes = r->bytes * r->words;
    s64 n = place(r, m, slots, lanes, mask, 3, at, who);
    if (n < 0) return 0;
    const u8 *data = space == GLOBAL ? m->data : space == SHARED ? m->shared : space == LOCAL ? m->local : m->params;
    if (space == SHARED && !note_reads(m, at, who, n, bytes, 0)) return 0;
    for (int w = 0; w < r->words; w++) {
        const Slot *d = &slots[r->slot[w]];
        const u8 *from = data + w * r->bytes;
#define EACH_LANE(S, T)                                                                                                \
    for (s64 k = 0; k < n; k++) *(T *)(d->base + who[k] * d->stride) = (T)*(const S *)(from + at[k]);                  \
    break
        switch (r->bytes * 32 + r->is_signed * 16 + d->stride) {
        case 32 + 2: EACH_LANE(u8, u16);
        case 32 + 4: EACH_LANE(u8, u32);
        case 32 + 8: EACH_LANE(u8, u64);
        case 48 + 2: EACH_LANE(s8, u16);
        case 48 + 4: EACH_LANE(s8, u32);
        case 48 + 8: EACH_LANE(s8, u64);
        case 64 + 2:
        case 80 + 2: EACH_LANE(u16, u16);
        case 64 + 4: EACH_LANE(u16, u32);
        case 64 + 8: EACH_LANE(u16, u64);
        case 80 + 4: EACH_LANE(s16, u32);
        case 80 + 8: EACH_LANE(s16, u64);
        case 128 + 4:
        case 144 + 4: EACH_LANE(u32, u32);
        case 128 + 8: EACH_LANE(u32, u64);
        case 144 + 8: EACH_LANE(s32, u64);
        case 256 + 8:
        case 272 + 8: EACH_LANE(u64, u64);
        }
#undef EACH_LANE
    }
    return 1;
}

static int store(const Record *r, const Memory *m, const Slot *slots, s64 lanes, const u8 *mask)
{
    u64 *at = m->scratch, *who = at + lanes;
    u8 *values = (u8 *)(at + 2 * lanes), *before = (u8 *)(at + 4 * lanes); /* 16 bytes a lane */
    u32 *owners = (u32 *)(at + 6 * lanes);                                 /* 8 words a lane */
    u8 *writers = (u8 *)(at + 10 * lanes);
    int space = r->kind & 15, bytes = r->bytes * r->words, words = space == GLOBAL ? bytes / 2 : 0, clash = 0;
    s64 n = place(r, m, slots, lanes, mask, 1, at, who), per = 0;
    if (n < 0) return 0;
    u8 *data = space == GLOBAL ? m->data : space == SHARED ? m->shared : m->local;
    int shadow = space == SHARED && m->shadow, checked = space == GLOBAL ? m->check : shadow;
    if (shadow) {
        per = bytes / m->granule;
        for (s64 k = 0; k < n; k++)
            if (!may_write(m, at[k] / m->granule, per, who[k])) return 0;
    }
    if (space == GLOBAL && m->check)
        for (s64 k = 0; k < n; k++)
            for (int i = 0; i < words; i++) {
                u32 old = m->owner[at[k] / 2 + i];
                if (old >= m->first && old != (u32)m->block[who[k]] + m->first) return 0;
            }
    for (int w = 0; w < r->words; w++) {
        const Slot *s = &slots[r->slot[w]];
        for (s64 k = 0; k < n; k++) copy(values + 16 * k + w * r->bytes, s->base + who[k] * s->stride, r->bytes);
    }
    /* Two lanes at one place show only when all have written: keep what was there, so as to undo. */
    for (s64 k = 0; k < n; k++) {
        copy(before + 16 * k, data + at[k], bytes);
        copy(data + at[k], values + 16 * k, bytes);
        if (shadow) {
            writers[k] = m->writer[at[k] / m->granule];
            m->writer[at[k] / m->granule] = who[k] / 32 % m->warps;
        }
        if (space == GLOBAL && m->check)
            for (int i = 0; i < words; i++) {
                owners[8 * k + i] = m->owner[at[k] / 2 + i];
                m->owner[at[k] / 2 + i] = (u32)m->block[who[k]] + m->first;
            }
    }
    if (checked)
        for (s64 k = 0; k < n && !clash; k++) {
            clash = differ(data + at[k], values + 16 * k, bytes);
            if (shadow) clash |= m->writer[at[k] / m->granule] != who[k] / 32 % m->warps;
            if (space == GLOBAL)
                for (int i = 0; i < words; i++) clash |= m->owner[at[k] / 2 + i] != (u32)m->block[who[k]] + m->first;
        }
    if (clash) {
        for (s64 k = n; k-- > 0;) {
            copy(data + at[k], before + 16 * k, bytes);
            if (shadow) m->writer[at[k] / m->granule] = writers[k];
            if (space == GLOBAL)
                for (int i = 0; i < words; i++) m->owner[at[k] / 2 + i] = owners[8 * k + i];
        }
        return 0;
    }
    if (shadow)
        for (s64 k = 0; k < n; k++) {
            s64 warp = who[k] / 32, g = at[k] / m->granule;
            for (s64 i = g; i < g + per; i++) {
                m->wrote[i] = m->clock[warp];
                m->writer[i] = warp % m->warps;
                if (m->between_lanes) m->turn[i] = m->turns[who[k]], m->author[i] = who[k] % 32;
            }
        }
    if (space == GLOBAL)
        for (s64 k = 0; k < n; k++)
            for (int i = 0; i < bytes; i++) m->state[at[k] + i] = m->check ? 3 : m->state[at[k] + i] | 2;
    return 1;
}

/* red and atom.global.add of f32 or f64: lanes that hit one address take turns in their order.  slot[0]: the value,
 * slot[1]: where the old one goes, if mode is 1. */
static int add(const Record *r, const Memory *m, const Slot *slots, s64 lanes, const u8 *mask)
{
    u64 *at = m->scratch, *who = at + lanes;
    s64 n = place(r, m, slots, lanes, mask, 3, at, who);
    if (n < 0) return 0;
    int words = r->bytes / 2;
    if (m->check) {
        u32 *owners = (u32 *)(at + 2 * lanes);
        for (s64 k = 0; k < n; k++)
            for (int i = 0; i < words; i++) {
                u32 old = m->owner[at[k] / 2 + i], mine = (u32)m->block[who[k]] + m->first;
                if (old >= m->first && old != mine && old != m->atomic) return 0;
                owners[4 * k + i] = old == mine ? mine : m->atomic;
            }
        for (s64 k = 0; k < n; k++)
            for (int i = 0; i < words; i++) m->owner[at[k] / 2 + i] = owners[4 * k + i];
    }
    const Slot *s = &slots[r->slot[0]], *d = &slots[r->slot[1]];
    for (s64 k = 0; k < n; k++) {
        char value[8];
        copy(value, s->base + who[k] * s->stride, r->bytes);
        if (r->mode) copy(d->base + who[k] * d->stride, m->data + at[k], r->bytes);
        if (r->bytes == 4) {
            f32 *to = (f32 *)(m->data + at[k]);
            *to = nan32(fl(fl(*to) + fl(*(const f32 *)value)));
        } else {
            u64 *to = (u64 *)(m->data + at[k]), quiet = 0x0008000000000000u;
            f64 x = float64(*to), y = *(const f64 *)value; /* of two NaNs the first stays */
            *to = x != x ? *to | quiet : y != y ? bits64(y) | quiet : bits64(x + y);
        }
    }
    return 1;
}

/* --- whole warps ------------------------------------------------------------------------------------------------ */

/* Whether every warp has all its lanes here or none. */
static int whole(const Memory *m, s64 lanes, const u8 *mask)
{
    if (mask == NULL) return 1;
    if (m->waiting) return 0;
    for (s64 lane = 0; lane < lanes; lane += 32) {
        u64 w[4];
        memcpy(w, mask + lane, 32);
        u64 all = w[0] & w[1] & w[2] & w[3], any = w[0] | w[1] | w[2] | w[3];
        if (any != 0 && all != 0x0101010101010101u) return 0;
    }
    return 1;
}
static inline u32 word(const Slot *s, s64 lane) { return *(const u32 *)(s->base + lane * s->stride); }

/* mma.sync (ops_mma.py has the layout): m = 8 · words rows, k = wide columns of a, format in `bytes`.  Products of the
 * narrow formats are exact; sums go over k in order in float64, and the accumulator comes last. */
enum { BF16, F16, TF32, F64 };

/* Elements of one register of all lanes of a warp: e[lane][i]. */
static inline void decode(f64 (*e)[2], const Slot *s, s64 first, int format)
{
    for (s64 l = 0; l < 32; l++) {
        const char *p = s->base + (first + l) * s->stride;
        if (format == F64) {
            e[l][0] = *(const f64 *)p;
            continue;
        }
        u32 w = *(const u32 *)p;
        if (format == BF16) e[l][0] = float32(w << 16), e[l][1] = float32(w & 0xffff0000u);
        else if (format == F16) e[l][0] = of_f16((u16)w), e[l][1] = of_f16((u16)(w >> 16));
        else e[l][0] = float32(w & 0xffffe000u);
    }
}

static inline __attribute__((always_inline)) int
multiply_as(const Record *r, const Memory *m, const Slot *slots, s64 lanes, const u8 *mask, const int halves,
            const int format, const int k)
{
    const int pair = format <= F16 ? 2 : 1, each = 4 * pair, steps = k / each;
    const s32 *d = r->slot, *a = d + 2 * halves, *b = a + halves * steps, *c = b + steps;
    f64 x[16][16], y[16][8], sum[16][8], e[32][2];
    char *kept = (char *)m->scratch; /* [register][lane]: f64 NaNs are the NumPy path's, then nothing may be written */
    for (s64 first = 0; first < lanes; first += 32) {
        if (mask && !mask[first]) continue;
        for (int step = 0; step < steps; step++) {
            for (int half = 0; half < halves; half++) {
                decode(e, &slots[a[step * halves + half]], first, format);
                for (int l = 0; l < 32; l++)
                    for (int i = 0; i < pair; i++) x[l / 4 + 8 * half][pair * (l % 4) + i + each * step] = e[l][i];
            }
            decode(e, &slots[b[step]], first, format);
            for (int l = 0; l < 32; l++)
                for (int i = 0; i < pair; i++) y[pair * (l % 4) + i + each * step][l / 4] = e[l][i];
        }
        for (int at = 0; at < 2 * halves; at++) {
            const Slot *s = &slots[c[at]];
            for (int l = 0; l < 32; l++) {
                const char *p = s->base + (first + l) * s->stride;
                sum[at / 2 * 8 + l / 4][l % 4 * 2 + at % 2] = format == F64 ? *(const f64 *)p : 0;
            }
        }
        for (int i = 0; i < 8 * halves; i++)
            for (int l = 0; l < k; l++)
                for (int j = 0; j < 8; j++)
                    sum[i][j] = format == F64 ? __builtin_fma(x[i][l], y[l][j], sum[i][j]) : sum[i][j] + x[i][l] * y[l][j];
        for (int at = 0; at < 2 * halves; at++) {
            const Slot *s = &slots[c[at]];
            for (int l = 0; l < 32; l++) {
                f64 v = sum[at / 2 * 8 + l / 4][l % 4 * 2 + at % 2];
                if (format == F64) {
                    if (v != v) return 0;
                    ((f64 *)kept)[at * lanes + first + l] = v;
                } else {
                    f64 start = *(const f32 *)(s->base + (first + l) * s->stride);
                    ((f32 *)kept)[at * lanes + first + l] = nan32((f32)(start + v));
                }
            }
        }
    }
    for (int at = 0; at < 2 * halves; at++) {
        const Slot *s = &slots[d[at]];
        const int size = format == F64 ? 8 : 4;
        for (s64 lane = 0; lane < lanes; lane++)
            if (!mask || mask[lane]) copy(s->base + lane * s->stride, kept + (at * lanes + lane) * size, size);
    }
    return 1;
}

static int multiply(const Record *r, const Memory *m, const Slot *slots, s64 lanes, const u8 *mask)
{
    if (!whole(m, lanes, mask)) return 0;
    switch (r->words << 16 | r->bytes << 8 | r->wide) {
#define SHAPE(halves, format, k)                                                                                       \
    case (halves) << 16 | (format) << 8 | (k): return multiply_as(r, m, slots, lanes, mask, halves, format, k)
        SHAPE(2, BF16, 16);
        SHAPE(2, BF16, 8);
        SHAPE(2, F16, 16);
        SHAPE(2, F16, 8);
        SHAPE(2, TF32, 8);
        SHAPE(2, TF32, 4);
        SHAPE(1, F64, 4);
        SHAPE(2, F64, 4);
        SHAPE(2, F64, 8);
        SHAPE(2, F64, 16);
#undef SHAPE
    }
    return 0;
}

/* ldmatrix: lane 8i + r gives the address of row r of matrix i; lane l gets row l/4, columns 2(l%4) and the next. */
static int matrices(const Record *r, const Memory *m, const Slot *slots, s64 lanes, const u8 *mask)
{
    u64 *at = m->scratch, *who = at + lanes;
    u8 *rows = (u8 *)(at + 2 * lanes);
    int count = r->words;
    if (!whole(m, lanes, mask)) return 0;
    for (s64 lane = 0; lane < lanes; lane++) rows[lane] = (!mask || mask[lane]) && lane % 32 < 8 * count;
    Record one = *r;
    one.bytes = 16, one.words = 1;
    s64 n = place(&one, m, slots, lanes, rows, 0, at, who);
    if (n < 0 || !note_reads(m, at, who, n, 16, 1)) return 0;
    for (s64 k = 0; k < n; k += 8 * count)
        for (int i = 0; i < count; i++) {
            const Slot *d = &slots[r->slot[i]];
            const u64 *row = at + k + 8 * i;
            for (s64 l = 0; l < 32; l++) {
                u32 w;
                if (!r->mode) memcpy(&w, m->shared + row[l / 4] + 4 * (l % 4), 4);
                else {
                    u16 low, high;
                    memcpy(&low, m->shared + row[2 * (l % 4)] + 2 * (l / 4), 2);
                    memcpy(&high, m->shared + row[2 * (l % 4) + 1] + 2 * (l / 4), 2);
                    w = low | (u32)high << 16;
                }
                *(u32 *)(d->base + ((s64)who[k] + l) * d->stride) = w;
            }
        }
    return 1;
}

/* shfl.sync of whole warps whose member masks are full.  slot: result, predicate (if words is 2), value, b, c, mask. */
static int shuffle(const Record *r, const Memory *m, const Slot *slots, s64 lanes, const u8 *mask)
{
    if (!whole(m, lanes, mask)) return 0;
    const Slot *d = &slots[r->slot[0]], *p = &slots[r->slot[1]], *value = &slots[r->slot[2]];
    for (s64 lane = 0; lane < lanes; lane++)
        if ((!mask || mask[lane]) && word(&slots[r->slot[5]], lane) != 0xffffffffu) return 0;
    for (s64 first = 0; first < lanes; first += 32) {
        if (mask && !mask[first]) continue;
        u32 from[32], out[32];
        u8 inside[32];
        for (s64 l = 0; l < 32; l++) from[l] = word(value, first + l);
        for (s64 l = 0; l < 32; l++) {
            s64 b = word(&slots[r->slot[3]], first + l) & 31, c = word(&slots[r->slot[4]], first + l);
            s64 segment = c >> 8 & 31, top = (l & segment) | (c & 31 & ~segment), j;
            switch (r->mode) {
            case 0: j = l - b; inside[l] = j >= top; break;
            case 1: j = l + b; inside[l] = j <= top; break;
            case 2: j = l ^ b; inside[l] = j <= top; break;
            default: j = (l & segment) | (b & ~segment & 31); inside[l] = j <= top;
            }
            out[l] = from[inside[l] ? j : l];
        }
        for (s64 l = 0; l < 32; l++) *(u32 *)(d->base + (first + l) * d->stride) = out[l];
        if (r->words == 2)
            for (s64 l = 0; l < 32; l++) *(u8 *)(p->base + (first + l) * p->stride) = inside[l];
    }
    return 1;
}

/* Run `count` records under `mask` (NULL: all lanes); return how many are done: less than all before an access that the
 * NumPy path must take. */
s64 lanes_run(const Record *r, s64 count, const Slot *slots, s64 lanes, const u8 *mask, const Memory *m)
{
    for (s64 k = 0; k < count; k++, r++) {
        if (r->op >= 0) {
            elementwise(r, slots, lanes, mask);
            continue;
        }
        const u8 *some = narrow(r, slots, mask, (u8 *)(m->scratch + 11 * lanes), 0, lanes);
        int done = 0;
        switch (r->kind >> 4) {
        case LOAD: done = load(r, m, slots, lanes, some); break;
        case STORE: done = store(r, m, slots, lanes, some); break;
        case ADD: done = add(r, m, slots, lanes, some); break;
        case MULTIPLY: done = multiply(r, m, slots, lanes, some); break;
        case MATRICES: done = matrices(r, m, slots, lanes, some); break;
        case SHUFFLE: done = shuffle(r, m, slots, lanes, some); break;
        }
        if (!done) return k;
    }
    return count;
}

/* Sizes of the structures, for a check against those of stretches.py. */
s64 lanes_abi(void) { return sizeof(Record) * 1000000 + sizeof(Memory) * 1000 + sizeof(Slot); }
