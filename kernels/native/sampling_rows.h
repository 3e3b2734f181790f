/* One row from logits to a token, included once per instruction set.
 *
 * Every variant gives the bits of kernels/sampling.py: elements are computed with single roundings (no fused multiply
 * and add), and all that is summed are whole numbers, so the order of a sum does not matter. Loops over a block are
 * written so that the compiler can put them into lanes. */

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(f) PASTE(f, SUFFIX)

/* The lowest id of the largest value. `finite` as in the rules: no NaN anywhere, and the largest is a number. */
static long NAME(best_id)(const float *row, long vocab, int *finite) {
    int32_t best = INT32_MIN, least = INT32_MAX;
    long begin = 0;
    for (long at = 0; at < vocab; at += CHUNK) {
        const long count = vocab - at < CHUNK ? vocab - at : CHUNK;
        int32_t high = INT32_MIN, low = INT32_MAX;
        for (long i = 0; i < count; i++) {
            const int32_t key = key_of(row[at + i]);
            high = key > high ? key : high;
            low = key < low ? key : low;
        }
        least = low < least ? low : least;
        if (high > best) {
            best = high;
            begin = at;
        }
    }
    *finite = best < KEY_OF_INFINITY && best > KEY_OF_MINUS_INFINITY && least >= KEY_OF_MINUS_INFINITY;
    while (key_of(row[begin]) != best) begin++;
    return begin;
}

/* exp(x - best) of one block in units of 2^-44. Returns the sum. */
ALWAYS int64_t NAME(weigh_block)(const float *restrict x, double best, int64_t *restrict weights,
                                  uint16_t *restrict buckets) {
    double exponents[BLOCK];
    int64_t sum = 0;
    for (int i = 0; i < BLOCK; i++) { /* apart: in one loop the compiler branches on what is lowest */
        const double y = (double)x[i] - best;
        exponents[i] = y > LOWEST_EXPONENT ? y : LOWEST_EXPONENT;
    }
    for (int i = 0; i < BLOCK; i++) {
        const double shifted = exponents[i] * LOG2_E + TO_WHOLE;
        const double n = shifted - TO_WHOLE;
        const double r = (exponents[i] - n * LN2_HIGH) - n * LN2_LOW;
        double series = 1.0 / 39916800.0;
        series = series * r + 1.0 / 3628800.0;
        series = series * r + 1.0 / 362880.0;
        series = series * r + 1.0 / 40320.0;
        series = series * r + 1.0 / 5040.0;
        series = series * r + 1.0 / 720.0;
        series = series * r + 1.0 / 120.0;
        series = series * r + 1.0 / 24.0;
        series = series * r + 1.0 / 6.0;
        series = series * r + 0.5;
        series = series * r + 1.0;
        series = series * r + 1.0;
        const double power = double_of((int64_t)((uint64_t)(bits_of(shifted) + 1023) << 52)); /* 2^n */
        const double placed = series * power + TO_UNITS;
        const int64_t weight = bits_of(placed) - BITS_OF_TO_UNITS;
        /* An unsigned shift: AVX2 has no other in 64 bits. */
        const int64_t bucket = (int64_t)((uint64_t)bits_of(placed - TO_UNITS) >> 47) - BUCKET_ZERO;
        weights[i] = weight;
        buckets[i] = (uint16_t)(bucket > 0 ? bucket : 0);
        sum += weight;
    }
    return sum;
}

/* Weights of all ids, padded with zeros to whole blocks. Returns their sum. */
static int64_t NAME(weigh)(const float *row, long vocab, float best, const workspace *w) {
    int64_t total = 0;
    const long whole = vocab / BLOCK;
    for (long b = 0; b < whole; b++) {
        w->sums[b] = NAME(weigh_block)(row + b * BLOCK, best, w->weights + b * BLOCK, w->buckets + b * BLOCK);
        total += w->sums[b];
    }
    if (whole * BLOCK < vocab) {
        float last[BLOCK];
        for (int i = 0; i < BLOCK; i++) last[i] = whole * BLOCK + i < vocab ? row[whole * BLOCK + i] : -INFINITY;
        w->sums[whole] =
            NAME(weigh_block)(last, best, w->weights + whole * BLOCK, w->buckets + whole * BLOCK);
        total += w->sums[whole];
    }
    return total;
}

ALWAYS int64_t NAME(reached_by)(const int64_t *candidates, long count, int64_t least, int by_number) {
    int64_t sum = 0;
    for (long i = 0; i < count; i++) sum += candidates[i] >= least ? (by_number ? 1 : candidates[i]) : 0;
    return sum;
}

/* Where the fewest best ids (heaviest first, equals by id) reach `wanted`, a weight or a number of ids. Blocks whose
 * weight is `skipped` or less are known to hold none of them. A histogram over buckets of 1/32 octave finds the
 * bucket, bisection the weight in it. {0, 0}: all that weigh anything together do not reach it. */
ALWAYS cut NAME(find_cut)(const workspace *w, int64_t wanted, int64_t skipped, int by_number) {
    memset(w->histogram, 0, BUCKETS * sizeof(int64_t));
    for (long b = 0; b < w->blocks; b++) {
        if (w->sums[b] <= skipped) continue;
        const uint16_t *buckets = w->buckets + b * BLOCK;
        const int64_t *weights = w->weights + b * BLOCK;
        for (int i = 0; i < BLOCK; i++) w->histogram[buckets[i]] += by_number ? 1 : weights[i];
    }
    int64_t above = 0;
    int bucket = BUCKETS - 1;
    while (bucket > 0 && above + w->histogram[bucket] < wanted) above += w->histogram[bucket--];
    if (!bucket) return (cut){0, 0};
    long count = 0;
    for (long b = 0; b < w->blocks; b++) {
        if (w->sums[b] <= skipped) continue;
        const uint16_t *buckets = w->buckets + b * BLOCK;
        int any = 0;
        for (int i = 0; i < BLOCK; i++) any |= buckets[i] == bucket;
        if (!any) continue;
        for (int i = 0; i < BLOCK; i++)
            if (buckets[i] == bucket) w->candidates[count++] = w->weights[b * BLOCK + i];
    }
    int64_t reaches = 1, fails = UNIT + 1; /* as the least weight that is kept */
    while (fails - reaches > 1) {
        const int64_t middle = reaches + (fails - reaches) / 2;
        if (above + NAME(reached_by)(w->candidates, count, middle, by_number) >= wanted) reaches = middle;
        else fails = middle;
    }
    const int64_t missing = wanted - above - NAME(reached_by)(w->candidates, count, reaches + 1, by_number);
    return (cut){reaches, by_number ? missing : (missing + reaches - 1) / reaches};
}

/* Takes all else out of weights and sums: kept are ids above the cut, and the first `equals` at it. Returns the sum. */
static int64_t NAME(keep)(const workspace *w, cut c) {
    int64_t total = 0;
    for (long b = 0; b < w->blocks; b++) {
        if (w->sums[b] < c.least) { /* a block without weight is never read again */
            w->sums[b] = 0;
            continue;
        }
        int64_t *weights = w->weights + b * BLOCK, sum = 0, equals = 0;
        for (int i = 0; i < BLOCK; i++) {
            weights[i] = weights[i] >= c.least ? weights[i] : 0;
            equals += weights[i] == c.least;
            sum += weights[i];
        }
        for (int i = BLOCK - 1; equals > c.equals; i--)
            if (weights[i] == c.least) {
                weights[i] = 0;
                sum -= c.least;
                equals--;
            }
        c.equals -= equals;
        w->sums[b] = sum;
        total += sum;
    }
    return total;
}

/* The id that the number falls on, of what top-k, top-p and min-p leave. */
static long NAME(pick)(const workspace *w, const draw *d, long vocab, int64_t total) {
    if (d->top_k > 0 && d->top_k < vocab) {
        const cut c = NAME(find_cut)(w, d->top_k, 0, 1);
        if (c.least) total = NAME(keep)(w, c);
    }
    if (d->top_p < 1.0) {
        int64_t wanted = (int64_t)ceil(d->top_p * (double)total);
        wanted = wanted < 1 ? 1 : wanted > total ? total : wanted;
        /* All ids of no more than this weight, together, are not missed. */
        const int64_t skipped = (total - wanted) / vocab;
        total = NAME(keep)(w, NAME(find_cut)(w, wanted, skipped, 0));
    }
    if (d->min_p > 0.0) {
        const double least = ceil(d->min_p * (double)UNIT); /* the best one weighs UNIT */
        total = NAME(keep)(w, (cut){least < (double)UNIT ? (int64_t)least : UNIT, INT64_MAX});
    }
    const uint64_t number = uniform_bits(d->seed, d->output_index, d->child);
    const int64_t target = (int64_t)(((unsigned __int128)number * (uint64_t)total) >> 53);
    int64_t reached = 0;
    long b = 0;
    while (reached + w->sums[b] <= target) reached += w->sums[b++]; /* target < total */
    long id = b * BLOCK;
    while ((reached += w->weights[id]) <= target) id++;
    return id;
}

/* Penalties, bias and masks; `to` is a copy of the row. */
static void NAME(adjust)(float *to, const float *row, long vocab, const draw *d) {
    memcpy(to, row, (size_t)vocab * sizeof(float));
    const float repetition = (float)d->repetition, presence = (float)d->presence, frequency = (float)d->frequency;
    for (long i = 0; i < d->num_seen; i++) {
        float x = to[d->seen[i]];
        if (repetition != 1.0f) x = x > 0.0f ? x / repetition : x * repetition;
        if (d->seen_counts[i]) {
            x = x - frequency * (float)d->seen_counts[i];
            x = x - presence;
        }
        to[d->seen[i]] = x;
    }
    for (long i = 0; i < d->num_biased; i++) to[d->biased[i]] += d->biases[i];
    for (long i = 0; i < d->num_banned; i++) to[d->banned[i]] = -INFINITY;
    if (d->allowed)
        for (long i = 0; i < vocab; i++) to[i] = d->allowed[i] ? to[i] : -INFINITY;
}

/* Ids of the `count` largest, best first, equals by id. */
static void NAME(best_ids)(const float *row, long vocab, long count, int32_t *ids) {
    long found = 0;
    int32_t worst = INT32_MIN;
    if (!count) return;
    for (long at = 0; at < vocab; at += BLOCK) {
        const long end = vocab - at < BLOCK ? vocab : at + BLOCK;
        int32_t high = INT32_MIN;
        for (long i = at; i < end; i++) {
            const int32_t key = key_of(row[i]);
            high = key > high ? key : high;
        }
        if (found == count && high <= worst) continue;
        for (long i = at; i < end; i++) {
            const int32_t key = key_of(row[i]);
            if (found == count && key <= worst) continue;
            long place = found < count ? found++ : count - 1;
            for (; place > 0 && key_of(row[ids[place - 1]]) < key; place--) ids[place] = ids[place - 1];
            ids[place] = (int32_t)i;
            worst = key_of(row[ids[found - 1]]);
        }
    }
}

/* Log-softmax at `token` and at the `top` best; `total` is the row's weight relative to its best. */
static void NAME(say)(const float *row, long vocab, float best, int64_t total, long token, const said *out) {
    const double normalizer = (double)best + log((double)total / (double)UNIT);
    NAME(best_ids)(row, vocab, out->top, out->ids);
    for (long i = -1; i < out->top; i++) {
        const double value = (double)row[i < 0 ? token : out->ids[i]] - normalizer;
        out->values[i + 1] = value > LOWEST_LOGPROB ? value : LOWEST_LOGPROB;
    }
}

/* -1 where the model's own logits are not finite. */
static int32_t NAME(sample_row)(const float *row, long vocab, const draw *d, const workspace *w, const said *out) {
    int finite;
    const long own_best = NAME(best_id)(row, vocab, &finite);
    if (!finite) return -1;
    const float *adjusted = row;
    long best = own_best;
    if (d->num_seen || d->num_biased || d->num_banned || d->allowed) {
        NAME(adjust)(w->row, row, vocab, d);
        adjusted = w->row;
        best = NAME(best_id)(adjusted, vocab, &finite);
    }
    long token = best;
    int64_t own_total = 0;
    if (d->temperature >= GREEDY_BELOW) {
        const float temperature = (float)d->temperature, top = adjusted[best] / temperature;
        const int own = adjusted == row && temperature == 1.0f;
        if (temperature != 1.0f) {
            for (long i = 0; i < vocab; i++) w->row[i] = adjusted[i] / temperature;
            adjusted = w->row;
        }
        if (top > -INFINITY && top < INFINITY) { /* else nothing to weigh: an overflow, or all is forbidden */
            const int64_t total = NAME(weigh)(adjusted, vocab, top, w);
            if (own) own_total = total;
            token = NAME(pick)(w, d, vocab, total);
        }
    }
    if (out->values) {
        if (!own_total) own_total = NAME(weigh)(row, vocab, row[own_best], w);
        NAME(say)(row, vocab, row[own_best], own_total, token, out);
    }
    return (int32_t)token;
}

/* Log-probabilities of a given token; 0 where the logits are not finite. */
static int NAME(score_row)(const float *row, long vocab, long token, const workspace *w, const said *out) {
    int finite;
    const long best = NAME(best_id)(row, vocab, &finite);
    if (!finite) return 0;
    NAME(say)(row, vocab, row[best], NAME(weigh)(row, vocab, row[best], w), token, out);
    return 1;
}

static const row_functions NAME(functions) = {NAME(sample_row), NAME(score_row)};

#undef PASTE_
#undef PASTE
#undef NAME
