/* Linear layers over weights packed once: y = x * weight^T + bias.
 *
 * Batch-invariant by construction: an output is one sum over ascending input features, in fp32, in an order that
 * depends on the weight's shape and kind alone. Row count, place, neighbours and threads decide only which sums run
 * beside each other. The bias is added at the end, then there is one rounding to the output's dtype. */
#ifndef KVFERRY_LINEAR_H
#define KVFERRY_LINEAR_H

#include <stddef.h>

/* How products are made. Bits differ between kinds, but FMA256 and FMA512 give equal ones. AMX and DOT are for bf16;
 * they take denormal numbers for zero. Larger is faster. */
enum { LINEAR_PLAIN, LINEAR_FMA256, LINEAR_FMA512, LINEAR_DOT, LINEAR_AMX, LINEAR_KINDS };

typedef struct {
    int out, in;       /* features */
    int dtype;         /* of weight and x */
    int kind;
    const float *bias; /* [out], or NULL */
    const void *packed;
} linear;

/* Whether this processor can. AMX asks the kernel for permission the first time. */
int linear_has(int kind, int dtype);

/* Size of a packed weight; its address must be a multiple of 64. Every kind reads the same one. */
size_t linear_packed_bytes(int out, int in, int dtype);

/* weight `[out, in]` in dtype, rows contiguous. */
void linear_pack(const char *weight, int out, int in, int dtype, char *packed);

/* x `[rows, in]` in w->dtype and y `[rows, out]` in `out_dtype` (w->dtype or FLOAT32), rows contiguous, no overlap.
 * Reads and writes nothing outside them. Returns 0 where there was no memory for scratch, else 1. */
int linear_rows(const linear *w, const char *x, long rows, char *y, int out_dtype, int threads);

#endif
