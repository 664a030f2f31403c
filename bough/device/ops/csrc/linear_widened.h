// Many rows with bf16 weights, where no instruction multiplies pairs of them.
//
// To take a pair apart costs as much as two products. Here it is done once for all rows: some inputs of a pass of panels
// become floats in the first-level cache, which all rows are multiplied with before further inputs are. Sums leave the
// registers between, and go on where they were: an output's chain of sums is that of Bf16Tile.
#pragma once

#include "linear_tile.h"
#include "tile.h"

namespace {

// From so many on it pays, where vectors have two ports for all that is done with them.
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
constexpr int64_t WIDENED_ROWS = 36;
#else
constexpr int64_t WIDENED_ROWS = 0;
#endif
constexpr int WIDENED_WORDS = 48;       // taken apart at a time: 24 KB of floats
constexpr int PASS = DENSE_PANELS * PANEL;
constexpr int64_t WIDENED_BYTES = (2 * WIDENED_WORDS + PASS) * sizeof(float);    // of a row and its sums meanwhile

INLINE bool are_widened(int64_t rows) { return WIDENED_ROWS && rows >= WIDENED_ROWS; }

// tile[2 * words][PASS] := both elements of each of `words` words from w on, of the panels of a pass.
INLINE void widen_words(const uint32_t* w, int64_t stride, int words, float* tile) {
    for (int i = 0; i < words; ++i, w += PANEL, tile += 2 * PASS)
        for (int p = 0; p < DENSE_PANELS; ++p)
            for (int j = 0; j < PANEL; j += WIDTH) {
                const vu pair = loadu(w + p * stride + j);
                storef(tile + p * PANEL + j, first_of(pair));
                storef(tile + PASS + p * PANEL + j, second_of(pair));
            }
}

// sums[R][PASS] += rows times tile[inputs][PASS]; `inputs` is even.
template <int R>
INLINE void add_widened(const float* tile, int inputs, RowCursor a, float* sums) {
    constexpr int VECS = PASS / WIDTH;
    vf sum[R][VECS];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < VECS; ++j) sum[r][j] = loadf(sums + r * PASS + j * WIDTH);
    for (int i = 0; i < inputs; i += 2, tile += 2 * PASS, a.advance(2 * sizeof(float)))
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
            vf w[VECS];
            for (int j = 0; j < VECS; ++j) w[j] = loadf(tile + k * PASS + j * WIDTH);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const vf x = splat(((const float*)a(r))[k]);
#pragma GCC unroll 4
                for (int j = 0; j < VECS; ++j) sum[r][j] = fma(w[j], x, sum[r][j]);
            }
        }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < VECS; ++j) storef(sums + r * PASS + j * WIDTH, sum[r][j]);
}

// Sums of n rows with a pass of panels from `panel` on, [n][PASS]. `next`: the panels of the next pass, or null.
NOINLINE void widened_sums(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, const uint32_t* next,
                           Wanted* others, float* sums) {
    const int64_t words = panel_words(l) / PANEL, stride = words * PANEL, turns = ceil_div(n, DENSE_ROWS);
    const uint32_t* begin = l.weight + panel * stride;
    const auto some = [](int64_t left) { return left < WIDENED_WORDS ? (int)left : WIDENED_WORDS; };
    alignas(64) float tile[2 * WIDENED_WORDS * PASS];
    memset(sums, 0, n * PASS * sizeof(float));
    for (int64_t word = 0; word < words; word += WIDENED_WORDS) {
        const int count = some(words - word);
        widen_words(begin + word * PANEL, stride, count, tile);
        // What is taken apart next is asked for meanwhile, a few lines with each block of rows.
        const bool ends = word + count == words;
        const uint32_t* soon = ends ? next : begin + (word + count) * PANEL;
        const int64_t lines = !soon ? 0 : some(ends ? words : words - word - count);
        for (int64_t turn = 0, row = 0; turn < turns; ++turn) {
            const int rows = (int)(n * (turn + 1) / turns - row);
            for (int64_t i = lines * turn / turns; i < lines * (turn + 1) / turns; ++i)
                for (int p = 0; p < DENSE_PANELS; ++p) __builtin_prefetch(soon + p * stride + i * PANEL, 0, 2);
            NextPanels{nullptr, 0, others, 0}.ask();
            with_count<DENSE_ROWS>(rows, [&](auto r) {
                const RowCursor a((const float*)x.row(row) + 2 * word, x.stride);
                add_widened<decltype(r)::value>(tile, 2 * count, a, sums + row * PASS);
            });
            row += rows;
        }
    }
}

}  // namespace
