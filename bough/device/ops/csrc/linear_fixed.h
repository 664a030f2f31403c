// Products of bf16 weights with rows of whole numbers (fixed.h).
//
// An output is one chain of the sums of its groups in rising order, each with its scales; within a group sums are exact. Few
// rows make weights whole numbers in registers. For more of them it is done once: some groups of a pass of panels become
// whole numbers in the first-level cache, which all rows are multiplied with before further ones are.
#pragma once

#include "linear_compact.h"
#include "tile.h"

namespace {

constexpr int SHARED_WORDS = 256 / DENSE_PANELS;    // words that become whole numbers at a time: 16 KB
constexpr int64_t SHARED_ROWS = DENSE_ROWS + 1;   // from so many on
constexpr int LOOK_WORDS = 4;   // that pass between two looks at what is to be asked for
constexpr int64_t SHARED_BYTES = (SHARED_WORDS + PASS) * sizeof(float);    // of a row and its sums meanwhile

// How often a pass of `rows` looks at what is to be asked for, or less than that.
INLINE int64_t looks_of(int64_t words, int64_t, bool) { return words / LOOK_WORDS; }

// The powers of two of a group's weights in P panels, `stride` exponents apart, and their inverses.
template <int P>
struct FixedScales {
    vf power[P * PANEL_VECS], inverse[P * PANEL_VECS];

    INLINE FixedScales(const uint8_t* exponents, int64_t stride) {
        for (int j = 0; j < P * PANEL_VECS; ++j) {
            vub bytes;
            memcpy(&bytes, exponents + j / PANEL_VECS * stride + j % PANEL_VECS * WIDTH, sizeof bytes);
            const vu exponent = widen(bytes);
            power[j] = fixed_power(exponent);
            inverse[j] = inverse_power_of(exponent);
        }
    }
};

// sums += word i of each row times whole numbers w.
template <int R, int P>
INLINE void add_fixed(Sums<vi, R, P>& sums, const vu (&w)[P * PANEL_VECS], const RowCursor& a, int i) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const vu x = ((const uint32_t*)a(r))[i] - vu{};
#pragma GCC unroll 8
        for (int j = 0; j < P * PANEL_VECS; ++j) sums.at[r][j] = dot_fixed(sums.at[r][j], w[j], x);
    }
}

// out[R][P * PANEL] += the sums of a group, with the scales of the rows and the inverse powers of the weights.
template <int R, int P>
INLINE void add_group(const Sums<vi, R, P>& sums, const vf (&inverse)[P * PANEL_VECS], const RowCursor& scales, float* out) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const vf scale = splat(*(const float*)scales(r));
#pragma GCC unroll 8
        for (int j = 0; j < P * PANEL_VECS; ++j) {
            float* to = out + r * P * PANEL + j * WIDTH;
            storef(to, fma(to_float(sums.at[r][j]) * inverse[j], scale, loadf(to)));
        }
    }
    asm volatile("" : : : "memory");    // so that they are not kept in registers, which the sums of the next group need
}

// The exponents of a panel.
INLINE const uint8_t* exponents_of(const PackedLinear& l, int64_t panel) {
    return l.exponents + panel * fixed_groups(l.n_in) * PANEL;
}

struct FewTile : WholePanels {
    static constexpr int PANELS = DENSE_PANELS, ROWS = DENSE_ROWS, FEW = FEW_DENSE_ROWS;
    static constexpr int64_t SINGLE = 0, WIDE = 0;

    template <int R, int P>
    static INLINE void run(const PackedLinear& l, const PreparedRows& x, int64_t panel, const NextPanels& next, float* out) {
        const int64_t words = input_words(l), stride = words * PANEL, groups = fixed_groups(l.n_in);
        const uint32_t *const begin = l.weight + panel * stride, *w = begin;
        const uint8_t* exponents = exponents_of(l, panel);
        RowCursor a(x.at, x.stride), scales(x.at + words, x.stride);
        memset(out, 0, R * P * PANEL * sizeof(float));
        for (int64_t first = 0; first < words; first += FIXED_WORDS, exponents += PANEL) {
            const int count = words - first < FIXED_WORDS ? (int)(words - first) : FIXED_WORDS;
            const FixedScales<P> group(exponents, groups * PANEL);
            Sums<vi, R, P> sums;
            clear(sums);
            const auto add = [&](int word) {
                vu column[P * PANEL_VECS];
                load_word<P>(column, w + word * PANEL, stride);
#pragma GCC unroll 8
                for (int j = 0; j < P * PANEL_VECS; ++j) column[j] = fixed_pairs(column[j], group.power[j]);
                add_fixed<R, P>(sums, column, a, word);
            };
            int i = 0;
            for (; i + LOOK_WORDS <= count; i += LOOK_WORDS, w += LOOK_WORDS * PANEL, a.advance(4 * LOOK_WORDS)) {
                if (R <= FEW_ROWS)
                    next.ahead<P>(begin, (first + i) * PANEL, LOOK_WORDS, ahead_words(next.stride));
                else
                    next.touch<P>((first + i) * PANEL, LOOK_WORDS);
                next.ask();
#pragma GCC unroll 4
                for (int k = 0; k < LOOK_WORDS; ++k) add(k);
            }
            for (; i < count; ++i, w += PANEL, a.advance(4)) add(0);
            add_group<R, P>(sums, group.inverse, scales, out);
            scales.advance(sizeof(float));
        }
    }
};

// sums[R][P * PANEL] += rows times `words` words of whole numbers [words][P * PANEL], with the inverse powers of each group
// [P * PANEL]. Asks for `lines` of those that come next with every LOOK_WORDS.
template <int R, int P>
NOINLINE void add_shared(const uint32_t* tile, int words, RowCursor a, RowCursor scales, const float* inverse,
                       const NextPanels& next, int lines, float* sums) {
    constexpr int PASS = P * PANEL, VECS = PASS / WIDTH;
    for (int first = 0; first < words; first += FIXED_WORDS, inverse += PASS) {
        const int end = first + FIXED_WORDS < words ? first + FIXED_WORDS : words;
        Sums<vi, R, P> group;
        clear(group);
        int i = first;
        for (; i + LOOK_WORDS <= end; i += LOOK_WORDS, tile += LOOK_WORDS * PASS, a.advance(4 * LOOK_WORDS)) {
            next.touch<P>(i / LOOK_WORDS * lines * PANEL, lines);
            next.ask();
#pragma GCC unroll 4
            for (int k = 0; k < LOOK_WORDS; ++k) {
                vu w[VECS];
                load_word<P>(w, tile + k * PASS, PANEL);
                add_fixed<R, P>(group, w, a, k);
            }
        }
        for (; i < end; ++i, tile += PASS, a.advance(4)) {
            vu w[VECS];
            load_word<P>(w, tile, PANEL);
            add_fixed<R, P>(group, w, a, 0);
        }
        vf powers[VECS];
        for (int j = 0; j < VECS; ++j) powers[j] = loadf(inverse + j * WIDTH);
        add_group<R, P>(group, powers, scales, sums);
        scales.advance(sizeof(float));
    }
}

// P panels, group by group.
template <int P>
struct PairGroups {
    static constexpr int LINES = LOOK_WORDS;    // that LOOK_WORDS take

    const uint32_t* at;
    const uint8_t* exponents;
    int64_t stride, groups;

    INLINE PairGroups(const PackedLinear& l, int64_t panel)
        : at(WholePanels::begin(l, panel)), exponents(exponents_of(l, panel)), stride(WholePanels::stride(l)),
          groups(fixed_groups(l.n_in)) {}

    // The next `words` words, which are a group -> whole numbers tile[words][P * PANEL].
    INLINE void fill(int words, const FixedScales<P>& scales, uint32_t* tile) {
        for (int i = 0; i < words; ++i, at += PANEL, tile += P * PANEL) {
            vu column[P * PANEL_VECS];
            load_word<P>(column, at, stride);
            for (int j = 0; j < P * PANEL_VECS; ++j) storeu(tile + j * WIDTH, fixed_pairs(column[j], scales.power[j]));
        }
        exponents += PANEL;
    }
};

#if defined(__AVX512F__)
// The same of the compact form. What a weight is multiplied with so that its mantissa becomes a whole number depends on how
// many times smaller than the largest of its group it may be: on its code, which is CODES - 1 for the largest exponent of
// its panel, and on how much less the largest of its group has.
template <int P>
struct CompactGroups {
    typedef CompactTile::Strays<P> Strays;
    static constexpr int LINES = UNIT_LINES;
    static constexpr int64_t UNITS = FIXED_WORDS / UNIT;    // of a group

    const uint32_t* at;
    const uint8_t* exponents;
    int64_t stride, groups, unit;
    Strays strays;
    __m512i distance[P];

    INLINE CompactGroups(const PackedLinear& l, int64_t panel)
        : at(CompactTile::begin(l, panel)), exponents(exponents_of(l, panel)), stride(CompactTile::stride(l)),
          groups(fixed_groups(l.n_in)), unit(0), strays(l, panel) {}

    // Whether the codes of the group that begins here say what its values are. They do not where its largest is beyond them, or
    // not finite, or has one bit less, or where values are next to nothing.
    INLINE bool begin() {
        __mmask16 beyond = 0;
        for (int p = 0; p < P; ++p) {
            const __m512i exponent = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(exponents + p * groups * PANEL)));
            const int top = _mm256_extract_epi16(_mm512_castsi512_si256(strays.table[p]), CODES - 1) >> 7;
            const __m512i less = _mm512_add_epi32(exponent, _mm512_set1_epi32(top - EXPONENTS));
            beyond |= _mm512_movepi32_mask(less) | _mm512_cmpeq_epi32_mask(exponent, _mm512_set1_epi32(NOT_FINITE));
            distance[p] = _mm512_or_si512(less, _mm512_slli_epi32(less, 16));
        }
        return !beyond;
    }

    // Whole numbers of the next unit, of panel p.
    INLINE void fix(int p, vu (&words)[UNIT]) {
        __m512i held[UNIT];
        CompactTile::unfold(at + p * stride, held);
        for (int k = 0; k < UNIT; ++k) {
            const __mmask32 is_value = _mm512_test_epi16_mask(held[k], _mm512_set1_epi16(0x7ff));    // and not zero
            const __m512i place = _mm512_add_epi16(_mm512_srli_epi16(held[k], 7), distance[p]);
            const __m512i factor = _mm512_maskz_permutexvar_epi16(is_value, place, _mm512_loadu_si512(FACTORS));
            const __m512i mantissa = _mm512_ternarylogic_epi32(_mm512_slli_epi16(held[k], 7), _mm512_set1_epi16(0x3f80),
                                                               _mm512_set1_epi16(0x4001), CompactTile::INTO);
            words[k] = (vu)_mm512_mulhrs_epi16(mantissa, factor);
        }
        strays.put(p, unit, words, [&](const Stray& stray) {
            const vu exponent = exponents[p * groups * PANEL + stray.half / 2] - vu{};
            return fixed_pairs(stray.value - vu{}, fixed_power(exponent))[0];
        });
    }

    // The same where begin() says no.
    INLINE void fix(int p, vf power, vu (&words)[UNIT]) {
        CompactTile::spread(at + p * stride, strays.table[p], words);
        strays.put(p, unit, words);
        for (int k = 0; k < UNIT; ++k) words[k] = fixed_pairs(words[k], power);
    }

    INLINE void advance() {
        at += COMPACT_WORDS;
        ++unit;
    }

    NOINLINE void fill(int words, const FixedScales<P>& scales, uint32_t* tile) {
        const bool near = begin();
        for (int i = 0; i < words; i += UNIT, advance(), tile += UNIT * P * PANEL)
            for (int p = 0; p < P; ++p) {
                vu fixed[UNIT];
                if (near)
                    fix(p, fixed);
                else
                    fix(p, scales.power[p], fixed);
                for (int k = 0; k < UNIT; ++k) storeu(tile + (k * P + p) * PANEL, fixed[k]);
            }
        exponents += PANEL;
    }

    // What a sign and a place stand for: powers of two, so that mantissas below 2^15, and one bit for what is halfway to be
    // more than that, become whole numbers below 2^13, rounded.
    static constexpr int16_t FACTORS[2 * CODES] = {
        0, 0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192,
        0, 0, -1, -2, -4, -8, -16, -32, -64, -128, -256, -512, -1024, -2048, -4096, -8192};
};

struct FewCompactTile : CompactTile {
    template <int R, int P>
    static INLINE void run(const PackedLinear& l, const PreparedRows& x, int64_t panel, const NextPanels& next, float* out) {
        const int64_t units = units_of(l);
        CompactGroups<P> weights(l, panel);
        const uint32_t* const begin = weights.at;
        RowCursor a(x.at, x.stride), scales(x.at + input_words(l), x.stride);
        const Beside exponents(exponents_of(l, panel + P), exponents_of(l, panel + 2 * P), weights.groups);
        memset(out, 0, R * P * PANEL * sizeof(float));
        for (int64_t unit = 0, end; unit < units; unit = end, scales.advance(sizeof(float))) {
            exponents.ask(unit / weights.UNITS);
            end = unit + weights.UNITS < units ? unit + weights.UNITS : units;
            const FixedScales<P> group(weights.exponents, weights.groups * PANEL);
            if (__builtin_expect(!weights.begin(), 0)) {
                const int words = (int)(end - unit) * UNIT;
                alignas(64) uint32_t tile[FIXED_WORDS * P * PANEL];
                weights.fill(words, group, tile);
                add_shared<R, P>(tile, words, a, scales, (const float*)group.inverse, {nullptr, 0, next.others, 0},
                                 0, out);
                a.advance(4 * words);
                continue;
            }
            Sums<vi, R, P> sums;
            clear(sums);
            for (; unit < end; ++unit, weights.advance(), a.advance(4 * UNIT)) {
                next.ahead<P>(begin, unit * COMPACT_WORDS, UNIT_LINES, ahead_words(next.stride));
                next.ask();
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) {
                    vu words[UNIT];
                    weights.fix(p, words);
#pragma GCC unroll 4
                    for (int k = 0; k < UNIT; ++k)
#pragma GCC unroll 8
                        for (int r = 0; r < R; ++r)
                            sums.at[r][p] = dot_fixed(sums.at[r][p], words[k], ((const uint32_t*)a(r))[k] - vu{});
                    if (R > FEW_ROWS) a.forget();
                }
            }
            add_group<R, P>(sums, group.inverse, scales, out);
            weights.exponents += PANEL;
        }
    }
};

#endif

static_assert(LOOK_WORDS == UNIT, "what is asked for is whole units");

template <typename Weights, int P>
INLINE void shared_sums_of(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, const uint32_t* next,
                           Wanted* others, float* sums) {
    constexpr int PASS = P * PANEL;
    const int64_t words = input_words(l), turns = ceil_div(n, DENSE_ROWS);
    Weights weights(l, panel);
    alignas(64) uint32_t tile[SHARED_WORDS * PASS];
    alignas(64) float inverse[SHARED_WORDS / FIXED_WORDS * PASS];
    memset(sums, 0, n * PASS * sizeof(float));
    for (int64_t word = 0; word < words; word += SHARED_WORDS) {
        const int count = words - word < SHARED_WORDS ? (int)(words - word) : SHARED_WORDS;
        for (int i = 0; i < count; i += FIXED_WORDS) {
            const FixedScales<P> group(weights.exponents, weights.groups * PANEL);
            memcpy(inverse + i / FIXED_WORDS * PASS, group.inverse, PASS * sizeof(float));
            weights.fill(count - i < FIXED_WORDS ? count - i : FIXED_WORDS, group, tile + i * PASS);
        }
        // What becomes whole numbers next is asked for meanwhile.
        NextPanels soon = {word + count == words ? next : weights.at, weights.stride, others, 0};
        for (int64_t turn = 0, row = 0; turn < turns; ++turn) {
            const int rows = (int)(n * (turn + 1) / turns - row);
            soon.take(turn, turns, P);
            with_count<DENSE_ROWS>(rows, [&](auto r) {
                const RowCursor a(x.row(row) + word, x.stride), scales(x.row(row) + words + word / FIXED_WORDS, x.stride);
                add_shared<decltype(r)::value, P>(tile, count, a, scales, inverse, soon, Weights::LINES, sums + row * PASS);
            });
            row += rows;
        }
    }
}

// Sums of n rows with P panels from `panel` on, [n][P * PANEL], of one of the forms. `next`: the panels of the next pass,
// or null.
template <int P>
NOINLINE void shared_sums(const PackedLinear& l, const PreparedRows& x, int64_t n, int64_t panel, const uint32_t* next,
                          Wanted* others, [[maybe_unused]] bool compact, float* sums) {
#if defined(__AVX512F__)
    if (compact) return shared_sums_of<CompactGroups<P>, P>(l, x, n, panel, next, others, sums);
#endif
    shared_sums_of<PairGroups<P>, P>(l, x, n, panel, next, others, sums);
}

}  // namespace
