// Attention of many queries at once: queries lie in the lanes of vectors, keys are broadcast.
//
// So softmax over the keys runs lane by lane, with no reduction across a vector. K and V are laid out in the order in which
// they are broadcast, once for all blocks of a unit; a segment is added to the totals while its sums are in registers.
// Every number is computed by the same chain of operations as with few queries (segment.h), bit by bit: products
// add up in rising order of dimension or key, the sum of weights in WIDTH parts by key modulo WIDTH.
#pragma once

#include <type_traits>

#include "attention_amx.h"
#include "bytes.h"
#include "cells.h"

namespace {

constexpr int SEGMENT = 128;                       // keys that share one maximum

// Vectors of a block of queries, and rows of a register block, which divide SEGMENT and WIDTH. Tiles take pairs of both.
#if defined(BOUGH_AMX)
constexpr int LANE_VECS = 4, LANE_ROWS = 4;
#else
constexpr int LANE_VECS = 3, LANE_ROWS = WIDTH == 16 ? 8 : 4;
#endif
constexpr int LANES = LANE_VECS * WIDTH;

// Words of bytes: digits of queries and weights in the lanes (bytes.h), cells beside them.
struct LaneBytes { uint32_t word; };
template <> struct ElementOf<LaneBytes> { typedef int8_t type; };
#if defined(BOUGH_AMX)
template <> constexpr bool IN_TILES<LaneBytes> = true;
#endif

// x where mask, zero elsewhere ...
INLINE vf keep(vi mask, vf x) { return (vf)((vi)x & mask); }

// Weights of WIDTH queries for two neighbouring keys, as the words of their products with V.
INLINE void store_weights(float* to, int64_t stride, vf a, vf b) {
    storef(to, a);
    storef(to + stride, b);
}

// They become digits later.
INLINE void store_weights(LaneBytes* to, int64_t stride, vf a, vf b) { store_weights((float*)to, stride, a, b); }

#if defined(__AVX512BF16__)
INLINE void store_weights(uint32_t* to, int64_t, vf a, vf b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i both = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
    memcpy(to, &both, sizeof both);
}
#endif

// Calls finish(r, v, vector v of sum over i of b[i][r] * a[i]) for R rows and N vectors; b: R of WIDTH columns.
template <int R, int N, typename E, typename Finish>
INLINE void lanes_block(const E* a, const E* b, int inner, const Finish& finish) {
    vf acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) acc[r][v] = vf{};
    for (int i = 0; i < inner; ++i, a += LANES, b += WIDTH)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < N; ++v) acc[r][v] = step(acc[r][v], a + v * WIDTH, b[r]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) finish(r, v, acc[r][v]);
}

// The same with digits in the lanes: of queries (signed) beside keys (unsigned bytes), or of weights (unsigned) beside
// values (signed bytes). High digits are at a, low ones `low` words behind. Sums for queries begin at `start`. They are
// joined and scaled by lane, and for queries by row.
template <bool QUERIES, int R, int N, typename Finish>
INLINE void digits_block(const LaneBytes* a, int64_t a_stride, int64_t low, const LaneBytes* b, int inner,
                         const int32_t* const* start, const float* scale, const float* row_scale,
                         const Finish& finish) {
    vi acc[R][N][2];
    for (int v = 0; v < N; ++v)
        for (int i = 0; i < 2; ++i) {
            vi begin = vi{};
            if (QUERIES) memcpy(&begin, start[i] + v * WIDTH, sizeof begin);
            for (int r = 0; r < R; ++r) acc[r][v][i] = begin;
        }
    for (int i = 0; i < inner; ++i, a += a_stride, b += WIDTH)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < N; ++v)
#pragma GCC unroll 2
                for (int digit = 0; digit < 2; ++digit) {
                    vu lanes = loadu(&a[digit * low + v * WIDTH].word);
                    uint32_t bytes = b[r].word;
                    acc[r][v][digit] = QUERIES ? dot_bytes(acc[r][v][digit], bytes, lanes)
                                               : dot_bytes(acc[r][v][digit], lanes, bytes);
                }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) {
            vf value = join_digits(acc[r][v][0], acc[r][v][1], loadf(scale + v * WIDTH));
            finish(r, v, QUERIES ? value * splat(row_scale[r]) : value);
        }
}

// Weights of WIDTH queries for n keys, floats [n][LANES] of which the largest has the bits `top`, to unsigned digits in
// their place: the words of four keys' high digits, then those of their low digits. Returns their scale.
INLINE vf split_lanes(float* s, int n, vu top) {
    // As digits_scale.
    vf most = select((vi)(top >= 0x7f800000u), splat(__builtin_nanf("")), (vf)top), inverse = splat(65535.0f) / most;
    inverse = keep(inverse < splat(__builtin_inff()), inverse);
    const vu even = vu{} + 0x00ff00ffu;
    for (int k = 0; k < n; k += 4) {
        vu w[4];
        for (int i = 0; i < 4; ++i) w[i] = whole_weights(s + (k + i) * LANES, inverse);
        vu first = (w[0] & 0xffffu) | (w[2] << 16), second = (w[1] & 0xffffu) | (w[3] << 16);
        vu high = (first >> 8 & even) | (second & ~even), low = (first & even) | (second << 8 & ~even);
        memcpy(s + k / 2 * LANES, &high, sizeof high);
        memcpy(s + (k / 2 + 1) * LANES, &low, sizeof low);
    }
    return most / splat(65535.0f);
}

// Enters a segment's maximum and sum into those of the total, of WIDTH queries; finds the factors of what has been added up
// and of what is to be added, and nothing is added for a query that saw none of the segment.
INLINE void enter(vf t, vf weight, float* top, float* sum, vf& old, vf& add) {
    vf before = loadf(top);
    vi nothing = (t == splat(-__builtin_inff())) & (weight == vf{});
    vf best = larger(t, before);
    old = select(nothing, splat(1.0f), exp2v(before - best));
    add = select(nothing, vf{}, exp2v(t - best));
    storef(sum, loadf(sum) * old + weight * add);
    storef(top, best);
}

// total := total + one segment, for a block of queries, as LaneBlock leaves them.
INLINE void merge_lanes(const float* from, float* total, int dim, int n_vecs) {
    for (int v = 0; v < n_vecs; ++v, from += WIDTH, total += WIDTH) {
        const float *top = from + dim * LANES, *sum = top + LANES;
        float* total_top = total + dim * LANES;
        vf old, add;
        enter(loadf(top), loadf(sum), total_top, total_top + LANES, old, add);
        for (int d = 0; d < dim; ++d)
            storef(total + d * LANES, fma(loadf(from + d * LANES), add, loadf(total + d * LANES) * old));
    }
}

// Cells that are needed soon. Their lines are asked for a few per step of an inner loop: in one burst they would fill the
// processor's miss buffers and stall the arithmetic that they are meant to run beside. Several stretches of cells are walked
// in step, for the reason that Wanted gives.
struct Ahead {
    static constexpr int UNIT = 16;     // parts of a line that are counted
    static constexpr int STRETCHES = 8;

    const void* const* cells;
    int count, length;          // of cells, and of those of a stretch
    int bytes;                  // of a cell
    int cell, at;               // where to go on in each stretch: the cell, and the byte in it
    int each, due;              // parts of lines to ask for in a step, and by now

    // Cells [0, count) within n_steps steps.
    Ahead(const void* const* cells, int count, int bytes, int n_steps)
        : cells(cells), count(count), length((int)ceil_div(count, STRETCHES)), bytes(bytes), cell(0), at(0),
          each((int)ceil_div((int64_t)count * ((bytes + 63) / 64) * UNIT, n_steps)), due(0) {}

    // What takes as long as `n` steps lies behind.
    INLINE void step(int n = 1) {
        due += each * n;
        for (; due >= STRETCHES * UNIT && cell < length; due -= STRETCHES * UNIT) {
            for (int i = cell; i < count; i += length) __builtin_prefetch((const char*)cells[i] + at, 0, 2);
            at += 64;
            if (at < bytes) continue;
            at = 0;
            ++cell;
        }
    }
};

// One segment for one block of queries of T, with words of E.
template <typename T, typename E>
struct LaneBlock {
    const E* queries;       // [words][LANES]; of LaneBytes, two digits of each
    const E* keys;          // [n_keys / WIDTH][words][WIDTH]
    const E* values;        // [dim / WIDTH][SEGMENT / keys per word][WIDTH]
    const float* k_scale;   // [n_keys] factors of the scores, or null
    const float* v_scale;   // [n_keys] factors of the weights, or null
    const int32_t* seen;    // [LANES] where the keys that each query sees end, or null where all see all
    const int32_t* unseen;  // [LANES] where they begin, or null with `seen`
    float* scores;          // [SEGMENT][LANES], scratch
    float* out;             // [dim + 2][LANES]: output, not divided by the sum of weights; maximum in base 2; that sum
    bool merging;           // `out` is a total, to which the segment is added
    int n_keys, words, dim;
    float cap_scale, log2_scale;    // see Attention
    Ahead* ahead;           // [2] keys and values to look ahead for while scores are computed
    const float* q_scale;   // of LaneBytes, [LANES]: see QueryScale
    const int32_t* q_start[2];

    static constexpr bool DIGITS = KEYS_PER_WORD<E> == 4;
    static constexpr bool TILES = IN_TILES<E>;      // keys are [n_keys][words], values [dim][SEGMENT / keys per word]
    static constexpr int ROWS = DIGITS ? LANE_ROWS / 2 : LANE_ROWS;

    // Scores of the keys, and the largest of each query, which stands if all are seen and nothing is to be done to them.
    template <int N>
    INLINE void product_keys(vf (&best)[N]) const {
        int n_blocks = (n_keys + LANE_ROWS - 1) / LANE_ROWS;
#if defined(BOUGH_AMX)
        if constexpr (TILES && DIGITS) {
            tile_sums<SignedByteTiles, true, N>(&keys->word, words, n_keys, &queries->word, LANES, words * LANES, words,
                                     [&](auto, int k, int n, int v, const float* sums) {
                for (int i = 0; v == 0 && i < 2; ++i) ahead[i].step(n / LANE_ROWS);
                const vf scale = loadf(q_scale + v * WIDTH);
                vf top = best[v];
                for (const int end = k + n < n_keys ? k + n : n_keys; k < end; ++k, sums += 2 * TILE_WORDS) {
                    const vf x = joined(sums, scale) * splat(k_scale[k]);
                    storef(scores + k * LANES + v * WIDTH, x);
                    top = larger(x, top);
                }
                best[v] = top;
            });
            return;
        } else if constexpr (TILES) {
            tile_scores<N>(queries, keys, words, n_keys, scores, LANES, [&](int k, int end) {
                for (int i = 0; i < 2; ++i) ahead[i].step((end - k) / LANE_ROWS);
                vf top[N];
                for (int v = 0; v < N; ++v) top[v] = best[v];
                for (; k < end; ++k)
#pragma GCC unroll 4
                    for (int v = 0; v < N; ++v) top[v] = larger(loadf(scores + k * LANES + v * WIDTH), top[v]);
                for (int v = 0; v < N; ++v) best[v] = top[v];
            });
            return;
        }
#endif
        for (int k = 0; k < n_blocks * LANE_ROWS; k += ROWS) {
            for (int i = 0; k % LANE_ROWS == 0 && i < 2; ++i) ahead[i].step();
            const E* from = keys + (int64_t)(k / WIDTH) * words * WIDTH + k % WIDTH;
            float* to = scores + k * LANES;
            auto finish = [&](int r, int v, vf x) {
                if (!DIGITS && k_scale) x *= splat(k_scale[k + r]);
                storef(to + r * LANES + v * WIDTH, x);
                best[v] = larger(x, best[v]);
            };
            if constexpr (DIGITS)
                digits_block<true, ROWS, N>(queries, LANES, words * LANES, from, words, q_start, q_scale, k_scale + k,
                                            finish);
            else
                lanes_block<ROWS, N>(queries, from, words, finish);
        }
    }

    // What is left to do to the scores of a vector of queries; keys [begin, limit) are seen. Returns the largest.
    INLINE vf finish_scores(float* s, vi begin, vi limit) const {
        vf best = splat(-__builtin_inff());
        for (int k = 0; k < n_keys; ++k) {
            vf x = loadf(s + k * LANES);
            if (cap_scale) storef(s + k * LANES, x = tanhv(x * splat(cap_scale)));
            best = larger(select((vi{} + k < limit) & (vi{} + k >= begin), x, splat(-__builtin_inff())), best);
        }
        return best;
    }

    // Scores of a vector of queries, below `shift` in base 2 -> weights, in place: their words take the first rows.
    // Returns the sum. Digits of weights have a scale.
    template <bool MASKED, bool SCALED>
    INLINE vf soften(float* s, vf shift, vi begin, vi limit, float* weight_scale) const {
        const int padded_keys = (n_keys + WIDTH - 1) / WIDTH * WIDTH;
        const vf factor = splat(log2_scale);
        const float* scale = v_scale;
        vf part[WIDTH];
        for (int j = 0; j < WIDTH; ++j) part[j] = vf{};
        vu largest_weight = vu{};
        E* to = (E*)s;
        constexpr int PER_WORD = DIGITS ? 1 : KEYS_PER_WORD<E>;
        for (int k = 0; k < padded_keys; k += WIDTH)
#pragma GCC unroll 16
            for (int j = 0; j < WIDTH; j += 2) {
                vf p[2];
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    vf x = fma(loadf(s + (k + j + i) * LANES), factor, -shift);
                    p[i] = exp2_for(x, (const T*)nullptr);
                    if (MASKED) p[i] = keep((vi{} + (k + j + i) < limit) & (vi{} + (k + j + i) >= begin), p[i]);
                    part[j + i] += p[i];
                    if (SCALED) p[i] *= splat(scale[k + j + i]);
                    if (DIGITS) largest_weight = (vu)p[i] > largest_weight ? (vu)p[i] : largest_weight;
                }
                store_weights(to + (k / PER_WORD + j / PER_WORD) * LANES, LANES, p[0], p[1]);
            }
        if (DIGITS) storef(weight_scale, split_lanes(s, padded_keys, largest_weight));
        for (int half = WIDTH / 2; half >= 4; half /= 2)
            for (int j = 0; j < half; ++j) part[j] += part[j + half];
        return (part[0] + part[2]) + (part[1] + part[3]);
    }

    INLINE vf soften(bool masked, float* s, vf shift, vi begin, vi limit, float* weight_scale) const {
        if (!DIGITS && !v_scale)
            return masked ? soften<true, DIGITS>(s, shift, begin, limit, weight_scale)
                          : soften<false, DIGITS>(s, shift, begin, limit, weight_scale);
        return masked ? soften<true, true>(s, shift, begin, limit, weight_scale)
                      : soften<false, true>(s, shift, begin, limit, weight_scale);
    }

#if defined(BOUGH_AMX)
    // Sums of products with both digits, as tiles leave them -> their values.
    static INLINE vf joined(const float* sums, vf scale) {
        return join_digits((vi)loadf(sums), (vi)loadf(sums + TILE_WORDS), scale);
    }

    // Sums [n][2 * 16] of both digits of the weights of v, for dimensions from d on, into the output.
    template <bool MERGING>
    INLINE void add_digits(int d, int n, int v, const float* sums, const vf* old, const vf* add, vf scale) const {
        const vf before = MERGING ? old[v] : vf{}, factor = MERGING ? add[v] : vf{};
        float* at = out + d * LANES + v * WIDTH;
        for (int r = 0; r < n; ++r, at += LANES, sums += 2 * TILE_WORDS) {
            const vf x = joined(sums, scale);
            storef(at, MERGING ? fma(x, factor, loadf(at) * before) : x);
        }
    }

    // Sums [n][2 * 16] of C vectors of queries from v on, for dimensions from d on, into the output.
    template <bool MERGING, int C>
    INLINE void add_tiles(Count<C>, int d, int n, int v, const float* sums, const vf* old, const vf* add) const {
        vf before[C], factor[C];
        for (int i = 0; MERGING && i < C; ++i) before[i] = old[v + i], factor[i] = add[v + i];
        float* at = out + d * LANES + v * WIDTH;
        for (int r = 0; r < n; ++r, at += LANES, sums += 2 * TILE_WORDS)
#pragma GCC unroll 2
            for (int i = 0; i < C; ++i) {
                const vf x = loadf(sums + i * TILE_WORDS);
                storef(at + i * WIDTH, MERGING ? fma(x, factor[i], loadf(at + i * WIDTH) * before[i]) : x);
            }
    }
#endif

    template <int N>
    void run() const {
#if defined(BOUGH_AMX)
        Tiles tiles;
        if (TILES) tiles.shape(attention_shapes());
#endif
        float weight_scale[LANES];
        vf best[N], old[N], add[N];
        for (int v = 0; v < N; ++v) best[v] = splat(-__builtin_inff());
        product_keys<N>(best);
        const bool masked = seen || n_keys % WIDTH;
        const bool plain = !seen && n_keys % LANE_ROWS == 0 && !cap_scale;
        for (int v = 0; v < N; ++v) {
            vi begin = vi{}, limit = vi{} + n_keys;
            if (seen) {
                memcpy(&begin, unseen + v * WIDTH, sizeof begin);
                memcpy(&limit, seen + v * WIDTH, sizeof limit);
            }
            float* s = scores + v * WIDTH;
            if (!plain) best[v] = finish_scores(s, begin, limit);
            vf shift = best[v] * splat(log2_scale);
            vf weight = soften(masked, s, shift, begin, limit, weight_scale + v * WIDTH);
            float *top = out + dim * LANES + v * WIDTH, *sum = top + LANES;
            if (merging) {
                enter(shift, weight, top, sum, old[v], add[v]);
            } else {
                storef(top, shift);
                storef(sum, weight);
            }
        }
        const int inner = (int)ceil_div(n_keys, KEYS_PER_WORD<E>);
        const E* weights = (const E*)scores;
        auto add_segment = [&](int d, int v, vf x) {
            float* at = out + d * LANES + v * WIDTH;
            storef(at, merging ? fma(x, add[v], loadf(at) * old[v]) : x);
        };
#if defined(BOUGH_AMX)
        if constexpr (TILES) {
            // A part of a tile of weights is filled up with zeros.
            constexpr int DIGITS_OF = DIGITS ? 2 : 1, VALUE_WORDS = SEGMENT / KEYS_PER_WORD<E>;
            const int written = (n_keys + WIDTH - 1) / WIDTH * WIDTH / KEYS_PER_WORD<E>;
            const int whole = (written + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
            for (int i = DIGITS_OF * written; i < DIGITS_OF * whole; ++i)
                memset(scores + i * LANES, 0, sizeof(float) * N * WIDTH);
            tile_sums<std::conditional_t<DIGITS, ByteTiles, PairTiles>, DIGITS, N>(
                (const uint32_t*)values, VALUE_WORDS, dim, (const uint32_t*)scores, DIGITS_OF * LANES, LANES, whole,
                [&](auto columns, int d, int n, int v, const float* sums) {
                    if constexpr (DIGITS) {
                        const vf scale = loadf(weight_scale + v * WIDTH);
                        merging ? add_digits<true>(d, n, v, sums, old, add, scale)
                                : add_digits<false>(d, n, v, sums, old, add, scale);
                    } else {
                        merging ? add_tiles<true>(columns, d, n, v, sums, old, add)
                                : add_tiles<false>(columns, d, n, v, sums, old, add);
                    }
                });
            return;
        }
#endif
        for (int d = 0; d < dim; d += ROWS) {
            const E* from = values + (int64_t)(d / WIDTH) * (SEGMENT / KEYS_PER_WORD<E>) * WIDTH + d % WIDTH;
            auto finish = [&](int r, int v, vf x) { add_segment(d + r, v, x); };
            if constexpr (DIGITS)
                digits_block<false, ROWS, N>(weights, 2 * LANES, LANES, from, inner, nullptr, weight_scale, nullptr,
                                             finish);
            else
                lanes_block<ROWS, N>(weights, from, inner, finish);
        }
    }
};

}  // namespace
