/* The kernel of attention for any dtype, included once per instruction set by variants.h.
 *
 * One tile: up to VECTOR_PAIRS (query, head) pairs of one sequence and one kv head. Pair r sees keys 0 .. seen[r] - 1.
 *   scores   lane = key; one chain of fused adds per pair over even dims, one over odd dims
 *   weights  exp(score - best); lanes of a running sum by key position modulo 16
 *   output   lane = dim; one fused add per key, in the order of positions
 * A pair's arithmetic is the same whatever other pairs are in the tile. */

#ifndef VECTOR_PAIRS
#define VECTOR_PAIRS 8
#define BLOCKS_AHEAD 4
#endif
/* What the registers hold: 32 of sixteen lanes, or 16 of eight. With one sum more than that each is in memory, and a
 * chain of adds waits for it every time. */
#if ISA == 256
#define SCORE_PAIRS 3
#define OUTPUT_PAIRS 3
#define OUTPUT_COLUMNS 2
/* What `place` leads to is loaded after the product that gave `sum`: twelve sums leave registers for one operand of each
 * kind, and compilers load all of a turn's before they use the first. */
#define LATER(place, sum) __asm__("" : "+r"(place), "+x"((sum).a))
#else
#define SCORE_PAIRS VECTOR_PAIRS
#define OUTPUT_PAIRS 4
#define OUTPUT_COLUMNS 4
#define LATER(place, sum) (void)0
#endif

/* Blocks of one sequence lie far apart, which the processor's own prefetcher cannot guess: without this, four fifths
 * of a decode step's attention is waiting. Line by line beside the arithmetic: a block at once fills the processor's
 * room for lines that are on their way, and nothing goes on meanwhile. */
#define ASK(line) __builtin_prefetch(line, 0, 2)

/* Scores of 16 keys; `stride` bytes lie between two dims, in pairs between two pairs of dims. `ahead`: what is wanted
 * soon and lies alike; NULL: nothing. */
INLINE void NAME(score_keys)(const char *keys, const char *ahead, long stride, const float *const *q,
                             float *const *scores, int position, int head_dim, float scale, int rows, int dtype) {
    vf even[VECTOR_PAIRS], odd[VECTOR_PAIRS];
    for (int r = 0; r < rows; r++) even[r] = odd[r] = NAME(set1)(0.0f);
    for (int d = 0; d < head_dim; d += 2) {
        const char *key = keys + (IN_PAIRS(dtype) ? d / 2 : d) * stride;
        if (ahead) ASK(ahead + (key - keys));
        vf k = IN_PAIRS(dtype) ? NAME(first_of_pairs)((const uint16_t *)key) : NAME(load)(key, dtype);
        for (int r = 0; r < rows; r++) even[r] = NAME(fma)(NAME(set1)(q[r][d]), k, even[r]);
        if (!IN_PAIRS(dtype)) {
            key += stride;
            if (ahead) ASK(ahead + (key - keys));
        }
        LATER(key, even[rows - 1]);
        k = IN_PAIRS(dtype) ? NAME(second_of_pairs)((const uint16_t *)key) : NAME(load)(key, dtype);
        for (int r = 0; r < rows; r++) odd[r] = NAME(fma)(NAME(set1)(q[r][d + 1]), k, odd[r]);
    }
    for (int r = 0; r < rows; r++) {
        vf score = NAME(mul)(NAME(add)(even[r], odd[r]), NAME(set1)(scale));
        NAME(store32)(scores[r] + position, score);
    }
}

INLINE void NAME(weigh)(float *scores, int seen, float *total) {
    vf best = NAME(set1)(-INFINITY);
    for (int t = 0; t < seen; t += 16)
        best = NAME(max)(best, NAME(first)(NAME(load32)(scores + t), seen - t, -INFINITY));
    const vf top = NAME(set1)(NAME(max_lanes)(best));
    vf sum = NAME(set1)(0.0f);
    for (int t = 0; t < seen; t += 16) {
        vf weight = NAME(exp)(NAME(sub)(NAME(load32)(scores + t), top));
        weight = NAME(first)(weight, seen - t, 0.0f);
        NAME(store32)(scores + t, weight);
        sum = NAME(add)(sum, weight);
    }
    *total = NAME(sum_lanes)(sum);
}

/* What one tile reads: all blocks of one sequence, one layer and one kv head. */
typedef struct {
    const int32_t *table;
    const char *keys, *values; /* of block 0 of the cache */
    long block_stride;
    int block_size, head_dim;
} NAME(source);

/* Adds keys [from, to) of `columns` * 16 dims from `dim` on, for pairs 0 .. rows - 1. */
INLINE void NAME(mix_values)(const NAME(source) *s, float *const *weights, vf (*mixed)[OUTPUT_COLUMNS], int dim, int columns,
                             int from, int to, int rows, int dtype) {
    const int item = ITEM_BYTES(dtype);
    const long row_bytes = (long)s->head_dim * item, pair_bytes = 2 * row_bytes;
    vf sums[OUTPUT_PAIRS][OUTPUT_COLUMNS]; /* with an address they would be in memory */
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sums[r][c] = mixed[r][c];
    int t = from;
    while (t < to) {
        const int block = t / s->block_size, block_end = (block + 1) * s->block_size;
        const int end = block_end < to ? block_end : to;
        const char *values = s->values + s->table[block] * s->block_stride;
        const char *ahead = NULL;
        if (dim == 0 && block + BLOCKS_AHEAD <= (to - 1) / s->block_size)
            ahead = s->values + s->table[block + BLOCKS_AHEAD] * s->block_stride;
        for (int at = t - block * s->block_size; t < end; t++, at++) {
            const int both = ISA != 256 && IN_PAIRS(dtype) && at % 2 == 0 && t + 1 < end;
            for (long line = 0; ahead && line < row_bytes << both; line += 64) ASK(ahead + at * row_bytes + line);
#if ISA == 256
            const char *value = IN_PAIRS(dtype) ? values + at / 2 * pair_bytes : values + at * row_bytes;
            long key = t;
            for (int c = 0; c < columns; c++) {
                const char *from = value + (dim + 16 * c) * (IN_PAIRS(dtype) ? 2 * item : item);
                const uint16_t *pair = (const uint16_t *)from;
                const vf v = !IN_PAIRS(dtype) ? NAME(load)(from, dtype)
                             : at % 2         ? NAME(second_of_pairs)(pair)
                                              : NAME(first_of_pairs)(pair);
                for (int r = 0; r < rows; r++) sums[r][c] = NAME(fma)(NAME(set1)(weights[r][key]), v, sums[r][c]);
                LATER(key, sums[rows - 1][c]);
                LATER(value, sums[rows - 1][c]);
            }
#else
            vf v[OUTPUT_COLUMNS], next[OUTPUT_COLUMNS];
            for (int c = 0; c < columns; c++) {
                if (IN_PAIRS(dtype)) {
                    const uint16_t *pair = (const uint16_t *)(values + at / 2 * pair_bytes) + 2 * (dim + 16 * c);
                    v[c] = at % 2 ? NAME(second_of_pairs)(pair) : NAME(first_of_pairs)(pair);
                    if (both) next[c] = NAME(second_of_pairs)(pair);
                } else v[c] = NAME(load)(values + at * row_bytes + (dim + 16 * c) * item, dtype);
            }
            for (int r = 0; r < rows; r++) {
                vf w = NAME(set1)(weights[r][t]);
                for (int c = 0; c < columns; c++) sums[r][c] = NAME(fma)(w, v[c], sums[r][c]);
            }
            if (!both) continue;
            t++, at++;
            for (int r = 0; r < rows; r++) {
                vf w = NAME(set1)(weights[r][t]);
                for (int c = 0; c < columns; c++) sums[r][c] = NAME(fma)(w, next[c], sums[r][c]);
            }
#endif
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) mixed[r][c] = sums[r][c];
}

INLINE void NAME(output_rows)(const NAME(source) *s, float *const *weights, const int *seen, const float *totals,
                              char *const *out, int columns, int dim, int rows, int dtype) {
    vf sums[OUTPUT_PAIRS][OUTPUT_COLUMNS];
    int shared = seen[0];
    for (int r = 0; r < rows; r++) {
        shared = seen[r] < shared ? seen[r] : shared;
        for (int c = 0; c < columns; c++) sums[r][c] = NAME(set1)(0.0f);
    }
    NAME(mix_values)(s, weights, sums, dim, columns, 0, shared, rows, dtype);
    for (int r = 0; r < rows; r++) {
        /* The last few keys are not seen by all: each pair alone, so that nothing unseen is even multiplied. */
        NAME(mix_values)(s, weights + r, sums + r, dim, columns, shared, seen[r], 1, dtype);
        vf total = NAME(set1)(totals[r]);
        for (int c = 0; c < columns; c++)
            NAME(store)(out[r] + (dim + 16 * c) * ITEM_BYTES(dtype), NAME(divide)(sums[r][c], total), dtype);
    }
}

INLINE void NAME(output_columns)(const NAME(source) *s, float *const *weights, const int *seen, const float *totals,
                                 char *const *out, int dim, int columns, int rows, int dtype) {
#define OUTPUT(n, c) NAME(output_rows)(s, weights, seen, totals, out, c, dim, n, dtype)
#define OUTPUT_OF(c) \
    { if (rows == 1) OUTPUT(1, c); else if (rows == 2) OUTPUT(2, c); else OUTPUT_OF_MORE(c) }
#if OUTPUT_PAIRS > 3
#define OUTPUT_OF_MORE(c) { if (rows == 3) OUTPUT(3, c); else OUTPUT(4, c); }
#else
#define OUTPUT_OF_MORE(c) OUTPUT(3, c);
#endif
    if (columns == OUTPUT_COLUMNS) OUTPUT_OF(OUTPUT_COLUMNS) else OUTPUT_OF(1)
#undef OUTPUT
#undef OUTPUT_OF
#undef OUTPUT_OF_MORE
}

/* Few cases of row counts, and a remainder in parts: a copy for every count would take minutes to compile. */
INLINE void NAME(score_rows)(const char *keys, const char *ahead, long stride, const float *const *q,
                             float *const *scores, int position, int head_dim, float scale, int rows, int dtype) {
#define SCORE(n, from) \
    NAME(score_keys)(keys, r ? NULL : ahead, stride, q + (from), scores + (from), position, head_dim, scale, n, dtype)
    int r = 0;
#if SCORE_PAIRS == VECTOR_PAIRS
    if (rows == VECTOR_PAIRS) { SCORE(VECTOR_PAIRS, 0); return; }
    if (rows >= 4) { SCORE(4, 0); r = 4; }
#else
    for (; rows - r > 4; r += SCORE_PAIRS) SCORE(SCORE_PAIRS, r);
    if (rows - r == 4) { SCORE(2, r); r += 2; }
#endif
    if (rows - r == 3) SCORE(3, r);
    else if (rows - r == 2) SCORE(2, r);
    else if (rows - r == 1) SCORE(1, r);
#undef SCORE
}

INLINE void NAME(attend_pairs)(const attention_tile *tile, int dtype) {
    const attention_args *a = tile->args;
    const int item = ITEM_BYTES(dtype), rows = tile->pairs;
    const long bytes = (long)a->head_dim * a->block_size * item, stride = bytes / a->head_dim * (IN_PAIRS(dtype) ? 2 : 1);
    const char *first = a->cache + tile->kv_head * bytes;
    const NAME(source) source = {tile->table, first + a->key_offset, first + a->value_offset, a->block_stride,
                                 a->block_size, a->head_dim};
    const float scale = (float)(1.0 / sqrt((double)a->head_dim));
    const float *q[VECTOR_PAIRS];
    char *out[VECTOR_PAIRS];
    float *scores[VECTOR_PAIRS], totals[VECTOR_PAIRS];
    int seen[VECTOR_PAIRS], longest = 0;
    for (int r = 0; r < rows; r++) {
        q[r] = a->q + place_of(tile, r);
        out[r] = a->out + place_of(tile, r) * item;
        seen[r] = seen_by(tile, r);
        longest = seen[r] > longest ? seen[r] : longest;
        scores[r] = tile->scratch + r * tile->row_stride;
    }
    const int last_block = (longest - 1) / a->block_size;
    for (int t = 0; t < longest; t += 16) {
        const int block = t / a->block_size, at = t % a->block_size;
        const int past = block + BLOCKS_AHEAD - last_block - 1; /* the keys: blocks of values */
        const char *ahead = NULL;
        if (past < 0) ahead = source.keys + tile->table[block + BLOCKS_AHEAD] * a->block_stride;
        else if (past <= last_block) ahead = source.values + tile->table[past] * a->block_stride;
        if (ahead) ahead += at * item * (IN_PAIRS(dtype) ? 2 : 1);
        const char *keys = source.keys + tile->table[block] * a->block_stride + at * item * (IN_PAIRS(dtype) ? 2 : 1);
        NAME(score_rows)(keys, ahead, stride, q, scores, t, a->head_dim, scale, rows, dtype);
    }
    for (int r = 0; r < rows; r++) NAME(weigh)(scores[r], seen[r], &totals[r]);
    for (int r = 0, part; r < rows; r += part) {
        const int parts = (rows - r + OUTPUT_PAIRS - 1) / OUTPUT_PAIRS;
        part = (rows - r + parts - 1) / parts;
        for (int dim = 0, columns; dim < a->head_dim; dim += 16 * columns) {
            columns = a->head_dim - dim >= 16 * OUTPUT_COLUMNS ? OUTPUT_COLUMNS : 1;
            NAME(output_columns)(&source, scores + r, seen + r, totals + r, out + r, dim, columns, part, dtype);
        }
    }
}

static void NAME(attend)(const attention_tile *tile) {
    const int dtype = tile->args->dtype;
    if (dtype == FLOAT32) NAME(attend_pairs)(tile, FLOAT32);
    else if (dtype == BFLOAT16) NAME(attend_pairs)(tile, BFLOAT16);
    else NAME(attend_pairs)(tile, FLOAT16);
}

#undef SCORE_PAIRS
#undef OUTPUT_PAIRS
#undef OUTPUT_COLUMNS
#undef LATER
#undef ASK
