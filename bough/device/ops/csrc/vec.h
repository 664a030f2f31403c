// A vector of WIDTH floats for the instruction set that this unit is built for.
//
// Plain arithmetic uses the compiler's vector extension, which also covers NEON; what it cannot say (fused
// multiply-add, bf16 dot products) is spelled out per instruction set. Everything has internal
// linkage, so that the copies built for different instruction sets never meet.
#pragma once

#include <stdint.h>
#include <string.h>

#include "common.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define BOUGH_WIDTH 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define BOUGH_WIDTH 8
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <tmmintrin.h>
#endif
#define BOUGH_WIDTH 4
#endif

namespace {

constexpr int WIDTH = BOUGH_WIDTH;

typedef float vf __attribute__((vector_size(4 * BOUGH_WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * BOUGH_WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * BOUGH_WIDTH)));
typedef int16_t vs __attribute__((vector_size(2 * BOUGH_WIDTH)));
typedef uint16_t vh __attribute__((vector_size(2 * BOUGH_WIDTH)));
typedef int8_t vb __attribute__((vector_size(BOUGH_WIDTH)));
typedef uint8_t vub __attribute__((vector_size(BOUGH_WIDTH)));

#define INLINE inline __attribute__((always_inline))
// For what many kernels share and nobody waits for: with a copy in each of them, compiling takes half as long again.
#define NOINLINE __attribute__((noinline))

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t ceil_to(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

// A number that templates take by its type.
template <int N> struct Count { static constexpr int value = N; };

INLINE vf splat(float x) { return x - vf{}; }

INLINE vf loadf(const float* p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void storef(float* p, vf x) { memcpy(p, &x, sizeof x); }

INLINE vu loadu(const uint32_t* p) {
    vu x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void storeu(uint32_t* p, vu x) { memcpy(p, &x, sizeof x); }

INLINE vf as_float(vu x) { return (vf)x; }

// Between widths. Asked for in one step, compilers take wide vectors apart, element by element.
#if defined(__AVX512F__)
INLINE vu widen(vh x) { return (vu)_mm512_cvtepu16_epi32((__m256i)x); }
INLINE vu widen(vub x) { return (vu)_mm512_cvtepu8_epi32((__m128i)x); }
INLINE vi widen(vb x) { return (vi)_mm512_cvtepi8_epi32((__m128i)x); }
INLINE vb lowest_bytes(vi x) { return (vb)_mm512_cvtepi32_epi8((__m512i)x); }
#elif defined(__AVX2__)
INLINE __m128i in_low_half(const void* bytes) { return _mm_loadl_epi64((const __m128i*)bytes); }
INLINE vu widen(vh x) { return (vu)_mm256_cvtepu16_epi32((__m128i)x); }
INLINE vu widen(vub x) { return (vu)_mm256_cvtepu8_epi32(in_low_half(&x)); }
INLINE vi widen(vb x) { return (vi)_mm256_cvtepi8_epi32(in_low_half(&x)); }
#else
INLINE vu widen(vh x) { return __builtin_convertvector(x, vu); }
INLINE vu widen(vub x) { return __builtin_convertvector(__builtin_convertvector(x, vh), vu); }
INLINE vi widen(vb x) { return __builtin_convertvector(__builtin_convertvector(x, vs), vi); }
#endif
#if !defined(__AVX512F__)
INLINE vb lowest_bytes(vi x) { return __builtin_convertvector(__builtin_convertvector(x, vs), vb); }
#endif

// Of numbers of 16 bits.
INLINE vs lower_halves(vi x) {
#if defined(__AVX512F__)
    return (vs)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
    return (vs)_mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
#else
    return __builtin_convertvector(x, vs);
#endif
}

// Widens WIDTH elements to float.
INLINE vf load(const float* p) { return loadf(p); }

INLINE vf load(const bf16* p) {
    vh x;
    memcpy(&x, p, sizeof x);
    return (vf)(widen(x) << 16);
}

INLINE float widen(float x) { return x; }

INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounds to the nearest bf16, ties to even; a NaN stays one.
INLINE bf16 narrow_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The bits of x rounded to bf16, in the upper halves of the lanes; the lower ones are anything.
INLINE vu rounded_bits(vf x) {
    const vu bits = (vu)x;
    return x != x ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1);
}

INLINE vh narrow_bf16(vf x) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    return (vh)lower_halves((vi)rounded_bits(x) >> 16);
#endif
}

INLINE void store(float* p, vf x) { storef(p, x); }

INLINE void store(bf16* p, vf x) {
    vh y = narrow_bf16(x);
    memcpy(p, &y, sizeof y);
}

INLINE void store_one(float* p, float x) { *p = x; }
INLINE void store_one(bf16* p, float x) { *p = narrow_bf16(x); }

// The value that a tensor of T would hold.
INLINE vf rounded(vf x, const float*) { return x; }
INLINE vf rounded(vf x, const bf16*) {
#if defined(__AVX512BF16__)
    return (vf)(widen(narrow_bf16(x)) << 16);
#else
    return (vf)(rounded_bits(x) & 0xffff0000u);
#endif
}
INLINE float rounded(float x, const float*) { return x; }
INLINE float rounded(float x, const bf16*) { return widen(narrow_bf16(x)); }

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf vmax(vf a, vf b) { return select(a > b, a, b); }
INLINE vf vmin(vf a, vf b) { return select(a < b, a, b); }

// The larger one; b where one is not a number.
INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vmax(a, b);
#endif
}

INLINE vi lane_index() {
    vi x;
    for (int i = 0; i < WIDTH; ++i) x[i] = i;
    return x;
}

// WIDTH bits of `word`, from `first` on, as a mask of lanes.
INLINE vi lanes_of(uint32_t word, int first) { return ((vu{} + word) >> (vu)(lane_index() + first) & 1) != 0; }

// Whether any lane of a mask is on.
INLINE bool any(vi mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int found = 0;
    for (int lane = 0; lane < WIDTH; ++lane) found |= mask[lane];
    return found;
#endif
}

// Horizontal sum and maximum; the order of the sum is fixed: halves, quarters, and so on.
INLINE float sum(vf x) {
#if defined(__AVX512F__)
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
    float lane[WIDTH];
    storef(lane, x);
#if BOUGH_WIDTH >= 8
    for (int i = 0; i < 4; ++i) lane[i] += lane[i + 4];
#endif
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
#endif
}

INLINE float max_lane(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lane[WIDTH];
    storef(lane, x);
    float best = lane[0];
    for (int i = 1; i < WIDTH; ++i) best = lane[i] > best ? lane[i] : best;
    return best;
#endif
}

// 2^x for x <= 126, relative error about 1e-7; exactly 0 below -125. A NaN stays one.
// Method: 2^round(x) by exponent arithmetic times the Taylor series of exp(f ln 2), |f| <= 1/2.
INLINE vf exp2v(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vi tiny = x < splat(-125.0f);
    vf clamped = select(tiny, splat(-125.0f), x);
    vf shifted = clamped + magic;
    vf f = clamped - (shifted - magic);
    vf y = splat(1.5252734e-5f);
    y = fma(y, f, splat(1.5403530e-4f));
    y = fma(y, f, splat(1.3333558e-3f));
    y = fma(y, f, splat(9.6181291e-3f));
    y = fma(y, f, splat(5.5504109e-2f));
    y = fma(y, f, splat(2.4022651e-1f));
    y = fma(y, f, splat(6.9314718e-1f));
    y = fma(y, f, splat(1.0f));
    vf scaled = (vf)((vu)y + ((vu)shifted << 23));
    return select(tiny, vf{}, scaled);
}

INLINE float exp2_one(float x) { return exp2v(splat(x))[0]; }

// 2^f of 0 <= f <= 1, relative error 3e-6: a polynomial (least maximum, 1 at 0), below 2.
INLINE vf small_power(vf f) {
    vf y = splat(1.3426697e-2f);
    y = fma(y, f, splat(5.2242454e-2f));
    y = fma(y, f, splat(2.4128021e-1f));
    y = fma(y, f, splat(6.9304484e-1f));
    return fma(y, f, splat(1.0f));
}

// exp2 of x <= 126 for what is rounded to T; 0 of what is far below -126. A NaN stays one. With 16 bits to come, the error of
// small_power() is small enough: 2^floor(x) times that of what is left.
INLINE vf exp2_for(vf x, const float*) { return exp2v(x); }

INLINE vf exp2_for(vf x, const bf16*) {
#if defined(__AVX512F__)
    vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);     // 0 of infinities
    return (vf)_mm512_scalef_ps((__m512)small_power(f), (__m512)x);
#elif defined(__AVX2__)
    const vf least = splat(-126.0f), clamped = larger(least, x), floor = (vf)_mm256_floor_ps((__m256)clamped);
    const vu power = (vu)_mm256_cvtps_epi32((__m256)floor) << 23;
    return select(x < least, vf{}, (vf)((vu)small_power(clamped - floor) + power));
#else
    return exp2v(x);
#endif
}

// a / b for what is rounded to T; b: no infinity, and not below the smallest normal number.
INLINE vf quotient_for(vf a, vf b, const float*) { return a / b; }

INLINE vf quotient_for(vf a, vf b, const bf16*) {
#if defined(__AVX512F__)
    const vf y = (vf)_mm512_rcp14_ps((__m512)b);
    return a * fma(fma(-b, y, splat(1.0f)), y, y);    // a step of Newton's
#else
    return a / b;
#endif
}

// tanh x, relative error about 1e-7. A NaN stays one.
// Method: near 0 an odd polynomial (least maximum), beyond 1 - 2 / (exp(2 |x|) + 1) with the sign of x.
INLINE vf tanhv(vf x) {
    const vf one = splat(1.0f);
    vf size = (vf)((vu)x & 0x7fffffffu);
    vf power = select(size > splat(10.0f), splat(10.0f), size) * splat(2.88539008f);
    vf far = one - splat(2.0f) / (exp2v(power) + one);
    vf z = x * x;
    vf y = splat(-5.7170613e-3f);
    y = fma(y, z, splat(2.0650605e-2f));
    y = fma(y, z, splat(-5.3743505e-2f));
    y = fma(y, z, splat(1.3331491e-1f));
    y = fma(y, z, splat(-3.3333284e-1f));
    vf near = fma(x * z, y, x);
    return select(size < splat(0.625f), near, (vf)((vu)far | ((vu)x & 0x80000000u)));
}

// Where no instruction multiplies pairs of bf16, they are taken apart for every product: what is multiplied often is held as
// floats.
#if defined(__AVX512BF16__)
constexpr bool WIDENS_PAIRS = false;
#else
constexpr bool WIDENS_PAIRS = true;
#endif

// Both elements of a pair per lane.
INLINE vf first_of(vu pair) { return (vf)(pair << 16); }
INLINE vf second_of(vu pair) { return (vf)(pair & 0xffff0000u); }

// Adds the product of two packed bf16 pairs per lane: acc + a.lo * b.lo + a.hi * b.hi.
INLINE vf dot_pairs(vf acc, vu a, uint32_t b) {
    vu pair = b - vu{};
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)pair);
#else
    acc = fma(first_of(a), first_of(pair), acc);
    return fma(second_of(a), second_of(pair), acc);
#endif
}

// Whether an instruction multiplies and adds bytes.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool BYTE_DOTS = true;
#else
constexpr bool BYTE_DOTS = false;
#endif

constexpr uint32_t FLIP = 0x80808080u;      // signed bytes b become unsigned ones, b + 128, and back

#if defined(__AVX512VNNI__)
#define BOUGH_VNNI 1
INLINE vi dot_vnni(vi acc, vu w, vu a) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a); }
#elif defined(__AVXVNNI__)
#define BOUGH_VNNI 1
INLINE vi dot_vnni(vi acc, vu w, vu a) { return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)a); }
#endif

// Halves of words as integers with a sign, and the sums of their products in pairs.
#if defined(__x86_64__) && !defined(BOUGH_VNNI)
typedef int16_t vhalves __attribute__((vector_size(4 * BOUGH_WIDTH)));

INLINE vi dot_halves(vu a, vu b) {
#if defined(__AVX512BW__)
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}

// acc + the products of four unsigned with four signed bytes per lane: bytes 0 and 2, then 1 and 3, in 16 bits.
INLINE vi dot_widened(vi acc, vu w, vu a) {
    const vu even = (vu)((vhalves)a << 8 >> 8), odd = (vu)((vhalves)a >> 8);
    return acc + (dot_halves(w & 0x00ff00ffu, even) + dot_halves(w >> 8 & 0x00ff00ffu, odd));
}
#endif

#if defined(__ARM_FEATURE_DOTPROD)
INLINE vi dot_signed(vi acc, vu a, vu b) { return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b); }

// The same of signed bytes w - 128, and 128 times the sum of the others.
INLINE vi dot_shifted(vi acc, vu w, vu a) {
    return dot_signed(acc, w ^ FLIP, a) + (dot_signed(vi{}, a, vu{} + 0x01010101u) << 7);
}
#endif

// acc + w.0 * a.0 + w.1 * a.1 + w.2 * a.2 + w.3 * a.3 per lane, with unsigned bytes w and signed bytes a; exact.
INLINE vi dot_bytes(vi acc, vu w, uint32_t a) {
#if defined(BOUGH_VNNI)
    return dot_vnni(acc, w, a - vu{});
#elif defined(__x86_64__)
    return dot_widened(acc, w, a - vu{});
#elif defined(__ARM_FEATURE_DOTPROD)
    return dot_shifted(acc, w, a - vu{});
#else
    vi byte = (vi)(w & 0xffu) * (int32_t)(int8_t)a + (vi)((w >> 8) & 0xffu) * (int32_t)(int8_t)(a >> 8);
    return acc + byte + (vi)((w >> 16) & 0xffu) * (int32_t)(int8_t)(a >> 16) + (vi)(w >> 24) * (int32_t)(int8_t)(a >> 24);
#endif
}

// The same with unsigned bytes w of one word and signed bytes a per lane.
INLINE vi dot_bytes(vi acc, uint32_t w, vu a) {
#if defined(BOUGH_VNNI)
    return dot_vnni(acc, w - vu{}, a);
#elif defined(__ARM_FEATURE_DOTPROD)
    return dot_shifted(acc, w - vu{}, a);
#else
    for (int i = 0; i < 32; i += 8) acc += ((vi)(a << (24 - i)) >> 24) * (int32_t)(w >> i & 0xffu);
    return acc;
#endif
}

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

INLINE int32_t sum(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t total = 0;
    for (int lane = 0; lane < WIDTH; ++lane) total += x[lane];
    return total;
#endif
}

INLINE int32_t max_lane(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#else
    int32_t best = x[0];
    for (int lane = 1; lane < WIDTH; ++lane) best = x[lane] > best ? x[lane] : best;
    return best;
#endif
}

// Widens fp16 values, exactly; each lies in the lower half of a lane.
INLINE vf widen_halves(vu bits) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#else
    // Exponent and fraction move up; the product mends the bias and normalises what was subnormal.
    vf size = (vf)((bits & 0x7fffu) << 13) * splat(5.192296858534828e33f);
    vi special = (vi)((bits & 0x7c00u) == 0x7c00u);
    size = select(special, (vf)((vu)size | 0x7f800000u), size);
    return (vf)((vu)size | ((bits & 0x8000u) << 16));
#endif
}

// Widens WIDTH of them.
INLINE vf load_half(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16((float16x4_t)vld1_u16(p));
#else
    vh x;
    memcpy(&x, p, sizeof x);
    return widen_halves(widen(x));
#endif
}

INLINE float widen_half(uint16_t bits) {
    const uint16_t many[WIDTH] = {bits};
    return load_half(many)[0];
}

// Widens WIDTH bytes to float.
INLINE vf load_bytes(const uint8_t* p) {
    vub x;
    memcpy(&x, p, sizeof x);
    return to_float((vi)widen(x));
}

INLINE vf load_bytes(const int8_t* p) {
    vb x;
    memcpy(&x, p, sizeof x);
    return to_float(widen(x));
}

}  // namespace
