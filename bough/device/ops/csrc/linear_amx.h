// Linear layers of bf16 in the tile registers of AMX, for any number of rows.
#pragma once

#include "amx.h"
#include "linear_tile.h"

#if defined(BOUGH_AMX)

namespace {

constexpr int AMX_ROWS = 2 * TILE_ROWS;     // rows of a block of bf16, whose sums fill four tiles
constexpr int64_t AMX_WORDS = 320;          // words of a pass, at most: two panels of so many stay in a first-level cache

constexpr int64_t AMX_MOST_ROWS = 256;      // rows that are multiplied with some panels before others come

// What stands for words of rows that end within a tile.
struct PaddedTile {
    alignas(64) uint32_t at[TILE_ROWS][TILE_WORDS];

    // n_rows rows of n words, the rest of each zeros.
    void rows(const uint32_t* from, int64_t stride, int n_rows, int n) {
        memset(at, 0, sizeof at);
        for (int r = 0; r < n_rows; ++r) memcpy(at[r], from + r * stride, sizeof(uint32_t) * n);
    }
};

// sums[rows][P * PANEL] += a block of rows times the words [from, to) of P panels; they begin at zero where `first`.
// Of one tile of rows there are four tiles of sums, of two two for each.
template <bool TWO, int P>
struct AmxPairs {
    static_assert(P <= (TWO ? 2 : 4), "tiles");

    const PackedLinear& l;
    PreparedRows x;
    int rows;
    const uint32_t* weight;     // of the first panel
    int64_t words;              // of a panel's column
    const NextPanels& next;
    bool alone;                 // no other block takes these panels

    template <int I>
    INLINE void multiply(const uint32_t* w, int64_t stride) const {
        if constexpr (I < P) {
            tile_load<6 + I % 2>(w + I * stride, 64);
            tile_pairs<I, 4, 6 + I % 2>();
            if constexpr (TWO) tile_pairs<2 + I, 5, 6 + I % 2>();
            multiply<I + 1>(w, stride);
        }
    }

    template <int I>
    INLINE void start(const float* sums, bool first) const {
        if constexpr (I < P) {
            if (first) {
                tile_zero<I>();
                if constexpr (TWO) tile_zero<2 + I>();
            } else {
                tile_load<I>(sums + I * PANEL, P * PANEL * 4);
                if constexpr (TWO) tile_load<2 + I>(sums + (TILE_ROWS * P + I) * PANEL, P * PANEL * 4);
            }
            start<I + 1>(sums, first);
        }
    }

    template <int I>
    INLINE void end(float* sums) const {
        if constexpr (I < P) {
            tile_store<I>(sums + I * PANEL, P * PANEL * 4);
            if constexpr (TWO) tile_store<2 + I>(sums + (TILE_ROWS * P + I) * PANEL, P * PANEL * 4);
            end<I + 1>(sums);
        }
    }

    void run(int64_t from, int64_t to, bool first, float* sums) const {
        const int64_t stride = 4 * x.stride;
        start<0>(sums, first);
        int64_t i = from;
        for (; i + TILE_WORDS <= to; i += TILE_WORDS) {
            if (alone)
                for (int j = 0; j < TILE_WORDS; ++j) next.ahead<P>(weight, (i + j) * PANEL, ahead_words(next.stride));
            else
                next.touch<P>(i * PANEL, TILE_WORDS);
            next.ask();
            tile_load<4>(x.at + i, stride);
            if constexpr (TWO) tile_load<5>(x.row(TILE_ROWS) + i, stride);
            multiply<0>(weight + i * PANEL, words * PANEL);
        }
        if (i < to) finish(i, (int)(to - i));
        end<0>(sums);
    }

    // The last words, of which there are fewer than a tile has.
    void finish(int64_t i, int n) const {
        next.ask();
        PaddedTile a[2], w[P];
        a[0].rows(x.at + i, x.stride, TWO ? TILE_ROWS : rows, n);
        if constexpr (TWO) a[1].rows(x.row(TILE_ROWS) + i, x.stride, rows - TILE_ROWS, n);
        for (int p = 0; p < P; ++p) {
            memset(w[p].at, 0, sizeof w[p].at);
            memcpy(w[p].at, weight + (p * words + i) * PANEL, sizeof(uint32_t) * n * PANEL);
        }
        tile_load<4>(a[0].at, 64);
        if constexpr (TWO) tile_load<5>(a[1].at, 64);
        multiply<0>(w[0].at[0], TILE_ROWS * TILE_WORDS);
    }
};

// P panels from `panel` on, for n <= AMX_MOST_ROWS rows. finish(row, rows, sums) takes sums [rows][P * PANEL].
template <int P, typename Finish>
void amx_pairs(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, const Then& then,
               const Finish& finish) {
    const int64_t words = input_words(l), turns = ceil_div(n, AMX_ROWS);
    // One block keeps its sums in the tiles.
    const int64_t passes = turns == 1 ? 1 : ceil_div(words, AMX_WORDS);
    const int64_t step = ceil_to(ceil_div(words, passes), TILE_WORDS);
    alignas(64) float sums[AMX_MOST_ROWS * P * PANEL];
    NextPanels next = {then.weight, words * PANEL, then.others, 0};
    int shaped = 0;
    Tiles tiles;
    for (int64_t from = 0; from < words; from += step) {
        const int64_t to = words - from < step ? words : from + step;
        for (int64_t row = 0, turn = 0; row < n; row += AMX_ROWS, ++turn) {
            const int rows = (int)(n - row < AMX_ROWS ? n - row : AMX_ROWS);
            if (rows != shaped) {
                const int one = rows < TILE_ROWS ? rows : TILE_ROWS, two = rows > TILE_ROWS ? rows - one : one;
                TileShapes shapes;
                for (int i = 0; i < 4; ++i) shapes.set(i, i < 2 ? one : two, TILE_WORDS);
                shapes.set(4, one, TILE_WORDS).set(5, two, TILE_WORDS);
                shapes.set(6, TILE_ROWS, TILE_WORDS).set(7, TILE_ROWS, TILE_WORDS);
                tiles.shape(shapes);
                shaped = rows;
            }
            next.mask = 0;
            for (int p = 0; then.weight && p < P; ++p) next.mask |= (unsigned)(p * turns / P == turn) << p;
            float* at = sums + row * P * PANEL;
            const PreparedRows block = {x.row(row), x.stride};
            const uint32_t* weight = l.weight + panel * words * PANEL;
            if (rows <= TILE_ROWS)
                AmxPairs<false, P>{l, block, rows, weight, words, next, turns == 1}.run(from, to, from == 0, at);
            else if constexpr (P <= 2)
                AmxPairs<true, P>{l, block, rows, weight, words, next, turns == 1}.run(from, to, from == 0, at);
            if (to == words) finish(row, rows, at);
        }
    }
}

}  // namespace

#endif
