// All layers of a decoder, in one parallel region.
//
// What is shared lies between barriers:
//
//     norm, qkv | rotate, write KV | attend | out | norm, gate and up, activation | down |
//
// Norms and the preparing of inputs for a few tokens take less time than to hand them out: every thread does them for
// itself. More tokens are divided among the threads, at the price of a barrier.
//
// Every value is rounded where the separate kernels round it, so the results have the same bits.
//
// Of the last layer, most tokens of a prompt are wanted for nothing but their KV. Where the call tells whose hidden
// states are (`ends`), the region ends with that KV, and a second one computes the rest of the layer for these alone.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "lora.h"
#include "team.h"

namespace {

constexpr int64_t STACK_CHUNK = DENSE_PANELS;   // panels handed out at a time
constexpr int64_t FEW_TOKENS = 6;
constexpr int64_t FORESEEN = 1 << 16;    // words that a thread reads ahead while it waits: a quarter of a cache
constexpr int64_t GATED_ROWS = 8 * LINEAR_ROWS;     // tokens whose gates and values wait for each other

template <typename T>
struct Stack {
    const StackCall& call;
    AttentionCall attention_call;
    Attention<T> attention;
    int64_t normed_size, prepared_size;
    char* common;       // what the threads write together: normed and prepared, as in Mine; null for a few tokens
    const bool begun;   // the KV of the first layer is written, its queries are there
    Team team;

    explicit Stack(const StackCall& c, bool begun = false)
        : call(c), attention_call(c.attention), attention(attention_call), prepared_size(0), common(nullptr),
          begun(begun), team{} {
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
        Wanted wanted[WANTED];  // of the adapters: for the columns in work, and for the next layer
        Wanted foreseen;        // of the next weights

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
            foreseen.clear();
        }

        void wait() {
            TeamThread::wait([this] {
                if (foreseen.next < foreseen.count)
                    foreseen.ask();
                else
                    pause_briefly();
            });
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

    // Inputs x [T, n_in] as the parts and the adapters want them; parts that want the same share it. `fresh` says that
    // x itself was just written, by each thread for its own tokens.
    void prepare(const LinearParts& l, const LoraTable* lora, const T* x, bool fresh, Mine& mine,
                 PreparedRows* prepared) const {
        bool wait = fresh && !mine.alone;
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
                wait = !mine.alone;
            }
        }
        if (call.lora) {
            if (fresh && !mine.alone) mine.wait();
            mine.share(lora_items(*lora, *call.lora), 1, [&](int64_t first, int64_t last) {
                lora_shrink(*lora, *call.lora, first, last, x, l.part[0]->n_in);
            });
            wait = true;
        }
        if (wait) mine.wait();
    }

    // Where panel `index` of all parts begins, in the form that the step reads.
    const uint32_t* panel_at(const LinearParts& l, int64_t index) const {
        int i = 0;
        for (; index >= ceil_div(l.part[i]->n_out, PANEL); ++i) index -= ceil_div(l.part[i]->n_out, PANEL);
        return read_at(*l.part[i], index, tokens());
    }

    // Panels [first, last) of the outputs of all parts, which lie side by side in out [n, stride], with what the
    // adapters add to them, for n tokens from `token` on. The thread goes on at `then`, a place in a weight.
    void slice(const LinearParts& l, const LoraTable* lora, const PreparedRows* prepared, int64_t token, int64_t n,
               int64_t first, int64_t last, const uint32_t* then, T* out, int64_t stride, Mine& mine) const {
        int64_t base = 0;
        for (int i = 0; i < l.count && last > 0; ++i) {
            const PackedLinear& part = *l.part[i];
            int64_t own = ceil_div(part.n_out, PANEL);
            if (first < own) {
                int64_t begin = first * PANEL, end = (last < own ? last : own) * PANEL;
                if (end > part.n_out) end = part.n_out;
                if (call.lora) {
                    mine.wanted[0].clear();
                    lora_want_b(*lora, *call.lora, base + begin, base + end, mine.wanted[0]);
                    mine.wanted[0].spread(asking_turns(part, n, ceil_div(end - begin, PANEL)));
                }
                linear_slice(part, {prepared[i].row(token), prepared[i].stride}, n, begin, end,
                             {then, call.lora ? mine.wanted : nullptr}, out + base, stride,
                             reads_compact(part, tokens()));
                for (int64_t r = 0; call.lora && r < call.lora->n_runs; ++r)
                    lora_expand(*lora, *call.lora, r, token, n, base + begin, base + end, out, stride);
            }
            first = first > own ? first - own : 0;
            last -= own;
            base += part.n_out;
        }
    }

    // What a thread reads after a layer of weights: its part of the next one, if there is one.
    struct Next {
        const LinearParts* linear;
        const LoraTable* lora;
        int64_t panels;    // of which the thread begins at its share

        int64_t first(const Mine& mine) const { return panels * mine.index / mine.n; }
    };

    const uint32_t* begins_at(const Next& next, const Mine& mine) const {
        return next.linear ? panel_at(*next.linear, next.first(mine)) : nullptr;
    }

    // What the thread may ask for at the barriers before the next layer: the panels that it begins with.
    void foresee(const Next& next, Mine& mine) const {
        mine.foreseen.clear();
        if (!next.linear) return;
        const int64_t all = panels(*next.linear), words = read_words(*next.linear->part[0], tokens());
        const int64_t first = next.first(mine), end = next.panels * (mine.index + 1) / mine.n;
        const int64_t count = next.panels < all ? STACK_CHUNK : FORESEEN / words, left = end - first;
        for (int64_t at = first; at < all; at += next.panels)
            mine.foreseen.add(panel_at(*next.linear, at), (count < left ? count : left) * words);
        mine.foreseen.pace = 1;
    }

    // While the thread multiplies its share of `panels` panels of a layer, it asks for what it reads of the adapters
    // next.
    void want(const LinearParts& l, int64_t panels, const Next& next, Mine& mine) const {
        if (!call.lora) return;
        Wanted& wanted = mine.wanted[1];
        wanted.clear();
        if (!next.linear) return;
        const int64_t items = lora_items(*next.lora, *call.lora);
        lora_want_a(*next.lora, *call.lora, items * mine.index / mine.n, items * (mine.index + 1) / mine.n, wanted);
        wanted.spread(asking_turns(*l.part[0], tokens(), ceil_div(panels, mine.n)));
    }

    void linear(const LinearParts& l, const LoraTable* lora, const T* x, T* out, int64_t stride, const Next& next,
                Mine& mine) {
        PreparedRows prepared[MOST_PARTS];
        prepare(l, lora, x, x == mine.normed, mine, prepared);
        const int64_t count = panels(l), own_end = count * (mine.index + 1) / mine.n;
        want(l, count, next, mine);
        mine.share(count, STACK_CHUNK, [&](int64_t first, int64_t last) {
            const uint32_t* then = last < own_end ? panel_at(l, last) : begins_at(next, mine);
            slice(l, lora, prepared, 0, tokens(), first, last, then, out, stride, mine);
        });
        foresee(next, mine);
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

    // Whether the layer has cells of its own.
    bool apart(const StackLayer& layer) const { return layer.window && call.window_loc; }

    void write_kv(const StackLayer& layer, Mine& mine) const {
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
        if (apart(layer)) rope.out_loc = call.window_loc;
        mine.share(tokens() * heads, ceil_div(tokens() * heads, 8 * mine.n), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) rotate_group<T>(rope, i / heads, (int)(i % heads));
        });
    }

    // Writes the KV of the layer, unless it is there, and attends.
    void attend(const StackLayer& layer, bool written, Mine& mine) {
        if (mine.index == 0) {
            attention_call.page_table = apart(layer) ? call.window_table : call.attention.page_table;
            attention_call.k = layer.k;
            attention_call.v = layer.v;
            attention_call.k_scale = layer.k_scale;
            attention_call.v_scale = layer.v_scale;
            attention_call.sinks = layer.sinks;
            attention_call.window = layer.window;
            attention_call.n_groups = layer.window ? 0 : call.attention.n_groups;
            attention.plan();
        }
        if (!written) write_kv(layer, mine);
        mine.wait();
        const int64_t shared = attention.shared_items;
        if (shared) {
            mine.share(shared, 1, [&](int64_t item, int64_t) { attention.run_item(item); });
            mine.wait();
        }
        mine.share(attention.n_items - shared, 1,
                   [&](int64_t item, int64_t) { attention.run_item(shared + item); });
        mine.wait();
    }

    void gate_up(const LinearParts& l, const LoraTable* lora, const Next& next, Mine& mine) {
        constexpr int64_t WIDE = STACK_CHUNK * PANEL;
        const int64_t half = panels(l) / 2, size = call.intermediate_size;
        PreparedRows prepared[MOST_PARTS];
        prepare(l, lora, mine.normed, true, mine, prepared);
        const int64_t own_end = half * (mine.index + 1) / mine.n;
        want(l, 2 * half, next, mine);
        mine.share(half, STACK_CHUNK, [&](int64_t first, int64_t last) {
            T gate[GATED_ROWS * WIDE], up[GATED_ROWS * WIDE];
            const int64_t begin = first * PANEL, end = last * PANEL < size ? last * PANEL : size;
            for (int64_t t = 0; t < tokens(); t += GATED_ROWS) {
                const int64_t left = tokens() - t, rows = left < GATED_ROWS ? left : GATED_ROWS;
                const uint32_t* then = last < own_end ? panel_at(l, last) : begins_at(next, mine);
                // slice() counts columns from the first of all: gates begin at 0, the others at `size`.
                slice(l, lora, prepared, t, rows, first, last, t ? nullptr : panel_at(l, half + first), gate - begin,
                      WIDE, mine);
                slice(l, lora, prepared, t, rows, half + first, half + last, left <= GATED_ROWS ? then : nullptr,
                      up - begin - size, WIDE, mine);
                for (int64_t i = 0; i < rows; ++i) {
                    T* to = (T*)call.act + (t + i) * size + begin;
                    if (call.gelu)
                        gated_row<true>(gate + i * WIDE, up + i * WIDE, to, end - begin);
                    else
                        gated_row<false>(gate + i * WIDE, up + i * WIDE, to, end - begin);
                }
            }
        });
        foresee(next, mine);
        mine.wait();
    }

    void run(Mine& mine) {
        const int64_t dim = call.hidden_size, heads = call.rope.n_heads + 2 * call.rope.n_kv_heads;
        memcpy(mine.residual, call.embedded, sizeof(T) * tokens() * dim);
        const T* x = nullptr;
        const void* after = nullptr;
        for (int64_t i = 0; i < call.n_layers; ++i) {
            const StackLayer& layer = call.layers[i];
            const StackLayer* next = i + 1 < call.n_layers ? &layer + 1 : nullptr;
            auto whole = [](const LinearParts& l, const LoraTable* lora) { return Next{&l, lora, panels(l)}; };
            if (i || !begun) {
                add_norm(x, after, layer.attention_norm, mine);
                linear(layer.qkv, layer.qkv_lora, mine.normed, (T*)call.rope.qkv, heads * call.rope.head_dim,
                       whole(layer.out, layer.out_lora), mine);
            }
            if (call.n_ends >= 0 && !next) {
                write_kv(layer, mine);
                return keep_ends(mine);
            }
            attend(layer, begun && i == 0, mine);
            x = (const T*)call.x;
            linear(layer.out, layer.out_lora, (const T*)call.attention.out, (T*)call.x, dim,
                   {&layer.gate_up, layer.gate_up_lora, panels(layer.gate_up) / 2}, mine);
            add_norm(x, layer.attention_after, layer.mlp_norm, mine);
            gate_up(layer.gate_up, layer.gate_up_lora, whole(layer.down, layer.down_lora), mine);
            linear(layer.down, layer.down_lora, (const T*)call.act, (T*)call.x, dim,
                   next ? whole(next->qkv, next->qkv_lora) : Next{}, mine);
            after = layer.mlp_after;
        }
        add_norm(x, after, call.final_norm, mine);
        if (mine.alone && mine.index > 0) return;
        memcpy((T*)call.hidden + mine.first * dim, mine.normed + mine.first * dim,
               sizeof(T) * (mine.last - mine.first) * dim);
    }

    // Leaves the residual stream of the wanted tokens in the first rows of x, for the region that goes on with them.
    // Nobody reads x any more: the last barrier lies behind the norm that did.
    void keep_ends(Mine& mine) const {
        const int64_t dim = call.hidden_size;
        if (mine.alone && mine.index > 0) return;
        for (int64_t e = 0; e < call.n_ends; ++e) {
            const int64_t t = call.ends[e];
            if (mine.first <= t && t < mine.last)
                memcpy((T*)call.x + e * dim, mine.residual + t * dim, sizeof(T) * dim);
        }
    }

    static void body(void* context, int index, int n) {
        Mine mine(*(Stack*)context, index, n);
        ((Stack*)context)->run(mine);
    }

    void run_team() { parallel_team(call.threads < Team::MOST ? call.threads : Team::MOST, body, this); }
};

// The wanted tokens as a step of their own: each is a row, its last token or one that has others behind it.
struct Ends {
    StackCall call;
    int32_t *rows, *starts, *lengths;

    explicit Ends(const StackCall& whole) : call(whole) {
        const int64_t n = whole.n_ends;
        rows = (int32_t*)scratch(SCRATCH_ENDS, (3 * n + 1) * (int64_t)sizeof(int32_t));
        if (!rows) __builtin_trap();
        starts = rows + n;
        lengths = starts + n + 1;
        const AttentionCall& from = whole.attention;
        for (int64_t e = 0, row = 0; e < n; ++e) {
            while (from.q_start[row + 1] <= whole.ends[e]) ++row;
            rows[e] = from.rows[row];
            starts[e] = (int32_t)e;
            lengths[e] = from.seq_len[row] - (from.q_start[row + 1] - 1 - whole.ends[e]);
        }
        starts[n] = (int32_t)n;
        call.layers = whole.layers + whole.n_layers - 1;
        call.n_layers = 1;
        call.embedded = whole.x;
        call.n_ends = -1;
        call.rope.n_tokens = call.attention.n_rows = (int)n;
        call.attention.rows = rows;
        call.attention.q_start = starts;
        call.attention.seq_len = lengths;
        call.attention.n_groups = 0;
    }
};

template <typename T>
void layer_stack(const StackCall& call) {
    Stack<T>(call).run_team();
    if (call.n_ends <= 0) return;
    const int64_t q_size = (int64_t)sizeof(T) * call.rope.n_heads * call.rope.head_dim;
    const int64_t size = (int64_t)sizeof(T) * call.hidden_size;
    char *q = (char*)call.attention.q, *hidden = (char*)call.hidden;
    // A row never moves over one that is still to be moved.
    for (int64_t e = 0; e < call.n_ends; ++e) memmove(q + e * q_size, q + call.ends[e] * q_size, q_size);
    Stack<T>(Ends(call).call, true).run_team();
    for (int64_t e = call.n_ends; e-- > 0;) memmove(hidden + call.ends[e] * size, hidden + e * size, size);
}

}  // namespace
