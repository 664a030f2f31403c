// What a packed linear layer multiplies: its inputs, rounded as the kind of weight asks.
//
// A prepared row is
//   uint32 [words]        pairs of bf16, or four signed bytes
//   GroupMeta [groups]    for all kinds but BF16
// Bytes are x / scale to the nearest, where 32 inputs share a scale, max |x| / 127. Scales of whole rows would be
// cheaper, and lose far more: a few inputs of a token are many times larger than the others. Whatever is not finite
// makes the scale NaN, and with it every output of the row.
#pragma once

#include "vec.h"

namespace {

constexpr int GROUP = 32;    // inputs that share a scale

INLINE int64_t ceil_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// What belongs to the bytes of 32 inputs.
struct GroupMeta {
    float scale;
    float scaled_sum;      // scale * sum of the bytes
    int32_t start;         // -(the weight's zero) * sum of the bytes: where the sums of products begin
    int32_t start_low;     // the same for the first 16 bytes
};
constexpr int META = sizeof(GroupMeta) / 4;

// The integer that stands for 0 in a kind of weight; 0 where it has minima instead.
INLINE int zero_of(int kind) {
    switch (kind) {
        case LINEAR_INT8:
        case LINEAR_Q8: return 128;
        case LINEAR_Q4: return 8;
        case LINEAR_Q6_K: return 32;
        default: return 0;
    }
}

INLINE int64_t n_groups_of(const PackedLinear& l) { return (l.n_in + GROUP - 1) / GROUP; }

// Words of values in a prepared row.
INLINE int64_t input_words(const PackedLinear& l) {
    return l.kind == LINEAR_BF16 ? (l.n_in + 1) / 2 : n_groups_of(l) * (GROUP / 4);
}

// Rows of inputs as the kernels read them.
struct PreparedRows {
    const uint32_t* at;
    int64_t stride;    // words from one row to the next

    INLINE const uint32_t* row(int64_t i) const { return at + i * stride; }
};

// Words from one prepared row to the next: whole lines, and never a multiple of 4096 bytes, which would put all rows
// into the same few lines of a cache.
INLINE int64_t prepared_stride(const PackedLinear& l) {
    int64_t meta = l.kind == LINEAR_BF16 ? 0 : n_groups_of(l) * META;
    int64_t stride = ceil_to(input_words(l) + meta, 16);
    return stride % 1024 ? stride : stride + 16;
}

INLINE int64_t prepared_bytes(const PackedLinear& l, int64_t rows) { return prepared_stride(l) * 4 * rows; }

INLINE int32_t sum(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t total = 0;
    for (int lane = 0; lane < WIDTH; ++lane) total += x[lane];
    return total;
#endif
}

INLINE int32_t max_lane(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t best = x[0];
    for (int lane = 1; lane < WIDTH; ++lane) best = x[lane] > best ? x[lane] : best;
    return best;
#endif
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
    if (top >= 0x7f800000) return __builtin_nanf("");
    float value;
    memcpy(&value, &top, sizeof value);
    return value;
}

// x[n] -> bytes, padded with zeros up to `padded`; returns their sum.
template <typename T>
INLINE int32_t to_bytes(const T* x, int64_t n, int64_t padded, float inverse, int8_t* bytes) {
    typedef int8_t vb __attribute__((vector_size(BOUGH_WIDTH)));
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
        vb b = __builtin_convertvector(q, vb);
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

// The scale for values up to `top`, and what x is multiplied with to become bytes: 0 where all of them are zero.
INLINE float scale_of(float top, float& inverse) {
    inverse = top > 0 ? 127.0f / top : 0;
    // Tiny values whose inverse overflows are as good as zero.
    if (!(inverse < __builtin_inff())) inverse = 0;
    return top / 127.0f;
}

template <typename T>
INLINE void prepare_bf16(const T* x, int64_t n_in, uint32_t* to) {
    bf16* words = (bf16*)to;
    for (int64_t i = 0; i < n_in; ++i) words[i] = narrow_bf16(widen(x[i]));
    if (n_in % 2) words[n_in] = 0;
}

template <typename T>
INLINE void prepare_groups(const T* x, int64_t n_in, int64_t words, int zero, uint32_t* to) {
    int8_t* bytes = (int8_t*)to;
    GroupMeta* meta = (GroupMeta*)(to + words);
    for (int64_t first = 0; first < n_in; first += GROUP, ++meta) {
        int n = n_in - first < GROUP ? (int)(n_in - first) : GROUP, half = n < 16 ? n : 16;
        float inverse, scale = scale_of(largest(x + first, n), inverse);
        int32_t low = to_bytes(x + first, half, 16, inverse, bytes + first);
        int32_t all = low + to_bytes(x + first + half, n - half, 16, inverse, bytes + first + 16);
        *meta = {scale, scale * (float)all, -zero * all, -zero * low};
    }
}

// Whether rows of x can be read as they are.
INLINE bool is_prepared(const PackedLinear& l, const bf16*, int64_t x_stride) {
    return l.kind == LINEAR_BF16 && l.n_in % 2 == 0 && x_stride % 2 == 0;
}
INLINE bool is_prepared(const PackedLinear&, const float*, int64_t) { return false; }

// Prepares rows x[0 .. n) into `to`, prepared_stride(l) words apart, for weights of l's kind and inputs.
template <typename T>
void prepare_rows(const PackedLinear& l, const T* x, int64_t x_stride, int64_t n, uint32_t* to) {
    const int64_t words = input_words(l), stride = prepared_stride(l);
    for (int64_t row = 0; row < n; ++row, x += x_stride, to += stride) {
        if (l.kind == LINEAR_BF16)
            prepare_bf16(x, l.n_in, to);
        else
            prepare_groups(x, l.n_in, words, zero_of(l.kind), to);
    }
}

}  // namespace
