// AVX-512 in plain C++, for processors without it: included before everything else, it names the instruction sets and what
// the kernels use of them. Built for AVX2, kernels for AVX-512 and, with tiles.h, for AMX then run anywhere, slowly.
//
// Lanes are those of Intel's manual of instructions, volume 2; dpbf16 and conversions to bf16 flush denormals.
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1

namespace plain {

// A vector as its elements.
template <typename E>
struct Of {
    E at[64 / sizeof(E)];
    static constexpr int N = 64 / sizeof(E);

    Of() = default;
    template <typename V>
    Of(const V& x) {
        static_assert(sizeof x == 64, "512 bits");
        memcpy(at, &x, 64);
    }
    template <typename V>
    V as() const {
        V x;
        memcpy(&x, at, 64);
        return x;
    }
    operator __m512i() const { return as<__m512i>(); }
    operator __m512() const { return as<__m512>(); }
};

template <typename E, typename F>
inline Of<E> each(F f) {
    Of<E> to;
    for (int i = 0; i < Of<E>::N; ++i) to.at[i] = (E)f(i);
    return to;
}

template <typename To, typename From>
inline To saturated(From x) {
    const From most = (From)((1ll << (8 * sizeof(To) - ((To)-1 < 0))) - 1), least = (To)-1 < 0 ? -most - 1 : 0;
    return (To)(x > most ? most : x < least ? least : x);
}

inline __m512i loadu(const void* p) { __m512i x; memcpy(&x, p, 64); return x; }
inline void storeu(void* p, __m512i x) { memcpy(p, &x, 64); }
inline __m512i maskz_loadu_epi32(uint16_t mask, const void* p) {
    Of<uint32_t> to = {};
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) memcpy(to.at + i, (const uint32_t*)p + i, 4);
    return to;
}

template <typename E> inline __m512i set1(E x) { return each<E>([&](int) { return x; }); }
template <typename E, typename... Rest>
inline __m512i set(Rest... x) {
    const E from[] = {(E)x...};
    constexpr int n = sizeof...(x);
    return each<E>([&](int i) { return from[n - 1 - i % n]; });
}

inline __m512i ternarylogic_epi32(Of<uint32_t> a, Of<uint32_t> b, Of<uint32_t> c, int table) {
    return each<uint32_t>([&](int i) {
        uint32_t to = 0;
        for (int bit = 0; bit < 32; ++bit)
            to |= (uint32_t)(table >> ((a.at[i] >> bit & 1) << 2 | (b.at[i] >> bit & 1) << 1 | (c.at[i] >> bit & 1)) & 1) << bit;
        return to;
    });
}

template <typename E, typename F> inline __m512i zip(Of<E> a, Of<E> b, F f) { return each<E>([&](int i) { return f(a.at[i], b.at[i]); }); }
inline __m512i and_si512(__m512i a, __m512i b) { return zip<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return x & y; }); }
inline __m512i xor_si512(__m512i a, __m512i b) { return zip<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return x ^ y; }); }
inline __m512i add_epi16(__m512i a, __m512i b) { return zip<uint16_t>(a, b, [](int x, int y) { return x + y; }); }
inline __m512i add_epi32(__m512i a, __m512i b) { return zip<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x + y; }); }
inline __m512i mullo_epi16(__m512i a, __m512i b) { return zip<int16_t>(a, b, [](int x, int y) { return x * y; }); }
inline __m512i max_epi32(__m512i a, __m512i b) { return zip<int32_t>(a, b, [](int x, int y) { return x > y ? x : y; }); }
inline __m512i srli_epi16(Of<uint16_t> a, int n) { return each<uint16_t>([&](int i) { return a.at[i] >> n; }); }
inline __m512i srai_epi16(Of<int16_t> a, int n) { return each<int16_t>([&](int i) { return a.at[i] >> n; }); }
inline __m512 max_ps(Of<float> a, Of<float> b) { return each<float>([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; }); }
inline __m512 fmadd_ps(Of<float> a, Of<float> b, Of<float> c) {
    __m256 to[2], x[2], y[2], z[2];
    memcpy(x, &a, 64), memcpy(y, &b, 64), memcpy(z, &c, 64);
    for (int h = 0; h < 2; ++h) to[h] = _mm256_fmadd_ps(x[h], y[h], z[h]);
    __m512 all;
    memcpy(&all, to, 64);
    return all;
}

inline __m512i madd_epi16(Of<int16_t> a, Of<int16_t> b) {
    return each<int32_t>([&](int i) { return (int64_t)a.at[2 * i] * b.at[2 * i] + (int64_t)a.at[2 * i + 1] * b.at[2 * i + 1]; });
}
inline __m512i maddubs_epi16(Of<uint8_t> a, Of<int8_t> b) {
    return each<int16_t>([&](int i) { return saturated<int16_t, int>(a.at[2 * i] * b.at[2 * i] + a.at[2 * i + 1] * b.at[2 * i + 1]); });
}
inline __m512i dpbusd_epi32(Of<int32_t> sum, Of<uint8_t> a, Of<int8_t> b) {
    return each<int32_t>([&](int i) {
        int64_t to = sum.at[i];
        for (int k = 4 * i; k < 4 * i + 4; ++k) to += a.at[k] * b.at[k];
        return to;
    });
}

inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
inline float widened(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float to;
    memcpy(&to, &bits, 4);
    return flushed(to);
}
inline uint16_t narrowed(float x) {
    x = flushed(x);
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline __m512 dpbf16_ps(Of<float> sum, Of<uint16_t> a, Of<uint16_t> b) {
    return each<float>([&](int i) {
        float to = sum.at[i];
        for (int k = 2 * i; k < 2 * i + 2; ++k) to = flushed(fmaf(widened(a.at[k]), widened(b.at[k]), to));
        return to;
    });
}
inline __m256bh cvtneps_pbh(Of<float> x) {
    uint16_t to[16];
    for (int i = 0; i < 16; ++i) to[i] = narrowed(x.at[i]);
    __m256bh all;
    memcpy(&all, to, 32);
    return all;
}
inline __m512bh cvtne2ps_pbh(Of<float> a, Of<float> b) {
    return each<uint16_t>([&](int i) { return narrowed(i < 16 ? b.at[i] : a.at[i - 16]); }).as<__m512bh>();
}

// Lanes of 128 bits: element i of the lane of `to` is of(lane, i).
template <typename E, typename F>
inline __m512i lanewise(F of) {
    constexpr int n = 16 / sizeof(E);
    return each<E>([&](int i) { return of(i / n * n, i % n); });
}
template <typename E, int HIGH>
inline __m512i unpack(Of<E> a, Of<E> b) {
    constexpr int n = 16 / sizeof(E);
    return lanewise<E>([&](int lane, int i) { return (i % 2 ? b : a).at[lane + HIGH * n / 2 + i / 2]; });
}
template <typename To, typename From>
inline __m512i pack(Of<From> a, Of<From> b) {
    constexpr int n = 16 / sizeof(From);
    return lanewise<To>([&](int lane, int i) { return saturated<To, From>((i < n ? a : b).at[lane / 2 + i % n]); });
}
inline __m512i shuffle_epi8(Of<uint8_t> a, Of<uint8_t> b) {
    return lanewise<uint8_t>([&](int lane, int i) { return b.at[lane + i] & 0x80 ? 0 : a.at[lane + (b.at[lane + i] & 15)]; });
}
inline Of<uint32_t> shuffle_epi32(Of<uint32_t> a, int order) {
    return lanewise<uint32_t>([&](int lane, int i) { return a.at[lane + (order >> (2 * i) & 3)]; });
}
inline Of<uint32_t> shuffle_lanes(Of<uint32_t> a, Of<uint32_t> b, int order) {
    return each<uint32_t>([&](int i) { return (i < 8 ? a : b).at[4 * (order >> (2 * (i / 4)) & 3) + i % 4]; });
}
template <typename E> inline __m512i permute(Of<E> order, Of<E> a) { return each<E>([&](int i) { return a.at[order.at[i] % Of<E>::N]; }); }
inline __m512i permutex2var_epi16(Of<uint16_t> a, Of<uint16_t> order, Of<uint16_t> b) {
    return each<uint16_t>([&](int i) { return (order.at[i] & 32 ? b : a).at[order.at[i] & 31]; });
}
inline __m512i mask_set1_epi16(Of<uint16_t> x, uint32_t mask, short value) {
    return each<uint16_t>([&](int i) { return mask >> i & 1 ? (uint16_t)value : x.at[i]; });
}
inline __m512i broadcast_i32x4(__m128i x) {
    uint32_t from[4];
    memcpy(from, &x, 16);
    return each<uint32_t>([&](int i) { return from[i % 4]; });
}

template <typename To, typename From, typename V>
inline __m512i widen(V x) {
    From from[64 / sizeof(To)];
    static_assert(sizeof from == sizeof x, "as many elements");
    memcpy(from, &x, sizeof x);
    return each<To>([&](int i) { return from[i]; });
}
template <typename V, typename To>
inline V narrow(Of<uint32_t> x) {
    To to[16];
    for (int i = 0; i < 16; ++i) to[i] = (To)x.at[i];
    V all;
    memcpy(&all, to, sizeof all);
    return all;
}
inline __m512i cvtps_epi32(Of<float> x) {
    return each<int32_t>([&](int i) { return fabsf(x.at[i]) < 0x1p31f ? (int64_t)nearbyintf(x.at[i]) : INT32_MIN; });
}
inline __m512 cvtph_ps(__m256i x) {
    __m128i half[2];
    memcpy(half, &x, 32);
    __m256 to[2] = {_mm256_cvtph_ps(half[0]), _mm256_cvtph_ps(half[1])};
    __m512 all;
    memcpy(&all, to, 64);
    return all;
}
inline __m256i cvtps_ph(__m512 x) {
    __m256 from[2];
    memcpy(from, &x, 64);
    __m128i half[2] = {_mm256_cvtps_ph(from[0], 0), _mm256_cvtps_ph(from[1], 0)};
    __m256i all;
    memcpy(&all, half, 32);
    return all;
}

template <typename E, typename F>
inline E reduce(Of<E> x, F f) {
    E to = x.at[0];
    for (int i = 1; i < Of<E>::N; ++i) to = f(to, x.at[i]);
    return to;
}
inline int reduce_add_epi32(__m512i x) { return (int)reduce<uint32_t>(x, [](uint32_t a, uint32_t b) { return a + b; }); }
inline int reduce_max_epi32(__m512i x) { return reduce<int32_t>(x, [](int a, int b) { return a > b ? a : b; }); }
inline float reduce_max_ps(__m512 x) { return reduce<float>(x, [](float a, float b) { return a > b ? a : b; }); }
inline uint16_t test_epi32_mask(__m512i a, __m512i b) {
    Of<uint32_t> both = and_si512(a, b);
    uint16_t to = 0;
    for (int i = 0; i < 16; ++i) to |= (uint16_t)((both.at[i] != 0) << i);
    return to;
}
inline __m512 reduce_ps(Of<float> x) { return each<float>([&](int i) { return isinf(x.at[i]) ? 0 : x.at[i] - floorf(x.at[i]); }); }
inline __m512 scalef_ps(Of<float> a, Of<float> b) {
    return each<float>([&](int i) {
        const float power = floorf(b.at[i]);
        return power != power ? power : power < -400 ? 0 : ldexpf(a.at[i], power > 400 ? 400 : (int)power);
    });
}
inline __m512 rcp14_ps(Of<float> x) { return each<float>([&](int i) { return 1 / x.at[i]; }); }
template <typename V>
inline V part(const __m512& x, int index) {
    V to;
    memcpy(&to, (const char*)&x + index * sizeof to, sizeof to);
    return to;
}

}  // namespace plain

#define _mm512_loadu_si512 plain::loadu
#define _mm512_storeu_si512 plain::storeu
#define _mm512_store_si512 plain::storeu
#define _mm512_maskz_loadu_epi32 plain::maskz_loadu_epi32
#define _mm512_set1_epi8 plain::set1<int8_t>
#define _mm512_set1_epi16 plain::set1<int16_t>
#define _mm512_set1_epi32 plain::set1<int32_t>
#define _mm512_set_epi16 plain::set<int16_t>
#define _mm512_set_epi32 plain::set<int32_t>
#undef _mm512_set4_epi32
#define _mm512_set4_epi32 plain::set<int32_t>
#define _mm512_ternarylogic_epi32 plain::ternarylogic_epi32
#define _mm512_and_si512 plain::and_si512
#define _mm512_xor_si512 plain::xor_si512
#define _mm512_add_epi16 plain::add_epi16
#define _mm512_add_epi32 plain::add_epi32
#define _mm512_mullo_epi16 plain::mullo_epi16
#define _mm512_max_epi32 plain::max_epi32
#define _mm512_srli_epi16 plain::srli_epi16
#define _mm512_srai_epi16 plain::srai_epi16
#define _mm512_max_ps plain::max_ps
#define _mm512_fmadd_ps plain::fmadd_ps
#define _mm512_madd_epi16 plain::madd_epi16
#define _mm512_maddubs_epi16 plain::maddubs_epi16
#define _mm512_dpbusd_epi32 plain::dpbusd_epi32
#define _mm512_dpbf16_ps plain::dpbf16_ps
#define _mm512_cvtneps_pbh plain::cvtneps_pbh
#define _mm512_cvtne2ps_pbh plain::cvtne2ps_pbh
#define _mm512_unpacklo_epi8 plain::unpack<uint8_t, 0>
#define _mm512_unpackhi_epi8 plain::unpack<uint8_t, 1>
#define _mm512_unpacklo_epi16 plain::unpack<uint16_t, 0>
#define _mm512_unpackhi_epi16 plain::unpack<uint16_t, 1>
#define _mm512_unpacklo_epi32 plain::unpack<uint32_t, 0>
#define _mm512_unpackhi_epi32 plain::unpack<uint32_t, 1>
#define _mm512_unpacklo_epi64 plain::unpack<uint64_t, 0>
#define _mm512_unpackhi_epi64 plain::unpack<uint64_t, 1>
#define _mm512_packs_epi32 plain::pack<int16_t, int32_t>
#define _mm512_packs_epi16 plain::pack<int8_t, int16_t>
#define _mm512_packus_epi16 plain::pack<uint8_t, int16_t>
#define _mm512_shuffle_epi8 plain::shuffle_epi8
#define _mm512_shuffle_epi32(x, order) ((__m512i)plain::shuffle_epi32(x, order))
#define _mm512_permute_ps(x, order) ((__m512)plain::shuffle_epi32(x, order))
#define _mm512_shuffle_i32x4(a, b, order) ((__m512i)plain::shuffle_lanes(a, b, order))
#define _mm512_shuffle_i64x2(a, b, order) ((__m512i)plain::shuffle_lanes(a, b, order))
#define _mm512_shuffle_f32x4(a, b, order) ((__m512)plain::shuffle_lanes(a, b, order))
#define _mm512_permutexvar_epi16 plain::permute<uint16_t>
#define _mm512_permutexvar_epi32 plain::permute<uint32_t>
#define _mm512_permutex2var_epi16 plain::permutex2var_epi16
#define _mm512_mask_set1_epi16 plain::mask_set1_epi16
#define _mm512_broadcast_i32x4 plain::broadcast_i32x4
#define _mm512_cvtepu8_epi32 plain::widen<int32_t, uint8_t>
#define _mm512_cvtepi8_epi32 plain::widen<int32_t, int8_t>
#define _mm512_cvtepu16_epi32 plain::widen<int32_t, uint16_t>
#define _mm512_cvtepi32_epi8 plain::narrow<__m128i, uint8_t>
#define _mm512_cvtepi32_epi16 plain::narrow<__m256i, uint16_t>
#define _mm512_cvtps_epi32 plain::cvtps_epi32
#define _mm512_cvtph_ps plain::cvtph_ps
#define _mm512_cvtps_ph(x, mode) plain::cvtps_ph(x)
#define _mm512_reduce_add_epi32 plain::reduce_add_epi32
#define _mm512_reduce_max_epi32 plain::reduce_max_epi32
#define _mm512_reduce_max_ps plain::reduce_max_ps
#define _mm512_test_epi32_mask plain::test_epi32_mask
#define _mm512_reduce_ps(x, mode) plain::reduce_ps(x)
#define _mm512_scalef_ps plain::scalef_ps
#define _mm512_rcp14_ps plain::rcp14_ps
#define _mm512_castps512_ps128(x) plain::part<__m128>(x, 0)
#define _mm512_castps512_ps256(x) plain::part<__m256>(x, 0)
#define _mm512_extractf32x8_ps(x, index) plain::part<__m256>(x, index)
