/* Forward for float32 and float64: a tile of queries takes in a block of keys, into the running (out, lse).
 *
 *   shared memory   Q [TILE_Q, HEAD_DIM] stays    K [TILE_K, HEAD_DIM]    V [TILE_K, HEAD_DIM_V]    P [TILE_Q, TILE_K]
 *   registers       O [rows of the warp, HEAD_DIM_V] and S [rows of the warp, TILE_K], shared out among the lanes;
 *                   m, l of the lane's rows.  A warp has whole rows: P goes from lane to lane and to no other warp.
 *
 *   enter with (out, lse): m = lse, l = 1, O = out, or with nothing
 *   for each tile of keys that is seen:
 *       K is there · barrier · V starts
 *       S = scale Q K', bent, masked where the tile is cut
 *       m' = max(m, S);  P = e^(S - m');  l = l e^(m - m') + sum P
 *       V is there · barrier · the next tile's K starts
 *       O = O e^(m - m') + P V, P V summed by itself where registers allow it: a chain of one tile, not of all, rounds less
 *   leave with out = O / l, lse = m + ln l;  nothing seen: 0, -inf
 *
 * With `splits` > 1 a block takes one part of the tiles of keys and leaves a state of its own in Block.work,
 *   [split][batch][heads][rows_q][dim_v] REAL, then [split][batch][heads][rows_q] REAL of lse,
 * and forward_merge joins them and the running state, in the order of their numbers.
 */
#include "wide.cuh"

constexpr int SQ = row_stride(HEAD_DIM), SV = row_stride(HEAD_DIM_V), SP = p_stride(TILE_K);
constexpr int AT_K = TILE_Q * SQ, AT_V = AT_K + TILE_K * SQ, AT_P = AT_V + TILE_K * SV;
constexpr int SHARED_BYTES = AT_P + TILE_Q * SP;
static_assert(SHARED_BYTES == SHARED && SHARED <= SHARED_LIMIT, "shared memory: the table is wrong or the tile too large");

typedef Layout<TILE_Q, TILE_K, WARPS, 1> Scores;
typedef Layout<TILE_Q, HEAD_DIM_V, WARPS, 1> Out;
constexpr int RM = Scores::RM, STEP = Out::STEP;
constexpr bool AFRESH = Out::RM * Out::RN * (ITEM / 4) <= 64;

struct Partial {
    char *out; /* [split][batch][heads][rows_q][dim_v] */
    REAL *lse; /* [split][batch][heads][rows_q] */
};

DEVICE i64 partial_row(const Block &block, int split, int batch, int head, int row)
{
    return (((i64)split * block.batch + batch) * block.heads + head) * block.rows_q + row;
}

DEVICE char *partial_out(const Block &block, i64 row) { return block.work + row * block.dim_v * ITEM; }

DEVICE REAL *partial_lse(const Block &block, i64 row)
{
    const i64 all = (i64)block.splits * block.batch * block.heads * block.rows_q;
    return (REAL *)(block.work + all * block.dim_v * ITEM) + row;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) forward(const __grid_constant__ Block block)
{
    extern __shared__ __align__(128) char smem[];
    char *q_smem = smem, *k_smem = smem + AT_K, *v_smem = smem + AT_V, *p_smem = smem + AT_P;
    const Item item = work_item(block, blockIdx.x, block.heads, block.tiles_q, block.splits);
    const int first_q = item.tile * TILE_Q, kv_head = item.head / (block.heads / block.kv_heads);
    const int4 reach = block.reach[item.tile];
    const Scoring how = scoring_of(block, item.head);
    const auto look = [&](int first, int end) { return look_at_keys(block, reach, first, end); };
    const int from = (int)((i64)block.tiles_k * item.split / block.splits);
    Walk walk = {from - 32, (int)((i64)block.tiles_k * (item.split + 1) / block.splits), {0, 0}, 0, false};

    bool more = next(walk, look);
    if (more) {
        load_tile<TILE_Q, HEAD_DIM, SQ>(q_smem, block.q, item.batch, item.head, first_q, block.rows_q, block.d);
        load_tile<TILE_K, HEAD_DIM, SQ>(k_smem, block.k, item.batch, kv_head, walk.tile * TILE_K, block.rows_k, block.d);
    }
    copies_commit();

    REAL m[RM], l[RM];
    Out::Frag o;
    const bool fresh = block.first || block.splits > 1;
    UNROLL for (int i = 0; i < RM; i++) {
        const int row = first_q + Out::row(i);
        const bool read = !fresh && row < block.rows_q;
        m[i] = -INF;
        if (read) m[i] = *at_row(block.lse, item.batch, item.head, row);
        /* l is shared out among the lanes of the row and summed at the end: one of them brings the 1. */
        l[i] = m[i] == -INF || LANE_X ? (REAL)0 : (REAL)1;
        UNROLL for (int j = 0; j < Out::RN; j += STEP) {
            Part<STEP> x;
            UNROLL for (int e = 0; e < STEP; e++) x.x[e] = 0;
            if (read && Out::column(j) < block.dim_v)
                x = load_part<STEP>(at_row(block.out, item.batch, row, item.head) + Out::column(j) * ITEM);
            UNROLL for (int e = 0; e < STEP; e++) o[i][j + e] = x.x[e];
        }
    }

    while (more) {
        const int tile = walk.tile, first_k = tile * TILE_K;
        const bool cut = walk.cut;
        copies_wait<0>();
        __syncthreads(); /* K is there; V of the tile before is read */
        load_tile<TILE_K, HEAD_DIM_V, SV>(v_smem, block.v, item.batch, kv_head, first_k, block.rows_k, block.dim_v);
        copies_commit();

        Scores::Frag s;
        REAL shrink[RM];
        set_zero(s);
        dot_rows<Scores, HEAD_DIM, SQ, SQ>(s, q_smem, k_smem);
        score<Scores>(s, nullptr, block, how, first_q, first_k, cut);
        UNROLL for (int i = 0; i < RM; i++) {
            REAL top = s[i][0];
            UNROLL for (int j = 1; j < Scores::RN; j++) top = max(top, s[i][j]);
            top = max(row_max(top), m[i]);
            const REAL safe = top == -INF ? (REAL)0 : top;
            shrink[i] = exp_of(m[i] - safe);
            m[i] = top;
            REAL sum = 0;
            UNROLL for (int j = 0; j < Scores::RN; j++) s[i][j] = exp_of(s[i][j] - safe), sum += s[i][j];
            l[i] = fma(l[i], shrink[i], sum);
            if (!AFRESH) UNROLL for (int j = 0; j < Out::RN; j++) o[i][j] *= shrink[i];
        }
        store_frag<Scores, SP>(p_smem, s);

        more = next(walk, look);
        copies_wait<0>();
        __syncthreads(); /* V and P are there; K is read */
        if (more)
            load_tile<TILE_K, HEAD_DIM, SQ>(k_smem, block.k, item.batch, kv_head, walk.tile * TILE_K, block.rows_k, block.d);
        copies_commit();
        if constexpr (AFRESH) {
            Out::Frag pv;
            set_zero(pv);
            times_rows<Out, TILE_K, SP, SV>(pv, p_smem, v_smem);
            UNROLL for (int i = 0; i < RM; i++) UNROLL for (int j = 0; j < Out::RN; j++) o[i][j] = fma(o[i][j], shrink[i], pv[i][j]);
        } else {
            times_rows<Out, TILE_K, SP, SV>(o, p_smem, v_smem);
        }
    }

    UNROLL for (int i = 0; i < RM; i++) {
        const int row = first_q + Out::row(i);
        const REAL total = row_sum(l[i]), share = total == 0 ? (REAL)0 : 1 / total;
        const REAL lse = total == 0 ? -INF : m[i] + log_of(total);
        if (row >= block.rows_q) continue;
        char *to;
        REAL *to_lse;
        if (block.splits > 1) {
            const i64 at = partial_row(block, item.split, item.batch, item.head, row);
            to = partial_out(block, at), to_lse = partial_lse(block, at);
        } else {
            to = at_row(block.last.data ? block.last : block.out, item.batch, row, item.head);
            to_lse = at_row(block.lse, item.batch, item.head, row);
        }
        UNROLL for (int j = 0; j < Out::RN; j += STEP)
            if (Out::column(j) < block.dim_v) {
                Part<STEP> x;
                UNROLL for (int e = 0; e < STEP; e++) x.x[e] = o[i][j + e] * share;
                *(Part<STEP> *)(to + Out::column(j) * ITEM) = x;
            }
        if (LANE_X == 0) *to_lse = lse;
    }
}

/* A warp a row, a row's columns over its lanes; a block of threads the rows of a tile of queries. */
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) forward_merge(const __grid_constant__ Block block)
{
    const int tile = blockIdx.x % block.tiles_q, pair = blockIdx.x / block.tiles_q;
    const int head = pair % block.heads, batch = pair / block.heads;
    for (int i = WARP; i < TILE_Q; i += WARPS) {
        const int row = tile * TILE_Q + i;
        if (row >= block.rows_q) break;
        REAL *lse = at_row(block.lse, batch, head, row);
        const REAL mine = block.first ? -INF : *lse;
        REAL top = mine;
        for (int s = 0; s < block.splits; s++) top = max(top, *partial_lse(block, partial_row(block, s, batch, head, row)));
        const REAL safe = top == -INF ? (REAL)0 : top, own = exp_of(mine - safe);
        REAL total = own;
        for (int s = 0; s < block.splits; s++)
            total += exp_of(*partial_lse(block, partial_row(block, s, batch, head, row)) - safe);
        const REAL share = total == 0 ? (REAL)0 : 1 / total;
        for (int c = LANE * VEC; c < block.dim_v; c += 32 * VEC) {
            Vec sum;
            UNROLL for (int e = 0; e < VEC; e++) sum.x[e] = 0;
            if (!block.first) {
                const Vec x = *(const Vec *)(at_row(block.out, batch, row, head) + c * ITEM);
                UNROLL for (int e = 0; e < VEC; e++) sum.x[e] = own * x.x[e];
            }
            for (int s = 0; s < block.splits; s++) {
                const i64 at = partial_row(block, s, batch, head, row);
                const REAL weight = exp_of(*partial_lse(block, at) - safe);
                const Vec x = *(const Vec *)(partial_out(block, at) + c * ITEM);
                UNROLL for (int e = 0; e < VEC; e++) sum.x[e] = fma(weight, x.x[e], sum.x[e]);
            }
            UNROLL for (int e = 0; e < VEC; e++) sum.x[e] *= share;
            *(Vec *)(at_row(block.last.data ? block.last : block.out, batch, row, head) + c * ITEM) = sum;
        }
        __syncwarp(); /* all lanes have read lse */
        if (LANE == 0) *lse = total == 0 ? -INF : safe + log_of(total);
    }
}
