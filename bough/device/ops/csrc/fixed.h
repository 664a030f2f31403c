// bf16 as whole numbers: where a processor adds up products of 16-bit integers faster than those of floats, and has no bf16.
//
// 64 inputs of a row share a power of two that makes them whole numbers of 13 bits and a sign, and so do 64 weights of an
// output (block floating point). A bf16 has 8 bits: all that are no less than 1/32 of the largest of their group lose
// nothing, smaller ones are rounded to 2^-12 of it, which is less than bf16 rounds the largest itself. (Where weights of a
// group are nearly all as large as the largest, they have one bit less.) Sums of products within a group fit into 32 bits
// and are exact: they have the same bits in whatever order they are added up. Those of groups are added up as floats, in
// rising order; they overflow where weights exceed 1e30.
#pragma once

#include "vec.h"

namespace {

#if (defined(__AVX512VNNI__) && !defined(__AVX512BF16__)) || (defined(__AVX2__) && !defined(__AVX512F__))
#define BOUGH_FIXES 1
constexpr bool FIXES_PAIRS = true;
#else
constexpr bool FIXES_PAIRS = false;
#endif

constexpr int FIXED_INPUTS = 64, FIXED_WORDS = FIXED_INPUTS / 2;    // of a group
constexpr int FIXED_BITS = 13;
INLINE int64_t fixed_groups(int64_t n_in) { return ceil_div(n_in, FIXED_INPUTS); }
constexpr float FIXED_MAGIC = 12582912.0f;    // 1.5 * 2^23: added to a number, it leaves a whole one in the lower bits

// What magnitudes of weights of an output may add up to in a group: with inputs below 2^13, sums stay below 2^31.
constexpr float MOST_FIXED = (1 << (31 - FIXED_BITS)) - FIXED_INPUTS;    // each may be larger by one

// Powers of two by their exponents, biased as floats are: of the one that makes numbers up to `top` whole ones, where the
// exponent of top is given, and of its inverse. Powers are bounded such that both are floats.
constexpr int MOST_EXPONENT = 247, NOT_FINITE = 255;
constexpr int EXPONENTS = 2 * 127 + FIXED_BITS - 1;    // the sum of both
INLINE int fixed_exponent(int of_top) {
    const int exponent = EXPONENTS - of_top;
    return exponent < MOST_EXPONENT ? exponent : MOST_EXPONENT;
}
INLINE vf power_of(vu exponent) { return (vf)(exponent << 23); }
INLINE vf inverse_power_of(vu exponent) { return (vf)((254u - exponent) << 23); }

#if defined(BOUGH_FIXES)
// What weights are multiplied with to become whole numbers.
INLINE vf fixed_power(vu exponent) {
#if defined(__AVX512F__)
    return (vf)((exponent + 1) << 23 | 0x100u);    // twice the power, and 2^-15 of it more
#else
    return power_of(exponent);
#endif
}

// Pairs of weights -> pairs of the nearest whole numbers of 16 bits. Of two that are as near it is the even one or, with
// AVX-512, the larger: as vectors of 16-bit products round (linear_fixed.h), whose sign stays apart. What is halfway is made
// a little larger than that for it, twice its size is rounded down, and 1 added, before it is halved.
INLINE vu fixed_pairs(vu pairs, vf power) {
#if defined(__AVX512F__)
    constexpr int DOWN = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const __m512 magic = _mm512_set1_ps(FIXED_MAGIC + 1);
    const vu first = (vu)_mm512_fmadd_round_ps((__m512)first_of(pairs), (__m512)power, magic, DOWN);
    const vu second = (vu)_mm512_fmadd_round_ps((__m512)second_of(pairs), (__m512)power, magic, DOWN);
    return (vu)_mm512_srai_epi16((__m512i)(second << 16 | (first & 0xffffu)), 1);
#else
    const vu first = (vu)fma(first_of(pairs), power, splat(FIXED_MAGIC));
    const vu second = (vu)fma(second_of(pairs), power, splat(FIXED_MAGIC));
    return (vu)_mm256_blend_epi16((__m256i)first, (__m256i)(second << 16), 0xaa);
#endif
}

// acc + w.0 * x.0 + w.1 * x.1 of whole numbers of 16 bits. Left alone, compilers move sums about, and out of the registers.
INLINE vi dot_fixed(vi acc, vu w, vu x) {
#if defined(__AVX512F__)
    asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
#elif defined(__AVXVNNI__)
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
#else
    acc += (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x);
    asm("" : "+x"(acc));
#endif
    return acc;
}
#endif

// A group of a row, x[FIXED_INPUTS], as whole numbers; returns what they have to be multiplied with: NaN where not all are finite.
template <typename T>
INLINE float fix_group(const T* x, int16_t* to) {
    constexpr int VECS = FIXED_INPUTS / WIDTH;
    vf value[VECS];
    vi most = vi{};
    for (int i = 0; i < VECS; ++i) {
        value[i] = rounded(load(x + i * WIDTH), (const bf16*)nullptr);
        const vi bits = (vi)value[i] & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    const int top = max_lane(most) >> 23;
    if (top == 255) return __builtin_nanf("");
    const vu exponent = (uint32_t)fixed_exponent(top) - vu{};
    const vf power = power_of(exponent);
    for (int i = 0; i < VECS; ++i) {
        const vs q = lower_halves((vi)fma(value[i], power, splat(FIXED_MAGIC)) - (vi)splat(FIXED_MAGIC));
        memcpy(to + i * WIDTH, &q, sizeof q);
    }
    return inverse_power_of(exponent)[0];
}

// A row x[n_in] as pairs of whole numbers, and a scale for each group of them.
template <typename T>
INLINE void fix_row(const T* x, int64_t n_in, uint32_t* pairs, float* scales) {
    int16_t* to = (int16_t*)pairs;
    for (; n_in >= FIXED_INPUTS; n_in -= FIXED_INPUTS, x += FIXED_INPUTS, to += FIXED_INPUTS) *scales++ = fix_group(x, to);
    if (n_in == 0) return;
    T padded[FIXED_INPUTS] = {};
    int16_t last[FIXED_INPUTS] = {};
    memcpy(padded, x, sizeof(T) * n_in);
    *scales = fix_group(padded, last);
    memcpy(to, last, 4 * ((n_in + 1) / 2));
}

}  // namespace
