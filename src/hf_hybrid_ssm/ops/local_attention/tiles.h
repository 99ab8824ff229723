/* Products of small matrices for attention: a tile of queries against a few keys, and weights times rows.
 *
 * What has one number for a query and a key is held by key, QUERIES numbers each. Rows are padded with zeros to whole
 * vectors. A `part` of a vector is what the processor holds in one register: compilers split longer ones badly. The
 * sums of a function fit the registers, 32 with AVX-512, else 16.
 */
#if defined(__AVX512F__)
typedef vec part;
typedef ivec ipart;
#define KEYS_AT_ONCE 8
#define ROWS_AT_ONCE 4
#define PARTS_AT_ONCE 4
#elif defined(__AVX__)
typedef half part;
typedef int32_t ipart __attribute__((vector_size(32), aligned(4), may_alias));
#define KEYS_AT_ONCE 4
#define ROWS_AT_ONCE 4
#define PARTS_AT_ONCE 2
#else
typedef quarter part;
typedef int32_t ipart __attribute__((vector_size(16), aligned(4), may_alias));
#define KEYS_AT_ONCE 4
#define ROWS_AT_ONCE 4
#define PARTS_AT_ONCE 2
#endif
#define PART ((int64_t)(sizeof(part) / sizeof(float))) /* lanes */

#define QUERIES (2 * LANES) /* of a tile */
#define KEYS 64             /* whose weights are held at once */
#define KEY_TILE 8          /* what is computed or skipped as a whole */
#define HIDDEN -3e38f       /* logit of a key that a query does not see */
#define NOTHING -1e30f      /* where the largest logit begins: far from HIDDEN, so that a hidden key weighs 0 */
#define INLINE static inline __attribute__((always_inline))

INLINE part choose(ipart condition, part yes, part no) {
    return (part)(((ipart)yes & condition) | ((ipart)no & ~condition));
}

INLINE part all(float value) { return value - (part){0}; }

/* exp for x <= 80, 0 below -80; NaN stays NaN. As `exponential`, of a part. */
INLINE part weight_of(part x) {
    const ipart gone = x < -80.0f;
    const part clamped = choose(gone, all(-80.0f), x);
    const part n = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    const part r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    part p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    p *= (part)((__builtin_convertvector(n, ipart) + 127) << 23);
    return (part)((ipart)p & ~gone);
}

/* out[j] = sum over e of rows[j, e] columns[e], for KEYS_AT_ONCE rows and two parts of the queries */
INLINE void dot_some(float *out, const float *columns, const float *rows, int64_t width, int64_t size) {
    part sums[2 * KEYS_AT_ONCE];
#pragma GCC unroll 16
    for (int s = 0; s < 2 * KEYS_AT_ONCE; s++) sums[s] = (part){0};
    for (int64_t e = 0; e < size; e++) {
        const part near = *(const part *)(columns + e * QUERIES), far = *(const part *)(columns + e * QUERIES + PART);
#pragma GCC unroll 8
        for (int j = 0; j < KEYS_AT_ONCE; j++) {
            sums[2 * j] += rows[j * width + e] * near;
            sums[2 * j + 1] += rows[j * width + e] * far;
        }
    }
#pragma GCC unroll 16
    for (int s = 0; s < 2 * KEYS_AT_ONCE; s++) *(part *)(out + s / 2 * QUERIES + s % 2 * PART) = sums[s];
}

/* KEY_TILE rows against the columns (size, QUERIES) */
INLINE void dot_tile(float *out, const float *columns, const float *rows, int64_t width, int64_t size) {
    for (int j = 0; j < KEY_TILE; j += KEYS_AT_ONCE)
        for (int64_t i = 0; i < QUERIES; i += 2 * PART)
            dot_some(out + j * QUERIES + i, columns + i, rows + j * width, width, size);
}

/* out[r] += sum over t of a[r * apart + t * step] x[t], `parts` parts of `rows` rows */
INLINE void add_some(
    float *out, const float *a, const int64_t apart, const int64_t step, const float *x, int64_t width, int64_t count,
    const int rows, const int parts) {
    part sums[16];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int u = 0; u < parts; u++) sums[r * parts + u] = *(part *)(out + r * width + u * PART);
    for (int64_t t = 0; t < count; t++) {
        part row[4];
#pragma GCC unroll 4
        for (int u = 0; u < parts; u++) row[u] = *(const part *)(x + t * width + u * PART);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int u = 0; u < parts; u++) sums[r * parts + u] += a[r * apart + t * step] * row[u];
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int u = 0; u < parts; u++) *(part *)(out + r * width + u * PART) = sums[r * parts + u];
}

/* The same for all of `rows` rows, a multiple of KEY_TILE, of the width of x. */
INLINE void add_products(
    float *out, int64_t rows, const float *a, const int64_t apart, const int64_t step, const float *x, int64_t width,
    int64_t count) {
    int64_t e = 0;
    for (; e + PARTS_AT_ONCE * PART <= width; e += PARTS_AT_ONCE * PART)
        for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE)
            add_some(out + r * width + e, a + r * apart, apart, step, x + e, width, count, ROWS_AT_ONCE, PARTS_AT_ONCE);
    for (; e + 2 * PART <= width; e += 2 * PART) /* heads of AVX-512 that are not of a multiple of 64 entries */
        for (int64_t r = 0; r < rows; r += 8)
            add_some(out + r * width + e, a + r * apart, apart, step, x + e, width, count, 8, 2);
    for (; e < width; e += PART)
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
