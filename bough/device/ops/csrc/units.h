// How one call of attention is divided, and the memory that a part of it works in.
#pragma once

#include "lanes.h"

namespace {

constexpr int MAX_QUERIES = 4 * LANES;
constexpr int NARROW = 12;                  // queries up to which keys lie in the lanes
constexpr double MAX_PARTIAL = 256 << 20;   // bytes that partial results of a call may take in each of its two stages

inline int64_t padded(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }

// Query tokens of several rows and the prefix that they share.
struct Group {
    int row;                // index in the batch of one of them, whose page table stands for all
    int n_segments;         // of the prefix
    int n_tokens;
    const int32_t* tokens;  // [n_tokens] indices of the new tokens
    float* records;         // [n_kv_heads][n_tokens * heads per kv head][dim + 2]
};

struct Unit {
    int row;                // index in the batch
    int kv_head;            // the first
    int n_heads;            // kv heads
    int group;              // -1: the row's own keys; else the prefix of that group
    int first_token;        // among the row's new tokens, or the group's
    int n_tokens;
    int first_segment;
    int last_segment;       // exclusive
    int parts;              // items that it is cut into
    int pending;            // those of them that have not finished
    float* partial;         // what each segment comes to, if there are several items
    int64_t stride;         // floats from one segment to the next in `partial`; 0: one item keeps a total instead
};

struct Item {
    int unit;
    int first_segment;
    int last_segment;       // exclusive
};

// Where a row stands in its group.
struct Member {
    int group;              // -1: in none
    int offset;             // of its first token among the group's
};

// The cells of one segment's keys, from a unit's first kv head on, and the scales of one of its heads.
struct Cells {
    int n;
    int32_t loc[SEGMENT];
    const void *keys[SEGMENT], *values[SEGMENT];
    float k_scale[SEGMENT], v_scale[SEGMENT];
};

// Hands out parts of one block of memory; with a null base it only adds them up.
struct Carver {
    char* base;
    int64_t used;

    template <typename P>
    void take(P*& part, int64_t n) {
        part = (P*)(base + used);
        used += padded(n * (int64_t)sizeof(P));
    }
};

// Words of a query or a key beside many queries.
template <typename T>
INLINE int lane_words_of(int words) { return IN_TILES<Word<T>> ? (int)ceil_to(words, 16) : words; }

// One thread's scratch memory.
template <typename T>
struct Work {
    Word<T>* queries;       // [heads][queries][words], or [blocks][words][LANES]; for int8 cells, two digits of each
    float* q_scale;         // [heads][queries] or [blocks][LANES]: QueryScale
    int32_t *q_high, *q_low;
    uint32_t* tile;         // [words][TILE] words of cells
    T *keys, *values;       // [SEGMENT][dim] cells as T, where pairs of those are multiplied
    Word<T> *packed, *pairs;    // K and V of LaneBlock
    float* scores;          // [heads][queries][SEGMENT], for int8 cells two of each, or [SEGMENT][LANES]; weights if floats
    T* weights;             // [heads][queries][SEGMENT] pairs, or digits
    float* segment;         // [heads][queries][dim + 2]
    int32_t *seen, *unseen; // [LANES] where the keys that a query sees end and begin
    float* total;           // [blocks][dim + 2][LANES]
    float* rows;            // [heads][queries][dim + 2] totals: output, maximum, sum
    Cells* cells;           // [2] this segment's and the next one's

    // For units of up to n_wide queries of one kv head, or NARROW of n_heads.
    void carve(Carver& c, int64_t n_wide, int n_heads, int words, int dim) {
        int64_t blocks = ceil_div(n_wide, LANES), n_narrow = NARROW * n_heads;
        int64_t n_queries = blocks * LANES > n_narrow ? blocks * LANES : n_narrow;
        c.take(queries, 2 * n_queries * lane_words_of<T>(words / 2));   // of two digits at least as much
        c.take(q_scale, n_queries);
        c.take(q_high, n_queries);
        c.take(q_low, n_queries);
        c.take(tile, (int64_t)words * TILE);
        c.take(keys, FLOATS<T> ? 0 : (int64_t)SEGMENT * dim);
        c.take(values, FLOATS<T> ? 0 : (int64_t)SEGMENT * dim);
        c.take(packed, (int64_t)SEGMENT * lane_words_of<T>(words));
        c.take(pairs, (int64_t)SEGMENT / KEYS_PER_WORD<Word<T>> * dim);
        c.take(scores, (int64_t)SEGMENT * (LANES > 2 * n_narrow ? LANES : 2 * n_narrow));
        c.take(weights, n_narrow * SEGMENT);
        c.take(segment, (dim + 2) * n_narrow);
        c.take(seen, LANES);
        c.take(unseen, LANES);
        c.take(total, blocks * (dim + 2) * LANES);
        c.take(rows, n_queries * (dim + 2));
        c.take(cells, 2);
    }
};

}  // namespace
