// Cells of the KV pool: their element types, how they become the elements that attention computes with, and how many
// of them one loop looks ahead.
//
// Attention computes with floats, or with pairs of bf16. Cells of another type are turned, row by row, into whichever
// of the two the queries have: beside bf16, float16 and float32 are rounded, which loses nothing of what was written from
// bf16. int8 cells hold integers; their scales, one per token and kv head, multiply scores and weights. Beside queries of
// bf16 they are not widened at all (bytes.h). Pairs that no instruction multiplies are held as floats beside many queries.
#pragma once

#include <type_traits>

#include "vec.h"

namespace {

// What the inner products run over: a float, or a pair of bf16; and back.
template <typename T> struct WordOf;
template <> struct WordOf<float> { typedef float type; };
template <> struct WordOf<bf16> { typedef uint32_t type; };
template <typename T> using Word = typename WordOf<T>::type;

template <typename E> struct ElementOf;
template <> struct ElementOf<float> { typedef float type; };
template <> struct ElementOf<uint32_t> { typedef bf16 type; };
template <typename E> using Element = typename ElementOf<E>::type;

// Keys that one word of V, or of weights, holds.
template <typename E> constexpr int KEYS_PER_WORD = 4 / (int)sizeof(Element<E>);

// An element of bf16, widened.
struct WideBf16 { float value; };
template <> struct ElementOf<WideBf16> { typedef bf16 type; };
template <> constexpr int KEYS_PER_WORD<WideBf16> = 1;
INLINE vf step(vf acc, const WideBf16* column, WideBf16 a) { return fma(loadf(&column->value), splat(a.value), acc); }

// What many queries, their keys, weights and values are held as, and how many words of that a word of T takes.
template <typename T> struct LaneWordOf { typedef Word<T> type; };
template <> struct LaneWordOf<bf16> { typedef std::conditional_t<WIDENS_PAIRS, WideBf16, uint32_t> type; };
template <typename T> using LaneWord = typename LaneWordOf<T>::type;
template <typename T> constexpr int WIDENED = KEYS_PER_WORD<Word<T>> / KEYS_PER_WORD<LaneWord<T>>;

INLINE int64_t cell_bytes(int dtype) {
    return dtype == BOUGH_FLOAT32 ? 4 : dtype == BOUGH_INT8 ? 1 : 2;
}

// Rounds to the nearest float16, ties to even; what is too large becomes infinity.
INLINE uint16_t narrow_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) {
        // Adding 2^-1 makes the unit of the last place that of the smallest float16.
        float magnitude;
        memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
}

// Rounds finite values; the bits are those of store() but for numbers below the smallest normal one.
INLINE void store_weight(float* p, vf x) { storef(p, x); }

INLINE void store_weight(bf16* p, vf x) {
#if defined(__AVX512BF16__)
    vh y = (vh)_mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &y, sizeof y);
#else
    store(p, x);
#endif
}

INLINE vf load_int8(const int8_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vf x;
    for (int i = 0; i < WIDTH; ++i) x[i] = p[i];
    return x;
#endif
}

// WIDTH elements of a cell as floats.
INLINE vf load_cell(int dtype, const void* cell, int64_t at) {
    switch (dtype) {
        case BOUGH_FLOAT32: return load((const float*)cell + at);
        case BOUGH_BFLOAT16: return load((const bf16*)cell + at);
        case BOUGH_FLOAT16: return load_half((const uint16_t*)cell + at);
        default: return load_int8((const int8_t*)cell + at);
    }
}

// One cell in the type that attention computes with.
template <typename T>
INLINE void widen_cell(int dtype, const void* cell, T* to, int dim) {
    switch (dtype) {  // outside the loop
        case BOUGH_FLOAT32:
            for (int d = 0; d < dim; d += WIDTH) store(to + d, load_cell(BOUGH_FLOAT32, cell, d));
            break;
        case BOUGH_BFLOAT16:
            for (int d = 0; d < dim; d += WIDTH) store(to + d, load_cell(BOUGH_BFLOAT16, cell, d));
            break;
        case BOUGH_FLOAT16:
            for (int d = 0; d < dim; d += WIDTH) store(to + d, load_cell(BOUGH_FLOAT16, cell, d));
            break;
        default:
            for (int d = 0; d < dim; d += WIDTH) store_weight(to + d, load_cell(BOUGH_INT8, cell, d));
    }
}

// Rounds one head's key or value into its cell; for int8, by its own scale: the largest magnitude becomes 127. What is
// not finite becomes NaN.
template <typename T>
INLINE void write_cell(int dtype, const T* from, void* cells, float* scales, int64_t cell, int dim) {
    if (dtype == BOUGH_FLOAT32) {
        float* to = (float*)cells + cell * dim;
        for (int d = 0; d < dim; ++d) to[d] = widen(from[d]);
    } else if (dtype == BOUGH_BFLOAT16) {
        bf16* to = (bf16*)cells + cell * dim;
        for (int d = 0; d < dim; ++d) store_one(to + d, widen(from[d]));
    } else if (dtype == BOUGH_FLOAT16) {
        uint16_t* to = (uint16_t*)cells + cell * dim;
        for (int d = 0; d < dim; ++d) to[d] = narrow_half(widen(from[d]));
    } else {
        int8_t* to = (int8_t*)cells + cell * dim;
        float largest = 0;
        for (int d = 0; d < dim; ++d) {
            float magnitude = __builtin_fabsf(widen(from[d]));
            largest = magnitude > largest || magnitude != magnitude ? magnitude : largest;
        }
        bool finite = largest < __builtin_inff();
        float scale = finite ? largest / 127.0f : __builtin_nanf("");
        float divisor = finite && largest > 0 ? scale : __builtin_inff();
        for (int d = 0; d < dim; ++d) {
            float x = finite ? __builtin_rintf(widen(from[d]) / divisor) : 0;
            to[d] = (int8_t)(x > 127 ? 127 : x < -127 ? -127 : x);
        }
        scales[cell] = scale;
    }
}

}  // namespace
