/* Whether a compiler takes the flags of an instruction set and knows its instructions: built in a moment, before any kernel is. */
#if defined(BURST_AVX512) || defined(BURST_AVX2)
#include <immintrin.h>
#endif

int burst_probe(void)
{
#if defined(BURST_AMX) && !defined(BURST_DOT)
    _tile_zero(0);
#endif
#if defined(BURST_AMX)
    return (int)sizeof(__m512bh);
#elif defined(BURST_AVX512)
    return (int)sizeof(__m512);
#elif defined(BURST_AVX2)
    return (int)sizeof(__m256);
#else
    return 16;
#endif
}
