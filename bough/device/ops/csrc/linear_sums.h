// Sums of products of prepared rows with panels, word by word.
#pragma once

#include "linear_prepare.h"

namespace {

constexpr int PANEL_VECS = PANEL / WIDTH;

// The sums of R rows and P panels in vectors.
template <typename V, int R, int P> struct Sums { V at[R][P * PANEL_VECS]; };

template <typename V, int R, int P>
INLINE void clear(Sums<V, R, P>& sums) {
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < P * PANEL_VECS; ++j) sums.at[r][j] = V{};
}

struct PairDots {
    static constexpr int WORDS = 1;

    static INLINE vf multiply(vf acc, vu w, const uint32_t* a) { return dot_pairs(acc, w, *a); }
};

// The same of prepared rows, whose pairs may have been widened.
struct PreparedPairDots {
    static constexpr int WORDS = WIDENS_PAIRS ? 2 : 1;

    static INLINE vf multiply(vf acc, vu w, const uint32_t* a) {
        if constexpr (!WIDENS_PAIRS) return dot_pairs(acc, w, *a);
        const float* x = (const float*)a;
        return fma(second_of(w), splat(x[1]), fma(first_of(w), splat(x[0]), acc));
    }
};

// A place in each of the rows of a block. A pointer and a stride reach three rows; left alone, the compiler keeps a
// pointer for every word of every row, and spends the inner loop on loading them.
struct RowCursor {
    const char *first, *fourth, *seventh, *tenth;
    int64_t stride;    // bytes

    INLINE explicit RowCursor(const void* at, int64_t words)
        : first((const char*)at), fourth(first + 12 * words), seventh(first + 24 * words), tenth(first + 36 * words),
          stride(4 * words) {}

    INLINE const void* operator()(int r) const {
        return r < 3   ? first + r * stride
               : r < 6 ? fourth + (r - 3) * stride
               : r < 9 ? seventh + (r - 6) * stride
                       : tenth + (r - 9) * stride;
    }

    INLINE void advance(int64_t bytes) {
        first += bytes, fourth += bytes, seventh += bytes, tenth += bytes;
        forget();
    }

    // What was read there is not kept: it would take registers that sums need.
    INLINE void forget() {
        asm("" : "+r"(first), "+r"(fourth));
        asm("" : "+r"(seventh));
        asm("" : "+r"(tenth));
    }
};

template <int P>
INLINE void load_word(vu (&w)[P * PANEL_VECS], const uint32_t* from, int64_t panel_stride) {
#pragma GCC unroll 8
    for (int j = 0; j < P * PANEL_VECS; ++j)
        w[j] = loadu(from + j / PANEL_VECS * panel_stride + j % PANEL_VECS * WIDTH);
}

// sums += word i of each row times one word of each output.
template <typename Dots, typename V, int R, int P>
INLINE void add_word(Sums<V, R, P>& sums, const vu (&w)[P * PANEL_VECS], const RowCursor& a, int i) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < P * PANEL_VECS; ++j)
            sums.at[r][j] = Dots::multiply(sums.at[r][j], w[j], (const uint32_t*)a(r) + Dots::WORDS * i);
}

// The same of pairs, whose rows may have been widened.
template <int R, int P>
INLINE void add_pairs(Sums<vf, R, P>& sums, const vu (&w)[P * PANEL_VECS], const RowCursor& a, int i) {
    if constexpr (!WIDENS_PAIRS) {
        add_word<PairDots>(sums, w, a, i);
    } else {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half)
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const vf x = splat(((const float*)a(r))[2 * i + half]);
#pragma GCC unroll 8
                for (int j = 0; j < P * PANEL_VECS; ++j)
                    sums.at[r][j] = fma(half ? second_of(w[j]) : first_of(w[j]), x, sums.at[r][j]);
            }
    }
}

}  // namespace
