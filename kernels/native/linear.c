/* Packing of weights, and the sharing of a product between threads; the arithmetic is in the other linear_*.c.
 *
 * A packed weight is cut into groups of 16 outputs, an even number of groups, filled up with zeros. Inside a group
 * comes one input feature after the other, 16 outputs side by side. In bf16 two features of an output are neighbours,
 * and features are filled up to a multiple of 32: that is the operand of vdpbf16ps and a tile of AMX alike. */
#include "linear.h"

#include <stdlib.h>

#include "linear_kernels.h"

enum { WORTH_SHARING = 1 << 20 };

static long up_to(long size, long multiple) { return (size + multiple - 1) / multiple * multiple; }
static long num_groups(int out) { return up_to(out, 2 * LANES) / LANES; }
static long group_bytes(int in, int dtype) {
    return (dtype == BFLOAT16 ? up_to(in, 32) : in) * LANES * ITEM_BYTES(dtype);
}

size_t linear_packed_bytes(int out, int in, int dtype) { return (size_t)(num_groups(out) * group_bytes(in, dtype)); }

static void pack_group32(const uint32_t *weight, long outputs, long in, uint32_t *to) {
    for (long k = 0; k < in; k++)
        for (long o = 0; o < outputs; o++) to[k * LANES + o] = weight[o * in + k];
}

static void pack_group16(const uint16_t *weight, long outputs, long in, uint16_t *to) {
    for (long k = 0; k < in; k++)
        for (long o = 0; o < outputs; o++) to[k * LANES + o] = weight[o * in + k];
}

static void pack_group_pairs(const uint16_t *weight, long outputs, long in, uint16_t *to) {
    for (long k = 0; k < in; k++)
        for (long o = 0; o < outputs; o++) to[(k / 2 * LANES + o) * 2 + k % 2] = weight[o * in + k];
}

void linear_pack(const char *weight, int out, int in, int dtype, char *packed) {
    const long bytes = group_bytes(in, dtype);
    memset(packed, 0, linear_packed_bytes(out, in, dtype));
    for (long first = 0; first < out; first += LANES, packed += bytes) {
        const long outputs = out - first < LANES ? out - first : LANES;
        const char *from = weight + first * in * ITEM_BYTES(dtype);
        if (dtype == FLOAT32) pack_group32((const uint32_t *)from, outputs, in, (uint32_t *)packed);
        else if (dtype == FLOAT16) pack_group16((const uint16_t *)from, outputs, in, (uint16_t *)packed);
        else pack_group_pairs((const uint16_t *)from, outputs, in, (uint16_t *)packed);
    }
}

int linear_has(int kind, int dtype) {
    switch (kind) {
    case LINEAR_PLAIN: return 1;
    case LINEAR_FMA256: return processor_has(VARIANT_256);
    case LINEAR_FMA512: return processor_has(VARIANT_512);
#ifdef WITH_BF16
    case LINEAR_DOT: return dtype == BFLOAT16 && processor_has(VARIANT_512) && __builtin_cpu_supports("avx512bf16");
    case LINEAR_AMX: return dtype == BFLOAT16 && processor_has(VARIANT_AMX);
#endif
    default: return 0;
    }
}

static pool_work work_of(const linear *w) {
#ifdef WITH_BF16
    if (w->kind == LINEAR_AMX) return linear_amx;
    if (w->kind == LINEAR_DOT) return linear_dot;
#endif
#ifdef WITH_X86
    if (w->kind == LINEAR_FMA512) return linear_fma512[w->dtype];
    if (w->kind == LINEAR_FMA256) return linear_fma256[w->dtype];
#endif
    return linear_plain[w->dtype];
}

/* Bytes of a row of x as the kind wants it: fp32 for those that multiply in fp32; bf16 filled up with zeros to pairs
 * for DOT, to 32 for AMX. */
static long prepared_bytes(const linear *w) {
    if (w->kind == LINEAR_AMX) return up_to(w->in, 32) * 2;
    if (w->kind == LINEAR_DOT) return up_to(w->in, 2) * 2;
    return (long)w->in * 4;
}

static void prepare(const linear *w, const char *x, long rows, char *to) {
    const long bytes = (long)w->in * ITEM_BYTES(w->dtype), stride = prepared_bytes(w);
    for (long row = 0; row < rows; row++, x += bytes, to += stride) {
        if (w->kind == LINEAR_AMX || w->kind == LINEAR_DOT) {
            memcpy(to, x, (size_t)bytes);
            memset(to + bytes, 0, (size_t)(stride - bytes));
        } else if (w->dtype == BFLOAT16) {
            for (long k = 0; k < w->in; k++) ((float *)to)[k] = from_bfloat16(((const uint16_t *)x)[k]);
        } else {
            for (long k = 0; k < w->in; k++) ((float *)to)[k] = from_float16(((const uint16_t *)x)[k]);
        }
    }
}

int linear_rows(const linear *w, const char *x, long rows, char *y, int out_dtype, int threads) {
    const long bytes = (long)w->in * ITEM_BYTES(w->dtype), stride = prepared_bytes(w), groups = num_groups(w->out);
    char *prepared = NULL;
    if (stride != bytes) {
        prepared = aligned_alloc(64, (size_t)up_to(rows * stride, 64));
        if (!prepared) return 0;
        prepare(w, x, rows, prepared);
    }
    const product p = {w, prepared ? prepared : x, stride, rows, y, out_dtype, group_bytes(w->in, w->dtype), groups};
    /* Waking a thread costs about 20 microseconds: one reads some 300 kB of weights meanwhile, or multiplies 16 rows. */
    if (groups * p.group_bytes * up_to(rows, 16) / 16 < WORTH_SHARING) threads = 1;
    run_parallel(work_of(w), &p, rows > 0 ? (groups + GROUPS - 1) / GROUPS : 0, threads);
    free(prepared);
    return 1;
}
