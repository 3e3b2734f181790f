/* Products of bf16 pairs by vdpbf16ps: two input features at a time, sums in fp32. */
#include "linear_kernels.h"

#ifdef WITH_X86
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,prefer-vector-width=512")
#include "linear_bf16.h"

/* `groups` groups of outputs for `rows` rows, held in registers. */
ALWAYS void dot_block(const product *p, long group, int groups, long row, int rows) {
    __m512 sums[6][GROUPS];
    const char *weights = (const char *)p->w->packed + group * p->group_bytes, *x = p->x + row * p->x_stride;
    const long pairs = (p->w->in + 1) / 2;
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) sums[r][g] = _mm512_setzero_ps();
    for (long k = 0; k < pairs; k++) {
        __m512bh w[GROUPS];
        for (int g = 0; g < groups; g++) w[g] = (__m512bh)_mm512_loadu_si512(weights + g * p->group_bytes + k * 64);
        for (int r = 0; r < rows; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(((const int *)(x + r * p->x_stride))[k]);
            for (int g = 0; g < groups; g++) sums[r][g] = _mm512_dpbf16_ps(sums[r][g], w[g], pair);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) write_group(p, row + r, group + g, sums[r][g]);
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
