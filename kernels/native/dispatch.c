/* Asks the processor what it has. */
#include "dispatch.h"

#include <string.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

static int variant = VARIANT_PLAIN;

int variant_in_use(void) { return variant; }

#ifdef WITH_BF16
/* The kernel saves the tiles of a process only on request. */
static int amx_allowed(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}
#endif

int processor_has(int wanted) {
    if (wanted == VARIANT_PLAIN) return 1;
#if defined(__x86_64__) && !defined(__clang__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return 0;
    if (wanted == VARIANT_256) return 1;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return 0;
    if (wanted == VARIANT_512) return 1;
#ifdef WITH_BF16
    return __builtin_cpu_supports("avx512bf16") && amx_allowed();
#endif
#endif
    return 0;
}

int use_variant(const char *name) {
    static const char *const names[NUM_VARIANTS] = {"plain", "avx2", "avx512", "amx"};
    for (int wanted = 0; wanted < NUM_VARIANTS; wanted++)
        if (!strcmp(name, names[wanted]) && processor_has(wanted)) {
            variant = wanted;
            return 1;
        }
    return 0;
}
