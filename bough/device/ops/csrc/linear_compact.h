// BF16 weights once more, in three quarters of the bytes and without loss, for products with few rows, which wait for
// memory.
//
// The exponents of a weight's values are nearly all among 16 neighbours, so that 4 bits name one (the observation of
// DFloat11, Zhang et al. 2025, and ZipNN, Hershcovitch et al. 2024, here with codes of one length, which vectors spread
// as fast as memory brings them). The largest has code 15; code 0 stands for zero where a panel has more of those than
// values that it would stand for otherwise, as one that was made of fewer bits has. A value takes 12 bits: 7 of mantissa,
// 4 of the exponent's code, the sign. Four words of a panel are held in three lines of 32 half words; line k < 3 holds word
// k in its lower 12 bits, and the upper nibbles of all three hold word 3. What has another exponent is a *stray*: it is
// listed beside them, and put in where its unit of four words is multiplied.
#pragma once

#include "linear_tile.h"

namespace {

constexpr int UNIT = 4;                         // words that are spread together
constexpr int UNIT_LINES = 3;
constexpr int HALVES = 2 * PANEL;               // values of a word
constexpr int CODES = 16;
constexpr int64_t COMPACT_WORDS = UNIT_LINES * PANEL;    // of a unit

// More rows than these leave memory so much time that spreading is what they would wait for: than one pass takes, unless
// vectors are multiplied two at a time, or pairs have to be taken apart as well; or what is spread is shared by many.
constexpr int64_t COMPACT_ROWS = FIXES_PAIRS ? 12 : WIDENS_PAIRS ? 4 : LINEAR_ROWS, WIDE_COMPACT_ROWS = 8;
INLINE int64_t compact_rows() { return multiplies_twice ? WIDE_COMPACT_ROWS : COMPACT_ROWS; }

INLINE int64_t units_of(const PackedLinear& l) { return l.n_in / (2 * UNIT); }

#if defined(__AVX512F__) && !defined(BOUGH_AMX)
constexpr bool READS_COMPACT = true;

struct CompactTile : AnyTile {
    static constexpr int PANELS = DENSE_PANELS, ROWS = LINEAR_ROWS, FEW = 0;
    static constexpr int64_t SINGLE = 0, WIDE = WIDE_DENSE_ROWS ? WIDE_COMPACT_ROWS : 0;
    static constexpr int INTO = 0xea;    // (x & y) | z
    typedef PreparedPairDots Dots;

    static INLINE const uint32_t* begin(const PackedLinear& l, int64_t panel) {
        return l.compact + panel * stride(l);
    }
    static INLINE int64_t stride(const PackedLinear& l) { return units_of(l) * COMPACT_WORDS; }

    // What codes of P panels stand for, and their strays.
    template <int P>
    struct Strays {
        __m512i table[P];
        const Stray* next[P];
        int64_t due[P];

        // Asks for what those of the next panels begin with, where they would be waited for.
        INLINE Strays(const PackedLinear& l, int64_t panel) {
            for (int p = 0; p < P; ++p) {
                const uint16_t* codes = (const uint16_t*)l.scale + (panel + p) * 2 * CODES;
                table[p] = _mm512_loadu_si512(codes);
                next[p] = (const Stray*)l.sub + (panel + p) * strays_of(l.n_in);
                due[p] = next[p]->unit;
                __builtin_prefetch(codes + P * 2 * CODES, 0, 2);
                __builtin_prefetch(next[p] + P * strays_of(l.n_in), 0, 2);
            }
        }

        // Puts what value(stray) says of the strays of a unit into its words. No function of its own: for a call all sums
        // would have to leave the registers.
        template <typename Value>
        INLINE void put(int p, int64_t unit, vu (&words)[UNIT], const Value& value) {
            if (__builtin_expect(due[p] != unit, 1)) return;
            const Stray* stray = next[p];
            for (; stray->unit == unit; ++stray)
                for (int k = 0; k < UNIT; ++k)
                    words[k] = (vu)_mm512_mask_set1_epi16((__m512i)words[k], (__mmask32)(stray->word == k) << stray->half,
                                                          (short)value(*stray));
            next[p] = stray;
            due[p] = stray->unit;
        }
        INLINE void put(int p, int64_t unit, vu (&words)[UNIT]) {
            put(p, unit, words, [](const Stray& stray) { return stray.value; });
        }
    };

    // The four words of a unit, one of which lies in the upper bits of the others.
    static INLINE void unfold(const uint32_t* from, __m512i (&held)[UNIT]) {
        const __m512i a = (__m512i)loadu(from), b = (__m512i)loadu(from + PANEL), c = (__m512i)loadu(from + 2 * PANEL);
        __m512i last = _mm512_srli_epi16(a, 12);
        last = _mm512_ternarylogic_epi32(_mm512_srli_epi16(b, 8), _mm512_set1_epi16(0xf0), last, INTO);
        last = _mm512_ternarylogic_epi32(_mm512_srli_epi16(c, 4), _mm512_set1_epi16(0xf00), last, INTO);
        held[0] = a, held[1] = b, held[2] = c, held[3] = last;
    }

    static INLINE void spread(const uint32_t* from, __m512i table, vu (&words)[UNIT]) {
        __m512i held[UNIT];
        unfold(from, held);
        for (int k = 0; k < UNIT; ++k) {
            // The permutation looks at 5 bits: sign and code.
            const __m512i upper = _mm512_permutexvar_epi16(_mm512_srli_epi16(held[k], 7), table);
            words[k] = (vu)_mm512_ternarylogic_epi32(held[k], _mm512_set1_epi16(0x7f), upper, INTO);
        }
    }

    template <int R, int P>
    static INLINE void run(const PackedLinear& l, const PreparedRows& x, int64_t panel, const NextPanels& next,
                           float* out) {
        const int64_t units = units_of(l), stride = units * COMPACT_WORDS;
        const uint32_t *const begin = l.compact + panel * stride, *w = begin;
        RowCursor a(x.at, x.stride);
        Sums<vf, R, P> sums;
        clear(sums);
        Strays<P> strays(l, panel);
        for (int64_t unit = 0; unit < units; ++unit, w += COMPACT_WORDS, a.advance(4 * UNIT * Dots::WORDS)) {
            next.ahead<P>(begin, unit * COMPACT_WORDS, UNIT_LINES, ahead_words(next.stride));
            next.ask();
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                vu words[UNIT];
                spread(w + p * stride, strays.table[p], words);
                strays.put(p, unit, words);
#pragma GCC unroll 4
                for (int k = 0; k < UNIT; ++k)
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r)
                        sums.at[r][p] = Dots::multiply(sums.at[r][p], words[k], (const uint32_t*)a(r) + Dots::WORDS * k);
                if (R > FEW_ROWS) a.forget();
            }
        }
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p) storef(out + r * P * PANEL + p * WIDTH, sums.at[r][p]);
    }
};
#else
constexpr bool READS_COMPACT = false;
#endif

// Whether n rows read the compact form.
INLINE bool reads_compact(const PackedLinear& l, int64_t n) {
    return READS_COMPACT && l.compact && n <= compact_rows();
}

// Words of a panel in one of the forms, or in that which n rows read, and where it begins.
INLINE int64_t words_of_panel(const PackedLinear& l, bool compact) {
    return compact ? units_of(l) * COMPACT_WORDS : panel_words(l);
}
INLINE const uint32_t* panel_at(const PackedLinear& l, int64_t panel, bool compact) {
    return (compact ? l.compact : l.weight) + panel * words_of_panel(l, compact);
}
INLINE int64_t read_words(const PackedLinear& l, int64_t n) { return words_of_panel(l, reads_compact(l, n)); }
INLINE const uint32_t* read_at(const PackedLinear& l, int64_t panel, int64_t n) { return panel_at(l, panel, reads_compact(l, n)); }

// -- making it

// Values of a word, whatever vectors there are.
typedef uint16_t HalfWords __attribute__((vector_size(2 * HALVES)));

INLINE HalfWords load_halves(const uint16_t* from) {
    HalfWords values;
    memcpy(&values, from, sizeof values);
    return values;
}
INLINE void store_halves(uint16_t* to, HalfWords values) { memcpy(to, &values, sizeof values); }

INLINE bool any(HalfWords values) {
    uint64_t parts[sizeof values / 8], all = 0;
    memcpy(parts, &values, sizeof values);
    for (uint64_t part : parts) all |= part;
    return all;
}

// The exponents of a panel that have codes: `first` that of code 0, unless that stands for zero, and those that follow.
struct Codes {
    int first;
    bool zero;

    INLINE uint16_t exponent(int code) const { return code == 0 && zero ? 0 : (uint16_t)(first + code); }

    // The codes of values, or something that is none. A mantissa of zeros with code 0 is zero or nothing.
    INLINE HalfWords code(HalfWords values) const {
        const uint16_t unlike_zero = zero ? 0 : 1, mantissa = zero ? 0 : 0x7f;
        const HalfWords code = (values >> 7 & 255) - (uint16_t)first;
        const HalfWords others = (code | (values & mantissa)) == 0 ? HalfWords{} + (uint16_t)CODES : code;
        return ((values & 0x7fff) | unlike_zero) == 0 ? HalfWords{} : others;
    }
};

// Those of most values [words][HALVES], of each word the first `used`.
INLINE Codes best_codes(const uint16_t* values, int64_t words, int used) {
    constexpr int TABLES = 4;    // neighbours are mostly alike: one counter would wait for itself
    int32_t counts[TABLES][256] = {};
    int64_t count[256], zeros = 0, sum = 0, best = -1;
    for (int64_t word = 0; word < words; ++word) {
        uint16_t exponents[HALVES];
        store_halves(exponents, load_halves(values + word * HALVES) >> 7 & 255);
        if (used < HALVES)
            for (int i = 0; i < used; ++i) counts[0][exponents[i]]++;
        else
#pragma GCC unroll 32
            for (int i = 0; i < HALVES; ++i) counts[i % TABLES][exponents[i]]++;
    }
    for (int e = 0; e < 256; ++e) {
        count[e] = 0;
        for (int t = 0; t < TABLES; ++t) count[e] += counts[t][e];
    }
    for (int64_t word = 0; count[0] && word < words; ++word)
        for (int i = 0; i < used; ++i) zeros += !(values[word * HALVES + i] & 0x7fff);
    Codes codes = {0, true};
    for (int e = 0; e < 256; ++e) {
        const int first = e - (CODES - 1);
        sum += count[e] - (first > 0 ? count[first - 1] : 0);
        if (first < 0) continue;
        const bool zero = zeros > count[first];
        const int64_t found = zero ? sum - count[first] + zeros : sum;
        if (found <= best) continue;
        best = found;
        codes = {first, zero || first == 0};
    }
    return codes;
}

struct Compact {
    const CompactCall& call;

    static void body(void* context, int64_t panel) {
        const CompactCall& c = ((Compact*)context)->call;
        const int64_t words = c.n_in / 2;
        const uint16_t* from = (const uint16_t*)(c.words + panel * words * PANEL);
        uint16_t* to = (uint16_t*)(c.compact + panel * words / UNIT * COMPACT_WORDS);
        uint16_t* table = c.table + panel * 2 * CODES;
        Stray *stray = c.strays + panel * strays_of(c.n_in), *const most = stray + strays_of(c.n_in) - 1;
        const int64_t left = 2 * (c.n_out - panel * PANEL);    // halves of a word that outputs have
        const int used = left < HALVES ? (int)left : HALVES;
        const Codes codes = best_codes(from, words, used);
        for (int code = 0; code < 2 * CODES; ++code)
            table[code] = (uint16_t)((code & CODES) << 11 | codes.exponent(code % CODES) << 7);
        for (int64_t unit = 0; unit < words / UNIT; ++unit, from += UNIT * HALVES, to += UNIT_LINES * HALVES) {
            HalfWords held[UNIT], codes_of[UNIT], beyond = {};
            for (int k = 0; k < UNIT; ++k) {
                const HalfWords values = load_halves(from + k * HALVES), code = codes.code(values);
                codes_of[k] = code;
                beyond |= code >> 4;    // a code beyond the last one has bits above it, a negative one all of them
                held[k] = (values & 0x7f) | (code & 15) << 7 | values >> 15 << 11;
            }
            for (int k = 0; k < UNIT_LINES; ++k)
                store_halves(to + k * HALVES, held[k] | held[UNIT - 1] >> (4 * k) << 12);
            if (!any(beyond)) continue;
            for (int k = 0; k < UNIT; ++k)
                for (int i = 0; i < used; ++i) {
                    if (codes_of[k][i] < CODES) continue;
                    if (stray == most) {
                        __atomic_store_n(c.too_many, 1, __ATOMIC_RELAXED);
                        return;
                    }
                    *stray++ = {(int32_t)unit, (uint8_t)k, (uint8_t)i, from[k * HALVES + i]};
                }
        }
        *stray = {-1, 0, 0, 0};
    }
};

void compact(const CompactCall& call) {
    Compact c = {call};
    parallel_items(ceil_div(call.n_out, PANEL), call.threads, Compact::body, &c);
}

}  // namespace
