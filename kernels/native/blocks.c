/* Python's side of copying and hashing KV blocks: several in one call, free of the GIL. Sizes are checked here, by the
 * buffers themselves. */
#include "blocks.h"

#include "xxh3.h"

typedef struct {
    PyObject *sequence; /* as a tuple or list */
    Py_buffer *views;
    Py_ssize_t held, count;
} buffers;

static void drop(buffers *some) {
    for (Py_ssize_t i = 0; i < some->held; i++) PyBuffer_Release(&some->views[i]);
    PyMem_Free(some->views);
    Py_XDECREF(some->sequence);
}

static int take(buffers *some, PyObject *from, int flags) {
    *some = (buffers){0};
    some->sequence = PySequence_Fast(from, "a sequence of buffers is wanted");
    if (!some->sequence) return -1;
    some->count = PySequence_Fast_GET_SIZE(some->sequence);
    some->views = PyMem_New(Py_buffer, some->count ? some->count : 1);
    if (!some->views) {
        PyErr_NoMemory();
        return -1;
    }
    for (; some->held < some->count; some->held++)
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(some->sequence, some->held), &some->views[some->held], flags) < 0)
            return -1;
    return 0;
}

static PyObject *numbers(const uint64_t *sums, Py_ssize_t count) {
    PyObject *out = PyTuple_New(count);
    for (Py_ssize_t i = 0; out && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(sums[i]);
        if (!number) Py_CLEAR(out);
        else PyTuple_SET_ITEM(out, i, number);
    }
    return out;
}

/* `to` is NULL where nothing is copied. */
static PyObject *hash_all(const buffers *to, const buffers *from) {
    uint64_t *sums = PyMem_New(uint64_t, from->count ? from->count : 1);
    if (!sums) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < from->count; i++)
        sums[i] = xxh3_copy(to ? to->views[i].buf : NULL, from->views[i].buf, (size_t)from->views[i].len);
    Py_END_ALLOW_THREADS
    PyObject *out = numbers(sums, from->count);
    PyMem_Free(sums);
    return out;
}

static PyObject *py_checksums(PyObject *self, PyObject *sources) {
    (void)self;
    buffers from;
    PyObject *out = take(&from, sources, PyBUF_SIMPLE) < 0 ? NULL : hash_all(NULL, &from);
    drop(&from);
    return out;
}

static PyObject *py_copy(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *targets, *sources, *out = NULL;
    if (!PyArg_ParseTuple(args, "OO", &targets, &sources)) return NULL;
    buffers to = {0}, from = {0};
    if (take(&to, targets, PyBUF_WRITABLE) < 0 || take(&from, sources, PyBUF_SIMPLE) < 0) goto done;
    int fits = to.count == from.count;
    for (Py_ssize_t i = 0; fits && i < to.count; i++) fits = to.views[i].len == from.views[i].len;
    if (fits) out = hash_all(&to, &from);
    else PyErr_SetString(PyExc_ValueError, "every source is copied to a target of its own size");
done:
    drop(&to);
    drop(&from);
    return out;
}

static PyObject *py_use(PyObject *self, PyObject *args) {
    (void)self;
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
    return PyBool_FromLong(xxh3_use(name));
}

static PyMethodDef methods[] = {
    {"blocks_checksums", py_checksums, METH_O, "XXH3-64 of each buffer."},
    {"blocks_copy", py_copy, METH_VARARGS, "Copies buffers into others; XXH3-64 of each copy."},
    {"blocks_use", py_use, METH_VARARGS, "Chooses avx512, avx2 or plain; False where this processor has it not."},
    {NULL, NULL, 0, NULL},
};

int add_blocks(PyObject *module) {
    if (!xxh3_use("avx512")) xxh3_use("avx2");
    return PyModule_AddFunctions(module, methods);
}
