/* kernels._native: the entry points for Python. The GIL is released while they compute; shapes are checked by the
 * Python side (kernels/native_backend.py), here are only addresses and sizes. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "attention.h"
#include "blocks.h"
#include "dispatch.h"
#include "forward_module.h"
#include "linear_module.h"
#include "rows.h"
#include "sampling.h"

#define ADDRESS(type, number) ((type)(uintptr_t)(number))
typedef unsigned long long address;

static PyObject *py_attention(PyObject *self, PyObject *args) {
    address q, out, cache, tables, slots, starts, counts, firsts;
    attention_args a;
    attention_space space = {0};
    int threads, prepared;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKlllKlKKKKiiiiiii", &q, &out, &cache, &a.block_stride, &a.key_offset,
                          &a.value_offset, &tables, &a.table_stride, &slots, &starts, &counts, &firsts, &a.rows,
                          &a.heads, &a.kv_heads, &a.head_dim, &a.block_size, &a.dtype, &threads))
        return NULL;
    a.q = ADDRESS(const float *, q);
    a.out = ADDRESS(char *, out);
    a.cache = ADDRESS(const char *, cache);
    a.tables = ADDRESS(const int32_t *, tables);
    a.slots = ADDRESS(const int64_t *, slots);
    a.starts = ADDRESS(const int32_t *, starts);
    a.counts = ADDRESS(const int32_t *, counts);
    a.firsts = ADDRESS(const int32_t *, firsts);
    Py_BEGIN_ALLOW_THREADS
    prepared = attention_prepare(&space, &a, threads);
    if (prepared) attention_run(&space, &a);
    attention_release(&space);
    Py_END_ALLOW_THREADS
    if (!prepared) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_rms_norm(PyObject *self, PyObject *args) {
    address x, residual, weight, out;
    norm_args a;
    int threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKlifii", &x, &residual, &weight, &out, &a.tokens, &a.size, &a.eps, &a.dtype,
                          &threads))
        return NULL;
    a.x = ADDRESS(const char *, x);
    a.residual = ADDRESS(char *, residual);
    a.weight = ADDRESS(const float *, weight);
    a.out = ADDRESS(char *, out);
    Py_BEGIN_ALLOW_THREADS
    norm_rows(&a, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_silu_mul(PyObject *self, PyObject *args) {
    address x, out;
    silu_args a;
    int threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKliii", &x, &out, &a.tokens, &a.size, &a.dtype, &threads)) return NULL;
    a.x = ADDRESS(const char *, x);
    a.out = ADDRESS(char *, out);
    Py_BEGIN_ALLOW_THREADS
    silu_rows(&a, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_rope_and_store(PyObject *self, PyObject *args) {
    address qkv, q, cache, q_norm, k_norm, cosines, sines, positions, blocks, offsets;
    rope_args a;
    int threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKlllKKKKKKKliiiiifi", &qkv, &q, &cache, &a.block_stride, &a.key_offset,
                          &a.value_offset, &q_norm, &k_norm, &cosines, &sines, &positions, &blocks, &offsets,
                          &a.tokens, &a.heads, &a.kv_heads, &a.head_dim, &a.block_size, &a.dtype, &a.eps, &threads))
        return NULL;
    a.qkv = ADDRESS(const char *, qkv);
    a.q = ADDRESS(float *, q);
    a.cache = ADDRESS(char *, cache);
    a.q_norm = ADDRESS(const float *, q_norm);
    a.k_norm = ADDRESS(const float *, k_norm);
    a.cosines = ADDRESS(const float *, cosines);
    a.sines = ADDRESS(const float *, sines);
    a.positions = ADDRESS(const int64_t *, positions);
    a.blocks = ADDRESS(const int64_t *, blocks);
    a.offsets = ADDRESS(const int64_t *, offsets);
    Py_BEGIN_ALLOW_THREADS
    rope_rows(&a, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_use(PyObject *self, PyObject *args) {
    const char *name;
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
    return PyBool_FromLong(use_variant(name));
}

static PyMethodDef methods[] = {
    {"attention", py_attention, METH_VARARGS, "Paged causal attention; addresses and sizes."},
    {"rms_norm", py_rms_norm, METH_VARARGS, "(Add and) RMS norm."},
    {"silu_mul", py_silu_mul, METH_VARARGS, "silu(gate) * up."},
    {"rope_and_store", py_rope_and_store, METH_VARARGS, "Norms and rotates q and k, writes k and v to the cache."},
    {"use", py_use, METH_VARARGS, "Chooses amx, avx512, avx2 or plain; False where this processor has it not."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernels._native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *created = PyModule_Create(&module);
    if (created && (add_linear(created) < 0 || add_blocks(created) < 0 || add_sampling(created) < 0 ||
                    add_forward(created) < 0))
        Py_CLEAR(created);
    return created;
}
