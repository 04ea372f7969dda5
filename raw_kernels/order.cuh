/* Which tile, head and batch a block of threads works on.
 *
 * Grids have one dimension.  Blocks start in the order of their number, so heavy tiles come first (Block.order); but
 * blocks that run side by side should also read the same K and V, or L2 is of no use.  So the pairs (batch, head) are
 * cut into sections whose K and V fit L2 together; within a section the heaviest tiles of all its heads come first.
 *
 *   number = ((section · tiles + rank) · section_heads + head in section) · splits + split
 *
 * The last section may be smaller: `pairs` counts all (batch, head) of the grid, `section` those of a section.
 */
#ifndef BURST_ORDER_CUH
#define BURST_ORDER_CUH

#include "block.cuh"

struct Item {
    int tile, head, batch, split;
};

/* heads: of the grid, query heads or key heads; tiles, splits: of a pair (batch, head). */
DEVICE Item work_item(const Block &block, u32 number, int heads, int tiles, int splits)
{
    const u32 pairs = (u32)block.batch * heads, section = (u32)block.section;
    Item item;
    item.split = number % (u32)splits;
    number /= (u32)splits;
    const u32 start = number / (section * tiles) * section; /* first pair of the section */
    const u32 width = min(section, pairs - start);
    const u32 inside = number - start * tiles;
    const u32 pair = start + inside % width;
    item.tile = block.order[inside / width];
    item.head = pair % heads;
    item.batch = pair / heads;
    return item;
}

#endif
