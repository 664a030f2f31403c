// Many rows with bf16 weights, where no instruction multiplies pairs of them.
//
// To take a pair apart costs as much as two products. Here it is done once for all rows: some inputs of a pass of panels
// become floats in the first-level cache, which all rows are multiplied with before further inputs are. Sums leave the
// registers between, and go on where they were: an output's chain of sums is that of Bf16Tile.
#pragma once

#include "linear_compact.h"
#include "tile.h"

namespace {

typedef Bf16Tile FewTile;
#if defined(__AVX512F__) && !defined(BOUGH_AMX)
typedef CompactTile FewCompactTile;
#endif

// From so many on it pays, where vectors have two ports for all that is done with them.
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
constexpr int64_t SHARED_ROWS = 36;
#else
constexpr int64_t SHARED_ROWS = 0;
#endif
constexpr int SHARED_WORDS = 48;       // taken apart at a time: 24 KB of floats
constexpr int64_t SHARED_BYTES = (2 * SHARED_WORDS + PASS) * sizeof(float);    // of a row and its sums meanwhile

// How often a pass of `rows` looks at what is to be asked for, or less than that.
INLINE int64_t looks_of(int64_t words, int64_t rows, bool shared) {
    return words / (shared ? SHARED_WORDS : words_at_a_time(rows));
}

// tile[2 * words][P * PANEL] := both elements of each of `words` words from w on, of the panels of a pass.
template <int P>
INLINE void widen_words(const uint32_t* w, int64_t stride, int words, float* tile) {
    constexpr int PASS = P * PANEL;
    for (int i = 0; i < words; ++i, w += PANEL, tile += 2 * PASS)
        for (int p = 0; p < P; ++p)
            for (int j = 0; j < PANEL; j += WIDTH) {
                const vu pair = loadu(w + p * stride + j);
                storef(tile + p * PANEL + j, first_of(pair));
                storef(tile + PASS + p * PANEL + j, second_of(pair));
            }
}

// sums[R][P * PANEL] += rows times tile[inputs][P * PANEL]; `inputs` is even.
template <int R, int P>
INLINE void add_widened(const float* tile, int inputs, RowCursor a, float* sums) {
    constexpr int PASS = P * PANEL, VECS = PASS / WIDTH;
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

// Sums of n rows with P panels from `panel` on, [n][P * PANEL]. `next`: the panels of the next pass, or null.
template <int P>
NOINLINE void shared_sums(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, const uint32_t* next,
                           Wanted* others, bool, float* sums) {
    constexpr int PASS = P * PANEL;
    const int64_t words = panel_words(l) / PANEL, stride = words * PANEL, turns = ceil_div(n, DENSE_ROWS);
    const uint32_t* begin = l.weight + panel * stride;
    const auto some = [](int64_t left) { return left < SHARED_WORDS ? (int)left : SHARED_WORDS; };
    alignas(64) float tile[2 * SHARED_WORDS * PASS];
    memset(sums, 0, n * PASS * sizeof(float));
    for (int64_t word = 0; word < words; word += SHARED_WORDS) {
        const int count = some(words - word);
        widen_words<P>(begin + word * PANEL, stride, count, tile);
        // What is taken apart next is asked for meanwhile, a few lines with each block of rows.
        const bool ends = word + count == words;
        const uint32_t* soon = ends ? next : begin + (word + count) * PANEL;
        const int64_t lines = !soon ? 0 : some(ends ? words : words - word - count);
        for (int64_t turn = 0, row = 0; turn < turns; ++turn) {
            const int rows = (int)(n * (turn + 1) / turns - row);
            for (int64_t i = lines * turn / turns; i < lines * (turn + 1) / turns; ++i)
                for (int p = 0; p < P; ++p) __builtin_prefetch(soon + p * stride + i * PANEL, 0, 2);
            NextPanels{nullptr, 0, others, 0}.ask();
            with_count<DENSE_ROWS>(rows, [&](auto r) {
                const RowCursor a((const float*)x.row(row) + 2 * word, x.stride);
                add_widened<decltype(r)::value, P>(tile, 2 * count, a, sums + row * PASS);
            });
            row += rows;
        }
    }
}

}  // namespace
