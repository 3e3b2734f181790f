/* Packing of weights, and the sharing of a product between threads; the arithmetic is in linear_*.h.
 *
 * A packed weight is cut into groups of 16 outputs, zero where the last group has fewer. Inside a group one input
 * feature after the other, 16 outputs side by side; in bf16 two features of an output are neighbours: the operand of
 * vdpbf16ps and a tile of AMX alike. Outputs fill up pieces of 32, bf16 features multiples of 32. */
#include "linear.h"

#include "pool.h"
#include "scalar.h"

#define LANES 16
#define PIECE 64 /* outputs of one work item; a multiple of 2 * LANES */

static long up_to(long size, long multiple) { return (size + multiple - 1) / multiple * multiple; }
static long packed_in(int in, int dtype) { return dtype == BFLOAT16 ? up_to(in, 32) : in; }

size_t linear_packed_bytes(int out, int in, int dtype) {
    return (size_t)(up_to(out, 2 * LANES) * packed_in(in, dtype) * ITEM_BYTES(dtype));
}

void linear_pack(const char *weight, int out, int in, int dtype, char *packed) {
    const long padded = packed_in(in, dtype), together = dtype == BFLOAT16 ? 2 : 1;
    memset(packed, 0, linear_packed_bytes(out, in, dtype));
    for (long o = 0; o < out; o++)
        for (long k = 0; k < in; k++) {
            const long to = o / LANES * LANES * padded + k / together * together * LANES + o % LANES * together + k % together;
            const long from = o * in + k;
            if (dtype == FLOAT32) ((float *)packed)[to] = ((const float *)weight)[from];
            else ((uint16_t *)packed)[to] = ((const uint16_t *)weight)[from];
        }
}

typedef struct {
    const linear *w;
    const char *x;
    char *y;
    long rows;
    int out_dtype;
} product;

static void plain_outputs(const void *job, long first, long last, int member) {
    const product *p = job;
    const linear *w = p->w;
    const long padded = packed_in(w->in, w->dtype), together = w->dtype == BFLOAT16 ? 2 : 1;
    const int item = ITEM_BYTES(w->dtype);
    const long end = last * PIECE < w->out ? last * PIECE : w->out;
    (void)member;
    for (long o = first * PIECE; o < end; o++) {
        const char *from = (const char *)w->packed + (o / LANES * LANES * padded + o % LANES * together) * item;
        for (long row = 0; row < p->rows; row++) {
            float sum = 0.0f;
            for (long k = 0; k < w->in; k++)
                sum += read_one(p->x + (row * w->in + k) * item, w->dtype) *
                       read_one(from + (k / together * together * LANES + k % together) * item, w->dtype);
            if (w->bias) sum += w->bias[o];
            write_one(p->y + (row * w->out + o) * ITEM_BYTES(p->out_dtype), sum, p->out_dtype);
        }
    }
}

int linear_has(int kind, int dtype) {
    (void)dtype;
    return kind == LINEAR_PLAIN;
}

int linear_rows(const linear *w, const char *x, long rows, char *y, int out_dtype, int threads) {
    const product p = {w, x, y, rows, out_dtype};
    run_parallel(plain_outputs, &p, up_to(w->out, PIECE) / PIECE, threads);
    return 1;
}
