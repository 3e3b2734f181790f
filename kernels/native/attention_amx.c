/* Attention over a bf16 cache with the processor's matrix unit (Intel AMX): the same tile form for one query as for
 * a whole prompt chunk, so a token gets equal bits in either.
 *
 *   scores   q (rounded to bf16) times 16 keys: sums over 32 dims at a time, in order
 *   weights  exp(score - best), rounded to bf16 for the next product, summed before rounding
 *   output   weights times values, 16 keys at a time in the order of positions
 * Rows of a tile do not touch each other, and keys are cut at multiples of 16 of the absolute position. A key that a
 * query does not see has weight zero; what lies past the sequence's end is not read, since it may be NaN. */
#include "attention.h"

#include <math.h>
#include <string.h>

#include "dispatch.h"
#include "scalar.h"

#ifdef WITH_BF16
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16")
#pragma GCC target("prefer-vector-width=512")
#define ISA 512
#define SUFFIX _amx
#include "lanes.h"

enum { TILE_KEYS = 16, TILE_DIMS = 32, BLOCKS_AHEAD = 4, CACHE_LINE = 64, MAX_HEAD_DIM = 256 };

int amx_attention_fits(const attention_args *a) {
    return a->dtype == BFLOAT16 && a->head_dim % TILE_DIMS == 0 && a->head_dim <= MAX_HEAD_DIM;
}

/* Tiles 0 to 3 are sums, 4 and 5 the left operand of the first 16 and the other pairs, 6 and 7 the right one. */
static void configure(int pairs, int left_bytes, int right_rows) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) shapes = {.palette = 1};
    const int first = pairs < 16 ? pairs : 16, other = pairs > 16 ? pairs - 16 : first;
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = (uint16_t)(tile == 4 || tile == 5 ? left_bytes : CACHE_LINE);
        shapes.rows[tile] = (uint8_t)(tile >= 6 ? right_rows : tile == 2 || tile == 3 || tile == 5 ? other : first);
    }
    /* The compiler does not know that tiles are loaded from memory: what was written must be there by now. */
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&shapes);
}

/* What one tile of pairs reads and keeps. */
typedef struct {
    const attention_tile *tile;
    const char *keys, *values; /* of the kv head, in block 0 of the cache */
    float *scores;             /* [pairs, row_stride]; the weights in bf16 take their place */
    uint16_t *q;               /* [pairs, head_dim] */
    char *tail;                /* the last 16 values where not all are there */
    int longest;               /* keys that the last pair sees */
    long places[AMX_PAIRS];    /* of the pairs in q and out: dividing for them again and again costs as much as scores */
} amx_state;

static const char *in_block(const amx_state *s, const char *of, int key) {
    const attention_args *a = s->tile->args;
    return of + s->tile->table[key / a->block_size] * a->block_stride;
}

static const char *keys_at(const amx_state *s, int key) {
    return in_block(s, s->keys, key) + key % s->tile->args->block_size * 4;
}

static const char *values_at(const amx_state *s, int key) {
    if (key + TILE_KEYS > s->longest) return s->tail;
    return in_block(s, s->values, key) + key % s->tile->args->block_size / 2 * s->tile->args->head_dim * 4L;
}

/* Blocks lie far apart, which the processor's own prefetcher cannot guess. Positions past the keys are values.
 * The first tile of a row brings them for all. */
static void prefetch(const amx_state *s, int key) {
    const attention_args *a = s->tile->args;
    const int block = key / a->block_size + BLOCKS_AHEAD, blocks = (s->longest - 1) / a->block_size + 1;
    const long bytes = 2L * a->head_dim * a->block_size;
    if (key % a->block_size || block >= 2 * blocks || s->tile->first_pair) return;
    const char *from = block < blocks ? s->keys + s->tile->table[block] * a->block_stride
                                      : s->values + s->tile->table[block - blocks] * a->block_stride;
    for (long at = 0; at < bytes; at += CACHE_LINE) _mm_prefetch(from + at, _MM_HINT_T1);
}

/* Scores of `tiles` times 16 keys from `key` on, up to 16 pairs. */
static inline __attribute__((always_inline)) void score_few(const amx_state *s, int key, int tiles) {
    const attention_args *a = s->tile->args;
    const long key_stride = 4L * a->block_size, q_stride = 2L * a->head_dim, out_stride = 4 * s->tile->row_stride;
    const char *at[4];
    for (int i = 0; i < tiles; i++) at[i] = keys_at(s, key + i * TILE_KEYS);
    _tile_zero(0);
    if (tiles == 4) { _tile_zero(1); _tile_zero(2); _tile_zero(3); }
    for (int dim = 0; dim < a->head_dim; dim += TILE_DIMS) {
        const long down = dim / 2 * key_stride;
        _tile_loadd(4, s->q + dim, q_stride);
        _tile_loadd(6, at[0] + down, key_stride);
        _tile_dpbf16ps(0, 4, 6);
        if (tiles < 4) continue;
        _tile_loadd(7, at[1] + down, key_stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, at[2] + down, key_stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, at[3] + down, key_stride);
        _tile_dpbf16ps(3, 4, 7);
    }
    float *out = s->scores + key;
    _tile_stored(0, out, out_stride);
    if (tiles < 4) return;
    _tile_stored(1, out + 16, out_stride);
    _tile_stored(2, out + 32, out_stride);
    _tile_stored(3, out + 48, out_stride);
}

/* The same for 17 to 32 pairs and one or two times 16 keys. */
static inline __attribute__((always_inline)) void score_many(const amx_state *s, int key, int tiles) {
    const attention_args *a = s->tile->args;
    const long key_stride = 4L * a->block_size, q_stride = 2L * a->head_dim, out_stride = 4 * s->tile->row_stride;
    const char *first = keys_at(s, key), *second = tiles == 2 ? keys_at(s, key + TILE_KEYS) : first;
    _tile_zero(0);
    _tile_zero(2);
    if (tiles == 2) { _tile_zero(1); _tile_zero(3); }
    for (int dim = 0; dim < a->head_dim; dim += TILE_DIMS) {
        const long down = dim / 2 * key_stride;
        _tile_loadd(4, s->q + dim, q_stride);
        _tile_loadd(5, s->q + 16 * a->head_dim + dim, q_stride);
        _tile_loadd(6, first + down, key_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (tiles < 2) continue;
        _tile_loadd(7, second + down, key_stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    float *out = s->scores + key, *below = out + 16 * s->tile->row_stride;
    _tile_stored(0, out, out_stride);
    _tile_stored(2, below, out_stride);
    if (tiles < 2) return;
    _tile_stored(1, out + 16, out_stride);
    _tile_stored(3, below + 16, out_stride);
}

static void score(const amx_state *s) {
    const int few = s->tile->pairs <= 16, at_once = few ? 4 : 2;
    configure(s->tile->pairs, CACHE_LINE, 16);
    for (int key = 0; key < s->longest;) {
        const int tiles = s->longest - key > (at_once - 1) * TILE_KEYS ? at_once : 1;
        for (int i = 0; i < tiles; i++) prefetch(s, key + i * TILE_KEYS);
        if (few && tiles == 4) score_few(s, key, 4);
        else if (few) score_few(s, key, 1);
        else if (tiles == 2) score_many(s, key, 2);
        else score_many(s, key, 1);
        key += tiles * TILE_KEYS;
    }
}

/* To bf16; denormal numbers become zero, as the matrix unit takes them anyway. */
static inline __attribute__((always_inline)) void narrow(void *to, vf x) {
    const __m256bh halves = _mm512_cvtneps_pbh(x);
    memcpy(to, &halves, sizeof halves);
}

/* 2^x for x <= 0, within 2e-7 of its size; NaN stays NaN. 2^rest is a minimax polynomial on [-1/2, 1/2]. */
static inline __attribute__((always_inline)) __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(0.00132647f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.00967151f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.05550734f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.24022242f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.69314700f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* A row of scores to weights in bf16 at its own start, zeros up to a multiple of 16 past `longest`. Returns their sum. */
static float weigh(float *scores, int seen, int longest, float scale) {
    vf best = _mm512_set1_ps(-INFINITY);
    int t = 0;
    for (; t + 16 <= seen; t += 16) best = _mm512_max_ps(best, _mm512_loadu_ps(scores + t));
    if (t < seen) best = _mm512_max_ps(best, first_amx(_mm512_loadu_ps(scores + t), seen - t, -INFINITY));
    /* exp(scale * (score - best)) as a power of two */
    const float factor_one = scale * 1.44269504f;
    const vf factor = _mm512_set1_ps(factor_one), top = _mm512_set1_ps(max_lanes_amx(best) * factor_one);
    vf sum = _mm512_setzero_ps();
    uint16_t *weights = (uint16_t *)scores;
    for (t = 0; t < seen; t += 16) {
        vf weight = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + t), factor, top));
        if (t + 16 > seen) weight = first_amx(weight, seen - t, 0.0f);
        sum = _mm512_add_ps(sum, weight);
        narrow(weights + t, weight);
    }
    for (; t < longest; t += 16) _mm256_storeu_si256((__m256i *)(weights + t), _mm256_setzero_si256());
    return sum_lanes_amx(sum);
}

/* The last values where not all 16 are there, zeros behind them. */
static void copy_tail(const amx_state *s) {
    const attention_args *a = s->tile->args;
    const int there = s->longest % TILE_KEYS, key = s->longest - there, dim = a->head_dim;
    if (!there) return;
    const char *from = in_block(s, s->values, key) + key % a->block_size / 2 * dim * 4L;
    memset(s->tail, 0, (size_t)(TILE_KEYS * dim * 2));
    memcpy(s->tail, from, (size_t)(there / 2 * dim * 4));
    if (there % 2) /* the first of each pair */
        for (int i = 0; i < dim; i++) memcpy(s->tail + (there / 2 * dim + i) * 4L, from + (there / 2 * dim + i) * 4L, 2);
}

/* Sums of `columns` times 16 dims, up to 16 pairs, to out `[16, 64]`. */
static inline __attribute__((always_inline)) void mix_few(const amx_state *s, int dim, int columns, float *out) {
    const long stride = 4L * s->tile->args->head_dim, weight_stride = 4 * s->tile->row_stride;
    _tile_zero(0);
    _tile_zero(1);
    if (columns == 4) { _tile_zero(2); _tile_zero(3); }
    for (int key = 0; key < s->longest; key += TILE_KEYS) {
        const char *values = values_at(s, key) + dim * 4L;
        if (dim == 0) prefetch(s, (s->longest - 1) / s->tile->args->block_size * s->tile->args->block_size +
                                  s->tile->args->block_size + key);
        _tile_loadd(4, (const uint16_t *)s->scores + key, weight_stride);
        _tile_loadd(6, values, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + 64, stride);
        _tile_dpbf16ps(1, 4, 7);
        if (columns < 4) continue;
        _tile_loadd(6, values + 128, stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, values + 192, stride);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, out, 256);
    _tile_stored(1, out + 16, 256);
    if (columns < 4) return;
    _tile_stored(2, out + 32, 256);
    _tile_stored(3, out + 48, 256);
}

/* Sums of 32 dims, 17 to 32 pairs, to out `[32, 64]`. */
static void mix_many(const amx_state *s, int dim, float *out) {
    const long stride = 4L * s->tile->args->head_dim, weight_stride = 4 * s->tile->row_stride;
    const uint16_t *weights = (const uint16_t *)s->scores, *below = (const uint16_t *)(s->scores + 16 * s->tile->row_stride);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int key = 0; key < s->longest; key += TILE_KEYS) {
        const char *values = values_at(s, key) + dim * 4L;
        _tile_loadd(4, weights + key, weight_stride);
        _tile_loadd(5, below + key, weight_stride);
        _tile_loadd(6, values, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, values + 64, stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, 256);
    _tile_stored(1, out + 16, 256);
    _tile_stored(2, out + 16 * 64, 256);
    _tile_stored(3, out + 16 * 64 + 16, 256);
}

static void write_out(const amx_state *s, const float *sums, const float *totals, int dim, int columns) {
    for (int p = 0; p < s->tile->pairs; p++) {
        char *out = s->tile->args->out + (s->places[p] + dim) * 2;
        const vf inverse = _mm512_set1_ps(1.0f / totals[p]);
        for (int c = 0; c < columns; c++)
            narrow(out + 32 * c, _mm512_mul_ps(_mm512_loadu_ps(sums + p * 64 + 16 * c), inverse));
    }
}

void amx_attend(const attention_tile *tile) {
    const attention_args *a = tile->args;
    const long head_bytes = 2L * a->head_dim * a->block_size;
    const char *head = a->cache + tile->kv_head * head_bytes;
    char *extra = (char *)(tile->scratch + AMX_PAIRS * tile->row_stride);
    amx_state s = {
        .tile = tile,
        .keys = head + a->key_offset,
        .values = head + a->value_offset,
        .scores = tile->scratch,
        .q = (uint16_t *)extra,
        .tail = extra + AMX_PAIRS * a->head_dim * 2,
        .longest = seen_by(tile, tile->pairs - 1),
    };
    for (int p = 0; p < tile->pairs; p++) {
        s.places[p] = place_of(tile, p);
        for (int i = 0; i < a->head_dim; i += 16)
            narrow(s.q + p * a->head_dim + i, _mm512_loadu_ps(a->q + s.places[p] + i));
    }
    score(&s);
    float totals[AMX_PAIRS], sums[AMX_PAIRS * 64];
    const float scale = (float)(1.0 / sqrt((double)a->head_dim));
    for (int p = 0; p < tile->pairs; p++)
        totals[p] = weigh(s.scores + p * tile->row_stride, seen_by(tile, p), s.longest, scale);
    copy_tail(&s);
    configure(tile->pairs, 2 * TILE_KEYS, TILE_KEYS / 2);
    for (int dim = 0, columns; dim < a->head_dim; dim += 16 * columns) {
        columns = tile->pairs <= 16 && a->head_dim - dim >= 64 ? 4 : 2;
        if (tile->pairs > 16) mix_many(&s, dim, sums);
        else if (columns == 4) mix_few(&s, dim, 4, sums);
        else mix_few(&s, dim, 2, sums);
        write_out(&s, sums, totals, dim, columns);
    }
    _tile_release();
}

#include "lanes_end.h"
#pragma GCC pop_options

#else

int amx_attention_fits(const attention_args *a) { return (void)a, 0; }
void amx_attend(const attention_tile *tile) { (void)tile; }

#endif
