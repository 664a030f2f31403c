// Sums of V under the weights of few queries as pairs of bf16, with V read where it lies and its dimensions in the lanes of
// vectors.
#pragma once

#include "few.h"

namespace {

// N vectors of V, from dimension `at` on: of the pair of keys 2i and 2i + 1 as words.
template <int N>
INLINE void load_values(const bf16* const* rows, int i, int64_t at, vf (&x)[N]) {
    const bf16 *a = rows[2 * i] + at, *b = rows[2 * i + 1] + at;
    int v = 0;
#if defined(__AVX512F__)
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1,
        32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (; v + 2 <= N; v += 2) {
        __m512i even = _mm512_loadu_si512(a + v * WIDTH), odd = _mm512_loadu_si512(b + v * WIDTH);
        x[v] = (vf)_mm512_permutex2var_epi16(even, low, odd);
        x[v + 1] = (vf)_mm512_permutex2var_epi16(even, high, odd);
    }
#endif
    for (; v < N; ++v) {
        vh even, odd;
        memcpy(&even, a + v * WIDTH, sizeof even);
        memcpy(&odd, b + v * WIDTH, sizeof odd);
        x[v] = (vf)(widen(even) | (widen(odd) << 16));
    }
}

// out[R][N vectors at `at`] += weights[R][inner] * rows[inner words of keys], `head` elements behind where they begin
template <int R, int N>
INLINE void mix_block(const bf16* weights, const bf16* const* rows, int64_t head, int64_t at, int inner, float* out,
                      int64_t stride, Ahead& ahead) {
    vf acc[R][N], x[N];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) acc[r][v] = loadf(out + r * stride + at + v * WIDTH);
    for (int first = 0; first < inner; first += WORD_STEPS) {
        const int end = first + WORD_STEPS < inner ? first + WORD_STEPS : inner;
        ahead.step(end - first);
        for (int i = first; i < end; ++i) {
            load_values<N>(rows, i, head + at, x);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < N; ++v)
                    acc[r][v] = dot_pairs(acc[r][v], (vu)x[v], ((const uint32_t*)(weights + r * SEGMENT))[i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) storef(out + r * stride + at + v * WIDTH, acc[r][v]);
}

// The same for all of `dim`, a multiple of WIDTH, from `at` on in steps of N vectors; returns where it stopped.
template <int N>
int64_t mix_columns(const bf16* weights, const bf16* const* values, int64_t head, int n_rows, int64_t at, int64_t dim, int inner,
                    float* out, int64_t stride, Ahead& ahead) {
    for (; at + N * WIDTH <= dim; at += N * WIDTH)
        by_rows<BLOCK_ROWS>(n_rows, [&](auto rows, int r) {
            mix_block<decltype(rows)::value, N>(weights + r * SEGMENT, values, head, at, inner, out + r * stride, stride,
                                                ahead);
        });
    return at;
}

}  // namespace
