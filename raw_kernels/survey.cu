/* Looks over positions and intervals before a kernel of attention: reach and extent of each tile, and the order of work.
 *
 *   survey_keys      a warp a tile of keys      pos     -> extent, and whether positions ascend    (sight.cuh)
 *   survey_queries   a warp a tile of queries   lo, hi  -> reach; spans, and extents in their unit, where they are asked for
 *   survey_weights   a warp a tile              reach, extent -> weights: how many tiles it must see
 *   survey_order     a warp a tile              weights -> order: the tiles with most to do first
 *   survey_slopes    a thread a head            ALiBi's slopes, by value, -> global memory
 *
 * Integers only: one build serves all types.
 */
#define TYPE 1
#include "sight.cuh"

#define WARPS 8 /* of a block of these kernels */

DEVICE int warp_min(int x)
{
    UNROLL for (int s = 16; s; s >>= 1) x = min(x, __shfl_xor_sync(~0u, x, s));
    return x;
}

DEVICE int warp_max(int x)
{
    UNROLL for (int s = 16; s; s >>= 1) x = max(x, __shfl_xor_sync(~0u, x, s));
    return x;
}

/* ascends[tile]: positions do not fall from one key of the tile to the next, nor to the next tile. */
extern "C" __global__ void __launch_bounds__(32 * WARPS) survey_keys(const __grid_constant__ Block block, int *ascends)
{
    const int tile = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (tile >= block.tiles_k) return;
    int2 extent = {2147483647, -2147483647 - 1};
    bool rises = true;
    for (int i = lane; i < block.tile_k; i += 32) {
        const int row = tile * block.tile_k + i;
        if (row < block.rows_k) {
            const int pos = block.pos[row];
            extent.x = min(extent.x, pos), extent.y = max(extent.y, pos);
            rises &= row + 1 == block.rows_k || pos <= block.pos[row + 1];
        }
    }
    extent = {warp_min(extent.x), warp_max(extent.y)};
    rises = __all_sync(~0u, rises);
    const int count = min(block.tile_k, block.rows_k - tile * block.tile_k);
    if ((u32)extent.y - (u32)extent.x == (u32)count - 1) { /* this promises that they are consecutive */
        bool run = true;
        for (int i = lane; i < count; i += 32) run &= block.pos[tile * block.tile_k + i] == extent.x + i;
        if (!__all_sync(~0u, run)) {
            if (extent.y < 2147483647) extent.y++;
            else extent.x--;
        }
    }
    if (lane == 0) block.extent[tile] = extent, ascends[tile] = rises;
}

/* Keys before position x, where positions ascend. */
DEVICE int keys_before(const Block &block, int x)
{
    int low = 0, high = block.rows_k;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (block.pos[middle] < x) low = middle + 1;
        else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) survey_queries(const __grid_constant__ Block block, const int *ascends)
{
    const int tile = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (tile >= block.tiles_q) return;
    bool numbers = block.spans; /* of keys, in place of positions */
    if (block.spans)
        for (int t = lane; t < block.tiles_k; t += 32) numbers &= ascends[t] != 0;
    numbers = __all_sync(~0u, numbers);
    int4 reach = {2147483647, -2147483647 - 1, -2147483647 - 1, 2147483647};
    for (int i = lane; i < block.tile_q; i += 32) {
        const int row = tile * block.tile_q + i;
        if (row < block.rows_q) {
            int lo = block.lo[row], hi = block.hi[row];
            if (numbers) lo = keys_before(block, lo), hi = keys_before(block, hi);
            if (block.spans) block.spans[row] = {lo, hi};
            if (lo < hi) reach.x = min(reach.x, lo), reach.y = max(reach.y, hi);
            reach.z = max(reach.z, lo), reach.w = min(reach.w, hi);
        }
    }
    reach = {warp_min(reach.x), warp_max(reach.y), warp_max(reach.z), warp_min(reach.w)};
    if (lane == 0) block.reach[tile] = reach;
    if (numbers)
        for (int t = tile * 32 + lane; t < block.tiles_k; t += block.tiles_q * 32)
            block.extent[t] = {t * block.tile_k, min((t + 1) * block.tile_k, block.rows_k) - 1};
}

/* How many tiles a tile has to do. */
DEVICE int weight(const Block &block, int tile, bool queries, int lane)
{
    int count = 0;
    if (queries) {
        const int4 reach = block.reach[tile];
        for (int t = lane; t < block.tiles_k; t += 32) count += tile_visible(reach, block.extent[t]);
    } else {
        const int2 extent = block.extent[tile];
        for (int t = lane; t < block.tiles_q; t += 32) count += tile_visible(block.reach[t], extent);
    }
    UNROLL for (int s = 16; s; s >>= 1) count += __shfl_xor_sync(~0u, count, s);
    return count;
}

/* weights[tile]: as many tiles as it must see.  A warp a tile. */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    survey_weights(const __grid_constant__ Block block, int *weights, int queries)
{
    const int tile = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (tile >= (queries ? block.tiles_q : block.tiles_k)) return;
    const int mine = weight(block, tile, queries, lane);
    if (lane == 0) weights[tile] = mine;
}

/* order[rank of a tile] = tile; the rank is the number of tiles that come before it: heavier ones, and equal later ones
 * (of a causal mask the last rows are the heaviest, and a full one is walked from its end).  A warp a tile. */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    survey_order(const __grid_constant__ Block block, const int *weights, int queries)
{
    const int tile = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    const int tiles = queries ? block.tiles_q : block.tiles_k;
    if (tile >= tiles) return;
    const int mine = weights[tile];
    int before = 0;
    for (int t = lane; t < tiles; t += 32) {
        const int other = weights[t];
        before += other > mine || (other == mine && t > tile);
    }
    UNROLL for (int s = 16; s; s >>= 1) before += __shfl_xor_sync(~0u, before, s);
    if (lane == 0) block.order[before] = tile;
}

#define SLOPES 128 /* of one launch */

struct Slopes {
    double value[SLOPES];
    int count, wide; /* wide: to double, else to float */
};

/* Slopes are arguments, so that they need no copy from the host and no memory but the workspace. */
extern "C" __global__ void __launch_bounds__(SLOPES) survey_slopes(const __grid_constant__ Slopes slopes, void *to)
{
    const int i = threadIdx.x;
    if (i >= slopes.count) return;
    if (slopes.wide)
        ((double *)to)[i] = slopes.value[i];
    else
        ((float *)to)[i] = (float)slopes.value[i];
}
