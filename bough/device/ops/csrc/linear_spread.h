// Kinds with scales of scales take long to unpack. Where many rows follow, two panels are spread out once for all of
// them: as bytes, with scales and minima in floats. The products are the same, bit for bit.
#pragma once

#include "linear_tile.h"

namespace {

constexpr int64_t SPREAD_ROWS = 4 * LINEAR_ROWS + 1;    // from which on that pays: the fifth block of them

// A spread kind. For 32 inputs there are scale and minimum of each output, or where SPLIT, the scales of both halves.
template <typename From>
struct SpreadFormat {
    static constexpr int BITS = 8;
    static constexpr bool MINIMUM = From::MINIMUM, SPLIT = From::SPLIT, WHOLE = false;
    static INLINE const float* scales(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups) {
        return (const float*)l.scale + (panel * n_groups + g) * 2 * PANEL;
    }
    static INLINE Affine affine(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups, int column, int half) {
        const float* from = scales(l, panel, g, n_groups) + column;
        return {loadf(from + half * PANEL), MINIMUM ? loadf(from + PANEL) : vf{}};
    }
};

// GROUP_PANELS panels of l from `panel` on, spread out in scratch memory of this thread.
template <typename Format>
PackedLinear spread(const PackedLinear& l, int64_t panel) {
    constexpr int BYTES = GROUP / 4 * PANEL, LINES = GroupTile<Format>::LINES;
    const int64_t n_groups = n_groups_of(l), groups = GROUP_PANELS * n_groups;
    uint32_t* bytes = (uint32_t*)scratch(SCRATCH_SPREAD, sizeof(uint32_t) * groups * (BYTES + 2 * PANEL));
    if (!bytes) __builtin_trap();
    PackedLinear wide = l;
    float* scales = (float*)(bytes + groups * BYTES);
    wide.scale = scales;
    wide.weight = Format::BITS == 8 ? l.weight + panel * panel_words(l) : bytes;
    const uint32_t* from = l.weight + panel * panel_words(l);
    for (int64_t i = 0; i < groups; ++i, from += LINES * PANEL, bytes += BYTES, scales += 2 * PANEL) {
        for (int at = 0; Format::BITS == 4 && at < LINES * PANEL; at += WIDTH) {
            const vu both = loadu(from + at), low = both & 0x0f0f0f0fu, high = (both >> 4) & 0x0f0f0f0fu;
            memcpy(bytes + at, &low, sizeof low);
            memcpy(bytes + LINES * PANEL + at, &high, sizeof high);
        }
        for (int column = 0; column < PANEL; column += WIDTH) {
            const int64_t p = panel + i / n_groups, g = i % n_groups;
            const Affine first = Format::affine(l, p, g, n_groups, column, 0);
            storef(scales + column, first.scale);
            storef(scales + PANEL + column,
                   Format::SPLIT ? Format::affine(l, p, g, n_groups, column, 1).scale : first.minimum);
        }
    }
    return wide;
}

}  // namespace
