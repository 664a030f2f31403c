// The C interface that Python calls, the choice of the instruction set, and the parallel loop.

#include <stdlib.h>

#include "team.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(BOUGH_WITH_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(BOUGH_WITH_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

extern const KernelTable kernels_generic;
#if defined(BOUGH_WITH_AVX2)
extern const KernelTable kernels_avx2;
#endif
#if defined(BOUGH_WITH_AVXVNNI)
extern const KernelTable kernels_avxvnni;
#endif
#if defined(BOUGH_WITH_AVX512)
extern const KernelTable kernels_avx512;
#endif
#if defined(BOUGH_WITH_AVX512VNNI)
extern const KernelTable kernels_avx512vnni;
#endif
#if defined(BOUGH_WITH_AVX512BF16)
extern const KernelTable kernels_avx512bf16;
#endif
#if defined(BOUGH_WITH_AMX) && defined(__linux__)
extern const KernelTable kernels_amx;
#endif
#if defined(BOUGH_WITH_DOTPROD) && defined(__linux__)
extern const KernelTable kernels_dotprod;
#endif

bool multiplies_twice = false;

namespace {

struct Choice {
    const char* name;
    const KernelTable* table;
    bool supported;
    bool twice = false;    // see multiplies_twice
};

// The instruction sets other than generic are left out of the build where the compiler does not know them.
constexpr int MAX_CHOICES = 8;
Choice choices[MAX_CHOICES];
int n_choices = 0;
const KernelTable* table = nullptr;
int chosen = -1;

#if defined(BOUGH_WITH_AMX) && defined(__linux__)
// Whether the processor has AMX for bf16 and bytes, and Linux lets this process have its state. Hypervisors are known that
// offer AMX and leave the sizes of its tiles (leaf 0x1d) out; they have not changed since there is AMX.
bool has_tiles() {
#if defined(BOUGH_TILES)
    return true;
#else
    constexpr unsigned BF16 = 1u << 22, TILES = 1u << 24, BYTES = 1u << 25;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (BF16 | TILES | BYTES)) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
}
#endif

#if defined(BOUGH_WITH_AVX512BF16)
// Whether vectors of 512 bits are computed in one piece, by two units: AMD's since Zen 5, but for laptops. They say so in
// leaf 0x8000001a (FP512), which hypervisors hide; then the model tells.
bool has_wide_units() {
    constexpr unsigned FP512 = 1u << 3, ZEN5 = 0x1a;
    unsigned a, b, c, d;
    if (__get_cpuid(0x8000001a, &a, &b, &c, &d) && (a & FP512)) return true;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return false;
    const unsigned family = (a >> 8 & 15) + (a >> 20 & 255), model = (a >> 16 & 15) << 4 | (a >> 4 & 15);
    return family == ZEN5 && (model < 0x20 || (model >= 0x40 && model < 0x50));
}
#else
bool has_wide_units() { return false; }
#endif

#if defined(BOUGH_WITH_AVXVNNI)
// Whether vectors of 256 bits multiply bytes: Intel's processors for laptops since 2021, which have no AVX-512.
bool has_short_vnni() {
    constexpr unsigned AVX_VNNI = 1u << 4;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI);
}
#endif

void choose(int i) {
    chosen = i;
    table = choices[i].table;
    multiplies_twice = choices[i].twice;
}

// Fills `choices`, worst first, and picks the best that this processor and its system support.
int detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    choices[n_choices++] = {"generic", &kernels_generic, __builtin_cpu_supports("ssse3") != 0};
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool bytes = avx512 && __builtin_cpu_supports("avx512vnni");
    bool dot = bytes && __builtin_cpu_supports("avx512bf16");
    (void)dot;
#if defined(BOUGH_WITH_AVX2)
    choices[n_choices++] = {"avx2", &kernels_avx2, avx2};
#endif
#if defined(BOUGH_WITH_AVXVNNI)
    choices[n_choices++] = {"avxvnni", &kernels_avxvnni, avx2 && has_short_vnni()};
#endif
#if defined(BOUGH_WITH_AVX512)
    choices[n_choices++] = {"avx512", &kernels_avx512, avx512};
#endif
#if defined(BOUGH_WITH_AVX512VNNI)
    choices[n_choices++] = {"avx512vnni", &kernels_avx512vnni, bytes};
#endif
#if defined(BOUGH_WITH_AVX512BF16)
    choices[n_choices++] = {"avx512bf16", &kernels_avx512bf16, dot};
    choices[n_choices++] = {"avx512bf16x2", &kernels_avx512bf16, dot, true};
#endif
#if defined(BOUGH_WITH_AMX) && defined(__linux__)
    choices[n_choices++] = {"amx", &kernels_amx, dot && has_tiles()};
#endif
#else
    choices[n_choices++] = {"generic", &kernels_generic, true};
#if defined(BOUGH_WITH_DOTPROD) && defined(__linux__)
    constexpr unsigned long DOT_PRODUCTS = 1ul << 20;
    choices[n_choices++] = {"dotprod", &kernels_dotprod, (getauxval(AT_HWCAP) & DOT_PRODUCTS) != 0};
#endif
#endif
    int best = 0;
    for (int i = 0; i < n_choices; ++i)
        if (choices[i].supported && (!choices[i].twice || has_wide_units())) best = i;
    choose(best);
    return n_choices;
}

const int detected = detect();

// The entry point of the OpenMP runtimes of GCC and LLVM; Python passes the one that torch has loaded, so that both
// share one pool of threads. Without it everything runs on the calling thread.
typedef void (*Region)(void (*body)(void*), void* context, unsigned threads, unsigned flags);
typedef int (*Place)();
Region region = nullptr;
Place thread_index = nullptr, thread_count = nullptr;

constexpr int MOST_RUNS = 64;   // threads beyond help those that have one

struct Job {
    Cores cores;
    int64_t n_items;
    int n_runs;
    Body body;
    void* context;
    Counter counters[MOST_RUNS];
};

void take_items(void* p) {
    Job& job = *(Job*)p;
    const int thread = thread_index(), index = thread % job.n_runs;
    if (thread < MOST_THREADS) job.cores.look(thread);
    take_runs(job.counters, 0, index, job.n_runs, job.n_items, 1, [&](int64_t item, int64_t) { job.body(job.context, item); });
}

struct Buffers {
    void* memory[SCRATCH_COUNT] = {};
    int64_t bytes[SCRATCH_COUNT] = {};
    ~Buffers() {
        for (void* m : memory) free(m);
    }
};

thread_local Buffers buffers;

}  // namespace

void* scratch_owner() { return &buffers; }

void* scratch(int which, int64_t bytes) { return scratch_of(&buffers, which, bytes); }

void* scratch_of(void* owner, int which, int64_t bytes) {
    Buffers& buffers = *(Buffers*)owner;
    if (buffers.bytes[which] < bytes) {
        free(buffers.memory[which]);
        buffers.bytes[which] = 0;
        int64_t size = (bytes + bytes / 2 + 63) & ~(int64_t)63;
        if (posix_memalign(&buffers.memory[which], 64, (size_t)size) != 0) buffers.memory[which] = nullptr;
        if (!buffers.memory[which]) return nullptr;
        buffers.bytes[which] = size;
    }
    return buffers.memory[which];
}

void parallel_items(int64_t n, int threads, Body body, void* context) {
    if (!region || threads <= 1 || n <= 1) {
        for (int64_t item = 0; item < n; ++item) body(context, item);
        return;
    }
    Job job;
    job.cores = {};
    job.n_items = n;
    job.n_runs = threads < MOST_RUNS ? threads : MOST_RUNS;
    job.body = body;
    job.context = context;
    for (int i = 0; i < job.n_runs; ++i) job.counters[i].taken = 0;
    region(take_items, &job, (unsigned)threads, 0);
}

void parallel_team(int threads, TeamBody body, void* context) {
    struct Start {
        TeamBody body;
        void* context;
    } start = {body, context};
    if (!region || threads <= 1) return body(context, 0, 1);
    region(
        [](void* p) {
            const Start& s = *(const Start*)p;
            s.body(s.context, thread_index(), thread_count());
        },
        &start, (unsigned)threads, 0);
}

// Digest of the sources that this library was built from.
EXPORT const char* bough_source() { return BOUGH_SOURCE; }

// Where a parallel region begins, and what a thread asks of its place in one.
EXPORT void bough_set_region(Region function, Place index, Place count) {
    region = function;
    thread_index = index;
    thread_count = count;
}

EXPORT const char* bough_isa() { return choices[chosen].name; }

// Name of the i-th instruction set that this machine can run, worst first; null beyond the last.
EXPORT const char* bough_isa_name(int i) {
    for (int j = 0; j < n_choices; ++j)
        if (choices[j].supported && i-- == 0) return choices[j].name;
    return nullptr;
}

// 1 if the machine can run it; the calls that follow use it.
EXPORT int bough_set_isa(const char* name) {
    for (int i = 0; i < n_choices; ++i) {
        const char *a = choices[i].name, *b = name;
        while (*a && *a == *b) ++a, ++b;
        if (*a == *b && choices[i].supported) {
            choose(i);
            return 1;
        }
    }
    return 0;
}

EXPORT void bough_rms_norm(int dtype, const void* x, const void* weight, void* out, int64_t rows, int64_t dim,
                           float eps, int threads) {
    table->rms_norm[dtype](x, weight, out, rows, dim, eps, threads);
}

EXPORT void bough_add_rms_norm(int dtype, const void* x, void* residual, const void* weight, void* out, int64_t rows,
                               int64_t dim, float eps, int threads) {
    table->add_rms_norm[dtype](x, residual, weight, out, rows, dim, eps, threads);
}

EXPORT void bough_silu_mul(int dtype, const void* x, void* out, int64_t rows, int64_t dim, int threads) {
    table->silu_mul[dtype](x, out, rows, dim, threads);
}

EXPORT void bough_gelu_mul(int dtype, const void* x, void* out, int64_t rows, int64_t dim, int threads) {
    table->gelu_mul[dtype](x, out, rows, dim, threads);
}

EXPORT void bough_rope_kv_write(int dtype, const RopeCall* call) { table->rope_kv_write[dtype](*call); }

EXPORT void bough_paged_attention(int dtype, const AttentionCall* call) { table->paged_attention[dtype](*call); }

EXPORT void bough_argmax(int dtype, const void* logits, int64_t* out, int64_t rows, int64_t vocab, int threads) {
    table->argmax[dtype](logits, out, rows, vocab, threads);
}

EXPORT void bough_apply_bitmask(int dtype, void* logits, const int32_t* masks, const int64_t* rows, int64_t n,
                                int64_t vocab, int threads) {
    table->apply_bitmask[dtype](logits, masks, rows, n, vocab, threads);
}

EXPORT void bough_masked_argmax(int dtype, const void* logits, const int32_t* masks, const int64_t* rows,
                                int64_t* tokens, int64_t n, int64_t vocab, int threads) {
    table->masked_argmax[dtype](logits, masks, rows, tokens, n, vocab, threads);
}

EXPORT void bough_sample(int dtype, const SampleCall* call) { table->sample[dtype](*call); }

EXPORT void bough_logprobs(int dtype, const LogprobCall* call) { table->logprobs[dtype](*call); }

EXPORT void bough_linear(const float* x, const float* packed, const float* bias, float* out, int64_t rows,
                         int64_t n_in, int64_t n_out, int threads) {
    table->linear(x, packed, bias, out, rows, n_in, n_out, threads);
}

EXPORT void bough_packed_linear(int dtype, const PackedLinear* l, const void* x, void* out, int64_t out_stride,
                                int64_t rows, int threads) {
    table->packed_linear[dtype](*l, x, out, out_stride, rows, threads);
}

EXPORT void bough_layer_stack(const StackCall* call) { table->layer_stack(*call); }

// Whether all rows have got an id.
EXPORT int bough_decode(const DecodeCall* call) {
    constexpr int DTYPE = 1;
    const StackCall& stack = call->stack;
    const int64_t n = stack.rope.n_tokens, vocab = call->head->n_out;
    table->packed_rows[DTYPE](*call->table, call->ids, n, (void*)stack.embedded, stack.threads);
    table->layer_stack(stack);
    table->packed_linear[DTYPE](*call->head, stack.hidden, call->logits, vocab, n, stack.threads);
    table->argmax[DTYPE](call->logits, call->best, n, vocab, stack.threads);
    int found = 1;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t id = call->chosen[i] = (int32_t)call->best[i];
        call->last[stack.attention.rows[i]] = id < 0 ? 0 : id;
        found &= id >= 0;
    }
    return found;
}

EXPORT void bough_packed_rows(int dtype, const PackedLinear* l, const int32_t* ids, int64_t n, void* out,
                              int threads) {
    table->packed_rows[dtype](*l, ids, n, out, threads);
}

EXPORT void bough_experts(int dtype, const ExpertsCall* call) { table->experts[dtype](*call); }

EXPORT void bough_lora(const LoraCall* call) { table->lora(*call); }

EXPORT void bough_quantise(int dtype, const QuantiseCall* call) { table->quantise[dtype](*call); }

EXPORT void bough_compact(const CompactCall* call) { table->compact(*call); }

EXPORT void bough_exponents(const ExponentsCall* call) { table->exponents(*call); }
