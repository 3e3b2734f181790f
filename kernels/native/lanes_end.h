/* Takes back the names that lanes.h made, for the next instruction set. */

#undef vf
#undef BOTH
#undef EACH
#undef NEAREST8
#undef NAME
#undef PASTE
#undef PASTE_
#undef INLINE
#undef ISA
#undef SUFFIX
