/* What linear.c and the files of products have in common. */
#ifndef KVFERRY_LINEAR_KERNELS_H
#define KVFERRY_LINEAR_KERNELS_H

#include "dispatch.h"
#include "linear.h"
#include "pool.h"
#include "scalar.h"

#define LANES 16 /* outputs of a group */
#define GROUPS 4 /* of a work item; a multiple of 2, as the number of groups of a packed weight is */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WITH_X86 1
#endif

typedef struct {
    const linear *w;
    const char *x; /* as the kind wants it, see `prepared` in linear.c; `x_stride` bytes from row to row */
    long x_stride, rows;
    char *y;
    int out_dtype;
    long group_bytes; /* of the packed weight */
    long groups;
} product;

/* All are `pool_work` on a product; their items are `GROUPS` groups of outputs, the last one maybe of half as many. */
extern const pool_work linear_plain[3]; /* by dtype */
#ifdef WITH_X86
extern const pool_work linear_fma256[3], linear_fma512[3];
#endif
#ifdef WITH_BF16
void linear_dot(const void *job, long first, long last, int member);
void linear_amx(const void *job, long first, long last, int member);
#endif

/* Up to six rows by four groups of sums have a name each, s00 to s53: of an array, compilers write every element back
 * to memory in each step. `rows` and `groups` are constants where `f` is used, so what is beyond them falls away. */
#define FOR_ROWS(f) f(0) f(1) f(2) f(3) f(4) f(5)

/* Outputs of the group that exist. */
ALWAYS int real_outputs(const product *p, long group) {
    const long left = p->w->out - group * LANES;
    return left >= LANES ? LANES : left > 0 ? (int)left : 0;
}

#endif
