// The tokens of a step whose hidden states are wanted: all that the last layer is computed for (stack.h).
#pragma once

#include "common.h"

namespace {

// The wanted tokens as a step of their own: each is a row, its last token or one that has others behind it.
struct Ends {
    StackCall call;
    int32_t *rows, *starts, *lengths, *group_start, *group_rows;

    explicit Ends(const StackCall& whole) : call(whole) {
        const AttentionCall& from = whole.attention;
        const int64_t n = whole.n_ends;
        rows = (int32_t*)scratch(SCRATCH_ENDS, (4 * n + from.n_groups + 2) * (int64_t)sizeof(int32_t));
        if (!rows) __builtin_trap();
        starts = rows + n;
        lengths = starts + n + 1;
        group_rows = lengths + n;
        group_start = group_rows + n;
        for (int64_t e = 0, row = 0; e < n; ++e) {
            while (from.q_start[row + 1] <= whole.ends[e]) ++row;
            rows[e] = from.rows[row];
            starts[e] = (int32_t)e;
            lengths[e] = from.seq_len[row] - (from.q_start[row + 1] - 1 - whole.ends[e]);
        }
        starts[n] = (int32_t)n;
        // A row is of one group at most, which all its tokens have before them.
        int32_t grouped = 0;
        for (int g = 0; g < from.n_groups; ++g) {
            group_start[g] = grouped;
            for (int i = from.group_start[g]; i < from.group_start[g + 1]; ++i) {
                const int32_t* of_row = from.q_start + from.group_rows[i];
                int64_t e = 0;
                while (e < n && whole.ends[e] < of_row[0]) ++e;
                for (; e < n && whole.ends[e] < of_row[1]; ++e) group_rows[grouped++] = (int32_t)e;
            }
        }
        group_start[from.n_groups] = grouped;
        call.layers = whole.layers + whole.n_layers - 1;
        call.n_layers = 1;
        call.embedded = whole.x;
        call.n_ends = -1;
        call.rope.n_tokens = call.attention.n_rows = (int)n;
        call.attention.rows = rows;
        call.attention.q_start = starts;
        call.attention.seq_len = lengths;
        call.attention.group_start = group_start;
        call.attention.group_rows = group_rows;
    }
};

}  // namespace
