/* Which tiles a tile must see: empty, cut or full, from a few numbers a tile that survey.cu has made.
 *
 *   reach  of a tile of queries  {x: least lo, y: greatest hi of rows that see anything; z: greatest lo, w: least hi of all}
 *   extent of a tile of keys     {x: least pos, y: greatest pos}; a tile with fewer than tile_k keys is never full
 *   spans  of a row of queries   {x: lo, y: hi}, for kernels that ask for them (Block.spans).  In the order of positions the keys that a row
 *          sees are a run.  A key's *place* is its number in that order: its own where positions ascend, else Block.keys tells the
 *          key at each place, and such a kernel loads them in that order.  spans, reach and extent are then told in places: lo becomes
 *          the number of keys with pos < lo, and tile t has the places t tile_k, t tile_k + 1, ...
 *
 *   empty  pos_max < lo_min or pos_min >= hi_max      not loaded
 *   full   pos_min >= lo_max and pos_max < hi_min     no mask code, no position is read
 *   cut    else                                       each pair is tested
 *
 * No list of tiles is kept anywhere: a warp looks at 32 tiles at once and keeps the answer in two registers, so that
 * memory stays O(tiles) and not O(tiles²) for a million rows.
 */
#ifndef BURST_SIGHT_CUH
#define BURST_SIGHT_CUH

#include "block.cuh"

DEVICE bool tile_visible(int4 reach, int2 extent) { return extent.y >= reach.x && extent.x < reach.y; }
DEVICE bool tile_full(int4 reach, int2 extent) { return extent.x >= reach.z && extent.y < reach.w; }

/* 32 tiles of keys from `first` on, as a tile of queries sees them: a bit each.  The whole warp calls it. */
struct Look {
    u32 cut, full;
};

DEVICE Look look_at_keys(const Block &block, int4 reach, int first, int end)
{
    const int tile = first + (int)(threadIdx.x & 31);
    bool visible = false, full = false;
    if (tile < end) {
        const int2 extent = block.extent[tile];
        const bool whole = (tile + 1) * block.tile_k <= block.rows_k;
        visible = tile_visible(reach, extent);
        full = visible && whole && tile_full(reach, extent);
    }
    const u32 seen = __ballot_sync(~0u, visible), whole = __ballot_sync(~0u, full);
    return {seen & ~whole, whole};
}

/* 32 tiles of queries from `first` on, as a tile of keys sees them. */
DEVICE Look look_at_queries(const Block &block, int2 extent, bool whole, int first, int end)
{
    const int tile = first + (int)(threadIdx.x & 31);
    bool visible = false, full = false;
    if (tile < end) {
        const int4 reach = block.reach[tile];
        visible = tile_visible(reach, extent);
        full = visible && whole && tile_full(reach, extent);
    }
    const u32 seen = __ballot_sync(~0u, visible), all = __ballot_sync(~0u, full);
    return {seen & ~all, all};
}

#endif
