/* Backward for float32 and float64.  P = e^(S - lse) with the final lse, so no merge.
 *
 * backward           a tile of keys stays, the tiles of queries that see it pass, for all query heads of its group
 *   shared memory    K, V [TILE_K, ...] stay    Q, dO [TILE_Q, ...], lse, delta [TILE_Q]: STAGES of them
 *                    P, dS [TILE_Q, TILE_K]
 *   registers        dK [TILE_K, HEAD_DIM], dV [TILE_K, HEAD_DIM_V], over all warps; S and dP, then dQ, of one tile
 *
 *   for each head of the group, for each tile of queries that is seen:
 *       Q, dO, lse, delta are there · barrier · those of the next tile start
 *       S = scale Q K', bent, masked where cut;  P = e^(S - lse)
 *       dP = dO V';  dS = P (dP - delta) cap'
 *       P, dS to shared memory · barrier
 *       dV += P' dO;  dK += dS' Q;  dQ = dS K, by atomic sums into Block.work (WITH_DQ)
 *   dK *= scale; both are written, or added to what was there
 *
 *   Block.work       [batch][heads][tiles_q · TILE_Q][HEAD_DIM] REAL, 0 before; a row's columns in the order of `slot`, so that
 *                    each atomic instruction covers whole sectors
 * backward_fold      dq = or += scale · work
 * backward_queries   dQ alone, a tile of queries stays and the keys pass: no atomics, the same bits each time
 *
 * Rows beyond rows_q have Q = dO = 0 and lse = inf, rows that see nothing have lse = -inf, read as inf: P = 0.
 */
#include "wide.cuh"

#ifndef WITH_DQ
#define WITH_DQ 0
#endif

constexpr int SQ = row_stride(HEAD_DIM), SV = row_stride(HEAD_DIM_V), SP = p_stride(TILE_K);

/* e^(S - lse) in place; lse of the row as it is kept in shared memory */
template <class L> DEVICE void weigh(typename L::Frag &s, const char *lse_smem)
{
    UNROLL for (int i = 0; i < L::RM; i++) {
        REAL lse = *(const REAL *)(lse_smem + L::row(i) * ITEM);
        lse = lse == -INF ? INF : lse;
        UNROLL for (int j = 0; j < L::RN; j++) s[i][j] = exp_of(s[i][j] - lse);
    }
}

/* dP in, dS out */
template <class L>
DEVICE void grade(typename L::Frag &dp, const typename L::Frag &p, const typename L::Frag *bent, const char *delta_smem)
{
    UNROLL for (int i = 0; i < L::RM; i++) {
        const REAL delta = *(const REAL *)(delta_smem + L::row(i) * ITEM);
        UNROLL for (int j = 0; j < L::RN; j++) {
            dp[i][j] = p[i][j] * (dp[i][j] - delta);
            if (BURST_SOFTCAP) dp[i][j] *= (*bent)[i][j];
        }
    }
}

struct Operands {
    const char *q, *dout, *k, *v, *lse, *delta; /* of a tile, in shared memory */
};

/* dS of a tile of queries and one of keys; P goes to p_smem where that is not null */
template <class L>
DEVICE void gradients(typename L::Frag &ds, const Block &block, const Scoring &how, const Operands &x, int first_q, int first_k, bool cut,
                      char *p_smem)
{
    typename L::Frag p;
#if BURST_SOFTCAP
    typename L::Frag bent_frag, *bent = &bent_frag;
#else
    typename L::Frag *bent = nullptr;
#endif
    set_zero(p);
    dot_rows<L, HEAD_DIM, SQ, SQ>(p, x.q, x.k);
    score<L>(p, bent, block, how, first_q, first_k, cut);
    weigh<L>(p, x.lse);
    if (p_smem) store_frag<L, SP>(p_smem, p);
    set_zero(ds);
    dot_rows<L, HEAD_DIM_V, SV, SV>(ds, x.dout, x.v);
    grade<L>(ds, p, bent, x.delta);
}

/* lse and delta of a tile of queries; inf and 0 beyond rows_q. */
DEVICE void load_rows(char *lse_smem, char *delta_smem, const Block &block, int batch, int head, int first)
{
    for (int i = threadIdx.x; i < TILE_Q; i += THREADS) {
        const int row = first + i;
        if (row < block.rows_q) {
            copy_item(shared_address(lse_smem + i * ITEM), at_row(block.lse, batch, head, row));
            copy_item(shared_address(delta_smem + i * ITEM), at_row(block.delta, batch, head, row));
        } else {
            *(REAL *)(lse_smem + i * ITEM) = INF;
            *(REAL *)(delta_smem + i * ITEM) = 0;
        }
    }
}

/* c to x, or added to what is there */
template <class L, bool TURNED>
DEVICE void put(const Tensor &x, const typename L::Frag &c, REAL factor, int batch, int head, int first, int rows, int columns, bool fresh)
{
    UNROLL for (int i = 0; i < L::RM; i++) {
        const int row = first + (TURNED ? L::turned_row(i) : L::row(i));
        if (row >= rows) continue;
        UNROLL for (int j = 0; j < L::RN; j += L::STEP) {
            const int column = L::column(j);
            if (column >= columns) continue;
            Part<L::STEP> *to = (Part<L::STEP> *)(at_row(x, batch, row, head) + column * ITEM), y;
            UNROLL for (int e = 0; e < L::STEP; e++) y.x[e] = factor * c[i][j + e];
            if (!fresh) {
                const Part<L::STEP> before = *to;
                UNROLL for (int e = 0; e < L::STEP; e++) y.x[e] += before.x[e];
            }
            *to = y;
        }
    }
}

#ifndef QUERIES /* ================================================================ a tile of keys */

constexpr int AT_V = TILE_K * SQ, AT_P = AT_V + TILE_K * SV, AT_DS = AT_P + TILE_Q * SP, AT_STAGE = AT_DS + TILE_Q * SP;
constexpr int AT_DO = TILE_Q * SQ, AT_LSE = AT_DO + TILE_Q * SV, AT_DELTA = AT_LSE + whole_lines(TILE_Q);
constexpr int STAGE_BYTES = AT_DELTA + whole_lines(TILE_Q);
constexpr int SHARED_BYTES = AT_STAGE + STAGES * STAGE_BYTES;
static_assert(SHARED_BYTES == SHARED && SHARED <= SHARED_LIMIT, "shared memory: the table is wrong or the tile too large");

typedef Layout<TILE_Q, TILE_K, SCORE_WARPS, WARPS_K> Scores;            /* S, dP */
typedef Layout<TILE_K, HEAD_DIM, KEY_WARPS, WARPS / KEY_WARPS> GradK;
typedef Layout<TILE_K, HEAD_DIM_V, KEY_WARPS, WARPS / KEY_WARPS> GradV;
typedef Layout<TILE_Q, HEAD_DIM, QUERY_WARPS, WARPS / QUERY_WARPS> GradQ;

constexpr bool FOUR_AT_ONCE = SM_90 && TYPE == FLOAT32 && GradQ::STEP == 4;

/* Where a lane's column j goes in a row of Block.work: an instruction's lanes lie side by side. */
DEVICE int slot(int j)
{
    if (FOUR_AT_ONCE) return GradQ::column(j);
#if DMMA
    return GradQ::first_column() + j / 2 * 8 + j % 2 * 4 + LANE % 4;
#else
    return GradQ::first_column() + j / GradQ::STEP * 8 * GradQ::STEP + j % GradQ::STEP * 8 + LANE_X;
#endif
}

DEVICE char *sums_row(const Block &block, int batch, int head, int row)
{
    return block.work + (((i64)batch * block.heads + head) * block.tiles_q * TILE_Q + row) * (HEAD_DIM * ITEM);
}

DEVICE void load_queries(char *stage, const Block &block, int batch, int head, int tile)
{
    const int first = tile * TILE_Q;
    load_tile<TILE_Q, HEAD_DIM, SQ>(stage, block.q, batch, head, first, block.rows_q, block.d);
    load_tile<TILE_Q, HEAD_DIM_V, SV>(stage + AT_DO, block.dout, batch, head, first, block.rows_q, block.dim_v);
    load_rows(stage + AT_LSE, stage + AT_DELTA, block, batch, head, first);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) backward(const __grid_constant__ Block block)
{
    extern __shared__ __align__(128) char smem[];
    char *k_smem = smem, *v_smem = smem + AT_V, *p_smem = smem + AT_P, *ds_smem = smem + AT_DS;
    const Item item = work_item(block, blockIdx.x, block.kv_heads, block.tiles_k, 1);
    const int first_k = item.tile * TILE_K, group = block.heads / block.kv_heads;
    const int2 extent = block.extent[item.tile];
    const bool whole = first_k + TILE_K <= block.rows_k;
    const auto look = [&](int first, int end) { return look_at_queries(block, extent, whole, first, end); };
    const Walk start = {-32, block.tiles_q, {0, 0}, 0, false};

    GradK::Frag dk;
    GradV::Frag dv;
    set_zero(dk);
    set_zero(dv);
    Walk walk = start;
    int head = item.head * group;
    bool more = next(walk, look);
    if (more) {
        load_tile<TILE_K, HEAD_DIM, SQ>(k_smem, block.k, item.batch, item.head, first_k, block.rows_k, block.d);
        load_tile<TILE_K, HEAD_DIM_V, SV>(v_smem, block.v, item.batch, item.head, first_k, block.rows_k, block.dim_v);
        load_queries(smem + AT_STAGE, block, item.batch, head, walk.tile);
    }
    copies_commit();
    int stage_at = AT_STAGE;
    while (more) {
        const char *q_smem = smem + stage_at, *do_smem = q_smem + AT_DO;
        const int first_q = walk.tile * TILE_Q, this_head = head;
        const bool cut = walk.cut;
        more = next(walk, look);
        if (!more && head + 1 < (item.head + 1) * group) { /* the next head sees the same tiles */
            head++;
            walk = start;
            more = next(walk, look);
        }
        copies_wait<0>();
        __syncthreads(); /* this stage is there; P, dS and the other stage are read */
        if (STAGES == 2) {
            stage_at = 2 * AT_STAGE + STAGE_BYTES - stage_at;
            if (more) load_queries(smem + stage_at, block, item.batch, head, walk.tile);
            copies_commit();
        }
        if (Scores::mine()) {
            Scores::Frag ds;
            gradients<Scores>(ds, block, scoring_of(block, this_head), {q_smem, do_smem, k_smem, v_smem, q_smem + AT_LSE, q_smem + AT_DELTA},
                              first_q, first_k, cut, p_smem);
            store_frag<Scores, SP>(ds_smem, ds);
        }
        __syncthreads(); /* P and dS are there */
        if (GradV::mine()) turned_rows<GradV, TILE_Q, SP, SV>(dv, p_smem, do_smem);
        if (GradK::mine()) turned_rows<GradK, TILE_Q, SP, SQ>(dk, ds_smem, q_smem);
        if (WITH_DQ && GradQ::mine()) {
            GradQ::Frag dq;
            set_zero(dq);
            times_rows<GradQ, TILE_K, SP, SQ>(dq, ds_smem, k_smem);
            UNROLL for (int i = 0; i < GradQ::RM; i++) {
                char *to = sums_row(block, item.batch, this_head, first_q + GradQ::row(i));
                if constexpr (FOUR_AT_ONCE) {
                    UNROLL for (int j = 0; j < GradQ::RN; j += 4)
                        add_global(to + slot(j) * ITEM, dq[i][j], dq[i][j + 1], dq[i][j + 2], dq[i][j + 3]);
                } else {
                    UNROLL for (int j = 0; j < GradQ::RN; j++) atomicAdd((REAL *)(to + slot(j) * ITEM), dq[i][j]);
                }
            }
        }
        if (STAGES == 1) {
            __syncthreads(); /* the stage is read */
            if (more) load_queries(smem + stage_at, block, item.batch, head, walk.tile);
            copies_commit();
        }
    }
    if (GradK::mine())
        put<GradK, true>(block.dk, dk, (REAL)block.scale, item.batch, item.head, first_k, block.rows_k, block.d, block.fresh_kv);
    if (GradV::mine())
        put<GradV, true>(block.dv, dv, 1, item.batch, item.head, first_k, block.rows_k, block.dim_v, block.fresh_kv);
}

/* A lane reads what it would have added, so that columns find their place again. */
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) backward_fold(const __grid_constant__ Block block)
{
    if (!GradQ::mine()) return;
    const int tile = blockIdx.x % block.tiles_q, pair = blockIdx.x / block.tiles_q;
    const int head = pair % block.heads, batch = pair / block.heads;
    GradQ::Frag dq;
    UNROLL for (int i = 0; i < GradQ::RM; i++) {
        const char *from = sums_row(block, batch, head, tile * TILE_Q + GradQ::row(i));
        if constexpr (FOUR_AT_ONCE) {
            UNROLL for (int j = 0; j < GradQ::RN; j += 4) {
                const Vec x = *(const Vec *)(from + slot(j) * ITEM);
                UNROLL for (int e = 0; e < 4; e++) dq[i][j + e] = x.x[e];
            }
        } else {
            UNROLL for (int j = 0; j < GradQ::RN; j++) dq[i][j] = *(const REAL *)(from + slot(j) * ITEM);
        }
    }
    put<GradQ, false>(block.dq, dq, (REAL)block.scale, batch, head, tile * TILE_Q, block.rows_q, block.d, block.fresh_q);
}

#else /* ================================================================ a tile of queries */

/*   shared memory    Q [TILE_Q, HEAD_DIM], dO [TILE_Q, HEAD_DIM_V], lse, delta stay    K, V: STAGES of them    dS
 *   registers        dQ, S, dP: a warp has whole rows, dS goes from lane to lane and to no other warp
 */
constexpr int AT_DO = TILE_Q * SQ, AT_LSE = AT_DO + TILE_Q * SV, AT_DELTA = AT_LSE + whole_lines(TILE_Q);
constexpr int AT_DS = AT_DELTA + whole_lines(TILE_Q), AT_STAGE = AT_DS + TILE_Q * SP;
constexpr int AT_V = TILE_K * SQ, STAGE_BYTES = AT_V + TILE_K * SV;
constexpr int SHARED_BYTES = AT_STAGE + STAGES * STAGE_BYTES;
static_assert(SHARED_BYTES == SHARED && SHARED <= SHARED_LIMIT, "shared memory: the table is wrong or the tile too large");

typedef Layout<TILE_Q, TILE_K, WARPS, 1> Scores;
typedef Layout<TILE_Q, HEAD_DIM, WARPS, 1> GradQ;

DEVICE void load_keys(char *stage, const Block &block, int batch, int kv_head, int tile)
{
    const int first = tile * TILE_K;
    load_tile<TILE_K, HEAD_DIM, SQ>(stage, block.k, batch, kv_head, first, block.rows_k, block.d);
    load_tile<TILE_K, HEAD_DIM_V, SV>(stage + AT_V, block.v, batch, kv_head, first, block.rows_k, block.dim_v);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) backward_queries(const __grid_constant__ Block block)
{
    extern __shared__ __align__(128) char smem[];
    char *q_smem = smem, *do_smem = smem + AT_DO, *ds_smem = smem + AT_DS;
    const Item item = work_item(block, blockIdx.x, block.heads, block.tiles_q, 1);
    const int first_q = item.tile * TILE_Q, kv_head = item.head / (block.heads / block.kv_heads);
    const int4 reach = block.reach[item.tile];
    const auto look = [&](int first, int end) { return look_at_keys(block, reach, first, end); };
    const Scoring how = scoring_of(block, item.head);

    GradQ::Frag dq;
    set_zero(dq);
    Walk walk = {-32, block.tiles_k, {0, 0}, 0, false};
    bool more = next(walk, look);
    if (more) {
        load_tile<TILE_Q, HEAD_DIM, SQ>(q_smem, block.q, item.batch, item.head, first_q, block.rows_q, block.d);
        load_tile<TILE_Q, HEAD_DIM_V, SV>(do_smem, block.dout, item.batch, item.head, first_q, block.rows_q, block.dim_v);
        load_rows(smem + AT_LSE, smem + AT_DELTA, block, item.batch, item.head, first_q);
        load_keys(smem + AT_STAGE, block, item.batch, kv_head, walk.tile);
    }
    copies_commit();
    int stage_at = AT_STAGE;
    while (more) {
        const char *k_smem = smem + stage_at, *v_smem = k_smem + AT_V;
        const int first_k = walk.tile * TILE_K;
        const bool cut = walk.cut;
        more = next(walk, look);
        copies_wait<0>();
        __syncthreads(); /* this stage is there; the other one is read */
        if (STAGES == 2) {
            stage_at = 2 * AT_STAGE + STAGE_BYTES - stage_at;
            if (more) load_keys(smem + stage_at, block, item.batch, kv_head, walk.tile);
            copies_commit();
        }
        Scores::Frag ds;
        gradients<Scores>(ds, block, how, {q_smem, do_smem, k_smem, v_smem, smem + AT_LSE, smem + AT_DELTA}, first_q, first_k, cut, nullptr);
        __syncwarp(); /* dS of the tile before is read */
        store_frag<Scores, SP>(ds_smem, ds);
        __syncwarp();
        times_rows<GradQ, TILE_K, SP, SQ>(dq, ds_smem, k_smem);
        if (STAGES == 1) {
            __syncthreads(); /* the stage is read */
            if (more) load_keys(smem + stage_at, block, item.batch, kv_head, walk.tile);
            copies_commit();
        }
    }
    put<GradQ, false>(block.dq, dq, (REAL)block.scale, item.batch, item.head, first_q, block.rows_q, block.d, block.fresh_q);
}
#endif
