// Products of attention in the tile registers of AMX, for pairs of bf16.
//
// Blocks of 32 dimensions or keys add up in rising order, whoever lies in the rows and the columns: few queries and many
// have the same bits.
#pragma once

#include "amx.h"

namespace {

// Whether what is computed with words of E is multiplied in tiles.
template <typename E> constexpr bool IN_TILES = false;

#if defined(BOUGH_AMX)
template <> constexpr bool IN_TILES<uint32_t> = true;

// Tiles 0 to 3 hold sums, 4 and 5 rows, of which there are n_rows, 6 and 7 what they are multiplied with. Tiles 5 and 7
// take the words of a dimension that does not end with a tile.
INLINE TileShapes attention_shapes(int n_rows, int words) {
    TileShapes s;
    const int rest = words % TILE_WORDS;
    for (int i = 0; i < 5; ++i) s.set(i, n_rows, TILE_WORDS);
    s.set(6, TILE_ROWS, TILE_WORDS);
    if (rest) s.set(5, n_rows, rest).set(7, rest, TILE_WORDS);
    return s;
}

// Tiles [0, N) := zero, from memory, to memory; columns of 16 side by side, `stride` words from row to row.
template <int N, int I = 0>
INLINE void zero_sums() {
    if constexpr (I < N) {
        tile_zero<I>();
        zero_sums<N, I + 1>();
    }
}

template <int N, int I = 0>
INLINE void load_sums(const float* from, int64_t stride) {
    if constexpr (I < N) {
        tile_load<I>(from + I * TILE_WORDS, 4 * stride);
        load_sums<N, I + 1>(from, stride);
    }
}

template <int N, int I = 0>
INLINE void store_sums(float* to, int64_t stride) {
    if constexpr (I < N) {
        tile_store<I>(to + I * TILE_WORDS, 4 * stride);
        store_sums<N, I + 1>(to, stride);
    }
}

// Tiles [0, N) += tile A times N tiles side by side, which pass through tile B; their rows lie `stride` words apart.
template <int N, int A, int B, int I = 0>
INLINE void add_products(const uint32_t* b, int64_t stride) {
    if constexpr (I < N) {
        tile_load<B>(b + I * TILE_WORDS, 4 * stride);
        tile_pairs<I, A, B>();
        add_products<N, A, B, I + 1>(b, stride);
    }
}

// Sums of N columns of tiles: rows a [rows][words], a_stride words apart, times b [words][N * 16].
template <int N>
INLINE void add_rows(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int words) {
    int i = 0;
    for (; i + TILE_WORDS <= words; i += TILE_WORDS) {
        tile_load<4>(a + i, 4 * a_stride);
        add_products<N, 4, 6>(b + i * b_stride, b_stride);
    }
    if (i == words) return;
    tile_load<5>(a + i, 4 * a_stride);
    add_products<N, 5, 7>(b + i * b_stride, b_stride);
}

// -- many queries, in the columns

// scores[key][N * 16] = keys [n_keys, rounded up to 16][words] times queries [words][N * 16]. Calls after(k) when those of
// keys [k, k + 16) are there.
template <int N, typename After>
INLINE void tile_scores(const uint32_t* queries, const uint32_t* keys, int words, int n_keys, float* scores,
                        int64_t stride, const After& after) {
    for (int k = 0; k < n_keys; k += TILE_ROWS) {
        zero_sums<N>();
        add_rows<N>(keys + (int64_t)k * words, words, queries, stride, words);
        store_sums<N>(scores + k * stride, stride);
        after(k);
    }
}

// Calls add(d, v, sums) for V transposed, values [dim][values_stride] words of pairs of keys, times the weights
// [pairs][N * 16], of which `written` rows are there; a part of a tile is filled up with zeros.
template <int N, typename Add>
INLINE void tile_sums(uint32_t* weights, int written, const uint32_t* values, int64_t values_stride, int dim,
                      int64_t stride, const Add& add) {
    const int pairs = (written + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    for (int i = written; i < pairs; ++i) memset(weights + i * stride, 0, sizeof(uint32_t) * N * TILE_WORDS);
    alignas(64) float sums[TILE_ROWS * N * TILE_WORDS];
    for (int d = 0; d < dim; d += TILE_ROWS) {
        zero_sums<N>();
        for (int i = 0; i < pairs; i += TILE_WORDS) {
            tile_load<4>(values + d * values_stride + i, 4 * values_stride);
            add_products<N, 4, 6>(weights + i * stride, stride);
        }
        store_sums<N>(sums, N * TILE_WORDS);
        for (int r = 0; r < TILE_ROWS; ++r)
            for (int v = 0; v < N; ++v) add(d + r, v, loadf(sums + (r * N + v) * TILE_WORDS));
    }
}

// V transposed: to[dim][stride], of which the first `pairs` words of each row, rounded up to 16, are filled, with zeros
// at the end. load(pair, at, x) gives the words of a pair of keys, from dimension `at` on.
template <typename Load>
INLINE void tile_turn(int pairs, int dim, uint32_t* to, int64_t stride, const Load& load) {
    alignas(64) uint32_t block[2][TILE_ROWS][TILE_WORDS];
    const uint32_t* rows[2][TILE_ROWS];
    for (int i = 0; i < 2 * TILE_ROWS; ++i) rows[i / TILE_ROWS][i % TILE_ROWS] = block[i / TILE_ROWS][i % TILE_ROWS];
    const auto turn = [&](int first, int d, auto& x) {
        constexpr int N = sizeof x / sizeof x[0];
        for (int i = 0; i < TILE_ROWS; ++i) {
            for (int v = 0; v < N; ++v) x[v] = vf{};
            if (first + i < pairs) load(first + i, d, x);
            for (int v = 0; v < N; ++v) memcpy(block[v][i], &x[v], sizeof x[v]);
        }
        for (int v = 0; v < N; ++v)
            transpose(rows[v], 0, TILE_WORDS, to + (d + v * TILE_WORDS) * stride + first, stride);
    };
    for (int first = 0; first < pairs; first += TILE_ROWS) {
        int d = 0;
        vf two[2], one[1];
        for (; d + 2 * TILE_WORDS <= dim; d += 2 * TILE_WORDS) turn(first, d, two);
        for (; d < dim; d += TILE_WORDS) turn(first, d, one);
    }
}

// -- few queries, in the rows

// scores[n][count keys] = queries [n][words] times a tile of keys [words][tile_stride].
template <typename Beside>
INLINE void tile_product(const uint32_t* queries, const uint32_t* tile, int64_t tile_stride, int n, int count, int words,
                         float* scores, int64_t stride, Beside& beside) {
    for (int i = 0; i < words; ++i) beside.step();
    const auto product = [&](auto columns, int key) {
        constexpr int N = decltype(columns)::value;
        zero_sums<N>();
        add_rows<N>(queries, words, tile + key, tile_stride, words);
        store_sums<N>(scores + key, stride);
    };
    int key = 0;
    if (count == 4 * TILE_WORDS) return product(Count<4>(), 0);
    for (; key < count; key += TILE_WORDS) product(Count<1>(), key);
}

// out[n][dim] += weights [n][weights_stride] of `written` words of pairs, which are filled up with zeros, times V;
// load(pair, at, x) gives the words of a pair of keys, of which there are `pairs`, from dimension `at` on.
template <typename Load>
INLINE void tile_mix(uint32_t* weights, int64_t weights_stride, int written, int n, int dim, int pairs, float* out,
                     int64_t stride, const Load& load) {
    if (written % TILE_WORDS)
        for (int r = 0; r < n; ++r)
            memset(weights + r * weights_stride + written, 0, sizeof(uint32_t) * (TILE_WORDS - written % TILE_WORDS));
    alignas(64) uint32_t block[TILE_ROWS][4 * TILE_WORDS];
    const auto mix = [&](int d, auto& x) {
        constexpr int N = sizeof x / sizeof x[0];
        load_sums<N>(out + d, stride);
        for (int first = 0; first < pairs; first += TILE_ROWS) {
            for (int i = 0; i < TILE_ROWS; ++i) {
                for (int v = 0; v < N; ++v) x[v] = vf{};
                if (first + i < pairs) load(first + i, d, x);
                for (int v = 0; v < N; ++v) memcpy(block[i] + v * TILE_WORDS, &x[v], sizeof x[v]);
            }
            tile_load<4>(weights + first, 4 * weights_stride);
            add_products<N, 4, 6>(block[0], 4 * TILE_WORDS);
        }
        store_sums<N>(out + d, stride);
    };
    vf four[4], two[2], one[1];
    int d = 0;
    for (; d + 4 * TILE_WORDS <= dim; d += 4 * TILE_WORDS) mix(d, four);
    for (; d + 2 * TILE_WORDS <= dim; d += 2 * TILE_WORDS) mix(d, two);
    for (; d < dim; d += TILE_WORDS) mix(d, one);
}
#endif

}  // namespace
