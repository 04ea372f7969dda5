/* Backward of attention in float16 and bfloat16: dK and dV of a tile of keys, and its share of dQ.
 *
 *   P  = exp(S - lse)          S  = scale Q Kᵀ  (+ softcap, ALiBi, mask: scores.h)
 *   dV = Pᵀ dO                 dP = dO Vᵀ
 *   dS = P ∘ (dP - delta)      dK = scale dSᵀ Q,   dQ = scale dS K
 *
 * A block of threads owns TILE_K keys of one (batch, kv head) and walks over the visible tiles of TILE_Q queries, of all
 * query heads of the group.  Everything is computed transposed, keys as the rows of a product: Sᵀ = K Qᵀ and
 * dPᵀ = V dOᵀ come out of the tensor cores as C fragments, and these are, packed, the A fragments of dV += Pᵀ dO and
 * dK += dSᵀ Q.  So where a warp has its keys alone P never leaves the registers, and dS passes through shared memory for dQ
 * only; where warps share keys (SHARERS > 1) both pass through it, from one of them to the others.
 *
 *   registers        dK, dV of the warp's keys, float32; V (V_KEPT steps of 16 columns) and K (K_KEPT)
 *                    ANEW: K is read anew for each tile of queries, so that dQ has its registers in between
 *                    V_HALVED: the first half of V, and the other half stands in shared memory
 *                    Q_KEPT: steps of Q, from S of the first S_FRAGMENTS fragments of keys to that of the others
 *   shared memory    K | V | STAGES × (Q, dO) | STAGES × (-delta, -lse, at) | dS [TILE_K][TILE_Q]
 *                    | P where SHARERS > 1 | Known: where Q and dO of this batch begin; PAD: where the records begin
 *                    | POSITIONS: those of the keys | Q_LATER: each warp's Walk
 *   global memory    block.work: dQ sums in the order of fragments | a record a tile of queries (see RECORD)
 *
 *   for each visible tile of queries (those that are cut first, then the full ones, whose loop has no mask code):
 *       wait for Q, dO; barrier; ask for the next tile
 *       for each CHUNK of queries:
 *           dPᵀ = V dOᵀ - delta                        -delta is the C operand of the first step
 *           for each PART of the chunk:
 *               Sᵀ = K Qᵀ;  P = 2^(c Sᵀ - lse);  dS = P dP;  dS to shared memory
 *               dV += P dO;  dK += dS Q
 *       barrier
 *       SHARERS = 2: dV, dK of the partner's queries, from shared memory
 *       dQ tile = dS K, added to global memory by red
 *
 * Warps: KEY_GROUPS groups of FRAGMENTS · 16 keys.  SHARERS = 2: two warps have the same keys; each computes S and dP of half
 * of the queries, and dV and dK of half of the columns (n16 blocks 2i + sharer), so that these fit into registers.
 * PRODUCTS = 2: of the warps that have the same keys those with odd numbers make dK, the others dV, so that a fragment of dO or Q
 * serves twice as many keys.  Each computes S and dP of its share of the queries, of S_FRAGMENTS · 16 keys at a time for S, and takes
 * the others' P or dS from shared memory.
 * For dQ the warps stand as DQ_ROWS × DQ_COLUMNS over the tile of queries, n16 block i · DQ_COLUMNS + column each.
 */
#include "backward.cuh"

#ifndef WITH_DQ
#define WITH_DQ 1 /* 0: dK and dV alone; dQ comes from backward_queries.cu, with the same bits each time */
#endif

constexpr int THREADS = 32 * WARPS, KEY_GROUPS = WARPS / SHARERS;
constexpr int K_STEPS = HEAD_DIM / 16, V_STEPS = HEAD_DIM_V / 16;               /* k16 steps of S and of dP */
constexpr int COLUMN_SHARERS = SHARERS / PRODUCTS;                              /* warps that share the columns of dK or dV */
constexpr int K_BLOCKS = K_STEPS / COLUMN_SHARERS, V_BLOCKS = V_STEPS / COLUMN_SHARERS; /* n16 blocks of a warp's dK and dV */
constexpr int OWN = TILE_Q / SHARERS;                                           /* queries of a warp */
constexpr int DQ_WARPS = DQ_ROWS * DQ_COLUMNS, DQ_FRAGMENTS = TILE_Q / DQ_ROWS / 16, DQ_BLOCKS = K_STEPS / DQ_COLUMNS;
constexpr int K_BYTES = 2 * HEAD_DIM + PAD, V_BYTES = 2 * HEAD_DIM_V + PAD; /* of a row of Q and K, of dO and V */
constexpr int V_COLUMNS = V_HALVED ? HEAD_DIM_V / 2 : HEAD_DIM_V, V_ROW = 2 * V_COLUMNS + PAD; /* of V in shared memory */
/* dS and P: panels [TILE_K][S_COLUMNS] of queries, their rows as long as K's where that is possible: one address serves both. */
constexpr int S_COLUMNS = PAD && TILE_Q > HEAD_DIM ? HEAD_DIM : TILE_Q;
constexpr int S_BYTES = 2 * S_COLUMNS + PAD, PANEL = TILE_K * S_BYTES, PANELS = TILE_Q / S_COLUMNS;
/* Without dQ nothing stands in the room of dS: V goes there, and registers are free. */
constexpr bool V_FOR_DS = !WITH_DQ && SHARERS == 1 && V_BYTES <= S_BYTES && !ANEW;
/* Softcap and ALiBi want registers of their own: Q, and K that is not held through the loop, are read where they are used;
 * with dQ K for S of twice as many queries. */
constexpr bool SCORES = BURST_ALIBI || BURST_SOFTCAP, NO_K = ANEW && SCORES;
constexpr int K_HELD = NO_K ? 0 : K_KEPT, Q_HELD = SCORES ? 0 : Q_KEPT, S_AT_ONCE = NO_K && WITH_DQ ? 2 * PART : PART; /* queries of S */
constexpr int V_HELD = V_FOR_DS ? 0 : V_KEPT, AT_ONCE = V_FOR_DS || S_AT_ONCE > CHUNK ? S_AT_ONCE : CHUNK;  /* and of dP */
constexpr int PINNED = WITH_DQ ? (BURST_ALIBI ? PINS_ALIBI : BURST_SOFTCAP ? PINS_SOFTCAP : PINS)
                               : (BURST_ALIBI ? PINS_ALONE_ALIBI : BURST_SOFTCAP ? PINS_ALONE_SOFTCAP : PINS_ALONE); /* see pin and fence */
constexpr bool THROUGH = PINNED & 1024;                                        /* heads counted through all batches */
constexpr bool V_STAYS = V_HELD == V_STEPS;                                     /* all of V in registers */
constexpr bool Q_LATER = PRODUCTS == 2;                                         /* Q is waited for after the first dP */
constexpr bool PAIRS = PAD;                                                    /* -delta of two queries is read as 8 bytes and moved, not as 16 */
constexpr bool MIDDLE_BARRIER = WITH_DQ || SHARERS > 1 || STAGES == 1;

/* Shared memory. */
constexpr int Q_ROOM = TILE_Q * K_BYTES, DO_ROOM = TILE_Q * V_BYTES, STAGE = Q_ROOM + DO_ROOM, S_ROOM = PANELS * PANEL;
constexpr int ROWS_ROOM = TILE_Q * 16;
constexpr int K_AT = 0, STAGE_AT = K_AT + TILE_K * (K_BYTES + (V_KEPT == V_STEPS ? 0 : V_ROW));
constexpr int ROWS_AT = STAGE_AT + STAGES * STAGE, DS_AT = ROWS_AT + STAGES * ROWS_ROOM, P_AT = DS_AT + S_ROOM;
constexpr int V_AT = V_FOR_DS ? DS_AT : K_AT + TILE_K * K_BYTES;
constexpr int KNOWN_AT = P_AT + (SHARERS > 1 ? S_ROOM : 0), POS_AT = KNOWN_AT + (KNOWN ? Known::BYTES : 0) + (PAD ? 16 : 0);
constexpr int WALK_AT = POS_AT + (POSITIONS ? TILE_K * 4 : 0), SHARED_BYTES = WALK_AT + (Q_LATER ? WARPS * Walk::BYTES : 0);
/* V that stays in registers comes through room that is not used yet: the stages, or all, and K comes later. */
constexpr bool V_BESIDE_K = TILE_K * V_BYTES <= STAGES * STAGE;
constexpr int V_COMES_AT = V_HALVED ? STAGE_AT : !V_STAYS ? V_AT : V_BESIDE_K ? STAGE_AT : 0;

static_assert(SHARED_BYTES == SHARED && SHARED <= SHARED_LIMIT, "shared memory: the table and the kernel disagree");
static_assert(!V_STAYS || TILE_K * V_BYTES <= SHARED_BYTES, "V does not fit");
static_assert(TILE_K == KEY_GROUPS * FRAGMENTS * 16 && SHARERS % PRODUCTS == 0 && COLUMN_SHARERS <= 2, "keys of a warp");
static_assert(PRODUCTS == 1 || (PAD && STAGES == 1 && POSITIONS && K_BYTES == V_BYTES && S_BYTES == K_BYTES), "warps of one product");
static_assert(!V_HALVED || (2 * V_KEPT == V_STEPS && V_HELD && V_BESIDE_K), "halves of V");
static_assert(K_KEPT <= K_STEPS && V_KEPT <= V_STEPS && Q_KEPT <= K_STEPS, "no more steps are kept than there are");
static_assert(FRAGMENTS % S_FRAGMENTS == 0 && (Q_KEPT == 0 || S_FRAGMENTS < FRAGMENTS), "fragments of S");
static_assert(OWN % AT_ONCE == 0 && AT_ONCE % S_AT_ONCE == 0 && PART % 16 == 0 && CUT_CHUNK % 16 == 0, "queries of a warp");
static_assert(!(PINNED & 4096) || !PAD, "addresses of dQ");
static_assert(KNOWN || !PAD, "what is Known is read there");
static_assert(K_STEPS % COLUMN_SHARERS == 0 && V_STEPS % COLUMN_SHARERS == 0, "columns of a warp");
static_assert(DQ_WARPS <= WARPS && DQ_FRAGMENTS * DQ_ROWS * 16 == TILE_Q && DQ_BLOCKS * DQ_COLUMNS == K_STEPS, "dQ of a warp");
static_assert(PAD || K_BYTES % 128 == 0 || DQ_COLUMNS <= 2, "swizzled columns of dQ");

/* What backward_prepare knows of a tile of queries of a head, in global memory; the front of it goes with each stage.
 *   -delta  [TILE_Q / 2][4]   of two queries, twice: a C fragment has two columns in two rows
 *   -lse    [TILE_Q / 2][4]   of two queries, · log2 e, then their positions for ALiBi.  -inf where a row has seen nothing
 *                             or is not there: P = 0
 *   sight   [TILE_Q / 2][4]   lo, hi - lo of two queries; read where a tile is cut                                      */
constexpr int DELTA = 0, LSE = 8 * TILE_Q, SIGHT = 16 * TILE_Q, RECORD = 24 * TILE_Q;

/* red.v4 on sm_90: a lane's four numbers side by side; else the lanes' first numbers, their second ones, ... */
#if __CUDA_ARCH__ >= 900
constexpr bool WIDE_RED = true;
#else
constexpr bool WIDE_RED = false;
#endif
constexpr int SUMS = TILE_Q * HEAD_DIM; /* floats of dQ of a tile */

DEVICE float *sums_of(const Block &block, u32 item) { return (float *)block.work + (u64)item * SUMS; }

DEVICE char *record_of(const Block &block, u32 item)
{
    const u64 sums = WITH_DQ ? (u64)block.batch * block.heads * block.tiles_q * SUMS * 4 : 0;
    return block.work + sums + (u64)item * RECORD;
}

/* ---------------------------------------------------------------- a warp */

struct Warp {
    const Block &block;
    u32 lane, warp, group, sharer;
    bool plain;                                   /* no column to be filled up, strides of Q and dO below 32 MB */
    u32 shared;                                   /* address of shared memory */
    Item item;
    Scoring scoring;

    float dk[FRAGMENTS][2 * K_BLOCKS][4], dv[FRAGMENTS][2 * V_BLOCKS][4]; /* PRODUCTS = 2: dk is dK or dV, dv nothing */
    u32 k_frag[K_HELD ? K_HELD : 1][FRAGMENTS][4], v_frag[V_HELD ? V_HELD : 1][FRAGMENTS][4];

    /* Addresses of this lane; the rest of an address is a constant or the same for the whole warp. */
    u32 k_rows, v_rows;     /* rows lane % 16, chunk lane / 16: A operands, and B operands by ldmatrix.trans */
    u32 v_halves;           /* likewise, V_HALVED: of half of V */
    u32 q_rows, do_rows;    /* rows lane % 8 + 8 (lane / 16), chunk lane / 8 % 2: B operands */
    u32 q_columns, do_columns; /* as k_rows, v_rows, from this warp's first column on */
    u32 put;                /* dS [key][query]: where fragments are stored */
    u32 partner;            /* dS [key][query]: the partner's queries, as A operand */
    u32 dq_rows, dq_keys;   /* dS as A operand and K as B operand of dQ */
    u32 keys_k, keys_v, keys_s; /* the warp's keys: bytes from the start of the tile in K, V and dS */
    u32 own_q, own_do;      /* the warp's queries */
    u32 rows;               /* -delta of this lane's first queries */

    __device__ __forceinline__ Warp(const Block &b) : block(b), scoring(b) {}

    /* The address in dS or P that is `queries` further. */
    static __device__ __forceinline__ u32 along_s(u32 address, int queries)
    {
        return along<S_BYTES>(address, queries % S_COLUMNS / 8) + queries / S_COLUMNS * PANEL;
    }

    /* An address some chunks further in its row. */
    static __device__ __forceinline__ u32 further(u32 address, u32 bytes) { return PAD ? address + bytes : address ^ bytes; }

    /* Where a warp's rows of dQ begin in dS. */
    static __device__ __forceinline__ u32 dq_row_of(u32 warp)
    {
        const u32 query = warp / DQ_COLUMNS * DQ_FRAGMENTS * 16;
        return query % S_COLUMNS * 2 + query / S_COLUMNS * PANEL;
    }

    /* An offset that the whole warp shares; PRODUCTS = 2: made again from the warp's number where it is used. */
    static __device__ __forceinline__ u32 held(u32 x) { return PRODUCTS == 2 ? x : opaque_uniform(x); }

    __device__ __forceinline__ void place(u32 shared_memory)
    {
        shared = shared_memory;
        const int row = lane & 15, chunk = lane >> 4, row_b = (lane & 7) + 8 * (lane >> 4), chunk_b = lane >> 3 & 1;
        k_rows = opaque(shared + swizzled<K_BYTES>(row, chunk));
        v_rows = V_BYTES == K_BYTES ? k_rows : opaque(shared + swizzled<V_BYTES>(row, chunk));
        if (V_HALVED) v_halves = opaque(shared + swizzled<V_ROW>(row, chunk));
        q_rows = opaque(shared + swizzled<K_BYTES>(row_b, chunk_b));
        do_rows = V_BYTES == K_BYTES ? q_rows : opaque(shared + swizzled<V_BYTES>(row_b, chunk_b));
        const u32 column = COLUMN_SHARERS > 1 ? held(sharer / PRODUCTS * 32) : 0;
        q_columns = further(k_rows, column);
        do_columns = further(v_rows, column);
        keys_k = held(group * FRAGMENTS * 16 * K_BYTES);
        keys_v = V_ROW == K_BYTES ? keys_k : held(group * FRAGMENTS * 16 * V_ROW);
        keys_s = S_BYTES == K_BYTES ? keys_k : held(group * FRAGMENTS * 16 * S_BYTES);
        own_q = SHARERS > 1 ? held(sharer * OWN * K_BYTES) : 0;
        own_do = V_BYTES == K_BYTES ? own_q : SHARERS > 1 ? held(sharer * OWN * V_BYTES) : 0;
        if (!(PINNED & 256)) rows = opaque(shared + ROWS_AT + (lane & 3) * 16 + sharer * OWN * 8);
#if __CUDA_ARCH__ >= 900
        put = (SHARERS == 1 || PRODUCTS == 2) && S_BYTES == K_BYTES
                  ? k_rows + (PRODUCTS == 2 ? held(sharer * OWN * 2) : 0)
                  : opaque(shared + swizzled<S_BYTES>(row, sharer * OWN / 8 + chunk));
#else
        put = opaque(shared + swizzled<S_BYTES>(lane >> 2, sharer * OWN / 8) + (lane & 3) * 4);
#endif
        partner = opaque(shared + swizzled<S_BYTES>(row, (SHARERS - 1 - sharer) * OWN / 8 + chunk));
        const int dq_row = PAD ? dq_row_of(warp) : warp / DQ_COLUMNS * DQ_FRAGMENTS * 32, dq_column = warp % DQ_COLUMNS * 32; /* bytes */
        dq_rows = S_BYTES == K_BYTES ? further(q_rows, held(dq_row))
                                     : opaque(further(shared + swizzled<S_BYTES>(row_b, chunk_b), dq_row));
        dq_keys = further(k_rows, held(dq_column));
    }

    /* The same of dQ and of the partner, made from the lane's number where they are used (4096 of PINS): they do not live through the rest. */
    __device__ __forceinline__ void place_dq()
    {
        if (!(PINNED & 4096)) return;
        const u32 lane = lane_again(), warp = thread_index() >> 5;
        dq_rows = further(shared + swizzled<S_BYTES>((lane & 7) + 8 * (lane >> 4), lane >> 3 & 1), warp / DQ_COLUMNS * DQ_FRAGMENTS * 32);
        dq_keys = further(shared + swizzled<K_BYTES>(lane & 15, lane >> 4), warp % DQ_COLUMNS * 32);
    }
    __device__ __forceinline__ void place_partner()
    {
        if (!(PINNED & 4096)) return;
        const u32 lane = lane_again();
        partner = shared + swizzled<S_BYTES>(lane & 15, (SHARERS - 1 - sharer) * OWN / 8 + (lane >> 4));
    }

    /* ------------------------------------------------------------ copies */

    typedef Carry<TILE_K, HEAD_DIM, WARPS, PAD> CarryK;
    typedef Carry<TILE_K, V_COLUMNS, WARPS, PAD> CarryV;
    typedef Carry<TILE_Q, HEAD_DIM, WARPS, PAD> CarryQ;
    typedef Carry<TILE_Q, HEAD_DIM_V, WARPS, PAD> CarryDO;

    template <typename C> __device__ __forceinline__ void keys(const Tensor &x, u32 to, int columns, int first_column = 0)
    {
        const int row = C::row(warp, lane), chunk = C::chunk(warp, lane), first = item.tile * TILE_K + row;
        const char *from = at_row(x, item.batch, min(first, block.rows_k - 1), item.head) + 16 * chunk + 2 * first_column;
        C::some(warp, shared + to + swizzled<C::BYTES>(row, chunk), from, x.row, block.rows_k - first, (columns - first_column) / 8 - chunk);
    }

    /* The warp's number where it is seldom needed: read anew, so that no register holds it through the loop. */
    __device__ __forceinline__ u32 warp_again() const { return PAD ? thread_index() >> 5 : warp; }

    /* Of a row; without the sign, which would be found before the loop and kept. */
    static __device__ __forceinline__ int chunks(int columns) { return PAD ? (u32)columns / 8 : columns / 8; }

    /* Q_LATER: where the warp keeps its Walk. */
    __device__ __forceinline__ u32 desk() const { return shared + WALK_AT + warp_again() * Walk::BYTES; }

    /* Ask for a tile of queries: Q, dO and the front of its record, as one group of copies; Q_LATER: Q as another, after them. */
    __device__ __forceinline__ void fetch(const Walk &walk, u32 stage, u32 rows_stage)
    {
        const u32 lane = lane_again(), warp = warp_again(); /* not kept in registers through the loop */
        const u32 row_q = CarryQ::row(warp, lane), chunk_q = CarryQ::chunk(warp, lane);
        const u32 row_do = CarryDO::row(warp, lane), chunk_do = CarryDO::chunk(warp, lane);
        const u32 to_q = shared + (STAGE_AT + stage) + swizzled<K_BYTES>(row_q, chunk_q);
        const u32 to_do = shared + (STAGE_AT + Q_ROOM + stage) + swizzled<V_BYTES>(row_do, chunk_do);
        u64 first[2];
        first_rows(first);
        const char *const from_record = Q_LATER ? record(number(walk)) : nullptr; /* no load between copies: the compiler would wait for it */
        if (PAD ? (walk.tile + 1) * TILE_Q <= Known::get_plain(shared + KNOWN_AT) : plain && (walk.tile + 1) * TILE_Q <= block.rows_q) {
            if (!Q_LATER) CarryQ::all(warp, to_q, near(first[0], block.q, walk, row_q, chunk_q), block.q.row);
            CarryDO::all(warp, to_do, near(first[1], block.dout, walk, row_do, chunk_do), block.dout.row);
            if (Q_LATER) {
                fetch_record(walk, from_record, rows_stage, warp, lane);
                CarryQ::all(warp, to_q, near(first[0], block.q, walk, row_q, chunk_q), block.q.row);
            }
        } else {
            const int first_q = walk.tile * TILE_Q + row_q, first_do = walk.tile * TILE_Q + row_do, last = block.rows_q - 1;
            const char *const q = (const char *)first[0] + walk.head * block.q.head + 16 * chunk_q;
            const char *const dout = (const char *)first[1] + walk.head * block.dout.head + 16 * chunk_do;
            if (!Q_LATER)
                CarryQ::some(warp, to_q, q + min(first_q, last) * block.q.row, block.q.row, block.rows_q - first_q,
                             chunks(block.d) - (int)chunk_q);
            CarryDO::some(warp, to_do, dout + min(first_do, last) * block.dout.row, block.dout.row, block.rows_q - first_do,
                          chunks(block.dim_v) - (int)chunk_do);
            if (Q_LATER) {
                fetch_record(walk, from_record, rows_stage, warp, lane);
                CarryQ::some(warp, to_q, q + min(first_q, last) * block.q.row, block.q.row, block.rows_q - first_q,
                             chunks(block.d) - (int)chunk_q);
            }
        }
        if (Q_LATER) copies_commit();
        else fetch_record(walk, nullptr, rows_stage, warp, lane);
    }

    /* The front of a tile's record, 16 bytes a query, a lane each, or where all warps shall have a share 8: the last of a group of copies. */
    __device__ __forceinline__ void fetch_record(const Walk &walk, const char *known, u32 rows_stage, u32 warp, u32 lane)
    {
        if (PAD && 2 * TILE_Q == THREADS) {
            const u32 from = 256 * warp + 8 * lane;
            copy8(shared + (ROWS_AT + rows_stage) + from, (Q_LATER ? known : record(number(walk))) + from);
        } else if (WARPS <= TILE_Q / 32 || warp < TILE_Q / 32) {
            const u32 from = 512 * warp + 16 * lane;
            copy16(shared + (ROWS_AT + rows_stage) + from, (Q_LATER ? known : record(number(walk))) + from);
        }
        copies_commit();
    }

    /* record_of; PAD: what it adds up is Known as well. */
    __device__ __forceinline__ char *record(u32 number) const
    {
        if (!PAD) return record_of(block, number);
        if (PRODUCTS == 2) {
            u32 before = WITH_DQ ? block.tiles_q : 0;
            asm volatile("" : "+r"(before));
            return block.work + (u64)before * (block.batch * block.heads) * (SUMS * 4) + (u64)number * RECORD;
        }
        u64 records;
        asm volatile("ld.shared.b64 %0, [%1];" : "=l"(records) : "r"(shared + KNOWN_AT + Known::BYTES) : "memory");
        return (char *)records + (u64)number * RECORD;
    }

    /* This lane's first queries in the record of the tile at hand; PAD: made where it is used, a pointer less through the loop. */
    __device__ __forceinline__ const char *record_here(u32 number) const
    {
        return record(number) + ((lane_again() & 3) * 2 + sharer * OWN) * 8;
    }

    /* What is Known (KNOWN = 0: kept in registers, where 32 bytes of shared memory would cost a block of threads). */
    __device__ __forceinline__ void first_rows(u64 (&first)[2]) const
    {
        if (KNOWN) {
            Known known;
            known.get_first(shared + KNOWN_AT);
            first[0] = known.first[0], first[1] = known.first[1];
        } else {
            first[0] = first_of(block.q), first[1] = first_of(block.dout);
        }
    }

    /* The walk counts heads from here on: THROUGH, through all batches, so that the loop need not know the batch. */
    __device__ __forceinline__ int heads_before() const { return THROUGH ? item.batch * block.heads : 0; }

    /* This plus head · stride is the first row. */
    __device__ __forceinline__ u64 first_of(const Tensor &x) const
    {
        return (u64)(x.data + item.batch * x.batch - heads_before() * x.head);
    }

    __device__ __forceinline__ Item this_item() const
    {
        if (!KNOWN) return item;
        Known known;
        known.get_item(shared + KNOWN_AT);
        return {known.tile, known.head, known.batch, 0};
    }

    /* Where a row of the walk's tile and head lies, where strides are small numbers (plain). */
    __device__ __forceinline__ const char *near(u64 first, const Tensor &x, const Walk &walk, u32 row, u32 chunk) const
    {
        const char *const head = stepped((const char *)first, (int)x.head, walk.head);
        return stepped(stepped(head, (int)x.row, walk.tile * TILE_Q + row), 16, chunk);
    }

    __device__ __forceinline__ u32 number(const Walk &walk) const
    {
        return ((u32)(THROUGH ? 0 : item.batch * block.heads) + walk.head) * block.tiles_q + walk.tile;
    }

    /* ------------------------------------------------------------ one tile of queries */

    /* A fragment, 16 keys × 16 queries, to dS or P [key][query]. */
    __device__ __forceinline__ void store_fragment(u32 address, int offset, const u32 (&f)[4])
    {
#if __CUDA_ARCH__ >= 900
        stmatrix(address + offset, f);
#else
        shared_store(address + offset, f[0]);
        shared_store(address + offset + 8 * S_BYTES, f[1]);
        shared_store((address ^ 16) + offset, f[2]);
        shared_store((address ^ 16) + offset + 8 * S_BYTES, f[3]);
#endif
    }

    /* The first steps of V and of K into registers. */
    __device__ __forceinline__ void hold_v(int from)
    {
        UNROLL for (int step = 0; step < V_HELD; step++)
            UNROLL for (int m = 0; m < FRAGMENTS; m++) v_fragment(v_frag[step][m], step, m, from);
    }
    /* A fragment of V that stands at `from`; V_HALVED: of the half that does. */
    __device__ __forceinline__ void v_fragment(u32 (&a)[4], int step, int m, int from)
    {
        ldmatrix(a, along<V_ROW>(V_HALVED ? v_halves : v_rows, 2 * (V_HALVED ? step % V_KEPT : step)) + keys_v + from + m * 16 * V_ROW);
    }
    __device__ __forceinline__ void hold_k()
    {
        UNROLL for (int step = 0; step < K_HELD; step++)
            UNROLL for (int m = 0; m < FRAGMENTS; m++) ldmatrix(k_frag[step][m], along<K_BYTES>(k_rows, 2 * step) + keys_k + K_AT + m * 16 * K_BYTES);
    }

    /* Of S_FRAGMENTS fragments of keys from `first` on. */
    __device__ __forceinline__ void k_fragments(u32 (&a)[S_FRAGMENTS][4], int step, int first)
    {
        UNROLL for (int m = 0; m < S_FRAGMENTS; m++)
            if (step < K_HELD) UNROLL for (int i = 0; i < 4; i++) a[m][i] = k_frag[step < K_HELD ? step : 0][first + m][i];
            else ldmatrix(a[m], along<K_BYTES>(k_rows, 2 * step) + keys_k + K_AT + (first + m) * 16 * K_BYTES);
    }

    __device__ __forceinline__ void v_fragments(u32 (&a)[FRAGMENTS][4], int step)
    {
        UNROLL for (int m = 0; m < FRAGMENTS; m++)
            if (step < V_HELD) UNROLL for (int i = 0; i < 4; i++) a[m][i] = v_frag[step < V_HELD ? step : 0][m][i];
            else v_fragment(a[m], step, m, V_AT);
    }

    /* sum[m][·] += a[m] · (16 queries × BLOCKS n16 blocks of columns at `address`) */
    template <int BLOCKS, int BYTES>
    __device__ __forceinline__ void add_products(float (&sum)[FRAGMENTS][2 * BLOCKS][4], const u32 (&a)[FRAGMENTS][4], u32 address, u32 more)
    {
        UNROLL for (int block = 0; block < BLOCKS; block++) {
            u32 b[4];
            ldmatrix_trans(b, along<BYTES>(address, 2 * COLUMN_SHARERS * block) + more);
            UNROLL for (int m = 0; m < FRAGMENTS; m++)
                UNROLL for (int e = 0; e < 2; e++) mma(sum[m][2 * block + e], a[m], b[2 * e], b[2 * e + 1]);
        }
    }

    /* The compiler would make addresses before the loop and keep more of them than there are registers.  Those that are
     * named here change, as far as it knows, in each trip.  Which ones serve a shape best is tried out: PINS, tiles.py. */
    __device__ __forceinline__ void pin()
    {
        if (PINNED & 1) asm volatile("" : "+r"(k_rows), "+r"(q_rows));
        if (PINNED & 1 && V_HALVED) asm volatile("" : "+r"(v_halves));
        if (PINNED & 2) asm volatile("" : "+r"(put));
        if (PINNED & 4) asm volatile("" : "+r"(q_columns), "+r"(do_columns), "+r"(partner));
        if (PINNED & 8) asm volatile("" : "+r"(dq_rows), "+r"(dq_keys));
        if (V_BYTES == K_BYTES) v_rows = k_rows, do_rows = q_rows;
        if (PINNED & 256) rows = shared + ROWS_AT + (lane_again() & 3) * 16 + sharer * OWN * 8;
    }

    /* Likewise it would start loads too early: none passes a fence (16, 32, 64, 128, 2048 of PINS). */
    template <int WHICH> __device__ __forceinline__ void fence()
    {
        if (PINNED & WHICH) __syncwarp();
    }

    /* Of some queries, what S of the first S_FRAGMENTS fragments of keys leaves for that of the others: -lse, and Q of the last steps. */
    template <int QUERIES> struct Again {
        float2 minus_lse[QUERIES / 8];
        u32 q[Q_HELD ? Q_HELD : 1][QUERIES / 16][4];
    };

    /* Of PART_NOW queries from `first` of the warp's on, at q_at, and S_FRAGMENTS fragments of keys from first_m on: Sᵀ, P, dS from
     * dP, which begins at query first - first_dp of the warp's.  PRODUCTS = 2: p_frag is dS in a warp that makes dK. */
    template <bool CUT, int PART_NOW, int NOW>
    __device__ __forceinline__ void weights(u32 q_at, int first, int first_dp, int first_m, u32 rows_stage, u32 number, const char *record,
                                            int (&pos)[FRAGMENTS][2], const float (&dp)[FRAGMENTS][NOW / 8][4], Again<PART_NOW> &again,
                                            u32 (&p_frag)[PART_NOW / 16][FRAGMENTS][4], u32 (&ds_frag)[PART_NOW / 16][FRAGMENTS][4])
    {
        /* Sᵀ = K Qᵀ */
        float s[S_FRAGMENTS][PART_NOW / 8][4];
        UNROLL for (int i = 0; i < K_STEPS; i++) {
            const int step = first_m ? (i + K_STEPS - Q_HELD) % K_STEPS : i, kept = step - (K_STEPS - Q_HELD); /* first what is still there */
            u32 a[S_FRAGMENTS][4];
            k_fragments(a, step, first_m);
            UNROLL for (int n = 0; n < PART_NOW / 16; n++) {
                u32 own[4], (&b)[4] = kept < 0 ? own : again.q[kept < 0 ? 0 : kept][n];
                if (kept < 0 || first_m == 0) ldmatrix(b, along<K_BYTES>(q_rows, 2 * step) + q_at + n * 16 * K_BYTES);
                UNROLL for (int m = 0; m < S_FRAGMENTS; m++)
                    UNROLL for (int e = 0; e < 2; e++) {
                        float zero[4] = {0, 0, 0, 0};
                        mma(s[m][2 * n + e], a[m], b[2 * e], b[2 * e + 1], i ? s[m][2 * n + e] : zero);
                    }
            }
        }

        if (PAD && CUT) {
            __syncwarp(); /* nor do loads of positions and intervals */
            record = record_here(Q_LATER ? Walk::number_at(desk()) : number);
        }
        if (POSITIONS && (CUT || BURST_ALIBI)) {
            u32 from = shared + POS_AT + warp_again() / SHARERS * FRAGMENTS * 64 + (lane_again() >> 2) * 4;
            asm volatile("" : "+r"(from)); /* what follows are offsets of it */
            UNROLL for (int m = 0; m < S_FRAGMENTS; m++)
                UNROLL for (int i = 0; i < 2; i++) pos[first_m + m][i] = shared_int(from + (first_m + m) * 64 + i * 32);
        }
        UNROLL for (int n = 0; n < PART_NOW / 16; n++) {
            UNROLL for (int e = 0; e < 2; e++) {
                const int query = first + n * 16 + e * 8; /* this lane has the queries 2 (lane % 4) + 0, 1 from here */
                float2 &minus_lse = again.minus_lse[2 * n + e];
                if (first_m == 0 || SCORES) minus_lse = shared_float2(rows + rows_stage + LSE + query * 8);
                int4 sight = {0, 0, 0, 0};
                int2 at = {0, 0};
                if (CUT) sight = *(const int4 *)(record + SIGHT + query * 8);
                if (BURST_ALIBI) at = shared_int2(rows + rows_stage + LSE + 8 + query * 8);
                UNROLL for (int m = 0; m < S_FRAGMENTS; m++)
                    UNROLL for (int i = 0; i < 2; i++) { /* keys lane / 4 + 8 i */
                        const float(&x)[4] = s[m][2 * n + e], (&y)[4] = dp[first_m + m][first_dp / 8 + 2 * n + e];
                        float bend[2];
                        /* P = exp(S - lse) */
                        float p0 = scoring.weight(x[2 * i], minus_lse.x, at.x - pos[first_m + m][i], &bend[0]);
                        float p1 = scoring.weight(x[2 * i + 1], minus_lse.y, at.y - pos[first_m + m][i], &bend[1]);
                        if (CUT) {
                            p0 = (u32)(pos[first_m + m][i] - sight.x) < (u32)sight.y ? p0 : 0.f;
                            p1 = (u32)(pos[first_m + m][i] - sight.z) < (u32)sight.w ? p1 : 0.f;
                        }
                        p_frag[n][first_m + m][2 * e + i] = pack(p0, p1);
                        /* dS = P ∘ (dP - delta) */
                        float ds0 = p0 * y[2 * i], ds1 = p1 * y[2 * i + 1];
                        if (BURST_SOFTCAP) ds0 *= bend[0], ds1 *= bend[1];
                        ds_frag[n][first_m + m][2 * e + i] = pack(ds0, ds1);
                    }
            }
            const u32 to = along_s(put, first + 16 * n) + keys_s;
            UNROLL for (int m = 0; m < S_FRAGMENTS; m++) {
                if (SHARERS > 1) store_fragment(to, P_AT + (first_m + m) * 16 * S_BYTES, p_frag[n][first_m + m]);
                if (WITH_DQ || SHARERS > 1) store_fragment(to, DS_AT + (first_m + m) * 16 * S_BYTES, ds_frag[n][first_m + m]);
                if (PRODUCTS == 2) /* the one that this warp multiplies, at once: both would live until then */
                    UNROLL for (int i = 0; i < 4; i++) p_frag[n][first_m + m][i] = chosen(product(), ds_frag[n][first_m + m][i], p_frag[n][first_m + m][i]);
            }
        }
    }

    /* pos: of this lane's keys, where CUT or ALiBi. */
    template <bool CUT>
    __device__ __forceinline__ void queries(u32 stage, u32 rows_stage, u32 number, const char *record, int (&pos)[FRAGMENTS][2])
    {
        constexpr int NOW = CUT && CUT_CHUNK < AT_ONCE ? CUT_CHUNK : AT_ONCE, PART_NOW = S_AT_ONCE < NOW ? S_AT_ONCE : NOW; /* queries at once */
        if (ANEW) hold_k();
        UNROLL for (int chunk = 0; chunk < OWN / NOW; chunk++) {
            const u32 q_chunk = stage + own_q + (STAGE_AT + chunk * NOW * K_BYTES);
            const u32 do_chunk = stage + own_do + (STAGE_AT + Q_ROOM + chunk * NOW * V_BYTES);

            fence<16>();
            /* dPᵀ = V dOᵀ - delta */
            float dp[FRAGMENTS][NOW / 8][4];
            UNROLL for (int step = 0; step < V_STEPS; step++) {
                u32 a[FRAGMENTS][4];
                v_fragments(a, step);
                UNROLL for (int n = 0; n < NOW / 16; n++) {
                    u32 b[4];
                    ldmatrix(b, along<V_BYTES>(do_rows, 2 * step) + do_chunk + n * 16 * V_BYTES);
                    UNROLL for (int e = 0; e < 2; e++) {
                        float minus_delta[4] = {0, 0, 0, 0};
                        const u32 delta = rows + rows_stage + DELTA + (chunk * NOW + n * 16 + e * 8) * 8;
                        if (step == 0 && PAIRS) {
                            const float2 pair = shared_float2(delta);
                            minus_delta[0] = minus_delta[2] = pair.x, minus_delta[1] = minus_delta[3] = pair.y;
                        } else if (step == 0) {
                            shared_float4(minus_delta, delta);
                        }
                        UNROLL for (int m = 0; m < FRAGMENTS; m++)
                            mma(dp[m][2 * n + e], a[m], b[2 * e], b[2 * e + 1], step ? dp[m][2 * n + e] : minus_delta);
                    }
                }
            }

            if (Q_LATER && chunk == 0) {
                copies_wait<0>();
                __syncthreads();
            }
            UNROLL for (int part = 0; part < NOW / PART_NOW; part++) {
                const int first = chunk * NOW + part * PART_NOW; /* of the warp's queries */
                fence<32>();
                u32 p_frag[PART_NOW / 16][FRAGMENTS][4], ds_frag[PART_NOW / 16][FRAGMENTS][4];
                Again<PART_NOW> again;
                UNROLL for (int first_m = 0; first_m < FRAGMENTS; first_m += S_FRAGMENTS)
                    weights<CUT, PART_NOW, NOW>(q_chunk + part * PART_NOW * K_BYTES, first, part * PART_NOW, first_m, rows_stage, number, record, pos, dp, again,
                                                p_frag, ds_frag);
                fence<64>();
                if (PRODUCTS == 2) {
                    UNROLL for (int n = 0; n < PART_NOW / 16; n++)
                        add_products<K_BLOCKS, K_BYTES>(dk, p_frag[n], q_columns, other_factor() + own_q + (first + n * 16) * K_BYTES);
                } else {
                    /* dV += Pᵀ dO */
                    UNROLL for (int n = 0; n < PART_NOW / 16; n++)
                        add_products<V_BLOCKS, V_BYTES>(dv, p_frag[n], do_columns,
                                                        stage + own_do + (STAGE_AT + Q_ROOM + (first + n * 16) * V_BYTES));
                    /* dK += dSᵀ Q */
                    UNROLL for (int n = 0; n < PART_NOW / 16; n++)
                        add_products<K_BLOCKS, K_BYTES>(dk, ds_frag[n], q_columns,
                                                        stage + own_q + (STAGE_AT + (first + n * 16) * K_BYTES));
                }
            }
        }
    }

    /* SHARERS = 2: dV += Pᵀ dO and dK += dSᵀ Q of the queries whose P and dS the partner has made. */
    __device__ __forceinline__ void partners_queries(u32 stage)
    {
        place_partner();
        const u32 its_do = stage - own_do + (STAGE_AT + Q_ROOM + OWN * V_BYTES), its_q = stage - own_q + (STAGE_AT + OWN * K_BYTES);
        UNROLL for (int n = 0; n < OWN / 16; n++) {
            u32 p_frag[FRAGMENTS][4];
            UNROLL for (int m = 0; m < FRAGMENTS; m++)
                ldmatrix(p_frag[m], along_s(partner, 16 * n) + keys_s + P_AT + m * 16 * S_BYTES);
            add_products<V_BLOCKS, V_BYTES>(dv, p_frag, do_columns, its_do + n * 16 * V_BYTES);
        }
        UNROLL for (int n = 0; n < OWN / 16; n++) {
            u32 ds_frag[FRAGMENTS][4];
            UNROLL for (int m = 0; m < FRAGMENTS; m++)
                ldmatrix(ds_frag[m], along_s(partner, 16 * n) + keys_s + DS_AT + m * 16 * S_BYTES);
            add_products<K_BLOCKS, K_BYTES>(dk, ds_frag, q_columns, its_q + n * 16 * K_BYTES);
        }
    }

    /* PRODUCTS = 2: whether this warp makes dK, and where Q or dO begin, the other factor of its product. */
    __device__ __forceinline__ bool product() const { return sharer & 1; }
    __device__ __forceinline__ u32 other_factor() const { return product() ? STAGE_AT : STAGE_AT + Q_ROOM; }

    /* PRODUCTS = 2: dV += Pᵀ dO or dK += dSᵀ Q of the queries whose P and dS the other warps with these keys have made. */
    __device__ __forceinline__ void others_queries()
    {
        UNROLL for (int i = 1; i < SHARERS; i++) {
            const u32 query = (sharer ^ i) * OWN;
            const u32 rows = (product() ? DS_AT : P_AT) + keys_s + query % S_COLUMNS * 2 + query / S_COLUMNS * PANEL;
            UNROLL for (int n = 0; n < OWN / 16; n++) {
                u32 a[FRAGMENTS][4];
                UNROLL for (int m = 0; m < FRAGMENTS; m++) ldmatrix(a[m], k_rows + rows + n * 32 + m * 16 * S_BYTES);
                add_products<K_BLOCKS, K_BYTES>(dk, a, q_columns, other_factor() + query * K_BYTES + n * 16 * K_BYTES);
            }
        }
    }

    /* dQ += dS K, over all keys of the tile: this warp's rows and columns, to the sums of the tile. */
    __device__ __forceinline__ void add_dq(u32 number)
    {
        fence<2048>();
        const u32 mine = warp_again() * (SUMS / DQ_WARPS) + lane_again() * (WIDE_RED ? 4 : 1);
        float *const sums = sums_of(block, number) + mine;
        if (PAD && S_BYTES == K_BYTES) dq_rows = q_rows + dq_row_of(warp_again()), dq_keys = k_rows + warp_again() % DQ_COLUMNS * 32;
        place_dq();
        constexpr int TAKEN = DQ_BLOCKS > DQ_PART ? DQ_PART : DQ_BLOCKS; /* blocks at once */
        UNROLL for (int start = 0; start < DQ_BLOCKS; start += TAKEN) {
            float dq[DQ_FRAGMENTS][2 * TAKEN][4];
            UNROLL for (int step = 0; step < TILE_K / 16; step++) {
                if (step % 2 == 0) fence<128>();
                u32 a[DQ_FRAGMENTS][4];
                UNROLL for (int m = 0; m < DQ_FRAGMENTS; m++)
                    ldmatrix_trans(a[m], along_s(dq_rows, 16 * m) + DS_AT + step * 16 * S_BYTES);
                UNROLL for (int n = 0; n < TAKEN; n++) {
                    u32 b[4];
                    ldmatrix_trans(b, along<K_BYTES>(dq_keys, 2 * DQ_COLUMNS * (start + n)) + K_AT + step * 16 * K_BYTES);
                    UNROLL for (int m = 0; m < DQ_FRAGMENTS; m++)
                        UNROLL for (int e = 0; e < 2; e++) {
                            float zero[4] = {0, 0, 0, 0};
                            mma(dq[m][2 * n + e], a[m], b[2 * e], b[2 * e + 1], step ? dq[m][2 * n + e] : zero);
                        }
                }
            }
            UNROLL for (int m = 0; m < DQ_FRAGMENTS; m++)
                UNROLL for (int n = 0; n < 2 * TAKEN; n++) {
                    float(&f)[4] = dq[m][n];
                    float *const to = sums + (m * 2 * DQ_BLOCKS + 2 * start + n) * 128;
#if __CUDA_ARCH__ >= 900
                    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};"
                                 :: "l"(to), "f"(f[0]), "f"(f[1]), "f"(f[2]), "f"(f[3]) : "memory");
#else
                    UNROLL for (int i = 0; i < 4; i++) asm volatile("red.global.add.f32 [%0], %1;" :: "l"(to + 32 * i), "f"(f[i]) : "memory");
#endif
                }
        }
    }

    /* ------------------------------------------------------------ dK, dV */

    template <int BLOCKS>
    __device__ __forceinline__ void store(const Tensor &x, const float (&sum)[FRAGMENTS][2 * BLOCKS][4], int columns, float factor)
    {
        const Item item = this_item(); /* what the loop has not kept */
        const u32 thread = thread_index(), lane = thread & 31, group = thread / (32 * SHARERS), sharer = thread / 32 % SHARERS / PRODUCTS;
        UNROLL for (int m = 0; m < FRAGMENTS; m++)
            UNROLL for (int i = 0; i < 2; i++) {
                const int key = item.tile * TILE_K + (group * FRAGMENTS + m) * 16 + (lane >> 2) + 8 * i;
                if (key >= block.rows_k) continue;
                float *const row = (float *)at_row(x, item.batch, key, item.head) + 2 * (lane & 3);
                UNROLL for (int n = 0; n < 2 * BLOCKS; n++) {
                    const int column = ((n >> 1) * COLUMN_SHARERS + sharer) * 16 + (n & 1) * 8;
                    if (column >= columns) continue;
                    float2 *const to = (float2 *)(row + column);
                    float2 y = {sum[m][n][2 * i] * factor, sum[m][n][2 * i + 1] * factor};
                    if (!block.fresh_kv) {
                        const float2 old = *to;
                        y.x += old.x, y.y += old.y;
                    }
                    *to = y;
                }
            }
    }
};

/* ---------------------------------------------------------------- the kernels */

template <bool VALUE> struct Cut {
    static constexpr bool value = VALUE;
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) backward(const __grid_constant__ Block block)
{
    extern __shared__ __align__(1024) char shared_memory[];
    Warp w(block);
    w.lane = threadIdx.x & 31;
    w.warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    w.group = w.warp / SHARERS, w.sharer = w.warp % SHARERS;
    w.item = work_item(block, blockIdx.x, block.kv_heads, block.tiles_k, 1);
    w.place(shared_address(shared_memory));
    w.plain = block.d == HEAD_DIM && block.dim_v == HEAD_DIM_V &&
              ((block.q.row | block.q.head | block.dout.row | block.dout.head) >> 25) == 0;
    UNROLL for (int m = 0; m < FRAGMENTS; m++) {
        UNROLL for (int n = 0; n < 2 * K_BLOCKS; n++) UNROLL for (int i = 0; i < 4; i++) w.dk[m][n][i] = 0;
        UNROLL for (int n = 0; n < 2 * V_BLOCKS; n++) UNROLL for (int i = 0; i < 4; i++) w.dv[m][n][i] = 0;
    }

    const int group = block.heads / block.kv_heads;
    const int first_head = w.heads_before() + w.item.head * group, end_head = first_head + group;
    if (KNOWN) {
        if (threadIdx.x == 0) {
            const Known known = {{w.first_of(block.q), w.first_of(block.dout)}, w.plain ? block.rows_q : 0, w.item.tile, w.item.head, w.item.batch};
            known.put(w.shared + KNOWN_AT);
            if (PAD) asm volatile("st.shared.b64 [%0], %1;" :: "r"(w.shared + KNOWN_AT + Known::BYTES), "l"(record_of(block, 0)) : "memory");
        }
        __syncthreads();
    }
    auto look = [&](int base) {
        const int tile = KNOWN ? Known::get_tile(w.shared + KNOWN_AT) : w.item.tile;
        return look_at_queries(block, block.extent[tile], (tile + 1) * TILE_K <= block.rows_k, base, block.tiles_q);
    };
    auto heads = [&]() { /* first and end of those that are walked over */
        if (PRODUCTS == 1) return int2{first_head, end_head};
        const Item item = w.this_item();
        const int size = block.heads / block.kv_heads, first = (THROUGH ? item.batch * block.heads : 0) + item.head * size;
        return int2{first, first + size};
    };
    Walk walk(first_head);
    bool more = walk.next(block.tiles_q, heads, look);
    if (more) {
        /* K and V; what stays in registers */
        w.keys<Warp::CarryV>(block.v, V_COMES_AT, block.dim_v);
        if (V_HALVED) w.keys<Warp::CarryV>(block.v, V_AT, block.dim_v, V_COLUMNS);
        if (!V_STAYS || V_BESIDE_K) w.keys<Warp::CarryK>(block.k, K_AT, block.d);
        copies_commit();
        if (V_HELD || (K_HELD && !ANEW)) {
            copies_wait<0>();
            __syncthreads();
            w.hold_v(V_COMES_AT);
            if (V_STAYS || V_HALVED) __syncthreads();
            if (V_STAYS && !V_BESIDE_K) {
                w.keys<Warp::CarryK>(block.k, K_AT, block.d);
                copies_commit();
                copies_wait<0>();
                __syncthreads();
            }
            if (!ANEW) w.hold_k();
        }
        auto position = [&](int i) { /* of the tile's key i; none that is not there is ever seen */
            const int key = w.item.tile * TILE_K + i;
            return key < block.rows_k ? block.pos[key] : -2147483647 - 1;
        };
        int pos[FRAGMENTS][2]; /* of this lane's keys */
        if (POSITIONS) {
            for (int i = threadIdx.x; i < TILE_K; i += THREADS) shared_store(w.shared + POS_AT + 4 * i, position(i));
        } else {
            UNROLL for (int m = 0; m < FRAGMENTS; m++)
                UNROLL for (int i = 0; i < 2; i++) pos[m][i] = position((w.group * FRAGMENTS + m) * 16 + (w.lane >> 2) + 8 * i);
        }
        u32 stage = 0, rows_stage = 0;
        w.fetch(walk, stage, rows_stage);
        if (Q_LATER) walk.put(w.desk(), w.number(walk));

        auto step = [&](auto cut) {
            copies_wait<Q_LATER>();
            __syncthreads();
            w.pin();
            u32 number = Q_LATER ? walk.get(w.desk()) : w.number(walk);
            if (BURST_ALIBI) w.scoring.of_head(block, walk.head % block.heads);
            if (!decltype(cut)::value && PINNED & 512) walk.cut = false; /* it is: the compiler now knows */
            if (!Q_LATER) more = walk.next(block.tiles_q, heads, look);
            if (STAGES == 2 && more) w.fetch(walk, stage ^ STAGE, rows_stage ^ ROWS_ROOM);
            w.queries<decltype(cut)::value>(stage, rows_stage, number, PAD ? nullptr : w.record_here(number), pos);
            if (MIDDLE_BARRIER) __syncthreads();
            if (PRODUCTS == 2) w.others_queries();
            else if (SHARERS > 1) w.partners_queries(stage);
            if (STAGES == 1) {
                if (SHARERS > 1) __syncthreads();
                if (Q_LATER) {
                    number = walk.get(w.desk());
                    more = walk.next(block.tiles_q, heads, look);
                    __syncwarp();
                    walk.put(w.desk(), w.number(walk));
                }
                if (more) w.fetch(walk, 0, 0);
            }
            if (WITH_DQ && (DQ_WARPS == WARPS || w.warp < DQ_WARPS)) w.add_dq(number);
            if (STAGES == 2) stage ^= STAGE, rows_stage ^= ROWS_ROOM;
        };
        NO_UNROLL while (more && walk.cut) step(Cut<true>());
        NO_UNROLL while (more) step(Cut<false>());
    }
    if (PRODUCTS == 1 || w.product()) w.store<K_BLOCKS>(block.dk, w.dk, block.d, (float)block.scale);
    if (PRODUCTS == 1) w.store<V_BLOCKS>(block.dv, w.dv, block.dim_v, 1);
    else if (!w.product()) w.store<K_BLOCKS>(block.dv, w.dk, block.dim_v, 1);
}

/* lse, delta and the intervals of a tile of queries as its record: rows that are not there have -lse = -inf. */
extern "C" __global__ void __launch_bounds__(THREADS) backward_prepare(const __grid_constant__ Block block)
{
    const u32 item = blockIdx.x;
    const int tile = item % (u32)block.tiles_q, pair = item / (u32)block.tiles_q;
    const int head = pair % block.heads, batch = pair / block.heads;
    char *const record = record_of(block, item);
    const float inf = __int_as_float(0x7f800000);
    for (int i = 2 * threadIdx.x; i < TILE_Q; i += 2 * THREADS) {
        float lse[2] = {-inf, -inf}, delta[2] = {0, 0};
        int at[2] = {0, 0}, lo[2] = {0, 0}, length[2] = {0, 0};
        UNROLL for (int j = 0; j < 2; j++) {
            const int row = tile * TILE_Q + i + j;
            if (row < block.rows_q) {
                const float x = *at_row(block.lse, batch, head, row);
                lse[j] = x == -inf ? -inf : -x * (float)LOG2_E;
                delta[j] = -*at_row(block.delta, batch, head, row);
                at[j] = block.at[row], lo[j] = block.lo[row], length[j] = block.hi[row] - lo[j];
            }
        }
        *(float4 *)(record + DELTA + i * 8) = {delta[0], delta[1], delta[0], delta[1]};
        *(float4 *)(record + LSE + i * 8) = {lse[0], lse[1], __int_as_float(at[0]), __int_as_float(at[1])};
        *(int4 *)(record + SIGHT + i * 8) = {lo[0], length[0], lo[1], length[1]};
    }
}

#if WITH_DQ
/* dq = scale · sums, or dq += scale · sums: from the order of fragments to rows. */
extern "C" __global__ void __launch_bounds__(THREADS) backward_fold(const __grid_constant__ Block block)
{
    const u32 item = blockIdx.x;
    const int tile = item % (u32)block.tiles_q, pair = item / (u32)block.tiles_q;
    const int head = pair % block.heads, batch = pair / block.heads;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (warp >= DQ_WARPS) return;
    const float *const sums = sums_of(block, item) + warp * (SUMS / DQ_WARPS) + lane * (WIDE_RED ? 4 : 1);
    UNROLL for (int m = 0; m < DQ_FRAGMENTS; m++)
        UNROLL for (int n = 0; n < 2 * DQ_BLOCKS; n++) {
            const int column = ((n >> 1) * DQ_COLUMNS + warp % DQ_COLUMNS) * 16 + (n & 1) * 8;
            if (column >= block.d) continue;
            const float *const from = sums + (m * 2 * DQ_BLOCKS + n) * 128;
            float f[4];
            if (WIDE_RED) {
                const float4 x = *(const float4 *)from;
                f[0] = x.x, f[1] = x.y, f[2] = x.z, f[3] = x.w;
            } else {
                UNROLL for (int i = 0; i < 4; i++) f[i] = from[32 * i];
            }
            UNROLL for (int i = 0; i < 2; i++) {
                const int row = tile * TILE_Q + (warp / DQ_COLUMNS * DQ_FRAGMENTS + m) * 16 + (lane >> 2) + 8 * i;
                if (row >= block.rows_q) continue;
                float2 *const to = (float2 *)((float *)at_row(block.dq, batch, row, head) + column + 2 * (lane & 3));
                float2 y = {f[2 * i] * (float)block.scale, f[2 * i + 1] * (float)block.scale};
                if (!block.fresh_q) {
                    const float2 old = *to;
                    y.x += old.x, y.y += old.y;
                }
                *to = y;
            }
        }
}
#endif
