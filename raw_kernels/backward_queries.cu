/* dQ of a tile of queries in float16 and bfloat16, with the same bits each time: the deterministic half of backward.
 *
 *   dQ = scale dS K,   dS = P ∘ (dP - delta),   P = exp(S - lse),   dP = dO Vᵀ,   S = scale Q Kᵀ
 *
 * backward.cu adds its shares of dQ by atomics, in an order that nobody knows.  Here a block of threads owns TILE_Q queries
 * of one (batch, head) and walks over the visible tiles of keys in a fixed order; dQ stays in registers.  S and dP are
 * computed once more (7 products where the fast way has 5), nothing is stored but dQ.
 *
 *   registers        dQ of the warp's queries, float32; lse, delta; Q and dO (Q_KEPT, DO_KEPT steps of 16 columns)
 *   shared memory    Q | dO (neither where all is kept) | STAGES × (K, V) | STAGES × positions of the keys | Known
 *
 *   for each visible tile of keys (those that are cut first, then the full ones, whose loop has no mask code):
 *       wait for K, V; barrier; ask for the next tile
 *       for each CHUNK of keys:
 *           S = Q Kᵀ;  P = 2^(c S - lse)
 *           for each PART of the chunk:  dP = dO Vᵀ - delta;  dS = P dP;  dQ += dS K
 *
 * A warp has FRAGMENTS · 16 queries; S and dP as C fragments are, packed, the A fragments of dQ += dS K.
 */
#include "backward.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int K_STEPS = HEAD_DIM / 16, V_STEPS = HEAD_DIM_V / 16;         /* k16 steps of S and of dP */
constexpr int K_BYTES = 2 * HEAD_DIM, V_BYTES = 2 * HEAD_DIM_V;           /* of a row */
constexpr int FENCED = BURST_ALIBI ? FENCES | 7 : FENCES;                  /* loads of positions add to the others */
constexpr bool QUERIES_STAY = Q_KEPT == K_STEPS && DO_KEPT == V_STEPS;    /* in registers: they come through all of the room */

/* Shared memory. */
constexpr int Q_ROOM = TILE_Q * K_BYTES, DO_ROOM = TILE_Q * V_BYTES;
constexpr int K_ROOM = TILE_K * K_BYTES, STAGE = K_ROOM + TILE_K * V_BYTES, POS_ROOM = TILE_K * 4;
constexpr int Q_AT = 0, DO_AT = Q_ROOM, STAGE_AT = QUERIES_STAY ? 0 : Q_ROOM + DO_ROOM, POS_AT = STAGE_AT + STAGES * STAGE;
constexpr int LOOP_BYTES = POS_AT + STAGES * POS_ROOM;
constexpr int KNOWN_AT = LOOP_BYTES > Q_ROOM + DO_ROOM ? LOOP_BYTES : Q_ROOM + DO_ROOM;
constexpr int SHARED_BYTES = KNOWN_AT + Known::BYTES;

static_assert(SHARED_BYTES == SHARED && SHARED <= SHARED_LIMIT, "shared memory: the table and the kernel disagree");
static_assert(TILE_Q == WARPS * FRAGMENTS * 16, "queries of a warp");
static_assert(TILE_K % CHUNK == 0 && CHUNK % PART == 0 && PART % 16 == 0, "keys at once");
static_assert(TILE_K <= THREADS, "a thread copies a position");

struct Warp {
    const Block &block;
    u32 lane, warp;
    u32 shared;
    Scoring scoring;

    float dq[FRAGMENTS][HEAD_DIM / 8][4];
    float minus_delta[FRAGMENTS][4], minus_lse[FRAGMENTS][2]; /* of rows lane / 4 and + 8; -lse · log2 e */
    u32 q_frag[Q_KEPT ? Q_KEPT : 1][FRAGMENTS][4], do_frag[DO_KEPT ? DO_KEPT : 1][FRAGMENTS][4];

    /* Addresses of this lane; the rest of an address is a constant or the same for the whole warp. */
    u32 q_rows, do_rows;   /* rows lane % 16, chunk lane / 16: A operands, and B operands by ldmatrix.trans */
    u32 k_rows, v_rows;    /* rows lane % 8 + 8 (lane / 16), chunk lane / 8 % 2: B operands */
    u32 own_q, own_do;     /* the warp's queries */
    u32 positions;         /* of this lane's first keys */

    typedef Carry<TILE_Q, HEAD_DIM, WARPS> CarryQ;
    typedef Carry<TILE_Q, HEAD_DIM_V, WARPS> CarryDO;
    typedef Carry<TILE_K, HEAD_DIM, WARPS> CarryK;
    typedef Carry<TILE_K, HEAD_DIM_V, WARPS> CarryV;

    __device__ __forceinline__ Warp(const Block &b) : block(b), scoring(b) {}

    __device__ __forceinline__ void place(u32 shared_memory)
    {
        shared = shared_memory;
        const int row = lane & 15, chunk = lane >> 4, row_b = (lane & 7) + 8 * (lane >> 4), chunk_b = lane >> 3 & 1;
        q_rows = opaque(shared + swizzled<K_BYTES>(row, chunk));
        do_rows = V_BYTES == K_BYTES ? q_rows : opaque(shared + swizzled<V_BYTES>(row, chunk));
        k_rows = opaque(shared + swizzled<K_BYTES>(row_b, chunk_b));
        v_rows = V_BYTES == K_BYTES ? k_rows : opaque(shared + swizzled<V_BYTES>(row_b, chunk_b));
        own_q = opaque_uniform(warp * FRAGMENTS * 16 * K_BYTES);
        own_do = V_BYTES == K_BYTES ? own_q : opaque_uniform(warp * FRAGMENTS * 16 * V_BYTES);
        positions = opaque(shared + POS_AT + (lane & 3) * 8);
    }

    /* ------------------------------------------------------------ copies */

    template <typename C>
    __device__ __forceinline__ void rows_of_queries(const Item &item, const Tensor &x, u32 to, int columns)
    {
        const int row = C::row(warp, lane), chunk = C::chunk(warp, lane), first = item.tile * TILE_Q + row;
        const char *from = at_row(x, item.batch, min(first, block.rows_q - 1), item.head) + 16 * chunk;
        C::some(warp, shared + to + swizzled<C::BYTES>(row, chunk), from, x.row, block.rows_q - first, columns / 8 - chunk);
    }

    /* Ask for a tile of keys: K, V, and the positions where they are wanted. */
    __device__ __forceinline__ void fetch(const Walk &walk, u32 stage, u32 pos_stage)
    {
        const u32 thread = thread_index(), lane = thread & 31, warp = thread >> 5; /* not kept in registers through the loop */
        const u32 row_k = CarryK::row(warp, lane), chunk_k = CarryK::chunk(warp, lane);
        const u32 row_v = CarryV::row(warp, lane), chunk_v = CarryV::chunk(warp, lane);
        const u32 to_k = shared + (STAGE_AT + stage) + swizzled<K_BYTES>(row_k, chunk_k);
        const u32 to_v = shared + (STAGE_AT + K_ROOM + stage) + swizzled<V_BYTES>(row_v, chunk_v);
        Known known;
        known.get_first(shared + KNOWN_AT);
        const char *const first_k = (const char *)known.first[0], *const first_v = (const char *)known.first[1];
        if ((walk.tile + 1) * TILE_K <= Known::get_plain(shared + KNOWN_AT)) {
            const int start = walk.tile * TILE_K;
            CarryK::all(warp, to_k, stepped(stepped(first_k, block.k.row, start + row_k), 16, chunk_k), block.k.row);
            CarryV::all(warp, to_v, stepped(stepped(first_v, block.v.row, start + row_v), 16, chunk_v), block.v.row);
        } else {
            const int key_k = walk.tile * TILE_K + row_k, key_v = walk.tile * TILE_K + row_v, last = block.rows_k - 1;
            CarryK::some(warp, to_k, first_k + min(key_k, last) * block.k.row + 16 * chunk_k, block.k.row,
                         block.rows_k - key_k, block.d / 8 - (int)chunk_k);
            CarryV::some(warp, to_v, first_v + min(key_v, last) * block.v.row + 16 * chunk_v, block.v.row,
                         block.rows_k - key_v, block.dim_v / 8 - (int)chunk_v);
        }
        const int key = 32 * warp + lane;
        if ((walk.cut || BURST_ALIBI) && key < TILE_K) {
            const u32 to = shared + POS_AT + pos_stage + 4 * key;
            if (walk.tile * TILE_K + key < block.rows_k) copy4(to, block.pos + walk.tile * TILE_K + key);
            else shared_store(to, 1u << 31); /* the least position: none that is not there is ever seen */
        }
        copies_commit();
    }

    /* ------------------------------------------------------------ one tile of keys */

    __device__ __forceinline__ void q_fragments(u32 (&a)[FRAGMENTS][4], int step)
    {
        UNROLL for (int m = 0; m < FRAGMENTS; m++)
            if (step < Q_KEPT) UNROLL for (int i = 0; i < 4; i++) a[m][i] = q_frag[step < Q_KEPT ? step : 0][m][i];
            else ldmatrix(a[m], along<K_BYTES>(q_rows, 2 * step) + own_q + Q_AT + m * 16 * K_BYTES);
    }

    __device__ __forceinline__ void do_fragments(u32 (&a)[FRAGMENTS][4], int step)
    {
        UNROLL for (int m = 0; m < FRAGMENTS; m++)
            if (step < DO_KEPT) UNROLL for (int i = 0; i < 4; i++) a[m][i] = do_frag[step < DO_KEPT ? step : 0][m][i];
            else ldmatrix(a[m], along<V_BYTES>(do_rows, 2 * step) + own_do + DO_AT + m * 16 * V_BYTES);
    }

    /* As in backward.cu: what may not be made before the loop and kept. */
    __device__ __forceinline__ void pin()
    {
        if (FENCED & 8) asm volatile("" : "+r"(k_rows), "+r"(q_rows));
        if (V_BYTES == K_BYTES) v_rows = k_rows, do_rows = q_rows;
    }

    /* sight: lo and hi - lo of this lane's rows, where CUT; at: their positions, where ALiBi. */
    template <bool CUT>
    __device__ __forceinline__ void keys(u32 stage, u32 pos_stage, const int2 (&sight)[FRAGMENTS][2], const int (&at)[FRAGMENTS][2])
    {
        UNROLL for (int chunk = 0; chunk < TILE_K / CHUNK; chunk++) {
            if (FENCED & 1) __syncwarp(); /* loads do not start in the chunk before: registers */
            const u32 k_chunk = stage + (STAGE_AT + chunk * CHUNK * K_BYTES);
            const u32 v_chunk = stage + (STAGE_AT + K_ROOM + chunk * CHUNK * V_BYTES);

            /* S = Q Kᵀ */
            float s[FRAGMENTS][CHUNK / 8][4], bend[BURST_SOFTCAP ? FRAGMENTS : 1][BURST_SOFTCAP ? CHUNK / 8 : 1][4];
            UNROLL for (int step = 0; step < K_STEPS; step++) {
                u32 a[FRAGMENTS][4];
                q_fragments(a, step);
                UNROLL for (int n = 0; n < CHUNK / 16; n++) {
                    u32 b[4];
                    ldmatrix(b, along<K_BYTES>(k_rows, 2 * step) + k_chunk + n * 16 * K_BYTES);
                    UNROLL for (int m = 0; m < FRAGMENTS; m++)
                        UNROLL for (int e = 0; e < 2; e++) {
                            float zero[4] = {0, 0, 0, 0};
                            mma(s[m][2 * n + e], a[m], b[2 * e], b[2 * e + 1], step ? s[m][2 * n + e] : zero);
                        }
                }
            }

            /* P = exp(S - lse) */
            UNROLL for (int n = 0; n < CHUNK / 8; n++) {
                const int key = chunk * CHUNK + n * 8; /* this lane has the keys 2 (lane % 4) + 0, 1 from here */
                int pos[2] = {0, 0};
                if (CUT || BURST_ALIBI) {
                    const int2 x = shared_int2(positions + pos_stage + key * 4);
                    pos[0] = x.x, pos[1] = x.y;
                }
                UNROLL for (int m = 0; m < FRAGMENTS; m++)
                    UNROLL for (int i = 0; i < 4; i++) {
                        float slope, p = scoring.weight(s[m][n][i], minus_lse[m][i >> 1], at[m][i >> 1] - pos[i & 1], &slope);
                        if (CUT) p = (u32)(pos[i & 1] - sight[m][i >> 1].x) < (u32)sight[m][i >> 1].y ? p : 0.f;
                        s[m][n][i] = p;
                        if (BURST_SOFTCAP) bend[m][n][i] = slope;
                    }
            }

            UNROLL for (int part = 0; part < CHUNK / PART; part++) {
                if (FENCED & 2) __syncwarp();
                /* dP = dO Vᵀ - delta */
                float dp[FRAGMENTS][PART / 8][4];
                UNROLL for (int step = 0; step < V_STEPS; step++) {
                    u32 a[FRAGMENTS][4];
                    do_fragments(a, step);
                    UNROLL for (int n = 0; n < PART / 16; n++) {
                        u32 b[4];
                        ldmatrix(b, along<V_BYTES>(v_rows, 2 * step) + v_chunk + (part * PART + n * 16) * V_BYTES);
                        UNROLL for (int m = 0; m < FRAGMENTS; m++)
                            UNROLL for (int e = 0; e < 2; e++)
                                mma(dp[m][2 * n + e], a[m], b[2 * e], b[2 * e + 1], step ? dp[m][2 * n + e] : minus_delta[m]);
                    }
                }
                UNROLL for (int n = 0; n < PART / 16; n++) {
                    /* dS = P ∘ (dP - delta) */
                    u32 ds_frag[FRAGMENTS][4];
                    UNROLL for (int m = 0; m < FRAGMENTS; m++)
                        UNROLL for (int i = 0; i < 4; i++) {
                            const int at_n = 2 * n + (i >> 1), of_chunk = part * (PART / 8) + at_n, j = 2 * (i & 1);
                            float ds0 = s[m][of_chunk][j] * dp[m][at_n][j], ds1 = s[m][of_chunk][j + 1] * dp[m][at_n][j + 1];
                            if (BURST_SOFTCAP) ds0 *= bend[m][of_chunk][j], ds1 *= bend[m][of_chunk][j + 1];
                            ds_frag[m][i] = pack(ds0, ds1);
                        }
                    if (FENCED & 4) __syncwarp();
                    /* dQ += dS K */
                    UNROLL for (int column = 0; column < K_STEPS; column++) {
                        u32 b[4];
                        ldmatrix_trans(b, along<K_BYTES>(q_rows, 2 * column) + k_chunk + (part * PART + n * 16) * K_BYTES);
                        UNROLL for (int m = 0; m < FRAGMENTS; m++)
                            UNROLL for (int e = 0; e < 2; e++) mma(dq[m][2 * column + e], ds_frag[m], b[2 * e], b[2 * e + 1]);
                    }
                }
            }
        }
    }

    /* ------------------------------------------------------------ dQ */

    /* Of this lane's rows, i = 0 and 1, of fragment m. */
    static __device__ __forceinline__ int row_of(int tile, int m, int i)
    {
        const u32 thread = thread_index(), lane = thread & 31, warp = thread >> 5;
        return tile * TILE_Q + (warp * FRAGMENTS + m) * 16 + (lane >> 2) + 8 * i;
    }

    __device__ __forceinline__ void store(const Item &item)
    {
        UNROLL for (int m = 0; m < FRAGMENTS; m++)
            UNROLL for (int i = 0; i < 2; i++) {
                const int query = row_of(item.tile, m, i);
                if (query >= block.rows_q) continue;
                float *const row = (float *)at_row(block.dq, item.batch, query, item.head) + 2 * (thread_index() & 3);
                UNROLL for (int n = 0; n < HEAD_DIM / 8; n++) {
                    if (n * 8 >= block.d) continue;
                    float2 *const to = (float2 *)(row + n * 8);
                    float2 y = {dq[m][n][2 * i] * (float)block.scale, dq[m][n][2 * i + 1] * (float)block.scale};
                    if (!block.fresh_q) {
                        const float2 old = *to;
                        y.x += old.x, y.y += old.y;
                    }
                    *to = y;
                }
            }
    }
};

template <bool VALUE> struct Cut {
    static constexpr bool value = VALUE;
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) backward_queries(const __grid_constant__ Block block)
{
    extern __shared__ __align__(1024) char shared_memory[];
    Warp w(block);
    w.lane = threadIdx.x & 31;
    w.warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    w.place(shared_address(shared_memory));
    Item item = work_item(block, blockIdx.x, block.heads, block.tiles_q, 1);
    w.scoring.of_head(block, item.head);
    UNROLL for (int m = 0; m < FRAGMENTS; m++) UNROLL for (int n = 0; n < HEAD_DIM / 8; n++) UNROLL for (int i = 0; i < 4; i++) w.dq[m][n][i] = 0;

    if (threadIdx.x == 0) {
        const bool plain = block.d == HEAD_DIM && block.dim_v == HEAD_DIM_V && ((block.k.row | block.v.row) >> 25) == 0;
        const int kv_head = item.head / (block.heads / block.kv_heads);
        const Known known = {{(u64)at_row(block.k, item.batch, 0, kv_head), (u64)at_row(block.v, item.batch, 0, kv_head)},
                             plain ? block.rows_k : 0, item.tile, item.head, item.batch};
        known.put(w.shared + KNOWN_AT);
    }
    __syncthreads();
    auto look = [&](int base) {
        return look_at_keys(block, block.reach[Known::get_tile(w.shared + KNOWN_AT)], base, block.tiles_k);
    };
    Walk walk(0);
    bool more = walk.next(block.tiles_k, 0, 1, look);
    if (more) {
        w.rows_of_queries<Warp::CarryQ>(item, block.q, Q_AT, block.d);
        w.rows_of_queries<Warp::CarryDO>(item, block.dout, DO_AT, block.dim_v);
        copies_commit();
        const float inf = __int_as_float(0x7f800000);
        int2 sight[FRAGMENTS][2];
        int at[FRAGMENTS][2];
        UNROLL for (int m = 0; m < FRAGMENTS; m++)
            UNROLL for (int i = 0; i < 2; i++) {
                const int row = w.row_of(item.tile, m, i);
                const bool there = row < block.rows_q;
                const float lse = there ? *at_row(block.lse, item.batch, item.head, row) : -inf;
                const float delta = there ? *at_row(block.delta, item.batch, item.head, row) : 0;
                w.minus_lse[m][i] = lse == -inf ? -inf : -lse * (float)LOG2_E;
                w.minus_delta[m][2 * i] = w.minus_delta[m][2 * i + 1] = -delta;
                sight[m][i].x = there ? block.lo[row] : 0;
                sight[m][i].y = there ? block.hi[row] - sight[m][i].x : 0;
                at[m][i] = BURST_ALIBI && there ? block.at[row] : 0;
            }
        if (Q_KEPT || DO_KEPT) {
            copies_wait<0>();
            __syncthreads();
            UNROLL for (int step = 0; step < Q_KEPT; step++)
                UNROLL for (int m = 0; m < FRAGMENTS; m++)
                    ldmatrix(w.q_frag[step][m], along<K_BYTES>(w.q_rows, 2 * step) + w.own_q + Q_AT + m * 16 * K_BYTES);
            UNROLL for (int step = 0; step < DO_KEPT; step++)
                UNROLL for (int m = 0; m < FRAGMENTS; m++)
                    ldmatrix(w.do_frag[step][m], along<V_BYTES>(w.do_rows, 2 * step) + w.own_do + DO_AT + m * 16 * V_BYTES);
            if (QUERIES_STAY) __syncthreads();
        }
        u32 stage = 0, pos_stage = 0;
        w.fetch(walk, stage, pos_stage);

        auto step = [&](auto cut) {
            copies_wait<0>();
            __syncthreads();
            w.pin();
            if (!decltype(cut)::value && !(FENCED & 16)) walk.cut = false; /* it is: the compiler now knows */
            more = walk.next(block.tiles_k, 0, 1, look);
            if (STAGES == 2 && more) w.fetch(walk, stage ^ STAGE, pos_stage ^ POS_ROOM);
            w.keys<decltype(cut)::value>(stage, pos_stage, sight, at);
            if (STAGES == 2) stage ^= STAGE, pos_stage ^= POS_ROOM;
            if (STAGES == 1) {
                __syncthreads();
                if (more) w.fetch(walk, 0, 0);
            }
        };
        NO_UNROLL while (more && walk.cut) step(Cut<true>());
        NO_UNROLL while (more) step(Cut<false>());
    }
    Known known;
    known.get_item(w.shared + KNOWN_AT);
    w.store({known.tile, known.head, known.batch, 0});
}
