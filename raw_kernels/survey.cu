/* Looks over positions and intervals before a kernel of attention: reach and extent of each tile, and the order of work.
 *
 *   survey_keys      a warp a tile of keys      pos     -> extent, for kernels without spans       (sight.cuh)
 *   survey_sort      a thread a key             pos     -> keys in the order of positions, a step of it; for kernels with spans
 *   survey_queries   a warp a tile of queries   lo, hi  -> reach; spans and extents in places, where they are asked for
 *   survey_weights   a warp a tile              reach, extent -> weights: how many tiles it must see
 *   survey_order     a warp a tile              weights -> order: the tiles with most to do first
 *   survey_slopes    a thread a head            ALiBi's slopes, by value, -> global memory
 *
 * Integers only: one build serves all types.
 */
#define TYPE 1
#include "sight.cuh"

#define WARPS 8 /* of a block of these kernels */
#define WAYS 8  /* runs that become one in a step of sorting */

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

extern "C" __global__ void __launch_bounds__(32 * WARPS) survey_keys(const __grid_constant__ Block block)
{
    const int tile = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (tile >= block.tiles_k) return;
    int2 extent = {2147483647, -2147483647 - 1};
    for (int i = lane; i < block.tile_k; i += 32) {
        const int row = tile * block.tile_k + i;
        if (row < block.rows_k) extent.x = min(extent.x, block.pos[row]), extent.y = max(extent.y, block.pos[row]);
    }
    extent = {warp_min(extent.x), warp_max(extent.y)};
    if (lane == 0) block.extent[tile] = extent;
}

/* The first place in [low, high) from which on positions are x or more.  keys: at each place, in the order of positions; 0: they are
 * their own places. */
DEVICE int place_of(const Block &block, const int *keys, int x, int low, int high)
{
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (block.pos[keys ? keys[middle] : middle] < x) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* A step of sorting: runs of `width` places, each in the order of positions, become runs of WAYS * width.  from: the key at each place so
 * far; runs of 1 are the keys as they are.  A thread a key: its place is as far from the start as keys of all runs come before it, of
 * equal positions those of earlier runs. */
extern "C" __global__ void __launch_bounds__(32 * WARPS) survey_sort(const __grid_constant__ Block block, const int *from, int *to, int width)
{
    const int place = blockIdx.x * (32 * WARPS) + threadIdx.x;
    if (place >= block.rows_k) return;
    const int *keys = width > 1 ? from : nullptr;
    const int key = keys ? keys[place] : place, pos = block.pos[key];
    const i64 start = place / ((i64)width * WAYS) * width * WAYS;
    i64 target = start;
    for (i64 run = start; run < min(start + (i64)width * WAYS, (i64)block.rows_k); run += width) {
        const int end = (int)min(run + width, (i64)block.rows_k);
        if (run <= place && place < end) target += place - run;
        else target += place_of(block, keys, run < place ? pos + 1 : pos, (int)run, end) - run; /* some hi is above pos: pos + 1 is a number */
    }
    to[target] = key;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) survey_queries(const __grid_constant__ Block block)
{
    const int tile = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (tile >= block.tiles_q) return;
    int4 reach = {2147483647, -2147483647 - 1, -2147483647 - 1, 2147483647};
    for (int i = lane; i < block.tile_q; i += 32) {
        const int row = tile * block.tile_q + i;
        if (row < block.rows_q) {
            int lo = block.lo[row], hi = block.hi[row];
            if (block.spans) {
                lo = place_of(block, block.keys, lo, 0, block.rows_k);
                hi = place_of(block, block.keys, hi, 0, block.rows_k);
                block.spans[row] = {lo, hi};
            }
            if (lo < hi) reach.x = min(reach.x, lo), reach.y = max(reach.y, hi);
            reach.z = max(reach.z, lo), reach.w = min(reach.w, hi);
        }
    }
    reach = {warp_min(reach.x), warp_max(reach.y), warp_max(reach.z), warp_min(reach.w)};
    if (lane == 0) block.reach[tile] = reach;
    if (block.spans)
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
