// The tile registers of AMX: eight matrices of up to 16 rows of 64 bytes, multiplied as wholes.
//
// sums [m, 16] += inputs [m, k] * weights [k, 16], where a word of a row of inputs, two bf16 or four bytes, meets a row of 16
// words of weights. So a panel of a packed weight is a column of such matrices as it lies.
//
// An element's bits depend on its row and its column alone. Those of bf16 are not those of dot_pairs: of each 32 inputs
// the even and the odd ones are summed up apart, before both are added to what is there. Who multiplies pairs of bf16 with
// tiles once does so always, or in vectors that add up as tiles do (attention_amx.h). Sums of bytes are exact, so that they
// may come from tiles or from vectors.
#pragma once

#include "vec.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define BOUGH_AMX 1

namespace {

constexpr int TILE_ROWS = 16;     // rows of a tile, at most
constexpr int TILE_WORDS = 16;    // words of a row, at most
constexpr int AMX_ROWS = 2 * TILE_ROWS;     // rows of a block whose sums fill four tiles until all inputs are added up

// Tiles 0 to 3 hold sums, the others what is multiplied. Tiles 5 and 7 may be of another shape.
struct TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    INLINE TileShapes& set(int tile, int n_rows, int words) {
        rows[tile] = (uint8_t)n_rows;
        bytes[tile] = (uint16_t)(4 * words);
        return *this;
    }
};

}  // namespace

#if defined(BOUGH_TILES)
#include BOUGH_TILES    // other tiles, for processors without any
#else

namespace {

INLINE void tiles_shape(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
INLINE void tiles_release() { asm volatile("tilerelease" ::: "memory"); }

// The address sanitizer does not see what assembly reads and writes: it is shown the rows of a tile.
template <int TILE>
INLINE void show([[maybe_unused]] const void* at, [[maybe_unused]] int64_t stride) {
#if defined(__SANITIZE_ADDRESS__)
    TileShapes now;
    asm volatile("sttilecfg %0" : "=m"(now));
    for (int r = 0; r < now.rows[TILE]; ++r)
        if (void* bad = __asan_region_is_poisoned((char*)at + r * stride, now.bytes[TILE])) *(volatile const char*)bad;
#endif
}

template <int TO>
INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TO));
}

// Rows of the tile lie `stride` bytes apart. The compiler is told that memory from there on is read or written, and not that
// all memory is: what it holds in registers stays there. Clang has no words for it.
template <int TO>
INLINE void tile_load(const void* from, int64_t stride) {
    show<TO>(from, stride);
#if defined(__clang__)
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TO) : "memory");
#else
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TO), "m"(*(const char (*)[])from));
#endif
}

// The same of what is not read again soon: it does not take the place of others in the first-level cache.
template <int TO>
INLINE void tile_stream(const void* from, int64_t stride) {
    show<TO>(from, stride);
#if defined(__clang__)
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TO) : "memory");
#else
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TO), "m"(*(const char (*)[])from));
#endif
}

template <int FROM>
INLINE void tile_store(void* to, int64_t stride) {
    show<FROM>(to, stride);
#if defined(__clang__)
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(FROM) : "memory");
#else
    asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "+m"(*(char (*)[])to) : "r"(to), "r"(stride), "i"(FROM));
#endif
}

// sums += a * b, of pairs of bf16.
template <int SUMS, int A, int B>
INLINE void tile_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

// The same of signed bytes times unsigned ones; sums are integers, and exact.
template <int SUMS, int A, int B>
INLINE void tile_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

// And of signed bytes times signed ones.
template <int SUMS, int A, int B>
INLINE void tile_signed_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

}  // namespace

#endif

namespace {

// What words of tiles hold, by how they are multiplied.
struct PairTiles {
    template <int SUMS, int A, int B> static INLINE void multiply() { tile_pairs<SUMS, A, B>(); }
};
struct ByteTiles {
    template <int SUMS, int A, int B> static INLINE void multiply() { tile_bytes<SUMS, A, B>(); }
};
struct SignedByteTiles {
    template <int SUMS, int A, int B> static INLINE void multiply() { tile_signed_bytes<SUMS, A, B>(); }
};

// The thread's tiles for as long as this lives. Whoever else multiplies with tiles on the thread shapes them anew.
struct Tiles {
    Tiles() = default;
    INLINE ~Tiles() { tiles_release(); }
    Tiles(const Tiles&) = delete;

    // Forgets what the tiles hold.
    INLINE void shape(const TileShapes& shapes) { tiles_shape(shapes); }
};

}  // namespace

#endif
