/* Shared by the two products of bf16 pairs, DOT and AMX: how sums are written. Included inside their target pragmas. */

/* Adds the bias, rounds, writes the outputs of one group that exist. */
ALWAYS void write_group(const product *p, long row, long group, __m512 sum) {
    const int outputs = real_outputs(p, group);
    const __mmask16 mask = (__mmask16)((1u << outputs) - 1);
    const long at = row * p->w->out + group * LANES;
    if (p->w->bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, p->w->bias + group * LANES));
    if (p->out_dtype == FLOAT32) _mm512_mask_storeu_ps((float *)p->y + at, mask, sum);
    else _mm256_mask_storeu_epi16((uint16_t *)p->y + at, mask, (__m256i)_mm512_cvtneps_pbh(sum));
}
