// A mixture of experts: gated feed-forward layers of which each token passes through a few, in one parallel region.
//
// The (token, expert) pairs are sorted by expert, so that the weights of an expert are read once for all of its tokens:
//
//     gather and prepare | gate, up and activation | prepare | down | weighted sums |
//
// Outputs of the last product stay in float32 until they are summed up, in the order in which the token names its
// experts: the bits of a token depend on itself alone.
#pragma once

#include "elementwise.h"
#include "linear.h"
#include "team.h"
#include "units.h"

namespace {

constexpr int64_t EXPERT_CHUNK = 4;       // panels handed out at a time
constexpr int64_t EXPERT_ROWS = 48;       // rows of an expert that are in work at a time

// to = (min(up, limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit), with up at least -limit
template <typename T>
INLINE void clamped_swiglu_row(const T* gate, const T* up, T* to, int64_t dim, float alpha, float limit) {
    auto at = [&](vf g, vf u) {
        // In this order a NaN stays one.
        g = vmin(splat(limit), g);
        u = vmax(splat(-limit), vmin(splat(limit), u));
        vf power = vmin(vmax(g * splat(-1.44269504f * alpha), splat(-125.0f)), splat(126.0f));
        return (u + splat(1.0f)) * (g / (splat(1.0f) + exp2v(power)));
    };
    int64_t i = 0;
    for (; i + WIDTH <= dim; i += WIDTH) store(to + i, at(load(gate + i), load(up + i)));
    for (; i < dim; ++i) store_one(to + i, at(splat(widen(gate[i])), splat(widen(up[i])))[0]);
}

template <typename T>
struct Experts {
    const ExpertsCall& call;
    int64_t n_pairs, n_active;
    int32_t *pairs, *places, *expert_of;      // [n_pairs]: place -> pair, pair -> place, place -> expert
    int32_t *starts, *active;                 // [E + 1] first place of an expert; [n_active] experts with tokens
    char* prepared[MOST_PARTS];               // of the inputs, then of what is between the products
    int64_t strides[MOST_PARTS];              // words
    T* inner;                                 // [n_pairs, inner_size]
    float* products;                          // [n_pairs, hidden_size]
    Team team;

    explicit Experts(const ExpertsCall& c) : call(c), n_pairs(c.n_tokens * c.top_k), n_active(0), team{} {
        for (int j = 0; j < MOST_PARTS; ++j) {
            strides[j] = 0;
            for (int64_t e = 0; e < c.n_experts; ++e) {
                widen_stride(c.experts[e].gate_up, j);
                widen_stride(c.experts[e].down, j);
            }
        }
        Carver carver = {nullptr, 0};
        carve(carver);
        carver = {(char*)scratch(SCRATCH_COMMON, carver.used), 0};
        if (!carver.base) __builtin_trap();
        carve(carver);
        sort();
    }

    void widen_stride(const LinearParts& l, int j) {
        if (j >= l.count) return;
        const int64_t stride = prepared_stride(*l.part[j]);
        if (stride > strides[j]) strides[j] = stride;
    }

    void carve(Carver& carver) {
        carver.take(pairs, n_pairs);
        carver.take(places, n_pairs);
        carver.take(expert_of, n_pairs);
        carver.take(starts, call.n_experts + 1);
        carver.take(active, call.n_experts);
        for (int j = 0; j < MOST_PARTS; ++j) carver.take(prepared[j], n_pairs * strides[j] * 4);
        carver.take(inner, n_pairs * call.inner_size);
        carver.take(products, n_pairs * call.hidden_size);
    }

    // Places by counting: by expert, then by pair.
    void sort() {
        const int64_t n = call.n_experts;
        memset(starts, 0, sizeof(int32_t) * (n + 1));
        for (int64_t i = 0; i < n_pairs; ++i) starts[call.ids[i] + 1] += 1;
        for (int64_t e = 0; e < n; ++e) {
            if (starts[e + 1]) active[n_active++] = (int32_t)e;
            starts[e + 1] += starts[e];
        }
        for (int64_t i = 0; i < n_pairs; ++i) {
            const int32_t e = call.ids[i], place = starts[e]++;
            pairs[place] = (int32_t)i;
            places[i] = place;
            expert_of[place] = e;
        }
        for (int64_t e = n; e > 0; --e) starts[e] = starts[e - 1];
        starts[0] = 0;
    }

    // One row as the parts of a layer want it; parts of one kind share it.
    void prepare_row(const LinearParts& l, const T* x, int64_t place) {
        for (int j = 0; j < l.count; ++j) {
            const PackedLinear& part = *l.part[j];
            uint32_t* to = (uint32_t*)prepared[j] + place * strides[j];
            if (j && part.kind == l.part[j - 1]->kind) continue;
            if (is_prepared(part, x, part.n_in, 1))
                memcpy(to, x, sizeof(T) * part.n_in);
            else
                prepare_rows(part, x, 0, 1, to);
        }
    }

    // Panels [first, last) of the outputs of all parts, which lie side by side in `out`, for `n` rows from `place` on.
    template <typename Out>
    void slice(const LinearParts& l, int64_t place, int64_t n, int64_t first, int64_t last, Out* out, int64_t stride) {
        int from = 0;
        for (int j = 0; j < l.count && last > 0; ++j) {
            const PackedLinear& part = *l.part[j];
            if (j && part.kind != l.part[j - 1]->kind) from = j;
            const int64_t own = ceil_div(part.n_out, PANEL);
            if (first < own) {
                const int64_t end = (last < own ? last : own) * PANEL;
                PreparedRows rows = {(const uint32_t*)prepared[from] + place * strides[from], strides[from]};
                linear_slice(part, rows, n, first * PANEL, end < part.n_out ? end : part.n_out, {}, out, stride,
                             reads_compact(part, n));
            }
            first = first > own ? first - own : 0;
            last -= own;
            out += part.n_out;
        }
    }

    void gate_up(const LinearParts& l, int64_t place, int64_t n, int64_t first, int64_t last) {
        constexpr int64_t WIDE = EXPERT_CHUNK * PANEL;
        const int64_t size = call.inner_size, half = ceil_div(size, PANEL);
        const int64_t begin = first * PANEL, end = last * PANEL < size ? last * PANEL : size;
        T gate[EXPERT_ROWS * WIDE], up[EXPERT_ROWS * WIDE];
        // slice() counts columns from the first of all: gates begin at 0, the others at `size`.
        slice(l, place, n, first, last, gate - begin, WIDE);
        slice(l, place, n, half + first, half + last, up - begin - size, WIDE);
        for (int64_t r = 0; r < n; ++r) {
            T* to = inner + (place + r) * size + begin;
            if (call.limit > 0)
                clamped_swiglu_row(gate + r * WIDE, up + r * WIDE, to, end - begin, call.alpha, call.limit);
            else
                gated_row<false>(gate + r * WIDE, up + r * WIDE, to, end - begin);
        }
    }

    // Calls run(expert, place, rows, first panel, last panel) for all rows and `panels` panels of every active expert.
    template <typename Run>
    void each(TeamThread& thread, int64_t panels, const Run& run) {
        const int64_t chunks = ceil_div(panels, EXPERT_CHUNK);
        thread.stage(n_active * chunks, 1, [&](int64_t item, int64_t) {
            const int32_t e = active[item / chunks];
            const int64_t first = item % chunks * EXPERT_CHUNK;
            const int64_t last = first + EXPERT_CHUNK < panels ? first + EXPERT_CHUNK : panels;
            for (int64_t place = starts[e]; place < starts[e + 1]; place += EXPERT_ROWS) {
                const int64_t left = starts[e + 1] - place;
                run(call.experts[e], place, left < EXPERT_ROWS ? left : EXPERT_ROWS, first, last);
            }
        });
    }

    void add_up(int64_t token) {
        const int64_t dim = call.hidden_size, k = call.top_k;
        T* out = (T*)call.out + token * dim;
        int64_t i = 0;
        for (; i + WIDTH <= dim; i += WIDTH) {
            vf total = vf{};
            for (int64_t j = token * k; j < (token + 1) * k; ++j)
                total = fma(loadf(products + places[j] * dim + i), splat(call.weights[j]), total);
            store(out + i, total);
        }
        for (; i < dim; ++i) {
            vf total = vf{};
            for (int64_t j = token * k; j < (token + 1) * k; ++j)
                total = fma(splat(products[places[j] * dim + i]), splat(call.weights[j]), total);
            store_one(out + i, total[0]);
        }
    }

    void run(TeamThread& thread) {
        const int64_t dim = call.hidden_size, size = call.inner_size;
        thread.stage(n_pairs, 4, [&](int64_t first, int64_t last) {
            for (int64_t place = first; place < last; ++place)
                prepare_row(call.experts[expert_of[place]].gate_up, (const T*)call.x + pairs[place] / call.top_k * dim,
                            place);
        });
        each(thread, ceil_div(size, PANEL),
             [&](const Expert& e, int64_t place, int64_t n, int64_t first, int64_t last) {
                 gate_up(e.gate_up, place, n, first, last);
             });
        thread.stage(n_pairs, 4, [&](int64_t first, int64_t last) {
            for (int64_t place = first; place < last; ++place)
                prepare_row(call.experts[expert_of[place]].down, inner + place * size, place);
        });
        each(thread, ceil_div(dim, PANEL), [&](const Expert& e, int64_t place, int64_t n, int64_t first, int64_t last) {
            slice(e.down, place, n, first, last, products + place * dim, dim);
        });
        thread.stage(call.n_tokens, 4, [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; ++token) add_up(token);
        });
    }

    static void body(void* context, int index, int n) {
        Experts& experts = *(Experts*)context;
        TeamThread thread(experts.team, index, n);
        experts.run(thread);
    }
};

template <typename T>
void experts(const ExpertsCall& call) {
    if (call.n_tokens == 0) return;
    Experts<T> experts(call);
    parallel_team(call.threads < Team::MOST ? call.threads : Team::MOST, Experts<T>::body, &experts);
}

}  // namespace
