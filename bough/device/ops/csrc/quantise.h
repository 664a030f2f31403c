// Weights rounded to 8 or 4 bits, straight into panels; op by op what quantise.py does with torch, with the same bits.
#pragma once

#include "cells.h"
#include "linear.h"
#include "transpose.h"

namespace {

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

// Shares of a group's range that are tried, see quantise.py.
constexpr int SHARES = 6;
constexpr float SHARE[WIDTH > 8 ? WIDTH : 8] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};
// The sum of 32, halves upon halves.
INLINE float sum_of(vf (&x)[GROUP_VECS]) {
    for (int half = GROUP_VECS / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) x[i] += x[i + half];
    return sum(x[0]);
}

// The least of 32 and zero, and the most of them.
struct Range {
    float low, high;

    INLINE explicit Range(const vf (&x)[GROUP_VECS]) {
        vf least = vf{}, most = x[0];
        for (int i = 0; i < GROUP_VECS; ++i) {
            least = x[i] < least ? x[i] : least;
            most = x[i] > most ? x[i] : most;
        }
        low = -max_lane(-least), high = max_lane(most);
    }

    INLINE float centre() const { return (high + low) / 2; }
    INLINE float reach() const { return (high - low) / 2; }
};

constexpr float MULTIPLES = 255;
constexpr uint16_t HALF_NAN = 0x7e00;

// What the scales and the minima of SUPER groups are multiples of.
struct Units {
    uint16_t scale, minimum;

    // `most` is MULTIPLES times it, rounded up: half a unit in the last place is added, of fp16 or of the smallest one.
    static INLINE uint16_t of(float most) { return narrow_half(most / MULTIPLES * (1 + 0x1p-11f) + 0x1p-25f); }
};

// Integers 0 .. 15 with the scale and the minimum of least squared error; false if none has a finite one.
INLINE bool to_four(const vf (&x)[GROUP_VECS], const Units& units, uint8_t* to, uint8_t* scale_out, uint8_t* minimum_out) {
    constexpr int ROOM = WIDTH > 8 ? WIDTH : 8;
    const Range range(x);
    const vf centre = splat(range.centre()), reach = splat(range.reach());
    const vf unit_scale = splat(widen_half(units.scale)), unit_minimum = splat(widen_half(units.minimum));
    float scales[ROOM], minima[ROOM], best = __builtin_inff();
    // What is not all the same has a step.
    const float least = range.reach() > 0 ? 1 : 0;
    for (int i = 0; i < SHARES; i += WIDTH) {
        const vf cut = reach * loadf(SHARE + i), minimum = floats(nearest((cut - centre) / unit_minimum, 0, MULTIPLES));
        const vf step = (centre + cut + minimum * unit_minimum) / splat(15.0f);
        storef(minima + i, minimum);
        storef(scales + i, floats(nearest(step / unit_scale, least, MULTIPLES)));
    }
    int chosen = -1;
    for (int share = 0; share < SHARES; ++share) {
        const vf scale = splat(scales[share]) * unit_scale, minimum = splat(minima[share]) * unit_minimum;
        vf error[GROUP_VECS], q[GROUP_VECS];
        for (int i = 0; i < GROUP_VECS; ++i) {
            q[i] = nearest((x[i] + minimum) / scale, 0, 15);
            error[i] = floats(q[i]) * scale - minimum - x[i];
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
    if (chosen < 0) return false;
    *scale_out = (uint8_t)scales[chosen];
    *minimum_out = (uint8_t)minima[chosen];
    return true;
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
            four_bit_row(from, (uint8_t*)words, (uint16_t*)call.scale + panel * ceil_div(groups(), SUPER) * 2 * PANEL + lane,
                         (uint8_t*)call.sub + panel * groups() * 2 * PANEL + lane);
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

    // Of all groups, scales and minima PANEL apart.
    void four_bit_row(const T* from, uint8_t* to, uint16_t* units, uint8_t* multiples) const {
        for (int64_t first = 0; first < groups(); first += SUPER, units += 2 * PANEL) {
            const int n = groups() - first < SUPER ? (int)(groups() - first) : SUPER;
            const Units found = units_of(from, first, n);
            bool finite = true;
            for (int g = 0; g < n; ++g)
                finite &= four_bit_group(from, first + g, found, to + g * GROUP / 2, multiples + g * 2 * PANEL);
            if (!finite) {
                memset(to, 0, n * GROUP / 2);
                for (int i = 0; i < 2 * n; ++i) multiples[i * PANEL] = 0;
            }
            units[0] = finite ? found.scale : HALF_NAN;
            units[PANEL] = finite ? found.minimum : HALF_NAN;
            to += n * GROUP / 2;
            multiples += n * 2 * PANEL;
        }
    }

    Units units_of(const T* from, int64_t first, int n) const {
        float scale = 0, minimum = 0;
        for (int g = 0; g < n; ++g) {
            vf x[GROUP_VECS];
            load_group(from, (first + g) * GROUP, call.n_in, x);
            const Range range(x);
            const float step = range.reach() * (float)(2.0 / 15);
            scale = step > scale ? step : scale;
            minimum = -range.low > minimum ? -range.low : minimum;
        }
        return {Units::of(scale), Units::of(minimum)};
    }

    bool four_bit_group(const T* from, int64_t g, const Units& units, uint8_t* to, uint8_t* multiples) const {
        uint8_t q[GROUP];
        vf x[GROUP_VECS];
        const int64_t left = call.n_in - g * GROUP;
        load_group(from, g * GROUP, call.n_in, x);
        if (!to_four(x, units, q, multiples, multiples + PANEL)) return false;
        if (left < GROUP) memset(q + left, 0, GROUP - left);
        for (int i = 0; i < GROUP / 2; ++i) to[i] = (uint8_t)(q[i] | q[GROUP / 2 + i] << 4);
        return true;
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
