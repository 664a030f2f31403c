// How the bytes of weights meet the bytes of inputs, and leave their sums in words. All ways are exact, so that a weight
// gives the same sums with all of them.
//
// VNNI multiplies four unsigned with four signed bytes and adds them up at once. ARM's dot products take two signed bytes:
// weights up to 255 come without the 128 that their kinds have for a zero. x86 without VNNI adds pairs of products in
// 16 bits, which hold several of small weights. Of weights up to 255 they hold one pair, if it is the inputs that have the
// sign: those never are -128. So do those of ARM without dot products.
#pragma once

#include "vec.h"

namespace {

#if defined(__aarch64__)
struct ByteDots {
    static constexpr bool SIGNED = true;

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
#define BOUGH_HOLDS_DOTS 1

// Sums of two products of unsigned with signed bytes in each half of a word, and the sums of both halves.
INLINE vu pairs_of_bytes(vu w, vu a) {
#if defined(__AVX512BW__)
    return (vu)_mm512_maddubs_epi16((__m512i)w, (__m512i)a);
#else
    return (vu)_mm256_maddubs_epi16((__m256i)w, (__m256i)a);
#endif
}
INLINE vi add_halves(vi acc, vu halves) { return acc + dot_halves(halves, vu{} + 0x00010001u); }

struct ByteDots {
    static constexpr bool SIGNED = true;

    static INLINE vi multiply(vi acc, vu w, uint32_t a) {
        const vu inputs = a - vu{};
#if defined(__AVX512BW__)
        const __mmask64 negative = _mm512_movepi8_mask((__m512i)w);
        const vu size = (vu)_mm512_abs_epi8((__m512i)w);
        const vu given = (vu)_mm512_mask_sub_epi8((__m512i)inputs, negative, __m512i{}, (__m512i)inputs);
#else
        const vu size = (vu)_mm256_abs_epi8((__m256i)w);
        const vu given = (vu)_mm256_sign_epi8((__m256i)inputs, (__m256i)w);
#endif
        return add_halves(acc, pairs_of_bytes(size, given));
    }
};

// Sums stay in halves of words until add() is called.
struct HeldDots {
    static INLINE vi multiply(vi held, vu w, uint32_t a) {
        return (vi)((vhalves)held + (vhalves)pairs_of_bytes(w, a - vu{}));
    }
    static INLINE vi add(vi acc, vi held) { return add_halves(acc, (vu)held); }
};

#else
struct ByteDots {
    static constexpr bool SIGNED = false;

    static INLINE vi multiply(vi acc, vu w, uint32_t a) { return dot_bytes(acc, w, a); }
};
#endif

// For weights up to MOST: the words whose products are held in halves, how they are multiplied, and whether they lose 128
// for that, so that the sums of their products need no start.
#if defined(BOUGH_HOLDS_DOTS)
template <int MOST> constexpr int HELD_WORDS = 32767 / (2 * 127 * MOST);
template <int MOST, bool HELD = (HELD_WORDS<MOST> > 0)> struct DotsOf { typedef ByteDots type; };
template <int MOST> struct DotsOf<MOST, true> { typedef HeldDots type; };
#else
template <int MOST> constexpr int HELD_WORDS = 0;
template <int MOST> struct DotsOf { typedef ByteDots type; };
#endif
template <int MOST> constexpr bool LOSES_ZERO = ByteDots::SIGNED && MOST > 127;

}  // namespace
