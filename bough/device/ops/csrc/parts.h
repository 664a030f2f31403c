// The weights of a layer that are multiplied as one, side by side: how they are divided among threads, and what they want of
// their inputs.
#pragma once

#include "linear.h"

namespace {

// Panels handed out at a time, where neither tiles nor streams ask for more.
constexpr int64_t STACK_CHUNK = DENSE_PANELS > FEW_PANELS ? DENSE_PANELS : FEW_PANELS;
constexpr int64_t FORESEEN = 1 << 16;    // words of a stretch of the next layer that a thread reads ahead: an eighth of a cache

// Tokens whose gates and values wait for each other, and the most panels of each that tiles multiply meanwhile.
#if defined(BOUGH_AMX)
constexpr int64_t GATED_ROWS = 3 * AMX_ROWS, MOST_GATED_ROWS = 12 * AMX_ROWS;
#else
constexpr int64_t GATED_ROWS = 8 * LINEAR_ROWS;
#endif
constexpr int64_t GATED_PANELS = 16;

// How panels are divided among threads, and where they lie. An index counts the panels of all parts.
struct Panels {
    int64_t tokens, threads;

    static int64_t count(const LinearParts& l) {
        int64_t n = 0;
        for (int i = 0; i < l.count; ++i) n += ceil_div(l.part[i]->n_out, PANEL);
        return n;
    }

    bool are_blocks(const LinearParts& l) const { return has_blocks(*l.part[0], tokens); }

    // How many of n panels are handed out at a time, `most` of those that stay there.
    int64_t chunk(const LinearParts& l, int64_t n, int64_t most) const {
        if (!are_blocks(l)) return reads_streams(*l.part[0], tokens) && n >= 2 * STREAMS * threads ? STREAMS : STACK_CHUNK;
        const int64_t share = ceil_div(n, threads), pairs = most < 4 ? 1 : most / 2;
        return 2 * ceil_div(ceil_div(share, 2), ceil_div(ceil_div(share, 2), pairs));
    }

    int64_t chunk(const LinearParts& l) const { return chunk(l, count(l), kept(l)); }

    // The same of gates, which are handed out with what they are multiplied with.
    int64_t gated_chunk(const LinearParts& l) const {
        const int64_t most = kept(l) / 2;
        return chunk(l, count(l) / 2, most < GATED_PANELS ? most : GATED_PANELS);
    }

    // How many tokens' gates and values wait for each other: more where weights do not stay in a cache until the next ones take
    // their turn, or have to be spread again.
    int64_t gated_rows([[maybe_unused]] const LinearParts& l) const {
#if defined(BOUGH_AMX)
        const PackedLinear& first = *l.part[0];
        const bool stay = 2 * gated_chunk(l) * input_words(first) * PANEL <= AMX_WEIGHT_WORDS * 5 / 4;
        const int64_t most = amx_some_rows(first);
        if (are_blocks(l) && (!stay || first.kind == LINEAR_Q4_WHOLE)) return most < MOST_GATED_ROWS ? most : MOST_GATED_ROWS;
#endif
        return l.part[0]->kind == LINEAR_BF16 && are_shared(tokens) ? 3 * GATED_ROWS : GATED_ROWS;
    }

    int64_t kept([[maybe_unused]] const LinearParts& l) const {
#if defined(BOUGH_AMX)
        return amx_panels(*l.part[0], tokens);
#else
        return STACK_CHUNK;
#endif
    }

    // Where panel `index` of all parts begins, in the form that the step reads.
    const uint32_t* at(const LinearParts& l, int64_t index) const {
        int i = 0;
        for (; index >= ceil_div(l.part[i]->n_out, PANEL); ++i) index -= ceil_div(l.part[i]->n_out, PANEL);
        return read_at(*l.part[i], index, tokens);
    }

    // A place in a weight where a thread goes on, and how many words it reads from there.
    struct Place {
        const uint32_t* at = nullptr;
        int64_t words = 0;

        Place part(int64_t i, int64_t n) const { return {at + words * i / n, words * (i + 1) / n - words * i / n}; }
    };

    // Of panels [first, last), as if they were all of one part: nothing but what is asked for ahead depends on it.
    Place place(const LinearParts& l, int64_t first, int64_t last) const {
        const int64_t words = (last - first) * read_words(*l.part[0], tokens);
        return {at(l, first), words < FORESEEN ? words : FORESEEN};
    }
};

// The inputs [T, n_in] as the parts want them, in `memory` where they are not so already.
template <typename T>
struct Inputs {
    int64_t tokens;
    char* memory;

    int64_t bytes(const LinearParts& l) const {
        int64_t sum = 0;
        for (int i = 0; i < l.count; ++i) sum += padded(prepared_bytes(*l.part[i], tokens));
        return sum;
    }

    // Where the inputs x [T, n_in] lie as the parts want them; parts that want the same share it.
    void find(const LinearParts& l, const T* x, PreparedRows* found) const {
        char* at = memory;
        for (int i = 0; i < l.count; ++i) {
            const PackedLinear& part = *l.part[i];
            if (is_prepared(part, x, part.n_in, tokens)) {
                found[i] = {(const uint32_t*)x, part.n_in / 2};
            } else if (i && part.kind == l.part[i - 1]->kind) {
                found[i] = found[i - 1];
            } else {
                found[i] = {(const uint32_t*)at, prepared_stride(part)};
                at += padded(prepared_bytes(part, tokens));
            }
        }
    }

    // Whether x has to be made what the parts want.
    bool are_to_prepare(const LinearParts& l, const T* x) const {
        for (int i = 0; i < l.count; ++i)
            if (!is_prepared(*l.part[i], x, l.part[i]->n_in, tokens)) return true;
        return false;
    }

    // Makes tokens [first, last) of it so.
    void prepare(const LinearParts& l, const T* x, int64_t first, int64_t last) const {
        PreparedRows found[MOST_PARTS];
        find(l, x, found);
        for (int i = 0; i < l.count; ++i) {
            const PackedLinear& part = *l.part[i];
            if (is_prepared(part, x, part.n_in, tokens) || (i && found[i].at == found[i - 1].at)) continue;
            prepare_rows(part, x + first * part.n_in, part.n_in, last - first, (uint32_t*)found[i].row(first));
        }
    }
};

}  // namespace
