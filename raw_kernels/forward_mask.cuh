/* forward.cu: which scores of a cut tile are hidden, as bits in registers, one for each score of the thread.
 *
 *   a lane         one row of its warp: which of the tile's keys it does not see       64 bits, in the order of keys
 *   a quad         the four lanes of a fragment's rows swap them                       shuffles
 *   a thread       the bits of its own scores: a byte for each n8 tile of S            R2P makes 7 predicates of a byte
 *
 * Keys come in the order of their positions, and spans are told in places of that order (sight.cuh): those that a row sees are
 * a run of columns, two shifts.
 */
#ifndef BURST_FORWARD_MASK_CUH
#define BURST_FORWARD_MASK_CUH

#include "forward_shape.cuh"

constexpr int WORDS = (TILE_K + 31) / 32;
constexpr int ROWS = 2 * SLABS; /* of a thread */
static_assert(TILE_K <= 64 && TILE_K % 16 == 0, "a row's keys are at most two words");

/* Bit 8 (n % 4) + 4 slab + 2 h + e of word n / 4: key 8 n + 2 (lane % 4) + e is hidden from row 16 slab + 8 h + lane / 4. */
struct Hidden {
    u32 word[WORDS];

    DEVICE_MEMBER bool at(int slab, int n, int i) const { return word[n / 4] >> (8 * (n % 4) + 4 * slab + i) & 1; }
};

/* Of one row: bit i of word w is key 32 w + i. */
struct Columns {
    u32 word[WORDS];
};

/* What the row sees that this lane looks after: lane / 4 + 8 (lane % 4) of its warp's.  One that is not there has
 * its neighbour's: nobody reads what becomes of it. */
DEVICE int2 lane_span(const Block &block, int tile)
{
    const u32 thread = thread_index(), lane = thread % 32;
    const int row = tile * TILE_Q + (int)(thread / 32 * WARP_ROWS + lane / 4 + lane % ROWS * 8);
    return block.spans[min(row, block.rows_q - 1)];
}

/* Keys below a, and from b on. */
DEVICE Columns outside(u32 a, u32 b)
{
    Columns columns;
    if (WORDS == 2) {
        u64 from_a, from_b; /* a shift by 64 or more leaves nothing */
        asm("shl.b64 %0, %1, %2;" : "=l"(from_a) : "l"(~0ull), "r"(a));
        asm("shl.b64 %0, %1, %2;" : "=l"(from_b) : "l"(~0ull), "r"(b));
        const u64 both = ~from_a | from_b;
        columns.word[0] = (u32)both, columns.word[WORDS - 1] = (u32)(both >> 32);
    } else {
        u32 from_a, from_b;
        asm("shl.b32 %0, %1, %2;" : "=r"(from_a) : "r"(~0u), "r"(a));
        asm("shl.b32 %0, %1, %2;" : "=r"(from_b) : "r"(~0u), "r"(b));
        columns.word[0] = ~from_a | from_b;
    }
    return columns;
}

/* How far x lies above `first`. */
DEVICE u32 above(int x, int first) { return (u32)(max(x, first) - first); }

/* A tile whose first place is `first`.  No row sees beyond the last key, so that what follows it in the tile is hidden. */
DEVICE Columns columns_of(int2 span, int first) { return outside(above(span.x, first), above(span.y, first)); }

/* Bits of a where the mask has ones, else of b; told as one instruction, or the compiler takes each field by itself. */
DEVICE u32 chosen(u32 mask, u32 a, u32 b)
{
    u32 x;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(x) : "r"(mask), "r"(a), "r"(b));
    return x;
}

/* From rows of lanes to scores of threads.  The whole warp calls it. */
DEVICE Hidden gather(const Columns &columns)
{
    const u32 quarter = thread_index() % 4;
    Hidden hidden;
    UNROLL for (int word = 0; word < WORDS; word++) {
        u32 row[4]; /* of each: columns 8 n + 2 quarter + e to bits 8 n + 2 i + e */
        UNROLL for (int i = 0; i < 4; i++) {
            const u32 x = i < ROWS ? __shfl_sync(~0u, columns.word[word], i, 4) : 0;
            row[i] = __funnelshift_l(x, x, 2 * i - 2 * quarter);
        }
        const u32 low = chosen(0x33333333, row[0], row[1]);
        hidden.word[word] = ROWS == 2 ? low : chosen(0x0f0f0f0f, low, chosen(0x33333333, row[2], row[3]));
    }
    return hidden;
}

#endif
