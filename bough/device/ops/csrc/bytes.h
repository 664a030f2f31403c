// Attention of bf16 queries over int8 cells, in integers, where an instruction multiplies bytes.
//
// Cells are never widened: scores and sums of V are sums of products of bytes. What they are multiplied with, queries
// and weights, has 16 bits and comes in two digits of 8: value = scale * (256 * high + low). So half the bytes of K are
// transposed, half of V is interleaved, and sums are exact: their order is free, only their scaling is written once.
#pragma once

#include "linear_prepare.h"
#include "tile.h"

namespace {

// A word of bytes of K in the lanes, or of the digits of a query that it is multiplied with.
struct KeyBytes { uint32_t word; };
template <> struct SumOf<KeyBytes> { typedef int32_t type; };
INLINE vi step(vi acc, const KeyBytes* column, KeyBytes digits) {
    return dot_bytes(acc, loadu(&column->word) ^ FLIP, digits.word);
}

// The scale of values up to `top`, of which the largest becomes `most`, and what a value is multiplied with. Nothing
// finite: NaN. Values so small that the inverse overflows are as good as zero.
INLINE float digits_scale(float top, float most, float& inverse) {
    inverse = top > 0 ? most / top : 0;
    if (!(inverse < __builtin_inff())) inverse = 0;
    return top / most;
}

// What stands for one query beside its digits.
struct QueryScale {
    float scale;
    int32_t high, low;      // sums of products with unsigned bytes begin here: -128 * the sum of the digits
};

// Signed digits of a query [dim].
template <typename T>
INLINE QueryScale split_query(const T* q, int dim, int8_t* high, int8_t* low) {
    const vf magic = splat(12582912.0f);    // 1.5 * 2^23: adding it rounds to an integer
    float inverse, scale = digits_scale(largest(q, dim), 127 * 256.0f, inverse);
    vi high_sum = vi{}, low_sum = vi{};
    for (int d = 0; d < dim; d += WIDTH) {
        vi value = (vi)(load(q + d) * splat(inverse) + magic) - 0x4b400000;
        if (inverse == 0) value = vi{};
        vi upper = (value + 128) >> 8, lower = value - (upper << 8);
        vb h = lowest_bytes(upper), l = lowest_bytes(lower);
        memcpy(high + d, &h, sizeof h);
        memcpy(low + d, &l, sizeof l);
        high_sum += upper;
        low_sum += lower;
    }
    return {scale, -128 * sum(high_sum), -128 * sum(low_sum)};
}

INLINE vf join_digits(vi high, vi low, vf scale) { return fma(to_float(high), splat(256.0f), to_float(low)) * scale; }

// Weights that are not negative become integers up to 65535, in the lower halves of the lanes.
INLINE vu whole_weights(const float* p, vf inverse) { return (vu)fma(loadf(p), inverse, splat(8388608.0f)); }

// Unsigned digits of the weights [n] of one query; n is rounded up to whole vectors. Returns their scale.
INLINE float split_weights(const float* p, int n, uint8_t* high, uint8_t* low) {
    n = (n + WIDTH - 1) / WIDTH * WIDTH;
    float inverse, scale = digits_scale(largest(p, n), 65535.0f, inverse);
    for (int j = 0; j < n; j += WIDTH) {
        vu whole = whole_weights(p + j, splat(inverse));
        vb h = lowest_bytes((vi)(whole >> 8)), l = lowest_bytes((vi)whole);
        memcpy(high + j, &h, sizeof h);
        memcpy(low + j, &l, sizeof l);
    }
    return scale;
}

// N vectors of V from dimension `at` on: words of the bytes of four keys. Four vectors come with their dimensions out
// of order, see put_in_order.
template <int N>
INLINE void load_fours(const int8_t* const* rows, int64_t at, vu (&x)[N]) {
#if defined(__AVX512F__)
    if constexpr (N == 4) {
        __m512i a = _mm512_loadu_si512(rows[0] + at), b = _mm512_loadu_si512(rows[1] + at);
        __m512i c = _mm512_loadu_si512(rows[2] + at), d = _mm512_loadu_si512(rows[3] + at);
        __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
        x[0] = (vu)_mm512_unpacklo_epi16(ab, cd);
        x[1] = (vu)_mm512_unpackhi_epi16(ab, cd);
        ab = _mm512_unpackhi_epi8(a, b);
        cd = _mm512_unpackhi_epi8(c, d);
        x[2] = (vu)_mm512_unpacklo_epi16(ab, cd);
        x[3] = (vu)_mm512_unpackhi_epi16(ab, cd);
        return;
    }
#endif
    for (int v = 0; v < N; ++v) {
        x[v] = vu{};
        for (int i = 0; i < 4; ++i) {
            vub bytes;
            memcpy(&bytes, rows[i] + at + v * WIDTH, sizeof bytes);
            x[v] |= widen(bytes) << (8 * i);
        }
    }
}

// Vectors that are loaded at once: as many as have the dimensions of a cache line.
constexpr int FOURS = WIDTH == 16 ? 4 : 1;

// Words of load_fours, or sums of products with them, by rising dimension.
template <typename V>
INLINE void put_in_order(V (&x)[FOURS]) {
#if defined(__AVX512F__)
    __m512i a = _mm512_shuffle_i32x4((__m512i)x[0], (__m512i)x[1], 0x44);
    __m512i b = _mm512_shuffle_i32x4((__m512i)x[0], (__m512i)x[1], 0xee);
    __m512i c = _mm512_shuffle_i32x4((__m512i)x[2], (__m512i)x[3], 0x44);
    __m512i d = _mm512_shuffle_i32x4((__m512i)x[2], (__m512i)x[3], 0xee);
    x[0] = (V)_mm512_shuffle_i32x4(a, c, 0x88);
    x[1] = (V)_mm512_shuffle_i32x4(a, c, 0xdd);
    x[2] = (V)_mm512_shuffle_i32x4(b, d, 0x88);
    x[3] = (V)_mm512_shuffle_i32x4(b, d, 0xdd);
#endif
}

// V of n_words * 4 keys as words [dim / WIDTH][stride / WIDTH][WIDTH], of which the first n_words are filled.
INLINE void pack_fours(const int8_t* const* rows, int n_words, int dim, uint32_t* to, int64_t stride) {
    for (int i = 0; i < n_words; ++i, rows += 4, to += WIDTH) {
        int d = 0;
        for (; d + FOURS * WIDTH <= dim; d += FOURS * WIDTH) {
            vu x[FOURS];
            load_fours<FOURS>(rows, d, x);
            put_in_order(x);
            for (int v = 0; v < FOURS; ++v) memcpy(to + (d / WIDTH + v) * stride, &x[v], sizeof x[v]);
        }
        for (; d < dim; d += WIDTH) {
            vu x[1];
            load_fours<1>(rows, d, x);
            memcpy(to + d / WIDTH * stride, &x[0], sizeof x[0]);
        }
    }
}

// out[r][N vectors at `at`] = scale[r] * weights of query r * V of `inner` words of keys, `head` bytes behind where their
// rows begin; weights: two digits per query, [2 R][stride words].
template <int R, int N, typename Beside>
INLINE void mix_fours(const uint32_t* weights, int weights_stride, const int8_t* const* rows, int64_t head, int at,
                      int inner, const float* scale, float* out, int64_t stride, Beside& beside) {
    vi acc[2 * R][N];
    vu x[N];
    for (int r = 0; r < 2 * R; ++r)
        for (int v = 0; v < N; ++v) acc[r][v] = vi{};
    for (int first = 0; first < inner; first += WORD_STEPS) {
        const int end = first + WORD_STEPS < inner ? first + WORD_STEPS : inner;
        beside.step(end - first);
        for (int i = first; i < end; ++i) {
            load_fours<N>(rows + 4 * i, head + at, x);
#pragma GCC unroll 8
            for (int r = 0; r < 2 * R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < N; ++v) acc[r][v] = dot_bytes(acc[r][v], weights[r * weights_stride + i], x[v]);
        }
    }
    for (int r = 0; r < R; ++r) {
        vf value[N];
        for (int v = 0; v < N; ++v) value[v] = join_digits(acc[2 * r][v], acc[2 * r + 1][v], splat(scale[r]));
        if constexpr (N == FOURS) put_in_order(value);
        for (int v = 0; v < N; ++v) storef(out + r * stride + at + v * WIDTH, value[v]);
    }
}

// Queries of one block of mix_fours.
constexpr int FOURS_ROWS = WIDTH == 16 ? 3 : 2;

// The same for all of dim and n queries.
template <int N, typename Beside>
int mix_all_fours(const uint32_t* weights, int weights_stride, const int8_t* const* rows, int64_t head, int n, int at,
                  int dim, int inner, const float* scale, float* out, int64_t stride, Beside& beside) {
    constexpr int R = FOURS_ROWS;
    for (; at + N * WIDTH <= dim; at += N * WIDTH)
        for (int r = 0; r < n; r += R) {
            const uint32_t* from = weights + r * 2 * weights_stride;
            float* to = out + r * stride;
            switch (n - r) {
                case 1: mix_fours<1, N>(from, weights_stride, rows, head, at, inner, scale + r, to, stride, beside); break;
                case 2: mix_fours<2, N>(from, weights_stride, rows, head, at, inner, scale + r, to, stride, beside); break;
                default: mix_fours<R, N>(from, weights_stride, rows, head, at, inner, scale + r, to, stride, beside);
            }
        }
    return at;
}

}  // namespace
