// What a packed linear layer multiplies: its inputs, rounded as the kind of weight asks.
//
// A prepared row is
//   uint32 [words]        pairs of bf16, or of whole numbers where FIXES_PAIRS, or else two floats for each where WIDENS_PAIRS;
//                         or four signed bytes, of INT8 and Q8 as ByteDots wants them; of Q4_WHOLE the upper digits of all
//                         inputs, then the lower ones
//   GroupMeta [scales]    for all kinds but BF16; of ROTATED and Q4_WHOLE one. float [scales] for BF16 where FIXES_PAIRS
//   Late [words]          of ROTATED, where RotatedDots puts inputs off; as many as GroupMeta says are there
// Bytes are x / scale to the nearest, where a group of 32 inputs shares a scale, max |x| / 127; two groups do for INT8, whose
// weights have no scales of groups: that costs nothing that shows, and half of the scaling. Scales of whole rows would be
// cheaper still, and lose far more: a few inputs of a token are many times larger than the others. Of ROTATED they do for
// the whole row, as they are of its Hadamard transform, which has no such inputs. Of Q4_WHOLE they do as inputs are rounded to
// 16 bits, which are two digits: 256 * upper + lower. Whatever is not finite makes the scale
// NaN, and with it every output of the row.
#pragma once

#include "amx.h"
#include "byte_dots.h"
#include "fixed.h"
#include "hadamard.h"

namespace {

constexpr int GROUP = 32;    // inputs that share a scale of a weight

// Groups whose inputs share a scale.
constexpr int groups_together(int kind) { return kind == LINEAR_INT8 ? 2 : 1; }

// What belongs to the bytes of inputs that share a scale.
struct GroupMeta {
    float scale;
    float scaled_sum;      // scale * sum of the bytes
    int32_t start;         // where the sums of products begin: -(the weight's zero) * sum of the bytes, or what ByteDots says
    union {
        int32_t start_low;     // the same for the first 16 bytes, where a group is alone; of Q4_WHOLE for the lower digits
        int32_t n_late;        // of ROTATED: words that are multiplied after all others
    };
};
constexpr int META = sizeof(GroupMeta) / 4;

// The integer that stands for 0 in a kind of weight; 0 where it has minima instead.
INLINE int zero_of(int kind) {
    switch (kind) {
        case LINEAR_INT8:
        case LINEAR_Q8:
        case LINEAR_ROTATED:
        case LINEAR_Q4_WHOLE: return 128;
        case LINEAR_Q4: return 8;
        case LINEAR_Q6_K: return 32;
        default: return 0;
    }
}

INLINE int64_t n_groups_of(const PackedLinear& l) { return (l.n_in + GROUP - 1) / GROUP; }

// Inputs that rows of Q4_WHOLE are filled up to whole ones of.
constexpr int WHOLE_INPUTS = 64;

// Words of the values of a row, of one of its digits if there are two, as they are beside an output's weights.
INLINE int64_t input_words(const PackedLinear& l) {
    switch (l.kind) {
        case LINEAR_BF16: return (l.n_in + 1) / 2;
        case LINEAR_ROTATED: return ceil_to(l.n_in, HADAMARD) / 4;
        case LINEAR_Q4_WHOLE: return ceil_to(l.n_in, WHOLE_INPUTS) / 4;
        default: return n_groups_of(l) * (GROUP / 4);
    }
}

INLINE int64_t digits_of(const PackedLinear& l) { return l.kind == LINEAR_Q4_WHOLE ? 2 : 1; }

// Whether weights have eight bits, all of which are used, and inputs the scales of their groups.
INLINE bool has_whole_bytes(int kind) { return kind == LINEAR_INT8 || kind == LINEAR_Q8; }

// Words of values in a prepared row.
INLINE int64_t row_words(const PackedLinear& l) {
    if (has_whole_bytes(l.kind)) return input_words(l) * ByteDots::WORDS;
    if (l.kind == LINEAR_BF16) return input_words(l) * (WIDENS_PAIRS && !FIXES_PAIRS ? 2 : 1);
    return input_words(l) * digits_of(l);
}

// Words of what follows the values of a prepared row.
INLINE int64_t scale_words(const PackedLinear& l) {
    switch (l.kind) {
        case LINEAR_BF16: return FIXES_PAIRS ? fixed_groups(l.n_in) : 0;
        case LINEAR_ROTATED: return META + (PUTS_OFF ? sizeof(Late) / 4 * input_words(l) : 0);
        case LINEAR_Q4_WHOLE: return META;
        default: return ceil_div(n_groups_of(l), groups_together(l.kind)) * META;
    }
}

// Rows of inputs as the kernels read them.
struct PreparedRows {
    const uint32_t* at;
    int64_t stride;    // words from one row to the next

    INLINE const uint32_t* row(int64_t i) const { return at + i * stride; }
};

// Words from one prepared row to the next: whole lines, and never a multiple of 4096 bytes, which would put all rows
// into the same few lines of a cache; two lines more leave each set of a first-level cache 8 of 32 rows' lines.
INLINE int64_t prepared_stride(const PackedLinear& l) {
    int64_t stride = ceil_to(row_words(l) + scale_words(l), 16);
    return stride % 1024 ? stride : stride + 32;
}

INLINE int64_t prepared_bytes(const PackedLinear& l, int64_t rows) { return prepared_stride(l) * 4 * rows; }

// What bits of a magnitude stand for; NaN if that is not finite.
INLINE float finite_or_nan(int32_t bits) {
    if (bits >= 0x7f800000) return __builtin_nanf("");
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// max |x|, or NaN if any of them is not finite. The bits of magnitudes have their order, and those of infinities and
// NaNs come after all others.
template <typename T>
INLINE float largest(const T* x, int64_t n) {
    vi best = vi{};
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        vi bits = (vi)load(x + i) & 0x7fffffff;
        best = bits > best ? bits : best;
    }
    int32_t top = max_lane(best);
    for (; i < n; ++i) {
        float value = widen(x[i]);
        int32_t bits;
        memcpy(&bits, &value, sizeof bits);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    return finite_or_nan(top);
}

INLINE float largest(const bf16* x, int64_t n) {
    constexpr int64_t N = 2 * WIDTH;
    typedef int16_t Magnitudes __attribute__((vector_size(2 * N)));
    Magnitudes best = {};
    int64_t i = 0;
    for (; i + N <= n; i += N) {
        Magnitudes bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fff;
        best = bits > best ? bits : best;
    }
    const vi first = (vi)best & 0xffff, second = (vi)best >> 16;
    int32_t top = max_lane(first > second ? first : second);
    for (; i < n; ++i) top = (x[i] & 0x7fff) > top ? x[i] & 0x7fff : top;
    return finite_or_nan(top << 16);
}

// x[n] -> bytes, padded with zeros up to `padded`; returns their sum.
template <typename T>
INLINE int32_t to_bytes(const T* x, int64_t n, int64_t padded, float inverse, int8_t* bytes) {
    const vf magic = splat(12582912.0f);    // 1.5 * 2^23: adding it rounds to an integer
    if (inverse == 0) {
        memset(bytes, 0, padded);
        return 0;
    }
    vi total = vi{};
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        vi q = (vi)(load(x + i) * splat(inverse) + magic) - 0x4b400000;
        total += q;
        vb b = lowest_bytes(q);
        memcpy(bytes + i, &b, sizeof b);
    }
    int32_t result = sum(total);
    for (; i < n; ++i) {
        bytes[i] = (int8_t)__builtin_rintf(widen(x[i]) * inverse);
        result += bytes[i];
    }
    for (; i < padded; ++i) bytes[i] = 0;
    return result;
}

// The scale for values up to `top` as integers up to `most`, and what x is multiplied with to become these: 0 where all of
// them are zero.
INLINE float scale_of(float top, float& inverse, float most = 127.0f) {
    inverse = top > 0 ? most / top : 0;
    // Tiny values whose inverse overflows are as good as zero.
    if (!(inverse < __builtin_inff())) inverse = 0;
    return top / most;
}

INLINE void copy_bf16(const bf16* x, int64_t n_in, bf16* to) { memcpy(to, x, sizeof(bf16) * n_in); }
INLINE void copy_bf16(const float* x, int64_t n_in, bf16* to) {
    for (int64_t i = 0; i < n_in; ++i) to[i] = narrow_bf16(x[i]);
}

// x[n_in] rounded to bf16, as floats.
template <typename T>
INLINE void widen_bf16(const T* x, int64_t n_in, float* to) {
    int64_t i = 0;
    for (; i + WIDTH <= n_in; i += WIDTH) storef(to + i, rounded(load(x + i), (const bf16*)nullptr));
    for (; i < n_in; ++i) to[i] = rounded(widen(x[i]), (const bf16*)nullptr);
}

template <typename T>
INLINE void prepare_bf16(const T* x, int64_t n_in, uint32_t* to) {
    if constexpr (WIDENS_PAIRS) {
        widen_bf16(x, n_in, (float*)to);
        if (n_in % 2) ((float*)to)[n_in] = 0;
    } else {
        copy_bf16(x, n_in, (bf16*)to);
        if (n_in % 2) ((bf16*)to)[n_in] = 0;
    }
}

template <typename T>
INLINE void prepare_group(const T* x, int n, int zero, int8_t* bytes, GroupMeta* meta) {
    int half = n < 16 ? n : 16;
    float inverse, scale = scale_of(largest(x, n), inverse);
    int32_t low = to_bytes(x, half, 16, inverse, bytes);
    int32_t all = low + to_bytes(x + half, n - half, (n + GROUP - 1) / GROUP * GROUP - 16, inverse, bytes + 16);
    *meta = {scale, scale * (float)all, -zero * all, -zero * low};
}

#if defined(__AVX512F__)
constexpr int TOGETHER = 4;

// What all lanes of each of four vectors come to, side by side in every 16 bytes of the result.
template <typename Op>
INLINE __m512i fold(const __m512i (&x)[TOGETHER], Op op) {
    __m512i a = op(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    __m512i b = op(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    __m512i all = op(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    all = op(all, _mm512_shuffle_i64x2(all, all, 0x4e));
    return op(all, _mm512_shuffle_i64x2(all, all, 0xb1));
}

// The first of every four lanes, the second, ...
template <int G> INLINE __m512 nth_of_four(__m512 x) { return _mm512_permute_ps(x, G * 0x55); }

// Bytes of the G-th of four groups, and sums to be of their halves.
template <int G>
INLINE void group_bytes(const vf (&x)[2 * TOGETHER], __m512 inverse, int8_t* bytes, __m512i (&low)[TOGETHER],
                        __m512i (&high)[TOGETHER]) {
    const vf factor = (vf)nth_of_four<G>(inverse), magic = splat(12582912.0f);
    const vi used = factor != vf{};
    __m512i* sums[] = {low + G, high + G};
    for (int half = 0; half < 2; ++half) {
        vi q = ((vi)(x[2 * G + half] * factor + magic) - 0x4b400000) & used;
        *sums[half] = (__m512i)q;
        _mm_storeu_si128((__m128i*)(bytes + (2 * G + half) * 16), _mm512_cvtepi32_epi8((__m512i)q));
    }
}

// Every lane of a pair := op of both.
template <typename Op>
INLINE vi of_pairs(vi x, Op op) { return (vi)op((__m512i)x, _mm512_shuffle_epi32((__m512i)x, (_MM_PERM_ENUM)0xb1)); }

// Four whole groups, with the bits of prepare_group(); N of them share a scale.
template <int N, typename T>
INLINE void prepare_together(const T* from, int zero, int8_t* bytes, GroupMeta* meta) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const auto larger = [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); };
    const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
    __m512i most[TOGETHER], low[TOGETHER], high[TOGETHER];
    vf x[2 * TOGETHER];
    for (int i = 0; i < 2 * TOGETHER; ++i) x[i] = load(from + i * 16);
    for (int g = 0; g < TOGETHER; ++g)
        most[g] = _mm512_max_epi32(_mm512_and_si512((__m512i)x[2 * g], magnitude),
                                   _mm512_and_si512((__m512i)x[2 * g + 1], magnitude));
    vi bits = (vi)fold(most, larger);
    if (N == 2) bits = of_pairs(bits, larger);
    const vf top = select(bits >= 0x7f800000, splat(__builtin_nanf("")), (vf)bits), inverse = splat(127.0f) / top;
    const __m512 used = (__m512)(vf)((vi)inverse & (top > vf{}) & (inverse < splat(__builtin_inff())));
    group_bytes<0>(x, used, bytes, low, high);
    group_bytes<1>(x, used, bytes, low, high);
    group_bytes<2>(x, used, bytes, low, high);
    group_bytes<3>(x, used, bytes, low, high);
    const vi lows = (vi)fold(low, add);
    vi all = lows + (vi)fold(high, add);
    if (N == 2) all = of_pairs(all, add);
    const vf scale = top / splat(127.0f), scaled = scale * to_float(all);
    __m128 columns[] = {_mm512_castps512_ps128((__m512)scale), _mm512_castps512_ps128((__m512)scaled),
                        _mm512_castps512_ps128((__m512)(all * -zero)), _mm512_castps512_ps128((__m512)(lows * -zero))};
    _MM_TRANSPOSE4_PS(columns[0], columns[1], columns[2], columns[3]);
    // One by one: a copy of all would load in one piece what was stored in four, and wait until memory has them.
    for (int g = 0; g < TOGETHER / N; ++g) _mm_storeu_ps((float*)(meta + g), columns[N * g]);
}
#endif

// N groups share a scale.
template <int N, typename T>
INLINE void prepare_groups(const T* x, int64_t n_in, int zero, int8_t* bytes, GroupMeta* meta) {
    int64_t g = 0;
#if defined(__AVX512F__)
    // The last four may be some that have been prepared already.
    for (const int64_t whole = n_in / GROUP / N * N; g < whole && whole >= TOGETHER; g += TOGETHER) {
        if (g > whole - TOGETHER) g = whole - TOGETHER;
        prepare_together<N>(x + g * GROUP, zero, bytes + g * GROUP, meta + g / N);
    }
#endif
    for (; g * GROUP < n_in; g += N) {
        int64_t left = n_in - g * GROUP;
        prepare_group(x + g * GROUP, left < N * GROUP ? (int)left : N * GROUP, zero, bytes + g * GROUP, meta + g / N);
    }
}

// The Hadamard transform of a row, with one scale.
template <typename T>
void prepare_rotated(const T* x, int64_t n_in, int64_t n, int zero, int8_t* bytes, GroupMeta* meta) {
    float* row = (float*)scratch(SCRATCH_ROW, n * 4);
    if (!row) __builtin_trap();
    vi most = vi{};
    for (int64_t i = 0; i < n; i += HADAMARD) {
        HadamardBlock block;
        hadamard(x + i, n_in - i, 1.0f, block);
        most = larger_magnitudes(most, block);
        for (int v = 0; v < HADAMARD_VECS; ++v) storef(row + i + v * WIDTH, block[v]);
    }
    float inverse, scale = scale_of(finite_or_nan(max_lane(most)), inverse);
    const int32_t all = to_bytes(row, n, n, inverse, bytes);
    *meta = {scale, scale * (float)all, -zero * all, {RotatedDots::put_off((uint32_t*)bytes, n / 4, (Late*)(meta + 1))}};
}

#if defined(BOUGH_AMX)
// Both digits of integers, side by side as they are in a row, and what they add up to.
struct Digits16 {
    int8_t *upper, *lower;
    vi upper_sum = vi{}, lower_sum = vi{};

    // Those of x[WHOLE_INPUTS] * inverse, at `at`. Packing takes four pieces of four values from each vector in turn.
    template <typename T>
    INLINE void put(const T* x, vf inverse, int64_t at) {
        const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        const auto nearest = [&](int i) { return _mm512_cvtps_epi32((__m512)(load(x + i * WIDTH) * inverse)); };
        const __m512i a = _mm512_packs_epi32(nearest(0), nearest(1)), b = _mm512_packs_epi32(nearest(2), nearest(3));
        const __m512i half = _mm512_set1_epi16(128), low = _mm512_set1_epi16(255), ones = _mm512_set1_epi8(1);
        const auto upper_of = [&](__m512i q) { return _mm512_srai_epi16(_mm512_add_epi16(q, half), 8); };
        const __m512i high_bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(upper_of(a), upper_of(b)));
        const __m512i low_bytes = _mm512_permutexvar_epi32(
            order, _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
        _mm512_storeu_si512(upper + at, high_bytes);
        _mm512_storeu_si512(lower + at, low_bytes);
        upper_sum = (vi)_mm512_dpbusd_epi32((__m512i)upper_sum, ones, high_bytes);
        lower_sum = (vi)_mm512_dpbusd_epi32((__m512i)lower_sum, ones, low_bytes);
    }
};

// A row as two digits, with one scale.
template <typename T>
void prepare_digits(const T* x, int64_t n_in, int64_t words, int zero, uint32_t* to) {
    constexpr float MOST = 127 * 256 + 127;
    float inverse, scale = scale_of(largest(x, n_in), inverse, MOST);
    Digits16 digits = {(int8_t*)to, (int8_t*)(to + words)};
    if (inverse == 0) {     // what is not finite is not to be multiplied
        memset(to, 0, 8 * words);
        n_in = 0;
    }
    int64_t i = 0;
    for (; i + WHOLE_INPUTS <= n_in; i += WHOLE_INPUTS) digits.put(x + i, splat(inverse), i);
    if (i < n_in) {
        T padded[WHOLE_INPUTS] = {};
        memcpy(padded, x + i, sizeof(T) * (n_in - i));
        digits.put(padded, splat(inverse), i);
    }
    *(GroupMeta*)(to + 2 * words) = {scale, 0, -zero * sum(digits.upper_sum), -zero * sum(digits.lower_sum)};
}
#endif

// Whether n rows of x can be read as they are. Tiles read many rows again and again from the first-level cache, where those
// that lie a multiple of 4096 bytes apart take each other's places.
INLINE bool is_prepared(const PackedLinear& l, const bf16*, int64_t x_stride, [[maybe_unused]] int64_t n) {
#if defined(BOUGH_AMX)
    if (n > AMX_ROWS && x_stride % 2048 == 0) return false;
#endif
    return !WIDENS_PAIRS && l.kind == LINEAR_BF16 && l.n_in % 2 == 0 && x_stride % 2 == 0;
}
INLINE bool is_prepared(const PackedLinear&, const float*, int64_t, int64_t) { return false; }

#if defined(BOUGH_HOLDS_DOTS)
// Makes the bytes in the second half of a row what ByteDots multiplies, which takes both halves. `scaled`: words that share a
// scale. It never writes further than it has read.
INLINE void prepare_dots(uint32_t* row, int64_t words, int64_t scaled, GroupMeta* meta) {
    for (int64_t i = 0; i < words; ++meta) {
        meta->start = 0;
        for (const int64_t end = i + scaled < words ? i + scaled : words; i < end; i += 4)
            meta->start += ByteDots::prepare(row + words + i, row + 2 * i);
    }
}
#else
INLINE void prepare_dots(uint32_t*, int64_t, int64_t, GroupMeta*) {}
#endif

// Prepares rows x[0 .. n) into `to`, prepared_stride(l) words apart, for weights of l's kind and inputs.
template <typename T>
void prepare_rows(const PackedLinear& l, const T* x, int64_t x_stride, int64_t n, uint32_t* to) {
    const int64_t words = input_words(l), in_row = row_words(l), stride = prepared_stride(l);
    const int zero = zero_of(l.kind), together = groups_together(l.kind);
    const bool whole = has_whole_bytes(l.kind);
    for (int64_t row = 0; row < n; ++row, x += x_stride, to += stride) {
        int8_t* bytes = (int8_t*)(whole ? to + in_row - words : to);
        GroupMeta* meta = (GroupMeta*)(to + in_row);
        if (l.kind == LINEAR_BF16 && FIXES_PAIRS)
            fix_row(x, l.n_in, to, (float*)(to + in_row));
        else if (l.kind == LINEAR_BF16)
            prepare_bf16(x, l.n_in, to);
        else if (l.kind == LINEAR_ROTATED)
            prepare_rotated(x, l.n_in, 4 * words, zero, bytes, meta);
#if defined(BOUGH_AMX)
        else if (l.kind == LINEAR_Q4_WHOLE)
            prepare_digits(x, l.n_in, words, zero, to);
#endif
        else if (together == 2)
            prepare_groups<2>(x, l.n_in, zero, bytes, meta);
        else
            prepare_groups<1>(x, l.n_in, zero, bytes, meta);
        if (whole) prepare_dots(to, words, together * (GROUP / 4), meta);
    }
}

}  // namespace
