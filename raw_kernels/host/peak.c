/* The core's own limit: fused multiply-adds on registers alone.  Beside it every figure of a benchmark stands. */
#include "vec.h"

#define CHAINS (VBYTES == 64 ? 24 : 12)

/* Runs `rounds` rounds; returns their floating-point operations. */
double burst_fma(int64_t rounds)
{
    vec acc[24];
    const vec factor = splat((REAL)0.999), term = splat((REAL)0.001);
    UNROLL for (int i = 0; i < CHAINS; i++) acc[i] = factor;
    for (int64_t r = 0; r < rounds; r++) {
        UNROLL for (int i = 0; i < CHAINS; i++) {
            acc[i] = acc[i] * factor + term;
#if defined(BURST_AVX512)
            __asm__ volatile("" : "+v"(acc[i]));
#elif defined(__x86_64__)
            __asm__ volatile("" : "+x"(acc[i]));
#else
            __asm__ volatile("" : "+w"(acc[i]));
#endif
        }
    }
    vec sum = zero();
    UNROLL for (int i = 0; i < CHAINS; i++) sum += acc[i];
    volatile REAL sink = sum[0];
    (void)sink;
    return 2.0 * (double)rounds * CHAINS * LANES;
}

#ifdef __AVX512BF16__
/* The same of vdpbf16ps: two products of bfloat16 a lane. */
double burst_dot(int64_t rounds)
{
    vec acc[24];
    const __m512bh factor = (__m512bh)_mm512_set1_epi32(0x3c003c00);
    UNROLL for (int i = 0; i < 24; i++) acc[i] = zero();
    for (int64_t r = 0; r < rounds; r++) {
        UNROLL for (int i = 0; i < 24; i++) {
            acc[i] = (vec)_mm512_dpbf16_ps((__m512)acc[i], factor, factor);
            __asm__ volatile("" : "+v"(acc[i]));
        }
    }
    vec sum = zero();
    UNROLL for (int i = 0; i < 24; i++) sum += acc[i];
    volatile REAL sink = sum[0];
    (void)sink;
    return 4.0 * (double)rounds * 24 * LANES;
}
#endif
