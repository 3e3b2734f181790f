/* Linear layers for Python: addresses and sizes, which kernels/native_linear.py has checked. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "linear.h"
#include "linear_module.h"

#define ADDRESS(type, number) ((type)(uintptr_t)(number))

static PyObject *py_has(PyObject *self, PyObject *args) {
    int kind, dtype;
    (void)self;
    if (!PyArg_ParseTuple(args, "ii", &kind, &dtype)) return NULL;
    return PyBool_FromLong(linear_has(kind, dtype));
}

static PyObject *py_packed_bytes(PyObject *self, PyObject *args) {
    int out, in, dtype;
    (void)self;
    if (!PyArg_ParseTuple(args, "iii", &out, &in, &dtype)) return NULL;
    return PyLong_FromSize_t(linear_packed_bytes(out, in, dtype));
}

static PyObject *py_pack(PyObject *self, PyObject *args) {
    unsigned long long weight, packed;
    int out, in, dtype;
    (void)self;
    if (!PyArg_ParseTuple(args, "KiiiK", &weight, &out, &in, &dtype, &packed)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    linear_pack(ADDRESS(const char *, weight), out, in, dtype, ADDRESS(char *, packed));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_rows(PyObject *self, PyObject *args) {
    unsigned long long bias, packed, x, y;
    linear w;
    long rows;
    int out_dtype, threads, done;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiKKKlKii", &w.out, &w.in, &w.dtype, &w.kind, &bias, &packed, &x, &rows, &y,
                          &out_dtype, &threads))
        return NULL;
    w.bias = ADDRESS(const float *, bias);
    w.packed = ADDRESS(const void *, packed);
    Py_BEGIN_ALLOW_THREADS
    done = linear_rows(&w, ADDRESS(const char *, x), rows, ADDRESS(char *, y), out_dtype, threads);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"linear_has", py_has, METH_VARARGS, "Whether this processor has a kind of product for a dtype."},
    {"linear_packed_bytes", py_packed_bytes, METH_VARARGS, "Size of a packed weight."},
    {"linear_pack", py_pack, METH_VARARGS, "Packs a weight."},
    {"linear_rows", py_rows, METH_VARARGS, "y = x * weight^T + bias; addresses and sizes."},
    {NULL, NULL, 0, NULL},
};

int add_linear(PyObject *module) { return PyModule_AddFunctions(module, methods); }
