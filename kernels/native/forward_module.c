/* The forward pass for Python: a model is a capsule of addresses, which kernels/native_model.py keeps alive. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>

#include "forward.h"
#include "forward_module.h"

#define ADDRESS(type, number) ((type)(uintptr_t)(number))
typedef unsigned long long address;

static const char CAPSULE[] = "kernels._native.model";

static void delete_model(PyObject *capsule) {
    model_weights *model = PyCapsule_GetPointer(capsule, CAPSULE);
    forward_release(model);
    free(model);
}

static int read_layer(PyObject *from, layer_weights *layer) {
    address attention_norm, mlp_norm, q_norm, k_norm, bias[4], packed[4];
    linear *const all[] = {&layer->qkv, &layer->output, &layer->gate_up, &layer->down};
#define LINEAR(i) &all[i]->out, &all[i]->in, &all[i]->dtype, &all[i]->kind, &bias[i], &packed[i]
    if (!PyArg_ParseTuple(from, "KKKK(iiiiKK)(iiiiKK)(iiiiKK)(iiiiKK)", &attention_norm, &mlp_norm, &q_norm, &k_norm,
                          LINEAR(0), LINEAR(1), LINEAR(2), LINEAR(3)))
        return 0;
#undef LINEAR
    layer->attention_norm = ADDRESS(const float *, attention_norm);
    layer->mlp_norm = ADDRESS(const float *, mlp_norm);
    layer->q_norm = ADDRESS(const float *, q_norm);
    layer->k_norm = ADDRESS(const float *, k_norm);
    for (int i = 0; i < 4; i++) {
        all[i]->bias = ADDRESS(const float *, bias[i]);
        all[i]->packed = ADDRESS(const void *, packed[i]);
    }
    return 1;
}

static int read_layers(PyObject *layers, model_weights *model) {
    model->num_layers = (int)PyTuple_GET_SIZE(layers);
    model->layers = calloc((size_t)model->num_layers, sizeof(layer_weights));
    if (!model->layers) {
        PyErr_NoMemory();
        return 0;
    }
    for (int i = 0; i < model->num_layers; i++)
        if (!read_layer(PyTuple_GET_ITEM(layers, i), &model->layers[i])) return 0;
    return 1;
}

static PyObject *py_make_model(PyObject *self, PyObject *args) {
    address embedding, cosines, sines, final_norm;
    PyObject *layers;
    (void)self;
    model_weights *m = calloc(1, sizeof *m);
    if (!m) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(m, CAPSULE, delete_model);
    if (!capsule) {
        free(m);
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "iiiiiifKKKKO!", &m->hidden, &m->heads, &m->kv_heads, &m->head_dim, &m->inner, &m->dtype,
                          &m->eps, &embedding, &cosines, &sines, &final_norm, &PyTuple_Type, &layers) ||
        !read_layers(layers, m)) {
        Py_DECREF(capsule);
        return NULL;
    }
    m->embedding = ADDRESS(const char *, embedding);
    m->cosines = ADDRESS(const float *, cosines);
    m->sines = ADDRESS(const float *, sines);
    m->final_norm = ADDRESS(const float *, final_norm);
    return capsule;
}

static PyObject *py_forward(PyObject *self, PyObject *args) {
    PyObject *capsule;
    address token_ids, hidden, cache, tables, slots, starts, counts, firsts;
    forward_step s;
    int done;
    (void)self;
    if (!PyArg_ParseTuple(args, "OKKKlKlKKKKliii", &capsule, &token_ids, &hidden, &cache, &s.block_bytes, &tables,
                          &s.table_stride, &slots, &starts, &counts, &firsts, &s.tokens, &s.rows, &s.block_size,
                          &s.threads))
        return NULL;
    model_weights *model = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!model) return NULL;
    s.token_ids = ADDRESS(const int64_t *, token_ids);
    s.hidden = ADDRESS(char *, hidden);
    s.cache = ADDRESS(char *, cache);
    s.tables = ADDRESS(const int32_t *, tables);
    s.slots = ADDRESS(const int64_t *, slots);
    s.starts = ADDRESS(const int32_t *, starts);
    s.counts = ADDRESS(const int32_t *, counts);
    s.firsts = ADDRESS(const int32_t *, firsts);
    Py_BEGIN_ALLOW_THREADS
    done = forward(model, &s);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"make_model", py_make_model, METH_VARARGS, "Sizes and addresses of a model's weights as one object."},
    {"forward", py_forward, METH_VARARGS, "One step through all layers; addresses and sizes."},
    {NULL, NULL, 0, NULL},
};

int add_forward(PyObject *module) { return PyModule_AddFunctions(module, methods); }
