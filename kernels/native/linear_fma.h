/* Products by fused multiply-add, included by linear_fma.c once per instruction set after lanes.h. */

/* Sixteen outputs of an even input feature (in the lower half of each 32 bits) and of the odd one after it. */
#if ISA == 512
INLINE vf NAME(load_even)(const char *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
INLINE vf NAME(load_odd)(const char *p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)));
}
#else
INLINE __m256i NAME(load8)(const char *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE __m256 NAME(even8)(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
INLINE __m256 NAME(odd8)(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
}
INLINE vf NAME(load_even)(const char *p) { return BOTH(NAME(even8)(NAME(load8)(p)), NAME(even8)(NAME(load8)(p + 32))); }
INLINE vf NAME(load_odd)(const char *p) { return BOTH(NAME(odd8)(NAME(load8)(p)), NAME(odd8)(NAME(load8)(p + 32))); }
#endif

/* Sixteen outputs of input feature k of a group; `odd` is k % 2, known when compiled. */
INLINE vf NAME(load_weight)(const char *group, long k, int odd, int dtype) {
    if (dtype == FLOAT32) return NAME(load32)((const float *)group + k * LANES);
    if (dtype == FLOAT16) return NAME(loadhf)((const uint16_t *)group + k * LANES);
    const char *pairs = group + k / 2 * LANES * 4;
    return odd ? NAME(load_odd)(pairs) : NAME(load_even)(pairs);
}

INLINE void NAME(write_outputs)(const product *p, long row, long group, vf sum) {
    const int outputs = real_outputs(p, group);
    float wide[LANES];
    char *to = p->y + (row * p->w->out + group * LANES) * ITEM_BYTES(p->out_dtype);
    NAME(store32)(wide, sum);
    if (p->w->bias)
        for (int o = 0; o < outputs; o++) wide[o] += p->w->bias[group * LANES + o];
    if (p->out_dtype == FLOAT32) memcpy(to, wide, (size_t)outputs * 4);
    else if (p->out_dtype == BFLOAT16)
        for (int o = 0; o < outputs; o++) ((uint16_t *)to)[o] = to_bfloat16(wide[o]);
    else
        for (int o = 0; o < outputs; o++) ((uint16_t *)to)[o] = to_float16(wide[o]);
}

INLINE void NAME(step)(const char *const *weights, const char *x, long x_stride, long k, int odd, int groups,
                       int rows, vf (*sums)[GROUPS], int dtype) {
    vf w[GROUPS];
    for (int g = 0; g < groups; g++) w[g] = NAME(load_weight)(weights[g], k, odd, dtype);
    for (int r = 0; r < rows; r++) {
        const vf one = NAME(set1)(((const float *)(x + r * x_stride))[k]);
        for (int g = 0; g < groups; g++) sums[r][g] = NAME(fma)(one, w[g], sums[r][g]);
    }
}

/* `groups` groups of outputs for `rows` rows, held in registers. */
INLINE void NAME(block)(const product *p, long group, int groups, long row, int rows, int dtype) {
    vf sums[6][GROUPS];
    const char *weights[GROUPS], *x = p->x + row * p->x_stride;
    const long in = p->w->in;
    for (int g = 0; g < groups; g++) weights[g] = (const char *)p->w->packed + (group + g) * p->group_bytes;
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) sums[r][g] = NAME(set1)(0.0f);
    long k = 0;
    for (; k + 2 <= in; k += 2) {
        NAME(step)(weights, x, p->x_stride, k, 0, groups, rows, sums, dtype);
        NAME(step)(weights, x, p->x_stride, k + 1, 1, groups, rows, sums, dtype);
    }
    if (k < in) NAME(step)(weights, x, p->x_stride, k, 0, groups, rows, sums, dtype);
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) NAME(write_outputs)(p, row + r, group + g, sums[r][g]);
}

/* As many sums as the registers hold: 32 of sixteen lanes, or 16 of eight. */
#if ISA == 512
#define SUMS_OF_SIX 4
#define SUMS_OF_TWO 4
#else
#define SUMS_OF_SIX 1
#define SUMS_OF_TWO 2
#endif
INLINE void NAME(rows_of)(const product *p, long group, int groups, long row, int rows, int together, int dtype) {
    for (int g = 0; g < groups; g += together) NAME(block)(p, group + g, together, row, rows, dtype);
}

INLINE void NAME(item)(const product *p, long group, int groups, int dtype) {
    long row = 0;
#define SIX (groups < SUMS_OF_SIX ? groups : SUMS_OF_SIX)
#define TWO (groups < SUMS_OF_TWO ? groups : SUMS_OF_TWO)
    for (; row + 6 <= p->rows; row += 6) NAME(rows_of)(p, group, groups, row, 6, SIX, dtype);
    if (row + 4 <= p->rows) { NAME(rows_of)(p, group, groups, row, 4, SIX, dtype); row += 4; }
    if (row + 2 <= p->rows) { NAME(rows_of)(p, group, groups, row, 2, TWO, dtype); row += 2; }
    if (row < p->rows) NAME(rows_of)(p, group, groups, row, 1, groups, dtype);
#undef SIX
#undef TWO
}

INLINE void NAME(outputs)(const product *p, long first, long last, int dtype) {
    for (long group = first * GROUPS; group < last * GROUPS && group < p->groups; group += GROUPS) {
        if (group + GROUPS <= p->groups) NAME(item)(p, group, GROUPS, dtype);
        else NAME(item)(p, group, GROUPS / 2, dtype);
    }
}

#define WORK(name, dtype) \
    static void NAME(name)(const void *job, long first, long last, int member) { \
        (void)member; \
        NAME(outputs)(job, first, last, dtype); \
    }
WORK(fma_float32, FLOAT32)
WORK(fma_bfloat16, BFLOAT16)
WORK(fma_float16, FLOAT16)

#undef WORK
#undef SUMS_OF_SIX
#undef SUMS_OF_TWO
#undef vf
#undef BOTH
#undef EACH
#undef NEAREST8
#undef NAME
#undef PASTE
#undef PASTE_
#undef INLINE
