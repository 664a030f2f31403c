// Rows of words as columns, for each instruction set.
#pragma once

#include "vec.h"

namespace {

// Transposes WIDTH rows of `n` <= WIDTH words, of whatever type they are: to[word * stride + row] = rows[row][word].
#if defined(__AVX512F__)
INLINE void transpose(const uint32_t* const* rows, int64_t offset, int n, uint32_t* to, int64_t stride) {
    __m512i r[16], t[16];
    __mmask16 mask = (__mmask16)((1u << n) - 1);
    for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + offset);
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        r[4 * i + 0] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
    for (int i = 0; i < n; ++i) _mm512_storeu_si512(to + i * stride, r[i]);
}
#elif defined(__AVX2__)
INLINE void transpose(const uint32_t* const* rows, int64_t offset, int n, uint32_t* to, int64_t stride) {
    if (n < 8) {
        for (int w = 0; w < n; ++w)
            for (int i = 0; i < 8; ++i) memcpy(to + w * stride + i, rows[i] + offset + w, sizeof *to);
        return;
    }
    // Words 4h to 4h + 3 of rows i and i + 4 in the halves of a vector: no words then change halves.
    for (int h = 0; h < 2; ++h, offset += 4, to += 4 * stride) {
        __m256 r[4], t[4];
        for (int i = 0; i < 4; ++i)
            r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float*)(rows[i] + offset))),
                                        _mm_loadu_ps((const float*)(rows[i + 4] + offset)), 1);
        for (int i = 0; i < 2; ++i) {
            t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        for (int i = 0; i < 2; ++i) {
            _mm256_storeu_ps((float*)(to + 2 * i * stride), _mm256_shuffle_ps(t[i], t[i + 2], 0x44));
            _mm256_storeu_ps((float*)(to + (2 * i + 1) * stride), _mm256_shuffle_ps(t[i], t[i + 2], 0xee));
        }
    }
}
#else
INLINE void transpose(const uint32_t* const* rows, int64_t offset, int n, uint32_t* to, int64_t stride) {
    for (int w = 0; w < n; ++w)
        for (int i = 0; i < WIDTH; ++i) memcpy(to + w * stride + i, rows[i] + offset + w, sizeof *to);
}
#endif

}  // namespace
