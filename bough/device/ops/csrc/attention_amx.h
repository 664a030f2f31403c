// Products of attention on processors with AMX: of many queries in its tile registers, of few in vectors.
//
// Of pairs of bf16, blocks of 32 dimensions or keys add up in rising order, and each as tiles add it up: few queries and
// many have the same bits. Digits of queries and weights beside int8 cells (bytes.h) have exact sums.
#pragma once

#include "amx.h"
#include "tile.h"
#include "transpose.h"

namespace {

// Whether what is computed with words of E is multiplied in tiles.
template <typename E> constexpr bool IN_TILES = false;

#if defined(BOUGH_AMX)
template <> constexpr bool IN_TILES<uint32_t> = true;

// -- many queries, in the columns of tiles

// Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 what they are multiplied with.
INLINE TileShapes attention_shapes() {
    TileShapes s;
    for (int i = 0; i < 8; ++i) s.set(i, TILE_ROWS, TILE_WORDS);
    return s;
}

// Calls run(Count<A>(), first) for tiles [0, n), two at a time and the last one alone.
template <typename Run>
INLINE void by_twos(int n, const Run& run) {
    int i = 0;
    for (; i + 2 <= n; i += 2) run(Count<2>(), i);
    if (i < n) run(Count<1>(), i);
}

// R rows times C columns of tiles, at most two of each: to[R * 16][C * 16] = a [R * 16][words] times b [words][C][16], whose
// second column lies `next` words behind the first, for `words` of whole tiles. What is loaded is multiplied twice.
template <typename Product, int R, int C>
INLINE void tile_block(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t next, int words,
                       float* to, int64_t stride) {
    tile_zero<0>();
    if (C > 1) tile_zero<1>();
    if (R > 1) tile_zero<2>();
    if (R * C > 2) tile_zero<3>();
    for (int i = 0; i < words; i += TILE_WORDS, b += TILE_WORDS * b_stride) {
        tile_load<4>(a + i, 4 * a_stride);
        tile_load<6>(b, 4 * b_stride);
        Product::template multiply<0, 4, 6>();
        if (C > 1) {
            tile_load<7>(b + next, 4 * b_stride);
            Product::template multiply<1, 4, 7>();
        }
        if (R > 1) {
            tile_load<5>(a + TILE_ROWS * a_stride + i, 4 * a_stride);
            Product::template multiply<2, 5, 6>();
        }
        if (R * C > 2) Product::template multiply<3, 5, 7>();
    }
    tile_store<0>(to, 4 * stride);
    if (C > 1) tile_store<1>(to + TILE_WORDS, 4 * stride);
    if (R > 1) tile_store<2>(to + TILE_ROWS * stride, 4 * stride);
    if (R * C > 2) tile_store<3>(to + TILE_ROWS * stride + TILE_WORDS, 4 * stride);
}

// scores[key][N * 16] = keys [n_keys, rounded up to 16][words] times queries [words][N * 16], for `words` of whole tiles. Calls
// after(first, end) for keys whose scores have had the time to get where they are read, while others are multiplied.
template <int N, typename After>
INLINE void tile_scores(const uint32_t* queries, const uint32_t* keys, int words, int n_keys, float* scores,
                        int64_t stride, const After& after) {
    int done = 0;
    by_twos((n_keys + TILE_ROWS - 1) / TILE_ROWS, [&](auto rows, int row) {
        const int key = row * TILE_ROWS;
        by_twos(N, [&](auto columns, int column) {
            tile_block<PairTiles, decltype(rows)::value, decltype(columns)::value>(
                keys + (int64_t)key * words, words, queries + column * TILE_WORDS, stride, TILE_WORDS, words,
                scores + key * stride + column * TILE_WORDS, stride);
        });
        after(done, key);
        done = key;
    });
    after(done, n_keys);
}

// Calls add(Count<C>(), first, n, v, sums) for a [n_rows, rounded up to 16][a_stride] times b [words][N * 16], for `words` of
// whole tiles: sums [n][2 * 16] are of rows from `first` on and of C vectors from v on, or of both DIGITS of one vector, of
// which the low ones lie `low` words behind the high ones. They are added when others have been multiplied.
template <typename Product, bool DIGITS, int N, typename Add>
INLINE void tile_sums(const uint32_t* a, int64_t a_stride, int n_rows, const uint32_t* b, int64_t b_stride, int64_t low,
                      int words, const Add& add) {
    alignas(64) float sums[2][2 * TILE_ROWS * 2 * TILE_WORDS];
    int turn = 0, first = 0, n = 0, v = 0, columns = 0;
    const auto add_last = [&] {
        if (columns == 2)
            add(Count<2>(), first, n, v, sums[1 - turn]);
        else if (columns && !DIGITS)
            add(Count<1>(), first, n, v, sums[1 - turn]);
    };
    by_twos((n_rows + TILE_ROWS - 1) / TILE_ROWS, [&](auto r, int row) {
        const auto multiply = [&](auto c, int column) {
            constexpr int R = decltype(r)::value, C = decltype(c)::value;
            tile_block<Product, R, C>(a + row * TILE_ROWS * a_stride, a_stride, b + column * TILE_WORDS, b_stride,
                                      DIGITS ? low : TILE_WORDS, words, sums[turn], 2 * TILE_WORDS);
            add_last();
            turn = 1 - turn;
            first = row * TILE_ROWS, n = R * TILE_ROWS, v = column, columns = C;
        };
        if constexpr (DIGITS)
            for (int i = 0; i < N; ++i) multiply(Count<2>(), i);
        else
            by_twos(N, multiply);
    });
    add_last();
}

// V transposed: to[dim][stride], of which the first n_words of each row, rounded up to 16, are filled, with zeros at the
// end. load(word, at, x) gives the words of some keys, from dimension `at` on; MOST vectors at once where dim has so many.
template <int MOST, typename V, typename Load>
INLINE void tile_turn(int n_words, int dim, uint32_t* to, int64_t stride, const Load& load) {
    alignas(64) uint32_t block[MOST][TILE_ROWS][TILE_WORDS];
    const uint32_t* rows[MOST][TILE_ROWS];
    for (int i = 0; i < MOST * TILE_ROWS; ++i) rows[i / TILE_ROWS][i % TILE_ROWS] = block[i / TILE_ROWS][i % TILE_ROWS];
    const auto turn = [&](int first, int d, auto& x) {
        constexpr int N = sizeof x / sizeof x[0];
        for (int i = 0; i < TILE_ROWS; ++i) {
            for (int v = 0; v < N; ++v) x[v] = V{};
            if (first + i < n_words) load(first + i, d, x);
            for (int v = 0; v < N; ++v) memcpy(block[v][i], &x[v], sizeof x[v]);
        }
        for (int v = 0; v < N; ++v)
            transpose(rows[v], 0, TILE_WORDS, to + (d + v * TILE_WORDS) * stride + first, stride);
    };
    for (int first = 0; first < n_words; first += TILE_ROWS) {
        int d = 0;
        V most[MOST], one[1];
        for (; d + MOST * TILE_WORDS <= dim; d += MOST * TILE_WORDS) turn(first, d, most);
        for (; d < dim; d += TILE_WORDS) turn(first, d, one);
    }
}

// -- few queries, in vectors: tiles would be nearly empty, and wait for what is turned for them
//
// A product of tiles adds up the even and the odd inputs of each 32 apart, and both then to what is there, with fused
// multiply-adds that take and make no denormals (Intel's manual of instructions, TDPBF16PS). So do these, bit by bit.

// As long as this lives, the thread's vectors know no denormals either.
struct Flushing {
    uint32_t before;

    INLINE Flushing() {
        asm volatile("stmxcsr %0" : "=m"(before)::"memory");
        const uint32_t now = before | 0x8040;
        asm volatile("ldmxcsr %0" ::"m"(now) : "memory");
    }
    INLINE ~Flushing() { asm volatile("ldmxcsr %0" ::"m"(before) : "memory"); }
    Flushing(const Flushing&) = delete;
};

constexpr int FEW_ROWS_AT_ONCE = 6, FEW_VECS = 2;    // a block whose sums fill the registers

// The even and the odd values of up to 16 words of R rows.
template <int R>
struct Halves {
    alignas(64) float even[R][TILE_WORDS], odd[R][TILE_WORDS];

    INLINE Halves(const uint32_t* from, int64_t stride, int n) {
        for (int r = 0; r < R; ++r) {
            vu x = vu{};
            if (n == TILE_WORDS)
                x = loadu(from + r * stride);
            else
                memcpy(&x, from + r * stride, sizeof(uint32_t) * n);
            storef(even[r], (vf)(x << 16));
            storef(odd[r], (vf)(x & 0xffff0000u));
        }
    }
};

template <int R, int N>
struct FewSums {
    vf even[R][N], odd[R][N];

    INLINE void clear() {
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < N; ++v) even[r][v] = odd[r][v] = vf{};
    }
    INLINE void add(const Halves<R>& a, int i, const vf (&x)[N], const vf (&y)[N]) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < N; ++v) {
                even[r][v] = fma(x[v], splat(a.even[r][i]), even[r][v]);
                odd[r][v] = fma(y[v], splat(a.odd[r][i]), odd[r][v]);
            }
    }
    INLINE void end(float* to, int64_t stride, bool first) const {
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < N; ++v) {
                float* at = to + r * stride + v * WIDTH;
                storef(at, (first ? vf{} : loadf(at)) + (even[r][v] + odd[r][v]));
            }
    }
};

// How often both of these call beside.step(), in words.
INLINE int few_steps(int n, int n_vecs, int words) {
    return (int)(ceil_div(n, FEW_ROWS_AT_ONCE) * ceil_div(n_vecs, FEW_VECS)) * words;
}

// scores[n][count keys] = queries [n][words] times a tile of keys [words][TILE], for whole vectors of keys.
template <typename Beside>
INLINE void few_scores(const uint32_t* queries, const uint32_t* tile, int n, int count, int words,
                       float* scores, int64_t stride, Beside& beside) {
    const Flushing flushing;
    by_rows<FEW_ROWS_AT_ONCE>(n, [&](auto rows, int r) {
        by_twos(count / WIDTH, [&](auto vecs, int vec) {
            constexpr int R = decltype(rows)::value, N = decltype(vecs)::value;
            for (int first = 0; first < words; first += TILE_WORDS) {
                const int some = words - first < TILE_WORDS ? words - first : TILE_WORDS;
                const Halves<R> a(queries + r * words + first, words, some);
                const uint32_t* keys = tile + first * TILE + vec * WIDTH;
                beside.step(some);
                FewSums<R, N> sums;
                sums.clear();
                for (int i = 0; i < some; ++i, keys += TILE) {
                    vf x[N], y[N];
                    for (int v = 0; v < N; ++v) {
                        const vu pair = loadu(keys + v * WIDTH);
                        x[v] = (vf)(pair << 16), y[v] = (vf)(pair & 0xffff0000u);
                    }
                    sums.add(a, i, x, y);
                }
                sums.end(scores + r * stride + vec * WIDTH, stride, first == 0);
            }
        });
    });
}

// out[n][dim] += weights [n][weights_stride] words of pairs of keys times V, whose rows are rows[2 * pairs] + head.
template <typename Beside>
INLINE void few_sums(const uint32_t* weights, int64_t weights_stride, const bf16* const* rows, int64_t head, int n, int dim,
                     int pairs, float* out, int64_t stride, Beside& beside) {
    const Flushing flushing;
    by_rows<FEW_ROWS_AT_ONCE>(n, [&](auto count, int r) {
        for (int first = 0; first < pairs; first += TILE_WORDS) {
            constexpr int R = decltype(count)::value;
            const int some = pairs - first < TILE_WORDS ? pairs - first : TILE_WORDS;
            const Halves<R> a(weights + r * weights_stride + first, weights_stride, some);
            by_twos(dim / WIDTH, [&](auto vecs, int vec) {
                constexpr int N = decltype(vecs)::value;
                beside.step(some);
                FewSums<R, N> sums;
                sums.clear();
                for (int i = 0; i < some; ++i) {
                    const bf16* const* pair = rows + 2 * (first + i);
                    vf x[N], y[N];
                    for (int v = 0; v < N; ++v) {
                        x[v] = load(pair[0] + head + (vec + v) * WIDTH);
                        y[v] = load(pair[1] + head + (vec + v) * WIDTH);
                    }
                    sums.add(a, i, x, y);
                }
                sums.end(out + r * stride + vec * WIDTH, stride, false);
            });
        }
    });
}
#endif

}  // namespace
