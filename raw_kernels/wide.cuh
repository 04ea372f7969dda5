/* Products of tiles in shared memory, for float32 and float64.
 *
 *   dot_rows      C[m][n] += sum_k A[m][k] B[n][k]      S = Q K', dP = dO V'
 *   times_rows    C[m][n] += sum_k A[m][k] B[k][n]      O = P V, dQ = dS K
 *   turned_rows   C[m][n] += sum_k A[k][m] B[k][n]      dV = P' dO, dK = dS' Q
 *
 * A Layout cuts an M x N result among WM x WN warps, and a warp's part among its lanes:
 *
 *   DMMA 0   lanes 4 x 8 (y, x), RM x RN numbers a lane, FMA.  k goes up one by one in every product, so that S has the
 *            same bits in forward and backward.
 *              rows    dot, times: y + 4i             turned: VEC adjacent ones, y after y
 *              columns dot: x + 8j                    times, turned: VEC adjacent ones, x after x
 *            16-byte loads.  y is bits 0 and 4 of the lane, x bits 1 to 3: half a warp reads two addresses of A, and of B 8 rows
 *            of one 16-byte column (rows are 16 bytes more than a multiple of 128 apart: all banks) or 128 bytes side by side;
 *            lanes i and i^1 (of B) or i^2 (of A) read the same, which lets a GPU serve 16 lanes at once.
 *   DMMA 1   mma.m8n8k4.f64 (m16n8k16 from sm_90 on): C reg (i, j): row 8i + lane/4, column 8(j/2) + 2(lane%4) + j%2.
 *            A reg row lane/4, k lane%4; B reg k lane%4, column lane/4: 8-byte loads, half a warp reads 4 rows of 32 bytes
 *            (rows are 32 bytes more than a multiple of 128 apart: all banks), whichever way round.
 *
 * Scores are kept in their natural unit: s = scale · (q . k), e^x = 2^(x log2 e) with x = s - m exact where s is near m, so
 * that backward finds P = 1 where forward had it.
 */
#ifndef BURST_WIDE_CUH
#define BURST_WIDE_CUH

#include "ptx.cuh"
#include "scores.h"
#include "sight.cuh"
#include "order.cuh"

static_assert(TYPE == FLOAT64 || TYPE == FLOAT32, "float32 and float64 only");
static_assert(!DMMA || TYPE == FLOAT64, "DMMA is of float64");

#define THREADS (32 * WARPS)
#if __CUDA_ARCH__ >= 900
#define SM_90 1 /* mma.m16n8k16.f64 and red.v4.f32 */
#else
#define SM_90 0
#endif
constexpr int ITEM = sizeof(REAL), VEC = 16 / ITEM;

/* Bytes from row to row of an operand with n columns, and of P and dS, which are written in fragments. */
constexpr int whole_lines(int n) { return (n * ITEM + 127) / 128 * 128; }
constexpr int row_stride(int n) { return whole_lines(n) + (DMMA ? 32 : 16); }
constexpr int p_stride(int n) { return whole_lines(n) + (DMMA || ITEM == 4 ? 32 : 64); }

struct alignas(16) Vec {
    REAL x[VEC];
};

template <int N> struct alignas(N * sizeof(REAL)) Part {
    REAL x[N];
};

template <int N> DEVICE Part<N> load_part(const char *p) { return *(const Part<N> *)p; }

#define LANE ((int)(threadIdx.x & 31))
#if DMMA
#define LANE_X (LANE % 4) /* along a row */
#else
#define LANE_X (LANE >> 1 & 7)
#define LANE_Y ((LANE & 1) + (LANE >> 4) * 2)
#endif
#define WARP ((int)(threadIdx.x >> 5))

constexpr int adjacent(int n) { return n % VEC == 0 ? VEC : n % 2 == 0 ? 2 : 1; }

template <int M_, int N_, int WM_, int WN_> struct Layout {
    static constexpr int M = M_, N = N_, WM = WM_, WN = WN_;
    static constexpr int ROWS = M / WM, COLUMNS = N / WN; /* of a warp */
#if DMMA
    static constexpr int RM = ROWS / 8, RN = COLUMNS / 4, STEP = 2; /* STEP: adjacent columns of a lane */
    static_assert(ROWS % 8 == 0 && COLUMNS % 8 == 0 && M % WM == 0 && N % WN == 0, "the warps do not fit the tile");
#else
    static constexpr int RM = ROWS / 4, RN = COLUMNS / 8, STEP = adjacent(RN), RSTEP = adjacent(RM);
    static_assert(ROWS % 4 == 0 && COLUMNS % 8 == 0 && M % WM == 0 && N % WN == 0, "the warps do not fit the tile");
#endif
    static_assert(WM * WN <= WARPS, "more parts than warps");
    typedef REAL Frag[RM][RN];

    DEVICE bool mine() { return WM * WN == WARPS || WARP < WM * WN; }
    DEVICE int first_row() { return WARP / WN * ROWS; }
    DEVICE int first_column() { return WN == 1 ? 0 : WARP % WN * COLUMNS; }

#if DMMA
    DEVICE int row(int i) { return first_row() + 8 * i + LANE / 4; }
    DEVICE int turned_row(int i) { return row(i); }
    DEVICE int column(int j) { return first_column() + j / 2 * 8 + LANE % 4 * 2 + j % 2; }
    DEVICE int spread_column(int j) { return column(j); }
#else
    DEVICE int row(int i) { return first_row() + LANE_Y + 4 * i; }
    DEVICE int turned_row(int i) { return first_row() + i / RSTEP * 4 * RSTEP + LANE_Y * RSTEP + i % RSTEP; }
    DEVICE int column(int j) { return first_column() + j / STEP * 8 * STEP + LANE_X * STEP + j % STEP; }
    DEVICE int spread_column(int j) { return first_column() + LANE_X + 8 * j; } /* of dot_rows */
#endif
};

template <int RM, int RN> DEVICE void set_zero(REAL (&c)[RM][RN])
{
    UNROLL for (int i = 0; i < RM; i++) UNROLL for (int j = 0; j < RN; j++) c[i][j] = 0;
}

/* ---------------------------------------------------------------- products */
#if DMMA

/* c += a b: 8 RM x 4 RN x 16; a[s][i]: k step s, rows 8i...; b[s][j] */
template <int RM, int RN>
DEVICE void dmma(REAL (&c)[RM][RN], const REAL (&a)[4][RM], const REAL (&b)[4][RN / 2])
{
    if constexpr (SM_90 && RM % 2 == 0) {
        UNROLL for (int i = 0; i < RM; i += 2) UNROLL for (int j = 0; j < RN / 2; j++)
            asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,%11}, "
                "{%12,%13,%14,%15}, {%0,%1,%2,%3};"
                : "+d"(c[i][2 * j]), "+d"(c[i][2 * j + 1]), "+d"(c[i + 1][2 * j]), "+d"(c[i + 1][2 * j + 1])
                : "d"(a[0][i]), "d"(a[0][i + 1]), "d"(a[1][i]), "d"(a[1][i + 1]), "d"(a[2][i]), "d"(a[2][i + 1]),
                  "d"(a[3][i]), "d"(a[3][i + 1]), "d"(b[0][j]), "d"(b[1][j]), "d"(b[2][j]), "d"(b[3][j]));
    } else {
        UNROLL for (int s = 0; s < 4; s++) UNROLL for (int i = 0; i < RM; i++) UNROLL for (int j = 0; j < RN / 2; j++)
            asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                : "+d"(c[i][2 * j]), "+d"(c[i][2 * j + 1]) : "d"(a[s][i]), "d"(b[s][j]));
    }
}

template <int N> DEVICE void load_frag(REAL (&x)[N], const char *p, int step)
{
    UNROLL for (int i = 0; i < N; i++) x[i] = *(const REAL *)(p + i * step);
}

/* A fragment's 8 rows lie SA apart and k side by side, or the other way round. */
template <class L, int DEPTH, int SA, int SB, bool A_TURNED, bool B_TURNED>
DEVICE void product(typename L::Frag &c, const char *a, const char *b)
{
    static_assert(DEPTH % 16 == 0, "k goes in steps of 16");
    a += A_TURNED ? L::first_row() * ITEM + LANE / 4 * ITEM + LANE % 4 * SA : (L::first_row() + LANE / 4) * SA + LANE % 4 * ITEM;
    b += B_TURNED ? L::first_column() * ITEM + LANE / 4 * ITEM + LANE % 4 * SB : (L::first_column() + LANE / 4) * SB + LANE % 4 * ITEM;
    NO_UNROLL for (int k = 0; k < DEPTH; k += 16) {
        REAL x[4][L::RM], y[4][L::RN / 2];
        UNROLL for (int s = 0; s < 4; s++) {
            load_frag<L::RM>(x[s], a + (A_TURNED ? 4 * s * SA : 4 * s * ITEM), A_TURNED ? 8 * ITEM : 8 * SA);
            load_frag<L::RN / 2>(y[s], b + (B_TURNED ? 4 * s * SB : 4 * s * ITEM), B_TURNED ? 8 * ITEM : 8 * SB);
        }
        dmma<L::RM, L::RN>(c, x, y);
        a += A_TURNED ? 16 * SA : 16 * ITEM;
        b += B_TURNED ? 16 * SB : 16 * ITEM;
    }
}

template <class L, int DEPTH, int SA, int SB> DEVICE void dot_rows(typename L::Frag &c, const char *a, const char *b)
{
    product<L, DEPTH, SA, SB, false, false>(c, a, b);
}
template <class L, int DEPTH, int SA, int SB> DEVICE void times_rows(typename L::Frag &c, const char *a, const char *b)
{
    product<L, DEPTH, SA, SB, false, true>(c, a, b);
}
template <class L, int DEPTH, int SA, int SB> DEVICE void turned_rows(typename L::Frag &c, const char *a, const char *b)
{
    product<L, DEPTH, SA, SB, true, true>(c, a, b);
}

/* x at its place in P or dS.  Odd rows write the right column of a pair first: 4 rows, 32 bytes apart, then fill all banks. */
template <class L, int S> DEVICE void store_frag(char *p, const typename L::Frag &x)
{
    const bool odd = LANE / 4 % 2;
    p += L::row(0) * S + L::spread_column(0) * ITEM;
    UNROLL for (int i = 0; i < L::RM; i++) UNROLL for (int j = 0; j < L::RN; j += 2) {
        char *at = p + 8 * i * S + 4 * j * ITEM;
        *(REAL *)(at + (odd ? ITEM : 0)) = odd ? x[i][j + 1] : x[i][j];
        *(REAL *)(at + (odd ? 0 : ITEM)) = odd ? x[i][j] : x[i][j + 1];
    }
}

/* The bits of a lane that tell apart those that hold a row: a quad. */
#define FIRST_LANE_BIT 1
#define END_LANE_BIT 4

#else

template <class L, int DEPTH, int SA, int SB> DEVICE void dot_rows(typename L::Frag &c, const char *a, const char *b)
{
    a += (L::first_row() + LANE_Y) * SA;
    b += (L::first_column() + LANE_X) * SB;
    _Pragma("unroll (L::RM * L::RN >= 32 ? 1 : 2)") for (int k = 0; k < DEPTH; k += VEC) {
        Vec y[L::RN];
        UNROLL for (int j = 0; j < L::RN; j++) y[j] = *(const Vec *)(b + 8 * j * SB + k * ITEM);
        UNROLL for (int i = 0; i < L::RM; i++) {
            const Vec x = *(const Vec *)(a + 4 * i * SA + k * ITEM);
            UNROLL for (int v = 0; v < VEC; v++) UNROLL for (int j = 0; j < L::RN; j++)
                c[i][j] = fma(x.x[v], y[j].x[v], c[i][j]);
        }
    }
}

template <class L, int DEPTH, int SA, int SB> DEVICE void times_rows(typename L::Frag &c, const char *a, const char *b)
{
    constexpr int STEP = L::STEP;
    a += (L::first_row() + LANE_Y) * SA;
    b += (L::first_column() + LANE_X * STEP) * ITEM;
    NO_UNROLL for (int k = 0; k < DEPTH; k += VEC) {
        Vec x[L::RM];
        UNROLL for (int i = 0; i < L::RM; i++) x[i] = *(const Vec *)(a + 4 * i * SA + k * ITEM);
        UNROLL for (int v = 0; v < VEC; v++) UNROLL for (int j = 0; j < L::RN; j += STEP) {
            const Part<STEP> y = load_part<STEP>(b + (k + v) * SB + j * 8 * ITEM);
            UNROLL for (int i = 0; i < L::RM; i++) UNROLL for (int e = 0; e < STEP; e++)
                c[i][j + e] = fma(x[i].x[v], y.x[e], c[i][j + e]);
        }
    }
}

template <class L, int DEPTH, int SA, int SB> DEVICE void turned_rows(typename L::Frag &c, const char *a, const char *b)
{
    constexpr int STEP = L::STEP, RSTEP = L::RSTEP;
    a += (L::first_row() + LANE_Y * RSTEP) * ITEM;
    b += (L::first_column() + LANE_X * STEP) * ITEM;
    _Pragma("unroll 4") for (int k = 0; k < DEPTH; k++) {
        REAL x[L::RM];
        UNROLL for (int i = 0; i < L::RM; i += RSTEP) {
            const Part<RSTEP> part = load_part<RSTEP>(a + k * SA + i * 4 * ITEM);
            UNROLL for (int e = 0; e < RSTEP; e++) x[i + e] = part.x[e];
        }
        UNROLL for (int j = 0; j < L::RN; j += STEP) {
            const Part<STEP> y = load_part<STEP>(b + k * SB + j * 8 * ITEM);
            UNROLL for (int i = 0; i < L::RM; i++) UNROLL for (int e = 0; e < STEP; e++)
                c[i][j + e] = fma(x[i], y.x[e], c[i][j + e]);
        }
    }
}

/* x at its place in P or dS. */
template <class L, int S> DEVICE void store_frag(char *p, const typename L::Frag &x)
{
    p += L::row(0) * S + L::spread_column(0) * ITEM;
    UNROLL for (int i = 0; i < L::RM; i++) UNROLL for (int j = 0; j < L::RN; j++)
        *(REAL *)(p + 4 * i * S + 8 * j * ITEM) = x[i][j];
}

#define FIRST_LANE_BIT 2
#define END_LANE_BIT 16

#endif

/* ---------------------------------------------------------------- rows and numbers */

DEVICE REAL row_max(REAL x)
{
    UNROLL for (int s = FIRST_LANE_BIT; s < END_LANE_BIT; s *= 2) x = max(x, __shfl_xor_sync(~0u, x, s));
    return x;
}

DEVICE REAL row_sum(REAL x)
{
    UNROLL for (int s = FIRST_LANE_BIT; s < END_LANE_BIT; s *= 2) x += __shfl_xor_sync(~0u, x, s);
    return x;
}

DEVICE float infinity_of(float) { return __int_as_float(0x7f800000); }
DEVICE double infinity_of(double) { return __longlong_as_double(0x7ff0000000000000ll); }
#define INF infinity_of((REAL)0)

/* e^x, x <= 0 but for roundings.  t = x log2 e is rounded, which costs |x| / 2 units in the last place of 2^t; what it lost is
 * put back to first order, e^x = 2^t (1 + (x - t ln 2)).  Below -104 (and at -inf) 2^t is 0 and x - t ln 2 must be finite. */
DEVICE float exp_of(float x)
{
    x = x < -104.f ? -104.f : x; /* a NaN stays one */
    const float t = x * 1.4426950408889634f, y = exp2_fast(t);
    return fmaf(y, fmaf(t, -0.69314718055994531f, x), y);
}
DEVICE double exp_of(double x) { return exp(x); }
DEVICE float log_of(float x) { return logf(x); }
DEVICE double log_of(double x) { return log(x); }

/* ---------------------------------------------------------------- copies */

/* Rows first..first+ROWS of x to shared memory; zeros beyond `rows` and beyond `columns`. */
template <int ROWS, int COLUMNS, int S>
DEVICE void load_tile(const char *to, const Tensor &x, int batch, int head, int first, int rows, int columns)
{
    constexpr int CHUNKS = COLUMNS / VEC;
    const u32 shared = shared_address(to);
    const char *from = at_row(x, batch, first, head);
    NO_UNROLL for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool there = first + row < rows && chunk * VEC < columns;
        copy16_or_zero(shared + row * S + chunk * 16, there ? from + row * x.row + chunk * 16 : x.data, there);
    }
}

/* One REAL, into this thread's group of copies. */
DEVICE void copy_item(u32 shared, const REAL *global)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(shared), "l"(global), "n"(ITEM) : "memory");
#else
    *(REAL *)__cvta_shared_to_generic(shared) = *global;
#endif
}

/* Four sums at once, where the hardware can. */
DEVICE void add_global(char *to, REAL a, REAL b, REAL c, REAL d)
{
#if SM_90 && TYPE == FLOAT32
    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" :: "l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#endif
}

/* ---------------------------------------------------------------- scores */

struct Scoring {
    REAL scale, softcap, slope;
};

DEVICE Scoring scoring_of(const Block &block, int head)
{
    Scoring s = {(REAL)block.scale, (REAL)block.softcap, 0};
#if BURST_ALIBI
    s.slope = block.slopes[head];
#endif
    return s;
}

/* Products in, scores out; -inf where CUT and the pair is not visible.  `bent` gets d cap(x)/dx where SOFTCAP. */
template <class L>
DEVICE void score(typename L::Frag &s, typename L::Frag *bent, const Block &block, const Scoring &how, int first_q, int first_k, bool cut)
{
#if BURST_ALIBI || BURST_SOFTCAP
    int pos[L::RN];
    UNROLL for (int j = 0; j < L::RN; j++) {
        const int key = first_k + L::spread_column(j);
        pos[j] = BURST_ALIBI && key < block.rows_k ? block.pos[key] : 0;
    }
    UNROLL for (int i = 0; i < L::RM; i++) {
        const int query = first_q + L::row(i);
        const int at = BURST_ALIBI && query < block.rows_q ? block.at[query] : 0;
        UNROLL for (int j = 0; j < L::RN; j++) {
            REAL slope;
            s[i][j] = burst_score(s[i][j] * how.scale, how.softcap, how.slope, at, pos[j], &slope);
            if (bent) (*bent)[i][j] = slope;
        }
    }
#else
    UNROLL for (int i = 0; i < L::RM; i++) UNROLL for (int j = 0; j < L::RN; j++) s[i][j] *= how.scale;
#endif
    if (cut) {
        int pos[L::RN];
        UNROLL for (int j = 0; j < L::RN; j++) {
            const int key = first_k + L::spread_column(j);
            pos[j] = key < block.rows_k ? block.pos[key] : -1; /* lo >= 0: nobody sees it */
        }
        UNROLL for (int i = 0; i < L::RM; i++) {
            const int query = first_q + L::row(i);
            int lo = 0, hi = 0;
            if (query < block.rows_q) lo = block.lo[query], hi = block.hi[query];
            UNROLL for (int j = 0; j < L::RN; j++)
                if (!burst_visible(lo, hi, pos[j])) s[i][j] = -INF;
        }
    }
}

/* ---------------------------------------------------------------- the tiles that are seen, one after another */

struct Walk {
    int first, end; /* of tiles; the 32 from `first` on are looked at */
    Look look;
    int tile;       /* the one that `next` found */
    bool cut;
};

/* Look: look_at_keys or look_at_queries of 32 tiles */
template <class F> DEVICE bool next(Walk &w, F look)
{
    while (!(w.look.cut | w.look.full)) {
        w.first += 32;
        if (w.first >= w.end) return false;
        w.look = look(w.first, w.end);
    }
    const int bit = __ffs(w.look.cut | w.look.full) - 1;
    w.tile = w.first + bit;
    w.cut = w.look.cut >> bit & 1;
    w.look.cut &= ~(1u << bit), w.look.full &= ~(1u << bit);
    return true;
}

#endif
