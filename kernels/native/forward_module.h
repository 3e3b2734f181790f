/* Adds the forward pass to the Python module. Included after Python.h. */
#ifndef KVFERRY_FORWARD_MODULE_H
#define KVFERRY_FORWARD_MODULE_H

int add_forward(PyObject *module); /* 0, or -1 with an exception set */

#endif
