// Linear layers on packed weights, for any number of rows.
//
// A kernel that is already running on several threads calls the parts itself:
//
//     PreparedRows rows = {(const uint32_t*)x, x_stride / 2};          // where is_prepared(l, x, x_stride, n), else
//     prepare_rows(l, x, x_stride, n, buffer);                         // by one thread, or row by row by several
//     PreparedRows rows = {buffer, prepared_stride(l)};                // buffer: prepared_bytes(l, n), 64-byte aligned
//     ... barrier ...
//     linear_slice(l, rows, n, n_begin, n_end, then, out, out_stride, reads_compact(l, n));   // by each thread, its outputs
//
// n_begin is a multiple of PANEL; n_end, too, or n_out. Preparing a few rows costs less than sharing it out. Calls for
// some of the rows that a weight is multiplied with ask reads_compact() for all of them.
#pragma once

#include "linear_amx.h"
#include "linear_compact.h"
#if defined(BOUGH_FIXES)
#include "linear_fixed.h"
#else
#include "linear_widened.h"
#endif

namespace {

// out[columns] := sums, with bias.
template <typename T>
NOINLINE void finish_row(const float* sums, const float* bias, int columns, T* out) {
    int i = 0;
    for (; i + WIDTH <= columns; i += WIDTH) store(out + i, bias ? loadf(sums + i) + loadf(bias + i) : loadf(sums + i));
    for (; i < columns; ++i) store_one(out + i, bias ? sums[i] + bias[i] : sums[i]);
}

// out[rows] of P panels from `panel` on, in their places behind `out`, with bias, in the type of the output. value(r, i): what
// WIDTH outputs of row r come to, from output i of these panels on.
template <int P, typename Value, typename T>
INLINE void finish_panels(const PackedLinear& l, const Value& value, int rows, int64_t panel, T* out, int64_t out_stride) {
    const int64_t first = panel * PANEL, columns = l.n_out - first;
    const float* bias = l.bias ? l.bias + first : nullptr;
    out += first;
    if (__builtin_expect(columns >= P * PANEL && !bias, 1)) {
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
            for (int i = 0; i < P * PANEL; i += WIDTH) store(out + r * out_stride + i, value(r, i));
        return;
    }
    for (int r = 0; r < rows; ++r, out += out_stride) {
        float sums[P * PANEL];
        for (int i = 0; i < P * PANEL; i += WIDTH) storef(sums + i, value(r, i));
        finish_row(sums, bias, columns < P * PANEL ? (int)columns : P * PANEL, out);
    }
}

// Sums of a block of P panels, [rows][P * PANEL], as they are.
template <int P>
INLINE auto sums_of(const float* sums) { return [=](int r, int i) { return loadf(sums + r * P * PANEL + i); }; }

constexpr int MOST_ROWS = 12;    // of a block of any kind of weights

typedef void (*RunTile)(const PackedLinear&, const PreparedRows&, int rows, int64_t panel, const NextPanels&, float* sums);

// P panels from `panel` on, for n rows, up to `block` at a time. Compiled once for all kinds of weights.
template <int P, typename T>
NOINLINE void blocks_of_rows(RunTile run, int block, const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel,
                             NextPanels next, T* out, int64_t out_stride) {
    const int64_t turns = ceil_div(n, block);
    for (int64_t turn = 0, row = 0; turn < turns; ++turn) {
        int rows = (int)(n * (turn + 1) / turns - row);
        float sums[MOST_ROWS * P * PANEL];
        next.take(turn, turns, P);
        run(l, {x.row(row), x.stride}, rows, panel, next, sums);
        finish_panels<P>(l, sums_of<P>(sums), rows, panel, out + row * out_stride, out_stride);
        row += rows;
    }
}

template <typename Tile, int P, int BLOCK, typename T>
INLINE void rows_of_panels(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, const Then& then, T* out,
                           int64_t out_stride) {
    static_assert(BLOCK <= MOST_ROWS, "the sums have room");
    const NextPanels next = {then.weight, Tile::stride(l), then.others, 0};
    blocks_of_rows<P>(run_tile<Tile, P, BLOCK>, BLOCK, l, x, n, panel, next, out, out_stride);
}

// What does not fill a pass is computed row by row unless rows are few: it is one panel at most but for bf16, and its code is
// not worth compiling for every number of rows.
template <typename Tile, typename T>
void slice_of(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, int64_t end,
              const Then& then, T* out, int64_t out_stride) {
    auto after = [&](int64_t p) { return Then{p < end ? Tile::begin(l, p) : then.weight, then.others}; };
    // Few rows: all panels or, where each line of several is asked for, what is left of passes.
    auto one_by_one = [&] {
        if constexpr (Tile::SINGLE > 0)
            for (; n <= Tile::SINGLE && panel < end; ++panel)
                rows_of_panels<Tile, 1, Tile::SINGLE>(l, x, n, panel, after(panel + 1), out, out_stride);
    };
    if constexpr (Tile::STREAMED)
        for (; reads_streams(l, n) && panel + STREAMS <= end; panel += STREAMS)
            rows_of_panels<Tile, STREAMS, STREAM_ROWS>(l, x, n, panel, after(panel + STREAMS), out, out_stride);
    if (!ASKS_FOR_ALL) one_by_one();
    if constexpr (Tile::WIDE > 0)
        for (; are_wide(n, input_words(l)) && panel + WIDE_PANELS <= end; panel += WIDE_PANELS)
            rows_of_panels<Tile, WIDE_PANELS, Tile::WIDE>(l, x, n, panel, after(panel + WIDE_PANELS), out, out_stride);
    if constexpr (Tile::FEW > 0)
        for (; n <= Tile::FEW && panel + FEW_PANELS <= end; panel += FEW_PANELS)
            rows_of_panels<Tile, FEW_PANELS, Tile::FEW>(l, x, n, panel, after(panel + FEW_PANELS), out, out_stride);
    for (; panel + Tile::PANELS <= end; panel += Tile::PANELS)
        rows_of_panels<Tile, Tile::PANELS, Tile::ROWS>(l, x, n, panel, after(panel + Tile::PANELS), out, out_stride);
    if constexpr (Tile::PANELS > 2)
        for (; panel + 2 <= end; panel += 2)
            rows_of_panels<Tile, 2, Tile::ROWS>(l, x, n, panel, after(panel + 2), out, out_stride);
    one_by_one();
    for (; panel < end; ++panel)
        rows_of_panels<Tile, 1, 1>(l, x, n, panel, {nullptr, then.others}, out, out_stride);
}

// Whether what is made of weights is shared by so many rows of bf16.
INLINE bool are_shared(int64_t rows) { return SHARED_ROWS && rows >= SHARED_ROWS; }

// Panels from `panel` on, P at a time, as long as there are as many; returns the first one that is left.
template <int P, typename T>
int64_t shared_passes(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, int64_t end, const Then& then,
                      bool compact, float* sums, T* out, int64_t out_stride) {
    for (int64_t after = panel + P; after <= end; panel = after, after += P) {
        const uint32_t* next = after == end ? then.weight : panel_at(l, after, compact);
        shared_sums<P>(l, x, n, panel, next, then.others, compact, sums);
        finish_panels<P>(l, sums_of<P>(sums), (int)n, panel, out, out_stride);
    }
    return panel;
}

// Returns the first panel that is left.
template <typename T>
int64_t shared_slice(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, int64_t end, const Then& then,
                     T* out, int64_t out_stride, bool compact) {
    float* sums = (float*)scratch(SCRATCH_SUMS, n * PASS * sizeof(float));
    if (!sums) return panel;
    panel = shared_passes<DENSE_PANELS>(l, x, n, panel, end, then, compact, sums, out, out_stride);
    if constexpr (DENSE_PANELS > 2)
        panel = shared_passes<2>(l, x, n, panel, end, then, compact, sums, out, out_stride);
    return shared_passes<1>(l, x, n, panel, end, then, compact, sums, out, out_stride);
}

template <typename T>
void pairs_slice(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, int64_t end, const Then& then,
                 T* out, int64_t out_stride, bool compact) {
#if defined(BOUGH_AMX)
    amx_blocks<Pairs>(l, x, n, panel, end, then, [&](auto width, int64_t row, int rows, int64_t at, const float* sums) {
        constexpr int P = decltype(width)::value;
        finish_panels<P>(l, sums_of<P>(sums), rows, at, out + row * out_stride, out_stride);
    });
#else
    if constexpr (SHARED_ROWS > 0)
        if (are_shared(n)) panel = shared_slice(l, x, n, panel, end, then, out, out_stride, compact);
#if defined(__AVX512F__)
    if (compact) return slice_of<FewCompactTile>(l, x, n, panel, end, then, out, out_stride);
#endif
    slice_of<FewTile>(l, x, n, panel, end, then, out, out_stride);
#endif
}

template <typename T>
void rotated_slice(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, int64_t end, const Then& then,
                   T* out, int64_t out_stride) {
#if defined(BOUGH_AMX)
    if (n >= AMX_ROTATED_ROWS)
        return amx_blocks<Bytes>(l, x, n, panel, end, then, [&](auto width, int64_t row, int rows, int64_t at, const float* sums) {
            constexpr int P = decltype(width)::value;
            const auto value = rotated_sums<P>(l, {x.row(row), x.stride}, at, true, sums);
            finish_panels<P>(l, value, rows, at, out + row * out_stride, out_stride);
        });
#endif
    slice_of<RotatedTile>(l, x, n, panel, end, then, out, out_stride);
}

// For AMX alone: nobody asks for it elsewhere.
template <typename T>
void whole_slice([[maybe_unused]] const PackedLinear& l, [[maybe_unused]] const PreparedRows& x, [[maybe_unused]] int64_t n,
                 [[maybe_unused]] int64_t panel, [[maybe_unused]] int64_t end, [[maybe_unused]] const Then& then,
                 [[maybe_unused]] T* out, [[maybe_unused]] int64_t out_stride) {
#if defined(BOUGH_AMX)
    if (n < AMX_WHOLE_ROWS) {
        for (; panel < end; ++panel) {
            const Then after = {panel + 1 < end ? WholeTile::begin(l, panel + 1) : then.weight, then.others, then.words};
            rows_of_panels<WholeTile, 1, AMX_WHOLE_ROWS - 1>(l, x, n, panel, after, out, out_stride);
        }
        return;
    }
    const auto finish = [&](auto width, int64_t row, int rows, int64_t at, const float* sums) {
        constexpr int P = decltype(width)::value;
        const auto value = digit_sums<P>(l, {x.row(row), x.stride}, at, sums);
        finish_panels<P>(l, value, rows, at, out + row * out_stride, out_stride);
    };
    if (n <= AMX_ROWS)
        amx_few_digits(l, x, n, panel, end, then, finish);
    else
        amx_blocks<Digits>(l, x, n, panel, end, then, finish);
#else
    __builtin_trap();
#endif
}

// Outputs [n_begin, n_end) of n prepared rows; `out` is where row 0 and output 0 would lie. `then`: what the same thread
// reads next. `compact`: the form of the weight that is read.
template <typename T>
void linear_slice(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t n_begin, int64_t n_end,
                  const Then& then, T* out, int64_t out_stride, bool compact) {
    int64_t panel = n_begin / PANEL, end = ((n_end < l.n_out ? n_end : l.n_out) + PANEL - 1) / PANEL;
    switch (l.kind) {
        case LINEAR_BF16: return pairs_slice(l, x, n, panel, end, then, out, out_stride, compact);
        case LINEAR_INT8: return slice_of<GroupTile<Int8Format>>(l, x, n, panel, end, then, out, out_stride);
        case LINEAR_Q8: return slice_of<GroupTile<Q8Format>>(l, x, n, panel, end, then, out, out_stride);
        case LINEAR_Q4: return slice_of<GroupTile<Q4Format>>(l, x, n, panel, end, then, out, out_stride);
        case LINEAR_Q4_MIN: return slice_of<GroupTile<Q4MinFormat>>(l, x, n, panel, end, then, out, out_stride);
        case LINEAR_Q4_ZERO: return slice_of<GroupTile<Q4ZeroFormat>>(l, x, n, panel, end, then, out, out_stride);
        case LINEAR_Q4_K: return slice_of<GroupTile<Q4KFormat>>(l, x, n, panel, end, then, out, out_stride);
        case LINEAR_Q6_K: return slice_of<GroupTile<Q6KFormat>>(l, x, n, panel, end, then, out, out_stride);
        case LINEAR_ROTATED: return rotated_slice(l, x, n, panel, end, then, out, out_stride);
        case LINEAR_Q4_WHOLE: return whole_slice(l, x, n, panel, end, then, out, out_stride);
    }
}

// How often linear_slice asks for what is wanted while it multiplies n rows with `panels` panels, or less than that.
INLINE int64_t asking_turns(const PackedLinear& l, int64_t n, int64_t panels) {
    const bool dense = l.kind == LINEAR_BF16, rotated = l.kind == LINEAR_ROTATED;
#if defined(BOUGH_AMX)
    const bool digits = l.kind == LINEAR_Q4_WHOLE;
    if (in_blocks(l, n) && digits && n <= AMX_ROWS) return ceil_div(panels, 2) * ceil_div(input_words(l), SPREAD_WORDS);
    if (in_blocks(l, n))
        return ceil_div(n, digits ? Digits::ROWS : AMX_ROWS) * ceil_div(panels, n <= TILE_ROWS && !digits ? 4 : 2) *
               ceil_div(input_words(l), TILE_WORDS);
#endif
    const bool single = !dense && !ASKS_FOR_ALL && n <= single_rows(has_four_bits(l));
    const bool wide = ((dense && WIDE_DENSE_ROWS) || rotated) && are_wide(n, input_words(l));
    const int64_t at_a_time = reads_streams(l, n) ? STREAMS
                              : single ? 1
                              : wide ? WIDE_PANELS
                              : dense && n <= FEW_DENSE_ROWS ? FEW_PANELS
                                     : dense || rotated ? DENSE_PANELS : GROUP_PANELS;
    const int64_t blocks = ceil_div(n, wide ? WIDE_ROWS : dense ? DENSE_ROWS : LINEAR_ROWS), words = input_words(l);
    const bool shared = dense && are_shared(n);
    const int64_t looks = looks_of(words, ceil_div(n, blocks), shared);
    return blocks * ceil_div(panels, at_a_time) *
           (reads_compact(l, n) && !shared ? units_of(l)
            : rotated                      ? words / RotatedTile::WORDS
            : !dense                       ? n_groups_of(l)
                                           : looks ? looks : 1);
}

// Whether tiles multiply blocks of n rows with some weights, which stay in a cache meanwhile, before others come.
INLINE bool has_blocks([[maybe_unused]] const PackedLinear& l, [[maybe_unused]] int64_t n) {
#if defined(BOUGH_AMX)
    return in_blocks(l, n) && n > AMX_ROWS;
#else
    return false;
#endif
}

// How the outputs and rows of a call are cut into items.
template <typename T>
struct PackedCall {
    static constexpr int64_t ROWS_BYTES = 384 << 10, SERIAL_INPUTS = 8192;

    const PackedLinear& l;
    const T* x;
    T* out;
    int64_t out_stride, rows;
    PreparedRows prepared;
    int64_t pass, n_passes, n_ranges, rows_per_item, row_blocks, threads;    // a pass: panels that are multiplied as one

    static void prepare(void* context, int64_t item) {
        const PackedCall& c = *(const PackedCall*)context;
        int64_t first = item * LINEAR_ROWS, left = c.rows - first;
        prepare_rows(c.l, c.x + first * c.l.n_in, c.l.n_in, left < LINEAR_ROWS ? left : LINEAR_ROWS,
                     (uint32_t*)c.prepared.row(first));
    }

    static void body(void* context, int64_t item) {
        const PackedCall& c = *(const PackedCall*)context;
        int64_t range = item % c.n_ranges, first = item / c.n_ranges * c.rows_per_item;
        const int64_t begin = c.begin_of(range), end = c.begin_of(range + 1);
        int64_t n = c.rows - first < c.rows_per_item ? c.rows - first : c.rows_per_item;
        linear_slice(c.l, {c.prepared.row(first), c.prepared.stride}, n, begin * PANEL, end * PANEL, c.after(range),
                     c.out + first * c.out_stride, c.out_stride, reads_compact(c.l, c.rows));
    }

    // The first panel of a range: whole passes.
    int64_t begin_of(int64_t range) const { return n_passes * range / n_ranges * pass; }

    // What the thread takes behind a range, where tiles multiply blocks: threads begin with as many ranges each, one after the
    // other.
    Then after([[maybe_unused]] int64_t range) const {
#if defined(BOUGH_AMX)
        const int64_t next = range + 1, owner = ceil_div(next * threads, n_ranges);
        const bool others = n_ranges * owner / threads == next;     // where another thread begins, or none
        if (has_blocks(l, rows) && !others) return begins_with(l, begin_of(next), begin_of(next + 1), nullptr);
#endif
        return {};
    }

    void run(int n_threads) {
        threads = n_threads;
        const bool shared = l.kind == LINEAR_BF16 && are_shared(rows);
        pass = shared && DENSE_PANELS > 2 && l.n_out >= 2 * DENSE_PANELS * PANEL * threads ? DENSE_PANELS : 2;
        n_passes = ceil_div(l.n_out, pass * PANEL);
        // Each thread gets a few items, so that one which is held up does not hold up the others; an item should
        // be worth the handing out: some 128 KB of weights per row block.
        int64_t work = l.n_in * l.n_out / 65536 * ceil_div(rows, LINEAR_ROWS);
        int64_t parts = work / threads;
        parts = parts < 1 ? 1 : parts > 8 ? 8 : parts;
        n_ranges = parts * threads < n_passes ? parts * threads : n_passes;
        // Rows that all ranges are multiplied with, one after the other, should stay in a second-level cache meanwhile. Where
        // tiles multiply, weights are not to be read more than once.
        row_blocks = ceil_div(rows * (shared ? SHARED_BYTES : row_words(l) * 4), ROWS_BYTES);
#if defined(BOUGH_AMX)
        if (in_blocks(l, rows)) row_blocks = 1;
        // Weights that tiles begin a range with have not been asked for.
        if (has_blocks(l, rows)) {
            n_ranges = threads * ceil_div(ceil_div(2 * n_passes, threads), 8 * amx_panels(l, rows));
            if (n_ranges > n_passes) n_ranges = n_passes;
        }
#endif
        rows_per_item = ceil_to(ceil_div(rows, row_blocks), LINEAR_ROWS);
        row_blocks = ceil_div(rows, rows_per_item);
        if (work < threads) threads = 1;
        if (is_prepared(l, x, l.n_in, rows)) {
            prepared = {(const uint32_t*)x, l.n_in / 2};
        } else {
            prepared = {(const uint32_t*)scratch(SCRATCH_LINEAR, prepared_bytes(l, rows)), prepared_stride(l)};
            if (!prepared.at) __builtin_trap();
            parallel_items(ceil_div(rows, LINEAR_ROWS), rows * l.n_in > SERIAL_INPUTS ? (int)threads : 1, prepare, this);
        }
        parallel_items(n_ranges * row_blocks, (int)threads, body, this);
    }
};

template <typename T>
void packed_linear(const PackedLinear& l, const void* x, void* out, int64_t out_stride, int64_t rows, int threads) {
    if (rows == 0) return;
    PackedCall<T> call = {l, (const T*)x, (T*)out, out_stride, rows};
    call.run(threads);
}

// The weights of one output, which lie a line apart: those of 32 inputs at a time, or of two for bf16.
struct RowReader {
    const PackedLinear& l;
    int64_t panel;
    int lane;

    // What stands for the value q of one of 16 inputs: (q - zero) * factor, and `minimum` more in kinds that have minima.
    struct Values {
        float zero, factor, minimum;

        INLINE float at(int q) const { return ((float)q - zero) * factor; }
        INLINE float above_minimum(int q) const { return (float)q * factor + minimum; }
    };

    Values values(int64_t g, int half_of_group) const {
        const int64_t n_groups = n_groups_of(l);
        const int64_t scaled = scale_group_of(l, panel, g, n_groups);
        const int64_t super = super_of(panel, g, n_groups), sub = (panel * n_groups + g) * 2;
        const uint16_t* scale = (const uint16_t*)l.scale;
        const uint8_t* subs = (const uint8_t*)l.sub;
        const auto one = [&] { return widen_half(scale[scaled * PANEL + lane]); };
        const auto first = [&] { return widen_half(scale[scaled * 2 * PANEL + lane]); };
        const auto second = [&] { return widen_half(scale[(scaled * 2 + 1) * PANEL + lane]); };
        switch (l.kind) {
            case LINEAR_INT8:
            case LINEAR_ROTATED:
            case LINEAR_Q4_WHOLE: return {128, ((const float*)l.scale)[panel * PANEL + lane], 0};
            case LINEAR_Q8: return {128, one(), 0};
            case LINEAR_Q4: return {8, one(), 0};
            case LINEAR_Q4_MIN: return {0, first(), second()};
            case LINEAR_Q4_ZERO: return {second(), first(), 0};
            case LINEAR_Q4_K:
                return {0, widen_half(scale[super * 2 * PANEL + lane]) * (float)subs[sub * PANEL + lane],
                        -(widen_half(scale[(super * 2 + 1) * PANEL + lane]) * (float)subs[(sub + 1) * PANEL + lane])};
            default:
                return {32, widen_half(scale[super * PANEL + lane]) * (float)(int8_t)subs[(sub + half_of_group) * PANEL + lane], 0};
        }
    }

    static INLINE void put(bf16* to, bf16 x) { *to = x; }
    static INLINE void put(float* to, bf16 x) { *to = widen(x); }

    template <typename T>
    void read_pairs(T* out) const {
        const int64_t words = input_words(l);
        const uint32_t* from = l.weight + panel * words * PANEL + lane;
        for (int64_t i = 0; i < words; ++i) {
            const bf16 first = (bf16)from[i * PANEL], second = (bf16)(from[i * PANEL] >> 16);
            put(out + 2 * i, first);
            if (2 * i + 1 < l.n_in) put(out + 2 * i + 1, second);
        }
    }

    template <bool FOUR_BITS, bool MINIMUM, typename T>
    void read_groups(T* out) const {
        constexpr int WORDS = FOUR_BITS ? 4 : 8;    // of 32 values
        const int64_t n_groups = n_groups_of(l);
        const uint32_t* from = l.weight + panel * n_groups * WORDS * PANEL + lane;
        for (int64_t g = 0; g < n_groups; ++g, from += WORDS * PANEL) {
            uint8_t q[GROUP];
            for (int i = 0; i < WORDS; ++i) {
                const uint32_t word = from[i * PANEL], low = FOUR_BITS ? word & 0x0f0f0f0fu : word;
                const uint32_t high = word >> 4 & 0x0f0f0f0fu;
                memcpy(q + 4 * i, &low, 4);
                if (FOUR_BITS) memcpy(q + 16 + 4 * i, &high, 4);
            }
            const int64_t left = l.n_in - g * GROUP;
            const int n = left < GROUP ? (int)left : GROUP;
            for (int i = 0; i < n; i += 16) {
                const Values v = values(g, i / 16);
                for (int j = i; j < i + 16 && j < n; ++j)
                    store_one(out + g * GROUP + j, MINIMUM ? v.above_minimum(q[j]) : v.at(q[j]));
            }
        }
    }

    template <typename T>
    void read_rotated(T* out) const {
        const int64_t words = input_words(l);
        const uint32_t* from = l.weight + panel * words * PANEL + lane;
        const Values v = values(0, 0);
        for (int64_t i = 0; i < l.n_in; i += HADAMARD, from += HADAMARD / 4 * PANEL) {
            float x[HADAMARD];
            for (int j = 0; j < HADAMARD; ++j) x[j] = v.at((int)(from[j / 4 * PANEL] >> 8 * (j % 4) & 0xff));
            HadamardBlock block;
            hadamard(x, HADAMARD, 1.0f, block);
            for (int j = 0; j < HADAMARD_VECS; ++j) storef(x + j * WIDTH, block[j]);
            for (int64_t j = i; j < i + HADAMARD && j < l.n_in; ++j) store_one(out + j, x[j - i]);
        }
    }

    template <typename T>
    void read_whole(T* out) const {
        const int line = lane % 4, first = lane / 4 * 4;
        const int64_t groups = ceil_div(input_words(l) * 4, l.group);
        const uint32_t* from = l.weight + panel * panel_words(l) + line * PANEL + first;
        const uint32_t* steps = (const uint32_t*)l.sub + (panel * ceil_div(groups, 4) * 4 + line) * PANEL + first;
        const Values v = values(0, 0);
        for (int64_t i = 0; i < l.n_in; ++i) {
            const int64_t g = i / l.group, byte = i % 16;
            const uint32_t word = from[i / GROUP * 4 * PANEL + byte / 4], both = steps[g / 4 * 4 * PANEL + g % 4];
            const uint32_t q = word >> (8 * (byte % 4) + i % GROUP / 16 * 4) & 15;
            store_one(out + i, v.at((int)((uint16_t)(q * (both & 0xffff) + (both >> 16)) >> 8)));
        }
    }

    template <typename T>
    void read(T* out) const {
        const int64_t words = panel_words(l);
        for (int64_t i = 0; i < words; i += PANEL) __builtin_prefetch(l.weight + panel * words + i);
        switch (l.kind) {
            case LINEAR_BF16: return read_pairs(out);
            case LINEAR_ROTATED: return read_rotated(out);
            case LINEAR_Q4_WHOLE: return read_whole(out);
            case LINEAR_Q4_MIN:
            case LINEAR_Q4_K: return read_groups<true, true>(out);
            case LINEAR_Q4:
            case LINEAR_Q4_ZERO: return read_groups<true, false>(out);
            default: return read_groups<false, false>(out);
        }
    }
};

// out[n, n_in] := the weights of outputs ids[n], rounded to T once.
template <typename T>
void packed_rows(const PackedLinear& l, const int32_t* ids, int64_t n, void* out, int threads) {
    const PackedLinear* packed = &l;
    for_rows(n, l.n_in, threads, [=](int64_t row) {
        RowReader{*packed, ids[row] / PANEL, ids[row] % PANEL}.read((T*)out + row * packed->n_in);
    });
}

}  // namespace
