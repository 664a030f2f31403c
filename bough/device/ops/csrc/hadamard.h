// The Hadamard transform of blocks of inputs, with the bits of hadamard.py, which says what for.
#pragma once

#include "vec.h"

namespace {

constexpr int HADAMARD = 64;                            // inputs of a block
constexpr int HADAMARD_VECS = HADAMARD / WIDTH;
constexpr float HADAMARD_INVERSE = 1.0f / HADAMARD;     // of twice the transform
typedef vf HadamardBlock[HADAMARD_VECS];

// Lane i := lane i ^ STRIDE.
template <int STRIDE>
INLINE vf swapped(vf x) {
#if defined(__AVX512F__)
    if constexpr (STRIDE == 8) return (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4e);
    if constexpr (STRIDE == 4) return (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xb1);
    if constexpr (STRIDE <= 2) return (vf)_mm512_permute_ps((__m512)x, STRIDE == 2 ? 0x4e : 0xb1);
#elif defined(__AVX2__)
    if constexpr (STRIDE == 4) return (vf)_mm256_permute2f128_ps((__m256)x, (__m256)x, 1);
    if constexpr (STRIDE <= 2) return (vf)_mm256_permute_ps((__m256)x, STRIDE == 2 ? 0x4e : 0xb1);
#elif defined(__aarch64__)
    if constexpr (STRIDE == 2) return (vf)vextq_f32((float32x4_t)x, (float32x4_t)x, 2);
    if constexpr (STRIDE == 1) return (vf)vrev64q_f32((float32x4_t)x);
#else
    vf y;
    for (int i = 0; i < WIDTH; ++i) y[i] = x[i ^ STRIDE];
    return y;
#endif
}

// Sums and differences of neighbours STRIDE apart, then of closer ones.
template <int STRIDE>
INLINE void butterflies(HadamardBlock& x) {
    if constexpr (STRIDE >= WIDTH) {
        constexpr int APART = STRIDE / WIDTH;
        for (int i = 0; i < HADAMARD_VECS; ++i)
            if (!(i & APART)) {
                const vf a = x[i], b = x[i + APART];
                x[i] = a + b;
                x[i + APART] = a - b;
            }
    } else {
        vf sign;
        for (int i = 0; i < WIDTH; ++i) sign[i] = i & STRIDE ? -1.0f : 1.0f;
        for (int i = 0; i < HADAMARD_VECS; ++i) x[i] = fma(x[i], sign, swapped<STRIDE>(x[i]));
    }
    if constexpr (STRIDE > 1) butterflies<STRIDE / 2>(x);
}

INLINE void hadamard(HadamardBlock& x) { butterflies<HADAMARD / 2>(x); }

// The transform of n inputs times a factor, filled up with zeros.
template <typename T>
INLINE void hadamard(const T* from, int64_t n, float factor, HadamardBlock& x) {
    T padded[HADAMARD];
    if (n < HADAMARD) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, from, sizeof(T) * n);
        from = padded;
    }
    for (int i = 0; i < HADAMARD_VECS; ++i) x[i] = load(from + i * WIDTH) * splat(factor);
    hadamard(x);
}

// The larger magnitudes by lane, whose bits have their order: of those and of a block.
INLINE vi larger_magnitudes(vi most, const HadamardBlock& x) {
    for (const vf& some : x) {
        const vi bits = (vi)some & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

}  // namespace
