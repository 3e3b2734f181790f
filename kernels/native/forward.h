/* The forward pass of the Llama family over a paged cache, all layers in one call. */
#ifndef KVFERRY_FORWARD_H
#define KVFERRY_FORWARD_H

#include <stdint.h>

#include "attention.h"
#include "linear.h"

typedef struct {
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *q_norm, *k_norm;           /* [head_dim], or NULL */
    linear qkv, output, gate_up, down;
} layer_weights;

/* Memory of a step, kept for the next one. */
typedef struct {
    char *memory;
    long bytes;
    char *residual, *x; /* [tokens, hidden] */
    char *wide;         /* qkv, later gate and up */
    float *q;           /* [tokens, heads * head_dim] */
    char *narrow;       /* attention's output, later the gated MLP's inner values */
    int64_t *positions, *blocks, *offsets; /* [tokens] */
    attention_space attention;
} step_memory;

typedef struct {
    int num_layers, hidden, heads, kv_heads, head_dim, inner, dtype;
    float eps;
    const char *embedding;        /* [vocab, hidden] */
    const float *cosines, *sines; /* [positions, head_dim / 2] */
    const float *final_norm;      /* [hidden] */
    layer_weights *layers;
    step_memory memory;
} model_weights;

/* Where a step's tokens lie: as in attention_args and StepLayout. */
typedef struct {
    const int64_t *token_ids; /* [tokens] */
    char *hidden;             /* [tokens, hidden]: normed states come here */
    char *cache;
    long block_bytes;
    const int32_t *tables;
    long table_stride;
    const int64_t *slots;
    const int32_t *starts, *counts, *firsts;
    long tokens;
    int rows, block_size, threads;
} forward_step;

/* 0 where there was no memory, else 1. One call at a time for one model. */
int forward(model_weights *model, const forward_step *step);
void forward_release(model_weights *model);

#endif
