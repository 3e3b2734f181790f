/* Causal attention of a step's tokens over the paged cache, keys and values as they lie.
 *
 * A block holds, per layer and kv head, keys `[head_dim, block_size]` and values `[block_size, head_dim]`. In bf16
 * two neighbours of the first dimension lie together (`[first / 2, second, 2]`): so a matrix unit takes them. */

#ifndef KVFERRY_ATTENTION_H
#define KVFERRY_ATTENTION_H

#include <stdint.h>

#define IN_PAIRS(dtype) ((dtype) == BFLOAT16)

typedef struct {
    const float *q; /* [tokens, heads, head_dim] */
    char *out;      /* the same shape, in dtype */
    const char *cache;
    long block_stride, key_offset, value_offset; /* bytes; the offsets choose the layer */
    const int32_t *tables;                       /* blocks, row by row */
    long table_stride;                           /* items */
    const int64_t *slots;                        /* row r has table slots[r]; NULL: table r */
    const int32_t *starts, *counts, *firsts;     /* [rows], see StepLayout */
    int rows, heads, kv_heads, head_dim, block_size, dtype;
} attention_args;

/* Memory kept between calls; zero at first. */
typedef struct {
    long *first_item; /* [rows + 1] */
    float *scratch;
    long rows, scratch_floats;
    long items, member_stride, row_stride; /* of the call it was prepared for; strides in floats */
    int threads;
} attention_space;

/* Plans a call and makes room; layers with equal rows share it. 0 where there was no memory. */
int attention_prepare(attention_space *space, const attention_args *a, int threads);
void attention_run(const attention_space *space, const attention_args *a);
void attention_release(attention_space *space);

/* ---- between attention.c and attention_amx.c */

/* Pairs of (query, head) that share a kv head, at most a tile of them. */
typedef struct {
    const attention_args *args;
    const int32_t *table;
    long row_stride; /* of `scratch`: one row of scores per pair, then ATTENTION_EXTRA(head_dim) floats */
    float *scratch;
    int kv_head, first_pair, pairs, row;
} attention_tile;

#define ATTENTION_EXTRA(head_dim) (32 * (head_dim) + 1024)
#define AMX_PAIRS 32
int amx_attention_fits(const attention_args *a);
void amx_attend(const attention_tile *tile);

/* Keys that pair `p` of the tile sees, from the start of its sequence, and its place in q and out. */
static inline int seen_by(const attention_tile *tile, int p) {
    const attention_args *a = tile->args;
    return a->starts[tile->row] + (tile->first_pair + p) / (a->heads / a->kv_heads) + 1;
}

static inline long place_of(const attention_tile *tile, int p) {
    const attention_args *a = tile->args;
    const int group = a->heads / a->kv_heads, pair = tile->first_pair + p;
    return ((long)(a->firsts[tile->row] + pair / group) * a->heads + tile->kv_head * group + pair % group) * a->head_dim;
}

#endif
