/* Sampling: all rows of a step from fp32 logits to token ids and log-probabilities in one call, free of the GIL.
 *
 * The rules, and the same arithmetic in numpy, are in kernels/sampling.py. Sizes are checked by
 * kernels/native_sampling.py; here are only addresses. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "sampling.h"

#define ALWAYS static inline __attribute__((always_inline))
#define BLOCK 64   /* ids whose weights are summed together */
#define CHUNK 1024 /* ids that are looked through for the best one before it is compared: 4 kB */

/* A weight is exp(x - best) in whole units of 2^-44: below 2^19 ids their sums are exact in 64 bits. */
static const int64_t UNIT = (int64_t)1 << 44;
#define TO_UNITS 384.0 /* 1.5 * 2^8: what is added to it is rounded to 2^-44, and its bits then count units */
#define BITS_OF_TO_UNITS 0x4078000000000000LL
#define TO_WHOLE 6755399441055744.0 /* 1.5 * 2^52: what is added to it is rounded to a whole number */
#define LOWEST_EXPONENT (-40.0)     /* weighs nothing, as does minus infinity */
#define LOG2_E 1.4426950408889634
#define LN2_HIGH 6.93147180369123816490e-01 /* 32 bits, so that n * LN2_HIGH is exact */
#define LN2_LOW 1.90821492927058770002e-10

/* Weights fall into buckets of 1/32 octave: by exponent and five bits. Bucket 0 weighs nothing. */
#define BUCKET_ZERO ((1023 - 44) * 32 - 1)
#define BUCKETS (44 * 32 + 2)

#define GREEDY_BELOW 1e-5
#define LOWEST_LOGPROB (-9999.0)
#define KEY_OF_INFINITY 0x7f800000
#define KEY_OF_MINUS_INFINITY (-0x7f800001)

/* As kernels/native_sampling.py packs it: eight bytes each. */
typedef struct {
    double temperature, top_p, min_p, repetition, presence, frequency;
    uint64_t seed, output_index, child;
    int64_t top_k, logprobs; /* logprobs: -1 is not asked */
    const int32_t *seen, *seen_counts; /* a count of 0: in the prompt only */
    int64_t num_seen;
    const int32_t *biased;
    const float *biases;
    int64_t num_biased;
    const int32_t *banned;
    int64_t num_banned;
    const uint8_t *allowed; /* [vocab], or none */
} draw;

typedef struct {
    long blocks;
    int64_t *histogram; /* [BUCKETS] */
    int64_t *sums;      /* [blocks] */
    int64_t *weights, *candidates; /* [blocks * BLOCK] */
    float *row;         /* [blocks * BLOCK] */
    uint16_t *buckets;  /* [blocks * BLOCK] */
} workspace;

typedef struct { int64_t least, equals; } cut;

typedef struct {
    double *values; /* [1 + top]: the token's, then the best ones'; none where not asked */
    int32_t *ids;   /* [top] */
    long top;
} said;

typedef struct {
    int32_t (*sample)(const float *, long, const draw *, const workspace *, const said *);
    int (*score)(const float *, long, long, const workspace *, const said *);
} row_functions;

ALWAYS int64_t bits_of(double x) { int64_t bits; memcpy(&bits, &x, 8); return bits; }
ALWAYS double double_of(int64_t bits) { double x; memcpy(&x, &bits, 8); return x; }
/* Whole numbers in the order of the floats; -0 equals 0, a NaN lies beyond an infinity. */
ALWAYS int32_t key_of(float x) {
    int32_t bits;
    const float no_minus_zero = x + 0.0f;
    memcpy(&bits, &no_minus_zero, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

/* 53 random bits: Philox4x32-10, key = seed, counter = (output index, 0, child, 0). See kernels/philox.py. */
static uint64_t uniform_bits(uint64_t seed, uint64_t output_index, uint64_t child) {
    uint32_t c0 = (uint32_t)output_index, c1 = 0, c2 = (uint32_t)child, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t left = (uint64_t)c0 * 0xD2511F53u, right = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(right >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(left >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)right;
        c3 = (uint32_t)left;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return ((uint64_t)c0 << 32 | c1) >> 11;
}

#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,prefer-vector-width=512")
#define SUFFIX _512
#include "sampling_rows.h"
#undef SUFFIX
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2")
#define SUFFIX _256
#include "sampling_rows.h"
#undef SUFFIX
#pragma GCC pop_options
#define WITH_X86 1
#endif
#define SUFFIX _plain
#include "sampling_rows.h"
#undef SUFFIX

static const row_functions *functions_of(const char *variant) {
#ifdef WITH_X86
    __builtin_cpu_init();
    if (!strcmp(variant, "avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &functions_512;
    if (!strcmp(variant, "avx2") && __builtin_cpu_supports("avx2")) return &functions_256;
#endif
    return strcmp(variant, "plain") ? NULL : &functions_plain;
}

/* ---- Python ------------------------------------------------------------------------------------------------ */

#define ALIGNED(bytes) (((bytes) + 63) / 64 * 64)

/* The parts of a workspace, one after the other; returns their bytes. With 0 for an address it only measures. */
static size_t lay_out(workspace *w, uintptr_t at, long vocab) {
    const uintptr_t begin = at;
    w->blocks = (vocab + BLOCK - 1) / BLOCK;
    const size_t ids = (size_t)w->blocks * BLOCK;
    w->histogram = (int64_t *)at;
    at += ALIGNED(BUCKETS * sizeof(int64_t));
    w->sums = (int64_t *)at;
    at += ALIGNED((size_t)w->blocks * sizeof(int64_t));
    w->weights = (int64_t *)at;
    at += ids * sizeof(int64_t);
    w->candidates = (int64_t *)at;
    at += ids * sizeof(int64_t);
    w->row = (float *)at;
    at += ids * sizeof(float);
    w->buckets = (uint16_t *)at;
    at += ids * sizeof(uint16_t);
    return at - begin;
}

static PyObject *py_workspace_bytes(PyObject *self, PyObject *args) {
    (void)self;
    long vocab;
    workspace w;
    if (!PyArg_ParseTuple(args, "l", &vocab)) return NULL;
    return PyLong_FromSize_t(lay_out(&w, 0, vocab));
}

static PyObject *py_has_variant(PyObject *self, PyObject *args) {
    (void)self;
    const char *variant;
    if (!PyArg_ParseTuple(args, "s", &variant)) return NULL;
    return PyBool_FromLong(functions_of(variant) != NULL);
}

/* variant, logits, rows, vocab, stride in floats, draws, tokens [rows], values [rows, 1 + width], ids [rows, width],
 * width, workspace */
static PyObject *py_sample(PyObject *self, PyObject *args) {
    (void)self;
    const char *variant;
    unsigned long long logits, tokens, values, ids, space;
    long rows, vocab, stride, width;
    const char *draws;
    Py_ssize_t draws_bytes;
    if (!PyArg_ParseTuple(args, "sKllly#KKKlK", &variant, &logits, &rows, &vocab, &stride, &draws, &draws_bytes,
                          &tokens, &values, &ids, &width, &space))
        return NULL;
    if (draws_bytes != rows * (Py_ssize_t)sizeof(draw)) return PyErr_Format(PyExc_ValueError, "not one draw per row");
    const row_functions *functions = functions_of(variant);
    if (!functions) return PyErr_Format(PyExc_ValueError, "no variant %s", variant);
    workspace w;
    lay_out(&w, (uintptr_t)space, vocab);
    Py_BEGIN_ALLOW_THREADS
    for (long row = 0; row < rows; row++) {
        const draw *d = (const draw *)draws + row;
        said out = {NULL, NULL, 0};
        if (d->logprobs >= 0) {
            out.values = (double *)(uintptr_t)values + row * (1 + width);
            out.ids = (int32_t *)(uintptr_t)ids + row * width;
            out.top = d->logprobs;
        }
        ((int32_t *)(uintptr_t)tokens)[row] =
            functions->sample((const float *)(uintptr_t)logits + row * stride, vocab, d, &w, &out);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* variant, logits, rows, vocab, stride in floats, tokens [rows] int32, tops [rows] int32, good [rows] uint8,
 * values [rows, 1 + width], ids [rows, width], width, workspace */
static PyObject *py_score(PyObject *self, PyObject *args) {
    (void)self;
    const char *variant;
    unsigned long long logits, tokens, tops, good, values, ids, space;
    long rows, vocab, stride, width;
    if (!PyArg_ParseTuple(args, "sKlllKKKKKlK", &variant, &logits, &rows, &vocab, &stride, &tokens, &tops, &good,
                          &values, &ids, &width, &space))
        return NULL;
    const row_functions *functions = functions_of(variant);
    if (!functions) return PyErr_Format(PyExc_ValueError, "no variant %s", variant);
    workspace w;
    lay_out(&w, (uintptr_t)space, vocab);
    Py_BEGIN_ALLOW_THREADS
    for (long row = 0; row < rows; row++) {
        const said out = {(double *)(uintptr_t)values + row * (1 + width), (int32_t *)(uintptr_t)ids + row * width,
                          ((const int32_t *)(uintptr_t)tops)[row]};
        const long token = ((const int32_t *)(uintptr_t)tokens)[row];
        ((uint8_t *)(uintptr_t)good)[row] = (uint8_t)functions->score(
            (const float *)(uintptr_t)logits + row * stride, vocab, token, &w, &out);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"sample", py_sample, METH_VARARGS, "Tokens and log-probabilities of all rows; addresses and sizes."},
    {"score", py_score, METH_VARARGS, "Log-probabilities of given tokens; addresses and sizes."},
    {"sampling_workspace_bytes", py_workspace_bytes, METH_VARARGS, "What `sample` and `score` need for a vocabulary."},
    {"has_sampling_variant", py_has_variant, METH_VARARGS, "Whether avx512, avx2 or plain runs on this processor."},
    {NULL, NULL, 0, NULL},
};

int add_sampling(PyObject *module) { return PyModule_AddFunctions(module, methods); }
