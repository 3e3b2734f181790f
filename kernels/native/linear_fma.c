/* Products in fp32, one fused multiply-add per input feature: AVX-512, AVX2 with equal bits, and plain C with two
 * roundings. Weights stay in their dtype and are widened as they are read; x comes in fp32. */
#include "linear_kernels.h"

#ifdef WITH_X86
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#define ISA 512
#define SUFFIX _512
#include "lanes.h"
#include "linear_fma.h"
#undef ISA
#undef SUFFIX
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ISA 256
#define SUFFIX _256
#include "lanes.h"
#include "linear_fma.h"
#undef ISA
#undef SUFFIX
#pragma GCC pop_options
const pool_work linear_fma512[3] = {fma_float32_512, fma_bfloat16_512, fma_float16_512};
const pool_work linear_fma256[3] = {fma_float32_256, fma_bfloat16_256, fma_float16_256};
#endif

#define PLAIN_ROWS 4

/* One group of outputs for up to PLAIN_ROWS rows. */
ALWAYS void plain_block(const product *p, long group, long row, long rows, int dtype) {
    const char *weight = (const char *)p->w->packed + group * p->group_bytes;
    const int outputs = real_outputs(p, group), in = p->w->in;
    float sums[PLAIN_ROWS][LANES] = {{0}}, wide[LANES];
    for (int k = 0; k < in; k++) {
        for (int o = 0; o < LANES; o++) {
            const long at = dtype == BFLOAT16 ? (k / 2 * LANES + o) * 2 + k % 2 : (long)k * LANES + o;
            wide[o] = read_one(weight + at * ITEM_BYTES(dtype), dtype);
        }
        for (long r = 0; r < rows; r++) {
            const float x = ((const float *)(p->x + (row + r) * p->x_stride))[k];
            for (int o = 0; o < LANES; o++) sums[r][o] += x * wide[o];
        }
    }
    for (long r = 0; r < rows; r++)
        for (int o = 0; o < outputs; o++) {
            const long at = (row + r) * p->w->out + group * LANES + o;
            const float bias = p->w->bias ? p->w->bias[group * LANES + o] : 0.0f;
            write_one(p->y + at * ITEM_BYTES(p->out_dtype), sums[r][o] + bias, p->out_dtype);
        }
}

ALWAYS void plain_outputs(const product *p, long first, long last, int dtype) {
    const long end = last * GROUPS < p->groups ? last * GROUPS : p->groups;
    for (long group = first * GROUPS; group < end; group++)
        for (long row = 0; row < p->rows; row += PLAIN_ROWS)
            plain_block(p, group, row, p->rows - row < PLAIN_ROWS ? p->rows - row : PLAIN_ROWS, dtype);
}

#define PLAIN_WORK(name, dtype) \
    static void name(const void *job, long first, long last, int member) { \
        (void)member; \
        plain_outputs(job, first, last, dtype); \
    }
PLAIN_WORK(plain_float32, FLOAT32)
PLAIN_WORK(plain_bfloat16, BFLOAT16)
PLAIN_WORK(plain_float16, FLOAT16)
const pool_work linear_plain[3] = {plain_float32, plain_bfloat16, plain_float16};
