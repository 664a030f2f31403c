// How the bytes of weights meet the bytes of inputs, and leave their sums in words. All ways are exact, so that a weight
// gives the same bits with all of them.
//
// VNNI multiplies four unsigned with four signed bytes and adds them up at once. ARM's dot products take two signed bytes:
// weights up to 255 come without the 128 that their kinds have for a zero. x86 without VNNI adds pairs of products in
// 16 bits, which hold several of small weights. Of weights up to 255 they hold one pair, if it is the inputs that have the
// sign: those never are -128. So do those of ARM without dot products.
#pragma once

#include "vec.h"

namespace {

struct UnsignedDots {
    static INLINE vi multiply(vi acc, vu w, uint32_t a) { return dot_bytes(acc, w, a); }
};

#if defined(__aarch64__)
#define BOUGH_SIGNED_DOTS 1

struct SignedDots {
    static INLINE vi multiply(vi acc, vu w, uint32_t a) {
#if defined(__ARM_FEATURE_DOTPROD)
        return dot_signed(acc, w, a - vu{});
#else
        const int8x16_t weights = (int8x16_t)w;
        const int8x8_t inputs = vreinterpret_s8_u32(vdup_n_u32(a));
        const int16x8_t low = vmull_s8(vget_low_s8(weights), inputs), high = vmull_s8(vget_high_s8(weights), inputs);
        return (vi)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, high));
#endif
    }
};

#elif defined(__AVX2__) && !defined(BOUGH_VNNI)
#define BOUGH_SIGNED_DOTS 1
#define BOUGH_HELD_DOTS 1

struct SignedDots {
    static INLINE vi multiply(vi acc, vu w, uint32_t a) {
        const vu inputs = a - vu{}, ones = vu{} + 0x00010001u;
#if defined(__AVX512BW__)
        const __m512i given = _mm512_mask_sub_epi8((__m512i)inputs, _mm512_movepi8_mask((__m512i)w), __m512i{}, (__m512i)inputs);
        return acc + dot_halves((vu)_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), given), ones);
#else
        const __m256i given = _mm256_sign_epi8((__m256i)inputs, (__m256i)w);
        return acc + dot_halves((vu)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), given), ones);
#endif
    }
};

// Sums stay in 16 bits, two in a word, until add() is called.
struct HeldDots {
    static INLINE vi multiply(vi held, vu w, uint32_t a) {
#if defined(__AVX512BW__)
        const vu products = (vu)_mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32((int)a));
#else
        const vu products = (vu)_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32((int)a));
#endif
        return (vi)((vhalves)held + (vhalves)products);
    }
    static INLINE vi add(vi acc, vi held) { return acc + dot_halves((vu)held, vu{} + 0x00010001u); }
};
#endif

// Whether weights up to MOST are to lose 128, and the sums of their products need no start.
#if defined(BOUGH_SIGNED_DOTS)
template <int MOST> constexpr bool LOSES_ZERO = MOST == 255;
template <int MOST> struct DotsOf { typedef SignedDots type; };
#else
template <int MOST> constexpr bool LOSES_ZERO = false;
template <int MOST> struct DotsOf { typedef UnsignedDots type; };
#endif

// Words of weights up to MOST whose products 16 bits hold; 0 where none are held.
#if defined(BOUGH_HELD_DOTS)
template <int MOST> constexpr int HELD_WORDS = 32767 / (2 * 127 * MOST);
template <> struct DotsOf<63> { typedef HeldDots type; };
template <> struct DotsOf<15> { typedef HeldDots type; };
#else
template <int MOST> constexpr int HELD_WORDS = 0;
#endif

}  // namespace
