/* avx512.h beside the instructions that it stands for, on a CPU (or an emulator) that has them: bit by bit, on numbers of every kind.
 *
 *   avx512_main input output
 *
 * Writes the intrinsics that differ (there is no input) and exits with their number.  With -DBURST_TILES those of AMX as well.  Sums of products may round
 * in another order: those are held to 2^-20 of the sum of their terms' sizes.  The sign of a remainder 0, and how 1 - 2^-30 is
 * rounded, are nobody's concern.
 */
#define BURST_BESIDE
#include "avx512.h"

#include <math.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

static uint64_t state = 88172645463325252u;
static uint32_t any32(void)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16);
}

/* Any bits, or numbers of a moderate size, infinities, NaN, zeros */
static plain512 numbers(int wide, int tame)
{
    plain512 r;
    for (int i = 0; i < 16; i++) r.u[i] = any32();
    if (wide) {
        for (int i = 0; i < 8; i++) {
            const uint32_t kind = any32() % 16;
            if (tame || kind < 12) r.d[i] = ((double)(int32_t)any32()) * (kind % 2 ? 0x1p-21 : 0x1p-31);
            if (!tame && kind >= 12) r.d[i] = (double[]){INFINITY, -INFINITY, NAN, -0.0}[kind - 12];
        }
    } else {
        for (int i = 0; i < 16; i++) {
            const uint32_t kind = any32() % 16;
            if (tame || kind < 12) r.f[i] = (float)(int32_t)any32() * (kind % 2 ? 0x1p-24f : 0x1p-31f);
            if (!tame && kind >= 12) r.f[i] = (float[]){INFINITY, -INFINITY, NAN, -0.0f}[kind - 12];
        }
    }
    return r;
}
static plain512 bits(void)
{
    plain512 r;
    for (int i = 0; i < 16; i++) r.u[i] = any32();
    return r;
}

static FILE *told;
static int wrong, reported;
static void same(const char *name, const void *mine, const void *theirs, size_t bytes, int real)
{
    int differ = 0;
    if (!real) differ = memcmp(mine, theirs, bytes) != 0;
    for (size_t i = 0; real == 4 && i < bytes / 4; i++) {
        float x, y;
        memcpy(&x, (const char *)mine + 4 * i, 4), memcpy(&y, (const char *)theirs + 4 * i, 4);
        differ |= (x == x || y == y) && memcmp(&x, &y, 4);
    }
    for (size_t i = 0; real == 8 && i < bytes / 8; i++) {
        double x, y;
        memcpy(&x, (const char *)mine + 8 * i, 8), memcpy(&y, (const char *)theirs + 8 * i, 8);
        differ |= (x == x || y == y) && memcmp(&x, &y, 8);
    }
    if (differ && !reported) fprintf(told, "%s differs\n", name);
    reported |= differ;
}
#define CHECK(name, mine, theirs, real)                  \
    {                                                    \
        const __typeof__(theirs) x_ = mine, y_ = theirs; \
        same(name, &x_, &y_, sizeof y_, real);           \
    }
/* The statement, again and again */
#define TIMES(statement)                                          \
    {                                                             \
        reported = 0;                                             \
        for (int n = 0; n < 2000 && !reported; n++) { statement } \
        wrong += reported;                                        \
    }

static void near(const char *name, float mine, float theirs, float size)
{
    if (fabsf(mine - theirs) <= 0x1p-20f * size || (mine != mine && theirs != theirs)) return;
    if (!reported) fprintf(told, "%s: %g, the instruction gives %g\n", name, mine, theirs);
    reported = 1;
}

static void integers(void)
{
    static const uint16_t order[32] = {63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1};
    TIMES(plain512 a = bits(); plain512 b = bits(); plain512 c = bits(); const __mmask16 m = (__mmask16)any32();
          CHECK("loadu", plain_loadu(&a), _mm512_loadu_si512(&a), 0)
          CHECK("and", plain_and(a.si, b.si), _mm512_and_si512(a.si, b.si), 0)
          CHECK("or", plain_or(a.si, b.si), _mm512_or_si512(a.si, b.si), 0)
          CHECK("add_epi16", plain_add_epi16(a.si, b.si), _mm512_add_epi16(a.si, b.si), 0)
          CHECK("slli", plain_slli_epi32(a.si, 16), _mm512_slli_epi32(a.si, 16), 0)
          CHECK("srli", plain_srli_epi32(a.si, 16), _mm512_srli_epi32(a.si, 16), 0)
          CHECK("ternarylogic", plain_ternarylogic(a.si, b.si, c.si, 0xf8), _mm512_ternarylogic_epi32(a.si, b.si, c.si, 0xf8), 0)
          CHECK("ternarylogic", plain_ternarylogic(a.si, b.si, c.si, 0x39), _mm512_ternarylogic_epi32(a.si, b.si, c.si, 0x39), 0)
          CHECK("test", plain_test(a.si, plain_and(b.si, c.si)), _mm512_test_epi32_mask(a.si, plain_and(b.si, c.si)), 0)
          CHECK("cmple", plain_le(a.si, b.si), _mm512_cmple_epi32_mask(a.si, b.si), 0)
          CHECK("mask_cmpgt", plain_mask_gt(m, a.si, b.si), _mm512_mask_cmpgt_epi32_mask(m, a.si, b.si), 0)
          CHECK("mask_blend", plain_blend(m, a.ps, b.ps), _mm512_mask_blend_ps(m, a.ps, b.ps), 0)
          CHECK("permutex2var", plain_permutex2var(a.si, c.si, b.si), _mm512_permutex2var_epi16(a.si, c.si, b.si), 0)
          CHECK("shuffle_f32x4", plain_shuffle_f32x4(a.ps, b.ps, 0xee), _mm512_shuffle_f32x4(a.ps, b.ps, 0xee), 0)
          CHECK("shuffle_f32x4", plain_shuffle_f32x4(a.ps, b.ps, 0x6c), _mm512_shuffle_f32x4(a.ps, b.ps, 0x6c), 0)
          CHECK("cvtepu16", plain_widen(_mm512_castsi512_si256(a.si)), _mm512_cvtepu16_epi32(_mm512_castsi512_si256(a.si)), 0)
          CHECK("cvtepi32", plain_narrow(a.si), _mm512_cvtepi32_epi16(a.si), 0)
          CHECK("set1_epi16", plain_set1_epi16((uint16_t)a.u[0]), _mm512_set1_epi16((short)a.u[0]), 0)
          CHECK("set1_epi32", plain_set1_epi32(a.i[0]), _mm512_set1_epi32(a.i[0]), 0)
          CHECK("set_epi16", plain_set_epi16(order), _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1), 0))
}

static void reals(void)
{
    TIMES(plain512 a = numbers(0, 0); plain512 b = numbers(0, 0); plain512 c = numbers(0, 0);
          CHECK("max_ps", plain_max_ps(a.ps, b.ps), _mm512_max_ps(a.ps, b.ps), 4)
          CHECK("fmsub_ps", plain_fmsub_ps(a.ps, b.ps, c.ps), _mm512_fmsub_ps(a.ps, b.ps, c.ps), 4)
          plain512 mine; plain512 theirs; mine.ps = plain_reduce_ps(a.ps, 1); theirs.ps = _mm512_reduce_ps(a.ps, 1);
          for (int i = 0; i < 16; i++) near("reduce_ps", mine.f[i], theirs.f[i], 0x1p-3f);
          for (int i = 0; i < 16; i++) a.f[i] = 1 + (any32() & 0xffffff) * 0x1p-24f; /* as 2^r is */
          CHECK("scalef_ps", plain_scalef_ps(a.ps, b.ps), _mm512_scalef_ps(a.ps, b.ps), 4)
          CHECK("set1_ps", plain_set1_ps(a.f[0]), _mm512_set1_ps(a.f[0]), 4))
    TIMES(plain512 a = numbers(1, 0); plain512 b = numbers(1, 0); plain512 c = numbers(1, 0);
          CHECK("max_pd", plain_max_pd(a.pd, b.pd), _mm512_max_pd(a.pd, b.pd), 8)
          CHECK("fmsub_pd", plain_fmsub_pd(a.pd, b.pd, c.pd), _mm512_fmsub_pd(a.pd, b.pd, c.pd), 8)
          CHECK("reduce_pd", plain_reduce_pd(a.pd, 1) + plain_set1_pd(0), _mm512_reduce_pd(a.pd, 1) + plain_set1_pd(0), 8)
          for (int i = 0; i < 8; i++) a.d[i] = 1 + any32() * 0x1p-32;
          CHECK("scalef_pd", plain_scalef_pd(a.pd, b.pd), _mm512_scalef_pd(a.pd, b.pd), 8)
          CHECK("set1_pd", plain_set1_pd(a.d[0]), _mm512_set1_pd(a.d[0]), 8))
}

#ifdef __AVX512BF16__
static void halves(void)
{
    TIMES(plain512 a = numbers(0, 0); plain512 b = numbers(0, 0);
          for (int i = 0; i < 4; i++) a.u[i] = (a.u[i] & 0xffff0000) | 0x8000; /* half way */
          CHECK("cvtne2ps_pbh", plain_cvtne2ps_pbh(a.ps, b.ps), _mm512_cvtne2ps_pbh(a.ps, b.ps), 0))
    TIMES(plain512 a = numbers(0, 1); plain512 b = numbers(0, 1); plain512 c = numbers(0, 1); plain512 mine; plain512 theirs;
          const __m512bh left = plain_cvtne2ps_pbh(a.ps, b.ps); const __m512bh right = plain_cvtne2ps_pbh(b.ps, c.ps);
          mine.ps = plain_dpbf16(c.ps, left, right); theirs.ps = _mm512_dpbf16_ps(c.ps, left, right);
          for (int i = 0; i < 16; i++) near("dpbf16", mine.f[i], theirs.f[i], 4e4f);)
}
#endif

#ifdef BURST_TILES
static void tiles(void)
{
    struct { uint8_t palette, start, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = 16;
    static float mine[16][20], theirs[16][20];
    static uint16_t left[16][40], right[16][40];
    plain_tile_loadconfig(&shapes);
    _tile_loadconfig(&shapes);
    TIMES(for (int m = 0; m < 16; m++) for (int n = 0; n < 40; n++) {
              left[m][n] = plain_to_bf16((float)(int32_t)any32() * 0x1p-31f);
              right[m][n] = plain_to_bf16((float)(int32_t)any32() * 0x1p-31f);
          }
          plain_tile_loadd(1, left, 80); _tile_loadd(1, left, 80);
          plain_tile_loadd(2, right, 80); _tile_loadd(2, right, 80);
          plain_tile_zero(0); _tile_zero(0);
          plain_tile_dpbf16ps(0, 1, 2); _tile_dpbf16ps(0, 1, 2);
          plain_tile_dpbf16ps(0, 2, 1); _tile_dpbf16ps(0, 2, 1);
          plain_tile_stored(0, mine, 80); _tile_stored(0, theirs, 80);
          for (int m = 0; m < 16; m++) for (int n = 0; n < 20; n++) near("tile_dpbf16ps", mine[m][n], theirs[m][n], 64);)
    _tile_release();
}
#endif

int main(int argc, char **argv)
{
    told = argc == 3 ? fopen(argv[2], "w") : NULL;
    if (!told) return 101;
    integers();
    reals();
#ifdef __AVX512BF16__
    halves();
#endif
#ifdef BURST_TILES
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 100; /* permission for tile registers */
    tiles();
#endif
    fprintf(told, "%d differ\n", wrong);
    return fclose(told) ? 102 : wrong;
}
