// What a thread asks for ahead of reading it, beside its arithmetic: weights, rows, adapters.
#pragma once

#include "vec.h"

namespace {

constexpr int PANEL = 16;    // outputs of a panel of a weight

// Stretches of memory that a thread is going to read, asked for a few lines at a time beside its arithmetic. What no
// place is left for is not foreseen.
//
// A core can wait for a dozen lines itself; what it asks for beyond that holds up whatever it reads next. Its second-level
// cache fetches ahead on its own, for each page that lines are asked for in, but only some lines ahead. Asked for in PAGES pages
// in turn, most lines have come by then that way. (Xeon with AMX, a product of tiles for 8 lines: 34 ns, page by page 58.)
struct Wanted {
    static constexpr int MOST = 48;
    static constexpr int PAGES = 8;
    static constexpr int64_t LINE = 64, PAGE = 4096;
    static constexpr int64_t MOST_LINES = 8192;    // half of a second-level cache

    struct Stretch {
        const char *at, *end;
    } stretch[MOST];
    int next, count;
    int64_t lines, pace, due;   // lines of all stretches, asked for at a time, and due by now
    const char* at;             // the next line of the first of PAGES places
    int64_t apart, left;        // bytes from place to place, lines left in each

    void clear() {
        next = count = 0;
        lines = pace = due = left = 0;
    }

    void add(const uint32_t* words, int64_t n) {
        const char *from = (const char*)words, *end = (const char*)(words + n);
        if (n == 0 || lines > MOST_LINES) return;
        if (count && stretch[count - 1].end == from)
            stretch[count - 1].end = end;
        else if (count < MOST)
            stretch[count++] = {from, end};
        lines += ceil_to(n, PANEL) / PANEL;
    }

    // Sets the pace such that all has been asked for after `turns`.
    void spread(int64_t turns) { pace = ceil_div(lines, turns); }

    INLINE bool is_done() const { return next == count && left == 0; }

    INLINE void ask() {
        int64_t now = due + pace;
        for (; now > 0; now -= PAGES) {
            if (__builtin_expect(left == 0, 0) && !begin()) {
                now = pace = 0;
                break;
            }
            for (int i = 0; i < PAGES; ++i) __builtin_prefetch(at + i * apart, 0, 2);
            at += LINE;
            --left;
        }
        due = now;
    }

    // Goes on to the next pages, or to what is left of a stretch, in equal parts; false if there is nothing.
    bool begin() {
        if (next == count) return false;
        Stretch& now = stretch[next];
        const int64_t size = now.end - now.at;
        left = size < PAGES * PAGE ? ceil_div(size, PAGES * LINE) : PAGE / LINE;
        apart = left * LINE;
        at = now.at;
        now.at += PAGES * apart;
        next += now.at >= now.end;
        return true;
    }
};
constexpr int WANTED = 2;    // lists that a thread asks for at the same time

// What a thread reads after some panels, or null: a place within a weight, of which so many words are wanted as long as many
// rows are multiplied with these, and WANTED lists of anything else.
struct Then {
    const uint32_t* weight;
    Wanted* others;
    int64_t words;
};

// What the next pass reads: words from `at` on, `stride` from panel to panel, as in this one; null if nothing does.
struct NextPanels {
    const uint32_t* at;
    int64_t stride;
    Wanted* others;
    unsigned mask;

    // Sets the mask of one of several turns, of which each panel has one.
    INLINE void take(int64_t turn, int64_t turns, int panels) {
        mask = 0;
        for (int p = 0; at && p < panels; ++p) mask |= (unsigned)(p * turns / panels == turn) << p;
    }

    INLINE void ask() const {
        if (__builtin_expect(others != nullptr, 0))
            for (int i = 0; i < WANTED; ++i) others[i].ask();
    }

    // Of few rows: what is read `words` after the `lines` from word `from` on of the present panels, which begin at `w`, or as
    // many of them as are whole times `lines`: all of these lie in one panel, then.
    template <int P>
    INLINE void ahead(const uint32_t* w, int64_t from, int lines, int64_t words) const {
        from += words - words % (lines * PANEL);
        const uint32_t* begin = from < stride ? w + from : at + (from - stride);
        for (int i = 0; i < lines; ++i, begin += PANEL)
            for (int p = 0; p < P; ++p) __builtin_prefetch(begin + p * stride, 0, 2);
    }

    // Of more rows, which take turns with the same panels: the lines that correspond to `lines` from word `from` of the
    // present ones. Each turn asks for the panels of its mask, so that memory is never idle.
    template <int P>
    INLINE void touch(int64_t from, int lines) const {
        for (int p = 0; p < P; ++p)
            if (mask >> p & 1)
                for (int i = 0; i < lines; ++i) __builtin_prefetch(at + p * stride + from + i * PANEL, 0, 2);
    }
};

// What the next panels have beside their weights, asked for a part at a time: of several panels, more places than a processor
// foresees.
struct Beside {
    const char* at = nullptr;
    int64_t step = 0;    // bytes

    Beside() = default;
    INLINE Beside(const void* begin, const void* end, int64_t turns)
        : at((const char*)begin), step(ceil_div((const char*)end - at, turns)) {}

    INLINE void ask(int64_t turn) const {
        for (int64_t i = 0; i < step; i += Wanted::LINE) __builtin_prefetch(at + turn * step + i, 0, 2);
    }
};

}  // namespace
