/* The small operations of a layer: norms, the gate, rotary embedding with the cache write. Each token by itself. */
#ifndef KVFERRY_ROWS_H
#define KVFERRY_ROWS_H

#include <stdint.h>

/* out = norm of x, or with a residual of x + residual, which is written back. All [tokens, size] in dtype. */
typedef struct {
    const char *x;
    char *residual, *out; /* residual may be NULL */
    const float *weight;
    long tokens;
    int size, dtype;
    float eps;
} norm_args;

/* out [tokens, size] = silu(gate) * up of x [tokens, gate then up]. */
typedef struct {
    const char *x;
    char *out;
    long tokens;
    int size, dtype;
} silu_args;

/* Norms (where given) and rotates q and k, writes k and v to the cache (see attention.h), q to q. */
typedef struct {
    const char *qkv; /* [tokens, (heads + 2 * kv_heads) * head_dim] in dtype */
    float *q;        /* [tokens, heads, head_dim] */
    char *cache;
    long block_stride, key_offset, value_offset; /* bytes */
    const float *q_norm, *k_norm;                /* [head_dim], or NULL */
    const float *cosines, *sines;                /* [positions, head_dim / 2] */
    const int64_t *positions, *blocks, *offsets; /* [tokens] */
    long tokens;
    int heads, kv_heads, head_dim, block_size, dtype;
    float eps;
} rope_args;

void norm_rows(const norm_args *a, int threads);
void silu_rows(const silu_args *a, int threads);
void rope_rows(const rope_args *a, int threads);

#endif
