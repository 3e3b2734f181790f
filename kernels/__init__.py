"""Arithmetic on tensors: paged cache, linears, attention, the model, sampling. Knows block tables, never requests.

Why `__version__`: transformers 5 looks for an optional package that is also called `kernels`. When it finds this
folder it runs this file and asks for the version; some 5.x releases raise `InvalidVersion` when there is none.
"0.0.0" is older than any version they accept, so they go on as if the optional package were absent.
"""

__version__ = "0.0.0"
