// Linear layers in the tile registers of AMX: of bf16 for any number of rows, of bytes for many.
#pragma once

#include "amx.h"
#include "linear_tile.h"

#if defined(BOUGH_AMX)

namespace {

constexpr int AMX_ROWS = 2 * TILE_ROWS;     // rows of a block whose sums fill four tiles until all inputs are added up
constexpr int64_t AMX_WORDS = 320;          // words of a pass of bytes, at most: two panels of so many stay in a first-level cache
constexpr int64_t AMX_MOST_ROWS = 256;      // rows of bytes that are multiplied with some panels before others come

// Weights that all rows of such blocks are multiplied with before others come: they stay in a second-level cache meanwhile.
constexpr int64_t AMX_WEIGHT_WORDS = (512 << 10) / 4;

// Panels of so many words each that those are, in whole pairs.
INLINE int64_t amx_panels(int64_t words) {
    const int64_t panels = AMX_WEIGHT_WORDS / words / 2 * 2;
    return panels ? panels : 2;
}

// What is read next, where blocks of rows take turns with the same weights: asked for beside products.
struct Later {
    Wanted rows, weights;

    // Behind panels up to chunk_end, of `size` words each, come others up to `end`, at most `most` at a time, or `then`;
    // `steps`: how often ask() is called meanwhile.
    void begin(const PackedLinear& l, int64_t chunk_end, int64_t end, int64_t most, int64_t size, const Then& then, int64_t steps) {
        weights.clear();
        const int64_t left = end - chunk_end;
        if (left)
            weights.add(l.weight + chunk_end * size, (left < most ? left : most) * size);
        else if (then.weight)
            weights.add(then.weight, then.words);
        weights.spread(steps);
    }

    // Behind a block of rows comes the one from `row` on, which another core may have written.
    void begin_rows(const PreparedRows& x, int64_t row, int64_t n, int64_t block, int64_t steps) {
        rows.clear();
        if (row < n) rows.add(x.row(row), (n - row < block ? n - row : block) * x.stride);
        rows.spread(steps);
    }

    INLINE void ask() {
        rows.ask();
        weights.ask();
    }
};

// What stands for words of rows that end within a tile.
struct PaddedTile {
    alignas(64) uint32_t at[TILE_ROWS][TILE_WORDS];

    // n_rows rows of n words, the rest of each zeros.
    void rows(const uint32_t* from, int64_t stride, int n_rows, int n) {
        memset(at, 0, sizeof at);
        for (int r = 0; r < n_rows; ++r) memcpy(at[r], from + r * stride, sizeof(uint32_t) * n);
    }
};

// What words hold: pairs of bf16, or bytes, signed of rows and unsigned of weights, whose sums are integers.
struct Pairs {
    template <int SUMS, int A, int B> static INLINE void multiply() { tile_pairs<SUMS, A, B>(); }
};
struct Bytes {
    template <int SUMS, int A, int B> static INLINE void multiply() { tile_bytes<SUMS, A, B>(); }
};

// sums[rows][P * PANEL] := a block of rows times P panels. Of one tile of rows there are four tiles of sums, of two two for
// each. The rows stay in a first-level cache while panels pass through it.
template <typename Words, bool TWO, int P>
struct AmxBlock {
    static_assert(P <= (TWO ? 2 : 4), "tiles");

    PreparedRows x;
    int rows;
    const uint32_t* weight;     // of the first panel
    int64_t words;              // of a panel's column
    const NextPanels& next;
    Later* later;               // null where no other block takes these panels

    template <int I>
    INLINE void multiply(const uint32_t* w, int64_t stride) const {
        if constexpr (I < P) {
            if (later)
                tile_stream<6 + I % 2>(w + I * stride, 64);
            else
                tile_load<6 + I % 2>(w + I * stride, 64);
            Words::template multiply<I, 4, 6 + I % 2>();
            if constexpr (TWO) Words::template multiply<2 + I, 5, 6 + I % 2>();
            multiply<I + 1>(w, stride);
        }
    }

    template <int I = 0>
    INLINE void start() const {
        if constexpr (I < P) {
            tile_zero<I>();
            if constexpr (TWO) tile_zero<2 + I>();
            start<I + 1>();
        }
    }

    template <int I = 0>
    INLINE void end(float* sums) const {
        if constexpr (I < P) {
            tile_store<I>(sums + I * PANEL, P * PANEL * 4);
            if constexpr (TWO) tile_store<2 + I>(sums + (TILE_ROWS * P + I) * PANEL, P * PANEL * 4);
            end<I + 1>(sums);
        }
    }

    void run(float* sums) const {
        const int64_t stride = 4 * x.stride;
        start();
        int64_t i = 0;
        for (; i + TILE_WORDS <= words; i += TILE_WORDS) {
            if (later)
                later->ask();
            else
                for (int j = 0; j < TILE_WORDS; ++j) next.ahead<P>(weight, (i + j) * PANEL, ahead_words(next.stride));
            next.ask();
            tile_load<4>(x.at + i, stride);
            if constexpr (TWO) tile_load<5>(x.row(TILE_ROWS) + i, stride);
            multiply<0>(weight + i * PANEL, words * PANEL);
        }
        if (i < words) finish(i, (int)(words - i));
        end(sums);
    }

    // The last words, of which there are fewer than a tile has.
    void finish(int64_t i, int n) const {
        if (later) later->ask();
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

// The tiles of a block of rows.
INLINE TileShapes block_shapes(int rows) {
    const int one = rows < TILE_ROWS ? rows : TILE_ROWS, two = rows > TILE_ROWS ? rows - one : one;
    TileShapes shapes;
    for (int i = 0; i < 4; ++i) shapes.set(i, rows <= TILE_ROWS || i < 2 ? one : two, TILE_WORDS);
    shapes.set(4, one, TILE_WORDS).set(5, two, TILE_WORDS);
    return shapes.set(6, TILE_ROWS, TILE_WORDS).set(7, TILE_ROWS, TILE_WORDS);
}

// Panels [panel, end) for n rows of Words. finish(Count<P>(), row, rows, panel, sums) takes sums [rows][P * PANEL] of a block
// of rows, where they lie.
template <typename Words, typename Finish>
void amx_blocks(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, int64_t end, const Then& then,
               const Finish& finish) {
    const int64_t words = input_words(l), size = words * PANEL, turns = ceil_div(n, AMX_ROWS);
    alignas(64) float sums[AMX_ROWS * 2 * PANEL];
    int shaped = 0;
    Tiles tiles;
    const int64_t most = turns > 1 ? amx_panels(size) : end - panel;
    for (int64_t chunk = panel, chunk_end; chunk < end; chunk = chunk_end) {
        chunk_end = end - chunk > most ? chunk + most : end;
        const int64_t steps = ceil_div(chunk_end - chunk, 2) * ceil_div(words, TILE_WORDS);     // of a block
        Later later;
        if (turns > 1) later.begin(l, chunk_end, end, most, size, then, turns * steps);
        for (int64_t row = 0; row < n; row += AMX_ROWS) {
            const int rows = (int)(n - row < AMX_ROWS ? n - row : AMX_ROWS);
            if (rows != shaped) tiles.shape(block_shapes(shaped = rows));
            const PreparedRows block = {x.row(row), x.stride};
            later.begin_rows(x, row + rows, n, AMX_ROWS, steps);
            int64_t at = chunk;
            const auto pass = [&](auto two, auto width) {
                constexpr int P = decltype(width)::value;
                for (; at + P <= chunk_end; at += P) {
                    const NextPanels next = {at + P < end ? l.weight + (at + P) * size : then.weight, size, then.others, 0};
                    AmxBlock<Words, decltype(two)::value == 2, P>{block, rows, l.weight + at * size, words, next,
                                                           turns > 1 ? &later : nullptr}.run(sums);
                    finish(width, row, rows, at, sums);
                }
            };
            if (rows <= TILE_ROWS) {
                pass(Count<1>(), Count<4>());
                pass(Count<1>(), Count<2>());
                pass(Count<1>(), Count<1>());
            } else {
                pass(Count<2>(), Count<2>());
                pass(Count<2>(), Count<1>());
            }
        }
    }
}

// Rows of a block of bytes whose groups have scales. Their sums leave the tiles as integers, to be scaled and added up in
// registers, which hold those of so many rows and two panels. From so many rows on there are whole blocks; the last one
// begins earlier if need be.
constexpr int AMX_GROUP_ROWS = 12;

// From so many rows on bytes without such scales are multiplied in tiles.
constexpr int AMX_ROTATED_ROWS = 7;

// Whether n rows are multiplied in blocks whose sums stay in the tiles.
INLINE bool in_blocks(const PackedLinear& l, int64_t n) {
    return l.kind == LINEAR_BF16 || (l.kind == LINEAR_ROTATED && n >= AMX_ROTATED_ROWS);
}

// Whether n rows are multiplied in tiles with a kind. Where 16 inputs share a scale, tiles would be a quarter full.
template <typename Format> constexpr bool HAS_TILES = !Format::SPLIT;
INLINE bool in_tiles(const PackedLinear& l, int64_t n) { return l.kind != LINEAR_Q6_K && n >= AMX_GROUP_ROWS; }

// total[AMX_GROUP_ROWS][P * PANEL] += a block of rows times the words [from, to) of P panels, whole scales of the rows;
// they begin at zero where `first`. Rounds as GroupTile does.
template <typename Format, int P>
struct AmxGroups {
    static constexpr int TOGETHER = Format::TOGETHER, WORDS = TOGETHER * GROUP / 4;    // of what a scale is for
    static constexpr int LINES = GroupTile<Format>::LINES;
    static_assert(P <= 2 && WORDS <= TILE_WORDS && PANEL_VECS == 1, "tiles");

    typedef int32_t Products[AMX_GROUP_ROWS][P * PANEL];

    const PackedLinear& l;
    PreparedRows x;
    int64_t panel;
    const uint32_t* bytes;      // of the weights of word `from` of the first panel
    int64_t stride;             // words from there to the next panel
    int64_t from, to;
    const NextPanels& next;

    // Two products are in work at a time, in tiles of their own.
    static TileShapes shapes() {
        TileShapes s;
        for (int i = 0; i < 4; ++i) s.set(i, AMX_GROUP_ROWS, TILE_WORDS);
        s.set(4, AMX_GROUP_ROWS, WORDS).set(6, WORDS, TILE_WORDS);
        if (TOGETHER > 1) s.set(5, AMX_GROUP_ROWS, GROUP / 4).set(7, GROUP / 4, TILE_WORDS);
        return s;
    }

    template <int SUMS, int A, int B, int I = 0>
    INLINE void multiply(int64_t word) const {
        if constexpr (I < P) {
            if constexpr (I == 0) tile_load<A>(x.at + word, 4 * x.stride);
            tile_zero<SUMS + I>();
            tile_load<B>(bytes + I * stride + (word - from) * PANEL, 4 * PANEL);
            tile_bytes<SUMS + I, A, B>();
            multiply<SUMS, A, B, I + 1>(word);
        }
    }

    // Multiplies what begins at a word, into tiles from SUMS on.
    template <int SUMS>
    INLINE void start(int64_t word) const {
        if (TOGETHER > 1 && to - word < WORDS)
            multiply<SUMS, 5, 7>(word);
        else
            multiply<SUMS, 4, 6>(word);
    }

    template <int SUMS, int I = 0>
    INLINE void end(Products& products) const {
        if constexpr (I < P) {
            tile_store<SUMS + I>(&products[0][I * PANEL], sizeof products[0]);
            end<SUMS, I + 1>(products);
        }
    }

    INLINE void add(const Products& products, int64_t word, RowCursor& meta, vf (&total)[AMX_GROUP_ROWS][P]) const {
        const int64_t group = word / (GROUP / 4), n_groups = n_groups_of(l);
        Affine affine[P];
        if (!Format::WHOLE) GroupTile<Format>::template load_affine<P>(l, panel, group, n_groups, 0, affine);
#pragma GCC unroll 12
        for (int r = 0; r < AMX_GROUP_ROWS; ++r) {
            const GroupMeta& m = *(const GroupMeta*)meta(r);
            const vf scale = splat(m.scale);
#pragma GCC unroll 2
            for (int p = 0; p < P; ++p) {
                vi sum;
                memcpy(&sum, &products[r][p * PANEL], sizeof sum);
                if (!Format::MINIMUM) sum += m.start;
                total[r][p] = GroupTile<Format>::add_scaled(total[r][p], to_float(sum), scale, affine[p], m);
            }
        }
        meta.advance(sizeof(GroupMeta));
    }

    // While the products of the word before leave memory, those of a word get there, and what follows is multiplied: nobody
    // waits for what was just begun.
    template <int SUMS>
    INLINE void turn(int64_t word, Products (&products)[2], RowCursor& meta, vf (&total)[AMX_GROUP_ROWS][P]) const {
        next.template touch<P>(word / (GROUP / 4) * LINES * PANEL, TOGETHER * LINES);
        for (int i = 0; i < TOGETHER; ++i) next.ask();
        // The next block of rows, which is in the second-level cache by now.
        for (int r = 0; r < AMX_GROUP_ROWS; ++r) __builtin_prefetch(x.row(AMX_GROUP_ROWS + r) + word, 0, 3);
        if (word + WORDS < to) start<2 - SUMS>(word + WORDS);
        end<SUMS>(products[SUMS / 2]);
        if (word > from) add(products[1 - SUMS / 2], word - WORDS, meta, total);
    }

    void run(bool first, float* totals) const {
        RowCursor meta(x.at + input_words(l) + from / WORDS * META, x.stride);
        vf total[AMX_GROUP_ROWS][P];
#pragma GCC unroll 12
        for (int r = 0; r < AMX_GROUP_ROWS; ++r)
#pragma GCC unroll 2
            for (int p = 0; p < P; ++p) total[r][p] = first ? vf{} : loadf(totals + (r * P + p) * PANEL);
        alignas(64) Products products[2];
        start<0>(from);
        for (int64_t word = from; word < to; word += 2 * WORDS) {
            turn<0>(word, products, meta, total);
            if (word + WORDS < to) turn<2>(word + WORDS, products, meta, total);
        }
        const int64_t last = (to - from - 1) / WORDS;
        add(products[last % 2], from + last * WORDS, meta, total);
#pragma GCC unroll 12
        for (int r = 0; r < AMX_GROUP_ROWS; ++r)
#pragma GCC unroll 2
            for (int p = 0; p < P; ++p) storef(totals + (r * P + p) * PANEL, total[r][p]);
    }
};

// Words [from, to) of P panels of 4 bits as those of bytes: bytes[P][stride].
template <int P>
void spread_bits(const PackedLinear& l, int64_t panel, int64_t from, int64_t to, uint32_t* bytes, int64_t stride) {
    for (int p = 0; p < P; ++p, bytes += stride) {
        const uint32_t* w = l.weight + (panel + p) * panel_words(l) + from / 2 * PANEL;
        for (int64_t i = 0; i < to - from; i += GROUP / 4)
            for (int j = 0; j < GROUP / 8; ++j, w += PANEL) {
                const vu both = loadu(w), low = both & 0x0f0f0f0fu, high = (both >> 4) & 0x0f0f0f0fu;
                memcpy(bytes + (i + j) * PANEL, &low, sizeof low);
                memcpy(bytes + (i + j + GROUP / 8) * PANEL, &high, sizeof high);
            }
    }
}

// As amx_blocks, for n >= AMX_GROUP_ROWS rows.
template <typename Format, int P, typename Finish>
void amx_groups(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, const Then& then,
                const Finish& finish) {
    constexpr bool SPREAD = Format::BITS == 4;
    constexpr int64_t MOST_BLOCKS = AMX_MOST_ROWS / AMX_GROUP_ROWS + 1;
    const int64_t words = input_words(l), turns = ceil_div(n, AMX_GROUP_ROWS), size = panel_words(l);
    const int64_t step = ceil_to(ceil_div(words, ceil_div(words, AMX_WORDS)), TILE_WORDS);
    alignas(64) float totals[MOST_BLOCKS][AMX_GROUP_ROWS * P * PANEL];
    alignas(64) uint32_t spread[SPREAD ? P * AMX_WORDS * PANEL : 1];
    NextPanels next = {then.weight, size, then.others, 0};
    Tiles tiles;
    tiles.shape(AmxGroups<Format, P>::shapes());
    for (int64_t from = 0; from < words; from += step) {
        const int64_t to = words - from < step ? words : from + step, stride = SPREAD ? (to - from) * PANEL : size;
        if (SPREAD) spread_bits<P>(l, panel, from, to, spread, stride);
        const uint32_t* bytes = SPREAD ? spread : l.weight + panel * size + from * PANEL;
        for (int64_t turn = 0; turn < turns; ++turn) {
            const int64_t row = turn + 1 < turns ? turn * AMX_GROUP_ROWS : n - AMX_GROUP_ROWS;
            next.take(turn, turns, P);
            float* total = totals[turn];
            AmxGroups<Format, P>{l, {x.row(row), x.stride}, panel, bytes, stride, from, to, next}.run(from == 0, total);
            if (to < words) continue;
            for (int p = 0; Format::WHOLE && p < P; ++p) {
                const vf scale = Format::affine(l, panel + p, 0, 0, 0, 0).scale;
                for (int r = 0; r < AMX_GROUP_ROWS; ++r) {
                    float* at = total + (r * P + p) * PANEL;
                    storef(at, loadf(at) * scale);
                }
            }
            finish(row, AMX_GROUP_ROWS, total);
        }
    }
}

}  // namespace

#endif
