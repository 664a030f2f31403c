// What every translation unit shares: the element types, the table of kernels that one instruction set
// offers, and the parallel loop. No standard library templates here: an inline function that is emitted in
// several units would be kept only once, possibly in the version built for an instruction set that the
// machine lacks.
#pragma once

#include <stdint.h>

typedef uint16_t bf16;

// The first two are computed in; all of them can be what the KV pool holds.
enum Dtype { BOUGH_FLOAT32 = 0, BOUGH_BFLOAT16 = 1, BOUGH_FLOAT16 = 2, BOUGH_INT8 = 3 };

// One call of paged attention. q and out: [T, n_heads, head_dim]; k and v: [cells, n_kv_heads, head_dim] of kv_dtype;
// k_scale, v_scale: [cells, n_kv_heads] for int8, else null; page_table: [*, table_stride] locs; rows, seq_len:
// [n_rows]; q_start: [n_rows + 1] token offsets. A softcap c other than 0 bounds scores: c * tanh(score / c); a window w
// other than 0 lets a query see the last w positions only, if chunked those from the last multiple of w on; sinks,
// [n_heads] or null, are scores without a value. Group g: the rows of the batch group_rows[group_start[g] ..
// group_start[g + 1]) have their first group_tokens[g] locs in common, all of them before their new tokens.
struct AttentionCall {
    const void* q;
    const void* k;
    const void* v;
    void* out;
    const int32_t* page_table;
    const int32_t* rows;
    const int32_t* q_start;
    const int32_t* seq_len;
    const float* k_scale;
    const float* v_scale;
    const int32_t* group_start;
    const int32_t* group_rows;
    const int32_t* group_tokens;
    const float* sinks;
    int64_t table_stride;
    int n_rows;
    int n_heads;
    int n_kv_heads;
    int head_dim;
    float scale;
    int threads;
    int kv_dtype;
    int n_groups;
    float softcap;
    int window;
    int chunked;
};

// One call of rotary embedding and KV write. qkv: [T, (n_heads + 2 n_kv_heads) * head_dim];
// cos_sin: [*, rotary_dim], cosines first; q: [T, n_heads, head_dim]; k, v, k_scale and v_scale as for attention.
// q_norm, k_norm: weights [head_dim] of norms before the rotation, float if norm_wide, or null. Pairs are (i, i + half),
// or (2i, 2i + 1) if interleaved.
struct RopeCall {
    const void* qkv;
    const float* cos_sin;
    const int32_t* positions;
    const int32_t* out_loc;
    void* k;
    void* v;
    float* k_scale;
    float* v_scale;
    void* q;
    const void* q_norm;
    const void* k_norm;
    int n_tokens;
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int rotary_dim;
    int threads;
    int kv_dtype;
    int interleaved;
    int norm_wide;
    float norm_eps;
};

// One call of the draw from n rows of logits [n, vocab]; arrays are [n]. `best` is the index of the row's largest
// logit, or -1 for a row that gives -1 whatever it holds; top_k = vocab, top_p = 1 and least_z = -inf keep every token;
// least_z bounds (logit - largest) / temperature.
struct SampleCall {
    const void* logits;
    const int64_t* best;
    const float* temperature;
    const int64_t* top_k;
    const double* top_p;
    const double* least_z;
    const uint64_t* seeds;
    const int64_t* positions;
    int64_t* out;
    int64_t n;
    int64_t vocab;
    int threads;
};

// One call of log-probabilities of n rows of logits [n, vocab]: of tokens [n], of the ids asked [n_asked] and of the
// n_top likeliest. ranks [n] count from 1.
struct LogprobCall {
    const void* logits;
    const int64_t* tokens;
    const int64_t* asked;
    float* chosen;
    int64_t* ranks;
    int64_t* top_ids;
    float* top;
    float* asked_out;
    int64_t n;
    int64_t vocab;
    int64_t n_top;
    int64_t n_asked;
    int threads;
};

// How a packed weight holds the values of W [n_out, n_in].
enum LinearKind {
    LINEAR_BF16 = 0,      // bf16, in pairs
    LINEAR_INT8 = 1,      // (q - 128) * scale, q of 8 bits, a float scale for each output
    LINEAR_Q8 = 2,        // (q - 128) * scale, an fp16 scale for each group
    LINEAR_Q4 = 3,        // (q - 8) * scale, q of 4 bits
    LINEAR_Q4_MIN = 4,    // q * scale + minimum, both fp16 for each group
    LINEAR_Q4_ZERO = 5,   // (q - zero) * scale, both fp16 for each group
    LINEAR_Q4_K = 6,      // q * (d * scale) - dmin * minimum; fp16 d, dmin for 256 inputs, 8-bit scale, minimum for 32
    LINEAR_Q6_K = 7,      // (q - 32) * (d * scale); q in 8 bits, fp16 d for 256 inputs, signed 8-bit scale for 16
    LINEAR_ROTATED = 8,   // (q - 128) * scale, as INT8, of the Hadamard transform of the weight
    LINEAR_Q4_WHOLE = 9,  // (((q * step + start) >> 8) - 128) * scale, q of 4 bits; for AMX (linear_whole.h)
};

// One packed weight. Outputs come in panels of 16, inputs in words of 4 bytes (2 bf16, 4 8-bit or 8 4-bit values);
// the last panel, the last word and the last 32 inputs are padded with anything. ROTATED and Q4_WHOLE have whole blocks of 64
// inputs:
//   weight  uint32 [n_panels][words][16]. Word w of 4 bits, of the four of each 32 inputs, holds in the low half of
//           its byte b input 4 w + b, in the high half input 16 + 4 w + b. Q4_WHOLE: line d of four holds at 4 L + w what
//           is line w of output 4 L + d.
//   scale   INT8, ROTATED, Q4_WHOLE: float [n_panels][16]. Q8, Q4: fp16 [n_panels][groups][16]. Q4_MIN, Q4_ZERO: fp16
//           [n_panels][groups][2][16]. Q4_K: fp16 [n_panels][groups of 256][2][16] d and dmin. Q6_K: fp16
//           [n_panels][groups of 256][16] d.
//   sub     Q4_K: uint8 [n_panels][groups][2][16] scale and minimum. Q6_K: int8 [n_panels][groups][2][16] the scales of
//           the first and the second 16 inputs. Q4_WHOLE: uint32 [n_panels][groups / 4][4][16], the step of each group in
//           its lower half, the start in its upper half, of groups 4 j + i and output 4 L + d at [j][d][4 L + i]. Else null.
//   compact BF16, or null: uint32 [n_panels][n_in / 8][3][16], the same values in fewer bytes (linear_compact.h). Then
//           scale is uint16 [n_panels][32], the sign and exponent that codes stand for, and sub Stray
//           [n_panels][strays_of(n_in)], by rising unit, with one of unit -1 behind a panel's last.
//   exponents  BF16 where it is multiplied as whole numbers (fixed.h), else null: uint8 [n_panels][groups of 64 inputs][16],
//           127 + the power of two that weights are multiplied with; 255 where not all of them are finite.
struct PackedLinear {
    const uint32_t* weight;
    const void* scale;
    const void* sub;
    const float* bias;    // [n_out] or null
    const uint32_t* compact;
    const uint8_t* exponents;
    int64_t n_in;
    int64_t n_out;
    int kind;
    int group;            // inputs per scale of Q8, Q4, Q4_MIN, Q4_ZERO and Q4_WHOLE: 32, 64, 128 or 256
};

// A value of a compact weight that no code stands for: value `half` of word `word` of a unit of four words.
struct Stray {
    int32_t unit;
    uint8_t word, half;
    uint16_t value;
};

// Room for the strays of a panel and the end of their list.
static inline int64_t strays_of(int64_t n_in) { return n_in / 16 + 2; }

// What a linear layer multiplies may be packed in parts, whose outputs lie side by side.
constexpr int MOST_PARTS = 3;
struct LinearParts {
    const PackedLinear* part[MOST_PARTS];
    int64_t count;
};

// What one adapter (LoRA) adds to one linear layer, whose outputs are those of MOST_PARTS parts or fewer: a, bfloat16
// [parts * rank, n_in], and b of each part, bfloat16 [outputs, rank]; no weight: nothing is added to that part. `rank`
// is a multiple of 16.
struct LoraAdapter {
    PackedLinear a;
    PackedLinear b[MOST_PARTS];
};

// One linear layer: its adapters by place, null where one leaves it alone, and the outputs of its parts.
struct LoraTable {
    const LoraAdapter* const* adapters;
    int64_t n_parts;
    int64_t sizes[MOST_PARTS];
};

// Tokens first, first + step, ... of a step, `count` of them, with one adapter; at most LORA_ROWS.
constexpr int64_t LORA_ROWS = 48;
struct LoraRun {
    int64_t place;
    int64_t first;
    int64_t count;
    int64_t step;
};

// All runs of a step, and room for what lies between the products: bfloat16 [T, inner_stride], an even number.
struct LoraRuns {
    const LoraRun* run;
    int64_t n_runs;
    void* inner;
    int64_t inner_stride;
};

// One layer for layer_stack. Norms of what goes into attention and the feed-forward layer and of what comes out of them
// are null where there are none. The rest is as in RopeCall and AttentionCall.
struct StackLayer {
    const void* attention_norm;
    const void* attention_after;
    const void* mlp_norm;
    const void* mlp_after;
    LinearParts qkv, out, gate_up, down;
    void* k;
    void* v;
    float* k_scale;
    float* v_scale;
    const LoraTable *qkv_lora, *out_lora, *gate_up_lora, *down_lora;
    const float* cos_sin;
    const void* q_norm;
    const void* k_norm;
    const float* sinks;
    int rotary_dim;
    int window;
};

// One call of all layers for the T tokens of `rope`, whose k and v are the layers'. `embedded` and `hidden`, the normed
// result: [T, hidden_size]; room for x: as much, for act: [T, intermediate_size]. Norms have float weights if norm_wide;
// what attention and feed-forward layer add is multiplied by residual_scale. Layers that see a window have their cells at
// window_table and window_loc, unless these are null. `ends`: the n_ends tokens whose hidden states are wanted, rising;
// those of the others are not written. n_ends is negative where all are, and with adapters.
struct StackCall {
    const StackLayer* layers;
    const void* final_norm;
    const void* embedded;
    void* hidden;
    void* x;
    void* act;
    RopeCall rope;
    AttentionCall attention;
    int64_t n_layers;
    int64_t hidden_size;
    int64_t intermediate_size;
    const int32_t* window_table;
    const int32_t* window_loc;
    const LoraRuns* lora;    // null where no token has an adapter; then the layers' tables are not read
    const int32_t* ends;
    int64_t n_ends;
    float eps;
    float residual_scale;
    int threads;
    int norm_wide;
    int gelu;
};

// A step in which each of the T rows of `stack` computes one token, in bfloat16: the embedding `table` of the ids, all layers,
// the head, and the likeliest id of each row, -1 where its logits are not numbers. `embedded` and `hidden` of the stack are
// room; logits: [T, head->n_out]; best, chosen: [T], the same ids twice; last: [rows], where they are noted, 0 for -1.
struct DecodeCall {
    StackCall stack;
    const PackedLinear* table;
    const PackedLinear* head;
    const int32_t* ids;
    void* logits;
    int64_t* best;
    int32_t* chosen;
    int32_t* last;
};

// One expert of a mixture of experts.
struct Expert {
    LinearParts gate_up, down;
};

// One call of a mixture of experts: out[t] = sum over j of weights[t, j] * down(activation(gate_up(x[t]))) of the expert
// ids[t, j]. x, out: [n_tokens, hidden_size]; ids, weights: [n_tokens, top_k]. The activation is silu(gate) * up, or with
// limit > 0 (min(up, limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit), where up is at least -limit.
struct ExpertsCall {
    const Expert* experts;
    const void* x;
    const int32_t* ids;
    const float* weights;
    void* out;
    int64_t n_tokens;
    int64_t top_k;
    int64_t n_experts;
    int64_t hidden_size;
    int64_t inner_size;
    float alpha;
    float limit;
    int threads;
};

// One layer's updates: out [T, n_out] += those of x [T, n_in], n_in even, both bfloat16.
struct LoraCall {
    const LoraTable* table;
    const LoraRuns* runs;
    const void* x;
    void* out;
    int64_t n_in;
    int64_t n_out;
    int threads;
};

// One weight [n_out, n_in] to be rounded to ROTATED or Q4_K; words, scale and sub: as the weight, the scale and the sub of
// PackedLinear.
struct QuantiseCall {
    const void* weight;
    uint32_t* words;
    void* scale;
    void* sub;
    int64_t n_out;
    int64_t n_in;
    int kind;
    int threads;
};

// One BF16 weight to be made compact: its words, and what becomes of them, as in PackedLinear; n_in: a multiple of 8. More
// strays than there is room for set *too_many, and the rest is left undefined.
struct CompactCall {
    const uint32_t* words;
    uint32_t* compact;
    uint16_t* table;
    Stray* strays;
    int* too_many;
    int64_t n_out;
    int64_t n_in;
    int threads;
};

// One BF16 weight whose exponents are to be found; words and exponents: as in PackedLinear.
struct ExponentsCall {
    const uint32_t* words;
    uint8_t* exponents;
    int64_t n_out;
    int64_t n_in;
    int threads;
};

// The kernels as built for one instruction set; functions of two take [0] float32 and [1] bfloat16, norms also
// [2] bfloat16 with float weights.
constexpr int NORM_DTYPES = 3;
struct KernelTable {
    void (*rms_norm[NORM_DTYPES])(const void* x, const void* weight, void* out, int64_t rows, int64_t dim, float eps,
                        int threads);
    void (*add_rms_norm[NORM_DTYPES])(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t dim,
                            float eps, int threads);
    void (*silu_mul[2])(const void* x, void* out, int64_t rows, int64_t dim, int threads);
    void (*gelu_mul[2])(const void* x, void* out, int64_t rows, int64_t dim, int threads);
    void (*rope_kv_write[2])(const RopeCall& call);
    void (*paged_attention[2])(const AttentionCall& call);
    void (*argmax[2])(const void* logits, int64_t* out, int64_t rows, int64_t vocab, int threads);
    void (*apply_bitmask[2])(void* logits, const int32_t* masks, const int64_t* rows, int64_t n, int64_t vocab,
                             int threads);
    void (*masked_argmax[2])(const void* logits, const int32_t* masks, const int64_t* rows, int64_t* tokens, int64_t n,
                             int64_t vocab, int threads);
    void (*sample[2])(const SampleCall& call);
    void (*logprobs[2])(const LogprobCall& call);
    void (*linear)(const float* x, const float* packed, const float* bias, float* out, int64_t rows, int64_t n_in,
                   int64_t n_out, int threads);
    void (*packed_linear[2])(const PackedLinear& l, const void* x, void* out, int64_t out_stride, int64_t rows,
                             int threads);
    void (*layer_stack)(const StackCall& call);    // bfloat16
    void (*packed_rows[2])(const PackedLinear& l, const int32_t* ids, int64_t n, void* out, int threads);
    void (*experts[2])(const ExpertsCall& call);
    void (*lora)(const LoraCall& call);    // bfloat16
    void (*quantise[2])(const QuantiseCall& call);
    void (*compact)(const CompactCall& call);
    void (*exponents)(const ExponentsCall& call);
};

// Whether the processor multiplies two vectors of 512 bits in a cycle, which decides how many rows take turns with a
// weight, and in which form; results do not depend on it.
extern bool multiplies_twice;

typedef void (*Body)(void* context, int64_t item);

// Calls body(context, 0 .. n-1) on up to `threads` threads of the OpenMP runtime that torch uses. Each has a run of the
// items and helps the others when it is done, so no kernel may let its result depend on who computes what.
void parallel_items(int64_t n, int threads, Body body, void* context);

// Calls body(context, index, n) on n <= `threads` threads of the same runtime, all at once, with indices 0 .. n-1.
typedef void (*TeamBody)(void* context, int index, int n);
void parallel_team(int threads, TeamBody body, void* context);

// Per-thread memory of at least `bytes`, 64-byte aligned, kept between calls. `which` names one of
// SCRATCH_COUNT independent buffers. Returns null when there is no memory.
enum { SCRATCH_WORK = 0, SCRATCH_PLAN = 1, SCRATCH_PARTIAL = 2, SCRATCH_LINEAR = 3, SCRATCH_STACK = 4, SCRATCH_COMMON = 5,
       SCRATCH_ENDS = 6, SCRATCH_ROW = 7, SCRATCH_SPREAD = 8, SCRATCH_SUMS = 9,
       SCRATCH_GATED = 10, SCRATCH_COUNT = 11 };
void* scratch(int which, int64_t bytes);

// The same of the thread that `owner` was asked for on, which lives as long as it is used. Threads take turns with it.
void* scratch_owner();
void* scratch_of(void* owner, int which, int64_t bytes);
