// What a packed linear layer multiplies: its inputs, rounded as the kind of weight asks and laid out for the kernels.
//
// Rows come in blocks of ROWS (the last one has what is left). A block is
//   uint32 [words][rows]      pairs of bf16, or four signed bytes
//   float  [meta][rows]       INT8: scale, scale * sum of the bytes. Kinds with groups, for each 32 inputs: scale, and
//                             scale * sum of the bytes: of all 32, of the first and of the second 16.
// Bytes are x / scale to the nearest, scale = max |x| / 127 over the row (INT8) or over 32 inputs. Whatever is not
// finite makes the scale NaN, and with it every output of the row.
#pragma once

#include "vec.h"

namespace {

constexpr int LINEAR_ROWS = WIDTH == 16 ? 6 : 4;    // rows of a block
constexpr int GROUP = 32;                           // inputs that share a scale

INLINE int64_t ceil_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

struct Prepared {
    int64_t words;     // per row
    int64_t meta;      // floats per row
    int64_t per_row() const { return words + meta; }
};

INLINE Prepared prepared_shape(const PackedLinear& l) {
    if (l.kind == LINEAR_BF16) return {(l.n_in + 1) / 2, 0};
    if (l.kind == LINEAR_INT8) return {(l.n_in + 3) / 4, 2};
    int64_t groups = ceil_to(l.n_in, GROUP) / GROUP;
    return {groups * GROUP / 4, groups * 4};
}

// Bytes that `rows` prepared rows take.
INLINE int64_t prepared_bytes(const PackedLinear& l, int64_t rows) { return prepared_shape(l).per_row() * 4 * rows; }

// max |x|, or NaN if any of them is not finite.
template <typename T>
INLINE float largest(const T* x, int64_t n) {
    vf best = vf{};
    vi bad = vi{};
    const vf infinity = splat(__builtin_inff());
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        vf value = (vf)((vu)load(x + i) & 0x7fffffffu);
        bad |= ~(value < infinity);
        best = vmax(value, best);
    }
    float top = max_lane(best);
    int broken = 0;
    for (int lane = 0; lane < WIDTH; ++lane) broken |= bad[lane];
    for (; i < n; ++i) {
        float value = __builtin_fabsf(widen(x[i]));
        broken |= !(value < __builtin_inff());
        top = value > top ? value : top;
    }
    return broken ? __builtin_nanf("") : top;
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
    int32_t sum = 0;
    for (int lane = 0; lane < WIDTH; ++lane) sum += total[lane];
    for (; i < n; ++i) {
        bytes[i] = (int8_t)__builtin_rintf(widen(x[i]) * inverse);
        sum += bytes[i];
    }
    for (; i < padded; ++i) bytes[i] = 0;
    return sum;
}

// The scale for values up to `top`, and what x is multiplied with to become bytes: 0 where all of them are zero.
INLINE float scale_of(float top, float& inverse) {
    inverse = top > 0 ? 127.0f / top : 0;
    // Tiny values whose inverse overflows are as good as zero.
    if (!(inverse < __builtin_inff())) inverse = 0;
    return top / 127.0f;
}

template <typename T>
INLINE void prepare_bf16(const T* x, int64_t n_in, uint32_t* to, int rows) {
    int64_t i = 0;
    for (; i + 2 <= n_in; i += 2) {
        uint32_t low = narrow_bf16(widen(x[i])), high = narrow_bf16(widen(x[i + 1]));
        to[i / 2 * rows] = low | (high << 16);
    }
    if (i < n_in) to[i / 2 * rows] = narrow_bf16(widen(x[i]));
}

INLINE void prepare_bf16(const bf16* x, int64_t n_in, uint32_t* to, int rows) {
    int64_t i = 0;
    for (; i + 2 <= n_in; i += 2) memcpy(to + i / 2 * rows, x + i, 4);
    if (i < n_in) to[i / 2 * rows] = x[i];
}

template <typename T>
INLINE void prepare_int8(const T* x, int64_t n_in, uint32_t* to, float* meta, int rows) {
    constexpr int64_t PIECE = 512;
    float inverse, scale = scale_of(largest(x, n_in), inverse);
    int32_t sum = 0;
    for (int64_t first = 0; first < n_in; first += PIECE) {
        int8_t bytes[PIECE];
        int64_t n = n_in - first < PIECE ? n_in - first : PIECE, words = (n + 3) / 4;
        sum += to_bytes(x + first, n, words * 4, inverse, bytes);
        for (int64_t w = 0; w < words; ++w) memcpy(to + (first / 4 + w) * rows, bytes + 4 * w, 4);
    }
    meta[0] = scale;
    meta[rows] = scale * (float)sum;
}

template <typename T>
INLINE void prepare_groups(const T* x, int64_t n_in, uint32_t* to, float* meta, int rows) {
    for (int64_t first = 0; first < n_in; first += GROUP) {
        int8_t bytes[GROUP];
        int n = n_in - first < GROUP ? (int)(n_in - first) : GROUP, half = n < 16 ? n : 16;
        float inverse, scale = scale_of(largest(x + first, n), inverse);
        int32_t low = to_bytes(x + first, half, 16, inverse, bytes);
        int32_t high = to_bytes(x + first + half, n - half, 16, inverse, bytes + 16);
        for (int w = 0; w < GROUP / 4; ++w) memcpy(to + (first / 4 + w) * rows, bytes + 4 * w, 4);
        float* m = meta + first / GROUP * 4 * rows;
        m[0] = scale;
        m[rows] = scale * (float)(low + high);
        m[2 * rows] = scale * (float)low;
        m[3 * rows] = scale * (float)high;
    }
}

// Prepares rows [first, first + n) of `total`, which belong to one block or begin one; x is the first of them.
template <typename T>
void prepare_rows(const PackedLinear& l, const T* x, int64_t x_stride, int64_t first, int64_t n, int64_t total,
                  uint32_t* prepared) {
    const Prepared shape = prepared_shape(l);
    for (int64_t row = first; row < first + n; ++row, x += x_stride) {
        int64_t block = row / LINEAR_ROWS * LINEAR_ROWS;
        int rows = (int)(total - block < LINEAR_ROWS ? total - block : LINEAR_ROWS);
        uint32_t* to = prepared + block * shape.per_row() + (row - block);
        float* meta = (float*)(to + shape.words * rows);
        if (l.kind == LINEAR_BF16)
            prepare_bf16(x, l.n_in, to, rows);
        else if (l.kind == LINEAR_INT8)
            prepare_int8(x, l.n_in, to, meta, rows);
        else
            prepare_groups(x, l.n_in, to, meta, rows);
    }
}

}  // namespace
