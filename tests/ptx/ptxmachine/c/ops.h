/* Every instruction that needs only its own lane: OPn(name, type of d, types of a, b, c, e; expression).
 *
 * Included twice, for the functions and for the table of their names.  The name is the opcode with what tells apart
 * two results; stretches.py makes it of an instruction.  f16 and bf16 travel as u16, pairs of them as u32.
 */

/* --- integers ------------------------------------------------------------------------------------ */
#define INTEGER(T, W)                                                                                                  \
    OP2(add_##T, T, T, T, (T)((W)a + b))                                                                               \
    OP2(sub_##T, T, T, T, (T)((W)a - b))                                                                               \
    OP2(mul_lo_##T, T, T, T, (T)((W)a * b))                                                                            \
    OP3(mad_lo_##T, T, T, T, T, (T)((W)a * b + c))                                                                     \
    OP1(neg_##T, T, T, (T)(0 - (W)a))                                                                                  \
    OP2(and_##T, T, T, T, a & b)                                                                                       \
    OP2(or_##T, T, T, T, a | b)                                                                                        \
    OP2(xor_##T, T, T, T, a ^ b)                                                                                       \
    OP1(not_##T, T, T, (T)~a)                                                                                          \
    OP2(shl_##T, T, T, u32, b >= 8 * sizeof(T) ? 0 : (T)((W)a << (b & (8 * sizeof(T) - 1))))                           \
    OP1(mov_##T, T, T, a)                                                                                              \
    OP3(selp_##T, T, T, T, u8, c ? a : b)                                                                              \
    OP2(setp_eq_##T, u8, T, T, a == b)                                                                                 \
    OP2(setp_ne_##T, u8, T, T, a != b)
INTEGER(u16, u32)
INTEGER(u32, u32)
INTEGER(u64, u64)

#define SIGNED_OR_NOT(T, U)                                                                                            \
    OP2(min_##T, T, T, T, a < b ? a : b)                                                                               \
    OP2(max_##T, T, T, T, a > b ? a : b)                                                                               \
    OP2(setp_lt_##T, u8, T, T, a < b)                                                                                  \
    OP2(setp_le_##T, u8, T, T, a <= b)                                                                                 \
    OP2(setp_gt_##T, u8, T, T, a > b)                                                                                  \
    OP2(setp_ge_##T, u8, T, T, a >= b)                                                                                 \
    OP2(div_##T, T, T, T, b == 0 ? (T)~(T)0 : signed_by((a < 0) != (b < 0), (U)(magnitude(a, U) / magnitude(b, U)), T))   \
    OP2(rem_##T, T, T, T, b == 0 ? a : signed_by(a < 0, (U)(magnitude(a, U) % magnitude(b, U)), T))
#define magnitude(v, U) ((U)((v) < 0 ? (U)(0 - (U)(v)) : (U)(v)))
#define signed_by(negative, v, T) ((T)((negative) ? 0 - (v) : (v)))
SIGNED_OR_NOT(u16, u16)
SIGNED_OR_NOT(s16, u16)
SIGNED_OR_NOT(u32, u32)
SIGNED_OR_NOT(s32, u32)
SIGNED_OR_NOT(u64, u64)
SIGNED_OR_NOT(s64, u64)

/* An amount beyond the width leaves 0, or the sign. */
OP2(shr_u16, u16, u16, u32, b > 15 ? 0 : (u16)(a >> (b & 15)))
OP2(shr_u32, u32, u32, u32, b > 31 ? 0 : a >> (b & 31))
OP2(shr_u64, u64, u64, u32, b > 63 ? 0 : a >> (b & 63))
OP2(shr_s16, s16, s16, u32, (s16)(a >> (b > 15 ? 15 : b)))
OP2(shr_s32, s32, s32, u32, a >> (b > 31 ? 31 : b))
OP2(shr_s64, s64, s64, u32, a >> (b > 63 ? 63 : b))

#define ABSOLUTE(T, U) OP1(abs_##T, T, T, (T)magnitude(a, U))
ABSOLUTE(s16, u16)
ABSOLUTE(s32, u32)
ABSOLUTE(s64, u64)

#define WIDE(T, V)                                                                                                     \
    OP2(mul_wide_##T, V, T, T, (V)a * (V)b)                                                                            \
    OP3(mad_wide_##T, V, T, T, V, wide_add((V)a * (V)b, c, V))                                                         \
    OP2(mul_hi_##T, T, T, T, (T)(((V)a * (V)b) >> (8 * sizeof(T))))                                                    \
    OP3(mad_hi_##T, T, T, T, T, (T)((T)(((V)a * (V)b) >> (8 * sizeof(T))) + (u64)c))
#define wide_add(p, c, V) ((V)((u64)(p) + (u64)(c)))
WIDE(u16, u32)
WIDE(s16, s32)
WIDE(u32, u64)
WIDE(s32, s64)
OP2(mul_hi_u64, u64, u64, u64, (u64)(((u128)a * b) >> 64))
OP2(mul_hi_s64, s64, s64, s64, (s64)(((s128)a * b) >> 64))

OP3(shf_l_wrap, u32, u32, u32, u32, (u32)(((((u64)b << 32) | a) << (c & 31)) >> 32))
OP3(shf_r_wrap, u32, u32, u32, u32, (u32)((((u64)b << 32) | a) >> (c & 31)))
OP3(shf_l_clamp, u32, u32, u32, u32, (u32)(((((u64)b << 32) | a) << (c > 32 ? 32 : c)) >> 32))
OP3(shf_r_clamp, u32, u32, u32, u32, (u32)((((u64)b << 32) | a) >> (c > 32 ? 32 : c)))
OP4(lop3, u32, u32, u32, u32, u32, lop3(a, b, c, e))
OP3(prmt, u32, u32, u32, u32, prmt(a, b, c))
OP1(popc_u32, u32, u32, (u32)__builtin_popcount(a))
OP1(popc_u64, u32, u64, (u32)__builtin_popcountll(a))
OP1(clz_u32, u32, u32, a ? (u32)__builtin_clz(a) : 32)
OP1(clz_u64, u32, u64, a ? (u32)__builtin_clzll(a) : 64)
OP1(brev_u32, u32, u32, (u32)(reverse(a) >> 32))
OP1(brev_u64, u64, u64, reverse(a))
OP3(bfe_u32, u32, u32, u32, u32, (u32)bfe(a, b, c, 32, 0))
OP3(bfe_s32, u32, u32, u32, u32, (u32)bfe(a, b, c, 32, 1))
OP3(bfe_u64, u64, u64, u32, u32, bfe(a, b, c, 64, 0))
OP3(bfe_s64, u64, u64, u32, u32, bfe(a, b, c, 64, 1))
OP4(bfi_u32, u32, u32, u32, u32, u32, (u32)bfi(a, b, c, e, 32))
OP4(bfi_u64, u64, u64, u64, u32, u32, bfi(a, b, c, e, 64))

/* Predicates are bytes 0 and 1. */
OP1(mov_u8, u8, u8, a)
OP1(not_pred, u8, u8, a ^ 1)
OP2(and_pred, u8, u8, u8, a & b)
OP2(or_pred, u8, u8, u8, a | b)
OP2(xor_pred, u8, u8, u8, a ^ b)

OP2(pack_u16, u32, u16, u16, (u32)a | (u32)b << 16)
OP2(pack_u32, u64, u32, u32, (u64)a | (u64)b << 32)
OP4(pack4_u16, u64, u16, u16, u16, u16, (u64)a | (u64)b << 16 | (u64)c << 32 | (u64)e << 48)

/* --- whole registers out of narrower values: ext_from_to ------------------------------------------ */
#define EXTEND(S, D) OP1(ext_##S##_##D, D, S, (D)a)
EXTEND(u8, u16)
EXTEND(u8, u32)
EXTEND(u8, u64)
EXTEND(s8, u16)
EXTEND(s8, u32)
EXTEND(s8, u64)
EXTEND(u16, u32)
EXTEND(u16, u64)
EXTEND(s16, u32)
EXTEND(s16, u64)
EXTEND(u32, u64)
EXTEND(s32, u64)

/* --- float32: fl flushes subnormals (.ftz), one clamps (.sat), nan32 makes every NaN 0x7fffffff ----- */
#define SINGLE2(op, F)                                                                                                 \
    OP2(op##_f32, f32, f32, f32, nan32(F(a, b)))                                                                       \
    OP2(op##_ftz_f32, f32, f32, f32, nan32(fl(F(fl(a), fl(b)))))
#define SATURATED(op, F)                                                                                               \
    OP2(op##_sat_f32, f32, f32, f32, one(F(a, b)))                                                                     \
    OP2(op##_ftz_sat_f32, f32, f32, f32, one(fl(F(fl(a), fl(b)))))
#define sum(a, b) ((a) + (b))
#define difference(a, b) ((a) - (b))
#define product(a, b) ((a) * (b))
#define quotient(a, b) ((a) / (b))
SINGLE2(add, sum)
SINGLE2(sub, difference)
SINGLE2(mul, product)
SINGLE2(div, quotient)
SINGLE2(div_approx, div_approx)
SINGLE2(min, min32)
SINGLE2(max, max32)
SINGLE2(min_NaN, min32_nan)
SINGLE2(max_NaN, max32_nan)
SATURATED(add, sum)
SATURATED(sub, difference)
SATURATED(mul, product)
OP3(fma_f32, f32, f32, f32, f32, nan32(__builtin_fmaf(a, b, c)))
OP3(fma_ftz_f32, f32, f32, f32, f32, nan32(fl(__builtin_fmaf(fl(a), fl(b), fl(c)))))
OP3(fma_sat_f32, f32, f32, f32, f32, one(__builtin_fmaf(a, b, c)))
OP3(fma_ftz_sat_f32, f32, f32, f32, f32, one(fl(__builtin_fmaf(fl(a), fl(b), fl(c)))))
OP1(rcp_f32, f32, f32, nan32(1.0f / a))
OP1(rcp_ftz_f32, f32, f32, nan32(fl(1.0f / fl(a))))
OP1(sqrt_f32, f32, f32, nan32(__builtin_sqrtf(a)))
OP1(sqrt_ftz_f32, f32, f32, nan32(fl(__builtin_sqrtf(fl(a)))))
OP1(rsqrt_f32, f32, f32, nan32((f32)rsqrt(a)))
OP1(rsqrt_ftz_f32, f32, f32, nan32(fl((f32)rsqrt(fl(a)))))
OP1(abs_f32, u32, u32, a & 0x7fffffffu)
OP1(neg_f32, u32, u32, a ^ 0x80000000u)
OP1(abs_ftz_f32, u32, u32, flush_bits(a) & 0x7fffffffu)
OP1(neg_ftz_f32, u32, u32, flush_bits(a) ^ 0x80000000u)

#define COMPARE(T, name, x, y)                                                                                         \
    OP2(setp_eq_##name, u8, T, T, x == y)                                                                              \
    OP2(setp_ne_##name, u8, T, T, (x < y) | (x > y))                                                                   \
    OP2(setp_lt_##name, u8, T, T, x < y)                                                                               \
    OP2(setp_le_##name, u8, T, T, x <= y)                                                                              \
    OP2(setp_gt_##name, u8, T, T, x > y)                                                                               \
    OP2(setp_ge_##name, u8, T, T, x >= y)                                                                              \
    OP2(setp_equ_##name, u8, T, T, !((x < y) | (x > y)))                                                               \
    OP2(setp_neu_##name, u8, T, T, x != y)                                                                             \
    OP2(setp_ltu_##name, u8, T, T, !(x >= y))                                                                          \
    OP2(setp_leu_##name, u8, T, T, !(x > y))                                                                           \
    OP2(setp_gtu_##name, u8, T, T, !(x <= y))                                                                          \
    OP2(setp_geu_##name, u8, T, T, !(x < y))                                                                           \
    OP2(setp_num_##name, u8, T, T, (x == x) & (y == y))                                                                \
    OP2(setp_nan_##name, u8, T, T, (x != x) | (y != y))
COMPARE(f32, f32, a, b)
COMPARE(f32, ftz_f32, fl(a), fl(b))
COMPARE(f64, f64, a, b)

/* --- float64: every NaN is 0x7ff8000000000000 ------------------------------------------------------- */
OP2(add_f64, f64, f64, f64, nan64(a + b))
OP2(sub_f64, f64, f64, f64, nan64(a - b))
OP2(mul_f64, f64, f64, f64, nan64(a * b))
OP2(div_f64, f64, f64, f64, nan64(a / b))
OP2(min_f64, f64, f64, f64, nan64(min64(a, b)))
OP2(max_f64, f64, f64, f64, nan64(max64(a, b)))
OP3(fma_f64, f64, f64, f64, f64, nan64(__builtin_fma(a, b, c)))
OP1(rcp_f64, f64, f64, nan64(1.0 / a))
OP1(sqrt_f64, f64, f64, nan64(__builtin_sqrt(a)))
OP1(rsqrt_f64, f64, f64, nan64(rsqrt(a)))
OP1(abs_f64, u64, u64, a & 0x7fffffffffffffffu)
OP1(neg_f64, u64, u64, a ^ 0x8000000000000000u)

/* --- f16 and bf16: through float32, rounded again without harm; fma is exact first ------------------- */
#define HALF2(op, fmt, F)                                                                                              \
    OP2(op##_##fmt, u16, u16, u16, to_##fmt(F(of_##fmt(a), of_##fmt(b))))                                              \
    OP2(op##_##fmt##x2, u32, u32, u32,                                                                                 \
        (u32)to_##fmt(F(of_##fmt((u16)a), of_##fmt((u16)b))) |                                                         \
            (u32)to_##fmt(F(of_##fmt((u16)(a >> 16)), of_##fmt((u16)(b >> 16)))) << 16)
#define HALF(fmt)                                                                                                      \
    HALF2(add, fmt, sum)                                                                                               \
    HALF2(sub, fmt, difference)                                                                                        \
    HALF2(mul, fmt, product)                                                                                           \
    HALF2(min, fmt, min32)                                                                                             \
    HALF2(max, fmt, max32)                                                                                             \
    HALF2(min_NaN, fmt, min32_nan)                                                                                     \
    HALF2(max_NaN, fmt, max32_nan)                                                                                     \
    OP3(fma_##fmt, u16, u16, u16, u16, fma_##fmt(a, b, c))                                                             \
    OP3(fma_##fmt##x2, u32, u32, u32, u32,                                                                             \
        (u32)fma_##fmt((u16)a, (u16)b, (u16)c) |                                                                       \
            (u32)fma_##fmt((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)) << 16)                                      \
    OP1(abs_##fmt, u16, u16, a & 0x7fff)                                                                               \
    OP1(neg_##fmt, u16, u16, a ^ 0x8000)                                                                               \
    OP1(abs_##fmt##x2, u32, u32, a & 0x7fff7fffu)                                                                      \
    OP1(neg_##fmt##x2, u32, u32, a ^ 0x80008000u)                                                                      \
    OP1(cvt_##fmt##_f32, u16, f32, to_##fmt(a))                                                                        \
    OP1(cvt_ftz_##fmt##_f32, u16, f32, to_##fmt(fl(a)))                                                                \
    OP1(cvt_f32_##fmt, f32, u16, nan32(of_##fmt(a)))                                                                   \
    OP1(cvt_ftz_f32_##fmt, f32, u16, nan32(fl(of_##fmt(a))))                                                           \
    OP2(cvt_##fmt##x2_f32, u32, f32, f32, (u32)to_##fmt(a) << 16 | to_##fmt(b))
HALF(f16)
HALF(bf16)

/* --- conversions ------------------------------------------------------------------------------------ */
OP1(cvt_f64_f32, f64, f32, nan64((f64)a))
OP1(cvt_ftz_f64_f32, f64, f32, nan64((f64)fl(a)))
OP1(cvt_f32_f64, f32, f64, nan32((f32)a))
OP1(cvt_ftz_f32_f64, f32, f64, nan32(fl((f32)a)))
OP1(cvt_rna_tf32_f32, u32, u32, tf32(a))
#define FROM_INTEGER(S) OP1(cvt_f32_##S, f32, S, (f32)a) OP1(cvt_f64_##S, f64, S, (f64)a)
FROM_INTEGER(u8)
FROM_INTEGER(s8)
FROM_INTEGER(u16)
FROM_INTEGER(s16)
FROM_INTEGER(u32)
FROM_INTEGER(s32)
FROM_INTEGER(u64)
FROM_INTEGER(s64)

/* NaN gives 0; from f64, or to 64 bits, it gives 1 << (bits - 1). */
#define TO_INTEGER(rnd, R)                                                                                             \
    OP1(cvt_##rnd##_f32_f32, f32, f32, nan32(__builtin_copysignf(R##f(a), a)))                                         \
    OP1(cvt_##rnd##_ftz_f32_f32, f32, f32, nan32(fl(__builtin_copysignf(R##f(fl(a)), fl(a)))))                         \
    OP1(cvt_##rnd##_f64_f64, f64, f64, nan64(__builtin_copysign(R(a), a)))                                             \
    OP1(cvt_##rnd##_s32_f32, s32, f32, (s32)to_s64(R((f64)a), -0x1p31, 0x1.fffffffcp30, INT32_MIN, INT32_MAX, 0))       \
    OP1(cvt_##rnd##_u32_f32, u32, f32, (u32)to_s64(R((f64)a), 0, 0x1.fffffffep31, 0, UINT32_MAX, 0))                    \
    OP1(cvt_##rnd##_ftz_s32_f32, s32, f32,                                                                             \
        (s32)to_s64(R((f64)fl(a)), -0x1p31, 0x1.fffffffcp30, INT32_MIN, INT32_MAX, 0))                                 \
    OP1(cvt_##rnd##_ftz_u32_f32, u32, f32, (u32)to_s64(R((f64)fl(a)), 0, 0x1.fffffffep31, 0, UINT32_MAX, 0))            \
    OP1(cvt_##rnd##_s64_f32, s64, f32, to_s64(R((f64)a), -0x1p63, 0x1p63, INT64_MIN, INT64_MAX, INT64_MIN))            \
    OP1(cvt_##rnd##_s32_f64, s32, f64,                                                                                 \
        (s32)to_s64(R(a), -0x1p31, 0x1.fffffffcp30, INT32_MIN, INT32_MAX, INT32_MIN))                                  \
    OP1(cvt_##rnd##_u32_f64, u32, f64,                                                                                 \
        (u32)to_s64(R(a), 0, 0x1.fffffffep31, 0, UINT32_MAX, (s64)1 << 31))                                            \
    OP1(cvt_##rnd##_s64_f64, s64, f64, to_s64(R(a), -0x1p63, 0x1p63, INT64_MIN, INT64_MAX, INT64_MIN))
TO_INTEGER(rni, __builtin_rint)
TO_INTEGER(rzi, __builtin_trunc)
TO_INTEGER(rmi, __builtin_floor)
TO_INTEGER(rpi, __builtin_ceil)
OP1(cvt_f32_f32, f32, f32, nan32(a))
OP1(cvt_ftz_f32_f32, f32, f32, nan32(fl(a)))
OP1(cvt_sat_f32_f32, f32, f32, one(a))
OP1(cvt_ftz_sat_f32_f32, f32, f32, one(fl(a)))

#undef INTEGER
#undef SIGNED_OR_NOT
#undef magnitude
#undef signed_by
#undef ABSOLUTE
#undef WIDE
#undef wide_add
#undef EXTEND
#undef SINGLE2
#undef SATURATED
#undef sum
#undef difference
#undef product
#undef quotient
#undef COMPARE
#undef HALF2
#undef HALF
#undef FROM_INTEGER
#undef TO_INTEGER
