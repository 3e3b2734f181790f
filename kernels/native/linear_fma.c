/* Products in fp32: by fused multiply-add with AVX-512, with AVX2 to equal bits, and in plain C with two roundings.
 * Weights stay in their dtype and are widened as they are read; x comes in fp32. */
#include <stdlib.h>

#include "linear_kernels.h"

#define KERNELS "linear_fma.h"
#include "variants.h"

#define BY_DTYPE(suffix) {float32_rows_##suffix, bfloat16_rows_##suffix, float16_rows_##suffix}
const pool_work linear_plain[3] = BY_DTYPE(plain);
#ifdef WITH_X86
const pool_work linear_fma256[3] = BY_DTYPE(256), linear_fma512[3] = BY_DTYPE(512);
#endif
