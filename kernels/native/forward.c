/* One step through all layers. The same kernels in the same order as kernels/model.py calls them one by one, so the
 * bits are equal; what is saved is the interpreter between them, and memory that is new each time. */
#include "forward.h"

#include <stdlib.h>
#include <string.h>

#include "rows.h"
#include "scalar.h"

static long larger(long a, long b) { return a > b ? a : b; }

/* Cuts one piece of memory into the buffers of a step; with `memory` NULL it only says how many bytes that takes. */
static long lay_out(const model_weights *m, step_memory *s, char *memory, long tokens) {
    const long item = ITEM_BYTES(m->dtype), attended = (long)m->heads * m->head_dim;
    const long qkv = attended + 2L * m->kv_heads * m->head_dim;
    long at = 0;
#define PLACE(field, bytes_per_token) \
    s->field = memory ? (void *)(memory + at) : NULL; \
    at += (tokens * (bytes_per_token) + 63) / 64 * 64
    PLACE(residual, m->hidden * item);
    PLACE(x, m->hidden * item);
    PLACE(wide, larger(qkv, 2L * m->inner) * item);
    PLACE(q, attended * 4);
    PLACE(narrow, larger(attended, m->inner) * item);
    PLACE(positions, 8L);
    PLACE(blocks, 8L);
    PLACE(offsets, 8L);
#undef PLACE
    return at;
}

static int make_room(model_weights *m, long tokens) {
    step_memory *s = &m->memory;
    const long bytes = lay_out(m, s, NULL, tokens);
    if (s->bytes < bytes) {
        free(s->memory);
        s->bytes = 0;
        s->memory = aligned_alloc(64, (size_t)bytes);
        if (!s->memory) return 0;
        s->bytes = bytes;
    }
    lay_out(m, s, s->memory, tokens);
    return 1;
}

/* Per token: its position, and the block and place in it where its key and value go. */
static void find_places(const forward_step *step, step_memory *s) {
    for (int row = 0; row < step->rows; row++) {
        const int32_t *table = step->tables + step->slots[row] * step->table_stride;
        for (int i = 0; i < step->counts[row]; i++) {
            const long token = step->firsts[row] + i, position = step->starts[row] + i;
            s->positions[token] = position;
            s->blocks[token] = table[position / step->block_size];
            s->offsets[token] = position % step->block_size;
        }
    }
}

static int layer(model_weights *m, const forward_step *step, attention_args *a, int number, const float *next_norm) {
    const layer_weights *w = &m->layers[number];
    step_memory *s = &m->memory;
    const int threads = step->threads, last = number + 1 == m->num_layers;
    const long part = (long)m->kv_heads * m->head_dim * step->block_size * ITEM_BYTES(m->dtype);
    a->key_offset = 2 * number * part;
    a->value_offset = a->key_offset + part;
    const rope_args rope = {
        .qkv = s->wide, .q = s->q, .cache = step->cache, .block_stride = step->block_bytes,
        .key_offset = a->key_offset, .value_offset = a->value_offset, .q_norm = w->q_norm, .k_norm = w->k_norm,
        .cosines = m->cosines, .sines = m->sines, .positions = s->positions, .blocks = s->blocks,
        .offsets = s->offsets, .tokens = step->tokens, .heads = m->heads, .kv_heads = m->kv_heads,
        .head_dim = m->head_dim, .block_size = step->block_size, .dtype = m->dtype, .eps = m->eps,
    };
    norm_args norm = {
        .x = s->x, .residual = s->residual, .out = s->x, .weight = w->mlp_norm, .tokens = step->tokens,
        .size = m->hidden, .dtype = m->dtype, .eps = m->eps,
    };
    const silu_args silu = {
        .x = s->wide, .out = s->narrow, .tokens = step->tokens, .size = m->inner, .dtype = m->dtype,
    };
    if (!linear_rows(&w->qkv, s->x, step->tokens, s->wide, m->dtype, threads)) return 0;
    rope_rows(&rope, threads);
    attention_run(&s->attention, a);
    if (!linear_rows(&w->output, s->narrow, step->tokens, s->x, m->dtype, threads)) return 0;
    norm_rows(&norm, threads);
    if (!linear_rows(&w->gate_up, s->x, step->tokens, s->wide, m->dtype, threads)) return 0;
    silu_rows(&silu, threads);
    if (!linear_rows(&w->down, s->narrow, step->tokens, s->x, m->dtype, threads)) return 0;
    norm.weight = next_norm;
    norm.out = last ? step->hidden : s->x;
    norm_rows(&norm, threads);
    return 1;
}

int forward(model_weights *m, const forward_step *step) {
    step_memory *s = &m->memory;
    const long row_bytes = (long)m->hidden * ITEM_BYTES(m->dtype);
    if (!make_room(m, step->tokens)) return 0;
    find_places(step, s);
    attention_args a = {
        .q = s->q, .out = s->narrow, .cache = step->cache, .block_stride = step->block_bytes, .tables = step->tables,
        .table_stride = step->table_stride, .slots = step->slots, .starts = step->starts, .counts = step->counts,
        .firsts = step->firsts, .rows = step->rows, .heads = m->heads, .kv_heads = m->kv_heads,
        .head_dim = m->head_dim, .block_size = step->block_size, .dtype = m->dtype,
    };
    if (!attention_prepare(&s->attention, &a, step->threads)) return 0;
    for (long t = 0; t < step->tokens; t++)
        memcpy(s->residual + t * row_bytes, m->embedding + step->token_ids[t] * row_bytes, (size_t)row_bytes);
    const norm_args first = {
        .x = s->residual, .out = s->x, .weight = m->layers[0].attention_norm, .tokens = step->tokens,
        .size = m->hidden, .dtype = m->dtype, .eps = m->eps,
    };
    norm_rows(&first, step->threads);
    for (int i = 0; i < m->num_layers; i++) {
        const float *next = i + 1 < m->num_layers ? m->layers[i + 1].attention_norm : m->final_norm;
        if (!layer(m, step, &a, i, next)) return 0;
    }
    return 1;
}

void forward_release(model_weights *m) {
    attention_release(&m->memory.attention);
    free(m->memory.memory);
    free(m->layers);
}
