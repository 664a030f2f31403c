// Tile registers in plain C++, for processors without AMX (csrc/amx.h includes it as BOUGH_TILES). They trap where the
// instructions would be refused: tiles without shape, and products of tiles whose shapes do not fit.
//
// tdpbf16ps flushes denormals, of inputs and of sums, and adds up the even and the odd inputs apart (Intel's manual of
// instructions, volume 2).

namespace {

struct Tile {
    alignas(64) uint8_t at[TILE_ROWS][4 * TILE_WORDS];
};

thread_local TileShapes tile_shapes;
thread_local bool tiles_shaped;
thread_local Tile tiles_now[8];

inline void tile_demand(bool fits) {
    if (!fits) __builtin_trap();
}

inline void tiles_shape(const TileShapes& shapes) {
    tile_shapes = shapes;
    tiles_shaped = true;
    for (int i = 0; i < 8; ++i) {
        tile_demand(shapes.rows[i] <= TILE_ROWS && shapes.bytes[i] <= 4 * TILE_WORDS && !shapes.rows[i] == !shapes.bytes[i]);
        memset(tiles_now[i].at, 0, sizeof tiles_now[i].at);
    }
}

inline void tiles_release() { tiles_shaped = false; }

template <int TILE>
inline Tile& tile_in_use() {
    tile_demand(tiles_shaped && tile_shapes.rows[TILE]);
    return tiles_now[TILE];
}

template <int TO>
inline void tile_zero() {
    memset(tile_in_use<TO>().at, 0, sizeof(Tile));
}

template <int TO>
inline void tile_load(const void* from, int64_t stride) {
    Tile& tile = tile_in_use<TO>();
    memset(tile.at, 0, sizeof tile.at);
    for (int r = 0; r < tile_shapes.rows[TO]; ++r) memcpy(tile.at[r], (const char*)from + r * stride, tile_shapes.bytes[TO]);
}

template <int TO>
inline void tile_stream(const void* from, int64_t stride) {
    tile_load<TO>(from, stride);
}

template <int FROM>
inline void tile_store(void* to, int64_t stride) {
    const Tile& tile = tile_in_use<FROM>();
    for (int r = 0; r < tile_shapes.rows[FROM]; ++r) memcpy((char*)to + r * stride, tile.at[r], tile_shapes.bytes[FROM]);
}

// Whether sums += a * b can be computed.
template <int SUMS, int A, int B>
inline void tile_demand_product() {
    tile_in_use<SUMS>(), tile_in_use<A>(), tile_in_use<B>();
    const TileShapes& s = tile_shapes;
    tile_demand(SUMS != A && SUMS != B && A != B && s.rows[SUMS] == s.rows[A] && s.bytes[SUMS] == s.bytes[B] &&
                s.bytes[A] == 4 * s.rows[B]);
}

inline float tile_flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }

template <int SUMS, int A, int B>
inline void tile_pairs() {
    tile_demand_product<SUMS, A, B>();
    Tile &to = tiles_now[SUMS], &a = tiles_now[A], &b = tiles_now[B];
    for (int m = 0; m < tile_shapes.rows[SUMS]; ++m) {
        alignas(64) float parts[2][TILE_WORDS] = {}, *sums = (float*)to.at[m];
        for (int k = 0; k < tile_shapes.rows[B]; ++k)
            for (int half = 0; half < 2; ++half) {
                bf16 x;
                memcpy(&x, a.at[m] + 4 * k + 2 * half, sizeof x);
                const float left = tile_flushed(widen(x));
                for (int n = 0; n < TILE_WORDS; ++n) {
                    bf16 y;
                    memcpy(&y, b.at[k] + 4 * n + 2 * half, sizeof y);
                    parts[half][n] = tile_flushed(__builtin_fmaf(left, tile_flushed(widen(y)), parts[half][n]));
                }
            }
        for (int n = 0; n < TILE_WORDS; ++n) sums[n] = tile_flushed(tile_flushed(sums[n]) + tile_flushed(parts[0][n] + parts[1][n]));
    }
}

// Signed bytes times bytes of the type Other.
template <typename Other, int SUMS, int A, int B>
inline void tile_add_bytes() {
    tile_demand_product<SUMS, A, B>();
    Tile &to = tiles_now[SUMS], &a = tiles_now[A], &b = tiles_now[B];
    for (int m = 0; m < tile_shapes.rows[SUMS]; ++m) {
        int32_t* sums = (int32_t*)to.at[m];
        for (int k = 0; k < 4 * tile_shapes.rows[B]; ++k) {
            const int left = (int8_t)a.at[m][k];
            for (int n = 0; n < TILE_WORDS; ++n) sums[n] += left * (Other)b.at[k / 4][4 * n + k % 4];
        }
    }
}

template <int SUMS, int A, int B>
inline void tile_bytes() {
    tile_add_bytes<uint8_t, SUMS, A, B>();
}

template <int SUMS, int A, int B>
inline void tile_signed_bytes() {
    tile_add_bytes<int8_t, SUMS, A, B>();
}

}  // namespace
