/* One token at a time, from a memory whose updates are deferred.
 *
 * Advancing the memory by a token costs 2 q^2 operations a channel; reading 3 R rows of the token out of an older memory
 * and the tokens since costs 6 R q. So the memory s stays where it is for C tokens, which are kept: the j-th after it
 * reads W A^{j+1} s plus the sum over k <= j of (W A^k B) x_{j-k}.
 */

#define PRODUCTS (REGISTERS / 4) /* rows whose sums fit the registers */

/* out (M, 2 LANES) (+)= a b, for a (M, K) whose rows are `width` floats apart and b (K, 2 LANES). */
static inline void multiply(const float *a, int64_t width, const pair *b, pair *out, int64_t M, int64_t K, int adds) {
    for (int64_t i = 0; i < M; i += PRODUCTS) {
        const float *rows[PRODUCTS];
        pair sums[PRODUCTS] = {0};
        for (int64_t r = 0; r < PRODUCTS; r++) rows[r] = a + smaller(i + r, M - 1) * width;
        for (int64_t k = 0; k < K; k++)
UNROLL(8)
            for (int r = 0; r < PRODUCTS; r++) {
                sums[r].re += rows[r][k] * b[k].re;
                sums[r].im += rows[r][k] * b[k].im;
            }
        for (int64_t r = 0; r < smaller(PRODUCTS, M - i); r++) out[i + r] = adds ? plus(out[i + r], sums[r]) : sums[r];
    }
}

/* One tile of columns of `from` (count rows, `step` floats apart, D columns), and back. */
static inline void gather(const float *from, int64_t step, int64_t d, int64_t D, pair *to, int64_t count) {
    const int re = lanes_of(d, D), im = d + LANES < D ? lanes_of(d + LANES, D) : 0;
    for (int64_t k = 0; k < count; k++) to[k] = (pair){load(from + k * step + d, re), load(from + k * step + d + LANES, im)};
}

static inline void scatter(float *to, int64_t step, int64_t d, int64_t D, const pair *from, int64_t count) {
    const int re = lanes_of(d, D), im = d + LANES < D ? lanes_of(d + LANES, D) : 0;
    for (int64_t k = 0; k < count; k++) {
        store(to + k * step + d, from[k].re, re);
        store(to + k * step + d + LANES, from[k].im, im);
    }
}

typedef struct {
    const float *weight, *powers, *impulse, *push; /* (3 R, q), (q, C, q), (q, C), (q, C), see constants.py */
    int64_t q, C;
} memory;

/* W A^{j+1}, (3 R, q). */
static void fill_read_out(const attention *a, const memory *o, int64_t j, float *read_out) {
#pragma omp parallel for num_threads(a->threads) if (a->threads > 1)
    for (int64_t d = 0; d < o->q; d += 2 * LANES) {
        pair *b = scratch_of(a), *out = b + o->q;
        gather(o->powers + j * o->q, o->C * o->q, d, o->q, b, o->q);
        multiply(o->weight, o->q, b, out, 3 * a->R, o->q, 0);
        scatter(read_out, o->q, d, o->q, out, 3 * a->R);
    }
}

/* W A^k B for k < C, (3 R, C). */
static void fill_taps(const attention *a, const memory *o, float *taps) {
    pair *b = scratch_of(a), *out = b + o->q;
    for (int64_t d = 0; d < o->C; d += 2 * LANES) {
        gather(o->impulse, o->C, d, o->C, b, o->q);
        multiply(o->weight, o->q, b, out, 3 * a->R, o->q, 0);
        scatter(taps, o->C, d, o->C, out, 3 * a->R);
    }
}

/* The memory (q, D) after the C tokens that came since. */
static void advance(const attention *a, const memory *o, const float *s, const float *recent, float *after) {
#pragma omp parallel for num_threads(a->threads) if (a->threads > 1)
    for (int64_t d = 0; d < a->D; d += 2 * LANES) {
        pair *b = scratch_of(a), *out = b + (o->q > o->C ? o->q : o->C);
        gather(s, a->D, d, a->D, b, o->q);
        multiply(o->powers + (o->C - 1) * o->q, o->C * o->q, b, out, o->q, o->q, 0);
        gather(recent, a->D, d, a->D, b, o->C);
        multiply(o->push, o->C, b, out, o->q, o->C, 1);
        scatter(after, a->D, d, a->D, out, o->q);
    }
}

/* The rows of the j-th token since the memory s. */
static void fill_rows(
    const attention *a, const memory *o, int64_t j, const float *read_out, const float *taps, const float *s,
    const float *recent) {
#pragma omp parallel for num_threads(a->threads) if (a->threads > 1)
    for (int64_t d = 0; d < a->D; d += 2 * LANES) {
        pair *b = scratch_of(a), *rows = (pair *)row_of(a, d / (2 * LANES), 0);
        gather(s, a->D, d, a->D, b, o->q);
        multiply(read_out, o->q, b, rows, 3 * a->R, o->q, 0);
        gather(recent + j * a->D, -a->D, d, a->D, b, j + 1); /* the newest first */
        multiply(taps, o->C, b, rows, 3 * a->R, j + 1, 1);
    }
}

/* One token x (B, D) after the memory s (B, q, D), the tokens since, recent (B, C, D), and how many, pending (B). The
 * last two are changed in place; of rows that advance new_s, which may be s, holds the new memory, and of the others a
 * copy if any row advances: `is_new` (1) says whether. Returns 0, 1 if memory ran out, or 2 if a row
 * cannot have so many tokens since. */
int implicit_attention_step(
    const float *x, const float *weight, const float *bias, const float *collapse, const float *offset,
    const float *scale,
    const float *powers, const float *impulse, const float *push, const float *s, float *recent, int64_t *pending,
    float *m, float *new_s, int64_t *is_new, int64_t B, int64_t D, int64_t R, int64_t q, int64_t C, int64_t threads) {
    attention a = {.bias = bias, collapse, offset, *scale, D, R, threads};
    const memory o = {weight, powers, impulse, push, q, C};
    for (int64_t b = 0; b < B; b++)
        if (pending[b] < 0 || pending[b] > C) return 2;
    const int64_t longest = q > C ? q : C, rows = q > 3 * R ? q : 3 * R;
    float *read_out = malloc(3 * R * (q + C) * sizeof(float)), *taps = read_out + 3 * R * q;
    int failed = !open_attention(&a, 1, (longest + rows) * sizeof(pair)) || !read_out;
    if (!failed) fill_taps(&a, &o, taps);
    *is_new = 0;
    for (int64_t b = 0; b < B; b++) *is_new |= pending[b] == C;
    for (int64_t b = 0, last = -1; b < B && !failed; b++) {
        float *tokens = recent + b * C * D, *after = new_s + b * q * D;
        const float *before = s + b * q * D;
        const int64_t j = pending[b] % C;
        if (pending[b] == C) advance(&a, &o, before, tokens, after);
        else if (*is_new && after != before) memcpy(after, before, q * D * sizeof(float));
        memcpy(tokens + j * D, x + b * D, D * sizeof(float));
        if (j != last) fill_read_out(&a, &o, j, read_out);
        fill_rows(&a, &o, j, read_out, taps, *is_new ? after : before, tokens);
        attend_tokens(&a, 1, m + b * D);
        pending[b] = j + 1;
        last = j;
    }
    free(read_out);
    close_attention(&a);
    return failed;
}
