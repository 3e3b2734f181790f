/* Attention: cuts a step into tiles of (query, head) pairs and hands them to the kernels. */
#include "attention.h"

#include <stdlib.h>

#include "dispatch.h"
#include "pool.h"

#define KERNELS "attention_kernels.h"
#include "variants.h"

typedef void (*attend)(const attention_tile *);

static attend attend_in_use(void) {
#ifdef WITH_X86
    if (variant_in_use() >= VARIANT_512) return attend_512;
    if (variant_in_use() == VARIANT_256) return attend_256;
#endif
    return attend_plain;
}

static int with_amx(const attention_args *a) { return variant_in_use() == VARIANT_AMX && amx_attention_fits(a); }

int attention_prepare(attention_space *space, const attention_args *a, int threads) {
    const int tile_pairs = with_amx(a) ? AMX_PAIRS : VECTOR_PAIRS;
    if (space->rows < a->rows) {
        free(space->first_item);
        space->rows = 0;
        space->first_item = malloc((size_t)(a->rows + 1) * sizeof(long));
        if (!space->first_item) return 0;
        space->rows = a->rows;
    }
    long longest = 0, work = 0;
    space->first_item[0] = 0;
    for (int row = 0; row < a->rows; row++) {
        const long pairs = (long)a->counts[row] * (a->heads / a->kv_heads), end = a->starts[row] + a->counts[row];
        space->first_item[row + 1] = space->first_item[row] + (pairs + tile_pairs - 1) / tile_pairs * a->kv_heads;
        longest = end > longest ? end : longest;
        work += pairs * end * a->kv_heads;
    }
    space->items = space->first_item[a->rows];
    /* Waking a thread costs about 20 microseconds, the work of some 20,000 (pair, key) products. */
    space->threads = threads < 1 || work < 40000 ? 1 : threads < MAX_THREADS ? threads : MAX_THREADS;
    space->row_stride = (longest + 15) / 16 * 16 + 16;
    space->member_stride = (tile_pairs * space->row_stride + ATTENTION_EXTRA(a->head_dim) + 15) / 16 * 16;
    const long floats = space->threads * space->member_stride;
    if (space->scratch_floats < floats) {
        free(space->scratch);
        space->scratch_floats = 0;
        space->scratch = aligned_alloc(64, (size_t)floats * sizeof(float));
        if (!space->scratch) return 0;
        space->scratch_floats = floats;
    }
    return 1;
}

void attention_release(attention_space *space) {
    free(space->first_item);
    free(space->scratch);
    *space = (attention_space){0};
}

typedef struct {
    const attention_space *space;
    const attention_args *args;
    attend attend;
    int tile_pairs;
} attention_job;

/* The row of an item. Threads take items one at a time: a search from row 0 would grow with the square of the rows. */
static int row_of(const long *first_item, int rows, long item) {
    int row = 0, beyond = rows; /* first_item[row] <= item < first_item[beyond] */
    while (beyond - row > 1) {
        const int middle = row + (beyond - row) / 2;
        if (first_item[middle] <= item) row = middle;
        else beyond = middle;
    }
    return row;
}

static void attend_items(const void *of, long first, long last, int member) {
    const attention_job *job = of;
    const attention_args *a = job->args;
    const long *first_item = job->space->first_item;
    int row = row_of(first_item, a->rows, first);
    for (long item = first; item < last; item++) {
        while (item >= first_item[row + 1]) row++;
        const long tiles = (first_item[row + 1] - first_item[row]) / a->kv_heads, number = item - first_item[row];
        const int first_pair = (int)(number % tiles) * job->tile_pairs;
        const int left = a->counts[row] * (a->heads / a->kv_heads) - first_pair;
        const attention_tile tile = {
            .args = a,
            .table = a->tables + (a->slots ? a->slots[row] : row) * a->table_stride,
            .row_stride = job->space->row_stride,
            .scratch = job->space->scratch + member * job->space->member_stride,
            .kv_head = (int)(number / tiles),
            .first_pair = first_pair,
            .pairs = left < job->tile_pairs ? left : job->tile_pairs,
            .row = row,
        };
        job->attend(&tile);
    }
}

void attention_run(const attention_space *space, const attention_args *a) {
    const int amx = with_amx(a);
    const attention_job job = {space, a, amx ? amx_attend : attend_in_use(), amx ? AMX_PAIRS : VECTOR_PAIRS};
    run_parallel(attend_items, &job, space->items, space->threads);
}
