/* What Bochs 3.0 and 3.1 get wrong, by other instructions: for -include, before the kernels.
 *
 * The upper half of their vcvtne2ps2bf16 is not the first operand's (an index runs past its 16 numbers). vcvtneps2bf16 is right.
 */
#include <immintrin.h>

static inline __m512bh rounded_by_halves(__m512 high, __m512 low)
{
    const __m256i below = (__m256i)_mm512_cvtneps_pbh(low), above = (__m256i)_mm512_cvtneps_pbh(high);
    return (__m512bh)_mm512_inserti64x4(_mm512_castsi256_si512(below), above, 1);
}

#define _mm512_cvtne2ps_pbh rounded_by_halves
