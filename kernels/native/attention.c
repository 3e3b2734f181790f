/* The small operations of a layer on CPU: paged attention, norms, rotary embedding with the cache write, SwiGLU.
 *
 * Batch-invariant: a token's arithmetic has one fixed order, whatever else is in the call, on any number of threads.
 * fp32 inside; the cache is read as it lies (fp32, bf16 or fp16). The GIL is released. Shapes are checked by
 * the Python side (kernels/native_backend.py); here are only addresses. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "blocks.h"
#include "linear_module.h"
#include "pool.h"
#include "scalar.h"

#define ROWS_PER_TILE 8 /* (query, head) pairs of one work item; ROWS of kernels.h */

typedef struct {
    const float *q;
    float *out;
    const char *cache;
    long block_stride, key_offset, value_offset; /* bytes */
    const int32_t *tables, *starts, *counts, *firsts;
    long table_width, scratch_stride;
    const long *first_item; /* [rows + 1] */
    int rows, heads, kv_heads, head_dim, block_size, dtype;
    float scale;
} attention_args;

typedef struct {
    const char *x;
    char *residual, *out;
    const float *weight;
    long tokens;
    int size, dtype;
    float eps;
} norm_args;

typedef struct {
    const char *qkv;
    float *q;
    char *cache;
    long block_stride, key_offset, value_offset; /* bytes */
    const float *q_norm, *k_norm, *cosines, *sines;
    const int64_t *positions, *blocks, *offsets;
    long tokens;
    int heads, kv_heads, head_dim, block_size, dtype;
    float eps;
} rope_args;

typedef struct {
    void (*attention_item)(const attention_args *, long, float *);
    void (*norm)(const norm_args *, float *, float *);
    void (*silu)(const norm_args *, float *, float *);
    void (*rope)(const rope_args *, float *);
} kernel_table;

#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#define ISA 512
#define SUFFIX _512
#include "lanes.h"
#include "kernels.h"
#undef ISA
#undef SUFFIX
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ISA 256
#define SUFFIX _256
#include "lanes.h"
#include "kernels.h"
#undef ISA
#undef SUFFIX
#pragma GCC pop_options
#define WITH_X86 1
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O2")
#endif
#define ISA 0
#define SUFFIX _plain
#include "lanes.h"
#include "kernels.h"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

static const kernel_table *kernels = &table_plain;

static int use_variant(const char *name) {
    if (!strcmp(name, "plain")) { kernels = &table_plain; return 1; }
#ifdef WITH_X86
    const int fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!strcmp(name, "avx512") && fma && wide) { kernels = &table_512; return 1; }
    if (!strcmp(name, "avx2") && fma) { kernels = &table_256; return 1; }
#endif
    return 0;
}

typedef struct {
    const attention_args *args;
    float *scratch; /* ROWS_PER_TILE rows for each thread */
} attention_job;

static void attention_items(const void *job, long first, long last, int member) {
    const attention_job *j = job;
    float *scratch = j->scratch + (long)member * ROWS_PER_TILE * j->args->scratch_stride;
    for (long item = first; item < last; item++) kernels->attention_item(j->args, item, scratch);
}

/* ---- Python ------------------------------------------------------------------------------------------------ */

static PyObject *py_attention(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long q, out, cache, tables, starts, counts, firsts;
    attention_args a;
    int threads;
    memset(&a, 0, sizeof a);
    if (!PyArg_ParseTuple(args, "KKKlllKlKKKiiiiiii", &q, &out, &cache, &a.block_stride, &a.key_offset,
                          &a.value_offset, &tables, &a.table_width, &starts, &counts, &firsts, &a.rows, &a.heads,
                          &a.kv_heads, &a.head_dim, &a.block_size, &a.dtype, &threads))
        return NULL;
    a.q = (const float *)(uintptr_t)q;
    a.out = (float *)(uintptr_t)out;
    a.cache = (const char *)(uintptr_t)cache;
    a.tables = (const int32_t *)(uintptr_t)tables;
    a.starts = (const int32_t *)(uintptr_t)starts;
    a.counts = (const int32_t *)(uintptr_t)counts;
    a.firsts = (const int32_t *)(uintptr_t)firsts;
    a.scale = (float)(1.0 / sqrt((double)a.head_dim));
    long *first_item = malloc((size_t)(a.rows + 1) * sizeof(long));
    if (!first_item) return PyErr_NoMemory();
    long longest = 0, pairs_times_keys = 0;
    first_item[0] = 0;
    for (int row = 0; row < a.rows; row++) {
        const long pairs = (long)a.counts[row] * (a.heads / a.kv_heads), end = a.starts[row] + a.counts[row];
        first_item[row + 1] = first_item[row] + (pairs + ROWS_PER_TILE - 1) / ROWS_PER_TILE * a.kv_heads;
        longest = end > longest ? end : longest;
        pairs_times_keys += pairs * end * a.kv_heads;
    }
    a.first_item = first_item;
    a.scratch_stride = (longest + 15) / 16 * 16 + 16;
    /* Waking a thread costs about 20 microseconds, the work of some 20,000 (pair, key) products. */
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads < 1 || pairs_times_keys < 40000) threads = 1;
    float *scratch = aligned_alloc(64, (size_t)threads * ROWS_PER_TILE * (size_t)a.scratch_stride * sizeof(float));
    if (!scratch) {
        free(first_item);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    const attention_job job = {&a, scratch};
    run_parallel(attention_items, &job, first_item[a.rows], threads);
    Py_END_ALLOW_THREADS
    free(scratch);
    free(first_item);
    Py_RETURN_NONE;
}

static PyObject *norm_like(PyObject *args, void (*run)(const norm_args *, float *, float *)) {
    unsigned long long x, residual, weight, out;
    norm_args a;
    if (!PyArg_ParseTuple(args, "KKKKlifi", &x, &residual, &weight, &out, &a.tokens, &a.size, &a.eps, &a.dtype))
        return NULL;
    a.x = (const char *)(uintptr_t)x;
    a.residual = (char *)(uintptr_t)residual;
    a.weight = (const float *)(uintptr_t)weight;
    a.out = (char *)(uintptr_t)out;
    const size_t padded = ((size_t)a.size + 31) / 32 * 32;
    float *rows = aligned_alloc(64, 2 * padded * sizeof(float));
    if (!rows) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    run(&a, rows, rows + padded);
    Py_END_ALLOW_THREADS
    free(rows);
    Py_RETURN_NONE;
}

static PyObject *py_rms_norm(PyObject *self, PyObject *args) { (void)self; return norm_like(args, kernels->norm); }
static PyObject *py_silu_mul(PyObject *self, PyObject *args) { (void)self; return norm_like(args, kernels->silu); }

static PyObject *py_rope_and_store(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long qkv, q, cache, q_norm, k_norm, cosines, sines, positions, blocks, offsets;
    rope_args a;
    if (!PyArg_ParseTuple(args, "KKKlllKKKKKKKliiiiif", &qkv, &q, &cache, &a.block_stride, &a.key_offset,
                          &a.value_offset, &q_norm, &k_norm, &cosines, &sines, &positions, &blocks, &offsets,
                          &a.tokens, &a.heads, &a.kv_heads, &a.head_dim, &a.block_size, &a.dtype, &a.eps))
        return NULL;
    a.qkv = (const char *)(uintptr_t)qkv;
    a.q = (float *)(uintptr_t)q;
    a.cache = (char *)(uintptr_t)cache;
    a.q_norm = (const float *)(uintptr_t)q_norm;
    a.k_norm = (const float *)(uintptr_t)k_norm;
    a.cosines = (const float *)(uintptr_t)cosines;
    a.sines = (const float *)(uintptr_t)sines;
    a.positions = (const int64_t *)(uintptr_t)positions;
    a.blocks = (const int64_t *)(uintptr_t)blocks;
    a.offsets = (const int64_t *)(uintptr_t)offsets;
    float *row = aligned_alloc(64, ((size_t)a.head_dim + 31) / 32 * 32 * sizeof(float));
    if (!row) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    kernels->rope(&a, row);
    Py_END_ALLOW_THREADS
    free(row);
    Py_RETURN_NONE;
}

static PyObject *py_use(PyObject *self, PyObject *args) {
    (void)self;
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
    return PyBool_FromLong(use_variant(name));
}

static PyMethodDef methods[] = {
    {"attention", py_attention, METH_VARARGS, "Paged causal attention; addresses and sizes."},
    {"rms_norm", py_rms_norm, METH_VARARGS, "(Add and) RMS norm."},
    {"silu_mul", py_silu_mul, METH_VARARGS, "silu(gate) * up."},
    {"rope_and_store", py_rope_and_store, METH_VARARGS, "Norms and rotates q and k, writes k and v to the cache."},
    {"use", py_use, METH_VARARGS, "Chooses avx512, avx2 or plain; False where this processor has it not."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernels._native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
#ifdef WITH_X86
    __builtin_cpu_init();
#endif
    if (!use_variant("avx512")) use_variant("avx2");
    PyObject *created = PyModule_Create(&module);
    if (created && (add_linear(created) < 0 || add_blocks(created) < 0)) Py_CLEAR(created);
    return created;
}
