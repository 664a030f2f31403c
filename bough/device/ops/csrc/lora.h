// Low-rank updates (LoRA, Hu et al. 2021) of different adapters in one batch: out += B (A x), in bfloat16.
//
// The order of every sum depends on the shapes of A and B alone, so the bits of a token depend on itself alone. What
// lies between the products is rounded to bfloat16. A kernel that is already running on several threads calls the parts
// itself:
//
//     ... lora_shrink(table, runs, item, x, x_stride) for each of the lora_items(table, runs) ...
//     ... until all of them are done ...
//     lora_expand(table, runs, i, 0, T, begin, end, out, out_stride);    // once out's columns [begin, end) are written
//
// Adapters are small and many: what a step reads of them lies far apart. Unless it is asked for in time (lora_want_a,
// lora_want_b), reading takes most of the time.
#pragma once

#include "elementwise.h"
#include "linear.h"
#include "team.h"

namespace {

constexpr int64_t LORA_SHARE = 256;       // columns handed out at a time

// Sums in parallel of a product with one panel, which would otherwise wait for each other.
constexpr int LORA_CHAINS = WIDTH == 16 ? 4 : 1;

// The inner values of a token: those of each part of the layer, `rank` of them, side by side.
INLINE bf16* lora_inner(const LoraRuns& runs, int64_t token) { return (bf16*)runs.inner + token * runs.inner_stride; }

INLINE const LoraAdapter* lora_adapter(const LoraTable& table, const LoraRuns& runs, int64_t i) {
    return table.adapters[runs.run[i].place];
}

// Calls block.run<R>(row) for blocks of R <= LINEAR_ROWS of n rows.
template <typename Block>
INLINE void lora_blocks(int64_t n, const Block& block) {
    const int64_t turns = ceil_div(n, LINEAR_ROWS);
    for (int64_t turn = 0, row = 0; turn < turns; ++turn) {
        const int64_t end = n * (turn + 1) / turns;
        switch (end - row) {
            case 1: block.template run<1>(row); break;
            case 2: block.template run<2>(row); break;
            case 3: block.template run<3>(row); break;
#if BOUGH_WIDTH == 16
            case 4: block.template run<4>(row); break;
            case 5: block.template run<5>(row); break;
#endif
            default: block.template run<LINEAR_ROWS>(row);
        }
        row = end;
    }
}

// One panel of A, and where its results go.
struct LoraShrink {
    const uint32_t* weight;
    int64_t words;
    PreparedRows x;
    bf16* inner;
    int64_t stride;

    template <int R>
    INLINE void run(int64_t row) const {
        constexpr int C = LORA_CHAINS;
        Sums<vf, R, C> sums;
        clear(sums);
        RowCursor a(x.row(row), x.stride);
        const uint32_t* w = weight;
        int64_t i = 0;
        for (; i + C <= words; i += C, w += C * PANEL, a.advance(4 * C)) add<R, C>(sums, w, a);
        for (; i < words; ++i, w += PANEL, a.advance(4)) add<R, 1>(sums, w, a);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < PANEL_VECS; ++v) {
                vf total = sums.at[r][v];
                if constexpr (C == 4) total = (total + sums.at[r][PANEL_VECS + v]) +
                                    (sums.at[r][2 * PANEL_VECS + v] + sums.at[r][3 * PANEL_VECS + v]);
                store(inner + (row + r) * stride + v * WIDTH, total);
            }
    }

    // Chain c of the sums += word c of the inputs times that of the weight.
    template <int R, int N>
    static INLINE void add(Sums<vf, R, LORA_CHAINS>& sums, const uint32_t* w, const RowCursor& a) {
        vu column[N * PANEL_VECS];
        load_word<N>(column, w, PANEL);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < N * PANEL_VECS; ++j)
                sums.at[r][j] = dot_pairs(sums.at[r][j], column[j], ((const uint32_t*)a(r))[j / PANEL_VECS]);
    }
};

INLINE int64_t lora_panels(const LoraTable& table, const LoraRuns& runs) {
    int64_t most = 0;
    for (int64_t i = 0; i < runs.n_runs; ++i) {
        const LoraAdapter* adapter = lora_adapter(table, runs, i);
        if (adapter && adapter->a.n_out > most * PANEL) most = adapter->a.n_out / PANEL;
    }
    return most;
}

// The first product, panel by panel of A, run by run.
INLINE int64_t lora_items(const LoraTable& table, const LoraRuns& runs) {
    return runs.n_runs * lora_panels(table, runs);
}

// Items [first, last) of the first product: inner := A x
INLINE void lora_shrink(const LoraTable& table, const LoraRuns& runs, int64_t first, int64_t last, const bf16* x,
                        int64_t x_stride) {
    const int64_t panels = lora_panels(table, runs);
    for (int64_t item = first; item < last; ++item) {
        const LoraRun& run = runs.run[item / panels];
        const LoraAdapter* adapter = table.adapters[run.place];
        const int64_t panel = item % panels;
        if (!adapter || panel * PANEL >= adapter->a.n_out) continue;
        const PackedLinear& a = adapter->a;
        LoraShrink shrink = {a.weight + panel * panel_words(a), a.n_in / 2,
                             {(const uint32_t*)(x + run.first * x_stride), run.step * x_stride / 2},
                             lora_inner(runs, run.first) + panel * PANEL, run.step * runs.inner_stride};
        lora_blocks(run.count, shrink);
    }
}

// The second product for columns [first, stop) of one part, and where column 0 of it is.
struct LoraExpand {
    const PackedLinear& b;
    PreparedRows inner;
    int64_t first, stop;
    bf16* out;
    int64_t stride;

    template <int R>
    INLINE void run(int64_t row) const {
        int64_t panel = first / PANEL;
        for (; (panel + DENSE_PANELS) * PANEL <= stop; panel += DENSE_PANELS) add<R, DENSE_PANELS>(row, panel);
        for (; panel * PANEL < stop; ++panel) add<R, 1>(row, panel);
    }

    template <int R, int P>
    INLINE void add(int64_t row, int64_t panel) const {
        constexpr int STEP = 8;    // ranks are multiples of 2 * STEP
        const int64_t words = b.n_in / 2;
        const uint32_t* w = b.weight + panel * words * PANEL;
        Sums<vf, R, P> sums;
        clear(sums);
        RowCursor a(inner.row(row), inner.stride);
        for (int64_t i = 0; i < words; i += STEP, a.advance(4 * STEP))
#pragma GCC unroll 8
            for (int j = 0; j < STEP; ++j) {
                vu column[P * PANEL_VECS];
                load_word<P>(column, w + (i + j) * PANEL, words * PANEL);
                add_word<PairDots>(sums, column, a, j);
            }
        const int columns = (int)(stop - panel * PANEL < P * PANEL ? stop - panel * PANEL : P * PANEL);
        for (int r = 0; r < R; ++r) add_to(out + (row + r) * stride + panel * PANEL, sums.at[r], columns);
    }

    template <int N>
    static INLINE void add_to(bf16* to, const vf (&sums)[N], int columns) {
        if (N * WIDTH == columns) {
            for (int j = 0; j < N; ++j) store(to + j * WIDTH, load(to + j * WIDTH) + sums[j]);
            return;
        }
        float value[N * WIDTH];
        for (int j = 0; j < N; ++j) storef(value + j * WIDTH, sums[j]);
        for (int c = 0; c < columns; ++c) store_one(to + c, widen(to[c]) + value[c]);
    }
};

// Run i, as far as it is among the n tokens from `token` on: out += B inner for the columns [begin, end), where `begin`
// is a part's first column or whole panels from it; `out` is where `token` and column 0 would lie.
NOINLINE void lora_expand(const LoraTable& table, const LoraRuns& runs, int64_t i, int64_t token, int64_t n,
                          int64_t begin, int64_t end, bf16* out, int64_t out_stride) {
    const LoraRun& run = runs.run[i];
    const LoraAdapter* adapter = table.adapters[run.place];
    // Those of its tokens that are meant, counted from its first.
    const int64_t top = token > run.first ? (token - run.first + run.step - 1) / run.step : 0;
    const int64_t past = token + n > run.first ? (token + n - run.first + run.step - 1) / run.step : 0;
    const int64_t bottom = past < run.count ? past : run.count;
    if (!adapter || top >= bottom) return;
    const int64_t first_token = run.first + top * run.step;
    for (int64_t p = 0, offset = 0; p < table.n_parts && offset < end; offset += table.sizes[p], ++p) {
        const PackedLinear& b = adapter->b[p];
        const int64_t stop = end < offset + table.sizes[p] ? end : offset + table.sizes[p];
        const int64_t from = begin > offset ? begin : offset;
        if (!b.weight || from >= stop) continue;
        PreparedRows inner = {(const uint32_t*)(lora_inner(runs, first_token) + p * b.n_in),
                              run.step * runs.inner_stride / 2};
        LoraExpand expand = {b, inner, from - offset, stop - offset,
                             out + (first_token - token) * out_stride + offset, run.step * out_stride};
        lora_blocks(bottom - top, expand);
    }
}

// The weights that items [first, last) of the first product read.
INLINE void lora_want_a(const LoraTable& table, const LoraRuns& runs, int64_t first, int64_t last, Wanted& wanted) {
    const int64_t panels = lora_panels(table, runs);
    for (int64_t item = first; item < last; ++item) {
        const LoraAdapter* adapter = lora_adapter(table, runs, item / panels);
        const int64_t panel = item % panels;
        if (adapter && panel * PANEL < adapter->a.n_out)
            wanted.add(adapter->a.weight + panel * panel_words(adapter->a), panel_words(adapter->a));
    }
}

// The weights that all runs add to the columns [begin, end) with.
INLINE void lora_want_b(const LoraTable& table, const LoraRuns& runs, int64_t begin, int64_t end, Wanted& wanted) {
    for (int64_t i = 0; i < runs.n_runs; ++i) {
        const LoraAdapter* adapter = lora_adapter(table, runs, i);
        if (!adapter || (i && runs.run[i].place == runs.run[i - 1].place)) continue;
        for (int64_t p = 0, offset = 0; p < table.n_parts && offset < end; offset += table.sizes[p], ++p) {
            const PackedLinear& b = adapter->b[p];
            const int64_t first = begin > offset ? begin - offset : 0;
            const int64_t stop = (end < offset + table.sizes[p] ? end : offset + table.sizes[p]) - offset;
            if (!b.weight || first >= stop) continue;
            wanted.add(b.weight + first / PANEL * panel_words(b), ceil_div(stop - first, PANEL) * panel_words(b));
        }
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
        thread.stage(lora_items(*c.table, runs), 1, [&](int64_t first, int64_t last) {
            lora_shrink(*c.table, runs, first, last, (const bf16*)c.x, c.n_in);
        });
        const int64_t chunks = (c.n_out + LORA_SHARE - 1) / LORA_SHARE;
        thread.stage(runs.n_runs * chunks, 1, [&](int64_t item, int64_t) {
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
