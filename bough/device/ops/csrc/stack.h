// All layers of a decoder for a few tokens, in one parallel region.
//
// What is shared lies between barriers:
//
//     norm, qkv | rotate, write KV | attend | out | norm, gate and up, activation | down |
//
// Norms and the preparing of inputs for a few tokens take less time than to hand them out: every thread does them for
// itself. More tokens are divided among the threads, at the price of a barrier.
//
// Every value is rounded where the separate kernels round it, so the results have the same bits.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "team.h"

namespace {

constexpr int64_t STACK_CHUNK = DENSE_PANELS;   // panels handed out at a time
constexpr int64_t FEW_TOKENS = 6;

template <typename T>
struct Stack {
    const StackCall& call;
    AttentionCall attention_call;
    Attention<T> attention;
    int64_t normed_size, prepared_size;
    char* common;       // what the threads write together: normed and prepared, as in Mine; null for a few tokens
    Team team;

    explicit Stack(const StackCall& c)
        : call(c), attention_call(c.attention), attention(attention_call), prepared_size(0), common(nullptr), team{} {
        normed_size = padded(tokens() * c.hidden_size * (int64_t)sizeof(T));
        for (int64_t i = 0; i < c.n_layers; ++i) {
            const StackLayer& layer = c.layers[i];
            const LinearParts* linears[] = {&layer.qkv, &layer.out, &layer.gate_up, &layer.down};
            for (const LinearParts* l : linears) {
                int64_t bytes = 0;
                for (int j = 0; j < l->count; ++j) bytes += padded(prepared_bytes(*l->part[j], tokens()));
                prepared_size = bytes > prepared_size ? bytes : prepared_size;
            }
        }
        if (tokens() <= FEW_TOKENS) return;
        common = (char*)scratch(SCRATCH_COMMON, normed_size + prepared_size);
        if (!common) __builtin_trap();
    }

    int64_t tokens() const { return call.rope.n_tokens; }

    // What one thread works with: the tokens that it normalises and prepares, and where.
    struct Mine : TeamThread {
        const bool alone;       // all tokens, for itself
        const int64_t first, last;
        T* residual;            // [T, D]
        T* normed;              // [T, D]
        char* prepared;

        Mine(Stack& stack, int index, int n)
            : TeamThread(stack.team, index, n), alone(!stack.common), first(alone ? 0 : stack.tokens() * index / n),
              last(alone ? stack.tokens() : stack.tokens() * (index + 1) / n) {
            int64_t size = stack.normed_size, own = alone ? size + stack.prepared_size : 0;
            char* memory = (char*)scratch(SCRATCH_STACK, size + own);
            if (!memory) __builtin_trap();
            residual = (T*)memory;
            char* rest = alone ? memory + size : stack.common;
            normed = (T*)rest;
            prepared = rest + size;
        }
    };

    static int64_t panels(const LinearParts& l) {
        int64_t n = 0;
        for (int i = 0; i < l.count; ++i) n += ceil_div(l.part[i]->n_out, PANEL);
        return n;
    }

    static bool same_inputs(const PackedLinear& a, const PackedLinear& b) {
        return a.kind == b.kind;
    }

    // Inputs x [T, n_in] as the parts want them; parts that want the same share it. `fresh` says that x itself was
    // just written, by each thread for its own tokens.
    void prepare(const LinearParts& l, const T* x, bool fresh, Mine& mine, PreparedRows* prepared) const {
        char* at = mine.prepared;
        for (int i = 0; i < l.count; ++i) {
            const PackedLinear& part = *l.part[i];
            if (is_prepared(part, x, part.n_in)) {
                prepared[i] = {(const uint32_t*)x, part.n_in / 2};
            } else if (i && same_inputs(part, *l.part[i - 1])) {
                prepared[i] = prepared[i - 1];
            } else {
                const int64_t stride = prepared_stride(part);
                prepare_rows(part, x + mine.first * part.n_in, part.n_in, mine.last - mine.first,
                             (uint32_t*)at + mine.first * stride);
                prepared[i] = {(const uint32_t*)at, stride};
                at += padded(prepared_bytes(part, tokens()));
                fresh = true;
            }
        }
        if (fresh && !mine.alone) mine.wait();
    }

    // Panels [first, last) of the outputs of all parts, which lie side by side in out [T, stride].
    void slice(const LinearParts& l, const PreparedRows* prepared, int64_t first, int64_t last, T* out,
               int64_t stride) const {
        for (int i = 0; i < l.count && last > 0; ++i) {
            const PackedLinear& part = *l.part[i];
            int64_t own = ceil_div(part.n_out, PANEL);
            if (first < own) {
                int64_t end = (last < own ? last : own) * PANEL;
                linear_slice(part, prepared[i], tokens(), first * PANEL, end < part.n_out ? end : part.n_out, out,
                             stride);
            }
            first = first > own ? first - own : 0;
            last -= own;
            out += part.n_out;
        }
    }

    void linear(const LinearParts& l, const T* x, T* out, int64_t stride, Mine& mine) {
        PreparedRows prepared[MOST_PARTS];
        prepare(l, x, x == mine.normed, mine, prepared);
        mine.share(panels(l), STACK_CHUNK,
                   [&](int64_t first, int64_t last) { slice(l, prepared, first, last, out, stride); });
        mine.wait();
    }

    // residual += x, if there is anything to add, or its norm if `after` is a weight; then the norm of the residual, or
    // itself if `weight` is null.
    void add_norm(const T* x, const void* after, const void* weight, Mine& mine) const {
        const int64_t dim = call.hidden_size;
        for (int64_t t = mine.first; t < mine.last; ++t) {
            T *r = mine.residual + t * dim, *normed = mine.normed + t * dim;
            if (x) {
                const T* add = x + t * dim;
                if (after) {
                    norm_row(add, after, call.norm_wide, call.eps, normed, dim);
                    add = normed;
                }
                if (call.residual_scale != 1.0f) {
                    scale_row(add, call.residual_scale, normed, dim);
                    add = normed;
                }
                add_row(add, r, dim);
            }
            if (weight)
                norm_row(r, weight, call.norm_wide, call.eps, normed, dim);
            else
                memcpy(normed, r, sizeof(T) * dim);
        }
    }

    void attend(const StackLayer& layer, Mine& mine) {
        const int64_t heads = call.rope.n_kv_heads;
        RopeCall rope = call.rope;
        rope.k = layer.k;
        rope.v = layer.v;
        rope.k_scale = layer.k_scale;
        rope.v_scale = layer.v_scale;
        rope.cos_sin = layer.cos_sin;
        rope.rotary_dim = layer.rotary_dim;
        rope.q_norm = layer.q_norm;
        rope.k_norm = layer.k_norm;
        if (mine.index == 0) {
            attention_call.k = layer.k;
            attention_call.v = layer.v;
            attention_call.k_scale = layer.k_scale;
            attention_call.v_scale = layer.v_scale;
            attention_call.sinks = layer.sinks;
            attention_call.window = layer.window;
            attention_call.n_groups = layer.window ? 0 : call.attention.n_groups;
            attention.plan();
        }
        mine.share(tokens() * heads, 1,
                   [&](int64_t item, int64_t) { rotate_group<T>(rope, item / heads, (int)(item % heads)); });
        mine.wait();
        const int64_t shared = attention.shared_items;
        if (shared) {
            mine.share(shared, 1, [&](int64_t item, int64_t) { attention.run_item(attention.items[item]); });
            mine.wait();
        }
        mine.share(attention.n_items - shared, 1,
                   [&](int64_t item, int64_t) { attention.run_item(attention.items[shared + item]); });
        mine.wait();
    }

    void gate_up(const LinearParts& l, Mine& mine) {
        constexpr int64_t WIDE = STACK_CHUNK * PANEL;
        const int64_t half = panels(l) / 2, size = call.intermediate_size;
        PreparedRows prepared[MOST_PARTS];
        prepare(l, mine.normed, true, mine, prepared);
        mine.share(half, STACK_CHUNK, [&](int64_t first, int64_t last) {
            T gate[MOST_STACK_TOKENS * WIDE], up[MOST_STACK_TOKENS * WIDE];
            const int64_t begin = first * PANEL, end = last * PANEL < size ? last * PANEL : size;
            // slice() counts columns from the first of all: gates begin at 0, the others at `size`.
            slice(l, prepared, first, last, gate - begin, WIDE);
            slice(l, prepared, half + first, half + last, up - begin - size, WIDE);
            for (int64_t t = 0; t < tokens(); ++t) {
                T* to = (T*)call.act + t * size + begin;
                if (call.gelu)
                    gated_row<true>(gate + t * WIDE, up + t * WIDE, to, end - begin);
                else
                    gated_row<false>(gate + t * WIDE, up + t * WIDE, to, end - begin);
            }
        });
        mine.wait();
    }

    void run(Mine& mine) {
        const int64_t dim = call.hidden_size, heads = call.rope.n_heads + 2 * call.rope.n_kv_heads;
        memcpy(mine.residual, call.embedded, sizeof(T) * tokens() * dim);
        const T* x = nullptr;
        const void* after = nullptr;
        for (int64_t i = 0; i < call.n_layers; ++i) {
            const StackLayer& layer = call.layers[i];
            add_norm(x, after, layer.attention_norm, mine);
            linear(layer.qkv, mine.normed, (T*)call.rope.qkv, heads * call.rope.head_dim, mine);
            attend(layer, mine);
            x = (const T*)call.x;
            linear(layer.out, (const T*)call.attention.out, (T*)call.x, dim, mine);
            add_norm(x, layer.attention_after, layer.mlp_norm, mine);
            gate_up(layer.gate_up, mine);
            linear(layer.down, (const T*)call.act, (T*)call.x, dim, mine);
            after = layer.mlp_after;
        }
        add_norm(x, after, call.final_norm, mine);
        if (mine.alone && mine.index > 0) return;
        memcpy((T*)call.hidden + mine.first * dim, mine.normed + mine.first * dim,
               sizeof(T) * (mine.last - mine.first) * dim);
    }

    static void body(void* context, int index, int n) {
        Mine mine(*(Stack*)context, index, n);
        ((Stack*)context)->run(mine);
    }
};

template <typename T>
void layer_stack(const StackCall& call) {
    Stack<T> stack(call);
    parallel_team(call.threads < Team::MOST ? call.threads : Team::MOST, Stack<T>::body, &stack);
}

}  // namespace
