/* The small operations: chooses the instruction set and shares tokens out to threads. */
#include "rows.h"

#include "attention.h"
#include "dispatch.h"
#include "pool.h"

#define KERNELS "rows_kernels.h"
#include "variants.h"

enum { TOKENS_PER_ITEM = 16 };

#ifdef WITH_X86
#define VARIANTS(f) {f##_plain, f##_256, f##_512, f##_512}
#else
#define VARIANTS(f) {f##_plain, f##_plain, f##_plain, f##_plain}
#endif

/* One function for threads to call: items are TOKENS_PER_ITEM tokens each. */
#define SHARED(operation) \
    static void operation##_items(const void *job, long first, long last, int member) { \
        static void (*const variants[NUM_VARIANTS])(const operation##_args *, long, long) = VARIANTS(operation); \
        const operation##_args *a = job; \
        const long end = last * TOKENS_PER_ITEM; \
        (void)member; \
        variants[variant_in_use()](a, first * TOKENS_PER_ITEM, end < a->tokens ? end : a->tokens); \
    } \
    void operation##_rows(const operation##_args *a, int threads) { \
        const long items = (a->tokens + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM; \
        run_parallel(operation##_items, a, items, items < 4 ? 1 : threads); \
    }

SHARED(norm)
SHARED(silu)
SHARED(rope)
