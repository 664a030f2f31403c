// What of a call lies where: which positions a unit's queries see, the cells of a segment, and how both are laid out in a
// thread's memory.
#pragma once

#include "mix.h"
#include "transpose.h"
#include "units.h"

namespace {

template <typename T>
struct Layout {
    typedef Word<T> word;
    const AttentionCall& call;
    static constexpr bool BYTES = BYTE_DOTS && sizeof(T) == 2;  // whether int8 cells are multiplied as they are (bytes.h)
    const int group_heads, dim, words;      // words of a query, unless it is digits
    const int64_t record;   // floats of one query's partial result: output, maximum, sum
    const bool bytes;       // cells are such
    const int key_words;    // of one head of a key, as it is computed with
    Group* groups = nullptr;

    explicit Layout(const AttentionCall& c)
        : call(c), group_heads(c.n_heads / c.n_kv_heads), dim(c.head_dim), words(dim / KEYS_PER_WORD<word>), record(dim + 2),
          bytes(BYTES && c.kv_dtype == BOUGH_INT8), key_words(bytes ? dim / 4 : words) {}

    int new_tokens(int row) const { return call.q_start[row + 1] - call.q_start[row]; }

    // Queries of each of the unit's kv heads.
    int n_queries(const Unit& u) const { return u.n_tokens * group_heads; }

    // Vectors of a block of LANES that hold the first of so many queries.
    static int n_vecs(int n) { return n < LANES ? (int)ceil_div(n, WIDTH) : LANE_VECS; }

    bool narrow(const Unit& u) const { return n_queries(u) <= NARROW; }

    // Records of one segment, or of the total.
    int64_t n_records(const Unit& u) const { return (int64_t)u.n_heads * n_queries(u); }

    // Positions before this one are visible to query token `t` of the unit.
    int visible(const Unit& u, int t) const {
        if (u.group >= 0) return u.last_segment * SEGMENT;
        return call.seq_len[u.row] - new_tokens(u.row) + u.first_token + t + 1;
    }

    // The first position that is visible to it.
    int first_visible(const Unit& u, int t) const {
        if (!call.window) return 0;
        int end = visible(u, t), begin = call.chunked ? (end - 1) / call.window * call.window : end - call.window;
        return begin > 0 ? begin : 0;
    }

    // Index of query token `t` of the unit among all new tokens.
    int64_t token(const Unit& u, int t) const {
        if (u.group >= 0) return groups[u.group].tokens[u.first_token + t];
        return call.q_start[u.row] + u.first_token + t;
    }

    const T* query(const Unit& u, int r) const { return (const T*)call.q + head(u, r) * dim; }

    // Query r of the unit to its digits, two of each element.
    void split(const Unit& u, int r, int8_t* digits, Work<T>& w) const {
        QueryScale s = split_query(query(u, r), dim, digits, digits + dim);
        w.q_scale[r] = s.scale;
        w.q_high[r] = s.high;
        w.q_low[r] = s.low;
    }

    // Words of T, or of digits, of query r of the unit; digits take as much of `to` as those would.
    const uint32_t* query_words(const Unit& u, int r, uint32_t* to, Work<T>& w) const {
        if (!bytes) return (const uint32_t*)query(u, r);
        split(u, r, (int8_t*)to, w);
        return to;
    }

    // Words of a query of few.
    int few_words() const { return bytes ? dim / 2 : words; }

    void load_few(const Unit& u, Work<T>& w) const {
        const int n = (int)n_records(u);
        for (int r = 0; r < n; ++r) {
            word* to = w.queries + (int64_t)r * few_words();
            if (bytes)
                split(u, r, (int8_t*)to, w);
            else if constexpr (FLOATS<T>)
                for (int d = 0; d < dim; d += WIDTH) storef(to + d, load(query(u, r) + d));
            else
                memcpy(to, query(u, r), sizeof(T) * dim);
        }
    }

    void load_queries(const Unit& u, Work<T>& w) const {
        const int n = (int)n_records(u);
        if (narrow(u)) load_few(u, w);
        for (int first = 0; !narrow(u) && first < n; first += WIDTH) {
            const uint32_t* rows[WIDTH];
            uint32_t* to = (uint32_t*)w.queries + (int64_t)(first / LANES) * lane_query() * LANES + first % LANES;
            // Lanes behind the last query repeat it.
            for (int i = 0; i < WIDTH; ++i)
                rows[i] = first + i < n ? query_words(u, first + i, w.tile + i * dim / 2, w) : rows[i - 1];
            const int n_parts = bytes ? 2 : 1;      // digits
            const bool in_tiles = IN_TILES<word>;
            for (int part = 0; part < n_parts; ++part, to += lane_words() * LANES) {
                const int n_words = bytes ? key_words : dim / PER_WORD<T>;
                transpose_rows(rows, part * key_words, n_words, to, LANES);
                if (FLOATS<T> && !bytes) spread<T>(to, n_words, LANES);
                for (int i = key_words; in_tiles && i < lane_words(); ++i)
                    memset(to + i * LANES, 0, sizeof(uint32_t) * WIDTH);
            }
        }
    }

    // n words of WIDTH rows, from the word `first` on: to[word * stride + row].
    static void transpose_rows(const uint32_t* const* rows, int64_t first, int n, uint32_t* to, int stride) {
        for (int i = 0; i < n; i += WIDTH)
            transpose(rows, first + i, n - i < WIDTH ? n - i : WIDTH, to + (int64_t)i * stride, stride);
    }

    // Index of record r of the unit among the heads of all new tokens.
    int64_t head(const Unit& u, int r) const {
        int query = r % n_queries(u), kv_head = u.kv_head + r / n_queries(u);
        return token(u, query / group_heads) * call.n_heads + (int64_t)kv_head * group_heads + query % group_heads;
    }

    int keys_of(const Unit& u, int segment) const {
        int left = visible(u, u.n_tokens - 1) - segment * SEGMENT;
        return left < SEGMENT ? left : SEGMENT;
    }

    const int32_t* locs(const Unit& u, int segment) const {
        return call.page_table + (int64_t)call.rows[u.row] * call.table_stride + segment * SEGMENT;
    }

    // What so many heads of a cell take.
    int cell_bytes_of(int n_heads) const { return (int)cell_bytes(call.kv_dtype) * dim * n_heads; }

    // Finds the cells of a segment. Whole vectors of keys may be read: the first and the last cell that the unit sees
    // stand for those before and after them.
    void locate(const Unit& u, int segment, Cells& to) const {
        to.n = keys_of(u, segment);
        const int n = read_keys(to), first = first_visible(u, 0) - segment * SEGMENT;
        memcpy(to.loc, locs(u, segment), sizeof(int32_t) * to.n);
        for (int i = 0; i < first; ++i) to.loc[i] = to.loc[first];
        for (int i = to.n; i < n; ++i) to.loc[i] = to.loc[to.n - 1];
        const int64_t bytes = cell_bytes_of(1), stride = cell_bytes_of(call.n_kv_heads);
        const char *keys = (const char*)call.k + u.kv_head * bytes, *values = (const char*)call.v + u.kv_head * bytes;
        for (int i = 0; i < n; ++i) {
            to.keys[i] = keys + to.loc[i] * stride;
            to.values[i] = values + to.loc[i] * stride;
        }
    }

    // The scales of one kv head, for int8.
    void load_scales(int kv_head, Cells& cells) const {
        for (int i = 0, n = read_keys(cells); call.k_scale && i < n; ++i) {
            cells.k_scale[i] = call.k_scale[(int64_t)cells.loc[i] * call.n_kv_heads + kv_head];
            cells.v_scale[i] = call.v_scale[(int64_t)cells.loc[i] * call.n_kv_heads + kv_head];
        }
    }

    // Keys that are read: whole vectors.
    static int read_keys(const Cells& cells) { return (int)ceil_div(cells.n, WIDTH) * WIDTH; }

    // n cells as bf16: where they lie, or those of one head, `head` elements behind where the first one's lie, rounded into
    // `to`. Then that one lies first.
    const bf16* const* as_pairs(const void* const* cells, int64_t& head, int n, bf16* to, const bf16** rows) const {
        if (call.kv_dtype == BOUGH_BFLOAT16) return (const bf16* const*)cells;
        for (int i = 0; i < n; ++i) {
            rows[i] = to + (int64_t)i * dim;
            narrow_cell(call.kv_dtype, (const char*)cells[i] + head * cell_bytes(call.kv_dtype), to + (int64_t)i * dim, dim);
        }
        head = 0;
        return rows;
    }

    // Words of one head of a cell.
    int cell_words() const { return cell_bytes_of(1) / 4; }

    // Words of a key of LaneBlock, and of a query, which may have two digits. In tiles they are filled up with zeros.
    int lane_words() const { return lane_words_of<T>(key_words); }
    int lane_query() const { return (bytes ? 2 : 1) * lane_words(); }

    // Lays a segment's K and V out for LaneBlock.
    void pack(const Cells& cells, Work<T>& w) const {
        if (bytes) {
            pack_keys(cells.keys, read_keys(cells), w);
            pack_bytes(cells, w);
        } else if constexpr (FLOATS<T>) {
            with_elements(call.kv_dtype, [&](auto element) { pack_floats<decltype(element)>(cells, w); });
        } else {
            const bf16* rows[SEGMENT];
            int64_t head = 0;   // of the unit's one
            pack_keys((const void* const*)as_pairs(cells.keys, head, read_keys(cells), w.keys, rows), read_keys(cells), w);
            head = 0;
            pack_pairs(as_pairs(cells.values, head, read_keys(cells), w.values, rows), (int)ceil_div(cells.n, 2), w);
        }
    }

    // Both, of cells of C.
    template <typename C>
    void pack_floats(const Cells& cells, Work<T>& w) const {
        float* to = w.packed;
        for (int i = 0, n = read_keys(cells); i < n; i += WIDTH, to += dim * WIDTH) {
            transpose_rows((const uint32_t* const*)cells.keys + i, 0, cell_words(), (uint32_t*)to, WIDTH);
            spread<C>((uint32_t*)to, cell_words(), WIDTH);
        }
        for (int i = 0; i < cells.n; ++i)
            for (int d = 0; d < dim; d += WIDTH)
                storef(w.pairs + d * SEGMENT + i * WIDTH, load((const C*)cells.values[i] + d));
    }

    // n keys of pairs or bytes.
    void pack_keys(const void* const* keys, int n, Work<T>& w) const {
        uint32_t* to = (uint32_t*)w.packed;
        // Tiles take keys as they lie.
        const bool whole = IN_TILES<word>;
        for (int i = 0; whole && i < n; ++i, to += lane_words()) {
            memcpy(to, keys[i], sizeof(word) * key_words);
            memset(to + key_words, 0, sizeof(word) * (lane_words() - key_words));
        }
        for (int i = 0; !whole && i < n; i += WIDTH, to += lane_words() * WIDTH) {
            transpose_rows((const uint32_t* const*)keys + i, 0, key_words, to, WIDTH);
            for (int j = 0; bytes && j < key_words * WIDTH; ++j) to[j] ^= FLIP;
        }
    }

    // V of n pairs of keys.
    void pack_pairs(const bf16* const* values, int n, Work<T>& w) const {
#if defined(BOUGH_AMX)
        tile_turn<2, vf>(n, dim, (uint32_t*)w.pairs, SEGMENT / 2,
                         [&](int pair, int64_t at, auto& x) { load_values(values, pair, at, x); });
#else
        constexpr int64_t BLOCK = SEGMENT / 2 * WIDTH;
        for (int i = 0; i < n; ++i) {
            float* to = (float*)w.pairs + i * WIDTH;
            int d = 0;
            for (; d + 2 * WIDTH <= dim; d += 2 * WIDTH, to += 2 * BLOCK) {
                vf x[2];
                load_values<2>(values, i, d, x);
                storef(to, x[0]);
                storef(to + BLOCK, x[1]);
            }
            for (; d < dim; d += WIDTH, to += BLOCK) {
                vf x[1];
                load_values<1>(values, i, d, x);
                storef(to, x[0]);
            }
        }
#endif
    }

    // The same for V of int8 cells.
    void pack_bytes(const Cells& cells, Work<T>& w) const {
        const int8_t* const* values = (const int8_t* const*)cells.values;
        const int inner = (int)ceil_div(cells.n, 4);
        uint32_t* to = (uint32_t*)w.pairs;
#if defined(BOUGH_AMX)
        tile_turn<FOURS, vu>(inner, dim, to, SEGMENT / 4, [&](int four, int64_t at, auto& x) {
            constexpr int N = sizeof x / sizeof x[0];
            load_fours<N>(values + 4 * four, at, x);
            if constexpr (N == FOURS) put_in_order(x);
        });
#else
        pack_fours(values, inner, dim, to, SEGMENT / 4 * WIDTH);
#endif
    }

    // Records [count][dim + 2] of a block of queries in lanes.
    void from_lanes(const float* out, float* to, int count) const {
        for (int first = 0; first < count; first += WIDTH) {
            int n = count - first < WIDTH ? count - first : WIDTH;
            for (int d = 0; d < dim; d += WIDTH) {
                const uint32_t* rows[WIDTH];
                for (int i = 0; i < WIDTH; ++i) rows[i] = (const uint32_t*)(out + (int64_t)(d + i) * LANES);
                transpose(rows, first, n, (uint32_t*)(to + first * record + d), record);
            }
            for (int i = first; i < first + n; ++i) {
                to[i * record + dim] = out[dim * LANES + i];
                to[i * record + dim + 1] = out[(dim + 1) * LANES + i];
            }
        }
    }
};

}  // namespace
