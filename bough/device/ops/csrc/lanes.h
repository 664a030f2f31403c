// Attention of many queries at once: queries lie in the lanes of vectors, keys are broadcast.
//
// So softmax over the keys runs lane by lane, with no reduction across a vector, and neither K nor V is transposed.
// Every number is computed by the same chain of operations as with few queries (attention.h), bit by bit: products
// add up in rising order of dimension or key, the sum of weights in WIDTH parts by key modulo WIDTH.
#pragma once

#include "bytes.h"
#include "cells.h"

namespace {

constexpr int SEGMENT = 128;                       // keys that share one maximum
constexpr int LANE_VECS = 3;                       // vectors of a block of queries
constexpr int LANES = LANE_VECS * WIDTH;
constexpr int LANE_ROWS = WIDTH == 16 ? 8 : 4;     // rows of a register block; divides SEGMENT and WIDTH

// exp2 of a score below its maximum; with 16 bits to come, four terms of the series are enough.
INLINE vf weight_exp2(vf x, const float*) { return exp2v(x); }

INLINE vf weight_exp2(vf x, const bf16*) {
#if defined(__AVX512F__)
    __m512 t = _mm512_max_ps(_mm512_set1_ps(-125.0f), (__m512)x);  // a NaN stays one
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf f = (vf)_mm512_sub_ps(t, whole);
    vf y = splat(9.6181291e-3f);
    y = fma(y, f, splat(5.5504109e-2f));
    y = fma(y, f, splat(2.4022651e-1f));
    y = fma(y, f, splat(6.9314718e-1f));
    y = fma(y, f, splat(1.0f));
    return (vf)_mm512_scalef_ps((__m512)y, whole);
#else
    return exp2v(x);
#endif
}

// Words of bytes: digits of queries and weights in the lanes (bytes.h), cells beside them.
struct LaneBytes { uint32_t word; };
template <> struct ElementOf<LaneBytes> { typedef int8_t type; };
INLINE vf weight_exp2(vf x, const int8_t*) { return weight_exp2(x, (const bf16*)nullptr); }

// The larger one; b where a is not a number.
INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vmax(a, b);
#endif
}

// x where mask, zero elsewhere ...
INLINE vf keep(vi mask, vf x) { return (vf)((vi)x & mask); }

// Weights of WIDTH queries for two neighbouring keys, as the words of their products with V.
INLINE void store_weights(float* to, int64_t stride, vf a, vf b) {
    storef(to, a);
    storef(to + stride, b);
}

// They become digits later.
INLINE void store_weights(LaneBytes* to, int64_t stride, vf a, vf b) { store_weights((float*)to, stride, a, b); }

INLINE void store_weights(uint32_t* to, int64_t, vf a, vf b) {
#if defined(__AVX512BF16__)
    vu low = __builtin_convertvector((vh)_mm512_cvtneps_pbh((__m512)a), vu);
    vu high = __builtin_convertvector((vh)_mm512_cvtneps_pbh((__m512)b), vu);
#else
    vu low = __builtin_convertvector(narrow_bf16(a), vu);
    vu high = __builtin_convertvector(narrow_bf16(b), vu);
#endif
    vu both = low | (high << 16);
    memcpy(to, &both, sizeof both);
}

// out[R][N vectors] = sum over i of b[r * row_stride + i * inner_stride] * a[i][N vectors]
template <int R, int N, typename E>
INLINE void lanes_block(const E* a, const E* b, int64_t row_stride, int64_t inner_stride, int inner, float* out) {
    vf acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) acc[r][v] = vf{};
    for (int i = 0; i < inner; ++i, a += LANES, b += inner_stride)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < N; ++v) acc[r][v] = step(acc[r][v], a + v * WIDTH, b[r * row_stride]);
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) storef(out + r * LANES + v * WIDTH, acc[r][v]);
}

// The same with digits in the lanes: of queries (signed) beside keys (unsigned bytes), or of weights (unsigned) beside
// values (signed bytes). High digits are at a, low ones `low` words behind. Sums for queries begin at `start`. They are
// joined and scaled by lane, and for queries by row.
template <bool QUERIES, int R, int N>
INLINE void digits_block(const LaneBytes* a, int64_t a_stride, int64_t low, const LaneBytes* b, int64_t row_stride,
                         int64_t inner_stride, int inner, const int32_t* const* start, const float* scale,
                         const float* row_scale, float* out) {
    vi acc[R][N][2];
    for (int v = 0; v < N; ++v)
        for (int i = 0; i < 2; ++i) {
            vi begin = vi{};
            if (QUERIES) memcpy(&begin, start[i] + v * WIDTH, sizeof begin);
            for (int r = 0; r < R; ++r) acc[r][v][i] = begin;
        }
    for (int i = 0; i < inner; ++i, a += a_stride, b += inner_stride)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < N; ++v)
#pragma GCC unroll 2
                for (int digit = 0; digit < 2; ++digit) {
                    vu lanes = loadu(&a[digit * low + v * WIDTH].word);
                    uint32_t bytes = b[r * row_stride].word;
                    acc[r][v][digit] = QUERIES ? dot_bytes(acc[r][v][digit], bytes, lanes)
                                               : dot_bytes(acc[r][v][digit], lanes, bytes);
                }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) {
            vf value = join_digits(acc[r][v][0], acc[r][v][1], loadf(scale + v * WIDTH));
            storef(out + r * LANES + v * WIDTH, QUERIES ? value * splat(row_scale[r]) : value);
        }
}

// Weights of WIDTH queries for n keys, floats [n][LANES] of which the largest has the bits `top`, to unsigned digits in
// their place: the words of four keys' high digits, then those of their low digits. Returns their scale.
INLINE vf split_lanes(float* s, int n, vu top) {
    // As digits_scale.
    vf most = select((vi)(top >= 0x7f800000u), splat(__builtin_nanf("")), (vf)top), inverse = splat(65535.0f) / most;
    inverse = keep(inverse < splat(__builtin_inff()), inverse);
    const vu even = vu{} + 0x00ff00ffu;
    for (int k = 0; k < n; k += 4) {
        vu w[4];
        for (int i = 0; i < 4; ++i) w[i] = whole_weights(s + (k + i) * LANES, inverse);
        vu first = (w[0] & 0xffffu) | (w[2] << 16), second = (w[1] & 0xffffu) | (w[3] << 16);
        vu high = (first >> 8 & even) | (second & ~even), low = (first & even) | (second << 8 & ~even);
        memcpy(s + k / 2 * LANES, &high, sizeof high);
        memcpy(s + (k / 2 + 1) * LANES, &low, sizeof low);
    }
    return most / splat(65535.0f);
}

// Cells of keys that are needed soon. Their lines are asked for a few per step of an inner loop: in one burst they
// would fill the processor's miss buffers and stall the arithmetic that they are meant to run beside.
struct Ahead {
    const void* const* cells;   // [count], or null
    int count;
    int bytes;                  // of a cell

    // Cells to touch in each of `n_steps` steps, which are numbered from 0.
    INLINE int per_step(int n_steps) const { return cells ? (count + n_steps - 1) / n_steps : 0; }

    INLINE void touch(int step, int each) const {
        int end = (step + 1) * each < count ? (step + 1) * each : count;
        for (int i = step * each; i < end; ++i)
            for (int at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)cells[i] + at, 0, 2);
    }
};

// One segment for one block of queries.
template <typename E>
struct LaneBlock {
    const E* queries;       // [words][LANES]; of LaneBytes, two digits of each
    const E* keys;          // [n_keys][words]
    const E* values;        // [n_keys / keys per word][dim]
    const float* k_scale;   // [n_keys] factors of the scores, or null
    const float* v_scale;   // [n_keys] factors of the weights, or null
    const int32_t* seen;    // [LANES] where the keys that each query sees end, or null where all see all
    const int32_t* unseen;  // [LANES] where they begin, or null with `seen`
    float* scores;          // [SEGMENT][LANES], scratch
    float* out;             // [dim][LANES], not divided by `sum`
    float *top, *sum;       // [LANES] maximum in base 2, sum of weights
    int n_keys, words, dim;
    float cap_scale, log2_scale;    // see Attention
    Ahead ahead[2];         // cells to look ahead for while scores are computed
    const float* q_scale;   // of LaneBytes, [LANES]: see QueryScale
    const int32_t* q_start[2];

    static constexpr bool DIGITS = KEYS_PER_WORD<E> == 4;

    template <int N>
    INLINE void product_keys() const {
        int n_blocks = (n_keys + LANE_ROWS - 1) / LANE_ROWS;
        int touched = ahead[0].per_step(n_blocks);
        for (int k = 0; k < n_blocks; ++k) {
            for (int i = 0; touched && i < 2; ++i) ahead[i].touch(k, touched);
            const E* from = keys + (int64_t)k * LANE_ROWS * words;
            float* to = scores + k * LANE_ROWS * LANES;
            if constexpr (!DIGITS)
                lanes_block<LANE_ROWS, N>(queries, from, words, 1, words, to);
            else
                for (int r = 0; r < LANE_ROWS; r += LANE_ROWS / 2)
                    digits_block<true, LANE_ROWS / 2, N>(queries, LANES, words * LANES, from + r * words, words, 1, words,
                                                         q_start, q_scale, k_scale + k * LANE_ROWS + r, to + r * LANES);
        }
    }

    // Scores -> weights, in place: the words of the weights take the first rows. Keys [begin, limit) are seen. Digits of
    // weights have a scale.
    template <bool MASKED>
    INLINE void soften(float* s, vi begin, vi limit, float* top_out, float* sum_out, float* weight_scale) const {
        const vf infinity = splat(__builtin_inff());
        int padded_keys = (n_keys + WIDTH - 1) / WIDTH * WIDTH;
        vf best = -infinity;
        for (int k = 0; k < n_keys; ++k) {
            vf x = loadf(s + k * LANES);
            if (!DIGITS && k_scale) x *= splat(k_scale[k]);
            if (cap_scale) x = tanhv(x * splat(cap_scale));
            if ((!DIGITS && k_scale) || cap_scale) storef(s + k * LANES, x);
            if (MASKED) x = select((vi{} + k < limit) & (vi{} + k >= begin), x, -infinity);
            best = larger(x, best);
        }
        vf shift = best * splat(log2_scale);
        vf part[WIDTH];
        for (int j = 0; j < WIDTH; ++j) part[j] = vf{};
        vu largest_weight = vu{};
        E* to = (E*)s;
        for (int k = 0; k < padded_keys; k += WIDTH)
#pragma GCC unroll 16
            for (int j = 0; j < WIDTH; j += 2) {
                vf p[2];
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    vf x = fma(loadf(s + (k + j + i) * LANES), splat(log2_scale), -shift);
                    p[i] = weight_exp2(x, (const Element<E>*)nullptr);
                    if (MASKED) p[i] = keep((vi{} + (k + j + i) < limit) & (vi{} + (k + j + i) >= begin), p[i]);
                    part[j + i] += p[i];
                    if (v_scale) p[i] *= splat(v_scale[k + j + i]);
                    if (DIGITS) largest_weight = (vu)p[i] > largest_weight ? (vu)p[i] : largest_weight;
                }
                store_weights(to + (int64_t)(k + j) / (DIGITS ? 1 : KEYS_PER_WORD<E>) * LANES, LANES, p[0], p[1]);
            }
        if (DIGITS) storef(weight_scale, split_lanes(s, padded_keys, largest_weight));
        for (int half = WIDTH / 2; half >= 4; half /= 2)
            for (int j = 0; j < half; ++j) part[j] += part[j + half];
        storef(top_out, shift);
        storef(sum_out, (part[0] + part[2]) + (part[1] + part[3]));
    }

    template <int N>
    void run() const {
        product_keys<N>();
        float weight_scale[LANES];
        for (int v = 0; v < N; ++v) {
            vi begin = vi{}, limit = vi{} + n_keys;
            if (seen) {
                memcpy(&begin, unseen + v * WIDTH, sizeof begin);
                memcpy(&limit, seen + v * WIDTH, sizeof limit);
            }
            float* s = scores + v * WIDTH;
            if (seen || n_keys % WIDTH)
                soften<true>(s, begin, limit, top + v * WIDTH, sum + v * WIDTH, weight_scale + v * WIDTH);
            else
                soften<false>(s, begin, limit, top + v * WIDTH, sum + v * WIDTH, weight_scale + v * WIDTH);
        }
        int inner = (n_keys + KEYS_PER_WORD<E> - 1) / KEYS_PER_WORD<E>;
        const E* weights = (const E*)scores;
        if constexpr (!DIGITS)
            for (int d = 0; d < dim; d += LANE_ROWS)
                lanes_block<LANE_ROWS, N>(weights, values + d, 1, dim, inner, out + d * LANES);
        else
            for (int d = 0; d < dim; d += LANE_ROWS / 2)
                digits_block<false, LANE_ROWS / 2, N>(weights, 2 * LANES, LANES, values + d, 1, dim, inner, nullptr,
                                                      weight_scale, nullptr, out + d * LANES);
    }
};

// total := total + one segment, for N vectors of queries; nothing for a query that saw none of the segment.
INLINE void merge_lanes(const float* out, const float* top, const float* sum, float* total, float* total_top,
                        float* total_sum, int n_vecs, int dim) {
    const vf infinity = splat(__builtin_inff());
    for (int v = 0; v < n_vecs * WIDTH; v += WIDTH) {
        vf t = loadf(top + v), before = loadf(total_top + v), weight = loadf(sum + v);
        vi nothing = (t == -infinity) & (weight == vf{});
        vf best = larger(t, before);
        vf old = select(nothing, splat(1.0f), exp2v(before - best));
        vf add = select(nothing, vf{}, exp2v(t - best));
        for (int d = 0; d < dim; ++d) {
            float* to = total + d * LANES + v;
            storef(to, fma(loadf(out + d * LANES + v), add, loadf(to) * old));
        }
        storef(total_sum + v, loadf(total_sum + v) * old + weight * add);
        storef(total_top + v, best);
    }
}

}  // namespace
