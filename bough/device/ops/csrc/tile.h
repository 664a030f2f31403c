// Small dense products of a few rows with one tile of 64 columns.
//
// Every output element is one chain of multiply-adds in rising order of the inner index. The blocking decides
// only which elements share a register block, never the order of a sum: an element has the same bits whatever
// the other rows are. The exactness of float32 across batches and chunks rests on this.
#pragma once

#include "vec.h"

namespace {

constexpr int TILE = 64;                           // columns of a tile: keys of a block, outputs of a panel
constexpr int BLOCK_ROWS = WIDTH == 16 ? 6 : 4;    // rows of a register block
constexpr int BLOCK_VECS = WIDTH == 16 ? 4 : 2;    // vectors of columns of a register block
constexpr int WORD_STEPS = 4;   // after which lines are asked for: in every one, sums would leave the registers for it

// Calls run(Count<n>()); n: 1 to MOST.
template <int MOST, typename Run>
INLINE void with_count(int n, const Run& run) {
    if constexpr (MOST > 1)
        if (n < MOST) return with_count<MOST - 1>(n, run);
    run(Count<MOST>());
}

// Calls run(Count<R>(), first) for rows [0, n) in blocks; next(rows that are left) says how many the next one has, MOST or less.
template <int MOST, typename Next, typename Run>
INLINE void by_blocks(int n, const Next& next, const Run& run) {
    for (int r = 0; r < n; r += next(n - r)) with_count<MOST>(next(n - r), [&](auto rows) { run(rows, r); });
}

// The same, MOST at a time.
template <int MOST, typename Run>
INLINE void by_rows(int n, const Run& run) {
    by_blocks<MOST>(n, [](int left) { return left < MOST ? left : MOST; }, run);
}

// acc + column * a, with a float column and multiplier ...
INLINE vf step(vf acc, const float* column, float a) { return fma(loadf(column), splat(a), acc); }
// ... and with a column of bf16 pairs and one pair as the multiplier.
INLINE vf step(vf acc, const uint32_t* column, uint32_t a) { return dot_pairs(acc, loadu(column), a); }

// What products of E add up to, in lanes.
template <typename E> struct SumOf { typedef float type; };
INLINE vf zero_sum(const float*) { return vf{}; }
INLINE vi zero_sum(const int32_t*) { return vi{}; }
INLINE void store_sum(float* to, vf x) { storef(to, x); }
INLINE void store_sum(int32_t* to, vi x) { memcpy(to, &x, sizeof x); }

template <int R, typename E, typename S, typename Beside>
INLINE void product_block(const E* a, int64_t a_stride, const E* tile, int inner, S* out, int64_t out_stride,
                          Beside& beside) {
    decltype(zero_sum(out)) acc[R][BLOCK_VECS];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < BLOCK_VECS; ++j) acc[r][j] = zero_sum(out);
    for (int first = 0; first < inner; first += WORD_STEPS) {
        const int end = first + WORD_STEPS < inner ? first + WORD_STEPS : inner;
        beside.step(end - first);
        for (int i = first; i < end; ++i)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int j = 0; j < BLOCK_VECS; ++j)
                    acc[r][j] = step(acc[r][j], tile + (int64_t)i * TILE + j * WIDTH, a[r * a_stride + i]);
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < BLOCK_VECS; ++j) store_sum(out + r * out_stride + j * WIDTH, acc[r][j]);
}

// What is done beside products that nothing is to be done beside.
struct Alone {
    INLINE void step(int) {}
};

// How often product() calls beside.step().
INLINE int product_steps(int rows, int inner) {
    return TILE / (BLOCK_VECS * WIDTH) * ((rows + BLOCK_ROWS - 1) / BLOCK_ROWS) * inner;
}

// out[rows, 64] = a[rows, inner] @ tile[inner, 64]. E is float, or uint32_t for pairs of bf16, or bytes.h's.
template <typename E, typename Beside, typename S = typename SumOf<E>::type>
void product(const E* a, int64_t a_stride, const E* tile, int rows, int inner, S* out, int64_t out_stride,
             Beside& beside) {
    for (int column = 0; column < TILE; column += BLOCK_VECS * WIDTH) {
        by_rows<BLOCK_ROWS>(rows, [&](auto count, int r) {
            product_block<decltype(count)::value>(a + r * a_stride, a_stride, tile + column, inner,
                                                  out + r * out_stride + column, out_stride, beside);
        });
    }
}

}  // namespace
