/* forward.cu: its constants, what lies where in shared memory, and copies into it.
 *
 *   TILE_Q, TILE_K       rows of a tile of queries, of keys           WARPS   of a block, TILE_Q / WARPS rows each (16 or 32)
 *   HEAD_DIM, HEAD_DIM_V columns of Q and K, of V                     V_STAGES tiles of V that shared memory holds (K: 2)
 *   Q_IN_REGISTERS       1: Q's fragments stay in registers           FULL_CHUNK, CUT_CHUNK  keys whose scores are made at a time
 *   PADDED               1: d or dim_v is less than HEAD_DIM(_V)      KEEPS_ROWS  1: the main loop keeps where rows are copied from; 0: it
 *                        finds them anew for each tile, as there are no four registers for them
 *   SORTED               1: keys come in the order of Block.keys, not in their own
 */
#ifndef BURST_FORWARD_SHAPE_CUH
#define BURST_FORWARD_SHAPE_CUH

#include "order.cuh"
#include "ptx.cuh"
#include "scores.h"
#include "sight.cuh"

#define BENT (BURST_SOFTCAP || BURST_ALIBI) /* a score is not just a scaled product */

constexpr bool SPARE = Q_IN_REGISTERS; /* narrow heads: the main loop leaves registers to spare */
constexpr bool KEEPS_SPAN = SPARE || TILE_Q / WARPS == 16; /* what a lane's row sees, and a thread's seat, stay in registers: there are four for it */
constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = TILE_Q / WARPS;
constexpr int SLABS = WARP_ROWS / 16;       /* m16 slabs of a warp */
constexpr int STEPS_D = HEAD_DIM / 16;      /* k16 steps of S = Q K' */
constexpr int STEPS_V = HEAD_DIM_V / 16;    /* pairs of n8 tiles of O */
constexpr int STEPS_K = TILE_K / 16;        /* k16 steps of O += P V */

static_assert(TILE_Q == WARPS * SLABS * 16 && (SLABS == 1 || SLABS == 2), "a warp has 16 or 32 rows");
static_assert(TILE_K % FULL_CHUNK == 0 && FULL_CHUNK % 16 == 0 && TILE_K % CUT_CHUNK == 0 && CUT_CHUNK % 16 == 0, "chunks of 16 keys");

template <bool X, class A, class B> struct If {
    typedef A type;
};
template <class A, class B> struct If<false, A, B> {
    typedef B type;
};

/* Rows of 16-bit numbers in shared memory: pages of 64 columns (128 bytes a row), or of 32 where DIM is no multiple of
 * 64.  The 16-byte pieces of a row are swapped by an XOR with its number, so that 8 rows at one column (a phase of
 * ldmatrix), and whole rows (a phase of a copy), each touch all 32 banks. */
template <int DIM> struct Pages {
    static constexpr int COLUMNS = DIM % 64 ? 32 : 64, COUNT = DIM / COLUMNS;
    static constexpr int ROW = 2 * COLUMNS;        /* bytes of a row in a page */
    static constexpr int PIECES = COLUMNS / 8;     /* 16-byte pieces of it */
    static constexpr int BASES = COLUMNS / 16;     /* k16 steps in a page: an address for each */

    static DEVICE_MEMBER u32 at(int row, int piece)
    {
        const int swap = ROW == 128 ? row & 7 : (row >> 1) & 3;
        return row * ROW + ((piece ^ swap) << 4);
    }
};

typedef Pages<HEAD_DIM> PagesK;
typedef Pages<HEAD_DIM_V> PagesV;

/* ---------------------------------------------------------------- shared memory, in bytes from its start */

constexpr int DESK_BYTES = 96;
constexpr int K_BYTES = TILE_K * HEAD_DIM * 2, V_BYTES = TILE_K * HEAD_DIM_V * 2, Q_BYTES = TILE_Q * HEAD_DIM * 2;
constexpr int K_SMEM = 0;                                      /* [2 stages][pages][TILE_K][columns] */
constexpr int V_SMEM = K_SMEM + 2 * K_BYTES;                   /* [V_STAGES][pages][TILE_K][columns] */
constexpr int TILES_END = V_SMEM + V_STAGES * V_BYTES;
/* Q: [warp][slab][k16 step][lane] fragments of 16 bytes.  Where they stay in registers, K and V's room is used to get there. */
constexpr int Q_SMEM = Q_IN_REGISTERS ? 0 : TILES_END;
constexpr int POSITIONS_SMEM = Q_IN_REGISTERS ? (Q_BYTES > TILES_END ? Q_BYTES : TILES_END) : TILES_END + Q_BYTES; /* [2 stages][TILE_K] int */
constexpr int DESK_SMEM = POSITIONS_SMEM + 2 * TILE_K * 4;     /* [WARPS] Desk */
constexpr int SHARED_BYTES = DESK_SMEM + WARPS * DESK_BYTES;

static_assert(SHARED_BYTES == SHARED, "tiles.py and the kernel disagree on shared memory");
static_assert(SHARED <= SHARED_LIMIT, "the tile does not fit into shared memory");

/* What a warp must know now and then, but should not keep in registers through the main loop. */
struct Desk {
    u32 quick;         /* `cut` as it was found, or 0 where rows lie too far apart for 32 bits: cut tiles are taken from it downwards */
    u32 plain;         /* of the tiles looked at: those not `hidden`; 0 while some row has no reference yet */
    int window;        /* tiles from here on have been looked at ... */
    u32 hidden;        /* of these: this warp sees nothing of it */
    int4 reach;        /* of the warp's own rows, as in sight.cuh */
    Item item;         /* what the block works on */
    const char *k, *v; /* row 0 of the head of K and of V that it reads */
    int begin;         /* first tile of keys of this split */
    int whole;         /* tiles below this one are whole; 0 where rows lie too far apart for 32 bits */
    u32 cut, full;     /* ... and these are still to be done: bit i is tile window + i */
    int lowest;        /* tile of the run of full tiles that the main loop is in */
    int started;       /* a tile has been taken in, or a state: most rows have a reference */
    int seen;          /* all rows of this warp have one */
};
static_assert(sizeof(Desk) <= DESK_BYTES, "tiles.py knows it");

/* ---------------------------------------------------------------- walking the tiles of keys, from the last to the first */

struct Next {
    int tile; /* -1: no more */
    u32 one;  /* a cut tile's bit on the desk: some pair may be hidden from some warp, or the tile is not whole; 0: full */
};

/* Look at 32 tiles further down.  The whole warp calls it; all warps find the same, but for what their own rows see. */
DEVICE void look_down(const Block &block, Desk &desk)
{
    const int lane = thread_index() % 32, end = desk.window, window = max(desk.begin, end - 32), tile = window + lane;
    const int4 reach = desk.reach;
    const Look look = look_at_keys(block, block.reach[desk.item.tile], window, end);
    const int2 extent = tile < end ? block.extent[tile] : int2{0, 0};
    const u32 hidden = __ballot_sync(~0u, !tile_visible(reach, extent));
    if (lane == 0) {
        desk.window = window, desk.cut = look.cut, desk.full = look.full;
        desk.hidden = hidden, desk.plain = desk.seen ? ~hidden : 0;
        desk.quick = desk.whole ? look.cut : 0;
    }
    __syncwarp();
}

/* Take a tile: of the 32 looked at, the cut ones first. */
DEVICE Next next_tile(const Block &block, Desk &desk)
{
    NO_UNROLL while (agreed(!(desk.cut | desk.full))) {
        if (agreed(desk.window <= desk.begin)) return {-1, 0};
        __syncwarp();
        look_down(block, desk);
    }
    const u32 cut = desk.cut, full = desk.full;
    const int bit = 31 - __clz(cut ? cut : full);
    const u32 one = 1u << bit;
    const Next next = {desk.window + bit, agreed(cut) ? one : 0};
    __syncwarp();
    if (thread_index() % 32 == 0) {
        if (next.one) desk.cut = cut ^ one;
        else desk.full = full ^ one;
    }
    __syncwarp();
    return next;
}

/* All of desk.quick has been taken, without a note of each. */
DEVICE void end_quick(Desk &desk)
{
    __syncwarp();
    if (thread_index() % 32 == 0 && desk.quick) desk.quick = desk.cut = 0;
    __syncwarp();
}

/* Take the full tiles that lie directly below a full one, and tell how many they are. */
DEVICE int run_below(Desk &desk, int tile)
{
    const int bit = tile - desk.window;
    const u32 full = desk.full, below = bit ? full << (32 - bit) : 0;
    const int run = __clz(~below); /* at most 31, as bit is */
    __syncwarp();
    if (thread_index() % 32 == 0) {
        desk.full = full & ~(((1u << run) - 1) << (bit - run));
        desk.lowest = tile - run;
    }
    __syncwarp();
    return run;
}

/* At the end of a run, whose last tile is desk.lowest: take what lies directly below, if that is a full tile too (32 tiles
 * are looked at at a time, so that a long run has many ends). */
DEVICE bool run_goes_on(const Block &block, Desk &desk, int &ahead)
{
    const int lowest = desk.lowest;
    const Next next = next_tile(block, desk);
    if (agreed(next.tile < 0)) return false;
    if (agreed(next.one || next.tile != lowest - 1)) { /* put it back */
        if (thread_index() % 32 == 0) {
            if (next.one) desk.cut |= next.one;
            else desk.full |= 1u << (next.tile - desk.window);
        }
        __syncwarp();
        return false;
    }
    ahead = 1 + run_below(desk, next.tile);
    return true;
}

/* ---------------------------------------------------------------- copies */

/* A thread copies rows row, row + PASS, ... of a tile: of each page the 16-byte piece `piece` and, where a row has 8 of
 * them, piece + 4.  So four lanes take 64 bytes of a row side by side (whole sectors), and the main loop has half as many
 * rows to step to.  Lanes 0-3 and 4-7 are four rows apart: their pieces, swapped by the XOR, fill all banks together. */
template <int DIM> struct Share {
    static constexpr int HALVES = Pages<DIM>::PIECES == 8 && TILE_K % (THREADS / 4) == 0 ? 2 : 1;
    static constexpr int LANES = Pages<DIM>::PIECES / HALVES;   /* of a row */
    static constexpr int PASS = THREADS / LANES;                /* rows of a pass: a multiple of 8, so the XOR stays the same */
    static_assert(PASS % 8 == 0, "rows of a pass");

    static DEVICE_MEMBER int row(u32 thread)
    {
        const u32 i = thread / LANES;
        return HALVES == 2 ? (i & ~7u) | (i >> 1 & 3) | (i & 1) << 2 : i;
    }
    static DEVICE_MEMBER int piece(u32 thread) { return thread % LANES; }
    static DEVICE_MEMBER u32 target(u32 thread) { return Pages<DIM>::at(row(thread), piece(thread)); }
};

/* This thread's part of a row: its pieces number I and later. */
template <int DIM, int I> DEVICE void copy_row(u32 to, u32 to_other, const char *from, int columns)
{
    typedef Pages<DIM> P;
    typedef Share<DIM> S;
    if constexpr (I < P::COUNT * S::HALVES) {
        constexpr int PAGE = I / S::HALVES, HALF = I % S::HALVES, OFFSET = PAGE * P::ROW + HALF * 64;
        const u32 target = (HALF ? to_other : to) + PAGE * (TILE_K * P::ROW);
        if (PADDED) copy16_or_zero(target, from + OFFSET, (PAGE * P::PIECES + HALF * 4 + S::piece(thread_index())) * 8 < columns);
        else copy16_from<OFFSET>(target, from);
        copy_row<DIM, I + 1>(to, to_other, from, columns);
    }
}

/* A whole tile of keys.  to: this thread's piece, and piece + 4, which lie in the other half of a row; from: the piece in
 * its first row; step: bytes of PASS rows. */
template <int DIM> DEVICE void copy_tile(u32 to, u32 to_other, const char *from, int step, int columns)
{
    typedef Pages<DIM> P;
    typedef Share<DIM> S;
    static_assert(TILE_K % S::PASS == 0, "a tile of keys is a whole number of passes");
    UNROLL for (int i = 0; i < TILE_K / S::PASS; i++)
        copy_row<DIM, 0>(to + i * (S::PASS * P::ROW), to_other + i * (S::PASS * P::ROW), from + (i64)step * i, columns);
}

/* Where a thread's part of a tile of keys begins, in rows whose distance fits 32 bits. */
template <int DIM> DEVICE const char *share_of(const char *rows, int distance, int first, u32 thread)
{
    return stepped(rows + Share<DIM>::piece(thread) * 16, first + Share<DIM>::row(thread), distance);
}

/* The part of any tile of keys that a thread copies. */
struct Seat {
    int row;   /* its first one */
    int piece; /* in bytes from the row's start */
};

template <int DIM> DEVICE Seat seat_of(u32 thread) { return {Share<DIM>::row(thread), Share<DIM>::piece(thread) * 16}; }

/* The rows of a tile of keys that a thread copies: of the keys at its places. */
template <int DIM> struct Rows {
    int key[TILE_K / Share<DIM>::PASS];
    int piece;

    DEVICE_MEMBER Rows(const Block &block, int tile, Seat seat) : piece(seat.piece)
    {
        const int place = tile * TILE_K + seat.row;
        UNROLL for (int i = 0; i < TILE_K / Share<DIM>::PASS; i++)
            key[i] = SORTED ? block.keys[place + i * Share<DIM>::PASS] : place + i * Share<DIM>::PASS;
    }
};

/* A whole tile of keys, its rows found anew.  from: row 0. */
template <int DIM> DEVICE void copy_keys(u32 to, u32 to_other, const char *from, const Rows<DIM> &rows, int distance, int columns)
{
    typedef Pages<DIM> P;
    typedef Share<DIM> S;
    from += rows.piece;
    if (SORTED)
        UNROLL for (int i = 0; i < TILE_K / S::PASS; i++)
            copy_row<DIM, 0>(to + i * (S::PASS * P::ROW), to_other + i * (S::PASS * P::ROW), stepped(from, rows.key[i], distance), columns);
    else copy_tile<DIM>(to, to_other, stepped(from, rows.key[0], distance), distance * S::PASS, columns);
}

/* ROWS rows from `first` on, zeros where there are none, and in columns that are none.  rows: row 0; keys: the row at each place, 0: as they are. */
template <int DIM, int ROWS> DEVICE void copy_rows(u32 to, const char *rows, i64 distance, const int *keys, int first, int count, int columns)
{
    typedef Pages<DIM> P;
    typedef Share<DIM> S;
    const u32 thread = thread_index();
    const int row = S::row(thread), piece = S::piece(thread);
    const u32 target = to + S::target(thread);
    static_assert(ROWS % S::PASS == 0, "a tile is a whole number of passes");
    UNROLL for (int i = 0; i < ROWS / S::PASS; i++) {
        const int place = first + row + i * S::PASS;
        const char *from = rows + (keys && place < count ? keys[place] : place) * distance + piece * 16;
        UNROLL for (int page = 0; page < P::COUNT; page++)
            UNROLL for (int half = 0; half < S::HALVES; half++) {
                const bool there = place < count && (!PADDED || (page * P::PIECES + half * 4 + piece) * 8 < columns);
                copy16_or_zero((target ^ half * 64) + page * (ROWS * P::ROW) + i * (S::PASS * P::ROW), from + page * P::ROW + half * 64, there);
            }
    }
}

/* Positions of a tile of keys; a key that is not there is out of every query's sight. */
DEVICE void copy_positions(u32 to, const Block &block, int tile)
{
    for (int i = thread_index(); i < TILE_K; i += THREADS) {
        const int row = tile * TILE_K + i;
        if (row < block.rows_k) copy4(to + 4 * i, block.pos + (SORTED ? block.keys[row] : row));
        else asm volatile("st.shared.b32 [%0], %1;" :: "r"(to + 4 * i), "r"(2147483647) : "memory");
    }
}

#endif
