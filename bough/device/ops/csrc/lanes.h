// Attention of many queries at once: queries lie in the lanes of vectors, keys are broadcast.
//
// So softmax over the keys runs lane by lane, with no reduction across a vector, and neither K nor V is transposed.
// Every number is computed by the same chain of operations as with few queries (attention.h), bit by bit: products
// add up in rising order of dimension or key, the sum of weights in WIDTH parts by key modulo WIDTH.
#pragma once

#include "cells.h"
#include "tile.h"

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
    const E* queries;       // [words][LANES]
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

    template <int N>
    INLINE void product_keys() const {
        int n_blocks = (n_keys + LANE_ROWS - 1) / LANE_ROWS;
        int touched = ahead[0].per_step(n_blocks);
        for (int k = 0; k < n_blocks; ++k) {
            for (int i = 0; touched && i < 2; ++i) ahead[i].touch(k, touched);
            lanes_block<LANE_ROWS, N>(queries, keys + (int64_t)k * LANE_ROWS * words, words, 1, words,
                                      scores + k * LANE_ROWS * LANES);
        }
    }

    // Scores -> weights, in place: the words of the weights take the first rows. Keys [begin, limit) are seen.
    template <bool MASKED>
    INLINE void soften(float* s, vi begin, vi limit, float* top_out, float* sum_out) const {
        const vf infinity = splat(__builtin_inff());
        int padded_keys = (n_keys + WIDTH - 1) / WIDTH * WIDTH;
        vf best = -infinity;
        for (int k = 0; k < n_keys; ++k) {
            vf x = loadf(s + k * LANES);
            if (k_scale) x *= splat(k_scale[k]);
            if (cap_scale) x = tanhv(x * splat(cap_scale));
            if (k_scale || cap_scale) storef(s + k * LANES, x);
            if (MASKED) x = select((vi{} + k < limit) & (vi{} + k >= begin), x, -infinity);
            best = larger(x, best);
        }
        vf shift = best * splat(log2_scale);
        vf part[WIDTH];
        for (int j = 0; j < WIDTH; ++j) part[j] = vf{};
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
                }
                store_weights(to + (int64_t)(k + j) / KEYS_PER_WORD<E> * LANES, LANES, p[0], p[1]);
            }
        for (int half = WIDTH / 2; half >= 4; half /= 2)
            for (int j = 0; j < half; ++j) part[j] += part[j + half];
        storef(top_out, shift);
        storef(sum_out, (part[0] + part[2]) + (part[1] + part[3]));
    }

    template <int N>
    void run() const {
        product_keys<N>();
        for (int v = 0; v < N; ++v) {
            vi begin = vi{}, limit = vi{} + n_keys;
            if (seen) {
                memcpy(&begin, unseen + v * WIDTH, sizeof begin);
                memcpy(&limit, seen + v * WIDTH, sizeof limit);
            }
            float* s = scores + v * WIDTH;
            if (seen || n_keys % WIDTH)
                soften<true>(s, begin, limit, top + v * WIDTH, sum + v * WIDTH);
            else
                soften<false>(s, begin, limit, top + v * WIDTH, sum + v * WIDTH);
        }
        int inner = (n_keys + KEYS_PER_WORD<E> - 1) / KEYS_PER_WORD<E>;
        for (int d = 0; d < dim; d += LANE_ROWS)
            lanes_block<LANE_ROWS, N>((const E*)scores, values + d, 1, dim, inner, out + d * LANES);
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
