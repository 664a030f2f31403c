// Norms, activations, rotary embedding with the KV write, and argmax. Rows are independent of each other, and the
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

// The normalised value is rounded to the weight's type before that multiplies it, as the models were trained.
template <typename T, typename W>
INLINE void scale_by_weight(const T* x, float factor, const W* weight, T* out, int64_t dim) {
    int64_t i = 0;
    for (; i + WIDTH <= dim; i += WIDTH)
        store(out + i, rounded(load(x + i) * splat(factor), weight) * load(weight + i));
    for (; i < dim; ++i) store_one(out + i, rounded(widen(x[i]) * factor, weight) * widen(weight[i]));
}

// One row's norm, with a weight of type T or float.
template <typename T>
INLINE void norm_row(const T* x, const void* weight, bool wide, float eps, T* out, int64_t dim) {
    const float factor = inverse_rms(x, dim, eps);
    if (wide)
        scale_by_weight(x, factor, (const float*)weight, out, dim);
    else
        scale_by_weight(x, factor, (const T*)weight, out, dim);
}

// r += x
template <typename T>
INLINE void add_row(const T* x, T* r, int64_t dim) {
    int64_t i = 0;
    for (; i + WIDTH <= dim; i += WIDTH) store(r + i, load(x + i) + load(r + i));
    for (; i < dim; ++i) store_one(r + i, widen(x[i]) + widen(r[i]));
}

// to = x * factor
template <typename T>
INLINE void scale_row(const T* x, float factor, T* to, int64_t dim) {
    int64_t i = 0;
    for (; i + WIDTH <= dim; i += WIDTH) store(to + i, load(x + i) * splat(factor));
    for (; i < dim; ++i) store_one(to + i, widen(x[i]) * factor);
}

template <typename T, typename W>
void rms_norm(const void* x_, const void* weight_, void* out_, int64_t rows, int64_t dim, float eps, int threads) {
    const T* x = (const T*)x_;
    const W* weight = (const W*)weight_;
    T* out = (T*)out_;
    for_rows(rows, dim, threads, [=](int64_t row) {
        const T* from = x + row * dim;
        scale_by_weight(from, inverse_rms(from, dim, eps), weight, out + row * dim, dim);
    });
}

template <typename T, typename W>
void add_rms_norm(const void* x_, void* residual_, const void* weight_, void* out_, int64_t rows, int64_t dim,
                  float eps, int threads) {
    const T* x = (const T*)x_;
    const W* weight = (const W*)weight_;
    T *residual = (T*)residual_, *out = (T*)out_;
    for_rows(rows, dim, threads, [=](int64_t row) {
        T* r = residual + row * dim;
        add_row(x + row * dim, r, dim);
        scale_by_weight(r, inverse_rms(r, dim, eps), weight, out + row * dim, dim);
    });
}

// x / (1 + 2^power) for what is rounded to T
template <typename T>
INLINE vf sigmoid_part(vf x, vf power) {
    const vf most = splat(126.0f);
    return quotient_for(x, splat(1.0f) + exp2_for(select(power > most, most, power), (const T*)nullptr), (const T*)nullptr);
}

template <typename T>
INLINE vf silu(vf x) {
    return sigmoid_part<T>(x, x * splat(-1.44269504f));
}

// The tanh form: x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <typename T>
INLINE vf gelu(vf x) {
    return sigmoid_part<T>(x, x * fma(x * x, splat(-0.10294324f), splat(-2.3022082f)));
}

// to = act(gate) * up
template <bool GELU, typename T>
INLINE void gated_row(const T* gate, const T* up, T* to, int64_t dim) {
    int64_t i = 0;
    for (; i + WIDTH <= dim; i += WIDTH) {
        vf x = load(gate + i);
        store(to + i, rounded(GELU ? gelu<T>(x) : silu<T>(x), to) * load(up + i));
    }
    for (; i < dim; ++i) {
        vf x = splat(widen(gate[i]));
        store_one(to + i, rounded((GELU ? gelu<T>(x) : silu<T>(x))[0], to) * widen(up[i]));
    }
}

template <typename T, bool GELU>
void gated(const void* x_, void* out_, int64_t rows, int64_t dim, int threads) {
    const T* x = (const T*)x_;
    T* out = (T*)out_;
    for_rows(rows, 2 * dim, threads, [=](int64_t row) {
        const T* gate = x + row * 2 * dim;
        gated_row<GELU>(gate, gate + dim, out + row * dim, dim);
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

// The same for the pairs (2i, 2i + 1).
template <typename T>
INLINE void rotate_neighbours(const T* from, const float* cosine, const float* sine, T* to, int half, int dim) {
    for (int i = 0; i < half; ++i) {
        float a = widen(from[2 * i]), b = widen(from[2 * i + 1]);
        store_one(to + 2 * i, a * cosine[i] - b * sine[i]);
        store_one(to + 2 * i + 1, b * cosine[i] + a * sine[i]);
    }
    memcpy(to + 2 * half, from + 2 * half, sizeof(T) * (dim - 2 * half));
}

// Heads larger than this have no norm, and are written in the type of the queries only.
constexpr int MAX_HEAD_DIM = 512;

// One query or key, normed and rotated.
template <typename T>
NOINLINE void turn_head(const RopeCall& c, const T* from, const void* norm, const float* cosine, T* to) {
    const int half = c.rotary_dim / 2;
    T normed[MAX_HEAD_DIM];
    if (norm) {
        norm_row(from, norm, c.norm_wide, c.norm_eps, normed, c.head_dim);
        from = normed;
    }
    if (c.interleaved)
        rotate_neighbours(from, cosine, cosine + half, to, half, c.head_dim);
    else
        rotate(from, cosine, cosine + half, to, half, c.head_dim);
}

// Token t, one key-value head and the query heads that read it: rotates them and writes the cell.
template <typename T>
void rotate_group(const RopeCall& c, int64_t t, int kv_head) {
    const int64_t dim = c.head_dim, q_size = c.n_heads * dim, kv_size = c.n_kv_heads * dim;
    const int group = c.n_heads / c.n_kv_heads;
    const T* from = (const T*)c.qkv + t * (q_size + 2 * kv_size);
    const float* cosine = c.cos_sin + (int64_t)c.positions[t] * c.rotary_dim;
    const int64_t cell = (int64_t)c.out_loc[t] * c.n_kv_heads + kv_head;
    for (int h = kv_head * group; h < (kv_head + 1) * group; ++h)
        turn_head(c, from + h * dim, c.q_norm, cosine, (T*)c.q + t * q_size + h * dim);
    const T *key = from + q_size + kv_head * dim, *value = key + kv_size;
    if (c.kv_dtype == (sizeof(T) == 4 ? BOUGH_FLOAT32 : BOUGH_BFLOAT16)) {
        turn_head(c, key, c.k_norm, cosine, (T*)c.k + cell * dim);
        memcpy((T*)c.v + cell * dim, value, sizeof(T) * dim);
        return;
    }
    T rotated[MAX_HEAD_DIM];
    turn_head(c, key, c.k_norm, cosine, rotated);
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
        int64_t first = 0;
        while (first + WIDTH <= vocab && !any(load(x + first) == splat(top))) first += WIDTH;
        for (int64_t j = first; j < vocab; ++j)
            if (widen(x[j]) == top) {
                out[row] = j;
                return;
            }
    });
}

}  // namespace
