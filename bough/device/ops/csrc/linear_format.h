// How the kinds of weights in groups hold their values.
#pragma once

#include "linear_prepare.h"

namespace {

// The scale and the minimum of WIDTH outputs in one group.
struct Affine {
    vf scale, minimum;
};

// Which of the scales of Q8 and the first three Q4 kinds belongs to 32 inputs of a panel.
INLINE int64_t scale_group_of(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups) {
    int shift = __builtin_ctz((unsigned)l.group / GROUP);
    return panel * ((n_groups + (1 << shift) - 1) >> shift) + (g >> shift);
}

constexpr int SUPER = 8;    // groups whose scales are multiples of the same

// Which of these belongs to group g of a panel.
INLINE int64_t super_of(int64_t panel, int64_t g, int64_t n_groups) {
    return panel * ceil_div(n_groups, SUPER) + g / SUPER;
}

// How a kind holds its values: BITS per value, which is MOST at most; MINIMUM: there are minima, and no zero; SPLIT: the two halves
// of 32 inputs have scales of their own; WHOLE: all inputs of an output share the scale; TOGETHER: groups whose inputs share
// the scale of a row; SUPERS: scales are multiples of others.
struct Q8Format {
    static constexpr int BITS = 8, MOST = 255, TOGETHER = groups_together(LINEAR_Q8);
    static constexpr bool MINIMUM = false, SPLIT = false, WHOLE = false, SUPERS = false;
    static INLINE const uint16_t* scales(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups) {
        return (const uint16_t*)l.scale + scale_group_of(l, panel, g, n_groups) * PANEL;
    }
    static INLINE Affine affine(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups, int column, int) {
        return {load_half(scales(l, panel, g, n_groups) + column), vf{}};
    }
};

struct Int8Format {
    static constexpr int BITS = 8, MOST = 255, TOGETHER = groups_together(LINEAR_INT8);
    static constexpr bool MINIMUM = false, SPLIT = false, WHOLE = true, SUPERS = false;
    static INLINE const float* scales(const PackedLinear& l, int64_t panel, int64_t, int64_t) {
        return (const float*)l.scale + panel * PANEL;
    }
    static INLINE Affine affine(const PackedLinear& l, int64_t panel, int64_t, int64_t, int column, int) {
        return {loadf(scales(l, panel, 0, 0) + column), vf{}};
    }
};

struct Q4Format : Q8Format {
    static constexpr int BITS = 4, MOST = 15;
};

struct Q4MinFormat {
    static constexpr int BITS = 4, MOST = 15, TOGETHER = 1;
    static constexpr bool MINIMUM = true, SPLIT = false, WHOLE = false, SUPERS = false;
    static INLINE const uint16_t* scales(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups) {
        return (const uint16_t*)l.scale + scale_group_of(l, panel, g, n_groups) * 2 * PANEL;
    }
    static INLINE Affine affine(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups, int column, int) {
        const uint16_t* from = scales(l, panel, g, n_groups) + column;
        return {load_half(from), load_half(from + PANEL)};
    }
};

struct Q4ZeroFormat : Q4MinFormat {
    static INLINE Affine affine(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups, int column, int) {
        Affine a = Q4MinFormat::affine(l, panel, g, n_groups, column, 0);
        return {a.scale, -(a.scale * a.minimum)};
    }
};

struct Q4KFormat {
    static constexpr int BITS = 4, MOST = 15, TOGETHER = 1;
    static constexpr bool MINIMUM = true, SPLIT = false, WHOLE = false, SUPERS = true;
    static INLINE const uint8_t* scales(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups) {
        return (const uint8_t*)l.sub + (panel * n_groups + g) * 2 * PANEL;
    }
    static INLINE const uint16_t* supers(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups) {
        return (const uint16_t*)l.scale + super_of(panel, g, n_groups) * 2 * PANEL;
    }
    static INLINE Affine affine(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups, int column, int) {
        const uint16_t* d = supers(l, panel, g, n_groups) + column;
        const uint8_t* sub = scales(l, panel, g, n_groups) + column;
        return {load_half(d) * load_bytes(sub), -(load_half(d + PANEL) * load_bytes(sub + PANEL))};
    }
};

struct Q6KFormat {
    static constexpr int BITS = 8, MOST = 63, TOGETHER = 1;
    static constexpr bool MINIMUM = false, SPLIT = true, WHOLE = false, SUPERS = true;
    static INLINE const int8_t* scales(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups) {
        return (const int8_t*)l.sub + (panel * n_groups + g) * 2 * PANEL;
    }
    static INLINE const uint16_t* supers(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups) {
        return (const uint16_t*)l.scale + super_of(panel, g, n_groups) * PANEL;
    }
    static INLINE Affine affine(const PackedLinear& l, int64_t panel, int64_t g, int64_t n_groups, int column, int half) {
        const uint16_t* d = supers(l, panel, g, n_groups) + column;
        const int8_t* sub = scales(l, panel, g, n_groups) + half * PANEL + column;
        return {load_half(d) * load_bytes(sub), vf{}};
    }
};

}  // namespace
