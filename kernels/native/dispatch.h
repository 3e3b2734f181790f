/* Which instruction set the small operations and attention use: one choice per process. */

#ifndef KVFERRY_DISPATCH_H
#define KVFERRY_DISPATCH_H

/* Larger is faster. 256 and 512 give equal bits, the others their own. AMX is 512 with attention over bf16 in tiles. */
enum { VARIANT_PLAIN, VARIANT_256, VARIANT_512, VARIANT_AMX, NUM_VARIANTS };

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define WITH_BF16 1 /* the compiler knows vdpbf16ps and AMX */
#endif

int processor_has(int variant);

int variant_in_use(void);

/* 1, or 0 where this processor has it not: plain, avx2, avx512 or amx. */
int use_variant(const char *name);

#endif
