// Small dense products of a few rows with one tile of 64 columns.
//
// Every output element is one chain of multiply-adds in rising order of the inner index. The blocking decides
// only which elements share a register block, never the order of a sum: an element has the same bits whatever
// the other rows are. The exactness of float32 across batches and chunks rests on this.
#pragma once

#include "vec.h"

namespace {

constexpr int TILE = 64;                           // columns of a tile: keys of a block, outputs of a panel
constexpr int BLOCK_ROWS = WIDTH == 16 ? 6 : 4;    // rows of a register block
constexpr int BLOCK_VECS = WIDTH == 16 ? 4 : 2;    // vectors of columns of a register block

// Cells of 64 keys that are needed soon. Their lines are asked for a few per step of an inner loop: in one burst they
// would fill the processor's miss buffers and stall the arithmetic that they are meant to run beside.
struct Ahead {
    const void* const* cells;   // [64], or null
    int bytes;                  // of a cell

    INLINE void touch(int step, int n_steps) const {
        if (!cells) return;
        int each = (TILE + n_steps - 1) / n_steps;
        int end = (step + 1) * each < TILE ? (step + 1) * each : TILE;
        for (int i = step * each; i < end; ++i)
            for (int at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)cells[i] + at);
    }
};

// acc + column * a, with a float column and multiplier ...
INLINE vf step(vf acc, const float* column, float a) { return fma(loadf(column), splat(a), acc); }
// ... and with a column of bf16 pairs and one pair as the multiplier.
INLINE vf step(vf acc, const uint32_t* column, uint32_t a) { return dot_pairs(acc, loadu(column), a); }

template <int R, typename E>
INLINE void product_block(const E* a, int64_t a_stride, const E* tile, int inner, float* out, int64_t out_stride,
                          const Ahead& ahead) {
    vf acc[R][BLOCK_VECS];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < BLOCK_VECS; ++j) acc[r][j] = vf{};
    for (int i = 0; i < inner; ++i) {
        ahead.touch(i, inner);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < BLOCK_VECS; ++j)
                acc[r][j] = step(acc[r][j], tile + (int64_t)i * TILE + j * WIDTH, a[r * a_stride + i]);
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < BLOCK_VECS; ++j) storef(out + r * out_stride + j * WIDTH, acc[r][j]);
}

// out[rows, 64] = a[rows, inner] @ tile[inner, 64]. E is float, or uint32_t for pairs of bf16.
template <typename E>
void product(const E* a, int64_t a_stride, const E* tile, int rows, int inner, float* out, int64_t out_stride,
             Ahead ahead = {nullptr, 0}) {
    for (int column = 0; column < TILE; column += BLOCK_VECS * WIDTH) {
        const E* t = tile + column;
        for (int r = 0; r < rows; r += BLOCK_ROWS) {
            const E* from = a + r * a_stride;
            float* to = out + r * out_stride + column;
            switch (rows - r) {
                case 1: product_block<1>(from, a_stride, t, inner, to, out_stride, ahead); break;
                case 2: product_block<2>(from, a_stride, t, inner, to, out_stride, ahead); break;
                case 3: product_block<3>(from, a_stride, t, inner, to, out_stride, ahead); break;
#if BOUGH_WIDTH == 16
                case 4: product_block<4>(from, a_stride, t, inner, to, out_stride, ahead); break;
                case 5: product_block<5>(from, a_stride, t, inner, to, out_stride, ahead); break;
#endif
                default: product_block<BLOCK_ROWS>(from, a_stride, t, inner, to, out_stride, ahead);
            }
            ahead.cells = nullptr;
        }
    }
}

template <int R, int N, typename T>
INLINE void mix_block(const float* p, const T* const* rows, int64_t offset, int inner, const float* decay, float* out,
                      int64_t out_stride, const Ahead& ahead) {
    vf acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < N; ++j) acc[r][j] = loadf(out + r * out_stride + j * WIDTH) * splat(decay[r]);
    for (int i = 0; i < inner; ++i) {
        ahead.touch(i, inner);
        const T* row = rows[i] + offset;
        vf x[N];
        for (int j = 0; j < N; ++j) x[j] = load(row + j * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < N; ++j) acc[r][j] = fma(x[j], splat(p[r * TILE + i]), acc[r][j]);
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < N; ++j) storef(out + r * out_stride + j * WIDTH, acc[r][j]);
}

template <int N, typename T>
void mix_columns(const float* p, const T* const* rows, int64_t offset, int n_rows, int inner, const float* decay,
                 float* out, int64_t stride, Ahead& ahead) {
    for (int r = 0; r < n_rows; r += BLOCK_ROWS) {
        const float* from = p + r * TILE;
        float* to = out + r * stride + offset;
        switch (n_rows - r) {
            case 1: mix_block<1, N>(from, rows, offset, inner, decay + r, to, stride, ahead); break;
            case 2: mix_block<2, N>(from, rows, offset, inner, decay + r, to, stride, ahead); break;
            case 3: mix_block<3, N>(from, rows, offset, inner, decay + r, to, stride, ahead); break;
#if BOUGH_WIDTH == 16
            case 4: mix_block<4, N>(from, rows, offset, inner, decay + r, to, stride, ahead); break;
            case 5: mix_block<5, N>(from, rows, offset, inner, decay + r, to, stride, ahead); break;
#endif
            default: mix_block<BLOCK_ROWS, N>(from, rows, offset, inner, decay + r, to, stride, ahead);
        }
        ahead.cells = nullptr;
    }
}

// out[n_rows, dim] = decay[n_rows] * out + p[n_rows, inner] @ rows[inner][dim]; dim is a multiple of WIDTH.
template <typename T>
void mix(const float* p, const T* const* rows, int n_rows, int inner, const float* decay, float* out, int64_t dim,
         Ahead ahead = {nullptr, 0}) {
    int64_t offset = 0;
    for (; offset + BLOCK_VECS * WIDTH <= dim; offset += BLOCK_VECS * WIDTH)
        mix_columns<BLOCK_VECS>(p, rows, offset, n_rows, inner, decay, out, dim, ahead);
    for (; offset < dim; offset += WIDTH) mix_columns<1>(p, rows, offset, n_rows, inner, decay, out, dim, ahead);
}

}  // namespace
