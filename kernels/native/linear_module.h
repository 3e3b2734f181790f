/* Adds the linear layers to the Python module. Included after Python.h. */
#ifndef KVFERRY_LINEAR_MODULE_H
#define KVFERRY_LINEAR_MODULE_H

int add_linear(PyObject *module); /* 0, or -1 with an exception set */

#endif
