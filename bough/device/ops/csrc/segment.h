// One segment of a unit's keys: scores, weights, and sums of V.
//
// Few queries (a decode step) keep keys in the lanes of vectors: K is transposed into tiles, V is read where it lies, for
// all kv heads in turn. Many queries lie in the lanes themselves (lanes.h), one kv head per unit.
#pragma once

#include "layout.h"

namespace {

constexpr int LARGE_CELL = 1024;    // bytes

// Whether it pays to ask for cells for the first cache shortly before they are read. Xeons with AMX gain nothing by it.
#if defined(BOUGH_AMX)
constexpr bool ASKS_SHORTLY = false;
#else
constexpr bool ASKS_SHORTLY = true;
#endif

template <typename T>
struct Segments : Layout<T> {
    typedef Layout<T> Base;
    using typename Base::word;
    using Base::BYTES, Base::as_pairs, Base::bytes, Base::call, Base::cell_bytes_of, Base::cell_words, Base::dim,
        Base::few_words, Base::first_visible, Base::group_heads, Base::key_words, Base::lane_query, Base::lane_words,
        Base::load_scales, Base::locate, Base::n_queries, Base::n_vecs, Base::pack, Base::read_keys, Base::record,
        Base::transpose_rows, Base::visible, Base::words;
    float cap_scale, log2_scale;    // score := tanh(cap_scale * product), unless that is 0; log2(weight) = log2_scale * score

    explicit Segments(const AttentionCall& c) : Base(c) {}

    // Brings n small cells of all the unit's heads to the first cache, a line after the other. What follows reads one head at a
    // time, in strides that no hardware foresees. So many large ones would drive each other out of it. Arithmetic that takes as
    // long as in floats waits for less if they are loaded, which sets the hardware's own prefetching going.
    void fetch(const Unit& u, const void* const* cells, int n) const {
        const int size = cell_bytes_of(u.n_heads);
        const bool asks = ASKS_SHORTLY && (bytes || !FLOATS<T>);
        for (int i = 0; size < LARGE_CELL && i < n; ++i)
            for (int at = 0; at < size; at += 64) {
                const char* line = (const char*)cells[i] + at;
                asks ? __builtin_prefetch(line, 0, 3) : (void)*(const volatile char*)line;
            }
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
        const bool large = ASKS_SHORTLY && cell_bytes_of(call.n_kv_heads) >= LARGE_CELL;
        const auto turn = [&](const void* const* rows, int64_t first, int n_words) {
            for (int j = 0; j < count; j += WIDTH) {
                for (int k = j + WIDTH; large && k < j + 2 * WIDTH && k < count; ++k)
                    for (int i = 0; i < n_words; i += 16) __builtin_prefetch((const uint32_t*)rows[k] + first + i, 0, 3);
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
};

}  // namespace
