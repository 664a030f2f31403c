// Low-rank updates (LoRA, Hu et al. 2021) of different adapters in one batch: out += B (A x), in bfloat16.
//
// Both products go through the kernels of packed bfloat16, so the bits of a token depend on itself alone. What lies
// between them is rounded to bfloat16. A kernel that is already running on several threads calls the parts itself:
//
//     ... lora_shrink(table, runs, i, x, x_stride) for each of the runs ...
//     ... barrier ...
//     lora_expand(table, runs, i, 0, T, begin, end, out, out_stride);    // once the columns [begin, end) of out are written
#pragma once

#include "elementwise.h"
#include "linear.h"
#include "team.h"

namespace {

constexpr int64_t LORA_COLUMNS = 64;      // columns in work at a time
constexpr int64_t LORA_SHARE = 256;       // columns handed out at a time

// The inner values of a token: those of each part of the layer, `rank` of them, side by side.
INLINE bf16* lora_inner(const LoraRuns& runs, int64_t token) { return (bf16*)runs.inner + token * runs.inner_stride; }

// Run i: inner := A x
INLINE void lora_shrink(const LoraTable& table, const LoraRuns& runs, int64_t i, const bf16* x, int64_t x_stride) {
    const LoraRun& run = runs.run[i];
    const LoraAdapter* adapter = table.adapters[run.place];
    if (!adapter) return;
    PreparedRows rows = {(const uint32_t*)(x + run.first * x_stride), run.step * x_stride / 2};
    linear_slice(adapter->a, rows, run.count, 0, adapter->a.n_out, nullptr, lora_inner(runs, run.first),
                 run.step * runs.inner_stride);
}

// Run i, as far as it is among the n tokens from `token` on: out += B inner for the columns [begin, end), where `begin`
// is a part's first column or whole panels from it; `out` is where `token` and column 0 would lie.
INLINE void lora_expand(const LoraTable& table, const LoraRuns& runs, int64_t i, int64_t token, int64_t n,
                        int64_t begin, int64_t end, bf16* out, int64_t out_stride) {
    const LoraRun& run = runs.run[i];
    const LoraAdapter* adapter = table.adapters[run.place];
    // Those of its tokens that are meant, counted from its first.
    const int64_t top = token > run.first ? (token - run.first + run.step - 1) / run.step : 0;
    const int64_t past = token + n > run.first ? (token + n - run.first + run.step - 1) / run.step : 0;
    const int64_t bottom = past < run.count ? past : run.count;
    if (!adapter || top >= bottom) return;
    const int64_t first_token = run.first + top * run.step;
    float delta[LORA_ROWS * LORA_COLUMNS];
    for (int64_t p = 0, offset = 0; p < table.n_parts; offset += table.sizes[p], ++p) {
        const PackedLinear& b = adapter->b[p];
        const int64_t stop = end < offset + table.sizes[p] ? end : offset + table.sizes[p];
        if (!b.weight) continue;
        PreparedRows rows = {(const uint32_t*)(lora_inner(runs, first_token) + p * b.n_in),
                             run.step * runs.inner_stride / 2};
        for (int64_t from = begin > offset ? begin : offset; from < stop; from += LORA_COLUMNS) {
            const int64_t first = from - offset, width = stop - from < LORA_COLUMNS ? stop - from : LORA_COLUMNS;
            linear_slice(b, rows, bottom - top, first, first + width, nullptr, delta - first, LORA_COLUMNS);
            for (int64_t r = 0; r < bottom - top; ++r) {
                bf16* to = out + (first_token - token + r * run.step) * out_stride + from;
                const float* add = delta + r * LORA_COLUMNS;
                int64_t c = 0;
                for (; c + WIDTH <= width; c += WIDTH) store(to + c, load(to + c) + loadf(add + c));
                for (; c < width; ++c) store_one(to + c, widen(to[c]) + add[c]);
            }
        }
    }
}

// Brings the weights near that run i adds to the columns [begin, end) with: few bytes, far from those of other runs, that
// no hardware foresees.
INLINE void lora_fetch(const LoraTable& table, const LoraRuns& runs, int64_t i, int64_t begin, int64_t end) {
    const LoraAdapter* adapter = table.adapters[runs.run[i].place];
    for (int64_t p = 0, offset = 0; adapter && p < table.n_parts; offset += table.sizes[p], ++p) {
        const PackedLinear& b = adapter->b[p];
        const int64_t first = begin > offset ? begin - offset : 0;
        const int64_t stop = (end < offset + table.sizes[p] ? end : offset + table.sizes[p]) - offset;
        if (!b.weight || first >= stop) continue;
        const uint32_t* at = b.weight + first / PANEL * panel_words(b);
        const int64_t words = ceil_div(stop - first, PANEL) * panel_words(b);
        for (int64_t word = 0; word < words; word += 64 / sizeof(uint32_t)) __builtin_prefetch(at + word, 0, 2);
    }
}

// out [T, out_stride] += the updates of x [T, n_in].
struct Lora {
    const LoraCall& call;
    Team team;

    static void body(void* context, int index, int n) {
        Lora& lora = *(Lora*)context;
        const LoraCall& c = lora.call;
        const LoraRuns& runs = *c.runs;
        TeamThread thread(lora.team, index, n);
        thread.share(runs.n_runs, 1, [&](int64_t i, int64_t) {
            lora_shrink(*c.table, runs, i, (const bf16*)c.x, c.n_in);
        });
        thread.wait();
        const int64_t chunks = (c.n_out + LORA_SHARE - 1) / LORA_SHARE;
        thread.share(runs.n_runs * chunks, 1, [&](int64_t item, int64_t) {
            lora.expand(item / chunks, item % chunks * LORA_SHARE);
        });
    }

    // Whole panels of each part: a share that a part ends in is cut there.
    void expand(int64_t i, int64_t begin) const {
        const LoraTable& table = *call.table;
        const LoraRun& run = call.runs->run[i];
        const int64_t end = begin + LORA_SHARE < call.n_out ? begin + LORA_SHARE : call.n_out;
        for (int64_t p = 0, offset = 0; p < table.n_parts; offset += table.sizes[p], ++p) {
            int64_t from = begin > offset ? offset + (begin - offset + PANEL - 1) / PANEL * PANEL : offset;
            int64_t to = end > offset ? offset + (end - offset + PANEL - 1) / PANEL * PANEL : offset;
            if (to > offset + table.sizes[p]) to = offset + table.sizes[p];
            if (from < to)
                lora_expand(table, *call.runs, i, run.first, (run.count - 1) * run.step + 1, from, to,
                            (bf16*)call.out + run.first * call.n_out, call.n_out);
        }
    }
};

void lora(const LoraCall& call) {
    Lora lora = {call, {}};
    int64_t tokens = 0;
    for (int64_t i = 0; i < call.runs->n_runs; ++i) tokens += call.runs->run[i].count;
    int threads = tokens * (call.n_in + call.n_out) < 4 * SERIAL_ELEMENTS ? 1 : call.threads;
    parallel_team(threads < Team::MOST ? threads : Team::MOST, Lora::body, &lora);
}

}  // namespace
