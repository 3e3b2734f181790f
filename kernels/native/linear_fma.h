/* Products in fp32, once per instruction set. */

#if ISA
/* ---- sums in registers, one fused multiply-add per input feature ---- */

/* Sixteen outputs of input feature k of a group; `odd` is k % 2, known when compiled. */
INLINE vf NAME(load_weight)(const char *group, long k, int odd, int dtype) {
    if (dtype != BFLOAT16) return NAME(load)(group + k * LANES * ITEM_BYTES(dtype), dtype);
    const uint16_t *pairs = (const uint16_t *)group + k / 2 * LANES * 2;
    return odd ? NAME(second_of_pairs)(pairs) : NAME(first_of_pairs)(pairs);
}

/* Adds the bias, rounds, writes the outputs of one group that exist. Called, so that the many cases compile fast; with
 * an address, because a sum that is itself an argument lives in memory all the time with AVX2, which halves the speed. */
static __attribute__((noinline)) void NAME(write_group)(const product *p, long row, long group, const float *sums) {
    vf sum = NAME(load32)(sums);
    const int outputs = real_outputs(p, group), item = ITEM_BYTES(p->out_dtype);
    char *to = p->y + (row * p->w->out + group * LANES) * item, rounded_sums[LANES * 4];
    float bias[LANES] = {0};
    if (p->w->bias) {
        memcpy(bias, p->w->bias + group * LANES, (size_t)outputs * 4);
        sum = NAME(add)(sum, NAME(load32)(bias));
    }
    if (outputs == LANES) {
        NAME(store)(to, sum, p->out_dtype);
    } else {
        NAME(store)(rounded_sums, sum, p->out_dtype);
        memcpy(to, rounded_sums, (size_t)(outputs * item));
    }
}

#define ZERO(r) vf s##r##0 = NAME(set1)(0.0f), s##r##1 = s##r##0, s##r##2 = s##r##0, s##r##3 = s##r##0;
#define STEP(r) \
    if (rows > r) { \
        const vf one = NAME(set1)(((const float *)(x + r * p->x_stride))[k]); \
        s##r##0 = NAME(fma)(one, w0, s##r##0); \
        if (groups > 1) s##r##1 = NAME(fma)(one, w1, s##r##1); \
        if (groups > 2) { \
            s##r##2 = NAME(fma)(one, w2, s##r##2); \
            s##r##3 = NAME(fma)(one, w3, s##r##3); \
        } \
    }
#define WEIGHT(g, odd) NAME(load_weight)(weights + (g) * p->group_bytes, k, odd, dtype)
/* Eight lanes multiply three rows as slowly as memory gives their weights, and the processor's own prefetcher is not far
 * enough ahead to have both at once: a step of six rows took the sum. With fewer rows it is, and asking costs. */
#define AHEAD 1024
#define ASK(g, odd) \
    if (ISA == 256 && rows > 2 && (!(odd) || dtype == FLOAT32)) \
        __builtin_prefetch(weights + (g) * p->group_bytes + k * LANES * ITEM_BYTES(dtype) + AHEAD);
#define FEATURE(odd) \
    { \
        ASK(0, odd) \
        if (groups > 1) { ASK(1, odd) } \
        if (groups > 2) { ASK(2, odd) ASK(3, odd) } \
        const vf w0 = WEIGHT(0, odd), w1 = groups > 1 ? WEIGHT(1, odd) : w0; \
        const vf w2 = groups > 2 ? WEIGHT(2, odd) : w0, w3 = groups > 2 ? WEIGHT(3, odd) : w0; \
        (void)w1, (void)w2, (void)w3; \
        FOR_ROWS(STEP) \
        k++; \
    }
#define WRITE_GROUP(r, g) \
    NAME(store32)(sums, s##r##g); \
    NAME(write_group)(p, row + r, group + g, sums);
#define WRITE(r) \
    if (rows > r) { \
        WRITE_GROUP(r, 0) \
        if (groups > 1) { WRITE_GROUP(r, 1) } \
        if (groups > 2) { \
            WRITE_GROUP(r, 2) \
            WRITE_GROUP(r, 3) \
        } \
    }

/* One, two or four groups of outputs for `rows` rows, held in registers; `weights` are those of the first group. */
INLINE void NAME(block)(
    const product *p, const char *weights, long group, int groups, long row, int rows, int dtype) {
    const char *x = p->x + row * p->x_stride;
    const long even = p->w->in / 2 * 2;
    FOR_ROWS(ZERO)
    long k = 0;
    while (k < even) {
        FEATURE(0)
        FEATURE(1)
    }
    if (k < p->w->in) FEATURE(0)
    float sums[LANES];
    FOR_ROWS(WRITE)
}
#undef ZERO
#undef STEP
#undef WEIGHT
#undef FEATURE
#undef ASK
#undef AHEAD
#undef WRITE
#undef WRITE_GROUP

/* As many sums as the registers hold: 32 of sixteen lanes, or 16 of eight. */
#if ISA == 512
#define SUMS_OF_SIX 4
#define SUMS_OF_TWO 4
#else
#define SUMS_OF_SIX 1
#define SUMS_OF_TWO 2
#endif
INLINE void NAME(rows_of)(const product *p, long group, int groups, long row, int rows, int together, int dtype) {
    const char *weights = (const char *)p->w->packed + group * p->group_bytes;
    for (int g = 0; g < groups; g += together)
        NAME(block)(p, weights + g * p->group_bytes, group + g, together, row, rows, dtype);
}

#if ISA == 256
/* Eight lanes leave no register to widen weights in beside twelve sums: those of a group are widened once for all
 * rows. Returns the row after the last of whole blocks. */
#define WORTH_WIDENING 24
INLINE long NAME(wide_item)(const product *p, long group, int groups, int dtype, char *wide) {
    long row = 0;
    for (int g = 0; g < groups; g++) {
        const char *weights = (const char *)p->w->packed + (group + g) * p->group_bytes;
        for (long k = 0; k < p->w->in; k++)
            NAME(store32)((float *)wide + k * LANES, NAME(load_weight)(weights, k, (int)(k % 2), dtype));
        for (row = 0; row + 6 <= p->rows; row += 6) NAME(block)(p, wide, group + g, 1, row, 6, FLOAT32);
    }
    return row;
}
#endif

INLINE void NAME(item)(const product *p, long group, int groups, long row, int dtype) {
#define SIX (groups < SUMS_OF_SIX ? groups : SUMS_OF_SIX)
#define TWO (groups < SUMS_OF_TWO ? groups : SUMS_OF_TWO)
    /* Passes over the weights of a work item, as even as can be: a last one of one or two rows is all reading. */
    while (row < p->rows) {
        const long left = p->rows - row, passes = (left + 5) / 6;
        const int rows = (int)((left + passes - 1) / passes);
        if (rows == 6) NAME(rows_of)(p, group, groups, row, 6, SIX, dtype);
        else if (rows == 5) NAME(rows_of)(p, group, groups, row, 5, SIX, dtype);
        else if (rows == 4) NAME(rows_of)(p, group, groups, row, 4, SIX, dtype);
        else if (rows == 3) NAME(rows_of)(p, group, groups, row, 3, SIX, dtype);
        else if (rows == 2) NAME(rows_of)(p, group, groups, row, 2, TWO, dtype);
        else NAME(rows_of)(p, group, groups, row, 1, groups, dtype);
        row += rows;
    }
#undef SIX
#undef TWO
}

#undef SUMS_OF_SIX
#undef SUMS_OF_TWO
#else
/* ---- plain C: rows four at a time, so that a weight is widened once for all of them ---- */

#define PLAIN_ROWS 4

ALWAYS void NAME(block)(const product *p, long group, long row, long rows, int dtype) {
    const char *weight = (const char *)p->w->packed + group * p->group_bytes;
    const int outputs = real_outputs(p, group), item = ITEM_BYTES(p->out_dtype);
    float sums[PLAIN_ROWS][LANES] = {{0}}, wide[LANES];
    for (long k = 0; k < p->w->in; k++) {
        for (long o = 0; o < LANES; o++) {
            const long at = dtype == BFLOAT16 ? (k / 2 * LANES + o) * 2 + k % 2 : k * LANES + o;
            wide[o] = read_one(weight + at * ITEM_BYTES(dtype), dtype);
        }
        for (long r = 0; r < rows; r++) {
            const float x = ((const float *)(p->x + (row + r) * p->x_stride))[k];
            for (int o = 0; o < LANES; o++) sums[r][o] += x * wide[o];
        }
    }
    for (long r = 0; r < rows; r++)
        for (long o = 0; o < outputs; o++) {
            const long output = group * LANES + o;
            const float sum = sums[r][o] + (p->w->bias ? p->w->bias[output] : 0.0f);
            write_one(p->y + ((row + r) * p->w->out + output) * item, sum, p->out_dtype);
        }
}

ALWAYS void NAME(item)(const product *p, long group, int groups, long row, int dtype) {
    for (int g = 0; g < groups; g++)
        for (long first = row; first < p->rows; first += PLAIN_ROWS)
            NAME(block)(p, group + g, first, p->rows - first < PLAIN_ROWS ? p->rows - first : PLAIN_ROWS, dtype);
}
#undef PLAIN_ROWS
#endif

ALWAYS void NAME(outputs)(const product *p, long first, long last, int dtype) {
#if ISA == 256
    char *wide = NULL; /* without memory for it, the same bits come slower */
    if (dtype != FLOAT32 && p->rows >= WORTH_WIDENING) wide = aligned_alloc(64, (size_t)p->w->in * LANES * 4);
#endif
    for (long group = first * GROUPS; group < last * GROUPS && group < p->groups; group += GROUPS) {
        long row = 0;
        const int groups = group + GROUPS <= p->groups ? GROUPS : GROUPS / 2;
#if ISA == 256
        if (wide) row = NAME(wide_item)(p, group, groups, dtype, wide);
#endif
        if (groups == GROUPS) NAME(item)(p, group, GROUPS, row, dtype);
        else NAME(item)(p, group, GROUPS / 2, row, dtype);
    }
#if ISA == 256
    free(wide);
#endif
}

#define WORK(name, dtype) \
    static void NAME(name)(const void *job, long first, long last, int member) { \
        (void)member; \
        NAME(outputs)(job, first, last, dtype); \
    }
WORK(float32_rows, FLOAT32)
WORK(bfloat16_rows, BFLOAT16)
WORK(float16_rows, FLOAT16)

#undef WORK
