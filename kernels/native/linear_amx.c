/* Products of bf16 by AMX: tiles of 16 rows, 16 outputs and 32 input features, sums in fp32.
 *
 * One A tile by four B tiles for up to 16 rows, where time is reading the weights; two by two for more, where a tile
 * read from the cache must serve two products. Rows are cut into blocks of 16. A last block that is not full starts
 * earlier and computes some rows a second time, to the same bits: the tiles' shapes stay as configured. */
#include "linear_kernels.h"

#ifdef WITH_BF16
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,amx-tile,amx-bf16,prefer-vector-width=512")
#include "linear_bf16.h"

#define TILE_BYTES 1024

/* Tiles 0 to 3 hold sums; 4 and 5 x; 6 and 7 weights. */
typedef struct {
    uint8_t palette, start_row, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) tile_shapes;

static void shape_tiles(int rows) {
    tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = 64;
        shapes.rows[tile] = (uint8_t)(tile < 6 ? rows : 16);
    }
    /* The compiler does not know that the processor reads all of it. */
    __asm__ volatile("" ::"r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

typedef float tile_sums[16][LANES] __attribute__((aligned(64)));

/* Two groups of outputs side by side: 64 bytes of bf16, a cache line at a time. */
ALWAYS void write_block(const product *p, long row, int rows, long group, tile_sums *sums) {
    if (p->out_dtype == FLOAT32 || real_outputs(p, group + 1) < LANES) {
        for (int g = 0; g < 2; g++)
            for (int r = 0; r < rows; r++) write_group(p, row + r, group + g, _mm512_load_ps(sums[g][r]));
        return;
    }
    __m512 bias0 = _mm512_setzero_ps(), bias1 = bias0;
    if (p->w->bias) {
        bias0 = _mm512_loadu_ps(p->w->bias + group * LANES);
        bias1 = _mm512_loadu_ps(p->w->bias + (group + 1) * LANES);
    }
    uint16_t *to = (uint16_t *)p->y + row * p->w->out + group * LANES;
    for (int r = 0; r < rows; r++, to += p->w->out) {
        const __m512 sum0 = _mm512_add_ps(_mm512_load_ps(sums[0][r]), bias0);
        const __m512 sum1 = _mm512_add_ps(_mm512_load_ps(sums[1][r]), bias1);
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(sum1, sum0));
    }
}

/* One block of rows by four groups, or by two. */
ALWAYS void one_by(const product *p, long row, int rows, long group, int groups) {
    tile_sums sums[GROUPS];
    const char *x = p->x + row * p->x_stride;
    const char *w0 = (const char *)p->w->packed + group * p->group_bytes, *w1 = w0 + p->group_bytes;
    const char *w2 = w1 + p->group_bytes, *w3 = w2 + p->group_bytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long at = 0; at < p->group_bytes; at += TILE_BYTES, x += 64) {
        _tile_loadd(4, x, p->x_stride);
        _tile_loadd(6, w0 + at, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w1 + at, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (groups < GROUPS) continue;
        _tile_loadd(6, w2 + at, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, w3 + at, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int g = 0; g < groups; g += 2) write_block(p, row, rows, group + g, sums + g);
}

ALWAYS long block_start(const product *p, long block) {
    return block * 16 + 16 <= p->rows ? block * 16 : p->rows - 16;
}

/* Two blocks of rows, number `block` and the next, by two groups. Meanwhile a part of the two groups after them comes
 * into the second cache: the parts of all blocks together are the whole. What lies behind the last group is fetched in
 * vain, or is the next layer's. */
ALWAYS void two_by_two(const product *p, long block, long group) {
    const long row0 = block_start(p, block), row1 = block_start(p, block + 1);
    tile_sums sums[4];
    const char *x0 = p->x + row0 * p->x_stride, *x1 = p->x + row1 * p->x_stride;
    const char *w0 = (const char *)p->w->packed + group * p->group_bytes, *w1 = w0 + p->group_bytes;
    const long parts = (p->rows + 15) / 32, fetched = 2 * TILE_BYTES / parts; /* bytes for each step */
    const char *next = w0 + 2 * p->group_bytes + block / 2 * (2 * p->group_bytes / parts);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long at = 0; at < p->group_bytes; at += TILE_BYTES, x0 += 64, x1 += 64) {
        _tile_loadd(6, w0 + at, 64);
        _tile_loadd(4, x0, p->x_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w1 + at, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x1, p->x_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        for (long line = 0; line < fetched; line += 64) __builtin_prefetch(next + line, 0, 2);
        next += fetched;
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    write_block(p, row0, 16, group, sums);
    write_block(p, row1, 16, group, sums + 2);
}

static void one_block(const product *p, long row, int rows, long group, int groups) {
    if (groups == GROUPS) one_by(p, row, rows, group, GROUPS);
    else one_by(p, row, rows, group, GROUPS / 2);
}

static void many_rows(const product *p, long group, int groups) {
    const long blocks = (p->rows + 15) / 16;
    for (int g = 0; g < groups; g += 2)
        for (long block = 0; block + 2 <= blocks; block += 2) two_by_two(p, block, group + g);
    if (blocks % 2) one_block(p, block_start(p, blocks - 1), 16, group, groups);
}

void linear_amx(const void *job, long first, long last, int member) {
    const product *p = job;
    (void)member;
    shape_tiles(p->rows < 16 ? (int)p->rows : 16);
    for (long group = first * GROUPS; group < last * GROUPS && group < p->groups; group += GROUPS) {
        const int groups = group + GROUPS <= p->groups ? GROUPS : GROUPS / 2;
        if (p->rows <= 16) one_block(p, 0, (int)p->rows, group, groups);
        else many_rows(p, group, groups);
    }
    _tile_release();
}
#pragma GCC pop_options
#endif
