// Masks, draws and log-probabilities over the vocabulary. Rows are independent of each other.
//
// What is likelier is decided on z = (logit - largest) / temperature, which is exact arithmetic and at most 0; weights
// are exp(z) and summed in double. Nothing is sorted: a filter looks at the candidates near the top first, and finds
// its threshold among them by counting into buckets of the leading, middle and last bits of |z| (radix selection).
#pragma once

#include <math.h>

#include "elementwise.h"

namespace {

constexpr int64_t DRAW_BLOCK = 256;
constexpr float LOG2_E = 1.44269504f;
constexpr int BUCKETS = 2048;

typedef double vd __attribute__((vector_size(8 * BOUGH_WIDTH)));

INLINE double sum_double(const vd& x) {
    double total = 0;
    for (int i = 0; i < WIDTH; ++i) total += x[i];
    return total;
}

// SplitMix64's finaliser.
inline uint64_t scatter(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The number in [0, 1) of (seed, position); worker/sampling/draw.py says how.
inline double uniform(uint64_t seed, int64_t position) {
    const uint64_t golden = 0x9e3779b97f4a7c15ull;
    return (double)(scatter(scatter(seed + golden) + ((uint64_t)position + 1) * golden) >> 11) * 0x1p-53;
}

// Below `total`, so that rounding never leads past the last token that has any weight.
inline double target_of(double u, double total) {
    double target = u * total, below = nextafter(total, 0.0);
    return target < below ? target : below;
}

struct Candidate {
    int32_t id;
    uint32_t key;   // bits of |z|: the smaller, the likelier
    float weight;
};

template <typename T>
struct Sampling {
    const SampleCall& call;
    const T* x;
    int64_t row;
    float largest, temperature;
    Candidate* candidates;
    int64_t n;          // candidates, in rising order of id
    struct Bucket {
        double weight;
        int64_t count;
    }* buckets;

    Sampling(const SampleCall& c, int64_t r) : call(c), x((const T*)c.logits + r * c.vocab), row(r), n(0) {
        largest = widen(x[c.best[r]]);
        temperature = c.temperature[r];
    }

    vf z(int64_t i) const {
        vf value = splat(-__builtin_inff());
        if (i + WIDTH <= call.vocab)
            value = load(x + i);
        else
            for (int lane = 0; i + lane < call.vocab; ++lane) value[lane] = widen(x[i + lane]);
        return (value - splat(largest)) / splat(temperature);
    }

    static vf weight(vf z) { return exp2v(z * splat(LOG2_E)); }

    double block_weight(int64_t first) const {
        int64_t end = first + DRAW_BLOCK < call.vocab ? first + DRAW_BLOCK : call.vocab;
        vd total = vd{};
        for (int64_t i = first; i < end; i += WIDTH) total += __builtin_convertvector(weight(z(i)), vd);
        return sum_double(total);
    }

    // Inverse of the cumulative distribution over the whole vocabulary: blocks first, then one block.
    int64_t draw(double u) const {
        int64_t blocks = (call.vocab + DRAW_BLOCK - 1) / DRAW_BLOCK;
        double* ends = (double*)scratch(SCRATCH_WORK, blocks * (int64_t)sizeof(double));
        if (!ends) __builtin_trap();
        double total = 0;
        for (int64_t b = 0; b < blocks; ++b) ends[b] = total += block_weight(b * DRAW_BLOCK);
        double target = target_of(u, total);
        int64_t b = 0;
        while (ends[b] <= target) ++b;
        if (b) target -= ends[b - 1];
        float weights[DRAW_BLOCK];
        int64_t first = b * DRAW_BLOCK, count = call.vocab - first < DRAW_BLOCK ? call.vocab - first : DRAW_BLOCK;
        for (int64_t i = 0; i < count; i += WIDTH) storef(weights + i, weight(z(first + i)));
        double end = 0;
        int64_t chosen = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (weights[i] > 0) chosen = i;
            end += weights[i];
            if (end > target) break;
        }
        return first + chosen;
    }

    void collect(double cut) {
        n = 0;
        for (int64_t i = 0; i < call.vocab; i += WIDTH) {
            vf value = z(i);
            if (max_lane(value) < cut) continue;
            vf heavy = weight(value);
            for (int lane = 0; lane < WIDTH; ++lane) {
                float one = value[lane];
                uint32_t bits;
                memcpy(&bits, &one, sizeof bits);
                candidates[n] = {(int32_t)(i + lane), bits & 0x7fffffffu, heavy[lane]};
                n += one >= cut && heavy[lane] > 0;
            }
        }
    }

    double weight_of_all() const {
        double total = 0;
        for (int64_t first = 0; first < call.vocab; first += DRAW_BLOCK) total += block_weight(first);
        return total;
    }

    double weight_of_candidates() const {
        double total = 0;
        for (int64_t i = 0; i < n; ++i) total += candidates[i].weight;
        return total;
    }

    // Keeps the likeliest candidates up to the first with which their number, or their weight, reaches `target`; of
    // equally likely ones those with the lowest ids.
    void keep(bool by_weight, double target) {
        uint32_t prefix = 0, mask = 0;
        double before = 0;
        const int shifts[] = {20, 10, 0};
        for (int shift : shifts) {
            memset(buckets, 0, sizeof(Bucket) * BUCKETS);
            uint32_t digit = shift == 20 ? 2047u : 1023u;
            for (int64_t i = 0; i < n; ++i) {
                const Candidate& c = candidates[i];
                if ((c.key & mask) != prefix) continue;
                Bucket& bucket = buckets[(c.key >> shift) & digit];
                bucket.weight += c.weight;
                bucket.count += 1;
            }
            // Rounding may keep the sum below the target: the last bucket with anything in it is then the one.
            uint32_t chosen = 0;
            double until = before;
            for (uint32_t b = 0; b <= digit; ++b) {
                if (!buckets[b].count) continue;
                chosen = b;
                before = until;
                until += by_weight ? buckets[b].weight : (double)buckets[b].count;
                if (until >= target) break;
            }
            prefix |= chosen << shift;
            mask |= digit << shift;
            if (shift == 0) drop(prefix, target, before, by_weight);
        }
    }

    void drop(uint32_t threshold, double target, double before, bool by_weight) {
        int64_t kept = 0, equal = 0;
        for (int64_t i = 0; i < n; ++i) {
            const Candidate c = candidates[i];
            if (c.key > threshold) continue;
            if (c.key == threshold) {
                double reached = before + (by_weight ? (double)equal * c.weight : (double)equal);
                if (equal && reached >= target) continue;
                ++equal;
            }
            candidates[kept++] = c;
        }
        n = kept;
    }

    int64_t draw_filtered(double u) {
        int64_t bytes = (call.vocab + WIDTH) * (int64_t)sizeof(Candidate);
        buckets = (Bucket*)scratch(SCRATCH_WORK, bytes + (int64_t)sizeof(Bucket) * BUCKETS);
        if (!buckets) __builtin_trap();
        candidates = (Candidate*)(buckets + BUCKETS);
        const int64_t k = call.top_k[row];
        const double p = call.top_p[row], least = call.least_z[row];
        const bool has_k = k < call.vocab, has_p = p < 1.0;
        double target = has_p && !has_k ? p * weight_of_all() : 0;
        const double cuts[] = {-6.0, -14.0, -__builtin_inf()};
        for (double cut : cuts) {
            // What min-p drops anyway need not be looked at, unless top-p takes its share of what top-k keeps.
            bool last = !(has_k && has_p) && least >= cut;
            collect(last ? least : cut);
            if (last || ((!has_k || n >= k) && (!has_p || has_k || weight_of_candidates() >= target) && (has_k || has_p)))
                break;
        }
        if (has_k && n > k) keep(false, (double)k);
        if (has_p) keep(true, has_k ? p * weight_of_candidates() : target);
        double total = 0, end = 0;
        for (int64_t i = 0; i < n; ++i) {
            float z = as_z(candidates[i].key);
            if (z < least) candidates[i].weight = 0;
            total += candidates[i].weight;
        }
        target = target_of(u, total);
        int64_t chosen = 0;
        for (int64_t i = 0; i < n; ++i) {
            if (candidates[i].weight > 0) chosen = i;
            end += candidates[i].weight;
            if (end > target) break;
        }
        return candidates[chosen].id;
    }

    static float as_z(uint32_t key) {
        float value;
        memcpy(&value, &key, sizeof value);
        return -value;
    }

    int64_t run() {
        double u = uniform(call.seeds[row], call.positions[row]);
        bool filtered = call.top_k[row] < call.vocab || call.top_p[row] < 1.0 || call.least_z[row] > -__builtin_inf();
        return filtered ? draw_filtered(u) : draw(u);
    }
};

template <typename T>
void sample(const SampleCall& call) {
    for_rows(call.n, call.vocab * 4, call.threads,
             [&](int64_t row) { call.out[row] = call.best[row] < 0 ? -1 : Sampling<T>(call, row).run(); });
}

// The `n_top` largest of x[0 .. vocab) into ids and values, falling, ties by rising id; -1 where there are no more.
template <typename T>
void top_tokens(const T* x, int64_t vocab, int64_t n_top, int64_t* ids, float* values) {
    int64_t filled = 0;
    for (int64_t j = 0; j < n_top; ++j) ids[j] = -1;
    for (int64_t i = 0; i < vocab; ++i) {
        if (filled == n_top && i + WIDTH <= vocab) {
            while (i + WIDTH <= vocab && !(max_lane(load(x + i)) > values[n_top - 1])) i += WIDTH;
            if (i >= vocab) return;
        }
        float value = widen(x[i]);
        if (value != value || (filled == n_top && !(value > values[n_top - 1]))) continue;
        int64_t at = filled < n_top ? filled++ : n_top - 1;
        for (; at > 0 && value > values[at - 1]; --at) {
            values[at] = values[at - 1];
            ids[at] = ids[at - 1];
        }
        values[at] = value;
        ids[at] = i;
    }
}

template <typename T>
void logprobs(const LogprobCall& call) {
    for_rows(call.n, call.vocab * 4, call.threads, [&](int64_t row) {
        const T* x = (const T*)call.logits + row * call.vocab;
        const int64_t token = call.tokens[row], vocab = call.vocab;
        const float own = widen(x[token]);
        vf best = splat(-__builtin_inff());
        int64_t i = 0, rank = 1;
        for (; i + WIDTH <= vocab; i += WIDTH) best = vmax(load(x + i), best);
        float top = max_lane(best);
        for (; i < vocab; ++i) top = widen(x[i]) > top ? widen(x[i]) : top;
        vd total = vd{};
        vi above = vi{};
        for (i = 0; i + WIDTH <= vocab; i += WIDTH) {
            vf value = load(x + i);
            total += __builtin_convertvector(exp2v((value - splat(top)) * splat(LOG2_E)), vd);
            // Comparisons are -1 where they hold.
            above -= i + WIDTH <= token ? value >= splat(own) : value > splat(own);
        }
        double all = sum_double(total);
        for (int lane = 0; lane < WIDTH; ++lane) rank += above[lane];
        int64_t block = token / WIDTH * WIDTH;
        if (block < i)
            for (int64_t j = block; j < token; ++j) rank += widen(x[j]) == own;
        for (; i < vocab; ++i) {
            float value = widen(x[i]);
            all += exp2_one((value - top) * LOG2_E);
            rank += value > own || (value == own && i < token);
        }
        const float norm = (float)log(all);
        call.chosen[row] = own - top - norm;
        call.ranks[row] = rank;
        for (int64_t j = 0; j < call.n_asked; ++j)
            call.asked_out[row * call.n_asked + j] = widen(x[call.asked[j]]) - top - norm;
        if (!call.n_top) return;
        float* values = call.top + row * call.n_top;
        top_tokens(x, vocab, call.n_top, call.top_ids + row * call.n_top, values);
        for (int64_t j = 0; j < call.n_top; ++j) values[j] = values[j] - top - norm;
    });
}

template <typename T>
void apply_bitmask(void* logits, const int32_t* masks, const int64_t* rows, int64_t n, int64_t vocab, int threads) {
    const int64_t words = (vocab + 31) / 32;
    for_rows(n, vocab, threads, [=](int64_t m) {
        T* x = (T*)logits + rows[m] * vocab;
        for (int64_t w = 0; w < words; ++w) {
            uint32_t allowed = (uint32_t)masks[m * words + w];
            if (allowed == 0xffffffffu) continue;
            int64_t first = w * 32, count = vocab - first < 32 ? vocab - first : 32;
            if (sizeof(T) == 4 && count == 32) {
                for (int j = 0; j < 32; j += WIDTH)
                    store(x + first + j, select(lanes_of(allowed, j), load(x + first + j), splat(-__builtin_inff())));
                continue;
            }
            for (int64_t i = 0; i < count; ++i)
                if (!(allowed >> i & 1)) store_one(x + first + i, -__builtin_inff());
        }
    });
}

// tokens[rows[m]], unless it is negative: first index of the largest of the values that the m-th mask allows; -1 where
// one of them is a NaN or +inf, or none is more than -inf. Of what a mask forbids nothing is read but whole words beside
// what it allows.
template <typename T>
void masked_argmax(const void* logits, const int32_t* masks, const int64_t* rows, int64_t* tokens, int64_t n,
                   int64_t vocab, int threads) {
    const int64_t words = (vocab + 31) / 32, whole = vocab / 32;
    for_rows(n, vocab, threads, [=](int64_t m) {
        int64_t* out = tokens + rows[m];
        if (*out < 0) return;
        const T* x = (const T*)logits + rows[m] * vocab;
        const uint32_t* mask = (const uint32_t*)masks + m * words;
        const float infinity = __builtin_inff();
        vf best = splat(-infinity);
        vi bad = vi{};
        for (int64_t w = 0; w < whole; ++w) {
            if (!mask[w]) continue;
            for (int j = 0; j < 32; j += WIDTH) {
                vf value = select(lanes_of(mask[w], j), load(x + w * 32 + j), splat(-infinity));
                bad |= ~(value < splat(infinity));
                best = vmax(value, best);
            }
        }
        bool broken = any(bad);
        float top = max_lane(best);
        for (int64_t i = whole * 32; i < vocab; ++i) {
            if (!(mask[whole] >> (i % 32) & 1)) continue;
            float value = widen(x[i]);
            broken |= !(value < infinity);
            top = value > top ? value : top;
        }
        *out = -1;
        if (broken || top == -infinity) return;
        for (int64_t w = 0; w < words; ++w) {
            if (!mask[w]) continue;
            bool here = w == whole;
            for (int j = 0; j < 32 && !here; j += WIDTH)
                here = any(lanes_of(mask[w], j) & (load(x + w * 32 + j) == splat(top)));
            if (!here) continue;
            for (int64_t i = w * 32; i < vocab && i < w * 32 + 32; ++i)
                if (mask[w] >> (i % 32) & 1 && widen(x[i]) == top) {
                    *out = i;
                    return;
                }
        }
    });
}

}  // namespace
