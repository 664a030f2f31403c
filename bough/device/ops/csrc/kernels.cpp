// Compiled once per instruction set; BOUGH_TABLE names the table of the build.

#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "linear.h"
#include "lora.h"
#include "quantise.h"
#include "sampling.h"
#include "stack.h"

namespace {

// out[rows, n_out] = x[rows, n_in] @ W^T + bias in float32, where `packed` holds W as panels of 64 outputs:
// [ceil(n_out / 64)][n_in][64], the last one padded with zeros.
struct Linear {
    static constexpr int64_t ROWS = 96;
    const float *x, *packed, *bias;
    float* out;
    int64_t rows, n_in, n_out, row_blocks;

    static void body(void* context, int64_t item) {
        const Linear& l = *(const Linear*)context;
        int64_t panel = item / l.row_blocks, first = item % l.row_blocks * ROWS;
        int64_t columns = l.n_out - panel * TILE < TILE ? l.n_out - panel * TILE : TILE;
        int64_t count = l.rows - first < ROWS ? l.rows - first : ROWS;
        float result[ROWS * TILE];
        Alone alone;
        product(l.x + first * l.n_in, l.n_in, l.packed + panel * l.n_in * TILE, (int)count, (int)l.n_in, result, TILE,
                alone);
        for (int64_t r = 0; r < count; ++r) {
            float* to = l.out + (first + r) * l.n_out + panel * TILE;
            const float* from = result + r * TILE;
            if (l.bias)
                for (int64_t i = 0; i < columns; ++i) to[i] = from[i] + l.bias[panel * TILE + i];
            else
                memcpy(to, from, sizeof(float) * columns);
        }
    }
};

void linear(const float* x, const float* packed, const float* bias, float* out, int64_t rows, int64_t n_in,
            int64_t n_out, int threads) {
    Linear l = {x, packed, bias, out, rows, n_in, n_out, ceil_div(rows, Linear::ROWS)};
    parallel_items(ceil_div(n_out, TILE) * l.row_blocks, threads, Linear::body, &l);
}

}  // namespace

extern const KernelTable BOUGH_TABLE = {
    {rms_norm<float, float>, rms_norm<bf16, bf16>, rms_norm<bf16, float>},
    {add_rms_norm<float, float>, add_rms_norm<bf16, bf16>, add_rms_norm<bf16, float>},
    {gated<float, false>, gated<bf16, false>},
    {gated<float, true>, gated<bf16, true>},
    {rope_kv_write<float>, rope_kv_write<bf16>},
    {paged_attention<float>, paged_attention<bf16>},
    {argmax<float>, argmax<bf16>},
    {apply_bitmask<float>, apply_bitmask<bf16>},
    {masked_argmax<float>, masked_argmax<bf16>},
    {sample<float>, sample<bf16>},
    {logprobs<float>, logprobs<bf16>},
    linear,
    {packed_linear<float>, packed_linear<bf16>},
    layer_stack<bf16>,
    {packed_rows<float>, packed_rows<bf16>},
    {experts<float>, experts<bf16>},
    lora,
    {quantise<float>, quantise<bf16>},
    compact,
    exponents,
};
