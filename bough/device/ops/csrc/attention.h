// Paged attention for any mix of decode steps and prompt chunks, with prefixes that rows share.
//
// A *unit* is a block of query tokens that all need the same keys: a row's own tokens, or those of several rows that
// share a prefix. The query heads of a kv head lie side by side. Keys are taken in segments of SEGMENT, counted from
// position 0. Few queries (a decode step) keep keys in the lanes of vectors: K is transposed into tiles, V is read where
// it lies, for all kv heads in turn. Many queries lie in the lanes themselves (lanes.h), one kv head per unit. Each segment has its own
// maximum, sum and output, which are merged into the total in rising order of segments (Milakov and Gimelshein 2018,
// Dao et al. 2023). A long unit is cut into *items* of whole segments that run in parallel; whichever ends last merges.
//
// So what a query yields depends on its own keys and their positions, bit by bit, and on nothing else: not on the
// company in the batch, on how a prompt was cut into chunks, on which rows share a prefix and are told to, on the
// number of threads or of items.
#pragma once

#include "mix.h"
#include "units.h"

namespace {

template <typename T>
struct Attention {
    typedef Word<T> word;
    const AttentionCall& call;
    const int group_heads, dim, words;
    const int64_t record;   // floats of one query's partial result: output, maximum, sum
    const bool direct;      // cells have the type that is computed with
    const bool bytes;       // cells are int8, and computed with as they are (bytes.h)
    float cap_scale, log2_scale;    // score := tanh(cap_scale * product), unless that is 0; log2(weight) = log2_scale * score
    int queries_per_unit = 0;
    Unit* units = nullptr;
    Item* items = nullptr;
    int64_t shared_items = 0, n_items = 0;
    int64_t first_item = 0;             // of those that run()'s threads divide among them
    Group* groups = nullptr;
    Member* members = nullptr;

    explicit Attention(const AttentionCall& c)
        : call(c), group_heads(c.n_heads / c.n_kv_heads), dim(c.head_dim), words(dim * (int)sizeof(T) / 4),
          record(dim + 2), direct(c.kv_dtype == (sizeof(T) == 4 ? BOUGH_FLOAT32 : BOUGH_BFLOAT16)),
          bytes(c.kv_dtype == BOUGH_INT8 && sizeof(T) == 2) {}

    int new_tokens(int row) const { return call.q_start[row + 1] - call.q_start[row]; }

    // Queries of each of the unit's kv heads.
    int n_queries(const Unit& u) const { return u.n_tokens * group_heads; }

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

    // -- one segment

    // Query r of the unit: where it lies, or its digits, which take as much memory as itself.
    const word* load_query(const Unit& u, int r, word* digits, Work<T>& w) const {
        const T* from = (const T*)call.q + head(u, r) * dim;
        if (!bytes) return (const word*)from;
        QueryScale s = split_query(from, dim, (int8_t*)digits, (int8_t*)digits + dim);
        w.q_scale[r] = s.scale;
        w.q_high[r] = s.high;
        w.q_low[r] = s.low;
        return digits;
    }

    void load_queries(const Unit& u, Work<T>& w) const {
        const int n = (int)n_records(u);
        for (int r = 0; narrow(u) && r < n; ++r)
            memcpy(w.queries + (int64_t)r * words, load_query(u, r, w.tile, w), sizeof(word) * words);
        for (int first = 0; !narrow(u) && first < n; first += WIDTH) {
            const uint32_t* rows[WIDTH];
            // Lanes behind the last query repeat it.
            for (int i = 0; i < WIDTH; ++i)
                rows[i] = first + i < n ? (const uint32_t*)load_query(u, first + i, w.tile + i * words, w) : rows[i - 1];
            uint32_t* to = (uint32_t*)w.queries + (int64_t)(first / LANES) * words * LANES + first % LANES;
            transpose_rows(rows, words, to, LANES);
        }
    }

    // WIDTH rows of n words: to[word * stride + row].
    static void transpose_rows(const uint32_t* const* rows, int n, uint32_t* to, int stride) {
        for (int i = 0; i < n; i += WIDTH)
            transpose(rows, i, n - i < WIDTH ? n - i : WIDTH, to + (int64_t)i * stride, stride);
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

    // Finds the cells of a segment. Whole vectors of keys may be read: the first and the last cell that the unit sees
    // stand for those before and after them.
    void locate(const Unit& u, int kv_head, int segment, Cells& to) const {
        to.n = keys_of(u, segment);
        const int n = (int)ceil_div(to.n, WIDTH) * WIDTH, first = first_visible(u, 0) - segment * SEGMENT;
        int32_t loc[SEGMENT];
        memcpy(loc, locs(u, segment), sizeof(int32_t) * to.n);
        for (int i = 0; i < first; ++i) loc[i] = loc[first];
        for (int i = to.n; i < n; ++i) loc[i] = loc[to.n - 1];
        const int64_t bytes = cell_bytes(call.kv_dtype) * dim, heads = call.n_kv_heads;
        const char *keys = (const char*)call.k + kv_head * bytes, *values = (const char*)call.v + kv_head * bytes;
        for (int i = 0; i < n; ++i) {
            to.keys[i] = keys + loc[i] * heads * bytes;
            to.values[i] = values + loc[i] * heads * bytes;
        }
        for (int i = 0; call.k_scale && i < n; ++i) {
            to.k_scale[i] = call.k_scale[loc[i] * heads + kv_head];
            to.v_scale[i] = call.v_scale[loc[i] * heads + kv_head];
        }
    }

    // Cells [first, first + n) as T: where they lie, or widened into `to`.
    const T* const* as_elements(const void* const* cells, int n, T* to, const T** rows) const {
        if (direct) return (const T* const*)cells;
        for (int i = 0; i < n; ++i) {
            widen_cell(call.kv_dtype, cells[i], to + (int64_t)i * dim, dim);
            rows[i] = to + (int64_t)i * dim;
        }
        return rows;
    }

    // Reads a line after the other of the cells of all the unit's heads, given where those of the first one are. What
    // follows reads one head at a time, in strides that no hardware foresees. Loads in order bring all of it near, at up
    // to 1.6 times the rate of prefetch instructions, for they set the hardware's own prefetching going.
    void fetch(const Unit& u, const void* const* cells, int n) const {
        int bytes = (int)cell_bytes(call.kv_dtype) * dim * u.n_heads;
        for (int i = 0; i < n; ++i)
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
            if (bytes)
                storef(s + j, p);
            else
                store_weight(weights + j, p);
        }
        result[dim] = shift;
        result[dim + 1] = sum(total);
    }

    // One segment of the unit's i-th kv head for few queries, into the records of w.segment; beside it, some of the next
    // cells are asked for. Not all of them arrive in time, so fetch() still comes first.
    void run_narrow(const Unit& u, int i, int segment, const Ahead (&next)[2], Work<T>& w) const {
        Cells& cells = w.cells[0];
        locate(u, u.kv_head + i, segment, cells);
        if (i == 0) {
            fetch(u, cells.keys, cells.n);
            fetch(u, cells.values, cells.n);
        }
        int n = n_queries(u), n_read = (int)ceil_div(cells.n, WIDTH) * WIDTH;
        int64_t stride = bytes ? 2 * SEGMENT : SEGMENT;     // of scores
        const T* rows[SEGMENT];
        if (bytes) {
            score_bytes(cells, i, n, next, w);
        } else {
            const T* const* keys = as_elements(cells.keys, n_read, w.keys, rows);
            for (int key = 0; key < cells.n; key += TILE) {
                for (int j = key; j < n_read && j < key + TILE; j += WIDTH) {
                    touch(next, j / WIDTH, n_read / WIDTH);
                    transpose_rows((const uint32_t* const*)keys + j, words, (uint32_t*)w.tile + j - key, TILE);
                }
                product(w.queries + (int64_t)i * n * words, words, w.tile, n, words, w.scores + key, SEGMENT);
            }
        }
        for (int r = 0; r < n; ++r) {
            int seen = visible(u, r / group_heads) - segment * SEGMENT;
            int begin = first_visible(u, r / group_heads) - segment * SEGMENT;
            soften(cells, begin, seen < cells.n ? seen : cells.n, w.scores + r * stride,
                   w.weights + (int64_t)r * SEGMENT, w.segment + r * record);
        }
        if (bytes) return mix_bytes(cells, n, w);
        const T* const* values = as_elements(cells.values, n_read, w.values, rows);
        int inner = (int)ceil_div(cells.n, KEYS_PER_WORD<word>);
        int64_t at = mix_columns<4>(w.weights, values, n, 0, dim, inner, w.segment, record);
        at = mix_columns<2>(w.weights, values, n, at, dim, inner, w.segment, record);
        mix_columns<1>(w.weights, values, n, at, dim, inner, w.segment, record);
    }

    // Scores of the unit's i-th kv head in int8 cells: every second row of w.scores.
    void score_bytes(const Cells& cells, int i, int n, const Ahead (&next)[2], Work<T>& w) const {
        const KeyBytes* digits = (const KeyBytes*)(w.queries + (int64_t)i * n * words);
        const int inner = dim / 4;
        int32_t* sums = (int32_t*)w.scores;
        for (int key = 0; key < cells.n; key += TILE) {
            for (int j = key; j < cells.n && j < key + TILE; j += WIDTH) {
                touch(next, j / WIDTH, (int)ceil_div(cells.n, WIDTH));
                transpose_rows((const uint32_t* const*)cells.keys + j, inner, (uint32_t*)w.tile + j - key, TILE);
            }
            product(digits, inner, (const KeyBytes*)w.tile, 2 * n, inner, sums + key, SEGMENT);
        }
        for (int r = 0; r < n; ++r) {
            float* s = w.scores + (int64_t)r * 2 * SEGMENT;
            vf scale = splat(w.q_scale[i * n + r]);
            for (int j = 0; j < cells.n; j += WIDTH) {
                vi high = (vi)loadf(s + j) + w.q_high[i * n + r], low = (vi)loadf(s + SEGMENT + j) + w.q_low[i * n + r];
                storef(s + j, join_digits(high, low, scale));
            }
        }
    }

    // Weights in every second row of w.scores times V in int8 cells, into the records of w.segment.
    void mix_bytes(const Cells& cells, int n, Work<T>& w) const {
        uint8_t* digits = (uint8_t*)w.weights;
        float scale[NARROW];
        for (int r = 0; r < n; ++r, digits += 2 * SEGMENT)
            scale[r] = split_weights(w.scores + (int64_t)r * 2 * SEGMENT, cells.n, digits, digits + SEGMENT);
        const int8_t* const* values = (const int8_t* const*)cells.values;
        const uint32_t* weights = (const uint32_t*)w.weights;
        int inner = (int)ceil_div(cells.n, 4);
        int at = mix_all_fours<FOURS>(weights, SEGMENT / 4, values, n, 0, dim, inner, scale, w.segment, record);
        if (FOURS > 1) mix_all_fours<1>(weights, SEGMENT / 4, values, n, at, dim, inner, scale, w.segment, record);
    }

    // Lays a segment's K and V out for LaneBlock.
    void pack(const Cells& cells, Work<T>& w) const {
        const int n = (int)ceil_div(cells.n, WIDTH) * WIDTH, key_words = bytes ? dim / 4 : words;
        const T* rows[SEGMENT];
        const void* const* keys = bytes ? cells.keys : (const void* const*)as_elements(cells.keys, n, w.keys, rows);
        uint32_t* to = (uint32_t*)w.packed;
        for (int i = 0; i < n; i += WIDTH, to += key_words * WIDTH) {
            transpose_rows((const uint32_t* const*)keys + i, key_words, to, WIDTH);
            for (int j = 0; bytes && j < key_words * WIDTH; ++j) to[j] ^= FLIP;
        }
        if (bytes)
            return pack_fours((const int8_t* const*)cells.values, (int)ceil_div(cells.n, 4), dim, (uint32_t*)w.pairs,
                              SEGMENT / 4 * WIDTH);
        const T* const* values = as_elements(cells.values, n, w.values, rows);
        const int inner = (int)ceil_div(cells.n, KEYS_PER_WORD<word>);
        constexpr int64_t BLOCK = SEGMENT / KEYS_PER_WORD<word> * WIDTH;
        for (int i = 0; i < inner; ++i) {
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
    }

    // A part of the next segment's cells, with those of so many heads, or nothing.
    Ahead ahead(const Cells& next, const void* const* cells, int n_heads, int part, int n_parts) const {
        int first = next.n * part / n_parts;
        return {next.n ? cells + first : nullptr, next.n * (part + 1) / n_parts - first,
                (int)cell_bytes(call.kv_dtype) * dim * n_heads};
    }

    // Asks for what belongs to one step of many. Not a function of its own: a compiler may drop calls of one that only
    // prefetches.
    INLINE void touch(const Ahead (&next)[2], int step, int n_steps) const {
        int each = next[0].per_step(n_steps);
        if (each)
            for (const Ahead& some : next) some.touch(step, each);
    }

    // One segment for many queries: into the totals in lanes, or as records.
    void run_wide(const Unit& u, int segment, int last_segment, float* records, Work<T>& w) const {
        const Cells& now = w.cells[segment % 2];
        Cells& next = w.cells[1 - segment % 2];
        next.n = 0;
        if (segment + 1 < last_segment) locate(u, u.kv_head, segment + 1, next);
        pack(now, w);
        int begin = segment * SEGMENT, n = n_queries(u);
        int n_blocks = (int)ceil_div(n, LANES);
        for (int first = 0, block = 0; first < n; first += LANES, ++block) {
            int count = n - first < LANES ? n - first : LANES;
            int n_vecs = (int)ceil_div(count, WIDTH);
            int all = visible(u, first / group_heads) - begin;
            int some = visible(u, (first + count - 1) / group_heads) - begin;
            int lowest = first_visible(u, first / group_heads) - begin;
            int highest = first_visible(u, (first + count - 1) / group_heads) - begin;
            if ((some <= 0 || lowest >= now.n) && !records) continue;
            some = some < 0 ? 0 : some;
            bool masked = (all < now.n && all < some) || highest > 0;
            for (int i = 0; masked && i < n_vecs * WIDTH; ++i) {
                int t = (first + (i < count ? i : 0)) / group_heads;
                w.seen[i] = visible(u, t) - begin;
                w.unseen[i] = first_visible(u, t) - begin;
            }
            auto run = [&](auto element) {
                typedef decltype(element) E;
                LaneBlock<E> lanes = {
                    (const E*)w.queries + (int64_t)block * words * LANES, (const E*)w.packed, (const E*)w.pairs,
                    call.k_scale ? now.k_scale : nullptr, call.v_scale ? now.v_scale : nullptr,
                    masked ? w.seen : nullptr, masked ? w.unseen : nullptr, w.scores,
                    records ? w.segment : w.total + (int64_t)block * dim * LANES,
                    records ? w.top : w.total_top + block * LANES, records ? w.sum : w.total_sum + block * LANES, !records,
                    some < now.n ? some : now.n, dim * (int)sizeof(Element<E>) / 4, dim, cap_scale, log2_scale,
                    {ahead(next, next.keys, 1, block, n_blocks), ahead(next, next.values, 1, block, n_blocks)},
                    w.q_scale + first, {w.q_high + first, w.q_low + first},
                };
                switch (n_vecs) {
                    case 1: lanes.template run<1>(); break;
                    case 2: lanes.template run<2>(); break;
                    default: lanes.template run<3>();
                }
            };
            if constexpr (sizeof(T) == 2)
                if (bytes) run(LaneBytes{});
            if (!bytes) run(word{});
            if (records) from_lanes(w.segment, w.top, w.sum, records + first * record, count);
        }
    }

    // -- totals

    // Records [count][dim + 2] of what is kept in lanes.
    void from_lanes(const float* out, const float* top, const float* sum, float* to, int count) const {
        for (int first = 0; first < count; first += WIDTH) {
            int n = count - first < WIDTH ? count - first : WIDTH;
            for (int d = 0; d < dim; d += WIDTH) {
                const uint32_t* rows[WIDTH];
                for (int i = 0; i < WIDTH; ++i) rows[i] = (const uint32_t*)(out + (int64_t)(d + i) * LANES);
                transpose(rows, first, n, (uint32_t*)(to + first * record + d), record);
            }
            for (int i = first; i < first + n; ++i) {
                to[i * record + dim] = top[i];
                to[i * record + dim + 1] = sum[i];
            }
        }
    }

    // What a group has found for the first queries of a unit, into the totals in lanes; nothing if there is no group.
    void to_lanes(const Unit& u, Work<T>& w) const {
        const int n = n_queries(u), padded = (int)ceil_div(n, LANES) * LANES;
        if (!in_group(u)) {
            memset(w.total, 0, sizeof(float) * padded * dim);
            for (int r = 0; r < padded; ++r) {
                w.total_top[r] = -__builtin_inff();
                w.total_sum[r] = 0;
            }
            return;
        }
        begin_total(u, w);
        for (int first = 0; first < n; first += WIDTH) {
            const uint32_t* rows[WIDTH];
            for (int i = 0; i < WIDTH; ++i) {
                const float* from = w.rows + (first + i < n ? first + i : n - 1) * record;
                rows[i] = (const uint32_t*)from;
                w.total_top[first + i] = from[dim];
                w.total_sum[first + i] = from[dim + 1];
            }
            float* to = w.total + (int64_t)(first / LANES) * dim * LANES + first % LANES;
            transpose_rows(rows, dim, (uint32_t*)to, LANES);
        }
    }

    // total := total + one segment, for one query; nothing for a query that saw none of the segment.
    void merge(const float* from, float* total) const {
        float top = from[dim], weight = from[dim + 1];
        if (top == -__builtin_inff() && weight == 0) return;
        float before = total[dim], best = top > before ? top : before;
        float old = exp2_one(before - best), add = exp2_one(top - best);
        for (int d = 0; d < dim; d += WIDTH)
            storef(total + d, fma(loadf(from + d), splat(add), loadf(total + d) * splat(old)));
        total[dim + 1] = total[dim + 1] * old + weight * add;
        total[dim] = best;
    }

    bool in_group(const Unit& u) const { return u.group < 0 && members[u.row].group >= 0; }

    // Starts the unit's totals with what its group has found for the shared prefix.
    void begin_total(const Unit& u, Work<T>& w) const {
        int n = n_queries(u);
        for (int r = 0; r < n_records(u); ++r) {
            memset(w.rows + r * record, 0, sizeof(float) * record);
            w.rows[r * record + dim] = -__builtin_inff();
        }
        if (!in_group(u)) return;
        const Group& g = groups[members[u.row].group];
        int64_t first = (int64_t)(members[u.row].offset + u.first_token) * group_heads * record;
        for (int i = 0; i < u.n_heads; ++i)
            for (int s = 0; s < g.n_records; ++s)
                for (int r = 0; r < n; ++r)
                    merge(g.records + ((u.kv_head + i) * g.n_records + s) * stride(g) + first + r * record,
                          w.rows + ((int64_t)i * n + r) * record);
    }

    // 1 / the sum of all weights, relative to the largest score.
    float share_of(const float* total, int64_t head) const {
        if (!call.sinks) return 1.0f / total[dim + 1];
        float sink = call.sinks[head % call.n_heads] * 1.44269504f, top = total[dim];
        if (sink <= top) return 1.0f / (total[dim + 1] + exp2_one(sink - top));
        float fewer = exp2_one(top - sink);
        return fewer / (total[dim + 1] * fewer + 1.0f);
    }

    void write(const Unit& u, const Work<T>& w) const {
        for (int r = 0; r < n_records(u); ++r) {
            const float* from = w.rows + r * record;
            T* to = (T*)call.out + head(u, r) * dim;
            vf share = splat(share_of(from, head(u, r)));
            for (int d = 0; d < dim; d += WIDTH) store(to + d, loadf(from + d) * share);
        }
    }

    // -- items

    // Finds the cells that few queries need after a segment: those of the next one, or of the first segment of the item
    // behind this one, which the same thread is likely to run. Returns whose they are.
    const Unit& locate_next(int64_t index, int segment, Cells& to) const {
        to.n = 0;
        if (++segment == items[index].last_segment && ++index < n_items) segment = items[index].first_segment;
        const Unit& u = units[items[index < n_items ? index : 0].unit];
        if (index < n_items && narrow(u)) locate(u, u.kv_head, segment, to);
        return u;
    }

    void run_item(int64_t index) const {
        const Item& item = items[index];
        Work<T> w;
        Carver size = {nullptr, 0};
        w.carve(size, queries_per_unit, call.n_kv_heads, words, dim);
        Carver carver = {(char*)scratch(SCRATCH_WORK, size.used), 0};
        if (!carver.base) __builtin_trap();
        w.carve(carver, queries_per_unit, call.n_kv_heads, words, dim);
        Unit& u = units[item.unit];
        load_queries(u, w);
        if (!u.stride && narrow(u)) begin_total(u, w);
        if (!u.stride && !narrow(u)) to_lanes(u, w);
        if (!narrow(u)) locate(u, u.kv_head, item.first_segment, w.cells[item.first_segment % 2]);
        for (int s = item.first_segment; s < item.last_segment; ++s) {
            if (!narrow(u)) {
                run_wide(u, s, item.last_segment, u.stride ? records(u, 0, s) : nullptr, w);
                continue;
            }
            Cells& next = w.cells[1];
            const Unit& then = locate_next(index, s, next);
            for (int i = 0, n = n_queries(u); i < u.n_heads; ++i) {
                run_narrow(u, i, s,
                           {ahead(next, next.keys, then.n_heads, i, u.n_heads),
                            ahead(next, next.values, then.n_heads, i, u.n_heads)}, w);
                if (u.stride) memcpy(records(u, i, s), w.segment, sizeof(float) * n * record);
                for (int r = 0; !u.stride && r < n; ++r)
                    merge(w.segment + r * record, w.rows + ((int64_t)i * n + r) * record);
            }
        }
        finish(u, w);
    }

    // Where the results of a segment go, for the unit's i-th kv head.
    float* records(const Unit& u, int i, int segment) const {
        int64_t heads = u.group < 0 ? (int64_t)i * n_queries(u) * record
                                    : i * groups[u.group].n_records * stride(groups[u.group]);
        return u.partial + heads + (segment - u.first_segment) * u.stride;
    }

    // After the last segment of an item: whoever ends last has the unit's result.
    void finish(Unit& u, Work<T>& w) const {
        int n = n_queries(u);
        if (u.stride) {
            if (u.group >= 0 || __atomic_sub_fetch(&u.pending, 1, __ATOMIC_ACQ_REL) != 0) return;
            begin_total(u, w);
            for (int s = u.first_segment; s < u.last_segment; ++s)
                for (int r = 0; r < n_records(u); ++r) merge(records(u, 0, s) + r * record, w.rows + r * record);
        } else if (!narrow(u)) {
            for (int first = 0; first < n; first += LANES)
                from_lanes(w.total + (int64_t)first * dim, w.total_top + first, w.total_sum + first,
                           w.rows + first * record, n - first < LANES ? n - first : LANES);
        }
        if (u.group < 0) {
            write(u, w);
            return;
        }
        for (int i = 0; i < u.n_heads; ++i)
            memcpy(records(u, i, 0), w.rows + (int64_t)i * n * record, sizeof(float) * n * record);
    }

    static void body(void* context, int64_t item) {
        const Attention& a = *(const Attention*)context;
        a.run_item(a.first_item + item);
    }

    // -- the plan

    // Work of one segment, in arbitrary units.
    int64_t cost(const Unit& u) const {
        int64_t n = n_queries(u);
        return narrow(u) ? u.n_heads * (6 + n) : 4 + 16 * ceil_div(n, WIDTH);
    }

    // kv heads of one unit of so many query tokens.
    int heads_per_unit(int n_tokens) const { return n_tokens * group_heads <= NARROW ? call.n_kv_heads : 1; }

    // Rows that share a prefix, as far as it pays: whoever brings a block of queries of its own gains nothing.
    int find_groups(Group* found, int32_t* tokens) const {
        int n = 0;
        for (int b = 0; b < call.n_rows; ++b) members[b] = {-1, 0};
        for (int g = 0; g < call.n_groups; ++g) {
            const int32_t* row = call.group_rows + call.group_start[g];
            int n_rows = call.group_start[g + 1] - call.group_start[g], joined = 0;
            Group group = {0, call.group_tokens[g] / SEGMENT, 0, 1, tokens, nullptr};
            for (int i = 0; i < n_rows; ++i) joined += joins(row[i]);
            if (joined < 2 || group.n_segments == 0) continue;
            for (int i = 0; i < n_rows; ++i) {
                if (!joins(row[i])) continue;
                members[row[i]] = {n, group.n_tokens};
                group.row = row[i];
                for (int t = call.q_start[row[i]]; t < call.q_start[row[i] + 1]; ++t) tokens[group.n_tokens++] = t;
            }
            tokens += group.n_tokens;
            found[n++] = group;
        }
        return n;
    }

    bool joins(int row) const { return new_tokens(row) * group_heads <= LANES; }

    // Calls visit(unit) for the units of the groups; of each, one block of tokens after the other.
    template <typename Visit>
    void each_shared(int n_groups, Visit visit) const {
        int tokens = queries_per_unit / group_heads;
        for (int g = 0; g < n_groups; ++g)
            for (int first = 0; first < groups[g].n_tokens; first += tokens) {
                int left = groups[g].n_tokens - first, count = left < tokens ? left : tokens;
                int heads = heads_per_unit(count);
                for (int head = 0; head < call.n_kv_heads; head += heads)
                    visit(Unit{groups[g].row, head, heads, g, first, count, 0, groups[g].n_segments, 1, nullptr, 0});
            }
    }

    // Calls visit(unit) for the rows' own keys; of one row and head, those with the most keys come first.
    template <typename Visit>
    void each_private(Visit visit) const {
        int tokens = queries_per_unit / group_heads;
        for (int b = 0; b < call.n_rows; ++b) {
            int n_new = new_tokens(b);
            int begin = members[b].group < 0 ? 0 : groups[members[b].group].n_segments;
            for (int head = 0; head < call.n_kv_heads; ++head)
                for (int block = (int)ceil_div(n_new, tokens) - 1; block >= 0; --block) {
                    int left = n_new - block * tokens, count = left < tokens ? left : tokens;
                    Unit u = {b, head, heads_per_unit(count), -1, block * tokens, count, begin, 0, 1, nullptr, 0};
                    u.last_segment = (int)ceil_div(visible(u, u.n_tokens - 1), SEGMENT);
                    const int first = first_visible(u, 0) / SEGMENT;
                    u.first_segment = first > begin ? first : begin;
                    // Of little work all threads get a part, though heads that lie side by side are read best together.
                    if (call.n_rows * (u.last_segment - u.first_segment) < PARTS * call.threads) u.n_heads = 1;
                    if (head % u.n_heads == 0) visit(u);
                }
        }
    }

    // Cuts the call into `items`: first those of shared prefixes, on whose results the others depend.
    void plan() {
        cap_scale = call.softcap ? call.scale / call.softcap : 0;
        log2_scale = (call.softcap ? call.softcap : call.scale) * 1.44269504f;
        int longest = 1, n_members = 0;
        for (int b = 0; b < call.n_rows; ++b) longest = new_tokens(b) > longest ? new_tokens(b) : longest;
        if (call.n_groups) n_members = call.group_start[call.n_groups];
        int tokens = MAX_QUERIES / group_heads > 1 ? MAX_QUERIES / group_heads : 1;
        queries_per_unit = (tokens < longest || call.n_groups ? tokens : longest) * group_heads;
        int64_t n_tokens = call.q_start[call.n_rows];
        int64_t blocks = n_tokens / tokens + call.n_rows;
        int64_t max_units = (blocks + (call.n_groups ? blocks : 0)) * call.n_kv_heads;
        // Every unit may be cut into as many items as there are of average size in all.
        int64_t max_items = max_units + 4 * PARTS * call.threads;
        Carver memory = {nullptr, 0};
        int32_t* group_tokens = nullptr;
        for (int pass = 0; pass < 2; ++pass) {
            memory = {pass ? (char*)scratch(SCRATCH_PLAN, memory.used) : nullptr, 0};
            if (pass && !memory.base) __builtin_trap();
            memory.take(members, call.n_rows);
            memory.take(groups, call.n_groups);
            memory.take(group_tokens, n_members ? n_tokens : 0);
            memory.take(units, max_units);
            memory.take(items, max_items);
        }
        int n_groups = find_groups(groups, group_tokens);
        int64_t n_units = 0;
        if (n_groups) {
            each_shared(n_groups, [&](const Unit& u) { units[n_units++] = u; });
        }
        int64_t n_shared = n_units;
        each_private([&](const Unit& u) { units[n_units++] = u; });
        shared_items = cut(0, n_shared, 0);
        n_items = cut(n_shared, n_units, shared_items);
        lay_out(n_groups, n_shared, n_units);
    }

    void run() {
        plan();
        parallel_items(shared_items, call.threads, body, this);
        first_item = shared_items;
        parallel_items(n_items - shared_items, call.threads, body, this);
    }

    static constexpr int PARTS = 4;     // items per thread to aim at

    // Cuts units [from, to) into items; returns the number of all items then.
    int64_t cut(int64_t from, int64_t to, int64_t n_items) {
        int64_t all = 0;
        for (int64_t i = from; i < to; ++i) all += cost(units[i]) * (units[i].last_segment - units[i].first_segment);
        int64_t target = call.threads > 1 ? all / (call.threads * PARTS) : all;
        for (int64_t i = from; i < to; ++i) {
            Unit& u = units[i];
            int64_t n = u.last_segment - u.first_segment, size = cost(u) * n;
            int64_t parts = target ? size / target : n;
            if (n * n_records(u) * record * 4 > MAX_PARTIAL) parts = 1;
            parts = parts < 1 ? 1 : parts > n ? n : parts;
            u.pending = (int)parts;
            for (int64_t p = 0; p < parts; ++p)
                items[n_items++] = {(int)i, u.first_segment + (int)(n * p / parts),
                                    u.first_segment + (int)(n * (p + 1) / parts)};
        }
        return n_items;
    }

    // Memory for partial results. The units of a group write where its members read.
    void lay_out(int n_groups, int64_t n_shared, int64_t n_units) {
        for (int64_t i = 0; i < n_shared; ++i)
            if (units[i].pending > 1) groups[units[i].group].n_records = groups[units[i].group].n_segments;
        Carver memory = {nullptr, 0};
        for (int pass = 0; pass < 2; ++pass) {
            memory = {pass && memory.used ? (char*)scratch(SCRATCH_PARTIAL, memory.used) : nullptr, 0};
            for (int g = 0; g < n_groups; ++g)
                memory.take(groups[g].records, call.n_kv_heads * groups[g].n_records * stride(groups[g]));
            for (int64_t i = 0; i < n_units; ++i) {
                Unit& u = units[i];
                if (u.group >= 0) {
                    const Group& g = groups[u.group];
                    u.partial = g.records + u.kv_head * g.n_records * stride(g) + u.first_token * group_heads * record;
                    u.stride = g.n_records > 1 ? stride(g) : 0;
                } else if (u.pending > 1) {
                    u.stride = n_records(u) * record;
                    memory.take(u.partial, u.stride * (u.last_segment - u.first_segment));
                }
            }
            if (pass && memory.used && !memory.base) __builtin_trap();
        }
    }

    // Floats of one record of every query of the group.
    int64_t stride(const Group& g) const { return (int64_t)g.n_tokens * group_heads * record; }
};

template <typename T>
void paged_attention(const AttentionCall& call) {
    Attention<T> attention(call);
    attention.run();
}

}  // namespace
