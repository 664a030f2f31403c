// Paged attention for any mix of decode steps and prompt chunks.
//
// A *unit* is one (batch row, kv head, block of query tokens): the query heads of the kv head for up to
// MAX_QUERIES / group tokens, all of which need the same keys. Keys are visited in blocks of 64, whose K cells are
// transposed into a tile once for all queries of the unit; softmax runs online in base 2. Blocks form segments of
// SEGMENT keys, counted from position 0; the result of each segment is kept apart and merged into the total in
// rising order. A long unit is cut into *items* of whole segments that run in parallel, and whichever item ends last
// merges.
//
// So what a query yields depends on its own keys and their positions, bit by bit, and on nothing else: not on the
// company in the batch, on how a prompt was cut into chunks, on the number of threads or of items.
#pragma once

#include "tile.h"

namespace {

constexpr int KEYS = TILE;
constexpr int SEGMENT = 256;
constexpr int MAX_QUERIES = 96;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t padded(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }

struct Unit {
    int row;            // index in the batch
    int kv_head;
    int first_token;    // index of the first query token among the row's new tokens
    int n_tokens;
    int n_segments;
    int pending;        // items that have not finished
    float* partial;     // [n_segments][queries][dim + 2], or null where one item does it all
};

struct Item {
    int unit;
    int first_segment;
    int last_segment;   // exclusive
};

// The element that the inner product runs over: a float, or a pair of bf16.
template <typename T> struct Word;
template <> struct Word<float> { typedef float type; };
template <> struct Word<bf16> { typedef uint32_t type; };

// Views into one thread's scratch memory.
template <typename T>
struct Work {
    typedef typename Word<T>::type word;
    word* queries;      // [queries][words]
    word* tile;         // [words][KEYS]
    float* values;      // [KEYS][dim]
    float* scores;      // [queries][KEYS]
    float* segment;     // [queries][dim]
    float* total;       // [queries][dim]
    float *segment_max, *segment_sum, *total_max, *total_sum, *decay;   // [queries]
    const uint32_t* keys[2][KEYS];
    const T* rows[2][KEYS];
};

template <typename T>
struct Attention {
    typedef typename Word<T>::type word;
    const AttentionCall& call;
    Unit* units;
    Item* items;
    int group, dim, words, queries_per_unit;
    float log2_scale;

    explicit Attention(const AttentionCall& c) : call(c), units(nullptr), items(nullptr) {
        group = c.n_heads / c.n_kv_heads;
        dim = c.head_dim;
        words = dim * (int)sizeof(T) / 4;
        int tokens = MAX_QUERIES / group > 1 ? MAX_QUERIES / group : 1;
        int longest = 1;
        for (int b = 0; b < c.n_rows; ++b) {
            int n = c.q_start[b + 1] - c.q_start[b];
            longest = n > longest ? n : longest;
        }
        queries_per_unit = (tokens < longest ? tokens : longest) * group;
        log2_scale = c.scale * 1.44269504f;
    }

    int tokens_per_unit() const { return queries_per_unit / group; }
    int64_t record() const { return dim + 2; }

    bool work(Work<T>& w) const {
        int64_t n = queries_per_unit;
        int64_t sizes[] = {padded((int64_t)sizeof(Work<T>)), padded(n * words * 4), padded((int64_t)words * KEYS * 4),
                           padded((int64_t)KEYS * dim * 4), padded(n * KEYS * 4), padded(n * dim * 4),
                           padded(n * dim * 4), padded(n * 4) * 5};
        int64_t bytes = 0;
        for (int64_t size : sizes) bytes += size;
        char* p = (char*)scratch(SCRATCH_WORK, bytes);
        if (!p) return false;
        w.queries = (word*)p;
        w.tile = (word*)(p += sizes[1]);
        w.values = (float*)(p += sizes[2]);
        w.scores = (float*)(p += sizes[3]);
        w.segment = (float*)(p += sizes[4]);
        w.total = (float*)(p += sizes[5]);
        w.segment_max = (float*)(p += sizes[6]);
        float** vectors[] = {&w.segment_sum, &w.total_max, &w.total_sum, &w.decay};
        float* at = w.segment_max;
        for (float** v : vectors) *v = (at += padded(n * 4) / 4);
        return true;
    }

    // Positions before this one are visible to query token `token` of the row.
    int visible(const Unit& u, int token) const {
        int n_new = call.q_start[u.row + 1] - call.q_start[u.row];
        return call.seq_len[u.row] - n_new + u.first_token + token + 1;
    }

    void load_queries(const Unit& u, Work<T>& w) const {
        const T* q = (const T*)call.q;
        for (int t = 0; t < u.n_tokens; ++t) {
            int64_t token = call.q_start[u.row] + u.first_token + t;
            const T* from = q + (token * call.n_heads + (int64_t)u.kv_head * group) * dim;
            memcpy(w.queries + (int64_t)t * group * words, from, sizeof(T) * group * dim);
        }
    }

    // Pointers to the K and V cells of keys [first, first + n); the rest of the block repeats the last.
    void locate(const Unit& u, int first, int n, const uint32_t** keys, const T** rows) const {
        const int32_t* locs = call.page_table + (int64_t)call.rows[u.row] * call.table_stride + first;
        for (int i = 0; i < n; ++i) {
            int64_t offset = ((int64_t)locs[i] * call.n_kv_heads + u.kv_head) * dim;
            keys[i] = (const uint32_t*)((const T*)call.k + offset);
            rows[i] = (const T*)call.v + offset;
        }
        for (int i = n; i < KEYS; ++i) {
            keys[i] = keys[n - 1];
            rows[i] = rows[n - 1];
        }
    }

    Ahead ahead(const void* cells) const { return {(const void* const*)cells, (int)sizeof(T) * dim}; }

    void gather_tile(const uint32_t* const* keys, int n, uint32_t* tile) const {
        for (int i = 0; i < n; i += WIDTH) {
            for (int word = 0; word < words; word += WIDTH) {
                int left = words - word;
                transpose(keys + i, word, left < WIDTH ? left : WIDTH, tile + (int64_t)word * KEYS + i, KEYS);
            }
        }
    }

    // Scores -> probabilities of queries [first_query, n_queries) and the decay of what they gathered before.
    void soften(const Unit& u, int first_key, int first_query, int n_queries, Work<T>& w) const {
        const vf infinity = splat(__builtin_inff());
        const vi lane = lane_index();
        for (int r = first_query; r < n_queries; ++r) {
            int seen = visible(u, r / group) - first_key;
            float* s = w.scores + (int64_t)r * KEYS;
            vf best = -infinity;
            for (int j = 0; j < KEYS; j += WIDTH) {
                vf x = loadf(s + j) * splat(log2_scale);
                if (seen < KEYS) x = select(lane + j < seen, x, -infinity);
                storef(s + j, x);
                best = vmax(x, best);
            }
            float old = w.segment_max[r], top = max_lane(best);
            top = top > old ? top : old;
            vf total = vf{};
            for (int j = 0; j < KEYS; j += WIDTH) {
                vf p = exp2v(loadf(s + j) - splat(top));
                if (seen < KEYS) p = select(lane + j < seen, p, vf{});
                storef(s + j, p);
                total += p;
            }
            float decay = exp2_one(old - top);
            w.decay[r] = decay;
            w.segment_max[r] = top;
            w.segment_sum[r] = w.segment_sum[r] * decay + sum(total);
        }
    }

    void mix_values(const T* const* rows, int n, int first_query, int n_queries, Work<T>& w, Ahead next) const {
        const float* p = w.scores + (int64_t)first_query * KEYS;
        float* out = w.segment + (int64_t)first_query * dim;
        int count = n_queries - first_query;
        if (sizeof(T) == 4 || count <= BLOCK_ROWS) {
            mix(p, rows, count, n, w.decay + first_query, out, dim, next);
            return;
        }
        const float* widened[KEYS];
        for (int i = 0; i < n; ++i) {
            float* to = w.values + (int64_t)i * dim;
            for (int d = 0; d < dim; d += WIDTH) storef(to + d, load(rows[i] + d));
            widened[i] = to;
        }
        mix(p, widened, count, n, w.decay + first_query, out, dim, next);
    }

    // One segment for all queries of the unit, into w.segment, segment_max and segment_sum.
    void run_segment(const Unit& u, int segment, Work<T>& w) const {
        int n_queries = u.n_tokens * group;
        int end = visible(u, u.n_tokens - 1);
        int begin = segment * SEGMENT;
        end = end < begin + SEGMENT ? end : begin + SEGMENT;
        memset(w.segment, 0, sizeof(float) * (int64_t)n_queries * dim);
        for (int r = 0; r < n_queries; ++r) {
            w.segment_max[r] = -__builtin_inff();
            w.segment_sum[r] = 0;
        }
        int now = 0;
        locate(u, begin, end - begin < KEYS ? end - begin : KEYS, w.keys[0], w.rows[0]);
        for (int key = begin; key < end; key += KEYS, now ^= 1) {
            int n = end - key < KEYS ? end - key : KEYS;
            int left = end - key - KEYS;
            if (left > 0) locate(u, key + KEYS, left < KEYS ? left : KEYS, w.keys[now ^ 1], w.rows[now ^ 1]);
            // Queries whose tokens come before this block see none of it.
            int hidden = key + 1 - visible(u, 0);
            int first_query = hidden > 0 ? hidden * group : 0;
            gather_tile(w.keys[now], n, (uint32_t*)w.tile);
            product(w.queries + (int64_t)first_query * words, words, w.tile, n_queries - first_query, words,
                    w.scores + (int64_t)first_query * KEYS, KEYS, ahead(w.rows[now]));
            soften(u, key, first_query, n_queries, w);
            mix_values(w.rows[now], n, first_query, n_queries, w, ahead(left > 0 ? w.keys[now ^ 1] : nullptr));
        }
    }

    // total := total + one segment, for one query; nothing for a query that saw none of the segment.
    void merge(const float* out, float top, float weight, float* total, float& total_max, float& total_sum) const {
        if (top == -__builtin_inff() && weight == 0) return;
        float best = top > total_max ? top : total_max;
        if (!(top == top)) best = top;
        float old = exp2_one(total_max - best), add = exp2_one(top - best);
        for (int d = 0; d < dim; d += WIDTH) {
            storef(total + d, fma(loadf(out + d), splat(add), loadf(total + d) * splat(old)));
        }
        total_sum = total_sum * old + weight * add;
        total_max = best;
    }

    void clear_total(int n_queries, Work<T>& w) const {
        memset(w.total, 0, sizeof(float) * (int64_t)n_queries * dim);
        for (int r = 0; r < n_queries; ++r) {
            w.total_max[r] = -__builtin_inff();
            w.total_sum[r] = 0;
        }
    }

    void write(const Unit& u, Work<T>& w) const {
        T* out = (T*)call.out;
        for (int r = 0; r < u.n_tokens * group; ++r) {
            int64_t token = call.q_start[u.row] + u.first_token + r / group;
            T* to = out + (token * call.n_heads + (int64_t)u.kv_head * group + r % group) * dim;
            vf share = splat(1.0f / w.total_sum[r]);
            for (int d = 0; d < dim; d += WIDTH) store(to + d, loadf(w.total + (int64_t)r * dim + d) * share);
        }
    }

    void run_item(const Item& item) const {
        Work<T> w;
        if (!work(w)) __builtin_trap();
        Unit& u = units[item.unit];
        int n_queries = u.n_tokens * group;
        load_queries(u, w);
        if (!u.partial) clear_total(n_queries, w);
        for (int s = item.first_segment; s < item.last_segment; ++s) {
            run_segment(u, s, w);
            for (int r = 0; r < n_queries; ++r) {
                const float* from = w.segment + (int64_t)r * dim;
                if (!u.partial) {
                    merge(from, w.segment_max[r], w.segment_sum[r], w.total + (int64_t)r * dim, w.total_max[r],
                          w.total_sum[r]);
                    continue;
                }
                float* to = u.partial + ((int64_t)s * n_queries + r) * record();
                memcpy(to, from, sizeof(float) * dim);
                to[dim] = w.segment_max[r];
                to[dim + 1] = w.segment_sum[r];
            }
        }
        if (u.partial) {
            if (__atomic_sub_fetch(&u.pending, 1, __ATOMIC_ACQ_REL) != 0) return;
            clear_total(n_queries, w);
            for (int s = 0; s < u.n_segments; ++s)
                for (int r = 0; r < n_queries; ++r) {
                    const float* from = u.partial + ((int64_t)s * n_queries + r) * record();
                    merge(from, from[dim], from[dim + 1], w.total + (int64_t)r * dim, w.total_max[r], w.total_sum[r]);
                }
        }
        write(u, w);
    }

    static void body(void* context, int64_t item) {
        const Attention& a = *(const Attention*)context;
        a.run_item(a.items[item]);
    }

    // Calls visit(unit) for every unit; of one row, those with the most keys come first.
    template <typename Visit>
    void each_unit(Visit visit) const {
        int tokens = tokens_per_unit();
        for (int b = 0; b < call.n_rows; ++b) {
            int n_new = call.q_start[b + 1] - call.q_start[b];
            for (int block = (int)ceil_div(n_new, tokens) - 1; block >= 0; --block)
                for (int head = 0; head < call.n_kv_heads; ++head) {
                    Unit u = {b, head, block * tokens, 0, 0, 1, nullptr};
                    int left = n_new - u.first_token;
                    u.n_tokens = left < tokens ? left : tokens;
                    u.n_segments = (int)ceil_div(visible(u, u.n_tokens - 1), SEGMENT);
                    visit(u);
                }
        }
    }

    // Work of one segment, in arbitrary units: every key is gathered once and met by every query.
    int64_t cost(const Unit& u) const { return 8 + (int64_t)u.n_tokens * group; }

    void run() {
        int64_t n_units = 0, n_segments = 0, total = 0;
        each_unit([&](const Unit& u) {
            n_units += 1;
            n_segments += u.n_segments;
            total += cost(u) * u.n_segments;
        });
        if (n_units == 0) return;
        int64_t target = call.threads > 1 ? total / (call.threads * 4) : total;
        int64_t unit_bytes = padded(n_units * (int64_t)sizeof(Unit));
        char* plan = (char*)scratch(SCRATCH_PLAN, unit_bytes + n_segments * (int64_t)sizeof(Item));
        if (!plan) __builtin_trap();
        units = (Unit*)plan;
        items = (Item*)(plan + unit_bytes);
        int64_t n_items = 0, floats = 0;
        n_units = 0;
        each_unit([&](const Unit& u) {
            int64_t per_item = target / cost(u) > 1 ? target / cost(u) : 1;
            int64_t parts = ceil_div(u.n_segments, per_item);
            for (int64_t i = 0; i < parts; ++i)
                items[n_items++] = {(int)n_units, (int)(u.n_segments * i / parts), (int)(u.n_segments * (i + 1) / parts)};
            Unit& kept = units[n_units++];
            kept = u;
            kept.pending = (int)parts;
            if (parts > 1) floats += (int64_t)u.n_segments * u.n_tokens * group * record();
        });
        float* partial = floats ? (float*)scratch(SCRATCH_PARTIAL, floats * 4) : nullptr;
        if (floats && !partial) __builtin_trap();
        for (int64_t i = 0; i < n_units; ++i) {
            if (units[i].pending == 1) continue;
            units[i].partial = partial;
            partial += (int64_t)units[i].n_segments * units[i].n_tokens * group * record();
        }
        parallel_items(n_items, call.threads, body, this);
    }
};

template <typename T>
void paged_attention(const AttentionCall& call) {
    Attention<T> attention(call);
    attention.run();
}

}  // namespace
