/* XXH3-64 with seed 0 of `len` bytes, which are copied to `to` on the way where that is not NULL.
 *
 * Written from the published specification (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). The copy
 * is what is hashed: every byte is loaded once, and that load is both stored and hashed, so a source that somebody
 * writes to meanwhile cannot give a good checksum to a bad copy.
 * All variants give the same number; they differ in speed. */
#pragma once

#include <stddef.h>
#include <stdint.h>

uint64_t xxh3_copy(char *to, const char *from, size_t len);

/* Chooses avx512, avx2 or plain; 0 where this processor has it not. */
int xxh3_use(const char *name);
