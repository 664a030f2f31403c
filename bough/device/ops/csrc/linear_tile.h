// Products of a block of prepared rows with a few panels of a packed weight.
//
// An output is one chain of sums in rising order of the inputs, whatever the other rows and panels are: its bits
// depend on its row and its weights alone. The sums of bytes are exact.
#pragma once

#include "wanted.h"
#include "linear_format.h"
#include "linear_sums.h"

namespace {

constexpr int LINEAR_ROWS = WIDTH == 16 ? 6 : 4;    // rows of a block

// Panels that one pass takes, and rows of dense ones: as many as the registers hold sums of. Sums of bytes are kept beside those
// of floats.
constexpr int DENSE_PANELS = WIDTH == 16 ? 4 : 1;
constexpr int PASS = DENSE_PANELS * PANEL;    // outputs
#if defined(__x86_64__) && !defined(__AVX2__)
constexpr int DENSE_ROWS = 3;
#else
constexpr int DENSE_ROWS = 6;
#endif
constexpr int GROUP_PANELS = WIDTH == 16 ? 2 : 1;

// Where few rows leave all the time to memory, groups are multiplied with one panel at a time: a thread then reads its
// weights in the order in which they lie, which most processors foresee best. Rows of bytes are enough from three on to be
// worth two panels. Rows that are too long to stay in the first-level cache beside a panel are read from the second once
// for every pass, so that one or two of them are multiplied with several panels.
//
// Others foresee less than memory could bring: there each line is asked for. Of vectors of 8 floats one or two rows are
// multiplied a tenth to a quarter faster so (Zen 3). With AVX-512 and no bfloat16, which is Intel's alone, up to six rows of 4
// bits are no slower, and one row, or two long ones, read several panels side by side: memory answers the faster the more
// pages are asked for at a time (Ice Lake, two threads: 23 GB/s of two panels, 25 of four, 28 of eight). With vectors of 8
// floats one row of bytes without groups does; groups would wait for sums that leave the registers (Zen 3).
constexpr bool ASKS_FOR_ALL = WIDTH > 4 && WIDENS_PAIRS;
constexpr int64_t FEW_ROWS = 2, LONG_INPUTS = 2048;
constexpr int STREAMS = ASKS_FOR_ALL && WIDTH == 16 ? 8 : 4;    // panels
constexpr int64_t STREAM_ROWS = WIDTH == 16 ? FEW_ROWS : 1;
constexpr int64_t single_rows(bool four_bits) { return GROUP_PANELS == 1 ? 0 : four_bits ? LINEAR_ROWS : FEW_ROWS; }
constexpr bool streams(bool rotated) { return WIDTH == 16 || (WIDTH == 8 && rotated); }

// Whether rows read STREAMS panels side by side.
INLINE bool reads_streams(const PackedLinear& l, int64_t rows) {
    if (l.kind == LINEAR_BF16 || rows > STREAM_ROWS || !streams(l.kind == LINEAR_ROTATED)) return false;
    return ASKS_FOR_ALL ? rows == 1 || l.n_in >= LONG_INPUTS : l.n_in > LONG_INPUTS;
}

// So few rows have too few chains of sums in work with one panel at a time.
constexpr int FEW_DENSE_ROWS = WIDTH == 8 ? 2 : 0, FEW_PANELS = 2;

// Rows that one pass multiplies with fewer dense panels, which are read once for all of them: where products cost little, or
// where so many rows hardly exceed the first cache. Others are faster read from the second cache for more panels at a time.
#if defined(__AVX512VNNI__) && !defined(BOUGH_AMX)
constexpr int WIDE_ROWS = 12;
#else
constexpr int WIDE_ROWS = 0;
#endif
constexpr int WIDE_DENSE_ROWS = WIDENS_PAIRS ? 0 : WIDE_ROWS;   // to take pairs apart, the registers would have no room
constexpr int WIDE_PANELS = 2;
constexpr int64_t MOST_WIDE_WORDS = 9 << 10;    // of the rows of a pass: 36 KB
INLINE bool are_wide(int64_t rows, int64_t words) {
    if (rows <= LINEAR_ROWS || rows > 2 * WIDE_ROWS) return false;
    return multiplies_twice || (rows > WIDE_ROWS ? ceil_div(rows, 2) : rows) * words <= MOST_WIDE_WORDS;
}

// One chain of sums for each row does not keep up with memory, so that dense weights of few rows are read as several
// panels, too. Their lines are asked for this far ahead of their use: into the second-level cache, as the first has no
// room for as many requests as memory can answer at a time. Long panels are foreseen by the processor as well.
INLINE int64_t ahead_words(int64_t panel) { return panel > 8192 ? 256 : 512; }

// Few rows of bytes: how far ahead of their use lines are asked for, and one in how many. That is enough to have the processor
// look behind the end of a page and at the next panels, where to ask for each line takes the time that it saves. Short panels
// are over before a request is answered: a model with 1,536 inputs has lost a twentieth by it. Where all are asked for, it is as
// of dense panels, or half as far, which is a twentieth faster (Ice Lake).
constexpr int AHEAD_LINES = 4;
constexpr int64_t AHEAD_WORDS = 2048, AHEAD_WORDS_OF_MANY = 256;

// `lines` from word `from` of the panels at w are being multiplied. `single`: whether few rows
// meet one panel at a time, unless all lines are asked for.
template <int P>
INLINE void ask_ahead(const PackedLinear& l, const NextPanels& next, const uint32_t* w, int64_t from, int lines, bool single) {
    if (ASKS_FOR_ALL)
        next.ahead<P>(w, from, lines, WIDTH == 8 ? ahead_words(next.stride) : AHEAD_WORDS_OF_MANY);
    else if (single && l.n_in >= LONG_INPUTS)
        for (int i = 0; i < lines; i += AHEAD_LINES)
            next.ahead<P>(w, from + i * PANEL, 1, P == 1 ? AHEAD_WORDS : AHEAD_WORDS_OF_MANY);
}

// Words of a block of rows that pass between two looks at what is to be asked for. To look for each would be a third of the
// instructions; of fewer rows requests have to be spread evenly, as memory is what they wait for.
constexpr int words_at_a_time(int64_t rows) { return rows > 4 ? 4 : 1; }

// Whole-row sums of `words` words.
template <int R, int P>
INLINE void add_words(Sums<vf, R, P>& sums, const uint32_t* w, int64_t words, const PreparedRows& x,
                      const NextPanels& next) {
    constexpr int AT_A_TIME = words_at_a_time(R), WORD = WIDENS_PAIRS ? 8 : 4;
    RowCursor a(x.at, x.stride);
    int64_t i = 0;
    for (; i + AT_A_TIME <= words; i += AT_A_TIME, a.advance(WORD * AT_A_TIME)) {
        if (R <= FEW_ROWS)
            next.ahead<P>(w, i * PANEL, AT_A_TIME, ahead_words(next.stride));
        else
            next.touch<P>(i * PANEL, AT_A_TIME);
        next.ask();
#pragma GCC unroll 4
        for (int j = 0; j < AT_A_TIME; ++j) {
            vu column[P * PANEL_VECS];
            load_word<P>(column, w + (i + j) * PANEL, words * PANEL);
            add_pairs<R, P>(sums, column, a, j);
        }
    }
    for (; i < words; ++i, a.advance(WORD)) {
        vu column[P * PANEL_VECS];
        load_word<P>(column, w + i * PANEL, words * PANEL);
        add_pairs<R, P>(sums, column, a, 0);
    }
}

INLINE bool has_four_bits(const PackedLinear& l) {
    return l.kind == LINEAR_Q4 || l.kind == LINEAR_Q4_MIN || l.kind == LINEAR_Q4_ZERO || l.kind == LINEAR_Q4_K ||
           l.kind == LINEAR_Q4_WHOLE;
}

// Words of weight in a panel.
INLINE int64_t panel_words(const PackedLinear& l) { return input_words(l) / (has_four_bits(l) ? 2 : 1) * PANEL; }

// Whether panels are read side by side.
struct AnyTile {
    static constexpr bool STREAMED = false;
};

// Where the panels of a weight begin, and how many words each has.
struct WholePanels : AnyTile {
    static INLINE const uint32_t* begin(const PackedLinear& l, int64_t panel) { return l.weight + panel * stride(l); }
    static INLINE int64_t stride(const PackedLinear& l) { return panel_words(l); }
};

// out[R][P * PANEL] := block of rows times panels [panel, panel + P), without bias.
struct Bf16Tile : WholePanels {
    static constexpr int PANELS = DENSE_PANELS, ROWS = DENSE_ROWS, FEW = FEW_DENSE_ROWS;
    static constexpr int64_t SINGLE = 0, WIDE = WIDE_DENSE_ROWS;

    template <int R, int P>
    static INLINE void run(const PackedLinear& l, const PreparedRows& a, int64_t panel, const NextPanels& next,
                           float* out) {
        int64_t words = panel_words(l) / PANEL;
        Sums<vf, R, P> sums;
        clear(sums);
        add_words(sums, l.weight + panel * words * PANEL, words, a, next);
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < P * PANEL_VECS; ++j) storef(out + r * P * PANEL + j * WIDTH, sums.at[r][j]);
    }
};

// What sums of products of bytes, [rows][P * PANEL], stand for. `start`: whether the weights' zero is still among them.
template <int P>
INLINE auto rotated_sums(const PackedLinear& l, const PreparedRows& x, int64_t panel, bool start, const float* sums) {
    const float* scales = (const float*)l.scale + panel * PANEL;
    const int64_t words = row_words(l);
    return [=](int r, int i) {
        const GroupMeta& m = *(const GroupMeta*)(x.row(r) + words);
        vi sum;
        memcpy(&sum, sums + r * P * PANEL + i, sizeof sum);
        if (start) sum += m.start;
        return to_float(sum) * splat(m.scale) * loadf(scales + i);
    };
}

// Adds the products of what R rows of so many words have put off to their sums, with the panels at w.
template <int R, int P>
INLINE void add_late(const PreparedRows& x, const uint32_t* w, int64_t words, Sums<vi, R, P>& sums) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const GroupMeta& meta = *(const GroupMeta*)(x.row(r) + words);
        const Late* late = (const Late*)(&meta + 1);
        for (const Late* end = late + meta.n_late; late < end; ++late) {
            vu column[P * PANEL_VECS];
            load_word<P>(column, w + (int64_t)late->word * PANEL, words * PANEL);
#pragma GCC unroll 8
            for (int j = 0; j < P * PANEL_VECS; ++j)
                sums.at[r][j] = RotatedDots::multiply(sums.at[r][j], column[j], &late->inputs);
        }
    }
}

// Bytes of which all inputs share a scale.
struct RotatedTile : WholePanels {
    static constexpr int PANELS = DENSE_PANELS, ROWS = LINEAR_ROWS, FEW = 0;
    static constexpr int64_t SINGLE = single_rows(false), WIDE = WIDE_ROWS;
    static constexpr bool STREAMED = streams(true);
    static constexpr int WORDS = AHEAD_LINES;   // that pass between two looks at what is to be asked for
    typedef RotatedDots Dots;

    template <int R, int P>
    static INLINE void run(const PackedLinear& l, const PreparedRows& x, int64_t panel, const NextPanels& next, float* out) {
        const int64_t words = input_words(l);
        const uint32_t* w = l.weight + panel * words * PANEL;
        for (int p = 0; p < P; ++p) __builtin_prefetch((const float*)l.scale + (panel + p) * PANEL);
        constexpr int CHAINS = R * P * PANEL_VECS < 4 ? 2 : 1;
        RowCursor a(x.at, x.stride);
        Sums<vi, R, P> sums[CHAINS];
        for (auto& chain : sums) clear(chain);
        for (int64_t i = 0; i < words; i += WORDS, a.advance(4 * WORDS * Dots::WORDS)) {
            if (R > FEW_ROWS)
                next.touch<P>(i * PANEL, WORDS);
            else
                ask_ahead<P>(l, next, w, i * PANEL, WORDS, SINGLE > 0);
            next.ask();
#pragma GCC unroll 4
            for (int j = 0; j < WORDS; ++j) {
                vu column[P * PANEL_VECS];
                load_word<P>(column, w + (i + j) * PANEL, words * PANEL);
                for (int v = 0; LOSES_ZERO<255> && v < P * PANEL_VECS; ++v) column[v] ^= FLIP;
                add_word<Dots>(sums[j % CHAINS], column, a, j);
            }
        }
        if constexpr (PUTS_OFF) add_late(x, w, words, sums[0]);
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < P * PANEL_VECS; ++j) {
                vi sum = sums[0].at[r][j];
                if (CHAINS > 1) sum += sums[CHAINS - 1].at[r][j];
                storef(out + r * P * PANEL + j * WIDTH, (vf)sum);
            }
        const auto value = rotated_sums<P>(l, x, panel, !LOSES_ZERO<255>, out);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < P * PANEL; i += WIDTH) storef(out + r * P * PANEL + i, value(r, i));
    }
};

template <typename Format>
struct GroupTile : WholePanels {
    static constexpr int PANELS = GROUP_PANELS, ROWS = LINEAR_ROWS, FEW = 0;
    static constexpr int64_t SINGLE = single_rows(Format::BITS == 4), WIDE = 0;
    static constexpr bool STREAMED = streams(false);
    static constexpr int LINES = GROUP / 4 * Format::BITS / 8;      // words of weight for 32 inputs
    static constexpr int HELD_LINES = HELD_WORDS<Format::MOST> * Format::BITS / 8;
    static_assert(HELD_LINES == 0 || (Format::SPLIT ? LINES / 2 : LINES) % HELD_LINES == 0, "whole groups are held");
    static constexpr bool STARTS = !Format::MINIMUM && !LOSES_ZERO<Format::MOST>;
    typedef typename DotsOf<Format::MOST>::type Dots;

    // sums := products of words [first, first + n) of the group, which begins at w and a.
    template <int R, int P>
    static INLINE void add_group(Sums<vi, R, P>& sums, const uint32_t* w, int64_t stride, const RowCursor& a,
                                 const RowCursor& meta, int first, int n) {
        start_group(sums, meta, first);
        add_lines(sums, w, stride, a, first, n);
    }

    template <int R, int P>
    static INLINE void start_group(Sums<vi, R, P>& sums, const RowCursor& meta, int first) {
        for (int r = 0; r < R; ++r) {
            const GroupMeta& m = *(const GroupMeta*)meta(r);
            int32_t start = !Format::SPLIT ? m.start : first ? m.start - m.start_low : m.start_low;
            for (int j = 0; j < P * PANEL_VECS; ++j) sums.at[r][j] = STARTS ? start - vi{} : vi{};
        }
    }

    template <int R, int P>
    static INLINE void add_lines(Sums<vi, R, P>& sums, const uint32_t* w, int64_t stride, const RowCursor& a, int first, int n) {
        if constexpr (HELD_LINES == 0) {
#pragma GCC unroll 8
            for (int i = first; i < first + n; ++i) add_line(sums, w, stride, a, i);
        } else {
#pragma GCC unroll 4
            for (int i = first; i < first + n; i += HELD_LINES) {
                Sums<vi, R, P> held;
                clear(held);
#pragma GCC unroll 4
                for (int j = i; j < i + HELD_LINES; ++j) add_line(held, w, stride, a, j);
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < P * PANEL_VECS; ++j) sums.at[r][j] = Dots::add(sums.at[r][j], held.at[r][j]);
            }
        }
    }

    template <int R, int P>
    static INLINE void add_line(Sums<vi, R, P>& sums, const uint32_t* w, int64_t stride, const RowCursor& a, int i) {
        vu column[P * PANEL_VECS];
        load_word<P>(column, w + i * PANEL, stride);
        if (Format::BITS == 8) {
            for (int j = 0; LOSES_ZERO<Format::MOST> && j < P * PANEL_VECS; ++j) column[j] ^= FLIP;
            return add_word<Dots>(sums, column, a, i);
        }
        vu low[P * PANEL_VECS], high[P * PANEL_VECS];
        for (int j = 0; j < P * PANEL_VECS; ++j) {
            low[j] = column[j] & 0x0f0f0f0fu;
            high[j] = (column[j] >> 4) & 0x0f0f0f0fu;
        }
        add_word<Dots>(sums, low, a, i);
        add_word<Dots>(sums, high, a, i + 4);
    }

    // total + value, scaled; values of SPLIT have the scale of the weight.
    static INLINE vf add_scaled(vf total, vf value, vf scale, const Affine& affine, const GroupMeta& m) {
        total = fma(value, Format::SPLIT || Format::WHOLE ? scale : scale * affine.scale, total);
        return Format::MINIMUM ? fma(splat(m.scaled_sum), affine.minimum, total) : total;
    }

    // total += sums of Q panels from the p-th on, scaled; of SPLIT, `low` is what the lower half comes to before the scales of
    // the rows.
    template <int Q, int R, int P>
    static INLINE void scale_group(Sums<vf, R, P>& total, int p, const Sums<vi, R, Q>& sums, const Sums<vf, R, Q>& low,
                                   const Affine* affine, const RowCursor& meta) {
        for (int r = 0; r < R; ++r) {
            const GroupMeta& m = *(const GroupMeta*)meta(r);
            vf scale = splat(m.scale);
            for (int j = 0; j < Q * PANEL_VECS; ++j) {
                vf value = to_float(sums.at[r][j]), &all = total.at[r][p * PANEL_VECS + j];
                if (Format::SPLIT) value = fma(value, affine[j].scale, low.at[r][j]);
                all = add_scaled(all, value, scale, affine[j], m);
            }
        }
    }

    template <int P>
    static INLINE void load_affine(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups, int half,
                                   Affine (&affine)[P * PANEL_VECS]) {
        for (int j = 0; j < P * PANEL_VECS; ++j)
            affine[j] = Format::affine(l, panel + j / PANEL_VECS, g, n_groups, j % PANEL_VECS * WIDTH, half);
    }

    template <int R, int P>
    static INLINE void run(const PackedLinear& l, const PreparedRows& x, int64_t panel, const NextPanels& next,
                           float* out) {
        // Panels that are multiplied at a time: of those read side by side, registers hold little more than the totals.
        constexpr bool SIDE_BY_SIDE = ASKS_FOR_ALL && P == STREAMS;
        constexpr int Q = SIDE_BY_SIDE ? 1 : P;
        constexpr int N = Format::TOGETHER, HALF = Format::SPLIT ? LINES / 2 : 0;
        const int64_t n_groups = n_groups_of(l), stride = n_groups * LINES * PANEL;
        const uint32_t *first = l.weight + panel * stride, *w = first;
        RowCursor a(x.at, x.stride), meta(x.at + row_words(l), x.stride);
        Sums<vf, R, P> total;
        clear(total);
        for (int p = 0; Format::WHOLE && p < P; ++p) __builtin_prefetch(Format::scales(l, panel + p, 0, n_groups));
        Beside scales, supers;
        if constexpr (SIDE_BY_SIDE && !Format::WHOLE)
            scales = {Format::scales(l, panel + P, 0, n_groups), Format::scales(l, panel + 2 * P, 0, n_groups), n_groups};
        if constexpr (SIDE_BY_SIDE && Format::SUPERS)
            supers = {Format::supers(l, panel + P, 0, n_groups), Format::supers(l, panel + 2 * P, 0, n_groups), n_groups};
        for (int64_t g = 0; g < n_groups;
             g += N, w += N * LINES * PANEL, a.advance(N * GROUP * Dots::WORDS), meta.advance(sizeof(GroupMeta))) {
            if (R > FEW_ROWS)
                next.touch<P>(g * LINES * PANEL, N * LINES);
            else
                ask_ahead<P>(l, next, first, g * LINES * PANEL, N * LINES, SINGLE > 0);
            for (int i = 0; i < N; ++i) next.ask();
            scales.ask(g);
            supers.ask(g);
#pragma GCC unroll 8
            for (int p = 0; p < P; p += Q) {
                const uint32_t* const words = w + p * stride;
                Sums<vi, R, Q> sums;
                Sums<vf, R, Q> low;
                Affine affine[Q * PANEL_VECS];
                if (Format::SPLIT) {
                    load_affine<Q>(l, panel + p, g, n_groups, 0, affine);
                    add_group<R, Q>(sums, words, stride, a, meta, 0, HALF);
                    for (int r = 0; r < R; ++r)
                        for (int j = 0; j < Q * PANEL_VECS; ++j) low.at[r][j] = to_float(sums.at[r][j]) * affine[j].scale;
                }
                if (!Format::WHOLE) load_affine<Q>(l, panel + p, g, n_groups, Format::SPLIT, affine);
                if (N == 2 && R <= FEW_ROWS) {
                    add_group<R, Q>(sums, words, stride, a, meta, 0, LINES);
                    Sums<vi, R, Q> more;
                    clear(more);
                    if (g + 1 < n_groups) add_lines<R, Q>(more, words, stride, a, LINES, LINES);
                    for (int r = 0; r < R; ++r)
                        for (int j = 0; j < Q * PANEL_VECS; ++j) sums.at[r][j] += more.at[r][j];
                } else if (N == 1 || g + N <= n_groups)
                    add_group<R, Q>(sums, words, stride, a, meta, HALF, N * LINES - HALF);
                else
                    add_group<R, Q>(sums, words, stride, a, meta, 0, LINES);
                scale_group<Q>(total, p, sums, low, affine, meta);
            }
        }
        Affine affine[P * PANEL_VECS];
        if (Format::WHOLE) load_affine<P>(l, panel, 0, n_groups, 0, affine);
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < P * PANEL_VECS; ++j)
                storef(out + r * P * PANEL + j * WIDTH, Format::WHOLE ? total.at[r][j] * affine[j].scale : total.at[r][j]);
    }
};

// The same with the number of rows chosen at run time, of R at most.
template <typename Tile, int P, int R>
void run_tile(const PackedLinear& l, const PreparedRows& a, int rows, int64_t panel, const NextPanels& next,
              float* out) {
    if constexpr (R > 1)
        if (rows < R) return run_tile<Tile, P, R - 1>(l, a, rows, panel, next, out);
    Tile::template run<R, P>(l, a, panel, next, out);
}

}  // namespace
