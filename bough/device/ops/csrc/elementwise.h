// Norms, activation, rotary embedding with the KV write, and argmax. Rows are independent of each other, and the
// order of every sum depends only on the row's own length.
#pragma once

#include "cells.h"

namespace {

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t SERIAL_ELEMENTS = 16384;

// Calls run(row) for rows 0 .. n-1, in parallel if there is enough to do.
template <typename Run>
void for_rows(int64_t n, int64_t elements_per_row, int threads, const Run& run) {
    if (n == 0) return;
    if (n * elements_per_row <= SERIAL_ELEMENTS) threads = 1;
    struct Context {
        const Run* run;
        int64_t n, chunk;
    } context = {&run, n, 1};
    context.chunk = (n + threads * 4 - 1) / (threads * 4);
    int64_t items = (n + context.chunk - 1) / context.chunk;
    parallel_items(
        items, threads,
        [](void* p, int64_t item) {
            const Context& c = *(const Context*)p;
            int64_t end = (item + 1) * c.chunk < c.n ? (item + 1) * c.chunk : c.n;
            for (int64_t row = item * c.chunk; row < end; ++row) (*c.run)(row);
        },
        &context);
}

// 1 / sqrt(mean(x^2) + eps)
template <typename T>
INLINE float inverse_rms(const T* x, int64_t dim, float eps) {
    vf a = vf{}, b = vf{};
    int64_t i = 0;
    for (; i + 2 * WIDTH <= dim; i += 2 * WIDTH) {
        vf u = load(x + i), v = load(x + i + WIDTH);
        a = fma(u, u, a);
        b = fma(v, v, b);
    }
    float total = sum(a + b);
    for (; i < dim; ++i) total += widen(x[i]) * widen(x[i]);
    return 1.0f / __builtin_sqrtf(total / (float)dim + eps);
}

// The normalised value is rounded to T before the weight multiplies it, as the models were trained.
template <typename T>
INLINE void scale_by_weight(const T* x, float factor, const T* weight, T* out, int64_t dim) {
    int64_t i = 0;
    for (; i + WIDTH <= dim; i += WIDTH)
        store(out + i, rounded(load(x + i) * splat(factor), out) * load(weight + i));
    for (; i < dim; ++i) store_one(out + i, rounded(widen(x[i]) * factor, out) * widen(weight[i]));
}

// r += x
template <typename T>
INLINE void add_row(const T* x, T* r, int64_t dim) {
    int64_t i = 0;
    for (; i + WIDTH <= dim; i += WIDTH) store(r + i, load(x + i) + load(r + i));
    for (; i < dim; ++i) store_one(r + i, widen(x[i]) + widen(r[i]));
}

template <typename T>
void rms_norm(const void* x_, const void* weight_, void* out_, int64_t rows, int64_t dim, float eps, int threads) {
    const T *x = (const T*)x_, *weight = (const T*)weight_;
    T* out = (T*)out_;
    for_rows(rows, dim, threads, [=](int64_t row) {
        const T* from = x + row * dim;
        scale_by_weight(from, inverse_rms(from, dim, eps), weight, out + row * dim, dim);
    });
}

template <typename T>
void add_rms_norm(const void* x_, void* residual_, const void* weight_, void* out_, int64_t rows, int64_t dim,
                  float eps, int threads) {
    const T *x = (const T*)x_, *weight = (const T*)weight_;
    T *residual = (T*)residual_, *out = (T*)out_;
    for_rows(rows, dim, threads, [=](int64_t row) {
        T* r = residual + row * dim;
        add_row(x + row * dim, r, dim);
        scale_by_weight(r, inverse_rms(r, dim, eps), weight, out + row * dim, dim);
    });
}

INLINE vf silu(vf x) {
    vf power = vmin(vmax(x * splat(-1.44269504f), splat(-125.0f)), splat(126.0f));
    return x / (splat(1.0f) + exp2v(power));
}

// to = silu(gate) * up
template <typename T>
INLINE void silu_mul_row(const T* gate, const T* up, T* to, int64_t dim) {
    int64_t i = 0;
    for (; i + WIDTH <= dim; i += WIDTH) store(to + i, rounded(silu(load(gate + i)), to) * load(up + i));
    for (; i < dim; ++i) store_one(to + i, rounded(silu(splat(widen(gate[i])))[0], to) * widen(up[i]));
}

template <typename T>
void silu_mul(const void* x_, void* out_, int64_t rows, int64_t dim, int threads) {
    const T* x = (const T*)x_;
    T* out = (T*)out_;
    for_rows(rows, 2 * dim, threads, [=](int64_t row) {
        const T* gate = x + row * 2 * dim;
        silu_mul_row(gate, gate + dim, out + row * dim, dim);
    });
}

// Rotates the pairs (i, i + half), i < half, and copies what lies beyond the rotary part.
template <typename T>
INLINE void rotate(const T* from, const float* cosine, const float* sine, T* to, int half, int dim) {
    int i = 0;
    for (; i + WIDTH <= half; i += WIDTH) {
        vf a = load(from + i), b = load(from + half + i), c = loadf(cosine + i), s = loadf(sine + i);
        store(to + i, fma(a, c, -(b * s)));
        store(to + half + i, fma(b, c, a * s));
    }
    for (; i < half; ++i) {
        float a = widen(from[i]), b = widen(from[half + i]);
        store_one(to + i, a * cosine[i] - b * sine[i]);
        store_one(to + half + i, b * cosine[i] + a * sine[i]);
    }
    memcpy(to + 2 * half, from + 2 * half, sizeof(T) * (dim - 2 * half));
}

// Heads larger than this are written in the type of the queries only.
constexpr int MAX_HEAD_DIM = 512;

// Token t, one key-value head and the query heads that read it: rotates them and writes the cell.
template <typename T>
void rotate_group(const RopeCall& c, int64_t t, int kv_head) {
    const int64_t dim = c.head_dim, q_size = c.n_heads * dim, kv_size = c.n_kv_heads * dim;
    const int half = c.rotary_dim / 2, group = c.n_heads / c.n_kv_heads;
    const T* from = (const T*)c.qkv + t * (q_size + 2 * kv_size);
    const float* cosine = c.cos_sin + (int64_t)c.positions[t] * c.rotary_dim;
    const int64_t cell = (int64_t)c.out_loc[t] * c.n_kv_heads + kv_head;
    for (int h = kv_head * group; h < (kv_head + 1) * group; ++h)
        rotate(from + h * dim, cosine, cosine + half, (T*)c.q + t * q_size + h * dim, half, (int)dim);
    const T *key = from + q_size + kv_head * dim, *value = key + kv_size;
    if (c.kv_dtype == (sizeof(T) == 4 ? BOUGH_FLOAT32 : BOUGH_BFLOAT16)) {
        rotate(key, cosine, cosine + half, (T*)c.k + cell * dim, half, (int)dim);
        memcpy((T*)c.v + cell * dim, value, sizeof(T) * dim);
        return;
    }
    T rotated[MAX_HEAD_DIM];
    rotate(key, cosine, cosine + half, rotated, half, (int)dim);
    write_cell(c.kv_dtype, rotated, c.k, c.k_scale, cell, (int)dim);
    write_cell(c.kv_dtype, value, c.v, c.v_scale, cell, (int)dim);
}

template <typename T>
void rope_kv_write(const RopeCall& c) {
    const int64_t size = (int64_t)(c.n_heads + 2 * c.n_kv_heads) * c.head_dim;
    for_rows(c.n_tokens, size, c.threads, [&c](int64_t t) {
        for (int head = 0; head < c.n_kv_heads; ++head) rotate_group<T>(c, t, head);
    });
}

// First index of the largest value of each row; -1 for a row that holds a NaN or +inf, or nothing but -inf.
template <typename T>
void argmax(const void* logits_, int64_t* out, int64_t rows, int64_t vocab, int threads) {
    const T* logits = (const T*)logits_;
    for_rows(rows, vocab, threads, [=](int64_t row) {
        const T* x = logits + row * vocab;
        const float infinity = __builtin_inff();
        vf best = splat(-infinity);
        vi bad = vi{};
        int64_t i = 0;
        for (; i + WIDTH <= vocab; i += WIDTH) {
            vf value = load(x + i);
            bad |= ~(value < splat(infinity));
            best = vmax(value, best);
        }
        int broken = 0;
        for (int lane = 0; lane < WIDTH; ++lane) broken |= bad[lane];
        float top = max_lane(best);
        for (; i < vocab; ++i) {
            float value = widen(x[i]);
            broken |= !(value < infinity);
            top = value > top ? value : top;
        }
        out[row] = -1;
        if (broken || top == -infinity) return;
        for (int64_t j = 0; j < vocab; ++j)
            if (widen(x[j]) == top) {
                out[row] = j;
                return;
            }
    });
}

}  // namespace
