/* forward.cu: a warp's queries and running state, from global memory and back. */
#ifndef BURST_FORWARD_STATE_CUH
#define BURST_FORWARD_STATE_CUH

#include "forward_tile.cuh"

/* Partial states of all splits in Block.work: out [splits][batch][heads][rows_q][dim_v], then lse [splits][batch][heads][rows_q],
 * all float: (dim_v + 1) * 4 bytes a row, head, batch and split. */
DEVICE float *partial_out(const Block &block, int split, int batch, int head, int row)
{
    return (float *)block.work + (((i64)(split * block.batch + batch) * block.heads + head) * block.rows_q + row) * block.dim_v;
}

DEVICE float *partial_lse(const Block &block, int split, int batch, int head, int row)
{
    float *lse = (float *)block.work + (i64)block.splits * block.batch * block.heads * block.rows_q * block.dim_v;
    return lse + ((i64)(split * block.batch + batch) * block.heads + head) * block.rows_q + row;
}

/* Q's tile as A fragments: into registers by ldmatrix, and back to shared memory in the fragments' order if they stay there. */
DEVICE void load_queries(State &state, u32 smem, const Block &block, const Item &item, int warp, int lane)
{
    typedef Pages<HEAD_DIM> P;
    copy_rows<HEAD_DIM, TILE_Q>(smem + Q_SMEM, at_row(block.q, item.batch, 0, item.head), block.q.row, nullptr, item.tile * TILE_Q, block.rows_q, block.d);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    u32 q_frag[SLABS][STEPS_D][4];
    const u32 from = smem + Q_SMEM + P::at(warp * WARP_ROWS + lane % 16, lane / 16);
    UNROLL for (int slab = 0; slab < SLABS; slab++)
        UNROLL for (int step = 0; step < STEPS_D; step++)
            ldmatrix(q_frag[slab][step], (from ^ (step % P::BASES * 32)) + step / P::BASES * (TILE_Q * P::ROW) + slab * (16 * P::ROW));
    __syncthreads();
#if Q_IN_REGISTERS
    UNROLL for (int slab = 0; slab < SLABS; slab++)
        UNROLL for (int step = 0; step < STEPS_D; step++)
            UNROLL for (int i = 0; i < 4; i++) state.q_frag[slab][step][i] = q_frag[slab][step][i];
#else
    const u32 to = smem + Q_SMEM + warp * (SLABS * STEPS_D * 512) + lane * 16;
    UNROLL for (int slab = 0; slab < SLABS; slab++)
        UNROLL for (int step = 0; step < STEPS_D; step++) {
            const u32(&x)[4] = q_frag[slab][step];
            asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                         :: "r"(to + (slab * STEPS_D + step) * 512), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
        }
    __syncwarp();
#endif
}

/* The reach of the warp's own rows, to its desk. */
DEVICE void load_reach(Desk &desk, const Block &block, int warp, int lane)
{
    int4 reach = {2147483647, -2147483647 - 1, -2147483647 - 1, 2147483647};
    const int row = desk.item.tile * TILE_Q + warp * WARP_ROWS + lane;
    if (lane < WARP_ROWS && row < block.rows_q) {
        const int2 span = block.spans[row];
        if (span.x < span.y) reach.x = span.x, reach.y = span.y;
        reach.z = span.x, reach.w = span.y;
    }
    UNROLL for (int apart = 16; apart; apart >>= 1) {
        reach.x = min(reach.x, __shfl_xor_sync(~0u, reach.x, apart));
        reach.y = max(reach.y, __shfl_xor_sync(~0u, reach.y, apart));
        reach.z = max(reach.z, __shfl_xor_sync(~0u, reach.z, apart));
        reach.w = min(reach.w, __shfl_xor_sync(~0u, reach.w, apart));
    }
    if (lane == 0) desk.reach = reach;
    __syncwarp();
}

/* m = lse, sum = 1, out as it is: exact for the recurrence.  A row that has seen nothing has m = -inf and no sum. */
DEVICE void enter(State &state, const Block &block, const Item &item, bool fresh, int warp, int lane)
{
    UNROLL for (int slab = 0; slab < SLABS; slab++)
        UNROLL for (int h = 0; h < 2; h++) {
            const int row = item.tile * TILE_Q + warp * WARP_ROWS + 16 * slab + 8 * h + lane / 4;
            const bool there = row < block.rows_q;
            float minus_m = there ? INFINITE : 0.f, weight = 0.f;
            if (there && !fresh) {
                minus_m = fmaf(-*at_row(block.lse, item.batch, item.head, row), LOG2E, HEADROOM);
                weight = minus_m == INFINITE ? 0.f : exp2_fast(HEADROOM);
            }
            state.minus_m[slab][h] = minus_m;
            state.sum[slab][h] = weight * .25f; /* of each of the four lanes that share a row */
            const char *out = at_row(block.out, item.batch, row, item.head);
            UNROLL for (int n = 0; n < 2 * STEPS_V; n++) {
                const int column = 8 * n + 2 * (lane % 4);
                float2 x = {0.f, 0.f};
                if (there && !fresh && (!PADDED || column < block.dim_v)) x = *(const float2 *)(out + column * 4);
                state.out_frag[slab][n][2 * h] = x.x * weight;
                state.out_frag[slab][n][2 * h + 1] = x.y * weight;
            }
        }
}

/* Four lanes hold 16 columns of a row as n8 tiles a and b, two columns each; lane q gets columns 4q to 4q + 3. */
DEVICE uint2 four_columns(u32 a, u32 b, int lane)
{
    const int left = (lane & ~3) | 2 * (lane & 1);
    const u32 a0 = __shfl_sync(~0u, a, left), a1 = __shfl_sync(~0u, a, left + 1);
    const u32 b0 = __shfl_sync(~0u, b, left), b1 = __shfl_sync(~0u, b, left + 1);
    return lane & 2 ? uint2{b0, b1} : uint2{a0, a1};
}

/* out / sum and lse = m + ln(sum): the state, the result in TYPE on the last block, or a partial state of a split. */
DEVICE void leave(const State &state, const Block &block, const Item &item)
{
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    UNROLL for (int slab = 0; slab < SLABS; slab++)
        UNROLL for (int h = 0; h < 2; h++) {
            const int row = item.tile * TILE_Q + warp * WARP_ROWS + 16 * slab + 8 * h + lane / 4;
            const bool there = row < block.rows_q;
            float sum = state.sum[slab][h];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float part = sum > 0.f ? 1.f / sum : sum == 0.f ? 0.f : sum; /* NaN stays */
            const float lse = sum == 0.f ? -INFINITE : (log2f(sum) - state.minus_m[slab][h]) * LN2;
            const bool split = block.splits > 1;
            if (there && lane % 4 == 0)
                *(split ? partial_lse(block, item.split, item.batch, item.head, row) : at_row(block.lse, item.batch, item.head, row)) = lse;
            if (!split && block.last.data) {
                char *last = at_row(block.last, item.batch, row, item.head);
                UNROLL for (int n = 0; n < 2 * STEPS_V; n += 2) {
                    const float(&x)[4] = state.out_frag[slab][n], (&y)[4] = state.out_frag[slab][n + 1];
                    const uint2 four = four_columns(pack(x[2 * h] * part, x[2 * h + 1] * part),
                                                    pack(y[2 * h] * part, y[2 * h + 1] * part), lane);
                    const int column = 8 * n + 4 * (lane % 4);
                    if (there && (!PADDED || column < block.dim_v)) *(uint2 *)(last + column * 2) = four;
                }
            } else {
                char *out = split ? (char *)partial_out(block, item.split, item.batch, item.head, row)
                                  : at_row(block.out, item.batch, row, item.head);
                UNROLL for (int n = 0; n < 2 * STEPS_V; n++) {
                    const int column = 8 * n + 2 * (lane % 4);
                    const float2 x = {state.out_frag[slab][n][2 * h] * part, state.out_frag[slab][n][2 * h + 1] * part};
                    if (there && (!PADDED || column < block.dim_v)) *(float2 *)(out + column * 4) = x;
                }
            }
        }
}

#endif
