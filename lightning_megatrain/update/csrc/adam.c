/* The host optimizer: AdamW/Adam over flat runs of parameters, and the two passes that go with it
 * (sum of squares, accumulate).
 *
 * Every function here has a twin in reference.py, equal to it bit for bit. Three rules keep it so:
 *   - each line of arithmetic is one IEEE fp32 operation in a fixed order: no contraction into FMA
 *     (-ffp-contract=off), no -ffast-math, no flush-to-zero;
 *   - elements are independent, so neither the vector width nor the number of threads can show;
 *   - where elements are not independent (the sum), the order of additions is part of the contract.
 *
 * The loops are plain C that the compiler vectorises. Each body is force-inlined into one function
 * per instruction set (the `target` attribute) and the caller names the set at run time, so one library
 * serves every x86-64 machine; elsewhere only "baseline" exists, which on arm64 already means NEON.
 *
 * Threads are started by a call and joined before it returns. Beside the milliseconds a unit takes
 * that costs little, and it leaves nothing behind: no pool that spins on cores the GPU launch thread
 * wants, no second OpenMP runtime beside torch's, nothing that breaks after fork().
 *
 * No Python headers: the library is opened by ctypes, which releases the GIL around each call.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <sched.h>
#endif

#define ABI_VERSION 1 /* kernel.py refuses a library with another number */

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* ---------------------------------------------------------------- threads */

enum { MAX_THREADS = 1024 };

typedef void range_fn(const void *args, size_t begin, size_t end);

typedef struct {
    range_fn *run;
    const void *args;
    size_t numel, chunk;
    size_t next; /* first element nobody has claimed; atomic */
} job;

typedef struct {
    job *job;
    int cpu; /* -1: wherever the scheduler likes */
} worker;

/* Chunks are claimed, not dealt: a thread whose core is taken by somebody else simply does fewer. */
static void *work(void *arg)
{
    job *j = ((worker *)arg)->job;
#ifdef __linux__
    int cpu = ((worker *)arg)->cpu;
    if (cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set); /* a wish: failure is harmless */
    }
#endif
    for (;;) {
        size_t begin = __atomic_fetch_add(&j->next, j->chunk, __ATOMIC_RELAXED);
        if (begin >= j->numel)
            return NULL;
        size_t left = j->numel - begin;
        j->run(j->args, begin, begin + (left < j->chunk ? left : j->chunk));
    }
}

/* The caller is worker 0 and is never bound: its affinity is not ours to change. `cpus`, if given, has
 * one entry per thread. A thread that cannot be started is not missed: the others claim its chunks. */
static void parallel(range_fn *run, const void *args, size_t numel, size_t chunk, int threads, const int32_t *cpus)
{
    job j = {run, args, numel, chunk, 0};
    size_t chunks = (numel + chunk - 1) / chunk;
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    if ((size_t)threads > chunks)
        threads = (int)chunks;

    pthread_t ids[MAX_THREADS];
    worker workers[MAX_THREADS];
    int started = 0;
    if (threads > 1) {
        /* Signals belong to the interpreter's threads; ours inherit a full mask. */
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int t = 1; t < threads; t++) {
            workers[started] = (worker){&j, cpus ? cpus[t] : -1};
            if (pthread_create(&ids[started], NULL, work, &workers[started]))
                break;
            started++;
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    worker self = {&j, -1};
    work(&self);
    for (int t = 0; t < started; t++)
        pthread_join(ids[t], NULL);
}

/* ---------------------------------------------------------------- number formats */

INLINE uint32_t bits_of(float x)
{
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

INLINE float float_of(uint32_t b)
{
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

INLINE float load_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

#define QUIET_NAN 0x7fc00000u

/* The split master, in 16-bit arithmetic: half the vector instructions of the same in 32. The halves of the pattern
 * are `low` and `high - (low < 0)`; see memory/split.py. */
INLINE float join_any(uint16_t high, int16_t low)
{
    uint16_t upper = (uint16_t)(high + (low >> 15));
    return float_of((uint32_t)upper << 16 | (uint16_t)low);
}

/* Under a zero there is no negative remainder, unless somebody wrote the zero to `high` alone. */
INLINE float join(uint16_t high, int16_t low)
{
    return join_any(high, low & (int16_t)-((high & 0x7fff) != 0 || low >= 0));
}

/* The rule for NaNs that rounding would hide. Joining is exact on any pattern, so it can be applied afterwards,
 * and only to chunks that need it. */
static void keep_nans(uint16_t *high, int16_t *low, int n)
{
    for (int i = 0; i < n; i++) {
        uint32_t b = bits_of(join_any(high[i], low[i]));
        if ((b & 0x7fffffffu) > 0x7f800000u && (high[i] & 0x7fffu) <= 0x7f80u) {
            high[i] = (uint16_t)(b >> 16 | 0x0040u);
            low[i] = 0;
        }
    }
}

INLINE uint16_t round_bf16(float x) /* to nearest, ties to even */
{
    uint32_t b = bits_of(x);
    uint32_t r = b + 0x7fffu + ((b >> 16) & 1u);
    return (uint16_t)((x != x ? QUIET_NAN : r) >> 16);
}

/* Adding 16 uniform bits below the cut rounds up with a probability equal to the remainder. */
INLINE uint16_t round_bf16_stochastic(float x, uint32_t random16)
{
    uint32_t r = bits_of(x) + random16;
    return (uint16_t)((x != x ? QUIET_NAN : r) >> 16);
}

/* Counter-based generator: a 32-bit mixer (the constants are lowbias32, found by C. Wellons' search)
 * whose two rounds are keyed by the seed and the step. */
INLINE uint32_t random16(uint32_t index, uint32_t key0, uint32_t key1)
{
    uint32_t x = index ^ key0;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x ^= key1;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x & 0xffffu;
}

/* ---------------------------------------------------------------- Adam */

enum { STORE_SPLIT, STORE_BF16, STORE_BF16_STOCHASTIC, STORE_FP32, STORES };
enum { ADAM_CHUNK = 1 << 15 }; /* elements a thread claims at a time: about 0.9 MB of traffic */

/* fp32 coefficients of one step; reference.py (AdamCoefficients) says where each comes from. */
typedef struct {
    float grad_factor, decay, l2, lerp_weight, beta2, grad_sq_weight, bias2_sqrt, eps, step_size;
    int32_t coupled, lerp_from_grad;
} adam_coefficients;

typedef struct {
    void *param;      /* split: high; otherwise the parameter */
    int16_t *low;     /* split only */
    void *exp_avg, *exp_avg_sq;
    const void *grad;
    adam_coefficients c;
    uint64_t offset;  /* stochastic rounding: index of element 0 in the whole */
    uint32_t key0, key1;
} adam_args;

/* `store`, `moments16`, `grad16` and `general` are constants at every call, so each copy is one straight loop.
 * `general` adds what AdamW at usual betas does not need: coupled decay, and lerp's other branch. */
INLINE void adam_loop(int store, int moments16, int grad16, int general, const adam_args *a, size_t begin, int n)
{
    const adam_coefficients c = a->c;
    uint16_t *restrict param16 = (uint16_t *)a->param + begin;
    int16_t *restrict low = a->low + (store == STORE_SPLIT ? begin : 0);
    float *restrict param32 = (float *)a->param + begin;
    uint16_t *restrict m16 = (uint16_t *)a->exp_avg + begin, *restrict v16 = (uint16_t *)a->exp_avg_sq + begin;
    float *restrict m32 = (float *)a->exp_avg + begin, *restrict v32 = (float *)a->exp_avg_sq + begin;
    const uint16_t *restrict g16 = (const uint16_t *)a->grad + begin;
    const float *restrict g32 = (const float *)a->grad + begin;
    const uint32_t index = (uint32_t)(a->offset + begin);
    const uint32_t key0 = a->key0 ^ (uint32_t)((a->offset + begin) >> 32) * 0x9e3779b9u;

    uint16_t largest = 0;

    for (int i = 0; i < n; i++) {
        float p, m, v, g;
        if (store == STORE_SPLIT)
            p = join(param16[i], low[i]);
        else if (store == STORE_FP32)
            p = param32[i];
        else
            p = load_bf16(param16[i]);
        m = moments16 ? load_bf16(m16[i]) : m32[i];
        v = moments16 ? load_bf16(v16[i]) : v32[i];
        g = grad16 ? load_bf16(g16[i]) : g32[i];

        g = g * c.grad_factor;
        if (general && c.coupled)
            g = g + c.l2 * p;
        p = p * c.decay;
        float d = (g - m) * c.lerp_weight;
        m = (general && c.lerp_from_grad ? g : m) + d;
        v = v * c.beta2;
        v = v + (c.grad_sq_weight * g) * g;
        float denom = sqrtf(v) / c.bias2_sqrt + c.eps;
        p = p + (c.step_size * m) / denom;

        if (moments16) {
            m16[i] = round_bf16(m);
            v16[i] = round_bf16(v);
        } else {
            m32[i] = m;
            v32[i] = v;
        }
        if (store == STORE_SPLIT) {
            uint32_t b = bits_of(p);
            uint16_t upper = (uint16_t)(b >> 16), lower = (uint16_t)b;
            param16[i] = (uint16_t)(upper + (lower >> 15));
            low[i] = (int16_t)lower;
            uint16_t magnitude = upper & 0x7fffu;
            largest = largest < magnitude ? magnitude : largest;
        } else if (store == STORE_FP32) {
            param32[i] = p;
        } else if (store == STORE_BF16) {
            param16[i] = round_bf16(p);
        } else {
            param16[i] = round_bf16_stochastic(p, random16(index + (uint32_t)i, key0, a->key1));
        }
    }
    if (store == STORE_SPLIT && largest >= 0x7f80u) /* an infinity or a NaN among them */
        keep_nans(param16, low, n);
}

INLINE void adam_range(int store, int moments16, int grad16, const void *args, size_t begin, size_t end)
{
    const adam_args *a = args;
    while (begin < end) {
        size_t n = end - begin;
        if (store == STORE_BF16_STOCHASTIC) { /* the loop holds the upper word of the index constant */
            uint64_t word = 0x100000000u - ((a->offset + begin) & 0xffffffffu);
            n = n < word ? n : (size_t)word;
        }
        if (a->c.coupled | a->c.lerp_from_grad)
            adam_loop(store, moments16, grad16, 1, a, begin, (int)n);
        else
            adam_loop(store, moments16, grad16, 0, a, begin, (int)n);
        begin += n;
    }
}

/* ---------------------------------------------------------------- sum of squares, accumulate, bandwidth */

/* Order of additions: 16 lanes over rows of 16, lanes in order, then chunks in order. The squares are exact in double. */
enum { SUM_LANES = 16, SUM_CHUNK = 1 << 14, STREAM_CHUNK = 1 << 16 };

typedef struct {
    const void *x;
    double *partial; /* one per chunk */
} sum_args;

INLINE double sum_chunk(int is16, const void *x, size_t begin, size_t end)
{
    double acc[SUM_LANES] = {0};
    const uint16_t *x16 = (const uint16_t *)x + begin;
    const float *x32 = (const float *)x + begin;
    size_t n = end - begin, rows = n / SUM_LANES;
    for (size_t r = 0; r < rows; r++)
        for (int j = 0; j < SUM_LANES; j++) {
            double e = is16 ? load_bf16(x16[r * SUM_LANES + j]) : x32[r * SUM_LANES + j];
            acc[j] += e * e;
        }
    for (size_t i = rows * SUM_LANES; i < n; i++) {
        double e = is16 ? load_bf16(x16[i]) : x32[i];
        acc[i % SUM_LANES] += e * e;
    }
    double total = 0;
    for (int j = 0; j < SUM_LANES; j++)
        total += acc[j];
    return total;
}

INLINE void sum_range(int is16, const void *args, size_t begin, size_t end)
{
    const sum_args *a = args;
    a->partial[begin / SUM_CHUNK] = sum_chunk(is16, a->x, begin, end);
}

typedef struct {
    void *dst;
    const void *src;
} accumulate_args;

INLINE void accumulate_range(int dst16, int src16, const void *args, size_t begin, size_t end)
{
    const accumulate_args *a = args;
    uint16_t *restrict d16 = (uint16_t *)a->dst + begin;
    float *restrict d32 = (float *)a->dst + begin;
    const uint16_t *restrict s16 = (const uint16_t *)a->src + begin;
    const float *restrict s32 = (const float *)a->src + begin;
    for (int i = 0, n = (int)(end - begin); i < n; i++) {
        float sum = (dst16 ? load_bf16(d16[i]) : d32[i]) + (src16 ? load_bf16(s16[i]) : s32[i]);
        if (dst16)
            d16[i] = round_bf16(sum);
        else
            d32[i] = sum;
    }
}

typedef struct {
    float *x;
    float factor;
} scale_args;

/* Four streams at a time, as the update itself reads several: prefetchers follow each stream only so far ahead, and one
 * alone does not fill the memory's pipes. */
static void scale_range(const void *args, size_t begin, size_t end)
{
    const scale_args *a = args;
    float *x = a->x + begin;
    float factor = a->factor;
    size_t n = end - begin, quarter = n / 4;
    for (size_t i = 0; i < quarter; i++) {
        x[i] *= factor;
        x[i + quarter] *= factor;
        x[i + 2 * quarter] *= factor;
        x[i + 3 * quarter] *= factor;
    }
    for (size_t i = 4 * quarter; i < n; i++)
        x[i] *= factor;
}

/* ---------------------------------------------------------------- one copy per instruction set */

typedef struct {
    range_fn *adam[STORES][2][2];  /* [store][moments16][grad16] */
    range_fn *sum[2];              /* [is16] */
    range_fn *accumulate[2][2];    /* [dst16][src16] */
} instruction_set;

#define ADAM_NAME(isa, s, m, g) isa##_adam_##s##_##m##g
#define ADAM_ONE(isa, attr, s, m, g) \
    attr static void ADAM_NAME(isa, s, m, g)(const void *a, size_t b, size_t e) { adam_range(s, m, g, a, b, e); }
#define ADAM_FOUR(isa, attr, s) \
    ADAM_ONE(isa, attr, s, 0, 0) ADAM_ONE(isa, attr, s, 0, 1) ADAM_ONE(isa, attr, s, 1, 0) ADAM_ONE(isa, attr, s, 1, 1)
#define ADAM_ROW(isa, s) \
    {{ADAM_NAME(isa, s, 0, 0), ADAM_NAME(isa, s, 0, 1)}, {ADAM_NAME(isa, s, 1, 0), ADAM_NAME(isa, s, 1, 1)}}
#define SUM_ONE(isa, attr, x) \
    attr static void isa##_sum_##x(const void *a, size_t b, size_t e) { sum_range(x, a, b, e); }
#define ACC_ONE(isa, attr, d, s) \
    attr static void isa##_acc_##d##s(const void *a, size_t b, size_t e) { accumulate_range(d, s, a, b, e); }

#define INSTRUCTION_SET(isa, attr) \
    ADAM_FOUR(isa, attr, STORE_SPLIT) ADAM_FOUR(isa, attr, STORE_BF16) \
    ADAM_FOUR(isa, attr, STORE_BF16_STOCHASTIC) ADAM_FOUR(isa, attr, STORE_FP32) \
    SUM_ONE(isa, attr, 0) SUM_ONE(isa, attr, 1) \
    ACC_ONE(isa, attr, 0, 0) ACC_ONE(isa, attr, 0, 1) ACC_ONE(isa, attr, 1, 0) ACC_ONE(isa, attr, 1, 1) \
    static const instruction_set isa##_set = { \
        {ADAM_ROW(isa, STORE_SPLIT), ADAM_ROW(isa, STORE_BF16), \
         ADAM_ROW(isa, STORE_BF16_STOCHASTIC), ADAM_ROW(isa, STORE_FP32)}, \
        {isa##_sum_0, isa##_sum_1}, \
        {{isa##_acc_00, isa##_acc_01}, {isa##_acc_10, isa##_acc_11}}};

INSTRUCTION_SET(baseline, )
#if defined(__x86_64__)
INSTRUCTION_SET(avx2, __attribute__((target("avx2"))))
#if defined(__clang__)
INSTRUCTION_SET(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#else
INSTRUCTION_SET(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif
#endif

/* The set with this name, or NULL when it was not compiled in or this processor (or its OS) lacks it. */
static const instruction_set *find_set(const char *name)
{
    if (!strcmp(name, "baseline"))
        return &baseline_set;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2"))
        return &avx2_set;
    if (!strcmp(name, "avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &avx512_set;
#endif
    return NULL;
}

/* ---------------------------------------------------------------- what kernel.py calls */

EXPORT int32_t mt_abi_version(void) { return ABI_VERSION; }

EXPORT int32_t mt_supports(const char *isa) { return find_set(isa) != NULL; }

/* Returns 0, or -1 for an unknown instruction set or store. */
EXPORT int32_t mt_adam(const char *isa, int32_t store, int32_t moments16, int32_t grad16, const adam_args *args,
                       size_t numel, int32_t threads, const int32_t *cpus)
{
    const instruction_set *set = find_set(isa);
    if (!set || store < 0 || store >= STORES)
        return -1;
    parallel(set->adam[store][!!moments16][!!grad16], args, numel, ADAM_CHUNK, threads, cpus);
    return 0;
}

/* `partial` is scratch for ceil(numel / SUM_CHUNK) doubles. */
EXPORT int32_t mt_sum_of_squares(const char *isa, int32_t is16, const void *x, double *partial, double *total,
                                 size_t numel, int32_t threads, const int32_t *cpus)
{
    const instruction_set *set = find_set(isa);
    if (!set)
        return -1;
    sum_args args = {x, partial};
    parallel(set->sum[!!is16], &args, numel, SUM_CHUNK, threads, cpus);
    double sum = 0;
    for (size_t k = 0; k < (numel + SUM_CHUNK - 1) / SUM_CHUNK; k++)
        sum += partial[k];
    *total = sum;
    return 0;
}

EXPORT int32_t mt_accumulate(const char *isa, int32_t dst16, int32_t src16, void *dst, const void *src, size_t numel,
                             int32_t threads, const int32_t *cpus)
{
    const instruction_set *set = find_set(isa);
    if (!set)
        return -1;
    accumulate_args args = {dst, src};
    parallel(set->accumulate[!!dst16][!!src16], &args, numel, STREAM_CHUNK, threads, cpus);
    return 0;
}

/* x *= factor in place: the benchmark's measure of read-modify-write bandwidth, 8 bytes per element. */
EXPORT void mt_scale(float *x, float factor, size_t numel, int32_t threads, const int32_t *cpus)
{
    scale_args args = {x, factor};
    parallel(scale_range, &args, numel, STREAM_CHUNK, threads, cpus);
}
