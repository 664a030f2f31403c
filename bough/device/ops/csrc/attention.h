// Paged attention for any mix of decode steps and prompt chunks, with prefixes that rows share.
//
// A *unit* is a block of query tokens that all need the same keys: a row's own tokens, or those of several rows that
// share a prefix. The query heads of a kv head lie side by side. Keys are taken in segments of SEGMENT, counted from
// position 0 (segment.h). Each has its own maximum, sum and output, which are merged into the total in rising order of
// segments (Milakov and Gimelshein 2018, Dao et al. 2023). A long unit is cut into *items* of whole segments that run
// in parallel; whichever ends last merges.
//
// So what a query yields depends on its own keys and their positions, bit by bit, and on nothing else: not on the
// company in the batch, on how a prompt was cut into chunks, on which rows share a prefix and are told to, on the
// number of threads or of items.
#pragma once

#include "segment.h"

namespace {

template <typename T>
struct Attention : Segments<T> {
    typedef Segments<T> Base;
    using Base::call, Base::group_heads, Base::dim, Base::words, Base::record, Base::groups;
    using Base::cap_scale, Base::log2_scale;
    using Base::first_visible, Base::from_lanes, Base::head, Base::load_queries, Base::locate, Base::n_queries;
    using Base::n_records, Base::n_vecs, Base::narrow, Base::new_tokens, Base::run_narrow, Base::run_wide;
    using Base::transpose_rows, Base::visible;
    int queries_per_unit = 0;
    Unit* units = nullptr;
    Item* items = nullptr;
    int64_t shared_items = 0, n_items = 0;
    int64_t first_item = 0;             // of those that run()'s threads divide among them
    Member* members = nullptr;
    void* const owner = scratch_owner();    // whoever plans, so that one thread has the memory of plans

    explicit Attention(const AttentionCall& c) : Base(c) {}

    // -- totals

    // Starts the totals of many queries, in lanes, as begin_rows() does those of few.
    void begin_lanes(const Unit& u, Work<T>& w) const {
        const int n = n_queries(u);
        const int64_t block = record * LANES;
        if (!in_group(u)) {
            memset(w.total, 0, sizeof(float) * ceil_div(n, LANES) * block);
            for (int i = 0; i < ceil_to(n, LANES); ++i)
                w.total[i / LANES * block + dim * LANES + i % LANES] = -__builtin_inff();
            return;
        }
        begin_rows(u, w);
        for (int first = 0; first < n; first += WIDTH) {
            float* to = w.total + first / LANES * block + first % LANES;
            const uint32_t* rows[WIDTH];
            for (int i = 0; i < WIDTH; ++i) {
                const float* from = w.rows + (first + i < n ? first + i : n - 1) * record;
                rows[i] = (const uint32_t*)from;
                to[dim * LANES + i] = from[dim];
                to[(dim + 1) * LANES + i] = from[dim + 1];
            }
            transpose_rows(rows, 0, dim, (uint32_t*)to, LANES);
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
    void begin_rows(const Unit& u, Work<T>& w) const {
        const int64_t n = n_queries(u) * record;
        for (int i = 0; i < u.n_heads && in_group(u); ++i)
            memcpy(w.rows + i * n,
                   shared_total(groups[members[u.row].group], u.kv_head + i, members[u.row].offset + u.first_token),
                   sizeof(float) * n);
        for (int r = 0; r < n_records(u) && !in_group(u); ++r) {
            memset(w.rows + r * record, 0, sizeof(float) * record);
            w.rows[r * record + dim] = -__builtin_inff();
        }
    }

    // What a group has found for a kv head, from one of its tokens on.
    float* shared_total(const Group& g, int kv_head, int token) const {
        return g.records + ((int64_t)kv_head * g.n_tokens + token) * group_heads * record;
    }

    void begin(const Unit& u, Work<T>& w) const { narrow(u) ? begin_rows(u, w) : begin_lanes(u, w); }

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
        if (index < n_items && narrow(u)) locate(u, segment, to);
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
        if (!u.stride) begin(u, w);
        locate(u, item.first_segment, w.cells[item.first_segment % 2]);
        for (int s = item.first_segment; s < item.last_segment; ++s) {
            if (!narrow(u)) {
                run_wide(u, s, item.last_segment, u.stride ? apart(u, s) : nullptr, w);
                continue;
            }
            Cells& next = w.cells[1 - s % 2];
            const int next_heads = locate_next(index, s, next).n_heads;
            run_narrow(u, s, w.cells[s % 2], next, next_heads, w);
            if (u.stride)
                memcpy(apart(u, s), w.segment, sizeof(float) * u.stride);
            else
                for (int r = 0; r < n_records(u); ++r) merge(w.segment + r * record, w.rows + r * record);
        }
        finish(u, w);
    }

    // What a segment comes to, of a unit of several items.
    float* apart(const Unit& u, int segment) const { return u.partial + (segment - u.first_segment) * u.stride; }

    // After the last segment of an item: whoever ends last has the unit's result.
    void finish(Unit& u, Work<T>& w) const {
        const int n = n_queries(u);
        if (u.stride) {
            if (__atomic_sub_fetch(&u.pending, 1, __ATOMIC_ACQ_REL) != 0) return;
            u.pending = u.parts;    // for the next layer that runs this plan
            begin(u, w);
            for (int s = u.first_segment; s < u.last_segment; ++s) {
                const float* from = apart(u, s);
                for (int r = 0; narrow(u) && r < n_records(u); ++r) merge(from + r * record, w.rows + r * record);
                for (int first = 0; !narrow(u) && first < n; first += LANES)
                    merge_lanes(from + first * record, w.total + first * record, dim, n_vecs(n - first));
            }
        }
        for (int first = 0; !narrow(u) && first < n; first += LANES)
            from_lanes(w.total + first * record, w.rows + first * record, n - first < LANES ? n - first : LANES);
        if (u.group < 0) {
            write(u, w);
            return;
        }
        for (int i = 0; i < u.n_heads; ++i)
            memcpy(shared_total(groups[u.group], u.kv_head + i, u.first_token), w.rows + i * n * record,
                   sizeof(float) * n * record);
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
            Group group = {0, call.group_tokens[g] / SEGMENT, 0, tokens, nullptr};
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
                    visit(Unit{groups[g].row, head, heads, g, first, count, 0, groups[g].n_segments, 1, 1, nullptr, 0});
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
                    Unit u = {b, head, heads_per_unit(count), -1, block * tokens, count, begin, 0, 1, 1, nullptr, 0};
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
            memory = {pass ? (char*)scratch_of(owner, SCRATCH_PLAN, memory.used) : nullptr, 0};
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
        lay_out(n_groups, n_units);
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
            // A single row of many tokens may fill the memory; of many rows each has the share that its work has.
            if (4.0 * n * apart_floats(u) * all > MAX_PARTIAL * size) parts = 1;
            parts = parts < 1 ? 1 : parts > n ? n : parts;
            u.pending = u.parts = (int)parts;
            for (int64_t p = 0; p < parts; ++p)
                items[n_items++] = {(int)i, u.first_segment + (int)(n * p / parts),
                                    u.first_segment + (int)(n * (p + 1) / parts)};
        }
        return n_items;
    }

    // Floats of what one segment comes to.
    int64_t apart_floats(const Unit& u) const {
        return (narrow(u) ? n_records(u) : ceil_to(n_queries(u), LANES)) * record;
    }

    // Memory for what groups find, and for the segments of units that have several items.
    void lay_out(int n_groups, int64_t n_units) {
        Carver memory = {nullptr, 0};
        for (int pass = 0; pass < 2; ++pass) {
            memory = {pass && memory.used ? (char*)scratch_of(owner, SCRATCH_PARTIAL, memory.used) : nullptr, 0};
            for (int g = 0; g < n_groups; ++g)
                memory.take(groups[g].records, (int64_t)call.n_kv_heads * groups[g].n_tokens * group_heads * record);
            for (int64_t i = 0; i < n_units; ++i) {
                Unit& u = units[i];
                if (u.parts == 1) continue;
                u.stride = apart_floats(u);
                memory.take(u.partial, u.stride * (u.last_segment - u.first_segment));
            }
            if (pass && memory.used && !memory.base) __builtin_trap();
        }
    }
};

template <typename T>
void paged_attention(const AttentionCall& call) {
    Attention<T> attention(call);
    attention.run();
}

}  // namespace
