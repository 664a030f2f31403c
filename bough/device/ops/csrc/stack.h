// All layers of a decoder, in one parallel region.
//
// What is shared lies between the ends of stages (team.h):
//
//     norm | qkv | rotate, write KV | attend | prepare | out | norm | gate and up, activation | prepare | down |
//
// What is in between is done for a few tokens by the thread that ends the stage before, in less time than it takes to hand it
// out: norms, the preparing of inputs, the writing of KV. More tokens are divided among the threads, in a stage of their own.
//
// Every value is rounded where the separate kernels round it, so the results have the same bits.
//
// Of the last layer, most tokens of a prompt are wanted for nothing but their KV. Where the call tells whose hidden
// states are (`ends`), the region ends with that KV, and a second one computes the rest of the layer for these alone.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "ends.h"
#include "lora.h"
#include "parts.h"
#include "team.h"

namespace {

constexpr int64_t FEW_TOKENS = 6;

template <typename T>
struct Stack {
    const StackCall& call;
    AttentionCall attention_call;
    Attention<T> attention;
    const bool few;         // what is done for every token is done by one thread
    const bool begun;       // the KV of the first layer is written, its queries are there
    T *residual, *normed;   // [T, D]
    const Panels panels;
    Inputs<T> inputs;       // of the linear layer in work
    int window;             // that attention is planned for; none at first
    int64_t shared_items, own_items;    // of that plan
    Team team;

    explicit Stack(const StackCall& c, bool begun = false)
        : call(c), attention_call(c.attention), attention(attention_call), few(c.rope.n_tokens <= FEW_TOKENS),
          begun(begun), panels{tokens(), c.threads}, inputs{tokens(), nullptr}, window(-1), team{} {
        int64_t prepared_size = 0;
        for (int64_t i = 0; i < c.n_layers; ++i) {
            const StackLayer& layer = c.layers[i];
            const LinearParts* linears[] = {&layer.qkv, &layer.out, &layer.gate_up, &layer.down};
            for (const LinearParts* l : linears) {
                const int64_t bytes = inputs.bytes(*l);
                prepared_size = bytes > prepared_size ? bytes : prepared_size;
            }
        }
        Carver memory = {nullptr, 0};
        for (int pass = 0; pass < 2; ++pass) {
            memory = {pass ? (char*)scratch(SCRATCH_STACK, memory.used) : nullptr, 0};
            if (pass && !memory.base) __builtin_trap();
            memory.take(residual, tokens() * c.hidden_size);
            memory.take(normed, tokens() * c.hidden_size);
            memory.take(inputs.memory, prepared_size);
        }
        if (begun) aim(c.layers[0]);
        if (few) enter(0, tokens());
    }

    int64_t tokens() const { return call.rope.n_tokens; }

    // What one thread works with.
    struct Mine : TeamThread {
        Wanted wanted[WANTED];  // of the adapters: for the columns in work, and for the next layer
        Wanted foreseen;        // of the next weights

        Mine(Stack& stack, int index, int n) : TeamThread(stack.team, index, n) { foreseen.clear(); }

        // A stage, for whose end the thread waits asking for what is foreseen.
        template <typename Run, typename After>
        void stage(int64_t items, int64_t chunk, const Run& run, const After& after) {
            TeamThread::stage(items, chunk, run, after, [this] {
                if (foreseen.is_done())
                    pause_briefly();
                else
                    foreseen.ask();
            });
        }
    };

    // What is done between two stages: each(first, last) for tokens [first, last), if it is wanted, and then once().
    template <typename Each, typename Once>
    struct Between {
        bool wanted;
        Each each;
        Once once;
    };

    static void nothing() {}

    template <typename Each, typename Once = void (*)()>
    static Between<Each, Once> between(bool wanted, const Each& each, const Once& once = nothing) {
        return {wanted, each, once};
    }

    template <typename Run, typename Then>
    void stage(int64_t items, int64_t chunk, const Run& run, const Then& then, Mine& mine) const {
        const bool apart = !few && then.wanted;
        mine.stage(items, chunk, run, [&] {
            if (apart) return;
            if (then.wanted) then.each(0, tokens());
            then.once();
        });
        if (apart) each_token(then.each, then.once, mine);
    }

    template <typename Each, typename Once>
    void each_token(const Each& each, const Once& once, Mine& mine) const {
        mine.stage(tokens(), ceil_div(tokens(), 4 * mine.n), each, once);
    }

    // The inner values of what adapters add to a layer with the inputs x.
    void shrink(const LinearParts& l, const LoraTable* lora, const T* x, Mine& mine) const {
        if (!call.lora) return;
        mine.stage(lora_items(*lora, *call.lora), 1, [&](int64_t first, int64_t last) {
            lora_shrink(*lora, *call.lora, first, last, x, l.part[0]->n_in);
        }, nothing);
    }

    // Panels [first, last) of the outputs of all parts, which lie side by side in out [n, stride], with what the
    // adapters add to them, for n tokens from `token` on. The thread goes on at `then`.
    void slice(const LinearParts& l, const LoraTable* lora, const PreparedRows* prepared, int64_t token, int64_t n,
               int64_t first, int64_t last, const Panels::Place& then, T* out, int64_t stride, Mine& mine) const {
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
                             {then.at, call.lora ? mine.wanted : nullptr, then.words}, out + base, stride,
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

    // What it begins with there.
    Panels::Place begins_at(const Next& next, const Mine& mine) const {
        if (!next.linear) return {};
        const int64_t first = next.first(mine), end = next.panels * (mine.index + 1) / mine.n;
        const LinearParts& l = *next.linear;
        const int64_t count = next.panels < panels.count(l) ? panels.gated_chunk(l) : panels.chunk(l);
        return panels.place(l, first, first + count < end ? first + count : end);
    }

    // Where it goes on behind panels up to `last`, of which its share ends at own_end.
    Panels::Place follows(const LinearParts& l, int64_t last, int64_t count, int64_t own_end, const Next& next,
                          const Mine& mine) const {
        return last < own_end ? panels.place(l, last, last + count < own_end ? last + count : own_end) : begins_at(next, mine);
    }

    // What the thread may ask for while it waits before the next layer: the panels that it begins with.
    void foresee(const Next& next, Mine& mine) const {
        mine.foreseen.clear();
        if (!next.linear) return;
        const int64_t all = panels.count(*next.linear), words = read_words(*next.linear->part[0], tokens());
        const int64_t first = next.first(mine), end = next.panels * (mine.index + 1) / mine.n;
        const int64_t left = end - first, some = next.panels < all ? panels.gated_chunk(*next.linear) : left;
        const int64_t size = (some < left ? some : left) * words;
        for (int64_t at = first; at < all; at += next.panels)
            mine.foreseen.add(panels.at(*next.linear, at), size < FORESEEN ? size : FORESEEN);
        mine.foreseen.pace = 1;
    }

    // While the thread multiplies its share of `count` panels of a layer, it asks for what it reads of the adapters
    // next.
    void want(const LinearParts& l, int64_t count, const Next& next, Mine& mine) const {
        if (!call.lora) return;
        Wanted& wanted = mine.wanted[1];
        wanted.clear();
        if (!next.linear) return;
        const int64_t items = lora_items(*next.lora, *call.lora);
        lora_want_a(*next.lora, *call.lora, items * mine.index / mine.n, items * (mine.index + 1) / mine.n, wanted);
        wanted.spread(asking_turns(*l.part[0], tokens(), ceil_div(count, mine.n)));
    }

    // x -> out, from inputs that are prepared, and `then`.
    template <typename Then>
    void linear(const LinearParts& l, const LoraTable* lora, const T* x, T* out, int64_t stride, const Next& next,
                const Then& then, Mine& mine) const {
        PreparedRows found[MOST_PARTS];
        inputs.find(l, x, found);
        shrink(l, lora, x, mine);
        const int64_t count = panels.count(l), own_end = count * (mine.index + 1) / mine.n, at_a_time = panels.chunk(l);
        want(l, count, next, mine);
        foresee(next, mine);
        stage(count, at_a_time, [&](int64_t first, int64_t last) {
            slice(l, lora, found, 0, tokens(), first, last, follows(l, last, at_a_time, own_end, next, mine), out, stride, mine);
        }, then, mine);
    }

    // For tokens [first, last): residual += x, if there is anything to add, or its norm if `after` is a weight; then `to` is the
    // norm of the residual, or itself if `weight` is null.
    void add_norm(const T* x, const void* after, const void* weight, T* to, int64_t first, int64_t last) const {
        const int64_t dim = call.hidden_size;
        for (int64_t t = first; t < last; ++t) {
            T *r = residual + t * dim, *out = to + t * dim;
            if (x) {
                const T* add = x + t * dim;
                if (after) {
                    norm_row(add, after, call.norm_wide, call.eps, out, dim);
                    add = out;
                }
                if (call.residual_scale != 1.0f) {
                    scale_row(add, call.residual_scale, out, dim);
                    add = out;
                }
                add_row(add, r, dim);
            }
            if (weight)
                norm_row(r, weight, call.norm_wide, call.eps, out, dim);
            else
                memcpy(out, r, sizeof(T) * dim);
        }
    }

    // The same, and the result as the parts of a layer want it.
    void add_norm_prepare(const T* x, const void* after, const void* weight, const LinearParts& l, int64_t first,
                          int64_t last) const {
        add_norm(x, after, weight, normed, first, last);
        inputs.prepare(l, normed, first, last);
    }

    // The residual stream of tokens [first, last), and what goes into the first layer.
    void enter(int64_t first, int64_t last) const {
        const int64_t dim = call.hidden_size;
        memcpy(residual + first * dim, (const T*)call.embedded + first * dim, sizeof(T) * (last - first) * dim);
        if (!begun) add_norm_prepare(nullptr, nullptr, call.layers[0].attention_norm, call.layers[0].qkv, first, last);
    }

    // Whether the layer has cells of its own.
    bool apart(const StackLayer& layer) const { return layer.window && call.window_loc; }

    // Rotates queries and keys of tokens [first, last) and writes their KV.
    void write_kv(const StackLayer& layer, int64_t first, int64_t last) const {
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
        for (int64_t i = first * heads; i < last * heads; ++i) rotate_group<T>(rope, i / heads, (int)(i % heads));
    }

    // Has attention read the cells of a layer. One plan serves all layers with the same window.
    void aim(const StackLayer& layer) {
        attention_call.k = layer.k;
        attention_call.v = layer.v;
        attention_call.k_scale = layer.k_scale;
        attention_call.v_scale = layer.v_scale;
        attention_call.sinks = layer.sinks;
        if (layer.window == window) return;
        window = attention_call.window = layer.window;
        attention_call.page_table = apart(layer) ? call.window_table : call.attention.page_table;
        attention_call.n_groups = shares(layer) ? call.attention.n_groups : 0;
        attention.plan();
        // A thread that comes late looks at them while they change: who sees a later plan's sees that its stage is over, too.
        __atomic_store_n(&shared_items, attention.shared_items, __ATOMIC_RELEASE);
        __atomic_store_n(&own_items, attention.n_items - attention.shared_items, __ATOMIC_RELEASE);
    }

    bool shares(const StackLayer& layer) const { return call.attention.n_groups && !layer.window; }

    // Attends, where aim() was called, and `then`.
    template <typename Then>
    void attend(const StackLayer& layer, const Then& then, Mine& mine) const {
        if (shares(layer))
            mine.stage(__atomic_load_n(&shared_items, __ATOMIC_ACQUIRE), 1,
                       [&](int64_t item, int64_t) { attention.run_item(item); }, nothing);
        stage(__atomic_load_n(&own_items, __ATOMIC_ACQUIRE), 1,
              [&](int64_t item, int64_t) { attention.run_item(attention.shared_items + item); }, then, mine);
    }

    template <typename Then>
    void gate_up(const LinearParts& l, const LoraTable* lora, const Next& next, const Then& then, Mine& mine) const {
        const int64_t half = panels.count(l) / 2, size = call.intermediate_size, at_a_time = panels.gated_chunk(l);
        const int64_t most = panels.gated_rows(l), blocks = ceil_div(tokens(), most), width = at_a_time * PANEL;
        PreparedRows found[MOST_PARTS];
        inputs.find(l, normed, found);
        shrink(l, lora, normed, mine);
        const int64_t own_end = half * (mine.index + 1) / mine.n;
        want(l, 2 * half, next, mine);
        foresee(next, mine);
        stage(half, at_a_time, [&](int64_t first, int64_t last) {
            T* gate = (T*)scratch(SCRATCH_GATED, 2 * most * width * sizeof(T));
            if (!gate) __builtin_trap();
            T* up = gate + most * width;
            const int64_t begin = first * PANEL, end = last * PANEL < size ? last * PANEL : size;
            const Panels::Place values = panels.place(l, half + first, half + last);
            const Panels::Place after = follows(l, last, at_a_time, own_end, next, mine);
            for (int64_t block = 0; block < blocks; ++block) {
                const int64_t t = block * most, left = tokens() - t, rows = left < most ? left : most;
                // What follows is asked for in parts where the weights stay as they are meanwhile, else before it comes.
                const Panels::Place later = panels.are_blocks(l) ? after.part(block, blocks)
                                            : block + 1 < blocks ? Panels::Place{}
                                                                 : after;
                // slice() counts columns from the first of all: gates begin at 0, the others at `size`.
                slice(l, lora, found, t, rows, first, last, block ? Panels::Place{} : values, gate - begin, width, mine);
                slice(l, lora, found, t, rows, half + first, half + last, later, up - begin - size, width, mine);
                for (int64_t i = 0; i < rows; ++i) {
                    T* to = (T*)call.act + (t + i) * size + begin;
                    if (call.gelu)
                        gated_row<true>(gate + i * width, up + i * width, to, end - begin);
                    else
                        gated_row<false>(gate + i * width, up + i * width, to, end - begin);
                }
            }
        }, then, mine);
    }

    static Next whole(const LinearParts& l, const LoraTable* lora) { return {&l, lora, Panels::count(l)}; }

    void run(Mine& mine) {
        const int64_t heads = call.rope.n_heads + 2 * call.rope.n_kv_heads;
        if (!few) each_token([&](int64_t first, int64_t last) { enter(first, last); }, nothing, mine);
        for (int64_t i = 0; i < call.n_layers; ++i) {
            const bool ends = call.n_ends >= 0 && i + 1 == call.n_layers;
            const StackLayer& layer = call.layers[i];
            if (i || !begun) {
                linear(layer.qkv, layer.qkv_lora, normed, (T*)call.rope.qkv, heads * call.rope.head_dim,
                       whole(layer.out, layer.out_lora),
                       between(true, [&](int64_t first, int64_t last) { write_kv(layer, first, last); },
                               [&] { ends ? keep_ends() : aim(layer); }), mine);
            }
            if (ends) return;
            rest(layer, i + 1 < call.n_layers ? &layer + 1 : nullptr, mine);
        }
    }

    // From attention on; of the last layer there is no `next`.
    void rest(const StackLayer& layer, const StackLayer* next, Mine& mine) const {
        const T *attended = (const T*)call.attention.out, *x = (const T*)call.x, *act = (const T*)call.act;
        attend(layer, between(inputs.are_to_prepare(layer.out, attended), [&](int64_t first, int64_t last) {
            inputs.prepare(layer.out, attended, first, last);
        }), mine);
        linear(layer.out, layer.out_lora, attended, (T*)call.x, call.hidden_size,
               {&layer.gate_up, layer.gate_up_lora, panels.count(layer.gate_up) / 2},
               between(true, [&](int64_t first, int64_t last) {
                   add_norm_prepare(x, layer.attention_after, layer.mlp_norm, layer.gate_up, first, last);
               }), mine);
        gate_up(layer.gate_up, layer.gate_up_lora, whole(layer.down, layer.down_lora),
                between(inputs.are_to_prepare(layer.down, act), [&](int64_t first, int64_t last) {
                    inputs.prepare(layer.down, act, first, last);
                }), mine);
        linear(layer.down, layer.down_lora, act, (T*)call.x, call.hidden_size,
               next ? whole(next->qkv, next->qkv_lora) : Next{},
               between(true, [&](int64_t first, int64_t last) {
                   if (next)
                       add_norm_prepare(x, layer.mlp_after, next->attention_norm, next->qkv, first, last);
                   else
                       add_norm(x, layer.mlp_after, call.final_norm, (T*)call.hidden, first, last);
               }), mine);
    }

    // Leaves the residual stream of the wanted tokens in the first rows of x, for the region that goes on with them.
    void keep_ends() const {
        const int64_t dim = call.hidden_size;
        for (int64_t e = 0; e < call.n_ends; ++e)
            memcpy((T*)call.x + e * dim, residual + call.ends[e] * dim, sizeof(T) * dim);
    }

    static void body(void* context, int index, int n) {
        Mine mine(*(Stack*)context, index, n);
        ((Stack*)context)->run(mine);
    }

    void run_team() { parallel_team(call.threads < Team::MOST ? call.threads : Team::MOST, body, this); }
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
