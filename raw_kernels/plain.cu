/* What is no attention: copies with a change of type, clearing, adding, and delta.
 *
 *   copy    to = from, rounded once to nearest even          FROM, TO: types as in block.cuh
 *   clear   to = value
 *   add     to += from                                       FROM = TO
 *   delta   delta_i = sum_c dout_ic out_ic, sums in REAL     TYPE
 *
 * copy, clear, add: a thread takes VECTOR columns that lie side by side, a block of threads as many such pieces as it has
 * threads; the grid covers them all.  VECTOR is chosen by plain.py so that the wider side moves 16 bytes, or half, a quarter
 * and so on of that where strides or addresses forbid it.  INDEX counts pieces: u32, or u64 for arrays that need it.
 * delta: a warp takes 32 rows of a head, 8 lanes a row; lane i ends with the sum of row i, so that one store covers whole sectors.
 */
#ifdef TO
#define TYPE TO
#endif
#include "block.cuh"

#define THREADS 256

/* 16-bit numbers as they lie in memory; no header of CUDA is needed to read and round them. */
struct Half {
    u16 bits;
};
struct Bfloat {
    u16 bits;
};

DEVICE float wide(Half x)
{
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

DEVICE float wide(Bfloat x) { return __uint_as_float((u32)x.bits << 16); }

template <int T> struct Item;
template <> struct Item<FLOAT64> { typedef double type; };
template <> struct Item<FLOAT32> { typedef float type; };
template <> struct Item<FLOAT16> { typedef Half type; };
template <> struct Item<BFLOAT16> { typedef Bfloat type; };

/* One rounding, to nearest even. */
template <class T> struct Cast;
template <> struct Cast<double> {
    DEVICE double from(double x) { return x; }
    DEVICE double from(float x) { return x; }
    DEVICE double from(Half x) { return wide(x); }
    DEVICE double from(Bfloat x) { return wide(x); }
};
template <> struct Cast<float> {
    DEVICE float from(double x) { return __double2float_rn(x); }
    DEVICE float from(float x) { return x; }
    DEVICE float from(Half x) { return wide(x); }
    DEVICE float from(Bfloat x) { return wide(x); }
};
template <> struct Cast<Half> {
    DEVICE Half from(double x)
    {
        Half y;
        asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x));
        return y;
    }
    DEVICE Half from(float x)
    {
        Half y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
    DEVICE Half from(Half x) { return x; }
    DEVICE Half from(Bfloat x) { return from(wide(x)); }
};
template <> struct Cast<Bfloat> {
    /* Half of the last place that stays, less one unless it is odd; NaN stays one. */
    DEVICE Bfloat from(float x)
    {
        const u32 bits = __float_as_uint(x);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
        return {(u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
    }
    /* By a float that is rounded to odd: it keeps on which side of a tie the number lies. */
    DEVICE Bfloat from(double x)
    {
        const float cut = __double2float_rz(x);
        return from(__uint_as_float(__float_as_uint(cut) | (u32)((double)cut != x)));
    }
    DEVICE Bfloat from(Half x) { return from(wide(x)); }
    DEVICE Bfloat from(Bfloat x) { return x; }
};

/* N items that lie side by side, moved by one instruction. */
template <class T, int N> struct alignas(N * sizeof(T)) Piece { T item[N]; };

#ifdef TO
#ifndef FROM
#define FROM TO
#endif
#ifndef INDEX
#define INDEX u32
#endif

struct Plain {
    char *to;          /* [a, b, c, columns] of TO */
    const char *from;  /* [a, b, c, columns] of FROM */
    i64 to_step[4];    /* bytes; the last is of one column */
    i64 from_step[4];
    i64 pieces;        /* a b c columns / VECTOR */
    int b, c;
    int across;        /* columns / VECTOR */
    int reserved;
    double value;
};

typedef Item<TO>::type To;
typedef Item<FROM>::type From;

struct Place {
    i64 to, from;
};

/* Where a piece lies, in bytes. */
DEVICE Place place(const Plain &p, INDEX number)
{
    const INDEX column = number % (INDEX)p.across;
    number /= (INDEX)p.across;
    const INDEX c = number % (INDEX)p.c;
    number /= (INDEX)p.c;
    const INDEX b = number % (INDEX)p.b, a = number / (INDEX)p.b;
    const i64 first = (i64)column * VECTOR;
    return {(i64)a * p.to_step[0] + (i64)b * p.to_step[1] + (i64)c * p.to_step[2] + first * p.to_step[3],
            (i64)a * p.from_step[0] + (i64)b * p.from_step[1] + (i64)c * p.from_step[2] + first * p.from_step[3]};
}

extern "C" __global__ void __launch_bounds__(THREADS) copy(const __grid_constant__ Plain p)
{
    const INDEX number = (INDEX)blockIdx.x * THREADS + threadIdx.x;
    if (number >= (INDEX)p.pieces) return;
    const Place at = place(p, number);
    const Piece<From, VECTOR> x = *(const Piece<From, VECTOR> *)(p.from + at.from);
    Piece<To, VECTOR> y;
    UNROLL for (int i = 0; i < VECTOR; i++) y.item[i] = Cast<To>::from(x.item[i]);
    *(Piece<To, VECTOR> *)(p.to + at.to) = y;
}

extern "C" __global__ void __launch_bounds__(THREADS) clear(const __grid_constant__ Plain p)
{
    const INDEX number = (INDEX)blockIdx.x * THREADS + threadIdx.x;
    if (number >= (INDEX)p.pieces) return;
    Piece<To, VECTOR> y;
    const To value = Cast<To>::from(p.value);
    UNROLL for (int i = 0; i < VECTOR; i++) y.item[i] = value;
    *(Piece<To, VECTOR> *)(p.to + place(p, number).to) = y;
}

#if TO == FROM && TO <= FLOAT32
extern "C" __global__ void __launch_bounds__(THREADS) add(const __grid_constant__ Plain p)
{
    const INDEX number = (INDEX)blockIdx.x * THREADS + threadIdx.x;
    if (number >= (INDEX)p.pieces) return;
    const Place at = place(p, number);
    const Piece<To, VECTOR> x = *(const Piece<To, VECTOR> *)(p.from + at.from);
    Piece<To, VECTOR> y = *(Piece<To, VECTOR> *)(p.to + at.to);
    UNROLL for (int i = 0; i < VECTOR; i++) y.item[i] += x.item[i];
    *(Piece<To, VECTOR> *)(p.to + at.to) = y;
}
#endif

#else /* delta: -DTYPE and -DVECTOR */

typedef Item<TYPE>::type In;

/* block: dout, out (in the place of `last`, of TYPE), delta, batch, heads, rows_q, dim_v.  A warp 32 rows of one head. */
extern "C" __global__ void __launch_bounds__(THREADS) delta(const __grid_constant__ Block block)
{
    const int lane = threadIdx.x & 31;
    const u32 strips = ((u32)block.rows_q + 31) / 32, number = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (number >= strips * (u32)block.heads * (u32)block.batch) return;
    const int first = (int)(number % strips) * 32;
    const int head = (int)(number / strips % (u32)block.heads), batch = (int)(number / strips / (u32)block.heads);
    REAL mine = 0;
    UNROLL for (int step = 0; step < 8; step++) {
        const int row = first + step * 4 + lane / 8;
        REAL sum = 0;
        if (row < block.rows_q) {
            const char *x = at_row(block.dout, batch, row, head), *y = at_row(block.last, batch, row, head);
            for (int c = lane % 8 * VECTOR; c < block.dim_v; c += 8 * VECTOR) {
                const Piece<In, VECTOR> a = *(const Piece<In, VECTOR> *)(x + c * (int)sizeof(In));
                const Piece<In, VECTOR> b = *(const Piece<In, VECTOR> *)(y + c * (int)sizeof(In));
                UNROLL for (int i = 0; i < VECTOR; i++) sum += Cast<REAL>::from(a.item[i]) * Cast<REAL>::from(b.item[i]);
            }
        }
        UNROLL for (int s = 4; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
        /* lanes 8i hold row step·4 + i: to lane step·4 + i */
        const REAL got = __shfl_sync(~0u, sum, lane % 4 * 8);
        if (lane / 4 == step) mine = got;
    }
    if (first + lane < block.rows_q) *at_row(block.delta, batch, head, first + lane) = mine;
}
#endif
