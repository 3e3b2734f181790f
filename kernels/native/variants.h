/* Includes the file that KERNELS names once per instruction set, each time after lanes.h. Its functions are called
 * NAME(f): f_512, f_256 and f_plain. Define KERNELS, include this; nothing of it is left afterwards. */

#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "scalar.h"

#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#define ISA 512
#define SUFFIX _512
#include "lanes.h"
#include KERNELS
#include "lanes_end.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ISA 256
#define SUFFIX _256
#include "lanes.h"
#include KERNELS
#include "lanes_end.h"
#pragma GCC pop_options
#define WITH_X86 1
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O2") /* at O3 this variant alone takes minutes to compile */
#endif
#define ISA 0
#define SUFFIX _plain
#include "lanes.h"
#include KERNELS
#include "lanes_end.h"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
#undef KERNELS
