// How the bytes of weights meet the bytes of inputs, and leave their sums in words. All ways are exact, so that a weight
// gives the same sums with all of them.
//
// VNNI multiplies four unsigned with four signed bytes and adds them up at once. ARM's dot products take two signed bytes:
// weights up to 255 come without the 128 that their kinds have for a zero. x86 without VNNI adds pairs of products of an
// unsigned and a signed byte in 16 bits, which hold several of small weights. Of weights up to 255 they hold one pair, if the
// inputs, which never are -128, are the unsigned ones, and the weights take their signs: a row then has two words for four
// inputs. Where few inputs are large, weights stay the unsigned ones, and of pairs that are too large the second input is
// multiplied later. ARM without dot products holds one pair as well, of bytes that are signed both.
#pragma once

#include "vec.h"

namespace {

// Of one word of inputs of a row, those that are multiplied with its weights after all others.
struct Late {
    uint32_t word, inputs;
};

#if defined(__aarch64__)
struct ByteDots {
    static constexpr bool SIGNED = true;
    static constexpr int WORDS = 1;

    static INLINE vi multiply(vi acc, vu w, const uint32_t* a) {
#if defined(__ARM_FEATURE_DOTPROD)
        return dot_signed(acc, w, *a - vu{});
#else
        const int8x16_t weights = (int8x16_t)w;
        const int8x8_t inputs = vreinterpret_s8_u32(vdup_n_u32(*a));
        const int16x8_t low = vmull_s8(vget_low_s8(weights), inputs), high = vmull_s8(vget_high_s8(weights), inputs);
        return (vi)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, high));
#endif
    }
};

#elif defined(__SSSE3__) && !defined(BOUGH_VNNI)
#define BOUGH_HOLDS_DOTS 1

// Sums of two products of unsigned with signed bytes in each half of a word, and the sums of both halves.
INLINE vu pairs_of_bytes(vu w, vu a) {
#if defined(__AVX512BW__)
    return (vu)_mm512_maddubs_epi16((__m512i)w, (__m512i)a);
#elif defined(__AVX2__)
    return (vu)_mm256_maddubs_epi16((__m256i)w, (__m256i)a);
#else
    return (vu)_mm_maddubs_epi16((__m128i)w, (__m128i)a);
#endif
}
INLINE vi add_halves(vi acc, vu halves) { return acc + dot_halves(halves, vu{} + 0x00010001u); }

// Left alone, the compiler gathers the products of several words first, for which there are no registers.
INLINE vi in_turn(vi sum) {
    asm volatile("" : "+v"(sum));
    return sum;
}

// Of four inputs, the words are their sizes and what turns weights w, as they are stored, into w - 128 where an input is not
// negative, and into 127 - w, which is one less than 128 - w, where it is. What that leaves out is the sum of the sizes of
// negative inputs, whatever the weights are: sums begin with it.
struct ByteDots {
    static constexpr bool SIGNED = false;
    static constexpr int WORDS = 2;

    static INLINE vi multiply(vi acc, vu w, const uint32_t* a) {
        return in_turn(add_halves(acc, pairs_of_bytes(a[0] - vu{}, w ^ (a[1] - vu{}))));
    }

    // Puts the words of 16 inputs in order; returns what their sums begin with.
    static INLINE int32_t prepare(const uint32_t* inputs, uint32_t* words) {
        const __m128i x = _mm_loadu_si128((const __m128i*)inputs), negative = _mm_cmpgt_epi8(__m128i{}, x);
        const __m128i size = _mm_abs_epi8(x), turn = _mm_xor_si128(negative, _mm_set1_epi32((int)FLIP));
        _mm_storeu_si128((__m128i*)words, _mm_unpacklo_epi32(size, turn));
        _mm_storeu_si128((__m128i*)(words + 4), _mm_unpackhi_epi32(size, turn));
        const __m128i left_out = _mm_sad_epu8(_mm_and_si128(size, negative), __m128i{});
        return (int32_t)(left_out[0] + left_out[1]);
    }
};

// Two products stay within 16 bits where the inputs come to 128 at most, either way: few of a rotated row do not. Sums may leave
// 32 bits before they have their start, as with VNNI, and come back.
struct RotatedDots {
    static constexpr int WORDS = 1;

    static INLINE vi multiply(vi acc, vu w, const uint32_t* a) { return in_turn(add_halves(acc, pairs_of_bytes(w, *a - vu{}))); }

    // Takes the second inputs of pairs that are too large out of n words, a multiple of 4; returns the number of words that
    // are put into `late`.
    static INLINE int put_off(uint32_t* inputs, int64_t n, Late* late) {
        int count = 0;
        for (int64_t i = 0; i < n; i += 4) {
            const __m128i x = _mm_loadu_si128((const __m128i*)(inputs + i));
            const __m128i size = _mm_abs_epi16(_mm_maddubs_epi16(_mm_set1_epi8(1), x));
            const __m128i too_large = _mm_cmpgt_epi16(size, _mm_set1_epi16(128));
            if (__builtin_expect(!_mm_movemask_epi8(too_large), 1)) continue;
            const __m128i second = _mm_and_si128(_mm_and_si128(x, too_large), _mm_set1_epi16((short)0xff00));
            _mm_storeu_si128((__m128i*)(inputs + i), _mm_xor_si128(x, second));
            uint32_t words[4];
            _mm_storeu_si128((__m128i*)words, second);
            for (int j = 0; j < 4; ++j)
                if (words[j]) late[count++] = {(uint32_t)i + j, words[j]};
        }
        return count;
    }
};

// Sums stay in halves of words until add() is called.
struct HeldDots {
    static constexpr int WORDS = 1;

    static INLINE vi multiply(vi held, vu w, const uint32_t* a) {
        return in_turn((vi)((vhalves)held + (vhalves)pairs_of_bytes(w, *a - vu{})));
    }
    static INLINE vi add(vi acc, vi held) { return add_halves(acc, (vu)held); }
};

#else
struct ByteDots {
    static constexpr bool SIGNED = false;
    static constexpr int WORDS = 1;

    static INLINE vi multiply(vi acc, vu w, const uint32_t* a) { return dot_bytes(acc, w, *a); }
};
#endif

#if defined(BOUGH_HOLDS_DOTS)
constexpr bool PUTS_OFF = true;
#else
constexpr bool PUTS_OFF = false;
struct RotatedDots : ByteDots {
    static INLINE int put_off(uint32_t*, int64_t, Late*) { return 0; }
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
