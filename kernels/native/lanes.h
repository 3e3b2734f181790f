/* Sixteen fp32 lanes, written once per instruction set. Included once per variant; ISA is 512, 256 or 0.
 *
 * Every operation works lane by lane and is rounded once, so the 512 and 256 variants give equal bits. The plain
 * variant multiplies and adds in two roundings: other bits, which is why it has another name.
 * `max` and `min` are the processor's: where either operand is NaN, the result is the second. */

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(f) PASTE(f, SUFFIX)
#if ISA
#define INLINE static inline __attribute__((always_inline, unused))
#else
#define INLINE static __attribute__((unused)) /* compiled once each: specialised copies took half a minute */
#endif

#if ISA == 512
typedef __m512 NAME(vf);
#define vf NAME(vf)
INLINE vf NAME(set1)(float x) { return _mm512_set1_ps(x); }
INLINE vf NAME(fma)(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf NAME(add)(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf NAME(sub)(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf NAME(mul)(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf NAME(divide)(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf NAME(max)(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf NAME(min)(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf NAME(load32)(const float *p) { return _mm512_loadu_ps(p); }
INLINE void NAME(store32)(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf NAME(loadbf)(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE vf NAME(loadhf)(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
/* The first and the second of sixteen pairs of bf16. */
INLINE vf NAME(first_of_pairs)(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
INLINE vf NAME(second_of_pairs)(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000u)));
}
/* The upper halves are x rounded to bf16, the lower ones are left over. */
INLINE __m512i NAME(to_upper_halves)(vf x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}
INLINE void NAME(storebf)(uint16_t *p, vf x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(NAME(to_upper_halves)(x), 16)));
}
INLINE vf NAME(roundedbf)(vf x) {
    __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    return _mm512_castsi512_ps(_mm512_and_si512(NAME(to_upper_halves)(x), upper));
}
INLINE void NAME(storehf)(uint16_t *p, vf x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* x where lane < count, else fill */
INLINE vf NAME(first)(vf x, int count, float fill) {
    __mmask16 mask = count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
    return _mm512_mask_blend_ps(mask, _mm512_set1_ps(fill), x);
}
INLINE vf NAME(nearest)(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* 2^x for whole x */
INLINE vf NAME(power2)(vf x) {
    __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(127)), 23);
    return _mm512_castsi512_ps(bits);
}
#elif ISA == 256
typedef struct { __m256 a, b; } NAME(vf);
#define vf NAME(vf)
#define BOTH(expression_a, expression_b) ((vf){(expression_a), (expression_b)})
INLINE vf NAME(set1)(float x) { return BOTH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE vf NAME(fma)(vf x, vf y, vf z) { return BOTH(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
INLINE vf NAME(add)(vf x, vf y) { return BOTH(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
INLINE vf NAME(sub)(vf x, vf y) { return BOTH(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
INLINE vf NAME(mul)(vf x, vf y) { return BOTH(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
INLINE vf NAME(divide)(vf x, vf y) { return BOTH(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
INLINE vf NAME(max)(vf x, vf y) { return BOTH(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
INLINE vf NAME(min)(vf x, vf y) { return BOTH(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
INLINE vf NAME(load32)(const float *p) { return BOTH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void NAME(store32)(float *p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE __m256 NAME(widen)(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE vf NAME(loadbf)(const uint16_t *p) { return BOTH(NAME(widen)(p), NAME(widen)(p + 8)); }
INLINE vf NAME(loadhf)(const uint16_t *p) {
    return BOTH(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
INLINE __m256 NAME(first8_of_pairs)(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)p), 16));
}
INLINE __m256 NAME(second8_of_pairs)(const uint16_t *p) {
    __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)p), high));
}
INLINE vf NAME(first_of_pairs)(const uint16_t *p) {
    return BOTH(NAME(first8_of_pairs)(p), NAME(first8_of_pairs)(p + 16));
}
INLINE vf NAME(second_of_pairs)(const uint16_t *p) {
    return BOTH(NAME(second8_of_pairs)(p), NAME(second8_of_pairs)(p + 16));
}
/* The upper halves are x rounded to bf16, the lower ones are left over. */
INLINE __m256i NAME(to_upper8)(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(nearest, _mm256_set1_epi32(0x7fc00000), nan);
}
INLINE void NAME(storebf)(uint16_t *p, vf x) {
    __m256i a = _mm256_srli_epi32(NAME(to_upper8)(x.a), 16), b = _mm256_srli_epi32(NAME(to_upper8)(x.b), 16);
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
}
INLINE vf NAME(roundedbf)(vf x) {
    __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
    return BOTH(_mm256_castsi256_ps(_mm256_and_si256(NAME(to_upper8)(x.a), upper)),
                _mm256_castsi256_ps(_mm256_and_si256(NAME(to_upper8)(x.b), upper)));
}
INLINE void NAME(storehf)(uint16_t *p, vf x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE __m256 NAME(first8)(__m256 x, int count, float fill) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
    return _mm256_blendv_ps(_mm256_set1_ps(fill), x, _mm256_castsi256_ps(mask));
}
INLINE vf NAME(first)(vf x, int count, float fill) {
    return BOTH(NAME(first8)(x.a, count, fill), NAME(first8)(x.b, count - 8, fill));
}
#define NEAREST8(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
INLINE vf NAME(nearest)(vf x) { return BOTH(NEAREST8(x.a), NEAREST8(x.b)); }
INLINE __m256 NAME(power8)(__m256 x) {
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23);
    return _mm256_castsi256_ps(bits);
}
INLINE vf NAME(power2)(vf x) { return BOTH(NAME(power8)(x.a), NAME(power8)(x.b)); }
#else
typedef struct { float f[16]; } NAME(vf);
#define vf NAME(vf)
#define EACH(expression) vf r; for (int i = 0; i < 16; i++) r.f[i] = (expression); return r
INLINE vf NAME(set1)(float x) { EACH(x); }
INLINE vf NAME(fma)(vf a, vf b, vf c) { EACH(a.f[i] * b.f[i] + c.f[i]); }
INLINE vf NAME(add)(vf a, vf b) { EACH(a.f[i] + b.f[i]); }
INLINE vf NAME(sub)(vf a, vf b) { EACH(a.f[i] - b.f[i]); }
INLINE vf NAME(mul)(vf a, vf b) { EACH(a.f[i] * b.f[i]); }
INLINE vf NAME(divide)(vf a, vf b) { EACH(a.f[i] / b.f[i]); }
INLINE vf NAME(max)(vf a, vf b) { EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
INLINE vf NAME(min)(vf a, vf b) { EACH(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
INLINE vf NAME(load32)(const float *p) { EACH(p[i]); }
INLINE void NAME(store32)(float *p, vf x) { memcpy(p, x.f, sizeof x.f); }
INLINE vf NAME(loadbf)(const uint16_t *p) { EACH(from_bfloat16(p[i])); }
INLINE vf NAME(loadhf)(const uint16_t *p) { EACH(from_float16(p[i])); }
INLINE vf NAME(first_of_pairs)(const uint16_t *p) { EACH(from_bfloat16(p[2 * i])); }
INLINE vf NAME(second_of_pairs)(const uint16_t *p) { EACH(from_bfloat16(p[2 * i + 1])); }
INLINE void NAME(storebf)(uint16_t *p, vf x) { for (int i = 0; i < 16; i++) p[i] = to_bfloat16(x.f[i]); }
INLINE vf NAME(roundedbf)(vf x) { EACH(from_bfloat16(to_bfloat16(x.f[i]))); }
INLINE void NAME(storehf)(uint16_t *p, vf x) { for (int i = 0; i < 16; i++) p[i] = to_float16(x.f[i]); }
INLINE vf NAME(first)(vf x, int count, float fill) { EACH(i < count ? x.f[i] : fill); }
INLINE vf NAME(nearest)(vf x) { EACH(nearbyintf(x.f[i])); }
INLINE vf NAME(power2)(vf x) { EACH(from_bits((uint32_t)((int32_t)x.f[i] + 127) << 23)); }
#endif

/* ---- of any instruction set. `dtype` is a constant wherever these are inlined, so its switches cost nothing. */

INLINE vf NAME(load)(const char *p, int dtype) {
    if (dtype == FLOAT32) return NAME(load32)((const float *)p);
    if (dtype == BFLOAT16) return NAME(loadbf)((const uint16_t *)p);
    return NAME(loadhf)((const uint16_t *)p);
}

INLINE void NAME(store)(char *p, vf x, int dtype) {
    if (dtype == FLOAT32) NAME(store32)((float *)p, x);
    else if (dtype == BFLOAT16) NAME(storebf)((uint16_t *)p, x);
    else NAME(storehf)((uint16_t *)p, x);
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

/* exp within 2 ulp on [-87, 88], clamped outside, NaN of NaN; Cephes' expf polynomial. */
INLINE vf NAME(exp)(vf x) {
    x = NAME(min)(NAME(set1)(88.0f), NAME(max)(NAME(set1)(-87.0f), x)); /* x is second: NaN comes out as NaN */
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

/* x as it would come back from memory in `dtype`. */
INLINE vf NAME(rounded)(vf x, int dtype) {
    uint16_t there[16];
    if (dtype == FLOAT32) return x;
    if (dtype == BFLOAT16) return NAME(roundedbf)(x);
    NAME(storehf)(there, x);
    return NAME(loadhf)(there);
}

/* The first `count` of sixteen, zeros behind them. */
INLINE vf NAME(load_some)(const char *p, int count, int dtype) {
    if (count >= 16) return NAME(load)(p, dtype);
    float f[16] = {0};
    for (int i = 0; i < count; i++) f[i] = read_one(p + i * ITEM_BYTES(dtype), dtype);
    return NAME(load32)(f);
}

INLINE void NAME(store_some)(char *p, vf x, int count, int dtype) {
    if (count >= 16) {
        NAME(store)(p, x, dtype);
        return;
    }
    float f[16];
    NAME(store32)(f, x);
    for (int i = 0; i < count; i++) write_one(p + i * ITEM_BYTES(dtype), f[i], dtype);
}
