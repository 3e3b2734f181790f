/* One number of each dtype: its code (the same as in kernels/native_backend.py), and to and from fp32. */
#ifndef KVFERRY_SCALAR_H
#define KVFERRY_SCALAR_H

#include <stdint.h>
#include <string.h>

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
#define ITEM_BYTES(dtype) ((dtype) == FLOAT32 ? 4 : 2)
#define ALWAYS static inline __attribute__((always_inline))

ALWAYS float from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
ALWAYS uint32_t to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
ALWAYS float from_bfloat16(uint16_t x) { return from_bits((uint32_t)x << 16); }
ALWAYS uint16_t to_bfloat16(float x) { /* to nearest, ties to even */
    const uint32_t bits = to_bits(x);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
}
/* fp16 in whole numbers: x86 has the type `_Float16` only since GCC 12. Bits as vcvtph2ps and vcvtps2ph give them. */
ALWAYS float from_float16(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16, size = x & 0x7fffu, quiet = size > 0x7c00u ? 0x400000u : 0;
    const uint32_t subnormal = to_bits((float)(int32_t)size * 0x1p-24f); /* exact: a normal number in fp32 */
    const uint32_t normal = (size << 13) + 0x38000000u, special = (size << 13) | 0x7f800000u | quiet;
    return from_bits(sign | (size >= 0x7c00u ? special : size >= 0x400u ? normal : subnormal));
}
ALWAYS uint16_t to_float16(float x) { /* to nearest, ties to even */
    const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    const uint32_t normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13;
    /* Below 2^-14: what is added to 1/2 is rounded to a multiple of 2^-24, and its bits then count those. */
    const uint32_t subnormal = to_bits(from_bits(size) + 0.5f) - to_bits(0.5f);
    const uint32_t special = size > 0x7f800000u ? 0x7e00u | (size >> 13 & 0x3ffu) : 0x7c00u;
    return (uint16_t)(sign | (size >= 0x477ff000u ? special : size >= 0x38800000u ? normal : subnormal));
}
ALWAYS float read_one(const char *p, int dtype) {
    if (dtype == FLOAT32) return *(const float *)p;
    return dtype == BFLOAT16 ? from_bfloat16(*(const uint16_t *)p) : from_float16(*(const uint16_t *)p);
}
ALWAYS void write_one(char *p, float x, int dtype) {
    if (dtype == FLOAT32) *(float *)p = x;
    else *(uint16_t *)p = dtype == BFLOAT16 ? to_bfloat16(x) : to_float16(x);
}
ALWAYS float rounded(float x, int dtype) {
    if (dtype == FLOAT32) return x;
    return dtype == BFLOAT16 ? from_bfloat16(to_bfloat16(x)) : from_float16(to_float16(x));
}

#endif
