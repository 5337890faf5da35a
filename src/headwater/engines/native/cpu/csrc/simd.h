// `vec`: 16 floats, whatever the machine. Every operation is exactly rounded and lane-wise, and `sum` and `max_of`
// reduce in one fixed tree, so all variants with fused multiply-add give the same bits.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(HW_AVX512) || defined(HW_AVX2)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define HW_INLINE static inline __attribute__((always_inline))
#define HW_MEMBER inline __attribute__((always_inline))
#define HW_UNROLL _Pragma("GCC unroll 32")

namespace {

#if defined(HW_AVX512)

struct vec { __m512 v; };
HW_INLINE vec zero() { return {_mm512_setzero_ps()}; }
HW_INLINE vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
HW_INLINE vec load(const float *p) { return {_mm512_loadu_ps(p)}; }
HW_INLINE void store(float *p, vec a) { _mm512_storeu_ps(p, a.v); }
HW_INLINE vec add(vec a, vec b) { return {_mm512_add_ps(a.v, b.v)}; }
HW_INLINE vec sub(vec a, vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
HW_INLINE vec mul(vec a, vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
HW_INLINE vec div(vec a, vec b) { return {_mm512_div_ps(a.v, b.v)}; }
HW_INLINE vec fma(vec a, vec b, vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// min and max give the second operand when either is NaN.
HW_INLINE vec min(vec a, vec b) { return {_mm512_min_ps(a.v, b.v)}; }
HW_INLINE vec max(vec a, vec b) { return {_mm512_max_ps(a.v, b.v)}; }
// a where x < y, else b
HW_INLINE vec select_less(vec x, vec y, vec a, vec b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), b.v, a.v)};
}
// p * 2^n where n sits in the low bits of t (see `exp`)
HW_INLINE vec scale_by_power(vec p, vec t) {
    __m512i n = _mm512_slli_epi32(_mm512_castps_si512(t.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), n))};
}
HW_INLINE vec bf16_even(const void *p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
HW_INLINE vec bf16_odd(const void *p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))))};
}
HW_INLINE vec f16(const void *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
// Codes as floats: nibble j of 16 words, or 16 bytes.
struct words { __m512i v; };
HW_INLINE words load_words(const void *p) { return {_mm512_loadu_si512(p)}; }
HW_INLINE vec nibble(words w, int j) {
    // A permutation looks at the low four bits of each word alone.
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm512_permutexvar_ps(j ? _mm512_srli_epi32(w.v, 4 * j) : w.v, table)};
}
HW_INLINE vec bytes(const void *p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)))};
}

#elif defined(HW_AVX2)

struct vec { __m256 lo, hi; };
HW_INLINE vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HW_INLINE vec broadcast(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
HW_INLINE vec load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HW_INLINE void store(float *p, vec a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
HW_INLINE vec add(vec a, vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
HW_INLINE vec sub(vec a, vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
HW_INLINE vec mul(vec a, vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
HW_INLINE vec div(vec a, vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
HW_INLINE vec fma(vec a, vec b, vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
HW_INLINE vec min(vec a, vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
HW_INLINE vec max(vec a, vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
HW_INLINE vec select_less(vec x, vec y, vec a, vec b) {
    return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_LT_OQ))};
}
HW_INLINE __m256 scale_by_power(__m256 p, __m256 t) {
    __m256i n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n));
}
HW_INLINE vec scale_by_power(vec p, vec t) { return {scale_by_power(p.lo, t.lo), scale_by_power(p.hi, t.hi)}; }
HW_INLINE vec bf16_even(const void *p) {
    const __m256i *q = (const __m256i *)p;
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q + 1), 16))};
}
HW_INLINE vec bf16_odd(const void *p) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000)));
    vec raw = load((const float *)p);
    return {_mm256_and_ps(raw.lo, mask), _mm256_and_ps(raw.hi, mask)};
}
HW_INLINE vec f16(const void *p) {
    const __m128i *q = (const __m128i *)p;
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
struct words { __m256i lo, hi; };
HW_INLINE words load_words(const void *p) {
    return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
HW_INLINE __m256 nibble(__m256i w, int j) {
    __m256i shifted = j ? _mm256_srli_epi32(w, 4 * j) : w;
    return _mm256_cvtepi32_ps(j == 7 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi32(15)));
}
HW_INLINE vec nibble(words w, int j) { return {nibble(w.lo, j), nibble(w.hi, j)}; }
HW_INLINE vec bytes(const void *p) {
    const char *q = (const char *)p;
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)q))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(q + 8))))};
}

#else  // portable: four vectors of the compiler

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
struct vec { f4 v[4]; };

#define HW_EACH(expression) vec r; HW_UNROLL for (int i = 0; i < 4; i++) r.v[i] = (expression); return r;
HW_INLINE vec broadcast(float x) { HW_EACH((f4{x, x, x, x})) }
HW_INLINE vec zero() { return broadcast(0.0f); }
HW_INLINE vec load(const float *p) { vec r; memcpy(&r, p, sizeof r); return r; }
HW_INLINE void store(float *p, vec a) { memcpy(p, &a, sizeof a); }
HW_INLINE vec add(vec a, vec b) { HW_EACH(a.v[i] + b.v[i]) }
HW_INLINE vec sub(vec a, vec b) { HW_EACH(a.v[i] - b.v[i]) }
HW_INLINE vec mul(vec a, vec b) { HW_EACH(a.v[i] * b.v[i]) }
HW_INLINE vec div(vec a, vec b) { HW_EACH(a.v[i] / b.v[i]) }
#if defined(__aarch64__)
HW_INLINE vec fma(vec a, vec b, vec c) {
    HW_EACH((f4)vfmaq_f32((float32x4_t)c.v[i], (float32x4_t)a.v[i], (float32x4_t)b.v[i]))
}
#else
HW_INLINE vec fma(vec a, vec b, vec c) { HW_EACH(a.v[i] * b.v[i] + c.v[i]) }
#endif
HW_INLINE f4 blend(i4 mask, f4 a, f4 b) { return (f4)((mask & (i4)a) | (~mask & (i4)b)); }
HW_INLINE vec min(vec a, vec b) { HW_EACH(blend(a.v[i] < b.v[i], a.v[i], b.v[i])) }
HW_INLINE vec max(vec a, vec b) { HW_EACH(blend(a.v[i] > b.v[i], a.v[i], b.v[i])) }
HW_INLINE vec select_less(vec x, vec y, vec a, vec b) { HW_EACH(blend(x.v[i] < y.v[i], a.v[i], b.v[i])) }
HW_INLINE vec scale_by_power(vec p, vec t) { HW_EACH((f4)((i4)p.v[i] + ((i4)t.v[i] << 23))) }
HW_INLINE vec bf16_even(const void *p) { vec a = load((const float *)p); HW_EACH((f4)((i4)a.v[i] << 16)) }
HW_INLINE vec bf16_odd(const void *p) {
    vec a = load((const float *)p);
    HW_EACH((f4)((i4)a.v[i] & int32_t(0xffff0000)))
}
HW_INLINE float f16_value(uint16_t h) {
    // Exponent moved by multiplication: exact for normal and subnormal values; infinity and NaN get their own exponent.
    uint32_t magnitude = uint32_t(h & 0x7fff) << 13, sign = uint32_t(h & 0x8000) << 16;
    float scaled;
    memcpy(&scaled, &magnitude, 4);
    scaled *= 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &scaled, 4);
    if ((h & 0x7c00) == 0x7c00) bits |= 0x7f800000;
    bits |= sign;
    memcpy(&scaled, &bits, 4);
    return scaled;
}
HW_INLINE vec f16(const void *p) {
    float values[16];
    for (int i = 0; i < 16; i++) values[i] = f16_value(((const uint16_t *)p)[i]);
    return load(values);
}
struct words { i4 v[4]; };
HW_INLINE words load_words(const void *p) { words w; memcpy(&w, p, sizeof w); return w; }
HW_INLINE vec nibble(words w, int j) { HW_EACH(__builtin_convertvector((w.v[i] >> (4 * j)) & 15, f4)) }
HW_INLINE vec bytes(const void *p) {
    float values[16];
    for (int i = 0; i < 16; i++) values[i] = ((const uint8_t *)p)[i];
    return load(values);
}
#undef HW_EACH

#endif

HW_INLINE float sum(vec a) {
    float x[16];
    store(x, a);
    HW_UNROLL for (int width = 8; width > 0; width /= 2)
        HW_UNROLL for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

HW_INLINE float max_of(vec a) {
    float x[16];
    store(x, a);
    HW_UNROLL for (int width = 8; width > 0; width /= 2)
        HW_UNROLL for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}

HW_INLINE float first_lane(vec a) {
    float x[16];
    store(x, a);
    return x[0];
}

HW_INLINE vec load_partial(const float *p, int64_t count) {
    float x[16] = {};
    memcpy(x, p, size_t(count) * sizeof(float));
    return load(x);
}

HW_INLINE void store_partial(float *p, vec a, int64_t count) {
    float x[16];
    store(x, a);
    memcpy(p, x, size_t(count) * sizeof(float));
}

HW_INLINE vec lane_index() {
    static const float index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(index);
}

// e^x within 2 ulp; 0 below -87, saturated above 88, NaN stays NaN, exactly 1 at 0.
HW_INLINE vec exp(vec x) {
    const vec lowest = broadcast(-87.0f);
    vec y = max(lowest, min(broadcast(88.0f), x));
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const vec magic = broadcast(12582912.0f);
    vec t = fma(y, broadcast(1.44269504088896341f), magic);
    vec n = sub(t, magic);
    vec r = fma(n, broadcast(-0.693359375f), y);
    r = fma(n, broadcast(2.12194440e-4f), r);
    vec p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, broadcast(1.0f)));
    return select_less(x, lowest, zero(), scale_by_power(p, t));
}

}  // namespace
