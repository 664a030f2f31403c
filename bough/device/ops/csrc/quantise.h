// Weights rounded to 8 or 4 bits, straight into panels; op by op what quantise.py does with torch, with the same bits.
#pragma once

#include "cells.h"
#include "linear.h"

namespace {

// To the nearest fp16, as floats.
INLINE vf half_rounded(vf x) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#else
    uint16_t half[WIDTH];
    for (int i = 0; i < WIDTH; ++i) half[i] = narrow_half(x[i]);
    return load_half(half);
#endif
}

// Values to the nearest integers in [low, high], in the low bits, of what is 0 unless it is finite.
INLINE vf nearest(vf x, float low, float high) {
    const vf magic = splat(12582912.0f);    // 1.5 * 2^23: adding it rounds to an integer
    x = select((vi)((vu)x & 0x7fffffffu) < 0x7f800000, x, vf{});
    x = x < splat(low) ? splat(low) : x > splat(high) ? splat(high) : x;
    return x + magic;
}
INLINE vi integers(vf nearest) { return (vi)nearest - 0x4b400000; }
INLINE vf floats(vf nearest) { return nearest - splat(12582912.0f); }

constexpr int GROUP_VECS = GROUP / WIDTH;

// 32 inputs from `at` on, filled up with zeros.
template <typename T>
INLINE void load_group(const T* row, int64_t at, int64_t n_in, vf (&x)[GROUP_VECS]) {
    T padded[GROUP] = {};
    const T* from = row + at;
    if (n_in - at < GROUP) {
        memcpy(padded, from, sizeof(T) * (n_in - at));
        from = padded;
    }
    for (int i = 0; i < GROUP_VECS; ++i) x[i] = load(from + i * WIDTH);
}

// 128 + x / scale, as bytes.
INLINE void to_eight(const HadamardBlock& x, float scale, uint8_t* to) {
    for (int i = 0; i < HADAMARD_VECS; ++i) {
        vb bytes = lowest_bytes(integers(nearest(x[i] / splat(scale), -127, 127)) + 128);
        memcpy(to + i * WIDTH, &bytes, sizeof bytes);
    }
}

// Shares of a group's range that are tried, see quantise.py; and the steps that they leave, as shares of half the range.
constexpr int SHARES = 6;
constexpr float SHARE[WIDTH > 8 ? WIDTH : 8] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};
constexpr float STEP[WIDTH > 8 ? WIDTH : 8] = {(float)(2 * 1.0 / 15),  (float)(2 * 0.95 / 15), (float)(2 * 0.9 / 15),
                                               (float)(2 * 0.85 / 15), (float)(2 * 0.8 / 15),  (float)(2 * 0.75 / 15)};

// The sum of 32, halves upon halves.
INLINE float sum_of(vf (&x)[GROUP_VECS]) {
    for (int half = GROUP_VECS / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) x[i] += x[i + half];
    return sum(x[0]);
}

constexpr uint16_t HALF_NAN = 0x7e00;

// Integers 0 .. 15 with the scale and the minimum of least squared error: NaN if none has a finite one.
INLINE void to_four(const vf (&x)[GROUP_VECS], uint8_t* to, uint16_t* scale_out, uint16_t* minimum_out) {
    vf least = x[0], most = x[0];
    for (int i = 1; i < GROUP_VECS; ++i) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
    }
    const float low = -max_lane(-least), high = max_lane(most), centre = (high + low) / 2, reach = (high - low) / 2;
    float scales[WIDTH > 8 ? WIDTH : 8], minima[WIDTH > 8 ? WIDTH : 8], best = __builtin_inff();
    for (int i = 0; i < SHARES; i += WIDTH) {
        storef(scales + i, half_rounded(splat(reach) * loadf(STEP + i)));
        storef(minima + i, half_rounded(splat(centre) - splat(reach) * loadf(SHARE + i)));
    }
    int chosen = -1;
    memset(to, 0, GROUP);
    for (int share = 0; share < SHARES; ++share) {
        const vf scale = splat(scales[share]), minimum = splat(minima[share]);
        vf error[GROUP_VECS], q[GROUP_VECS];
        for (int i = 0; i < GROUP_VECS; ++i) {
            q[i] = nearest((x[i] - minimum) / scale, 0, 15);
            error[i] = floats(q[i]) * scale + minimum - x[i];
            error[i] *= error[i];
        }
        const float found = sum_of(error);
        if (!(found < best)) continue;
        best = found;
        chosen = share;
        for (int i = 0; i < GROUP_VECS; ++i) {
            vb bytes = lowest_bytes(integers(q[i]));
            memcpy(to + i * WIDTH, &bytes, sizeof bytes);
        }
    }
    *scale_out = chosen < 0 ? HALF_NAN : narrow_half(scales[chosen]);
    *minimum_out = chosen < 0 ? HALF_NAN : narrow_half(minima[chosen]);
}

template <typename T>
struct Quantise {
    const QuantiseCall& call;

    int64_t groups() const { return ceil_div(call.n_in, GROUP); }
    int64_t words() const {
        return call.kind == LINEAR_ROTATED ? ceil_to(call.n_in, HADAMARD) / 4 : groups() * (GROUP / 8);
    }

    // One output's words, and its scales as output `lane` of the panel.
    void row(int64_t panel, int lane, uint32_t* words) const {
        const T* from = (const T*)call.weight + (panel * PANEL + lane) * call.n_in;
        if (call.kind == LINEAR_ROTATED)
            rotated_row(from, (uint8_t*)words, (float*)call.scale + panel * PANEL + lane);
        else
            four_bit_row(from, (uint8_t*)words, (uint16_t*)call.scale + panel * groups() * 2 * PANEL + lane);
    }

    void rotated_row(const T* from, uint8_t* to, float* scale) const {
        HadamardBlock x;
        vi most = vi{};
        for (int64_t i = 0; i < call.n_in; i += HADAMARD) {
            hadamard(from + i, call.n_in - i, HADAMARD_INVERSE, x);
            most = larger_magnitudes(most, x);
        }
        *scale = finite_or_nan(max_lane(most)) / 127.0f;
        for (int64_t i = 0; i < call.n_in; i += HADAMARD) {
            hadamard(from + i, call.n_in - i, HADAMARD_INVERSE, x);
            to_eight(x, *scale, to + i);
        }
    }

    // Scales and minima, PANEL apart, of all groups.
    void four_bit_row(const T* from, uint8_t* to, uint16_t* scales) const {
        for (int64_t g = 0; g < groups(); ++g, to += GROUP / 2, scales += 2 * PANEL) {
            uint8_t q[GROUP];
            vf x[GROUP_VECS];
            const int64_t left = call.n_in - g * GROUP;
            load_group(from, g * GROUP, call.n_in, x);
            to_four(x, q, scales, scales + PANEL);
            if (left < GROUP) memset(q + left, 0, GROUP - left);
            for (int i = 0; i < GROUP / 2; ++i) to[i] = (uint8_t)(q[i] | q[GROUP / 2 + i] << 4);
        }
    }

    static void body(void* context, int64_t panel) {
        const Quantise& c = *(const Quantise*)context;
        const int64_t n_words = c.words(), left = c.call.n_out - panel * PANEL;
        uint32_t* rows = (uint32_t*)scratch(SCRATCH_LINEAR, n_words * PANEL * 4);
        if (!rows) __builtin_trap();
        for (int lane = 0; lane < PANEL; ++lane) {
            if (lane < left)
                c.row(panel, lane, rows + lane * n_words);
            else
                memset(rows + lane * n_words, 0, n_words * 4);
        }
        uint32_t* to = c.call.words + panel * n_words * PANEL;
        for (int first = 0; first < PANEL; first += WIDTH) {
            const uint32_t* from[WIDTH];
            for (int i = 0; i < WIDTH; ++i) from[i] = rows + (first + i) * n_words;
            for (int64_t at = 0; at < n_words; at += WIDTH)
                transpose(from, at, n_words - at < WIDTH ? (int)(n_words - at) : WIDTH, to + at * PANEL + first, PANEL);
        }
    }
};

template <typename T>
void quantise(const QuantiseCall& call) {
    Quantise<T> c = {call};
    parallel_items((call.n_out + PANEL - 1) / PANEL, call.threads, Quantise<T>::body, &c);
}

// -- the exponents of bf16 weights that are multiplied as whole numbers

struct Exponents {
    const ExponentsCall& call;

    static void body(void* context, int64_t panel) {
        const ExponentsCall& c = ((Exponents*)context)->call;
        const int64_t words = ceil_div(c.n_in, 2), groups = fixed_groups(c.n_in);
        for (int64_t word = 0, g = 0; g < groups; word += FIXED_WORDS, ++g) {
            const int64_t left = c.n_in - 2 * word;
            const int n = left < FIXED_INPUTS ? (int)left : FIXED_INPUTS;
            const uint32_t* from = c.words + (panel * words + word) * PANEL;
            for (int j = 0; j < PANEL; j += WIDTH) {
                const vub bytes = of_group(from + j, n);
                memcpy(c.exponents + (panel * groups + g) * PANEL + j, &bytes, sizeof bytes);
            }
        }
    }

    // Magnitudes of input i of a group, from whose words w are.
    static INLINE vf magnitude(const uint32_t* w, int i) {
        const vu pairs = loadu(w + i / 2 * PANEL);
        return (vf)((vu)(i % 2 ? second_of(pairs) : first_of(pairs)) & 0x7fffffffu);
    }

    static INLINE vub of_group(const uint32_t* w, int n) {
        vi most = vi{};
        for (int i = 0; i < n; ++i) {
            const vi bits = (vi)magnitude(w, i);
            most = bits > most ? bits : most;
        }
        vi exponent = EXPONENTS - (most >> 23);
        exponent = exponent > MOST_EXPONENT ? MOST_EXPONENT - vi{} : exponent;
        vf sum = vf{};
        for (int i = 0; i < n; ++i) sum += magnitude(w, i) * power_of((vu)exponent);
        exponent += (vi)(sum > splat(MOST_FIXED));    // less by one
        return (vub)lowest_bytes(most >= 0x7f800000 ? NOT_FINITE - vi{} : exponent);
    }
};

void exponents(const ExponentsCall& call) {
    Exponents e = {call};
    parallel_items(ceil_div(call.n_out, PANEL), call.threads, Exponents::body, &e);
}

}  // namespace
