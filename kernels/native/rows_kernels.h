/* The small operations for one range of tokens, included once per instruction set by variants.h. */

/* x[0 .. size) to its norm, rounded to `to_dtype` twice as the models do; `to` may be x. Sums: one of even and one of odd lanes' 16. */
INLINE void NAME(norm_row)(char *to, const char *x, const float *weight, int size, float eps, int dtype, int to_dtype) {
    const int item = ITEM_BYTES(dtype);
    vf even = NAME(set1)(0.0f), odd = NAME(set1)(0.0f);
    for (int i = 0; i < size; i += 32) {
        vf a = NAME(load_some)(x + (long)i * item, size - i, dtype);
        even = NAME(fma)(a, a, even);
        if (i + 16 >= size) break;
        vf b = NAME(load_some)(x + (long)(i + 16) * item, size - i - 16, dtype);
        odd = NAME(fma)(b, b, odd);
    }
    const float mean = NAME(sum_lanes)(NAME(add)(even, odd)) / (float)size;
    const vf inverse = NAME(set1)(1.0f / sqrtf(mean + eps));
    for (int i = 0; i < size; i += 16) {
        vf normed = NAME(rounded)(NAME(mul)(NAME(load_some)(x + (long)i * item, size - i, dtype), inverse), to_dtype);
        normed = NAME(mul)(normed, NAME(load_some)((const char *)(weight + i), size - i, FLOAT32));
        if (dtype != to_dtype) normed = NAME(rounded)(normed, to_dtype);
        NAME(store_some)(to + (long)i * item, normed, size - i, dtype);
    }
}

INLINE void NAME(norm_range)(const norm_args *a, long first, long last, int dtype) {
    const int item = ITEM_BYTES(dtype);
    const long bytes = (long)a->size * item;
    for (long t = first; t < last; t++) {
        const char *x = a->x + t * bytes;
        char *total = a->residual + t * bytes;
        for (int i = 0; a->residual && i < a->size; i += 16) {
            const int count = a->size - i;
            vf sum = NAME(add)(NAME(load_some)(x + (long)i * item, count, dtype),
                               NAME(load_some)(total + (long)i * item, count, dtype));
            NAME(store_some)(total + (long)i * item, sum, count, dtype);
        }
        NAME(norm_row)(a->out + t * bytes, a->residual ? total : x, a->weight, a->size, a->eps, dtype, dtype);
    }
}

INLINE void NAME(silu_range)(const silu_args *a, long first, long last, int dtype) {
    const int item = ITEM_BYTES(dtype);
    const vf one = NAME(set1)(1.0f), zero = NAME(set1)(0.0f);
    for (long t = first; t < last; t++) {
        const char *gates = a->x + 2 * t * a->size * item, *ups = gates + (long)a->size * item;
        char *out = a->out + t * a->size * item;
        for (int i = 0; i < a->size; i += 16) {
            const int count = a->size - i;
            vf gate = NAME(load_some)(gates + (long)i * item, count, dtype);
            vf up = NAME(load_some)(ups + (long)i * item, count, dtype);
            vf sigmoid_inverse = NAME(add)(one, NAME(exp)(NAME(sub)(zero, gate)));
            NAME(store_some)(out + (long)i * item, NAME(mul)(NAME(divide)(gate, sigmoid_inverse), up), count, dtype);
        }
    }
}

/* First half and second half of a head form the rotated pairs. */
INLINE void NAME(rotate_head)(float *x, const float *cosines, const float *sines, int half) {
    int i = 0;
    for (; i + 16 <= half; i += 16) {
        vf a = NAME(load32)(x + i), b = NAME(load32)(x + i + half);
        vf c = NAME(load32)(cosines + i), s = NAME(load32)(sines + i);
        NAME(store32)(x + i, NAME(sub)(NAME(mul)(a, c), NAME(mul)(b, s)));
        NAME(store32)(x + i + half, NAME(add)(NAME(mul)(b, c), NAME(mul)(a, s)));
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

/* One token's key and value of one kv head to their place `at` in a block. */
INLINE void NAME(store_head)(char *keys, char *values, const float *k, const char *v, int dim, int block_size, long at,
                             int dtype) {
    if (!IN_PAIRS(dtype)) {
        const int item = ITEM_BYTES(dtype);
        for (int i = 0; i < dim; i++) write_one(keys + ((long)i * block_size + at) * item, k[i], dtype);
        memcpy(values + at * dim * item, v, (size_t)dim * item);
        return;
    }
    uint16_t *value_pairs = (uint16_t *)values + at / 2 * 2 * dim + at % 2;
    for (int i = 0; i < dim; i += 16) {
        uint16_t rounded[16];
        NAME(storebf)(rounded, NAME(load32)(k + i));
        for (int j = 0; j < 16; j += 2)
            memcpy(keys + ((long)(i + j) / 2 * block_size + at) * 4, rounded + j, 4);
        for (int j = 0; j < 16; j++) value_pairs[2 * (i + j)] = ((const uint16_t *)v)[i + j];
    }
}

INLINE void NAME(rope_range)(const rope_args *a, long first, long last, int dtype) {
    const int dim = a->head_dim, item = ITEM_BYTES(dtype), half = dim / 2;
    const long row_bytes = (long)(a->heads + 2 * a->kv_heads) * dim * item, head_bytes = (long)dim * item;
    for (long t = first; t < last; t++) {
        const float *cosines = a->cosines + a->positions[t] * half, *sines = a->sines + a->positions[t] * half;
        const char *from = a->qkv + t * row_bytes;
        char *block = a->cache + a->blocks[t] * a->block_stride;
        for (int head = 0; head < a->heads + a->kv_heads; head++) {
            float key[dim], *to = head < a->heads ? a->q + (t * a->heads + head) * dim : key;
            const float *weight = head < a->heads ? a->q_norm : a->k_norm;
            for (int i = 0; i < dim; i += 16) NAME(store32)(to + i, NAME(load)(from + head * head_bytes + i * item, dtype));
            if (weight) NAME(norm_row)((char *)to, (const char *)to, weight, dim, a->eps, FLOAT32, dtype);
            NAME(rotate_head)(to, cosines, sines, half);
            if (head < a->heads) continue;
            const long place = (head - a->heads) * head_bytes * a->block_size;
            NAME(store_head)(block + a->key_offset + place, block + a->value_offset + place, key,
                             from + (head + a->kv_heads) * head_bytes, dim, a->block_size, a->offsets[t], dtype);
        }
    }
}

#define FOR_DTYPE(function) \
    const int dtype = job->dtype; \
    if (dtype == FLOAT32) function(job, first, last, FLOAT32); \
    else if (dtype == BFLOAT16) function(job, first, last, BFLOAT16); \
    else function(job, first, last, FLOAT16);

static void NAME(norm)(const norm_args *job, long first, long last) { FOR_DTYPE(NAME(norm_range)) }
static void NAME(silu)(const silu_args *job, long first, long last) { FOR_DTYPE(NAME(silu_range)) }
static void NAME(rope)(const rope_args *job, long first, long last) { FOR_DTYPE(NAME(rope_range)) }
#undef FOR_DTYPE
