/* Products of small matrices for attention: a tile of queries against a few keys, and weights times rows.
 *
 * What has one number for a query and a key is held by key, QUERIES numbers each. Rows are padded with zeros to whole
 * vectors. The sums of a function fit the registers.
 */
#if REGISTERS == 32
#define KEYS_AT_ONCE 8
#define VECTORS_AT_ONCE 4
#else
#define KEYS_AT_ONCE 4
#define VECTORS_AT_ONCE 2
#endif
#define ROWS_AT_ONCE 4

#define QUERIES 32         /* of a tile, two vectors at least */
#define KEYS 64            /* whose weights are held at once */
#define KEY_TILE 8         /* what is computed or skipped as a whole */
#define HIDDEN -3e38f      /* logit of a key that a query does not see */
#define NOTHING -1e30f     /* where the largest logit begins: far from HIDDEN, so that a hidden key weighs 0 */

INLINE vec choose(ivec condition, vec yes, vec no) {
    return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition));
}

INLINE vec all(float value) { return value - (vec){0}; }

/* exp for x <= 80, 0 below -80; NaN stays NaN. Else as `exponential`. */
INLINE vec weight_of(vec x) {
    const ivec gone = x < -80.0f;
    const vec clamped = choose(gone, all(-80.0f), x);
    const vec n = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    const vec r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    p *= (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
    return (vec)((ivec)p & ~gone);
}

/* out[j] = sum over e of rows[j, e] columns[e], for KEYS_AT_ONCE rows and two vectors of the queries */
INLINE void dot_some(float *out, const float *columns, const float *rows, int64_t width, int64_t size) {
    vec sums[2 * KEYS_AT_ONCE];
UNROLL(16)
    for (int s = 0; s < 2 * KEYS_AT_ONCE; s++) sums[s] = (vec){0};
    for (int64_t e = 0; e < size; e++) {
        const vec near = *(const vec *)(columns + e * QUERIES), far = *(const vec *)(columns + e * QUERIES + LANES);
UNROLL(8)
        for (int j = 0; j < KEYS_AT_ONCE; j++) {
            sums[2 * j] += rows[j * width + e] * near;
            sums[2 * j + 1] += rows[j * width + e] * far;
        }
    }
UNROLL(16)
    for (int s = 0; s < 2 * KEYS_AT_ONCE; s++) *(vec *)(out + s / 2 * QUERIES + s % 2 * LANES) = sums[s];
}

/* KEY_TILE rows against the columns (size, QUERIES) */
INLINE void dot_tile(float *out, const float *columns, const float *rows, int64_t width, int64_t size) {
    for (int j = 0; j < KEY_TILE; j += KEYS_AT_ONCE)
        for (int64_t i = 0; i < QUERIES; i += 2 * LANES)
            dot_some(out + j * QUERIES + i, columns + i, rows + j * width, width, size);
}

/* out[r] += sum over t of a[r * apart + t * step] x[t], `vectors` vectors of `rows` rows */
INLINE void add_some(
    float *out, const float *a, const int64_t apart, const int64_t step, const float *x, int64_t width, int64_t count,
    const int rows, const int vectors) {
    vec sums[16];
UNROLL(8)
    for (int r = 0; r < rows; r++)
UNROLL(4)
        for (int u = 0; u < vectors; u++) sums[r * vectors + u] = *(vec *)(out + r * width + u * LANES);
    for (int64_t t = 0; t < count; t++) {
        vec row[4];
UNROLL(4)
        for (int u = 0; u < vectors; u++) row[u] = *(const vec *)(x + t * width + u * LANES);
UNROLL(8)
        for (int r = 0; r < rows; r++)
UNROLL(4)
            for (int u = 0; u < vectors; u++) sums[r * vectors + u] += a[r * apart + t * step] * row[u];
    }
UNROLL(8)
    for (int r = 0; r < rows; r++)
UNROLL(4)
        for (int u = 0; u < vectors; u++) *(vec *)(out + r * width + u * LANES) = sums[r * vectors + u];
}

/* The same for all of `rows` rows, a multiple of KEY_TILE, of the width of x. */
INLINE void add_products(
    float *out, int64_t rows, const float *a, const int64_t apart, const int64_t step, const float *x, int64_t width,
    int64_t count) {
    int64_t e = 0;
    for (; e + VECTORS_AT_ONCE * LANES <= width; e += VECTORS_AT_ONCE * LANES)
        for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE)
            add_some(out + r * width + e, a + r * apart, apart, step, x + e, width, count, ROWS_AT_ONCE, VECTORS_AT_ONCE);
    for (; e + 2 * LANES <= width; e += 2 * LANES) /* heads of AVX-512 that are not of a multiple of 64 entries */
        for (int64_t r = 0; r < rows; r += 8)
            add_some(out + r * width + e, a + r * apart, apart, step, x + e, width, count, 8, 2);
    for (; e < width; e += LANES)
        for (int64_t r = 0; r < rows; r += 8)
            add_some(out + r * width + e, a + r * apart, apart, step, x + e, width, count, 8, 1);
}

/* rows of `width` from rows of `size` that lie apart, times a factor; zeros in the rest and in rows that are missing */
INLINE void copy_rows(
    float *to, int64_t width, int64_t rows, const float *from, int64_t apart, int64_t size, int64_t count,
    float factor) {
    for (int64_t r = 0; r < count; r++) {
        for (int64_t e = 0; e < size; e++) to[r * width + e] = factor * from[r * apart + e];
        for (int64_t e = size; e < width; e++) to[r * width + e] = 0;
    }
    memset(to + count * width, 0, (rows - count) * width * sizeof(float));
}

/* columns (size, QUERIES) of QUERIES rows */
INLINE void turn(float *columns, const float *rows, int64_t width, int64_t size) {
    for (int64_t i = 0; i < QUERIES; i++)
        for (int64_t e = 0; e < size; e++) columns[e * QUERIES + i] = rows[i * width + e];
}
