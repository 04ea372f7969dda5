/* What the backward kernels of float16 and bfloat16 share: swizzled tiles, copies of rows, scores and their slope.
 *
 * A tile in shared memory is [rows][columns] of TYPE.  The eight rows of an ldmatrix phase, in any column, must lie in eight
 * different groups of banks.  Where there is room a row is 16 bytes longer than its columns (PAD): an odd number of 16-byte
 * chunks.  All addresses of a lane are then one register and constants.  Elsewhere chunks are swizzled:
 *   rows of 128 i bytes        chunk ^= row % 8
 *   rows of 128 i + 64 bytes   chunk ^= row / 2 % 4         (head dims 32 and 96: two rows already differ by half the banks)
 * A step of a constant number of chunks is then an XOR and an addition (along), a step of 8 rows an addition.
 */
#ifndef BURST_BACKWARD_CUH
#define BURST_BACKWARD_CUH

#include "order.cuh"
#include "ptx.cuh"
#include "scores.h"
#include "sight.cuh"

#define LOG2_E 1.4426950408889634

/* Where chunk `chunk` of row `row` lies in a tile with rows of BYTES bytes. */
template <int BYTES> DEVICE u32 swizzled(int row, int chunk)
{
    static_assert(BYTES % 64 == 0 || BYTES % 32 == 16, "rows of a tile");
    if (BYTES % 32) return row * BYTES + chunk * 16;
    return row * BYTES + ((chunk ^ (BYTES % 128 ? (row >> 1) & 3 : row & 7)) << 4);
}

/* The address `chunks` further in the row; the bits of `chunks` must be clear in the chunk that `address` stands for. */
template <int BYTES> DEVICE u32 along(u32 address, int chunks)
{
    if (BYTES % 32) return address + 16 * chunks;
    constexpr int mask = BYTES % 128 ? 3 : 7;
    return (address ^ ((chunks & mask) << 4)) + ((chunks & ~mask) << 4);
}

/* The value of lane 0, which ptxas cannot make again (see opaque). */
DEVICE u32 opaque_uniform(u32 x)
{
    u32 y;
    asm volatile("shfl.sync.idx.b32 %0, %1, 0, 31, -1;" : "=r"(y) : "r"(x));
    return y;
}

/* condition ? x : y, here and not later. */
DEVICE u32 chosen(bool condition, u32 x, u32 y)
{
    u32 z;
    asm volatile("{.reg .pred p;\n"
                 "setp.ne.u32 p, %1, 0;\n"
                 "selp.b32 %0, %2, %3, p;}" : "=r"(z) : "r"((u32)condition), "r"(x), "r"(y));
    return z;
}

/* The lane's number, read anew: cheaper than a register that lives through a loop. */
DEVICE int lane_again()
{
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

DEVICE float2 shared_float2(u32 address)
{
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

DEVICE int2 shared_int2(u32 address)
{
    int2 x;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
}

DEVICE int shared_int(u32 address)
{
    int x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

DEVICE void shared_float4(float (&x)[4], u32 address)
{
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(address) : "memory");
}

/* What a block of threads knows from its start on and needs seldom: 32 bytes of shared memory, so that no register holds it
 * through the loop (the compiler would put it on its stack). */
struct Known {
    static constexpr int BYTES = 32;
    u64 first[2];  /* where the rows of two arrays begin, for this batch and head */
    int plain;     /* so many rows may be taken as they are: all, or 0 where columns are to be filled up or strides are large */
    int tile, head, batch;

    __device__ __forceinline__ void put(u32 address) const
    {
        asm volatile("st.shared.v2.b64 [%0], {%1,%2};" :: "r"(address), "l"(first[0]), "l"(first[1]) : "memory");
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                     :: "r"(address + 16), "r"(plain), "r"(tile), "r"(head), "r"(batch) : "memory");
    }
    __device__ __forceinline__ void get_first(u32 address)
    {
        asm volatile("ld.shared.v2.b64 {%0,%1}, [%2];" : "=l"(first[0]), "=l"(first[1]) : "r"(address) : "memory");
    }
    __device__ __forceinline__ void get_item(u32 address)
    {
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(plain), "=r"(tile), "=r"(head), "=r"(batch) : "r"(address + 16) : "memory");
    }
    static __device__ __forceinline__ int get_plain(u32 address) { return shared_int(address + 16); }
    static __device__ __forceinline__ int get_tile(u32 address) { return shared_int(address + 20); }
};

DEVICE void shared_store(u32 address, u32 x) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(x) : "memory"); }

/* How WARPS warps carry ROWS rows of COLUMNS numbers to shared memory: an instruction of a warp takes 8 rows of 64 bytes,
 * full sectors whatever the stride, and a thread stays in its rows, so that columns are constant offsets. */
template <int ROWS, int COLUMNS, int WARPS_, int PAD_ = 0> struct Carry {
    static constexpr int BYTES = 2 * COLUMNS + PAD_, UNITS = COLUMNS / 32;
    static constexpr int ROW_WARPS = ROWS / 8 < WARPS_ ? ROWS / 8 : WARPS_;
    static constexpr int COLUMN_WARPS = UNITS % (WARPS_ / ROW_WARPS) ? 1 : WARPS_ / ROW_WARPS; /* 1: some warps carry nothing */
    static constexpr int PASS = 8 * ROW_WARPS; /* rows at once */
    static_assert(ROWS % PASS == 0 && WARPS_ % ROW_WARPS == 0, "rows of a copy");

    /* This thread's first row and chunk.  A quarter of a warp writes two rows, in different halves of the banks. */
    static __device__ __forceinline__ u32 row(u32 warp, u32 lane)
    {
        return (ROW_WARPS < WARPS_ ? warp % ROW_WARPS : warp) * 8 + (BYTES % 128 == 64 ? lane >> 2 : (lane >> 2 & 1) * 4 + (lane >> 3));
    }
    static __device__ __forceinline__ u32 chunk(u32 warp, u32 lane)
    {
        return (COLUMN_WARPS > 1 ? warp / ROW_WARPS * 4 : 0) + (lane & 3);
    }

    /* shared: of this thread's first chunk; global: likewise; stride: bytes between rows. */
    static __device__ __forceinline__ void all(int warp, u32 shared, const char *global, int stride)
    {
        if (ROW_WARPS * COLUMN_WARPS < WARPS_ && warp >= ROW_WARPS * COLUMN_WARPS) return;
        UNROLL for (int pass = 0; pass < ROWS / PASS; pass++) {
            UNROLL for (int unit = 0; unit < UNITS; unit += COLUMN_WARPS)
                copy16(along<BYTES>(shared, 4 * unit) + pass * PASS * BYTES, global + 64 * unit);
            global = stepped(global, stride, PASS);
        }
    }

    /* The same where only `rows` rows from this thread's first one on, or `chunks` chunks from its first one on, are there. */
    static __device__ __forceinline__ void some(int warp, u32 shared, const char *global, i64 stride, int rows, int chunks)
    {
        if (ROW_WARPS * COLUMN_WARPS < WARPS_ && warp >= ROW_WARPS * COLUMN_WARPS) return;
        UNROLL for (int pass = 0; pass < ROWS / PASS; pass++) {
            UNROLL for (int unit = 0; unit < UNITS; unit += COLUMN_WARPS) {
                const bool there = pass * PASS < rows && 4 * unit < chunks;
                copy16_or_zero(along<BYTES>(shared, 4 * unit) + pass * PASS * BYTES, there ? global + 64 * unit : global, there);
            }
            if ((pass + 1) * PASS < rows) global += PASS * stride;
        }
    }
};

/* ---------------------------------------------------------------- the walk over tiles of the other side */

/* From the last tile to the first; all heads from `first_head` on, first the cut tiles and then the full ones. */
struct Walk {
    u32 left;  /* tiles of this 32 that are still to come, a bit each */
    int base;  /* the first tile of this 32 */
    int head;
    bool cut;
    int tile;  /* where we are */

    __device__ __forceinline__ Walk(int first_head) : left(0), base(0), head(first_head - 1), cut(true), tile(0) {}

    /* To and from 16 bytes of shared memory, a warp's own, with the tile's number among those of all heads: no register holds it
     * through the loop.  `tile` is not known afterwards. */
    static constexpr int BYTES = 16;
    __device__ __forceinline__ void put(u32 address, u32 number) const
    {
        const u32 lane = lane_again();
        u32 x = lane == 0 ? left : lane == 1 ? base | cut : number; /* a lane a word */
        x = lane == 2 ? head : x;
        if (lane < 4) asm volatile("st.shared.b32 [%0], %1;" :: "r"(address + 4 * lane), "r"(x) : "memory");
    }
    __device__ __forceinline__ u32 get(u32 address)
    {
        u32 number;
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(left), "=r"(base), "=r"(head), "=r"(number) : "r"(address) : "memory");
        cut = base & 1;
        base &= ~1;
        tile = 0;
        return number;
    }

    static __device__ __forceinline__ u32 number_at(u32 address) { return shared_int(address + 12); }

    /* Go to the next visible tile; false: there is none.  look_at(base): what is seen of the 32 tiles from `base` on; heads():
     * the first head, and the one after the last. */
    template <typename Heads, typename LookAt> __device__ __forceinline__ bool next(int tiles, Heads heads, LookAt look_at)
    {
        while (left == 0) {
            base -= 32;
            if (base < 0) {
                base = (tiles - 1) & ~31;
                const int2 ends = heads();
                if (++head == ends.y) {
                    if (!cut) return false;
                    cut = false;
                    head = ends.x;
                }
            }
            const Look look = look_at(base);
            left = cut ? look.cut : look.full;
        }
        const int bit = 31 - __clz(left);
        left ^= 1u << bit;
        tile = base + bit;
        return true;
    }
    template <typename LookAt> __device__ __forceinline__ bool next(int tiles, int first_head, int end_head, LookAt look_at)
    {
        return next(tiles, [=]() { return int2{first_head, end_head}; }, look_at);
    }
};

/* ---------------------------------------------------------------- scores */

struct Scoring {
    float to_log2;   /* scale · log2 e, or with softcap what makes x the argument of tanh */
    float cap;       /* softcap · log2 e */
    float slope;     /* of ALiBi · log2 e */

    __device__ __forceinline__ Scoring(const Block &block)
    {
        to_log2 = (float)(BURST_SOFTCAP ? block.scale / block.softcap : block.scale * LOG2_E);
        cap = (float)(BURST_SOFTCAP ? block.softcap * LOG2_E : 0);
        slope = 0;
        asm volatile("" : "+f"(to_log2)); /* not made again in the loop */
    }
    __device__ __forceinline__ void of_head(const Block &block, int head)
    {
        if (BURST_ALIBI) slope = block.slopes[head] * (float)LOG2_E;
    }

    /* P = exp(s - lse) of a product x = q·k: 2^(s log2 e - lse log2 e).  *bend gets d cap(x)/dx. */
    __device__ __forceinline__ float weight(float x, float minus_lse, int apart, float *bend) const
    {
        float exponent;
        if (BURST_SOFTCAP) {
            const float t = tanhf(x * to_log2);
            *bend = 1 - t * t;
            exponent = fmaf(t, cap, minus_lse);
        } else {
            *bend = 1;
            exponent = fmaf(x, to_log2, minus_lse);
        }
        if (BURST_ALIBI) exponent = fmaf(-slope, fabsf((float)apart), exponent);
        return exp2_fast(exponent);
    }
};

#endif
