// One segment of a unit's keys: where its cells lie, scores, weights, and sums of V.
//
// Few queries (a decode step) keep keys in the lanes of vectors: K is transposed into tiles, V is read where it lies, for
// all kv heads in turn. Many queries lie in the lanes themselves (lanes.h), one kv head per unit.
#pragma once

#include "mix.h"
#include "units.h"

namespace {

constexpr int LARGE_CELL = 1024;    // bytes

template <typename T>
struct Segments {
    typedef Word<T> word;
    const AttentionCall& call;
    static constexpr bool BYTES = BYTE_DOTS && sizeof(T) == 2;  // whether int8 cells are multiplied as they are (bytes.h)
    const int group_heads, dim, words;      // words of a query, unless it is digits
    const int64_t record;   // floats of one query's partial result: output, maximum, sum
    const bool bytes;       // cells are such
    const int key_words;    // of one head of a key, as it is computed with
    float cap_scale, log2_scale;    // score := tanh(cap_scale * product), unless that is 0; log2(weight) = log2_scale * score
    Group* groups = nullptr;

    explicit Segments(const AttentionCall& c)
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

    // Reads n small cells of all the unit's heads, a line after the other. What follows reads one head at a time, in strides
    // that no hardware foresees; loads in order set its own prefetching going. Of large cells, what has been asked for is
    // there as soon without.
    void fetch(const Unit& u, const void* const* cells, int n) const {
        const int bytes = cell_bytes_of(u.n_heads);
        for (int i = 0; bytes < LARGE_CELL && i < n; ++i)
            for (int at = 0; at < bytes; at += 64) (void)*((const volatile char*)cells[i] + at);
    }

    // Scores of one query, which sees keys [begin, seen), -> weights, maximum and sum. LaneBlock::soften is the same for
    // queries in the lanes.
    void soften(const Cells& cells, int begin, int seen, float* s, T* weights, float* result) const {
        const vf infinity = splat(__builtin_inff());
        const vi lane = lane_index();
        vf best = -infinity, total = vf{};
        for (int j = 0; j < cells.n; j += WIDTH) {
            vf x = loadf(s + j);
            if (call.k_scale) x *= loadf(cells.k_scale + j);
            if (cap_scale) x = tanhv(x * splat(cap_scale));
            if (seen - j < WIDTH) x = select(lane + j < seen, x, -infinity);
            if (begin > j) x = select(lane + j >= begin, x, -infinity);
            storef(s + j, x);
            best = larger(x, best);
        }
        float shift = max_lane(best) * log2_scale;
        for (int j = 0; j < cells.n; j += WIDTH) {
            vf p = exp2_for(fma(loadf(s + j), splat(log2_scale), splat(-shift)), (const T*)nullptr);
            if (seen - j < WIDTH) p = keep(lane + j < seen, p);
            if (begin > j) p = keep(lane + j >= begin, p);
            total += p;
            if (call.v_scale) p *= loadf(cells.v_scale + j);
            if (FLOATS<T> || bytes)
                storef(s + j, p);
            else
                store(weights + j, p);
        }
        result[dim] = shift;
        result[dim + 1] = sum(total);
    }

    // One segment for few queries, into the records of w.segment. K and V are read a tile of keys at a time, and the next
    // tile is asked for beside the arithmetic with this one: memory is never idle, what is computed with lies in the
    // nearest cache, and requests do not stand in the way of what is needed now. `then` is what comes after the segment, with cells of `then_heads` heads.
    void run_narrow(const Unit& u, int segment, Cells& cells, const Cells& then, int then_heads, Work<T>& w) const {
        const int n = n_queries(u), n_read = read_keys(cells);
        const int v_tile = bytes ? SEGMENT : TILE;      // a sum over a segment is scaled once
        for (int key = 0; key < n_read; key += TILE) {
            const bool last = key + TILE >= n_read;
            const int count = tile_keys(n_read, key, TILE);
            Ahead ahead(last ? cells.values : cells.keys + key + TILE,
                        last ? tile_keys(n_read, 0, v_tile) : tile_keys(n_read, key + TILE, TILE), cell_bytes_of(u.n_heads),
                        u.n_heads * (score_steps(n) + count / WIDTH * turn_steps(n) +
                                     (last ? n * soften_steps(n) : 0)));
            fetch(u, cells.keys + key, count);
            for (int i = 0; i < u.n_heads; ++i) score(cells, i, n, key, count, ahead, w);
            for (int i = 0; last && i < u.n_heads; ++i) weigh(u, segment, i, n, cells, ahead, w);
        }
        for (int key = 0; key < n_read; key += v_tile) {
            const bool last = key + v_tile >= n_read;
            const int count = tile_keys(n_read, key, v_tile);
            Ahead ahead(last ? then.keys : cells.values + key + v_tile,
                        last ? tile_keys(then.n, 0, TILE) : tile_keys(n_read, key + v_tile, v_tile),
                        cell_bytes_of(last ? then_heads : u.n_heads), u.n_heads * mix_steps(n, count));
            fetch(u, cells.values + key, count);
            for (int i = 0; i < u.n_heads; ++i) mix(cells, i, n, key, count, ahead, w);
        }
    }

    // About how often score() calls ahead.step() beside products.
    int score_steps(int n) const {
#if defined(BOUGH_AMX)
        if (as_tiles()) return few_steps(n, TILE / WIDTH, key_words);
#endif
        if (FLOATS<T> && !bytes) return float_steps(n, TILE / WIDTH, cell_words(), score_vecs);
        return product_steps(bytes ? 2 * n : n, key_words);
    }

    // Whether few queries are multiplied as tiles multiply pairs (attention_amx.h).
    bool as_tiles() const { return IN_TILES<word> && !bytes; }

    // Words of one head of a cell.
    int cell_words() const { return cell_bytes_of(1) / 4; }

    // Words of a key of LaneBlock, and of a query, which may have two digits. In tiles they are filled up with zeros.
    int lane_words() const { return lane_words_of<T>(key_words); }
    int lane_query() const { return (bytes ? 2 : 1) * lane_words(); }

    // The turning of a vector of keys, and the softening of a query's scores, in steps of a product with n queries.
    int turn_steps(int n) const { return cell_words() / (n < BLOCK_ROWS ? n : BLOCK_ROWS); }
    int soften_steps(int n) const { return SEGMENT / 2 / (n < BLOCK_ROWS ? n : BLOCK_ROWS); }

    // The weights of the unit's i-th kv head.
    void weigh(const Unit& u, int segment, int i, int n, Cells& cells, Ahead& ahead, Work<T>& w) const {
        load_scales(u.kv_head + i, cells);
        for (int r = i * n; r < (i + 1) * n; ++r) {
            int seen = visible(u, r % n / group_heads) - segment * SEGMENT;
            int begin = first_visible(u, r % n / group_heads) - segment * SEGMENT;
            if (bytes) join_scores(cells.n, r, w);
            soften(cells, begin, seen < cells.n ? seen : cells.n, scores(r, w), w.weights + (int64_t)r * SEGMENT,
                   w.segment + r * record);
            memset(w.segment + r * record, 0, sizeof(float) * dim);
            ahead.step(soften_steps(n));
        }
    }

    // Keys of the tile that begins with `key`, of n in all.
    static int tile_keys(int n, int key, int tile) { return n - key < tile ? n - key : tile; }

    // Scores of query r of the unit.
    float* scores(int r, Work<T>& w) const { return w.scores + (int64_t)r * (bytes ? 2 * SEGMENT : SEGMENT); }

    // Scores of the unit's i-th kv head for one tile of keys; in int8 cells, sums of products with both digits.
    void score(const Cells& cells, int i, int n, int key, int count, Ahead& ahead, Work<T>& w) const {
        const void* const* keys = cells.keys + key;
        const word* queries = w.queries + (int64_t)i * n * few_words();
        float* to = scores(i * n, w) + key;
        const auto turn = [&](const void* const* rows, int64_t first, int n_words) {
            for (int j = 0; j < count; j += WIDTH) {
                transpose_rows((const uint32_t* const*)rows + j, first, n_words, w.tile + j, TILE);
                ahead.step(turn_steps(n));
            }
        };
        if (bytes) {
            turn(keys, i * key_words, key_words);
            product((const KeyBytes*)queries, key_words, (const KeyBytes*)w.tile, 2 * n, key_words, (int32_t*)to,
                    SEGMENT, ahead);
        } else if constexpr (FLOATS<T>) {
            turn(keys, i * cell_words(), cell_words());
            with_elements(call.kv_dtype, [&](auto element) {
                float_scores<decltype(element)>(queries, n, dim, w.tile, count / WIDTH, to, SEGMENT, ahead);
            });
        } else {
            const bf16* rows[TILE];
            int64_t head = (int64_t)i * dim;
            const void* const* pairs = (const void* const*)as_pairs(keys, head, count, w.keys, rows);
            turn(pairs, head / 2, words);
#if defined(BOUGH_AMX)
            few_scores(queries, w.tile, n, count, words, to, SEGMENT, ahead);
#else
            product(queries, words, w.tile, n, words, to, SEGMENT, ahead);
#endif
        }
    }

    // Sums of products with both digits of query r -> scores.
    void join_scores(int n, int r, Work<T>& w) const {
        float* s = scores(r, w);
        vf scale = splat(w.q_scale[r]);
        for (int j = 0; j < n; j += WIDTH) {
            vi high = (vi)loadf(s + j) + w.q_high[r], low = (vi)loadf(s + SEGMENT + j) + w.q_low[r];
            storef(s + j, join_digits(high, low, scale));
        }
    }

    // Adds weights times V of one tile of keys to the records of the unit's i-th kv head.
    void mix(const Cells& cells, int i, int n, int key, int count, Ahead& ahead, Work<T>& w) const {
        if (bytes) return mix_bytes(cells, i, n, ahead, w);
        float* to = w.segment + i * n * record;
        const void* const* values = cells.values + key;
        int64_t head = (int64_t)i * dim;
        const int n_keys = tile_keys(cells.n, key, count);
        if constexpr (FLOATS<T>) {
            with_elements(call.kv_dtype, [&](auto element) {
                float_sums<decltype(element)>(scores(i * n, w) + key, n, values, head, dim, n_keys, to, record, ahead);
            });
        } else {
            const bf16* rows[TILE];
            const bf16* const* pairs = as_pairs(values, head, count, w.values, rows);
            const bf16* weights = w.weights + (int64_t)i * n * SEGMENT + key;
            const int inner = (int)ceil_div(n_keys, 2);
#if defined(BOUGH_AMX)
            few_sums((const uint32_t*)weights, SEGMENT / 2, pairs, head, n, dim, inner, to, record, ahead);
#else
            int64_t at = mix_columns<4>(weights, pairs, head, n, 0, dim, inner, to, record, ahead);
            at = mix_columns<2>(weights, pairs, head, n, at, dim, inner, to, record, ahead);
            mix_columns<1>(weights, pairs, head, n, at, dim, inner, to, record, ahead);
#endif
        }
    }

    // The same for int8 cells, of which a tile is a segment.
    void mix_bytes(const Cells& cells, int i, int n, Ahead& ahead, Work<T>& w) const {
        uint8_t* digits = (uint8_t*)(w.weights + (int64_t)i * n * SEGMENT);
        float scale[NARROW];
        for (int r = 0; r < n; ++r)
            scale[r] = split_weights(scores(i * n + r, w), cells.n, digits + 2 * r * SEGMENT,
                                     digits + (2 * r + 1) * SEGMENT);
        const int8_t* const* values = (const int8_t* const*)cells.values;
        const uint32_t* weights = (const uint32_t*)digits;
        const int inner = (int)ceil_div(cells.n, 4), stride = SEGMENT / 4;
        float* to = w.segment + i * n * record;
        int64_t head = (int64_t)i * dim;
        int at = mix_all_fours<FOURS>(weights, stride, values, head, n, 0, dim, inner, scale, to, record, ahead);
        if (FOURS > 1) mix_all_fours<1>(weights, stride, values, head, n, at, dim, inner, scale, to, record, ahead);
    }

    // About how often mix() calls ahead.step().
    int mix_steps(int n, int count) const {
        if (bytes) return (int)(ceil_div(n, FOURS_ROWS) * ceil_div(dim, FOURS * WIDTH) * ceil_div(count, 4));
#if defined(BOUGH_AMX)
        if (as_tiles()) return few_steps(n, dim / WIDTH, count / KEYS_PER_WORD<word>);
#endif
        if (FLOATS<T>) return float_steps(n, dim / WIDTH, count, sum_vecs);
        return (int)(ceil_div(n, BLOCK_ROWS) * ceil_div(dim, 4 * WIDTH)) * count / 2;
    }

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

    // What one of n_parts blocks of queries asks for of the cells of a unit's one head, while it works out scores.
    Ahead part(const Cells& next, const void* const* cells, int part, int n_parts, int n_keys) const {
        int first = next.n * part / n_parts;
        const int steps = n_keys > LANE_ROWS ? (int)ceil_div(n_keys, LANE_ROWS) : 1;
        return {cells + first, next.n * (part + 1) / n_parts - first, cell_bytes_of(1), steps};
    }

    // One segment for many queries: into the totals in lanes, or by itself into `apart`, which has the same shape.
    void run_wide(const Unit& u, int segment, int last_segment, float* apart, Work<T>& w) const {
        const Cells& now = w.cells[segment % 2];
        Cells& next = w.cells[1 - segment % 2];
        next.n = 0;
        if (segment + 1 < last_segment) locate(u, segment + 1, next);
        load_scales(u.kv_head, w.cells[segment % 2]);
        pack(now, w);
        int begin = segment * SEGMENT, n = n_queries(u);
        int n_blocks = (int)ceil_div(n, LANES);
        for (int first = 0, block = 0; first < n; first += LANES, ++block) {
            int count = n - first < LANES ? n - first : LANES, vecs = n_vecs(count);
            int all = visible(u, first / group_heads) - begin;
            int some = visible(u, (first + count - 1) / group_heads) - begin;
            int lowest = first_visible(u, first / group_heads) - begin;
            int highest = first_visible(u, (first + count - 1) / group_heads) - begin;
            if ((some <= 0 || lowest >= now.n) && !apart) continue;
            some = some < 0 ? 0 : some;
            const int n_keys = some < now.n ? some : now.n;
            Ahead ahead[2] = {part(next, next.keys, block, n_blocks, n_keys),
                              part(next, next.values, block, n_blocks, n_keys)};
            bool masked = (all < now.n && all < some) || highest > 0;
            for (int i = 0; masked && i < vecs * WIDTH; ++i) {
                int t = (first + (i < count ? i : 0)) / group_heads;
                w.seen[i] = visible(u, t) - begin;
                w.unseen[i] = first_visible(u, t) - begin;
            }
            auto run = [&](auto element) {
                typedef decltype(element) E;
                LaneBlock<T, E> lanes = {
                    (const E*)w.queries + (int64_t)block * lane_query() * LANES, (const E*)w.packed, (const E*)w.pairs,
                    call.k_scale ? now.k_scale : nullptr, call.v_scale ? now.v_scale : nullptr,
                    masked ? w.seen : nullptr, masked ? w.unseen : nullptr, w.scores,
                    (apart ? apart : w.total) + block * record * LANES, !apart,
                    n_keys, lane_words(), dim, cap_scale, log2_scale, ahead,
                    w.q_scale + first, {w.q_high + first, w.q_low + first},
                };
                switch (vecs) {
                    case 1: lanes.template run<1>(); break;
                    case 2: lanes.template run<2>(); break;
                    case 3: lanes.template run<3>(); break;
                    default: lanes.template run<LANE_VECS>();
                }
            };
            if constexpr (BYTES)
                if (bytes) run(LaneBytes{});
            if (!bytes) run(word{});
        }
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
