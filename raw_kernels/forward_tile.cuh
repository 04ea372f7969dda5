/* forward.cu: one tile of keys, which lies in shared memory, into the running state of a warp.
 *
 *   take_tile     no maximum: weights against an old reference m, one vote on their sums; false where that is not safe
 *   take_classic  16 keys at a time with maximum and rescaling: a row's first tile, tiles that take_tile refuses, and
 *                 all tiles where scores are bent (softcap, ALiBi)
 */
#ifndef BURST_FORWARD_TILE_CUH
#define BURST_FORWARD_TILE_CUH

#include "forward_mask.cuh"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define INFINITE __int_as_float(0x7f800000)

/* P is rounded to TYPE for the product P V.  Weights may grow to GUARD before the reference is renewed; a new reference
 * lies HEADROOM (log2) below the maximum, so that float16's small weights stay above its subnormal numbers. */
#if TYPE == FLOAT16
constexpr float GUARD = 32768.f, HEADROOM = 8.f;
#else
constexpr float GUARD = 4294967296.f, HEADROOM = 0.f;
#endif

/* A warp's rows.  Lane l has rows r = l/4 + 8h (h = 0, 1) of each slab, as the C fragment of an mma. */
struct State {
    float out_frag[SLABS][2 * STEPS_V][4];  /* not yet divided by the sum */
    float minus_m[SLABS][2];                /* -m, the reference, in log2 units; +inf: the row has seen nothing */
    float sum[SLABS][2];                    /* of weights, this lane's columns only */
#if Q_IN_REGISTERS
    u32 q_frag[SLABS][STEPS_D][4];
#endif
};

/* Where the warp reads a tile: an address for each k16 step in a page (ldmatrix), the same for both stages. */
struct Addresses {
    u32 k[PagesK::BASES], v[PagesV::BASES], q;
};

DEVICE u32 address_k(const Addresses &at, int step, int key16)
{
    return at.k[step % PagesK::BASES] + step / PagesK::BASES * (TILE_K * PagesK::ROW) + key16 * (16 * PagesK::ROW);
}

DEVICE u32 address_v(const Addresses &at, int step, int key16)
{
    return at.v[step % PagesV::BASES] + step / PagesV::BASES * (TILE_K * PagesV::ROW) + key16 * (16 * PagesV::ROW);
}

DEVICE int2 shared_int2(u32 address)
{
    int2 x;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
    return x;
}

/* The A fragment of Q for a k16 step.  volatile: else the compiler reads shared memory once and keeps it all. */
DEVICE void q_fragment(u32 (&a)[4], const State &state, const Addresses &at, int slab, int step)
{
#if Q_IN_REGISTERS
    UNROLL for (int i = 0; i < 4; i++) a[i] = state.q_frag[slab][step][i];
#else
    asm volatile("ld.volatile.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at.q + (slab * STEPS_D + step) * 512) : "memory");
#endif
}

/* s = Q K' of KEYS keys from 16 key16 on.  K comes as n16 x k16, so that only one step of Q is alive. */
template <int KEYS>
DEVICE void products(float (&s_frag)[SLABS][KEYS / 8][4], const State &state, const Addresses &at, int offset, int key16)
{
    UNROLL for (int slab = 0; slab < SLABS; slab++)
        UNROLL for (int n = 0; n < KEYS / 8; n++)
            UNROLL for (int e = 0; e < 4; e++) s_frag[slab][n][e] = 0.f;
    UNROLL for (int step = 0; step < STEPS_D; step++) {
        u32 q_frag[SLABS][4];
        UNROLL for (int slab = 0; slab < SLABS; slab++) q_fragment(q_frag[slab], state, at, slab, step);
        UNROLL for (int n = 0; n < KEYS / 8; n += 2) {
            u32 k_frag[4];
            ldmatrix(k_frag, address_k(at, step, key16 + n / 2) + offset);
            UNROLL for (int slab = 0; slab < SLABS; slab++) {
                mma(s_frag[slab][n], q_frag[slab], k_frag[0], k_frag[1]);
                mma(s_frag[slab][n + 1], q_frag[slab], k_frag[2], k_frag[3]);
            }
        }
    }
}

/* out += P V, of 16 keys. */
DEVICE void add_values(State &state, const u32 (&p_frag)[SLABS][4], const Addresses &at, int offset, int key16)
{
    UNROLL for (int step = 0; step < STEPS_V; step++) {
        u32 v_frag[4];
        ldmatrix_trans(v_frag, address_v(at, step, key16) + offset);
        UNROLL for (int slab = 0; slab < SLABS; slab++) {
            mma(state.out_frag[slab][2 * step], p_frag[slab], v_frag[0], v_frag[1]);
            mma(state.out_frag[slab][2 * step + 1], p_frag[slab], v_frag[2], v_frag[3]);
        }
    }
}

/* V has one stage only: it was asked for when the tile began, and is needed now. */
DEVICE void await_values()
{
    if (V_STAGES == 1) {
        copies_wait<1>();
        __syncthreads();
    }
}

/* -inf where the pair is hidden.  n: first n8 tile of the scores in the mask. */
template <int KEYS> DEVICE void hide(float (&s_frag)[SLABS][KEYS / 8][4], const Hidden &hidden, int n)
{
    UNROLL for (int i = 0; i < KEYS / 8; i++)
        UNROLL for (int slab = 0; slab < SLABS; slab++)
            UNROLL for (int e = 0; e < 4; e++)
                if (hidden.at(slab, n + i, e)) s_frag[slab][i][e] = -INFINITE;
}

/* A tile with weights 2^(s c - m) against the reference that the rows have, c = scale log2(e).
 *
 * offset_k, offset_v: of the stages.  MASKED: some scores are hidden, and V is there already.
 * Returns false, with the state as it was, where a sum of weights exceeds GUARD, is infinite or NaN.
 */
template <bool MASKED>
DEVICE bool take_tile(State &state, const Addresses &at, int offset_k, int offset_v, float c, const Hidden &hidden)
{
    u32 p_frag[STEPS_K][SLABS][4]; /* A fragments of P V */
    float sum[SLABS][2];           /* of this tile alone: small numbers first */
    constexpr int CHUNK = MASKED ? CUT_CHUNK : FULL_CHUNK; /* keys whose scores are alive at a time */
    UNROLL for (int key = 0; key < TILE_K; key += CHUNK) {
        float s_frag[SLABS][CHUNK / 8][4];
        products<CHUNK>(s_frag, state, at, offset_k, key / 16);
        if (MASKED) hide<CHUNK>(s_frag, hidden, key / 8);
        UNROLL for (int n = 0; n < CHUNK / 8; n++)
            UNROLL for (int slab = 0; slab < SLABS; slab++)
                UNROLL for (int h = 0; h < 2; h++) {
                    const float x = exp2_fast(fmaf(s_frag[slab][n][2 * h], c, state.minus_m[slab][h]));
                    const float y = exp2_fast(fmaf(s_frag[slab][n][2 * h + 1], c, state.minus_m[slab][h]));
                    if (key == 0 && n == 0) sum[slab][h] = x;
                    else sum[slab][h] += x;
                    sum[slab][h] += y;
                    p_frag[key / 16 + n / 2][slab][h + 2 * (n & 1)] = pack(x, y);
                }
    }
    if (!MASKED) await_values();
    float worst = sum[0][0] + sum[0][1]; /* of numbers >= 0: an infinity or a NaN comes through */
    if (SLABS == 2) worst += sum[SLABS - 1][0] + sum[SLABS - 1][1];
    if (__any_sync(~0u, !(worst <= GUARD))) return false;
    UNROLL for (int slab = 0; slab < SLABS; slab++)
        UNROLL for (int h = 0; h < 2; h++) state.sum[slab][h] += sum[slab][h];
    UNROLL for (int k = 0; k < STEPS_K; k++) add_values(state, p_frag[k], at, offset_v, k);
    return true;
}

/* What bends a score, where BENT: see scores.h. */
struct Bend {
    float scale, softcap, slope;
    const int *at; /* of this lane's first row; rows_left of them are there */
    int rows_left;
    u32 positions; /* in shared memory, of this lane's first two keys */
};

/* A score in log2 units.  Without a bend it is multiplied later, in one FMA with the reference. */
DEVICE float bent(float product, const Bend &bend, int at, int pos)
{
#if BENT
    float unused;
    return burst_score(bend.scale * product, bend.softcap, bend.slope, at, pos, &unused) * LOG2E;
#else
    return product;
#endif
}

/* A tile the classic way, 16 keys at a time: maximum, rescaling, weights.  The reference is the maximum afterwards.
 * c: scale log2(e), or 1 where scores are bent. */
DEVICE void take_classic(State &state, const Addresses &at, int offset_k, int offset_v, float c, Hidden hidden, const Bend &bend)
{
    NO_UNROLL for (int k = 0; k < STEPS_K; k++) {
        float s_frag[SLABS][2][4];
        products<16>(s_frag, state, at, offset_k + k * (16 * PagesK::ROW), 0);
#if BENT
        UNROLL for (int n = 0; n < 2; n++) {
            const int2 pos = shared_int2(bend.positions + (16 * k + 8 * n) * 4);
            UNROLL for (int slab = 0; slab < SLABS; slab++)
                UNROLL for (int h = 0; h < 2; h++) {
                    const int row = 16 * slab + 8 * h;
                    const int query = BURST_ALIBI && row < bend.rows_left ? bend.at[row] : 0;
                    s_frag[slab][n][2 * h] = bent(s_frag[slab][n][2 * h], bend, query, pos.x);
                    s_frag[slab][n][2 * h + 1] = bent(s_frag[slab][n][2 * h + 1], bend, query, pos.y);
                }
        }
#endif
        hide<16>(s_frag, hidden, 0);
        UNROLL for (int word = 0; word < WORDS; word++) /* the next 16 keys come to the front */
            hidden.word[word] = __funnelshift_r(hidden.word[word], word + 1 < WORDS ? hidden.word[WORDS - 1] : 0, 16);
        u32 p_frag[SLABS][4];
        UNROLL for (int slab = 0; slab < SLABS; slab++)
            UNROLL for (int h = 0; h < 2; h++) {
                float m = fmaxf(fmaxf(s_frag[slab][0][2 * h], s_frag[slab][0][2 * h + 1]),
                                fmaxf(s_frag[slab][1][2 * h], s_frag[slab][1][2 * h + 1]));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
                const float old = state.minus_m[slab][h], fresh = fminf(old, fmaf(-m, c, HEADROOM)); /* -m' */
                const float safe = fresh == INFINITE ? 0.f : fresh;             /* the row still sees nothing */
                const float shrink = old == INFINITE ? 0.f : exp2_fast(safe - old); /* 2^(m - m') */
                state.minus_m[slab][h] = fresh;
                float sum = 0.f;
                UNROLL for (int n = 0; n < 2; n++) {
                    const float x = exp2_fast(fmaf(s_frag[slab][n][2 * h], c, safe));
                    const float y = exp2_fast(fmaf(s_frag[slab][n][2 * h + 1], c, safe));
                    sum += x + y;
                    p_frag[slab][h + 2 * n] = pack(x, y);
                }
                state.sum[slab][h] = fmaf(state.sum[slab][h], shrink, sum);
                UNROLL for (int n = 0; n < 2 * STEPS_V; n++) {
                    state.out_frag[slab][n][2 * h] *= shrink;
                    state.out_frag[slab][n][2 * h + 1] *= shrink;
                }
            }
        add_values(state, p_frag, at, offset_v + k * (16 * PagesV::ROW), 0);
    }
}

#endif
