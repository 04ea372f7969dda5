/* Attention forward in float16 and bfloat16: a tile of queries stays, tiles of keys come, into a running state.
 *
 *     (out, lse) <- (out, lse) (+) attend(q, k, v)              the recurrence of BurstAttention's local half
 *
 *             shared memory                          a warp: 32 rows of Q (16 for wide heads)
 *     K stage 0 | K stage 1   --ldmatrix-->          S = Q K'                  [32, TILE_K]   registers, a chunk of keys at a time
 *     V stage 0 | V stage 1                          P = 2^(S c - m)           [32, TILE_K]   packed to TYPE in registers
 *        ^  cp.async, one tile ahead  --ldmatrix.t-> O = O + P V               [32, HEAD_DIM_V]  registers, float32
 *     Q in the order of fragments, or not at all where registers hold it; positions, a desk a warp
 *
 *     for tiles of keys that this tile of queries sees, from the last to the first, cut ones of 32 first:
 *         wait for the tile; barrier; ask for the next one
 *         S = Q K'                      (cut tiles: -inf where hidden)
 *         P = 2^(S c - m)               m: a reference of each row, not its maximum
 *         vote: sums of P below GUARD?  else the tile again the classic way, with maximum and rescaling
 *         l = l + rowsum(P);  O = O + P V
 *     out = O / l;  lse = m + ln l
 *
 * No maximum: a weight may be as large as float32 and TYPE hold, so m need only be near the maximum.  It is set by the
 * first tile that a row sees (or by the state's lse), and anew when the guard fails.
 *
 * Two loops: the one of full tiles has no mask code, reads no position, and does two tiles a trip, so that stages are
 * constants in addresses.  All else goes through the other one: cut tiles, the first tile, the last of a run.  A warp that sees
 * nothing of a cut tile skips it.  One stage of V: V is asked for when its tile begins and awaited after S.
 *
 * Keys are taken in the order of their positions, so that what a row sees is a run of them (sight.cuh).  SORTED, a variant of its own: where
 * they do not lie in that order, the key at each place comes from Block.keys, and the copies take its row.  Nothing else differs.
 *
 * splits > 1: the tiles of keys are cut into parts, each a block of threads that starts from nothing and leaves a partial
 * state in Block.work (forward_state.cuh); forward_merge joins them and the running state, in a fixed order.
 */
#include "forward_state.cuh"

/* Whether rows lie so near that the main loop's 32-bit steps hold the bytes between them, backwards too. */
DEVICE bool near(i64 row)
{
    constexpr i64 NEAR = 1 << 21;
    return (u64)(row + NEAR) < (u64)(2 * NEAR);
}

/* A tile of K, or of V, into shared memory: any tile, whole or not. */
template <int DIM> DEVICE void ask_rows(u32 to, const Block &block, const char *rows, i64 distance, int tile, int whole, int columns)
{
    const u32 target = to + Share<DIM>::target(thread_index());
    if (agreed(tile < whole)) copy_keys<DIM>(target, target ^ 64, rows, Rows<DIM>(block, tile, seat_of<DIM>(thread_index())), (int)distance, columns);
    else copy_rows<DIM, TILE_K>(to, rows, distance, SORTED ? block.keys : nullptr, tile * TILE_K, block.rows_k, columns);
}

DEVICE void ask_keys(u32 smem, const Block &block, const Desk &desk, int tile, int stage)
{
    ask_rows<HEAD_DIM>(smem + K_SMEM + stage * K_BYTES, block, desk.k, block.k.row, tile, desk.whole, block.d);
}

DEVICE void ask_values(u32 smem, const Block &block, const Desk &desk, int tile, int stage)
{
    ask_rows<HEAD_DIM_V>(smem + V_SMEM + stage * V_BYTES, block, desk.v, block.v.row, tile, desk.whole, block.dim_v);
}

/* K of a tile (and V, where it has two stages), and positions where scores need them, into a stage. */
DEVICE void ask(u32 smem, const Block &block, const Desk &desk, Next next, int stage)
{
    if (agreed(next.tile < 0)) return;
    ask_keys(smem, block, desk, next.tile, stage);
    if (V_STAGES == 2) ask_values(smem, block, desk, next.tile, stage);
    if (BENT) copy_positions(smem + POSITIONS_SMEM + stage * (TILE_K * 4), block, next.tile);
}

/* Do all rows of the warp have a reference? */
DEVICE bool all_seen(const State &state, Desk &desk)
{
    if (agreed(desk.seen)) return true;
    float most = state.minus_m[0][0];
    UNROLL for (int slab = 0; slab < SLABS; slab++)
        most = fmaxf(most, fmaxf(state.minus_m[slab][0], state.minus_m[slab][1]));
    if (agreed(most == INFINITE)) return false;
    if (thread_index() % 32 == 0) desk.seen = 1, desk.plain = ~desk.hidden;
    __syncwarp();
    return true;
}

/* What bends scores; positions: of the stage, in shared memory. */
DEVICE Bend bend_of(const Block &block, const Desk &desk, u32 positions)
{
#if BENT
    const u32 thread = thread_index(), lane = thread % 32;
    const int row = desk.item.tile * TILE_Q + (int)(thread / 32 * WARP_ROWS + lane / 4);
    return {(float)block.scale, (float)block.softcap, BURST_ALIBI ? block.slopes[desk.item.head] : 0.f,
            block.at + row, block.rows_q - row, positions + lane % 4 * 8};
#else
    return {};
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) forward(const __grid_constant__ Block block)
{
    extern __shared__ __align__(1024) char memory[];
    const u32 smem = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Desk &desk = ((Desk *)(memory + DESK_SMEM))[warp];
    /* the same, found anew where it is needed if the main loop has no register for it */
    auto own_desk = [&]() -> Desk & { return SPARE ? desk : ((Desk *)(memory + DESK_SMEM))[thread_index() / 32]; };
    const bool fresh = block.first || block.splits > 1;
    State state;
    {
        const Item item = work_item(block, blockIdx.x, block.heads, block.tiles_q, block.splits);
        if (lane == 0) {
            desk.item = item;
            const int kv_head = item.head / (block.heads / block.kv_heads);
            desk.k = at_row(block.k, item.batch, 0, kv_head), desk.v = at_row(block.v, item.batch, 0, kv_head);
            desk.begin = (i64)block.tiles_k * item.split / block.splits;
            desk.window = (i64)block.tiles_k * (item.split + 1) / block.splits;
            desk.cut = desk.full = 0;
            desk.started = !fresh, desk.seen = 0;
            desk.whole = near(block.k.row) && near(block.v.row) ? block.rows_k / TILE_K : 0;
        }
        __syncwarp();
        load_queries(state, smem, block, item, warp, lane);
        load_reach(desk, block, warp, lane);
    }

    /* stage 1 first: one tile the general way, then the main loop can begin at stage 0 */
    int stage = 1;
    Next now = next_tile(block, desk);
    ask(smem, block, desk, now, stage);
    copies_commit();
    enter(state, block, desk.item, fresh, warp, lane);

#if BENT
    const float c = 1.f;
#else
    const float c = (float)(block.scale * 1.4426950408889634);
#endif
    const int2 kept = KEEPS_SPAN ? lane_span(block, desk.item.tile) : int2{0, 0};
    Addresses at;
    UNROLL for (int i = 0; i < PagesK::BASES; i++)
        at.k[i] = opaque((smem + K_SMEM + PagesK::at(lane % 8 + 8 * (lane / 16), lane / 8 % 2)) ^ (32 * i));
    UNROLL for (int i = 0; i < PagesV::BASES; i++)
        at.v[i] = opaque((smem + V_SMEM + PagesV::at(lane % 16, lane / 16)) ^ (32 * i));
    at.q = opaque(smem + Q_SMEM + warp * (SLABS * STEPS_D * 512) + lane * 16);
    const u32 to_k = opaque(smem + K_SMEM + Share<HEAD_DIM>::target(threadIdx.x));
    const u32 to_k_other = opaque(to_k ^ 64); /* the other half of a row */
    const bool alike = PagesK::ROW == PagesV::ROW && Share<HEAD_DIM>::HALVES == Share<HEAD_DIM_V>::HALVES;
    const u32 to_v = alike ? to_k + V_SMEM - K_SMEM : opaque(smem + V_SMEM + Share<HEAD_DIM_V>::target(threadIdx.x));
    const u32 to_v_other = alike ? to_k_other + V_SMEM - K_SMEM : opaque(to_v ^ 64);
    const int kept_row = opaque(Share<HEAD_DIM>::row(threadIdx.x)), kept_piece = opaque(Share<HEAD_DIM>::piece(threadIdx.x) * 16);
    auto seat_k = [&] { return KEEPS_SPAN ? Seat{kept_row, kept_piece} : seat_of<HEAD_DIM>(thread_index()); };
    auto seat_v = [&] { return KEEPS_SPAN && alike ? Seat{kept_row, kept_piece} : seat_of<HEAD_DIM_V>(thread_index()); };
    NO_UNROLL while (agreed(now.tile >= 0)) {
#if !BENT
        if (Desk &desk = own_desk(); agreed(!now.one) && agreed(stage == 0 && desk.started && desk.whole)) {
            /* ---------------- the main loop: full tiles that another one follows, two a trip.  `now` is on its way into stage 0 */
            /* Where this thread's part of the tile to be asked for next begins: the one below.  V with one stage: the one at hand. */
            const char *from_k = share_of<HEAD_DIM>(desk.k, (int)block.k.row, (now.tile - 1) * TILE_K, thread_index());
            const char *from_v = share_of<HEAD_DIM_V>(desk.v, (int)block.v.row, (now.tile - (V_STAGES - 1)) * TILE_K, thread_index());
            const int step_k = (int)block.k.row * Share<HEAD_DIM>::PASS, step_v = (int)block.v.row * Share<HEAD_DIM_V>::PASS;
            typedef If<SPARE, int, i64>::type Step; /* which is shorter depends on how many registers are left */
            int ahead = run_below(desk, now.tile); /* tiles of the run that are not asked for yet */
            /* wait for the tile in `stage`, and ask for the next one */
            auto turn = [&](int stage) {
                /* asked for before the wait: the copies need them */
                const Rows<HEAD_DIM> keys(block, own_desk().lowest + ahead - 1, seat_k());
                const Rows<HEAD_DIM_V> values(block, own_desk().lowest + ahead + 1 - V_STAGES, seat_v());
                copies_wait<0>();
                __syncthreads();
                if (!KEEPS_ROWS) {
                    const Desk &desk = own_desk();
                    const int next = desk.lowest + ahead - 1;
                    from_k = share_of<HEAD_DIM>(desk.k, (int)block.k.row, next * TILE_K, thread_index());
                    from_v = share_of<HEAD_DIM_V>(desk.v, (int)block.v.row, (next + 2 - V_STAGES) * TILE_K, thread_index());
                }
                auto copy_k = [&](u32 offset) {
                    if (SORTED) copy_keys(to_k + offset, to_k_other + offset, own_desk().k, keys, (int)block.k.row, block.d);
                    else copy_tile<HEAD_DIM>(to_k + offset, to_k_other + offset, from_k, step_k, block.d);
                };
                auto copy_v = [&](u32 offset) {
                    if (SORTED) copy_keys(to_v + offset, to_v_other + offset, own_desk().v, values, (int)block.v.row, block.dim_v);
                    else copy_tile<HEAD_DIM_V>(to_v + offset, to_v_other + offset, from_v, step_v, block.dim_v);
                };
                if (V_STAGES == 1) {
                    copy_v(0);
                    copies_commit();
                }
                copy_k((1 - stage) * K_BYTES);
                if (V_STAGES == 2) copy_v((1 - stage) * V_BYTES);
                copies_commit();
                if (KEEPS_ROWS) from_k -= (Step)block.k.row * TILE_K, from_v -= (Step)block.v.row * TILE_K;
                ahead--;
            };
            const Hidden none = {};
            constexpr int OTHER_V = V_STAGES == 2 ? V_BYTES : 0;
            NO_UNROLL for (;;) {
                if (agreed(ahead == 0) && !run_goes_on(block, own_desk(), ahead)) break;
                turn(0);
                if (!take_tile<false>(state, at, 0, 0, c, none)) take_classic(state, at, 0, 0, c, none, Bend{});
                stage = 1;
                if (agreed(ahead == 0) && !run_goes_on(block, own_desk(), ahead)) break;
                turn(1);
                if (!take_tile<false>(state, at, K_BYTES, OTHER_V, c, none)) take_classic(state, at, K_BYTES, OTHER_V, c, none, Bend{});
                stage = 0;
            }
            now = {own_desk().lowest, 0}; /* the last one goes the general way */
        }
#endif
        /* ---------------- any tile: cut, not whole, the first one */
        Desk &desk = own_desk();
        NO_UNROLL do {
            const int first = now.tile * TILE_K;
            const int2 span = KEEPS_SPAN ? kept : lane_span(block, desk.item.tile);
            copies_wait<0>();
            __syncthreads();
            if (V_STAGES == 1) {
                if (agreed(now.tile < desk.whole)) copy_keys<HEAD_DIM_V>(to_v, to_v_other, desk.v, Rows<HEAD_DIM_V>(block, now.tile, seat_v()), (int)block.v.row, block.dim_v);
                else ask_values(smem, block, desk, now.tile, 0);
                copies_commit();
            }
            const int4 glance = *(const int4 *)&desk; /* quick, plain, window, hidden */
            const u32 rest = glance.x & (now.one - 1); /* cut tiles below this one */
            Next next;
            if (agreed(rest)) {
                const int bit = 31 - __clz(rest);
                next = {glance.z + bit, 1u << bit};
                const u32 to = (1 - stage) * K_BYTES, to_value = (1 - stage) * V_BYTES;
                const Rows<HEAD_DIM> keys(block, next.tile, seat_k());
                const Rows<HEAD_DIM_V> values(block, next.tile, seat_v());
                copy_keys(to_k + to, to_k_other + to, desk.k, keys, (int)block.k.row, block.d);
                if (V_STAGES == 2) copy_keys(to_v + to_value, to_v_other + to_value, desk.v, values, (int)block.v.row, block.dim_v);
                if (BENT) copy_positions(smem + POSITIONS_SMEM + (1 - stage) * (TILE_K * 4), block, next.tile);
            } else {
                end_quick(desk);
                next = next_tile(block, desk);
                ask(smem, block, desk, next, 1 - stage);
            }
            copies_commit();
            const int offset_k = stage * K_BYTES, offset_v = V_STAGES == 2 ? stage * V_BYTES : 0;
            await_values(); /* by all warps at one place, whatever each does then */
            Hidden hidden = {};
            if (agreed(now.one & glance.y)) hidden = gather(columns_of(span, first));
            else {
                if (agreed(now.one & glance.w)) goto done;
                if (agreed(now.one)) hidden = gather(columns_of(span, first));
                if (BENT || !all_seen(state, desk)) goto classic;
            }
            if (!BENT && take_tile<true>(state, at, offset_k, offset_v, c, hidden)) goto done;
        classic:
            take_classic(state, at, offset_k, offset_v, c, hidden, bend_of(block, desk, smem + POSITIONS_SMEM + stage * (TILE_K * 4)));
        done:
            stage = 1 - stage;
            now = next;
        } while (agreed(now.one));
        if (thread_index() % 32 == 0) desk.started = 1;
        __syncwarp();
    }
    copies_wait<0>();
    leave(state, block, own_desk().item);
}

/* The partial states of a tile's rows and, unless it is the first block, the running state become one:
 *   m = max lse_i;  w_i = e^(lse_i - m);  out = sum w_i out_i / sum w_i;  lse = m + ln sum w_i       i: the state, then the splits in order */
extern "C" __global__ void __launch_bounds__(THREADS) forward_merge(const __grid_constant__ Block block)
{
    const int tile = blockIdx.x % block.tiles_q, pair = blockIdx.x / block.tiles_q, head = pair % block.heads, batch = pair / block.heads;
    const int quads = block.dim_v / 4, rows = min(TILE_Q, block.rows_q - tile * TILE_Q);
    auto lse_of = [&](int split, int row) {
        return split < 0 ? *at_row(block.lse, batch, head, row) : *partial_lse(block, split, batch, head, row);
    };
    const int begin = block.first ? 0 : -1; /* -1: the running state */
    for (int i = threadIdx.x; i < rows * quads; i += THREADS) { /* a thread: 4 columns of a row */
        const int row = tile * TILE_Q + i / quads, column = i % quads * 4;
        float4 *state_out = (float4 *)(at_row(block.out, batch, row, head) + column * 4);
        float m = -INFINITE, total = 0.f;
        for (int split = begin; split < block.splits; split++) m = fmaxf(m, lse_of(split, row));
        if (m == -INFINITE) m = 0.f; /* nothing was seen: all weights are 0 */
        float4 sum = {0.f, 0.f, 0.f, 0.f};
        for (int split = begin; split < block.splits; split++) {
            const float weight = expf(lse_of(split, row) - m);
            const float4 x = split < 0 ? *state_out : *(float4 *)(partial_out(block, split, batch, head, row) + column);
            total += weight;
            sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
            sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
        }
        const float part = total == 0.f ? 0.f : 1.f / total;
        const float4 out = {sum.x * part, sum.y * part, sum.z * part, sum.w * part};
        if (block.last.data)
            *(uint2 *)(at_row(block.last, batch, row, head) + column * 2) = uint2{pack(out.x, out.y), pack(out.z, out.w)};
        else
            *state_out = out;
    }
    __syncthreads(); /* everybody has read the state's lse */
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        const int row = tile * TILE_Q + i;
        float m = -INFINITE, total = 0.f;
        for (int split = begin; split < block.splits; split++) m = fmaxf(m, lse_of(split, row));
        for (int split = begin; split < block.splits; split++) total += expf(lse_of(split, row) - m);
        *at_row(block.lse, batch, head, row) = m == -INFINITE ? m : m + logf(total);
    }
}
