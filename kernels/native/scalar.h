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
ALWAYS float from_float16(uint16_t x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
ALWAYS uint16_t to_float16(float x) { _Float16 h = (_Float16)x; uint16_t r; memcpy(&r, &h, 2); return r; }
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
