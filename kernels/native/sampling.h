/* Adds sampling to the Python module. Included after Python.h. */
#ifndef KVFERRY_SAMPLING_H
#define KVFERRY_SAMPLING_H

int add_sampling(PyObject *module); /* 0, or -1 with an exception set */

#endif
