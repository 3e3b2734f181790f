/* Copying and hashing the bytes of KV blocks (blocks.c). */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

int add_blocks(PyObject *module);
