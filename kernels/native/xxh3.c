/* XXH3-64, fused with a copy: see xxh3.h. Long inputs go in stripes of 64 bytes over eight accumulators; the short
 * ones, up to 240 bytes, are copied first and have the specification's own formulas. */
#include "xxh3.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STRIPE 64
#define STRIPES_PER_BLOCK 16 /* (sizeof secret - STRIPE) / 8 */
#define BLOCK (STRIPE * STRIPES_PER_BLOCK)
#define LONGEST_SHORT 240
#define AHEAD 1024 /* bytes: a copy out of memory runs faster when its lines are asked for by then */

static const uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
static const uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9,
                      P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;
static const uint64_t MX1 = 0x165667919E3779F9, MX2 = 0x9FB21C651E98DF25;

static const unsigned char secret[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t read64(const void *p) { uint64_t x; memcpy(&x, p, 8); return x; }
static inline uint32_t read32(const void *p) { uint32_t x; memcpy(&x, p, 4); return x; }
static inline uint64_t rotl64(uint64_t x, int by) { return x << by | x >> (64 - by); }

static inline uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t x) {
    x ^= x >> 37;
    x *= MX1;
    return x ^ x >> 32;
}

static uint64_t avalanche_xxh64(uint64_t x) {
    x ^= x >> 33;
    x *= P64_2;
    x ^= x >> 29;
    x *= P64_3;
    return x ^ x >> 32;
}

/* From here on the compiler knows `x` as what was loaded, and may not load it from its source once more. */
#define LOADED_ONCE(x) __asm__("" : "+m"(x))
#define LOADED_ONCE_LANES(x) __asm__("" : "+v"(x))

/* ---------------------------------------------------------------- up to 240 bytes */

static uint64_t mix16(const unsigned char *p, const unsigned char *key) {
    return fold(read64(p) ^ read64(key), read64(p + 8) ^ read64(key + 8));
}

static uint64_t hash_to_16(const unsigned char *p, size_t len) {
    if (len > 8) {
        const uint64_t low = read64(p) ^ read64(secret + 24) ^ read64(secret + 32);
        const uint64_t high = read64(p + len - 8) ^ read64(secret + 40) ^ read64(secret + 48);
        return avalanche(len + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (len >= 4) {
        const uint64_t both = read32(p + len - 4) + ((uint64_t)read32(p) << 32);
        uint64_t x = both ^ read64(secret + 8) ^ read64(secret + 16);
        x ^= rotl64(x, 49) ^ rotl64(x, 24);
        x *= MX2;
        x ^= (x >> 35) + len;
        x *= MX2;
        return x ^ x >> 28;
    }
    if (len > 0) {
        const uint32_t all = (uint32_t)p[0] << 16 | (uint32_t)p[len >> 1] << 24 | p[len - 1] | (uint32_t)len << 8;
        return avalanche_xxh64(all ^ read32(secret) ^ read32(secret + 4));
    }
    return avalanche_xxh64(read64(secret + 56) ^ read64(secret + 64));
}

static uint64_t hash_to_128(const unsigned char *p, size_t len) {
    uint64_t sum = len * P64_1;
    for (size_t pair = (len - 1) / 32 + 1; pair-- > 0;) {
        sum += mix16(p + 16 * pair, secret + 32 * pair);
        sum += mix16(p + len - 16 * (pair + 1), secret + 32 * pair + 16);
    }
    return avalanche(sum);
}

static uint64_t hash_to_240(const unsigned char *p, size_t len) {
    uint64_t sum = len * P64_1;
    for (size_t i = 0; i < 8; i++) sum += mix16(p + 16 * i, secret + 16 * i);
    sum = avalanche(sum);
    for (size_t i = 8; i < len / 16; i++) sum += mix16(p + 16 * i, secret + 16 * (i - 8) + 3);
    return avalanche(sum + mix16(p + len - 16, secret + 136 - 17));
}

static uint64_t hash_short(const unsigned char *p, size_t len) {
    return len <= 16 ? hash_to_16(p, len) : len <= 128 ? hash_to_128(p, len) : hash_to_240(p, len);
}

/* ---------------------------------------------------------------- longer */

/* `count` stripes from `p` on into `acc`, copied to `to` if there is one; then a scramble where a block is full. */
typedef void stripes_function(uint64_t *acc, const char *p, size_t count, char *to);

static inline void stripe_plain(uint64_t *acc, const uint64_t *data, const unsigned char *key) {
    for (int i = 0; i < 8; i++) {
        const uint64_t keyed = data[i] ^ read64(key + 8 * i);
        acc[i ^ 1] += data[i];
        acc[i] += (keyed & 0xffffffff) * (keyed >> 32);
    }
}

static void stripes_plain(uint64_t *acc, const char *p, size_t count, char *to) {
    for (size_t i = 0; i < count; i++) {
        uint64_t data[8];
        memcpy(data, p + STRIPE * i, STRIPE);
        LOADED_ONCE(data);
        if (to) memcpy(to + STRIPE * i, data, STRIPE);
        stripe_plain(acc, data, secret + 8 * (i % STRIPES_PER_BLOCK));
        if (i % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1)
            for (int lane = 0; lane < 8; lane++)
                acc[lane] = (acc[lane] ^ acc[lane] >> 47 ^ read64(secret + 128 + 8 * lane)) * P32_1;
    }
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f")))

/* A copied block is next read by a step, much later, out of memory in any case: stored past the caches it spares them,
 * and the reading of what it overwrites (a third of all traffic). Such stores want whole, aligned lines. */
#define PAST_CACHES(to) ((uintptr_t)(to) % STRIPE == 0)

AVX2 static inline __m256i accumulate_256(__m256i acc, __m256i data, const unsigned char *key) {
    const __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)key));
    const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(product, _mm256_add_epi64(acc, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2))));
}

AVX2 static inline __m256i scramble_256(__m256i acc, const unsigned char *key) {
    const __m256i prime = _mm256_set1_epi32((int)P32_1);
    acc = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
    acc = _mm256_xor_si256(acc, _mm256_loadu_si256((const __m256i *)key));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(acc, prime), _mm256_slli_epi64(high, 32));
}

AVX2 static void stripes_avx2(uint64_t *acc, const char *p, size_t count, char *to) {
    const int past = PAST_CACHES(to);
    __m256i low = _mm256_loadu_si256((const __m256i *)acc), high = _mm256_loadu_si256((const __m256i *)(acc + 4));
    for (size_t i = 0; i < count; i++, p += STRIPE) {
        __m256i a = _mm256_loadu_si256((const __m256i *)p), b = _mm256_loadu_si256((const __m256i *)(p + 32));
        LOADED_ONCE_LANES(a);
        LOADED_ONCE_LANES(b);
        const unsigned char *key = secret + 8 * (i % STRIPES_PER_BLOCK);
        _mm_prefetch(p + AHEAD, _MM_HINT_T0);
        if (to && past) {
            _mm256_stream_si256((__m256i *)to, a);
            _mm256_stream_si256((__m256i *)(to + 32), b);
            to += STRIPE;
        } else if (to) {
            _mm256_storeu_si256((__m256i *)to, a);
            _mm256_storeu_si256((__m256i *)(to + 32), b);
            to += STRIPE;
        }
        low = accumulate_256(low, a, key);
        high = accumulate_256(high, b, key + 32);
        if (i % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1) {
            low = scramble_256(low, secret + 128);
            high = scramble_256(high, secret + 160);
        }
    }
    _mm_sfence();
    _mm256_storeu_si256((__m256i *)acc, low);
    _mm256_storeu_si256((__m256i *)(acc + 4), high);
}

AVX512 static void stripes_avx512(uint64_t *acc, const char *p, size_t count, char *to) {
    const int past = PAST_CACHES(to);
    const __m512i prime = _mm512_set1_epi32((int)P32_1);
    __m512i sum = _mm512_loadu_si512(acc);
    for (size_t i = 0; i < count; i++, p += STRIPE) {
        __m512i data = _mm512_loadu_si512(p);
        LOADED_ONCE_LANES(data);
        const __m512i keyed = _mm512_xor_si512(data, _mm512_loadu_si512(secret + 8 * (i % STRIPES_PER_BLOCK)));
        _mm_prefetch(p + AHEAD, _MM_HINT_T0);
        if (to && past) {
            _mm512_stream_si512((void *)to, data);
            to += STRIPE;
        } else if (to) {
            _mm512_storeu_si512(to, data);
            to += STRIPE;
        }
        sum = _mm512_add_epi64(sum, _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2)));
        sum = _mm512_add_epi64(sum, _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32)));
        if (i % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1) {
            sum = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
            sum = _mm512_xor_si512(sum, _mm512_loadu_si512(secret + 128));
            const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime);
            sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), _mm512_slli_epi64(high, 32));
        }
    }
    _mm_sfence();
    _mm512_storeu_si512(acc, sum);
}
#endif

static stripes_function *stripes = stripes_plain;

/* The last stripe is the last 64 bytes, whatever of them was taken before; it is no part of the blocks' rhythm. */
static uint64_t hash_long(char *to, const char *from, size_t len) {
    uint64_t acc[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    const size_t whole = (len - 1) / STRIPE, rest = len - whole * STRIPE;
    stripes(acc, from, whole, to);
    unsigned char end[2 * STRIPE]; /* the stripe before the rest, and the rest: of the copy, where there is one */
    memcpy(end, (to ? to : from) + (whole - 1) * STRIPE, STRIPE);
    memcpy(end + STRIPE, from + whole * STRIPE, rest);
    LOADED_ONCE(end);
    if (to) memcpy(to + whole * STRIPE, end + STRIPE, rest);
    uint64_t last[8];
    memcpy(last, end + rest, STRIPE);
    stripe_plain(acc, last, secret + 192 - STRIPE - 7);
    uint64_t sum = len * P64_1;
    for (int i = 0; i < 4; i++)
        sum += fold(acc[2 * i] ^ read64(secret + 11 + 16 * i), acc[2 * i + 1] ^ read64(secret + 11 + 16 * i + 8));
    return avalanche(sum);
}

uint64_t xxh3_copy(char *to, const char *from, size_t len) {
    if (len > LONGEST_SHORT) return hash_long(to, from, len);
    unsigned char copy[LONGEST_SHORT];
    memcpy(copy, from, len);
    LOADED_ONCE(copy);
    if (to) memcpy(to, copy, len);
    return hash_short(copy, len);
}

int xxh3_use(const char *name) {
    if (!strcmp(name, "plain")) { stripes = stripes_plain; return 1; }
#if defined(__x86_64__)
    if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2")) { stripes = stripes_avx2; return 1; }
    if (!strcmp(name, "avx512") && __builtin_cpu_supports("avx512f")) { stripes = stripes_avx512; return 1; }
#endif
    return 0;
}
