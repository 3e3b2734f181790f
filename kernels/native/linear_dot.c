/* Products of bf16 pairs by vdpbf16ps: two input features at a time, sums in fp32. */
#include "linear_kernels.h"

#ifdef WITH_BF16
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,prefer-vector-width=512")
#include "linear_bf16.h"

#define ZERO(r) __m512 s##r##0 = _mm512_setzero_ps(), s##r##1 = s##r##0, s##r##2 = s##r##0, s##r##3 = s##r##0;
#define WEIGHT(g) (__m512bh)_mm512_loadu_si512(weights + (g) * p->group_bytes + k * 64)
#define STEP(r) \
    if (rows > r) { \
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(((const int *)(x + r * p->x_stride))[k]); \
        s##r##0 = _mm512_dpbf16_ps(s##r##0, w0, pair); \
        s##r##1 = _mm512_dpbf16_ps(s##r##1, w1, pair); \
        if (groups == GROUPS) { \
            s##r##2 = _mm512_dpbf16_ps(s##r##2, w2, pair); \
            s##r##3 = _mm512_dpbf16_ps(s##r##3, w3, pair); \
        } \
    }
#define WRITE(r) \
    if (rows > r) { \
        write_group(p, row + r, group, s##r##0); \
        write_group(p, row + r, group + 1, s##r##1); \
        if (groups == GROUPS) { \
            write_group(p, row + r, group + 2, s##r##2); \
            write_group(p, row + r, group + 3, s##r##3); \
        } \
    }

/* Four groups of outputs, or two, for `rows` rows, held in registers. */
ALWAYS void dot_block(const product *p, long group, int groups, long row, int rows) {
    const char *weights = (const char *)p->w->packed + group * p->group_bytes, *x = p->x + row * p->x_stride;
    const long pairs = (p->w->in + 1) / 2;
    FOR_ROWS(ZERO)
    for (long k = 0; k < pairs; k++) {
        const __m512bh w0 = WEIGHT(0), w1 = WEIGHT(1);
        const __m512bh w2 = groups == GROUPS ? WEIGHT(2) : w0, w3 = groups == GROUPS ? WEIGHT(3) : w1;
        FOR_ROWS(STEP)
    }
    FOR_ROWS(WRITE)
}

ALWAYS void dot_item(const product *p, long group, int groups) {
    long row = 0;
    for (; row + 6 <= p->rows; row += 6) dot_block(p, group, groups, row, 6);
    if (row + 4 <= p->rows) { dot_block(p, group, groups, row, 4); row += 4; }
    if (row + 2 <= p->rows) { dot_block(p, group, groups, row, 2); row += 2; }
    if (row < p->rows) dot_block(p, group, groups, row, 1);
}

void linear_dot(const void *job, long first, long last, int member) {
    const product *p = job;
    (void)member;
    for (long group = first * GROUPS; group < last * GROUPS && group < p->groups; group += GROUPS) {
        if (group + GROUPS <= p->groups) dot_item(p, group, GROUPS);
        else dot_item(p, group, GROUPS / 2);
    }
}
#pragma GCC pop_options
#endif
