// Attention of few queries in floats: keys, or the dimensions of values, lie in the lanes of vectors. Cells of every type
// are widened in registers, beside products with all queries of a block.
#pragma once

#include "lanes.h"

namespace {

// Vectors of scores, or of sums of values, that a block of R queries has for each of them. Eight chains keep multipliers busy;
// of sixteen registers some are left for what is multiplied, two more beside elements of keys.
constexpr int score_vecs(int R) { return WIDTH == 16 ? 4 : R == 1 ? 8 : R == 2 ? 4 : R == 3 ? 3 : 2; }
constexpr int sum_vecs(int R) { return R == 3 ? 4 : score_vecs(R); }

constexpr int FEW_ROWS_MOST = WIDTH == 16 ? 6 : 4;     // queries of a block
// Those of the next one, of n.
INLINE int few_rows(int n) { return n <= FEW_ROWS_MOST ? n : WIDTH == 16 ? FEW_ROWS_MOST : 3; }

// How many steps float_scores() or float_sums() take for n_vecs vectors of keys or dimensions, with `inner` words or keys.
template <typename Vecs>
INLINE int float_steps(int n, int n_vecs, int inner, const Vecs& vecs) {
    int steps = 0;
    for (int r = 0; r < n; r += few_rows(n - r)) steps += (int)ceil_div(n_vecs, vecs(few_rows(n - r))) * inner;
    return steps;
}

constexpr int FEW_STEPS = 8;    // after which lines are asked for: in every one, sums would leave the registers for it

// What is loaded behind this is not loaded before, where it would take registers from sums.
INLINE void one_at_a_time() { asm volatile("" ::: "memory"); }

// scores[R][N vectors of keys] of queries [R][dim], for N vectors of words of keys of a tile [dim / PER_WORD<C>][TILE]. Terms
// add up in rising order of dimension.
template <typename C, int R, int N>
INLINE void score_block(const float* queries, int dim, const uint32_t* tile, float* scores, int64_t stride,
                        Ahead& ahead) {
    vf acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) acc[r][v] = vf{};
    for (int first = 0; first < dim; first += FEW_STEPS * PER_WORD<C>) {
        const int end = first + FEW_STEPS * PER_WORD<C> < dim ? first + FEW_STEPS * PER_WORD<C> : dim;
        ahead.step((end - first) / PER_WORD<C>);
        for (int d = first; d < end; d += PER_WORD<C>, tile += TILE)
#pragma GCC unroll 4
            for (int i = 0; i < PER_WORD<C>; ++i) {
                vf q[R];
                one_at_a_time();
                for (int r = 0; r < R; ++r) q[r] = splat(queries[r * dim + d + i]);
#pragma GCC unroll 8
                for (int v = 0; v < N; ++v) {
                    one_at_a_time();
                    const vf x = element(loadu(tile + v * WIDTH), i, (const C*)nullptr);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) acc[r][v] = fma(x, q[r], acc[r][v]);
                }
            }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) storef(scores + r * stride + v * WIDTH, acc[r][v]);
}

// The same for n queries and n_vecs vectors of keys; columns of scores behind them are written with what the tile holds.
template <typename C>
void float_scores(const float* queries, int n, int dim, const uint32_t* tile, int n_vecs, float* scores, int64_t stride,
                  Ahead& ahead) {
    by_blocks<FEW_ROWS_MOST>(n, few_rows, [&](auto rows, int r) {
        constexpr int R = decltype(rows)::value, N = score_vecs(R);
        for (int end = N; end < n_vecs + N; end += N) {
            const int v = (end < n_vecs ? end : n_vecs < N ? N : n_vecs) - N;   // the last ones maybe once more
            score_block<C, R, N>(queries + r * dim, dim, tile + v * WIDTH, scores + r * stride + v * WIDTH, stride, ahead);
        }
    });
}

// out[R][N vectors at `at`] += weights[R][n_keys] * values[n_keys], `head` elements behind where they begin. Terms add up in
// rising order of key.
template <typename C, int R, int N>
INLINE void sum_block(const float* weights, const void* const* values, int64_t head, int64_t at, int n_keys, float* out,
                      int64_t stride, Ahead& ahead) {
    vf acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) acc[r][v] = loadf(out + r * stride + at + v * WIDTH);
    for (int first = 0; first < n_keys; first += FEW_STEPS) {
        const int end = first + FEW_STEPS < n_keys ? first + FEW_STEPS : n_keys;
        ahead.step(end - first);
        for (int k = first; k < end; ++k) {
            const C* from = (const C*)values[k] + head + at;
            vf weight[R];
            for (int r = 0; r < R; ++r) weight[r] = splat(weights[r * SEGMENT + k]);
#pragma GCC unroll 8
            for (int v = 0; v < N; ++v) {
                one_at_a_time();
                const vf x = load(from + v * WIDTH);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) acc[r][v] = fma(x, weight[r], acc[r][v]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) storef(out + r * stride + at + v * WIDTH, acc[r][v]);
}

// The same for all of dim, a multiple of WIDTH, and n queries.
template <typename C>
void float_sums(const float* weights, int n, const void* const* values, int64_t head, int dim, int n_keys, float* out,
                int64_t stride, Ahead& ahead) {
    by_blocks<FEW_ROWS_MOST>(n, few_rows, [&](auto rows, int r) {
        constexpr int R = decltype(rows)::value, N = sum_vecs(R);
        const float* from = weights + r * SEGMENT;
        float* to = out + r * stride;
        int64_t at = 0;
        for (; at + N * WIDTH <= dim; at += N * WIDTH)
            sum_block<C, R, N>(from, values, head, at, n_keys, to, stride, ahead);
        for (; at < dim; at += WIDTH) sum_block<C, R, 1>(from, values, head, at, n_keys, to, stride, ahead);
    });
}

}  // namespace
