// Linear layers in the tile registers of AMX: of bf16 for any number of rows, of bytes for several.
#pragma once

#include "amx.h"
#include "linear_whole.h"

#if defined(BOUGH_AMX)

namespace {

// Weights that all rows of such blocks are multiplied with before others come, and those rows: both stay in a second-level
// cache meanwhile, beside the weights that come next. Inputs of more words than AMX_SHORT_WORDS pass in parts.
constexpr int64_t AMX_WEIGHT_WORDS = (256 << 10) / 4, AMX_ROW_WORDS = (768 << 10) / 4;
constexpr int64_t AMX_PASS_WORDS = 512, AMX_SHORT_WORDS = 1024;

// Words of a pass, which may begin within a group.
INLINE int64_t amx_pass_words(const PackedLinear& l) {
    const int64_t words = input_words(l);
    return words > AMX_SHORT_WORDS ? ceil_to(ceil_div(words, ceil_div(words, AMX_PASS_WORDS)), 2 * TILE_WORDS) : words;
}

// How many of those rows there are.
INLINE int64_t amx_some_rows(const PackedLinear& l) { return AMX_ROW_WORDS / amx_pass_words(l) / AMX_ROWS * AMX_ROWS; }

// Panels that those weights are for n rows, in whole pairs. Those of four bits are spread before they are multiplied, and take
// half as much where they wait for that. The more at one go, the longer nothing is multiplied while they are read the first
// time, which few rows do not make up for.
INLINE int64_t amx_panels(const PackedLinear& l, int64_t n) {
    constexpr int64_t FEW = 96;
    const int64_t words = l.kind != LINEAR_Q4_WHOLE ? AMX_WEIGHT_WORDS : n <= FEW ? AMX_WEIGHT_WORDS / 2 : 2 * AMX_WEIGHT_WORDS;
    const int64_t panels = words / (amx_pass_words(l) * PANEL) / 2 * 2;
    return panels ? panels : 2;
}

// Panels [panel, end) as what a thread reads next: of many, what it begins with.
INLINE Then begins_with(const PackedLinear& l, int64_t panel, int64_t end, Wanted* others) {
    const int64_t words = (end - panel) * panel_words(l);
    return {l.weight + panel * panel_words(l), others, words < AMX_WEIGHT_WORDS ? words : AMX_WEIGHT_WORDS};
}

// What is read next, where blocks of rows take turns with the same weights: asked for beside products.
struct Later {
    Wanted rows, weights;

    Later() {
        rows.clear();
        weights.clear();
    }

    // Words [from, to) of inputs of panels.
    void add(const PackedLinear& l, int64_t panel, int64_t end, int64_t from, int64_t to) {
        const int64_t words = input_words(l), n = from == 0 && to == words ? end - panel : 1;     // that lie in one piece
        const auto part = [&](const uint32_t* first, int64_t size) {
            weights.add(first + size * from / words, n * size * (to - from) / words);
        };
        for (; panel < end; panel += n) {
            part(l.weight + panel * panel_words(l), panel_words(l));
            if (l.kind == LINEAR_Q4_WHOLE) part(whole_steps(l, panel), whole_step_words(l));
        }
    }

    // Behind a block of rows comes the one from `row` on, which another core may have written: its words [from, to).
    void begin_rows(const PackedLinear& l, const PreparedRows& x, int64_t row, int64_t n, int64_t block, int64_t from, int64_t to,
                    int64_t steps) {
        const int64_t words = input_words(l), digits = digits_of(l);
        rows.clear();
        for (const int64_t last = row + block < n ? row + block : n; row < last; ++row)
            for (int64_t i = 0; i < digits; ++i) rows.add(x.row(row) + i * words + from, to - from);
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

// What words hold: pairs of bf16; bytes, signed of rows and unsigned of weights, whose sums are integers; or two digits of rows
// and signed bytes of weights. And how many rows a block has at most.
struct Pairs : PairTiles {
    static constexpr bool DIGITS = false;
    static constexpr int ROWS = AMX_ROWS;
};
struct Bytes : ByteTiles {
    static constexpr bool DIGITS = false;
    static constexpr int ROWS = AMX_ROWS;
};
struct Digits : SignedByteTiles {
    static constexpr bool DIGITS = true;
    static constexpr int ROWS = TILE_ROWS;
};

// From so many words of inputs on a block of rows is finished beside the products of the next one.
constexpr int64_t FINISHING_WORDS = 16 * TILE_WORDS;

// A block of rows times some panels whose sums have left the tiles, but not gone through finish() yet. That is done a few rows
// at a time.
template <typename Finish>
struct Unfinished {
    const Finish* finish;
    int width, rows;    // panels, and rows that are left
    int64_t row, panel;
    float* sums;

    template <int P>
    INLINE void some(int n) {
        if (rows == 0) return;
        if (n > rows) n = rows;
        (*finish)(Count<P>(), row, n, panel, sums);
        row += n;
        sums += n * P * PANEL;
        rows -= n;
    }

    void all() {
        switch (width) {
            case 1: return some<1>(rows);
            case 2: return some<2>(rows);
            case 4: return some<4>(rows);
        }
    }
};

// sums[rows][P * PANEL] := a block of rows times P panels; of Digits [2][TILE_ROWS][P * PANEL]. Of one tile of rows there are
// four tiles of sums, of two, which are also those of two digits, two for each. The rows stay in a first-level cache while
// panels pass through it.
template <typename Words, bool TWO, int P>
struct AmxBlock {
    static_assert(P <= (TWO ? 2 : 4), "tiles");

    PreparedRows x;
    const uint32_t* second;     // the words of the second tile of rows
    int rows;
    const uint32_t* weight;     // of the first panel
    int64_t panel;              // words from there to the next one
    int64_t words;              // of a row
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
    INLINE void go_on(const float* sums) const {
        if constexpr (I < P) {
            tile_load<I>(sums + I * PANEL, P * PANEL * 4);
            if constexpr (TWO) tile_load<2 + I>(sums + (TILE_ROWS * P + I) * PANEL, P * PANEL * 4);
            go_on<I + 1>(sums);
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

    // `more`: sums go on from what they are. They may lie where those of `before` do.
    template <typename Finish>
    void run(float* sums, bool more, Unfinished<Finish>& before) const {
        const int64_t stride = 4 * x.stride;
        if (before.width != P) before.all();
        const int some = before.rows ? (int)ceil_div(before.rows, words / TILE_WORDS) : 0;
        if (more)
            go_on(sums);
        else
            start();
        int64_t i = 0;
        for (; i + TILE_WORDS <= words; i += TILE_WORDS) {
            if (later)
                later->ask();
            else
                next.ahead<P>(weight, i * PANEL, TILE_WORDS, ahead_words(next.stride));
            next.ask();
            tile_load<4>(x.at + i, stride);
            if constexpr (TWO) tile_load<5>(second + i, stride);
            multiply<0>(weight + i * PANEL, panel);
            before.template some<P>(some);
        }
        if (i < words) finish(i, (int)(words - i));
        before.template some<P>(before.rows);
        end(sums);
    }

    // The last words, of which there are fewer than a tile has.
    void finish(int64_t i, int n) const {
        if (later) later->ask();
        next.ask();
        PaddedTile a[2], w[P];
        a[0].rows(x.at + i, x.stride, TWO ? TILE_ROWS : rows, n);
        if constexpr (TWO) a[1].rows(second + i, x.stride, rows - TILE_ROWS, n);
        for (int p = 0; p < P; ++p) {
            memset(w[p].at, 0, sizeof w[p].at);
            memcpy(w[p].at, weight + p * panel + i * PANEL, sizeof(uint32_t) * n * PANEL);
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

// Panels [panel, end) for n rows of Words. finish(Count<P>(), row, rows, panel, sums) takes sums [rows][P * PANEL] of some
// rows, or those of their two digits, where they lie. Many rows are multiplied with the same words of inputs of a chunk of
// panels before the next words come, for which sums leave the tiles.
template <typename Words, typename Finish>
void amx_some_blocks(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, int64_t end, const Then& then,
               const Finish& finish) {
    constexpr bool DIGITS = Words::DIGITS;
    constexpr int64_t SUMS = AMX_ROWS * 2 * PANEL;      // of a block of rows and two panels
    const int64_t words = input_words(l), size = panel_words(l), turns = ceil_div(n, Words::ROWS);
    const bool asks = DIGITS || turns > 1;
    const int64_t step = asks ? amx_pass_words(l) : words, most = asks ? amx_panels(l, n) : end - panel;
    const bool passes = step < words;
    alignas(64) float one[SUMS];
    float* all = passes ? (float*)scratch(SCRATCH_SUMS, turns * ceil_div(most, 2) * SUMS * 4) : one;
    uint32_t* spread = DIGITS ? (uint32_t*)scratch(SCRATCH_SPREAD, most * step * PANEL * 4) : nullptr;
    if (!all || (DIGITS && !spread)) __builtin_trap();
    int shaped = 0;
    Tiles tiles;
    Unfinished<Finish> before = {};
    for (int64_t chunk = panel, chunk_end; chunk < end; chunk = chunk_end) {
        chunk_end = end - chunk > most ? chunk + most : end;
        for (int64_t from = 0, to; from < words; from = to) {
            to = words - from > step ? from + step : words;
            const int64_t steps = ceil_div(chunk_end - chunk, 2) * ceil_div(to - from, TILE_WORDS);     // of a block
            Later later;
            if (asks) {
                if (to < words)
                    later.add(l, chunk, chunk_end, to, words - to > step ? to + step : words);
                else if (chunk_end < end)
                    later.add(l, chunk_end, end - chunk_end > most ? chunk_end + most : end, 0, step);
                else if (then.weight)
                    later.weights.add(then.weight, then.words);
                later.weights.spread(turns * steps + (DIGITS ? (chunk_end - chunk) * (to - from) / (GROUP / 4) : 0));
            }
            for (int64_t at = chunk; DIGITS && at < chunk_end; ++at)
                spread_panel(l, at, from, to, later.weights, spread + (at - chunk) * (to - from) * PANEL);
            const uint32_t* weight = DIGITS ? spread : l.weight + chunk * size + from * PANEL;
            const int64_t stride = DIGITS ? (to - from) * PANEL : size;
            for (int64_t row = 0; row < n; row += Words::ROWS) {
                const int rows = (int)(n - row < Words::ROWS ? n - row : Words::ROWS);
                if (rows != shaped) tiles.shape(block_shapes(shaped = rows));
                const PreparedRows block = {x.row(row) + from, x.stride};
                const uint32_t* second = DIGITS ? block.at + words : block.row(TILE_ROWS);
                if (asks) later.begin_rows(l, x, row + rows, n, Words::ROWS, from, to, steps);
                float* sums = passes ? all + row / Words::ROWS * ceil_div(most, 2) * SUMS : one;
                int64_t at = chunk;
                const auto pass = [&](auto two, auto width) {
                    constexpr int P = decltype(width)::value;
                    for (; at + P <= chunk_end; at += P) {
                        const NextPanels next = {at + P < end ? l.weight + (at + P) * size : then.weight, size, then.others, 0};
                        float* mine = passes ? sums + (at - chunk) / 2 * SUMS : sums;
                        AmxBlock<Words, decltype(two)::value == 2, P>{block, second, rows, weight + (at - chunk) * stride, stride,
                                                                      to - from, next, asks ? &later : nullptr}.run(mine, from > 0, before);
                        if (to < words) continue;
                        if (to - from < FINISHING_WORDS)
                            finish(width, row, rows, at, mine);
                        else
                            before = {&finish, P, rows, row, at, mine};
                    }
                };
                if (!DIGITS && rows <= TILE_ROWS) {
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
    before.all();
}

// The same, of so many rows at a time as a cache holds, or up to twice as many: fewer would not be worth reading all weights
// once more.
template <typename Words, typename Finish>
void amx_blocks(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, int64_t end, const Then& then,
                const Finish& finish) {
    const int64_t most = amx_some_rows(l), parts = n < 2 * most ? 1 : n / most;
    const int64_t at_a_time = ceil_to(ceil_div(n, parts), AMX_ROWS);
    const Then again = begins_with(l, panel, end, then.others);
    for (int64_t first = 0; first < n; first += at_a_time) {
        const bool last = first + at_a_time >= n;
        amx_some_blocks<Words>(l, {x.row(first), x.stride}, last ? n - first : at_a_time, panel, end, last ? then : again,
                               [&](auto width, int64_t row, int rows, int64_t at, float* sums) {
                                   finish(width, first + row, rows, at, sums);
                               });
    }
}

// Tiles of sums of both digits of BLOCKS blocks of rows times P panels, of which there are two blocks or two panels.
template <int P, int BLOCKS>
struct DigitSums {
    static_assert(P * BLOCKS <= 2, "tiles");

    PreparedRows x[BLOCKS];
    int64_t lower;      // words from the upper digits of a row to the lower ones

    template <int BLOCK, int UPPER, int LOWER, int I = 0>
    INLINE void add_block(const uint32_t* w, int64_t stride, int64_t word) const {
        if constexpr (I == 0) {
            tile_load<UPPER>(x[BLOCK].at + word, 4 * x[BLOCK].stride);
            tile_load<LOWER>(x[BLOCK].at + lower + word, 4 * x[BLOCK].stride);
        }
        if constexpr (I < P) {
            if constexpr (BLOCK == 0) tile_load<6 + I>(w + I * stride, 64);
            tile_signed_bytes<BLOCK + I, UPPER, 6 + I>();
            tile_signed_bytes<2 + BLOCK + I, LOWER, 6 + I>();
            add_block<BLOCK, UPPER, LOWER, I + 1>(w, stride, word);
        }
    }

    // Adds words [word, word + n) of the rows times those of panels, uint32 [P][n][PANEL].
    INLINE void add(const uint32_t* w, int64_t word, int64_t n) const {
        for (int64_t i = 0; i < n; i += TILE_WORDS) {
            add_block<0, 4, 5>(w + i * PANEL, n * PANEL, word + i);
            if constexpr (BLOCKS > 1) add_block<1, 7, 4>(w + i * PANEL, n * PANEL, word + i);
        }
    }

    template <int I = 0>
    INLINE void start() const {
        if constexpr (I < P * BLOCKS) {
            tile_zero<I>();
            tile_zero<2 + I>();
            start<I + 1>();
        }
    }

    // sums [BLOCKS][2][TILE_ROWS][P * PANEL]
    template <int I = 0>
    INLINE void end(float* sums) const {
        if constexpr (I < P * BLOCKS) {
            float* to = sums + (BLOCKS > 1 ? I * 2 * TILE_ROWS * PANEL : I * PANEL);
            tile_store<I>(to, P * PANEL * 4);
            tile_store<2 + I>(to + TILE_ROWS * P * PANEL, P * PANEL * 4);
            end<I + 1>(sums);
        }
    }
};

constexpr int64_t SPREAD_WORDS = 32;    // of a panel that are spread at a time

// As amx_blocks, of Digits of no more rows than two tiles have: weights are spread a few words at a time, beside the products
// of those before. The second block of rows begins earlier if need be.
template <int P, int BLOCKS, typename Finish>
int64_t amx_few_digits(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, int64_t end, const Then& then,
                       const Finish& finish) {
    const int64_t words = input_words(l);
    const int rows = BLOCKS > 1 ? TILE_ROWS : (int)n;
    alignas(64) uint32_t spread[2][P * SPREAD_WORDS * PANEL];
    alignas(64) float sums[BLOCKS * 2 * TILE_ROWS * P * PANEL];
    DigitSums<P, BLOCKS> block = {{x}, words};
    if constexpr (BLOCKS > 1) block.x[1] = {x.row(n - rows), x.stride};
    for (; panel + P <= end; panel += P) {
        Later later;
        if (panel + P < end)
            later.add(l, panel + P, panel + 2 * P < end ? panel + 2 * P : end, 0, words);
        else if (then.weight)
            later.weights.add(then.weight, then.words);
        later.weights.spread(P * whole_blocks(l));
        const auto fill = [&](int64_t from, uint32_t* to) {
            const int64_t count = words - from < SPREAD_WORDS ? words - from : SPREAD_WORDS;
            for (int p = 0; p < P; ++p) spread_panel(l, panel + p, from, from + count, later.weights, to + p * count * PANEL);
        };
        const NextPanels next = {nullptr, 0, then.others, 0};
        fill(0, spread[0]);
        block.start();
        for (int64_t from = 0; from < words; from += SPREAD_WORDS) {
            uint32_t* now = spread[from / SPREAD_WORDS % 2];
            next.ask();
            block.add(now, from, words - from < SPREAD_WORDS ? words - from : SPREAD_WORDS);
            if (from + SPREAD_WORDS < words) fill(from + SPREAD_WORDS, now == spread[0] ? spread[1] : spread[0]);
        }
        block.end(sums);
        for (int b = 0; b < BLOCKS; ++b)
            finish(Count<P>(), b ? n - rows : 0, rows, panel, sums + b * 2 * TILE_ROWS * P * PANEL);
    }
    return panel;
}

template <typename Finish>
void amx_few_digits(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, int64_t end, const Then& then,
                    const Finish& finish) {
    Tiles tiles;
    tiles.shape(block_shapes(n < TILE_ROWS ? (int)n : TILE_ROWS));
    if (n <= TILE_ROWS) {
        panel = amx_few_digits<2, 1>(l, x, n, panel, end, then, finish);
        amx_few_digits<1, 1>(l, x, n, panel, end, then, finish);
    } else {
        amx_few_digits<1, 2>(l, x, n, panel, end, then, finish);
    }
}

// From so many rows on bytes are multiplied in tiles.
constexpr int AMX_ROTATED_ROWS = 7, AMX_WHOLE_ROWS = 4;

// Whether n rows are multiplied in blocks.
INLINE bool in_blocks(const PackedLinear& l, int64_t n) {
    return l.kind == LINEAR_BF16 || (l.kind == LINEAR_ROTATED && n >= AMX_ROTATED_ROWS) ||
           (l.kind == LINEAR_Q4_WHOLE && n >= AMX_WHOLE_ROWS);
}

}  // namespace

#endif
