/* What a score is and who sees whom: one header for the C and the CUDA kernels.
 *
 *   s_ij = cap(scale * q_i . k_j) - slope * |at_i - pos_j|,    cap(x) = softcap * tanh(x / softcap)
 *   visible  <=>  lo_i <= pos_j < hi_i
 *
 * REAL is the accumulator's type (float or double).  BURST_SOFTCAP and BURST_ALIBI, each 0 or 1, are set by -D, so
 * that a kernel without them carries no code for them.
 */
#ifndef BURST_SCORES_H
#define BURST_SCORES_H

#ifndef REAL
#define REAL float
#endif
#ifndef BURST_SOFTCAP
#define BURST_SOFTCAP 0
#endif
#ifndef BURST_ALIBI
#define BURST_ALIBI 0
#endif

#ifdef __CUDACC__
#define BURST_INLINE static __device__ __forceinline__
#else
#include <math.h>
#define BURST_INLINE static inline
#endif

/* Both math libraries overload or name the double version plainly; float has its own name. */
#define BURST_TANH(x) (sizeof(REAL) == sizeof(double) ? (REAL)tanh((double)(x)) : (REAL)tanhf((float)(x)))

/* Whether the query with interval [lo, hi) sees the key at global position pos. */
BURST_INLINE int burst_visible(int lo, int hi, int pos) { return lo <= pos && pos < hi; }

/* A scaled product becomes a score; *slope_of_cap gets d cap(x)/dx, which backward multiplies dS by. */
BURST_INLINE REAL burst_score(REAL scaled, REAL softcap, REAL alibi_slope, int at, int pos, REAL *slope_of_cap)
{
    REAL s = scaled;
    *slope_of_cap = 1;
#if BURST_SOFTCAP
    {
        const REAL t = BURST_TANH(s / softcap);
        s = softcap * t;
        *slope_of_cap = 1 - t * t;
    }
#else
    (void)softcap;
#endif
#if BURST_ALIBI
    {
        const int apart = at - pos;
        s -= alibi_slope * (REAL)(apart < 0 ? -apart : apart);
    }
#else
    (void)alibi_slope; (void)at; (void)pos;
#endif
    return s;
}

#endif
