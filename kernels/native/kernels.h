/* The kernels' bodies, included once per instruction set after lanes.h. `dtype` is a constant wherever these
 * are inlined, so its switches cost nothing. */

INLINE vf NAME(load)(const char *p, int dtype) {
    if (dtype == FLOAT32) return NAME(load32)((const float *)p);
    if (dtype == BFLOAT16) return NAME(loadbf)((const uint16_t *)p);
    return NAME(loadhf)((const uint16_t *)p);
}

/* Fixed tree over the sixteen lanes. */
INLINE float NAME(sum_lanes)(vf x) {
    float f[16];
    NAME(store32)(f, x);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) f[i] = f[i] + f[i + width];
    return f[0];
}

INLINE float NAME(max_lanes)(vf x) {
    float f[16];
    NAME(store32)(f, x);
    float best = f[0];
    for (int i = 1; i < 16; i++) best = f[i] > best ? f[i] : best;
    return best;
}

/* exp within 2 ulp on [-87, 88], clamped outside; Cephes' expf polynomial. */
INLINE vf NAME(exp)(vf x) {
    x = NAME(min)(NAME(max)(x, NAME(set1)(-87.0f)), NAME(set1)(88.0f));
    vf n = NAME(nearest)(NAME(mul)(x, NAME(set1)(1.44269504f)));
    vf r = NAME(fma)(n, NAME(set1)(-0.693359375f), x);
    r = NAME(fma)(n, NAME(set1)(2.12194440e-4f), r);
    vf p = NAME(set1)(1.9875691500e-4f);
    p = NAME(fma)(p, r, NAME(set1)(1.3981999507e-3f));
    p = NAME(fma)(p, r, NAME(set1)(8.3334519073e-3f));
    p = NAME(fma)(p, r, NAME(set1)(4.1665795894e-2f));
    p = NAME(fma)(p, r, NAME(set1)(1.6666665459e-1f));
    p = NAME(fma)(p, r, NAME(set1)(5.0000001201e-1f));
    p = NAME(fma)(p, NAME(mul)(r, r), r);
    return NAME(mul)(NAME(add)(p, NAME(set1)(1.0f)), NAME(power2)(n));
}

/* ---- attention ---------------------------------------------------------------------------------------------
 * One tile: up to ROWS (query, head) pairs of one sequence and one kv head. Pair r sees keys 0 .. seen[r] - 1.
 *   scores   lane = key; one chain of fused adds per pair over even dims, one over odd dims
 *   weights  exp(score - best); lanes of a running sum by key position modulo 16
 *   output   lane = dim; one fused add per key, in the order of positions
 * A pair's arithmetic is the same whatever other pairs are in the tile. */

#define ROWS 8
#define OUTPUT_ROWS 4

/* Blocks of one sequence lie far apart, which the processor's own prefetcher cannot guess: without this, four fifths
 * of a decode step's attention is waiting. */
INLINE void NAME(prefetch)(const char *from, long bytes) {
    for (long at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}
#define BLOCKS_AHEAD 4

INLINE void NAME(score_keys)(const attention_args *a, const char *keys, const float *const *q, float *const *scores,
                             int position, int rows, int dtype) {
    const int item = ITEM_BYTES(dtype);
    const long stride = (long)a->block_size * item;
    vf even[ROWS], odd[ROWS];
    for (int r = 0; r < rows; r++) even[r] = odd[r] = NAME(set1)(0.0f);
    for (int d = 0; d < a->head_dim; d += 2) {
        vf k0 = NAME(load)(keys + d * stride, dtype), k1 = NAME(load)(keys + (d + 1) * stride, dtype);
        for (int r = 0; r < rows; r++) {
            even[r] = NAME(fma)(NAME(set1)(q[r][d]), k0, even[r]);
            odd[r] = NAME(fma)(NAME(set1)(q[r][d + 1]), k1, odd[r]);
        }
    }
    for (int r = 0; r < rows; r++) {
        vf score = NAME(mul)(NAME(add)(even[r], odd[r]), NAME(set1)(a->scale));
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

/* Adds keys [from, to) of `columns` * 16 dims from `dim` on, for pairs 0 .. rows - 1. */
INLINE void NAME(mix_values)(const attention_args *a, const int32_t *table, long head_offset, float *const *weights,
                             vf (*sums)[4], int dim, int columns, int from, int to, int rows, int dtype) {
    const int item = ITEM_BYTES(dtype);
    int t = from;
    while (t < to) {
        const int block_end = (t / a->block_size + 1) * a->block_size;
        const int end = block_end < to ? block_end : to;
        const char *values = a->cache + table[t / a->block_size] * a->block_stride + a->value_offset + head_offset;
        if (dim == 0 && t / a->block_size + BLOCKS_AHEAD <= (to - 1) / a->block_size)
            NAME(prefetch)(a->cache + table[t / a->block_size + BLOCKS_AHEAD] * a->block_stride + a->value_offset +
                               head_offset, (long)a->head_dim * a->block_size * item);
        values += ((long)(t % a->block_size) * a->head_dim + dim) * item;
        for (; t < end; t++, values += (long)a->head_dim * item) {
            vf v[4];
            for (int c = 0; c < columns; c++) v[c] = NAME(load)(values + c * 16 * item, dtype);
            for (int r = 0; r < rows; r++) {
                vf w = NAME(set1)(weights[r][t]);
                for (int c = 0; c < columns; c++) sums[r][c] = NAME(fma)(w, v[c], sums[r][c]);
            }
        }
    }
}

INLINE void NAME(output_rows)(const attention_args *a, const int32_t *table, long head_offset, float *const *weights,
                              const int *seen, const float *totals, float *const *out, int columns, int dim, int rows,
                              int dtype) {
    vf sums[OUTPUT_ROWS][4];
    int shared = seen[0];
    for (int r = 0; r < rows; r++) {
        shared = seen[r] < shared ? seen[r] : shared;
        for (int c = 0; c < columns; c++) sums[r][c] = NAME(set1)(0.0f);
    }
    NAME(mix_values)(a, table, head_offset, weights, sums, dim, columns, 0, shared, rows, dtype);
    for (int r = 0; r < rows; r++) {
        /* The last few keys are not seen by all: each pair alone, so that nothing unseen is even multiplied. */
        NAME(mix_values)(a, table, head_offset, weights + r, sums + r, dim, columns, shared, seen[r], 1, dtype);
        vf inverse = NAME(set1)(totals[r]);
        for (int c = 0; c < columns; c++) NAME(store32)(out[r] + dim + 16 * c, NAME(divide)(sums[r][c], inverse));
    }
}

INLINE void NAME(output_columns)(const attention_args *a, const int32_t *table, long head_offset,
                                 float *const *weights, const int *seen, const float *totals, float *const *out,
                                 int dim, int columns, int rows, int dtype) {
#define OUTPUT(n, c) NAME(output_rows)(a, table, head_offset, weights, seen, totals, out, c, dim, n, dtype)
#define OUTPUT_OF(c) \
    { if (rows == 1) OUTPUT(1, c); else if (rows == 2) OUTPUT(2, c); else if (rows == 3) OUTPUT(3, c); else OUTPUT(4, c); }
    if (columns == 4) OUTPUT_OF(4) else OUTPUT_OF(1)
}

INLINE void NAME(attend_tile)(const attention_args *a, const int32_t *table, int kv_head, const float *const *q,
                              float *const *out, const int *seen, int rows, float *scratch, int dtype) {
    const int item = ITEM_BYTES(dtype);
    const long head_offset = (long)kv_head * a->head_dim * a->block_size * item;
    int longest = 0;
    float *scores[ROWS], totals[ROWS];
    for (int r = 0; r < rows; r++) {
        longest = seen[r] > longest ? seen[r] : longest;
        scores[r] = scratch + (long)r * a->scratch_stride;
    }
    const char *const first_key = a->cache + a->key_offset + head_offset;
    const char *const first_value = a->cache + a->value_offset + head_offset;
    const long bytes = (long)a->head_dim * a->block_size * item;
    const int last_block = (longest - 1) / a->block_size;
    for (int t = 0; t < longest; t += 16) {
        const int block = t / a->block_size;
        const char *keys = first_key + table[block] * a->block_stride + (long)(t % a->block_size) * item;
        if (t % a->block_size == 0) {
            if (block + BLOCKS_AHEAD <= last_block)
                NAME(prefetch)(first_key + table[block + BLOCKS_AHEAD] * a->block_stride, bytes);
            else
                NAME(prefetch)(first_value + table[0] * a->block_stride, bytes);
        }
        /* Few cases, and a remainder in parts: a copy for every count would take minutes to compile. */
#define SCORE(n, from) NAME(score_keys)(a, keys, q + (from), scores + (from), t, n, dtype)
        if (rows == ROWS) { SCORE(ROWS, 0); continue; }
        int r = 0;
        if (rows - r >= 4) { SCORE(4, 0); r = 4; }
        if (rows - r == 3) SCORE(3, r);
        else if (rows - r == 2) SCORE(2, r);
        else if (rows - r == 1) SCORE(1, r);
#undef SCORE
    }
    for (int r = 0; r < rows; r++) NAME(weigh)(scores[r], seen[r], &totals[r]);
    for (int r = 0; r < rows; r += OUTPUT_ROWS) {
        const int part = rows - r < OUTPUT_ROWS ? rows - r : OUTPUT_ROWS;
        for (int dim = 0, columns; dim < a->head_dim; dim += 16 * columns) {
            columns = a->head_dim - dim >= 64 ? 4 : 1;
            NAME(output_columns)(a, table, head_offset, scores + r, seen + r, totals + r, out + r, dim, columns, part,
                                 dtype);
        }
    }
}

static void NAME(attention_item)(const attention_args *a, long number, float *scratch) {
    int row = 0;
    while (number >= a->first_item[row + 1]) row++;
    number -= a->first_item[row];
    const int tiles = (int)((a->first_item[row + 1] - a->first_item[row]) / a->kv_heads);
    const int kv_head = (int)(number / tiles), group = a->heads / a->kv_heads;
    const int begin = (int)(number % tiles) * ROWS, pairs = a->counts[row] * group;
    const int rows = pairs - begin < ROWS ? pairs - begin : ROWS;
    const float *q[ROWS];
    float *out[ROWS];
    int seen[ROWS];
    for (int r = 0; r < rows; r++) {
        const int query = (begin + r) / group, head = kv_head * group + (begin + r) % group;
        const long place = ((long)(a->firsts[row] + query) * a->heads + head) * a->head_dim;
        q[r] = a->q + place;
        out[r] = a->out + place;
        seen[r] = a->starts[row] + query + 1;
    }
    const int32_t *table = a->tables + (long)row * a->table_width;
    if (a->dtype == FLOAT32) NAME(attend_tile)(a, table, kv_head, q, out, seen, rows, scratch, FLOAT32);
    else if (a->dtype == BFLOAT16) NAME(attend_tile)(a, table, kv_head, q, out, seen, rows, scratch, BFLOAT16);
    else NAME(attend_tile)(a, table, kv_head, q, out, seen, rows, scratch, FLOAT16);
}

/* ---- the small operations ------------------------------------------------------------------------------- */

/* row[0 .. size) in fp32 (padded with zeros to a multiple of 16) to its norm, rounded twice as the models do. */
INLINE void NAME(norm_row)(float *row, const float *weight, int size, float eps, int dtype) {
    vf even = NAME(set1)(0.0f), odd = NAME(set1)(0.0f);
    for (int i = 0; i < size; i += 32) {
        vf x = NAME(load32)(row + i), y = NAME(load32)(row + i + 16);
        even = NAME(fma)(x, x, even);
        odd = NAME(fma)(y, y, odd);
    }
    const float mean = NAME(sum_lanes)(NAME(add)(even, odd)) / (float)size;
    const float inverse = 1.0f / sqrtf(mean + eps);
    for (int i = 0; i < size; i++) row[i] = rounded(row[i] * inverse, dtype) * weight[i];
}

INLINE void NAME(silu_row)(float *gate, const float *up, int size) {
    const vf one = NAME(set1)(1.0f), zero = NAME(set1)(0.0f);
    for (int i = 0; i < size; i += 16) {
        vf g = NAME(load32)(gate + i);
        vf sigmoid_inverse = NAME(add)(one, NAME(exp)(NAME(sub)(zero, g)));
        NAME(store32)(gate + i, NAME(mul)(NAME(divide)(g, sigmoid_inverse), NAME(load32)(up + i)));
    }
}

INLINE void NAME(read_row)(float *to, const char *from, int size, int dtype) {
    const int item = ITEM_BYTES(dtype);
    int i = 0;
    for (; i + 16 <= size; i += 16) NAME(store32)(to + i, NAME(load)(from + (long)i * item, dtype));
    for (; i < size; i++) to[i] = read_one(from + (long)i * item, dtype);
    for (; i % 32; i++) to[i] = 0.0f;
}

INLINE void NAME(write_row)(char *to, const float *from, int size, int dtype) {
    if (dtype == FLOAT32) memcpy(to, from, (size_t)size * 4);
    else if (dtype == BFLOAT16)
        for (int i = 0; i < size; i++) ((uint16_t *)to)[i] = to_bfloat16(from[i]);
    else
        for (int i = 0; i < size; i++) ((uint16_t *)to)[i] = to_float16(from[i]);
}

INLINE void NAME(norm_rows)(const norm_args *a, float *row, float *other, int dtype) {
    const long bytes = (long)a->size * ITEM_BYTES(dtype);
    for (long t = 0; t < a->tokens; t++) {
        NAME(read_row)(row, a->x + t * bytes, a->size, dtype);
        if (a->residual) {
            NAME(read_row)(other, a->residual + t * bytes, a->size, dtype);
            for (int i = 0; i < a->size; i++) row[i] = rounded(row[i] + other[i], dtype);
            NAME(write_row)(a->residual + t * bytes, row, a->size, dtype);
        }
        NAME(norm_row)(row, a->weight, a->size, a->eps, dtype);
        NAME(write_row)(a->out + t * bytes, row, a->size, dtype);
    }
}

INLINE void NAME(silu_rows)(const norm_args *a, float *row, float *other, int dtype) {
    const long bytes = (long)a->size * ITEM_BYTES(dtype);
    for (long t = 0; t < a->tokens; t++) {
        NAME(read_row)(row, a->x + 2 * t * bytes, a->size, dtype);
        NAME(read_row)(other, a->x + (2 * t + 1) * bytes, a->size, dtype);
        NAME(silu_row)(row, other, a->size);
        NAME(write_row)(a->out + t * bytes, row, a->size, dtype);
    }
}

/* First half and second half of a head form the rotated pairs. */
INLINE void NAME(rotate_head)(float *x, const float *cosines, const float *sines, int half) {
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

INLINE void NAME(rope_rows)(const rope_args *a, float *row, int dtype) {
    const int dim = a->head_dim, item = ITEM_BYTES(dtype), half = dim / 2;
    const int size = (a->heads + 2 * a->kv_heads) * dim;
    for (long t = 0; t < a->tokens; t++) {
        const float *cosines = a->cosines + a->positions[t] * half, *sines = a->sines + a->positions[t] * half;
        const char *from = a->qkv + t * size * item;
        char *block = a->cache + a->blocks[t] * a->block_stride;
        for (int head = 0; head < a->heads + a->kv_heads; head++) {
            NAME(read_row)(row, from + (long)head * dim * item, dim, dtype);
            const float *weight = head < a->heads ? a->q_norm : a->k_norm;
            if (weight) {
                NAME(norm_row)(row, weight, dim, a->eps, dtype);
                for (int i = 0; i < dim; i++) row[i] = rounded(row[i], dtype);
            }
            NAME(rotate_head)(row, cosines, sines, half);
            if (head < a->heads) {
                memcpy(a->q + (t * a->heads + head) * dim, row, (size_t)dim * 4);
                continue;
            }
            char *keys = block + a->key_offset + (long)(head - a->heads) * dim * a->block_size * item;
            for (int i = 0; i < dim; i++)
                write_one(keys + ((long)i * a->block_size + a->offsets[t]) * item, row[i], dtype);
        }
        const char *values = from + (long)(a->heads + a->kv_heads) * dim * item;
        for (int head = 0; head < a->kv_heads; head++)
            memcpy(block + a->value_offset + ((long)head * a->block_size + a->offsets[t]) * dim * item,
                   values + (long)head * dim * item, (size_t)dim * item);
    }
}

#define FOR_DTYPE(function, ...) \
    if (a->dtype == FLOAT32) function(__VA_ARGS__, FLOAT32); \
    else if (a->dtype == BFLOAT16) function(__VA_ARGS__, BFLOAT16); \
    else function(__VA_ARGS__, FLOAT16);

static void NAME(norm_all)(const norm_args *a, float *row, float *other) { FOR_DTYPE(NAME(norm_rows), a, row, other) }
static void NAME(silu_all)(const norm_args *a, float *row, float *other) { FOR_DTYPE(NAME(silu_rows), a, row, other) }
static void NAME(rope_all)(const rope_args *a, float *row) { FOR_DTYPE(NAME(rope_rows), a, row) }

static const kernel_table NAME(table) = {NAME(attention_item), NAME(norm_all), NAME(silu_all), NAME(rope_all)};

#undef FOR_DTYPE
#undef OUTPUT
#undef OUTPUT_OF
#undef BLOCKS_AHEAD
#undef ROWS
#undef OUTPUT_ROWS
#undef vf
#undef BOTH
#undef EACH
#undef NEAREST8
#undef NAME
#undef PASTE
#undef PASTE_
#undef INLINE
