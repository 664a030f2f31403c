// Weights of 4 bits that stand for 8, with one scale for each output, so that sums of products stay in tiles, or in lanes,
// until all inputs are added up: two levels of integers as in QServe (Lin et al. 2024), of which the inner one has 16 bits.
//
// A value is (w - 128) * scale, w = (q * step + start) >> 8, q its 4 bits, step and start of its group. The 8 bits lose next to
// nothing: the steps of q are many times larger. What they are multiplied with are inputs of 16 bits, as two signed digits,
// so that a row needs one scale, too. All sums are of integers and exact: vectors and tiles give the same bits.
//
// 16 bytes of 4 bits are in one lane of 128 bits of a vector, and so are the 16 values that they can stand for: one shuffle
// looks up 64 of them.
#pragma once

#include "amx.h"
#include "linear_tile.h"

#if defined(BOUGH_AMX)

namespace {

constexpr int QUAD = 4;                     // vectors that hold 16 outputs, each of them 4, for 32 inputs
constexpr int64_t STEPS_AHEAD = 512;        // words of steps and starts that pass between asking for them and their use

INLINE int64_t whole_blocks(const PackedLinear& l) { return input_words(l) / (GROUP / 4); }

// The steps and starts of a panel: how many, and where they are, four groups of one output in a lane of 128 bits.
INLINE int64_t whole_step_words(const PackedLinear& l) { return ceil_to(ceil_div(whole_blocks(l) * GROUP, l.group), 4) * PANEL; }
INLINE const uint32_t* whole_steps(const PackedLinear& l, int64_t panel) {
    return (const uint32_t*)l.sub + panel * whole_step_words(l);
}

// What 4 bits of the 16 outputs of a panel stand for in one group of inputs.
struct WholeTables {
    __m512i at[QUAD];

    // `steps`: of four groups, of which this is `group`. SIGNED: w - 128 instead of w.
    template <bool SIGNED>
    INLINE void fill(const uint32_t* steps, int group) {
        static const int32_t step_places[4] = {0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c};
        static const int32_t start_places[4] = {0x03020302, 0x07060706, 0x0b0a0b0a, 0x0f0e0f0e};
        const __m512i step_place = _mm512_set1_epi32(step_places[group]), start_place = _mm512_set1_epi32(start_places[group]);
        const __m512i twice = _mm512_set4_epi32(0x000e000c, 0x000a0008, 0x00060004, 0x00020000);
        const __m512i upper = _mm512_set1_epi16((short)0xff00);
#pragma GCC unroll 4
        for (int d = 0; d < QUAD; ++d) {
            const __m512i both = _mm512_loadu_si512(steps + d * PANEL);
            const __m512i step = _mm512_shuffle_epi8(both, step_place), start = _mm512_shuffle_epi8(both, start_place);
            const __m512i even = _mm512_add_epi16(_mm512_mullo_epi16(step, twice), start);
            const __m512i odd = _mm512_add_epi16(even, step);
            at[d] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(even, 8), odd, upper, 0xf8);
            if (SIGNED) at[d] = _mm512_xor_si512(at[d], _mm512_set1_epi8((char)0x80));
        }
    }
};

// 16 bytes in each lane.
INLINE __m512i in_lanes(const void* from) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from)); }

// The first and the last 16 of 32 inputs of 4 outputs.
struct WholeWeights {
    __m512i low, high;

    INLINE WholeWeights(const uint32_t* w, __m512i table) {
        const __m512i both = _mm512_loadu_si512(w), bits = _mm512_set1_epi8(15);
        low = _mm512_shuffle_epi8(table, _mm512_and_si512(both, bits));
        high = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(both, 4), bits));
    }
};

// Calls each(block, tables) for the blocks [block, blocks) of 32 inputs of a panel.
template <bool SIGNED, typename Each>
INLINE void each_whole_block(const PackedLinear& l, int64_t panel, int64_t block, int64_t blocks, const Each& each) {
    const int64_t of_group = l.group / GROUP;
    const uint32_t* steps = whole_steps(l, panel);
    WholeTables tables;
    for (int64_t group = block / of_group; block < blocks; ++group) {
        __builtin_prefetch(steps + group * PANEL + STEPS_AHEAD, 0, 2);
        tables.template fill<SIGNED>(steps + group / 4 * QUAD * PANEL, group % 4);
        const int64_t end = (group + 1) * of_group;
        for (; block < blocks && block < end; ++block) each(block, tables);
    }
}

// Four vectors of four words of four outputs each -> one word of 16 outputs each.
INLINE void store_words(const __m512i (&x)[QUAD], uint32_t* to) {
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpacklo_epi32(x[2], x[3]);
    const __m512i c = _mm512_unpackhi_epi32(x[0], x[1]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    _mm512_store_si512(to, _mm512_unpacklo_epi64(a, b));
    _mm512_store_si512(to + PANEL, _mm512_unpackhi_epi64(a, b));
    _mm512_store_si512(to + 2 * PANEL, _mm512_unpacklo_epi64(c, d));
    _mm512_store_si512(to + 3 * PANEL, _mm512_unpackhi_epi64(c, d));
}

// Words [from, to) of a panel as those of one of 8 signed bits: uint32 [to - from][PANEL]. Asks for what is wanted for every 32
// inputs.
inline void spread_panel(const PackedLinear& l, int64_t panel, int64_t from, int64_t to, Wanted& later, uint32_t* words) {
    constexpr int WORDS = GROUP / 4;
    const uint32_t* w = l.weight + panel * panel_words(l);
    words -= from * PANEL;
    each_whole_block<true>(l, panel, from / WORDS, to / WORDS, [&](int64_t block, const WholeTables& tables) {
        later.ask();
        __m512i low[QUAD], high[QUAD];
#pragma GCC unroll 4
        for (int d = 0; d < QUAD; ++d) {
            const WholeWeights weights(w + (block * QUAD + d) * PANEL, tables.at[d]);
            low[d] = weights.low;
            high[d] = weights.high;
        }
        store_words(low, words + block * 2 * QUAD * PANEL);
        store_words(high, words + (block * 2 + 1) * QUAD * PANEL);
    });
}

// What sums of both digits of a row, upper and lower, come to.
INLINE vf scale_digits(vi upper, vi lower, const GroupMeta& m, vf scale) {
    return fma(to_float(upper), splat(256), to_float(lower)) * splat(m.scale) * scale;
}

// The same of sums as tiles leave them, [2][TILE_ROWS][P * PANEL], of signed weights.
template <int P>
INLINE auto digit_sums(const PackedLinear& l, const PreparedRows& x, int64_t panel, const float* sums) {
    const float* scales = (const float*)l.scale + panel * PANEL;
    const int64_t words = 2 * input_words(l);
    return [=](int r, int i) {
        const GroupMeta& m = *(const GroupMeta*)(x.row(r) + words);
        vi upper, lower;
        memcpy(&upper, sums + r * P * PANEL + i, sizeof upper);
        memcpy(&lower, sums + (TILE_ROWS + r) * P * PANEL + i, sizeof lower);
        return scale_digits(upper, lower, m, loadf(scales + i));
    };
}

// Few rows, without tiles. Every line is asked for: spreading leaves little time to wait.
struct WholeTile : WholePanels {
    // Words of four vectors, each lane with four sums of an output -> the sums of 16 outputs.
    static INLINE vi fold_quads(const __m512i (&x)[QUAD]) {
        const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
        const __m512i a = add(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
        const __m512i b = add(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
        return (vi)add(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }

    template <int R, int P>
    static INLINE void run(const PackedLinear& l, const PreparedRows& x, int64_t panel, const NextPanels& next, float* out) {
        static_assert(P == 1, "panels");
        const int64_t words = input_words(l);
        const uint32_t* w = l.weight + panel * stride(l);
        __m512i upper[R][QUAD], lower[R][QUAD];
        for (int r = 0; r < R; ++r)
            for (int d = 0; d < QUAD; ++d) upper[r][d] = lower[r][d] = __m512i{};
        each_whole_block<false>(l, panel, 0, whole_blocks(l), [&](int64_t block, const WholeTables& tables) {
            next.template ahead<1>(w, block * QUAD * PANEL, QUAD, AHEAD_WORDS);
            next.ask();
#pragma GCC unroll 4
            for (int d = 0; d < QUAD; ++d) {
                const WholeWeights weights(w + (block * QUAD + d) * PANEL, tables.at[d]);
#pragma GCC unroll 3
                for (int r = 0; r < R; ++r) {
                    const uint32_t* digits = x.row(r) + block * (GROUP / 4);
                    // Inputs are read again for each quarter of the outputs: all registers hold sums.
                    if (R > 1) asm("" : "+r"(digits));
                    upper[r][d] = _mm512_dpbusd_epi32(upper[r][d], weights.low, in_lanes(digits));
                    upper[r][d] = _mm512_dpbusd_epi32(upper[r][d], weights.high, in_lanes(digits + 4));
                    lower[r][d] = _mm512_dpbusd_epi32(lower[r][d], weights.low, in_lanes(digits + words));
                    lower[r][d] = _mm512_dpbusd_epi32(lower[r][d], weights.high, in_lanes(digits + words + 4));
                }
            }
        });
        const vf scale = loadf((const float*)l.scale + panel * PANEL);
        for (int r = 0; r < R; ++r) {
            const GroupMeta& meta = *(const GroupMeta*)(x.row(r) + 2 * words);
            const vi high = fold_quads(upper[r]) + meta.start, low = fold_quads(lower[r]) + meta.start_low;
            storef(out + r * PANEL, scale_digits(high, low, meta, scale));
        }
    }
};

}  // namespace

#endif
