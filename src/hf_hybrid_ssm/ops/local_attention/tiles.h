/* Products of small matrices for attention: a tile of queries against a few keys, and weights times rows.
 *
 * What has one number for a query and a key is held by key, QUERIES numbers each. Rows are padded with zeros to whole
 * vectors. Each function is compiled for sizes whose sums fit the registers, of which AVX-512 has 32 of a whole vector.
 */
#define QUERIES (2 * LANES) /* of a tile */
#define KEYS 64             /* whose weights are held at once */
#define KEY_TILE 8          /* what is computed or skipped as a whole */
#define HIDDEN -3e38f       /* logit of a key that a query does not see */
#define NOTHING -1e30f      /* where the largest logit begins: far from HIDDEN, so that a hidden key weighs 0 */
#define INLINE static inline __attribute__((always_inline))

INLINE vec choose(ivec condition, vec yes, vec no) {
    return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition));
}

/* exp for x <= 80, 0 below -80; NaN stays NaN */
INLINE vec weight_of(vec x) { return (vec)((ivec)exponential(x) & ~(ivec)(x < -80.0f)); }

/* out[j] = sum over e of rows[j, e] columns[e], for `keys` rows and `vectors` vectors of queries */
INLINE void dot_some(
    float *out, const float *columns, const float *rows, int64_t width, int64_t size, const int keys, const int vectors) {
    vec sums[16];
#pragma GCC unroll 16
    for (int s = 0; s < keys * vectors; s++) sums[s] = (vec){0};
    for (int64_t e = 0; e < size; e++) {
        vec column[2];
#pragma GCC unroll 2
        for (int u = 0; u < vectors; u++) column[u] = *(const vec *)(columns + e * QUERIES + u * LANES);
#pragma GCC unroll 8
        for (int j = 0; j < keys; j++)
#pragma GCC unroll 2
            for (int u = 0; u < vectors; u++) sums[j * vectors + u] += rows[j * width + e] * column[u];
    }
#pragma GCC unroll 8
    for (int j = 0; j < keys; j++)
#pragma GCC unroll 2
        for (int u = 0; u < vectors; u++) *(vec *)(out + j * QUERIES + u * LANES) = sums[j * vectors + u];
}

/* KEY_TILE rows against the columns (size, QUERIES) */
INLINE void dot_tile(float *out, const float *columns, const float *rows, int64_t width, int64_t size) {
#ifdef __AVX512F__
    dot_some(out, columns, rows, width, size, KEY_TILE, 2);
#else
    for (int j = 0; j < KEY_TILE; j += 4)
        for (int u = 0; u < QUERIES; u += LANES)
            dot_some(out + j * QUERIES + u, columns + u, rows + j * width, width, size, 4, 1);
#endif
}

/* out[r] += sum over t of a[r * apart + t * step] x[t], `vectors` vectors of `rows` rows */
INLINE void add_some(
    float *out, const float *a, const int64_t apart, const int64_t step, const float *x, int64_t width, int64_t count,
    const int rows, const int vectors) {
    vec sums[16];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int u = 0; u < vectors; u++) sums[r * vectors + u] = *(vec *)(out + r * width + u * LANES);
    for (int64_t t = 0; t < count; t++) {
        vec row[4];
#pragma GCC unroll 4
        for (int u = 0; u < vectors; u++) row[u] = *(const vec *)(x + t * width + u * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int u = 0; u < vectors; u++) sums[r * vectors + u] += a[r * apart + t * step] * row[u];
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int u = 0; u < vectors; u++) *(vec *)(out + r * width + u * LANES) = sums[r * vectors + u];
}

/* The same for all of `rows` rows, a multiple of KEY_TILE, of the width of x. */
INLINE void add_products(
    float *out, int64_t rows, const float *a, const int64_t apart, const int64_t step, const float *x, int64_t width,
    int64_t count) {
    int64_t e = 0;
#ifdef __AVX512F__
    for (; e + 4 * LANES <= width; e += 4 * LANES)
        for (int64_t r = 0; r < rows; r += 4)
            add_some(out + r * width + e, a + r * apart, apart, step, x + e, width, count, 4, 4);
    for (; e + 2 * LANES <= width; e += 2 * LANES)
        for (int64_t r = 0; r < rows; r += 8)
            add_some(out + r * width + e, a + r * apart, apart, step, x + e, width, count, 8, 2);
    for (; e < width; e += LANES)
        for (int64_t r = 0; r < rows; r += 8)
            add_some(out + r * width + e, a + r * apart, apart, step, x + e, width, count, 8, 1);
#else
    for (; e < width; e += LANES)
        for (int64_t r = 0; r < rows; r += 4)
            add_some(out + r * width + e, a + r * apart, apart, step, x + e, width, count, 4, 1);
#endif
}

/* rows of `width` from rows of `size` that lie apart, times a factor; zeros in the rest and in rows that are missing */
INLINE void copy_rows(
    float *to, int64_t width, int64_t rows, const float *from, int64_t apart, int64_t size, int64_t count, float factor) {
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
