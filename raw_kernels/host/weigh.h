/* Scores in L1 become weights: 2^x in a loop of its own, where registers are too few to do it behind the product.
 *
 * Behind a product's 12 sums each constant of 2^x comes from memory, and chains of 15 instructions that wait for each other fill the
 * scheduler.  Here constants stay in registers and CHAINS of them go side by side.  In float32 two instructions fall away as well:
 * what exp2_vec takes a bound and a product for, the sum of two integers does (n is added to the exponent of p), as long as no weight
 * is huge or NaN.  Where one is, the caller is told, and goes by exp2_vec.  All else is exp2_vec's result, to the bit, and sums are
 * taken in the same order.
 */
#ifndef BURST_WEIGH_H
#define BURST_WEIGH_H

#include "scores.h"

#ifndef WEIGH_LATER /* than the product */
#if defined(BURST_AVX512) || defined(__aarch64__) /* 32 registers */
#define WEIGH_LATER 0
#else
#define WEIGH_LATER 1
#endif
#endif

#if !defined(BURST_AVX2) || defined(BURST_DOUBLE)
#define CHAINS 4

INLINE vec weight_of(vec t, ivec *most)
{
    (void)most; /* exp2_vec is right everywhere */
    return exp2_vec(t);
}
INLINE int is_strange(ivec most) { return any(most); }
#else
#define CHAINS 3
#define BARE_ROUNDER 0x1.8p23f /* n at the low end of the bits, with no bias */

/* *most: the largest n of each lane, as the bits of n + BARE_ROUNDER; those of a NaN, with either sign, are larger */
INLINE vec weight_of(vec t, ivec *most)
{
    t = (vec)_mm256_max_ps(_mm256_set1_ps(EXP2_LOW), (__m256)t); /* NaN stays NaN */
    const vec shifted = t + BARE_ROUNDER;
    const vec r = t - (shifted - BARE_ROUNDER);
    vec p = splat(EXP2[EXP2_DEGREE]);
    UNROLL for (int i = EXP2_DEGREE - 1; i >= 0; i--) p = p * r + EXP2[i];
    *most = (ivec)_mm256_max_epu32((__m256i)*most, (__m256i)shifted);
    return (vec)((uvec)p + ((uvec)shifted << MANTISSA)); /* 0 at the low end; just above it subnormal, which is taken as 0 */
}

/* Whether there is one above 2^41, or NaN */
INLINE int is_strange(ivec most)
{
    const __m256i bound = _mm256_castps_si256(_mm256_set1_ps(BARE_ROUNDER + 41));
    return any((ivec)_mm256_max_epu32((__m256i)most, bound) != (ivec)bound);
}
#endif

/* s [keys, NR] in, 2^(s log2(e) - ref - low) out; sum[j] += those of vector j.  low and sum may be NULL.  Returns whether some are
 * not to be trusted: above 2^41, or NaN. */
INLINE int weigh_scores(REAL *s, int64_t keys, const REAL *ref, const REAL *low, vec *sum)
{
    ivec most = {0};
    for (int j = 0; j < VR; j++) {
        const vec m = load(ref + j * LANES), rest = low ? load(low + j * LANES) : zero();
        vec total = sum ? sum[j] : zero();
        REAL *at = s + j * LANES;
        int64_t left = keys;
        for (; left >= CHAINS; left -= CHAINS, at += CHAINS * NR) {
            vec x[CHAINS];
            UNROLL for (int i = 0; i < CHAINS; i++) {
                x[i] = fused(load(at + i * NR), LOG2E, m);
                if (low) x[i] -= rest;
                x[i] = weight_of(x[i], &most);
            }
            UNROLL for (int i = 0; i < CHAINS; i++) {
                store(at + i * NR, x[i]);
                if (sum) total += x[i];
            }
        }
        ONE_BY_ONE for (; left > 0; left--, at += NR) {
            vec x = fused(load(at), LOG2E, m);
            if (low) x -= rest;
            x = weight_of(x, &most);
            store(at, x);
            if (sum) total += x;
        }
        if (sum) sum[j] = total;
    }
    return is_strange(most);
}

#endif
