// Cells of the KV pool: their element types, how they become the elements that attention computes with, and how many
// of them one loop looks ahead.
//
// Attention computes with floats, to which cells of every type are widened in registers, or with pairs of bf16 where an
// instruction multiplies those and the queries are such: float16 and float32 cells are rounded to them first, which loses
// nothing of what was written from bf16. int8 cells hold integers; their scales, one per token and kv head, multiply scores
// and weights. Beside queries of bf16 they are multiplied as bytes where an instruction does that (bytes.h).
#pragma once

#include <type_traits>

#include "vec.h"

namespace {

// What the inner products run over: a float, or a pair of bf16; and back.
template <typename T> struct WordOf { typedef float type; };
template <> struct WordOf<bf16> { typedef std::conditional_t<WIDENS_PAIRS, float, uint32_t> type; };
template <typename T> using Word = typename WordOf<T>::type;
template <typename T> constexpr bool FLOATS = std::is_same_v<Word<T>, float>;

template <typename E> struct ElementOf;
template <> struct ElementOf<float> { typedef float type; };
template <> struct ElementOf<uint32_t> { typedef bf16 type; };
template <typename E> using Element = typename ElementOf<E>::type;

// Keys that one word of V, or of weights, holds.
template <typename E> constexpr int KEYS_PER_WORD = 4 / (int)sizeof(Element<E>);

// An element of a cell that is none of float, bf16 and int8_t.
struct half { uint16_t bits; };

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

INLINE vf load(const half* p) { return load_half(&p->bits); }
INLINE vf load(const int8_t* p) { return load_bytes(p); }

// Calls run(an element) for cells of a type.
template <typename Run>
INLINE void with_elements(int dtype, const Run& run) {
    switch (dtype) {
        case BOUGH_FLOAT32: return run(float{});
        case BOUGH_BFLOAT16: return run(bf16{});
        case BOUGH_FLOAT16: return run(half{});
        default: return run(int8_t{});
    }
}

// Words of cells, WIDTH of them, and their i-th elements as floats.
template <typename C> constexpr int PER_WORD = 4 / (int)sizeof(C);
INLINE vf element(vu words, int, const float*) { return (vf)words; }
INLINE vf element(vu words, int i, const bf16*) { return i ? second_of(words) : first_of(words); }
INLINE vf element(vu words, int i, const half*) { return widen_halves(words >> (16 * i) & 0xffffu); }
INLINE vf element(vu words, int i, const int8_t*) { return to_float((vi)(words << (24 - 8 * i)) >> 24); }

// n elements of a cell as pairs of bf16.
INLINE void narrow_cell(int dtype, const void* cell, bf16* to, int n) {
    for (int d = 0; d < n; d += WIDTH)
        store(to + d, dtype == BOUGH_FLOAT16 ? load((const half*)cell + d) : load((const float*)cell + d));
}

// n rows of such words, `stride` words apart, to the rows of their elements, in their place.
template <typename C>
INLINE void spread(uint32_t* rows, int n, int64_t stride) {
    constexpr int PER = PER_WORD<C>;
    for (int row = n - 1; PER > 1 && row >= 0; --row) {
        const vu words = loadu(rows + row * stride);
        for (int i = 0; i < PER; ++i) storef((float*)rows + (PER * row + i) * stride, element(words, i, (const C*)nullptr));
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
        float divisor = finite && scale > 0 ? scale : __builtin_inff();
        for (int d = 0; d < dim; ++d) {
            float x = finite ? __builtin_rintf(widen(from[d]) / divisor) : 0;
            to[d] = (int8_t)(x > 127 ? 127 : x < -127 ? -127 : x);
        }
        scales[cell] = scale;
    }
}

}  // namespace
