/* Fourier transforms along time of two vectors of channels at once, in place and without reordering.
 *
 * The channels of a pair are LANES real and LANES imaginary parts of one complex sequence: what is multiplied by
 * the spectrum of a real filter keeps them apart, so that two real convolutions cost one complex transform. Forward
 * decimates in frequency, backward undoes exactly that, hence spectra are in scrambled order; products do not mind.
 */
#include <math.h>

typedef struct { vec re, im; } pair;

#define IN_CACHE 256 /* points of a transform that fit into the innermost cache */

/* cos and sin of 2 pi k / points, interleaved */
static void fill_roots(float *roots, int64_t points) {
    for (int64_t k = 0; k < points; k++) {
        const double angle = 6.283185307179586476925 * (double)k / (double)points;
        roots[2 * k] = (float)cos(angle);
        roots[2 * k + 1] = (float)sin(angle);
    }
}

static inline pair times(pair a, const float *root) {
    return (pair){a.re * root[0] - a.im * root[1], a.im * root[0] + a.re * root[1]};
}

static inline pair times_conjugate(pair a, const float *root) {
    return (pair){a.re * root[0] + a.im * root[1], a.im * root[0] - a.re * root[1]};
}

static inline pair plus(pair a, pair b) { return (pair){a.re + b.re, a.im + b.im}; }

static inline pair minus(pair a, pair b) { return (pair){a.re - b.re, a.im - b.im}; }

static inline void halve(pair *z) {
    const pair a = z[0], b = z[1];
    z[0] = plus(a, b);
    z[1] = minus(a, b);
}

/* One transform of n points becomes four of n / 4; step is the points of all roots over n. */
static inline void split(pair *z, int64_t n, const float *roots, int64_t step) {
    const int64_t quarter = n / 4;
    for (int64_t k = 0; k < quarter; k++) {
        const pair a = z[k], b = z[k + quarter], c = z[k + 2 * quarter], d = z[k + 3 * quarter];
        const pair even = plus(a, c), odd = minus(a, c), sum = plus(b, d), turned = minus(b, d); /* by -i below */
        const float *root = roots + 2 * k * step, *second = root + 2 * k * step, *third = second + 2 * k * step;
        z[k] = plus(even, sum);
        z[k + quarter] = times_conjugate((pair){odd.re + turned.im, odd.im - turned.re}, root);
        z[k + 2 * quarter] = times_conjugate(minus(even, sum), second);
        z[k + 3 * quarter] = times_conjugate((pair){odd.re - turned.im, odd.im + turned.re}, third);
    }
}

/* The inverse of split, times four. */
static inline void merge(pair *z, int64_t n, const float *roots, int64_t step) {
    const int64_t quarter = n / 4;
    for (int64_t k = 0; k < quarter; k++) {
        const float *root = roots + 2 * k * step, *second = root + 2 * k * step, *third = second + 2 * k * step;
        const pair a = z[k], b = times(z[k + quarter], root), c = times(z[k + 2 * quarter], second);
        const pair d = times(z[k + 3 * quarter], third);
        const pair even = plus(a, c), odd = minus(a, c), sum = plus(b, d), turned = minus(b, d);
        z[k] = plus(even, sum);
        z[k + quarter] = (pair){odd.re - turned.im, odd.im + turned.re};
        z[k + 2 * quarter] = minus(even, sum);
        z[k + 3 * quarter] = (pair){odd.re + turned.im, odd.im - turned.re};
    }
}

/* The spectrum of z, n a power of two, in scrambled order. */
static void to_spectrum(pair *z, int64_t n, const float *roots, int64_t step) {
    if (n > IN_CACHE) { /* the quarters one after the other, each for as long as it stays in cache */
        split(z, n, roots, step);
        for (int64_t q = 0; q < 4; q++) to_spectrum(z + q * (n / 4), n / 4, roots, 4 * step);
        return;
    }
    int64_t m = n;
    for (; m >= 4; m /= 4, step *= 4)
        for (int64_t begin = 0; begin < n; begin += m) split(z + begin, m, roots, step);
    if (m == 2)
        for (int64_t begin = 0; begin < n; begin += 2) halve(z + begin);
}

/* From a scrambled spectrum back to the sequence, times n. */
static void from_spectrum(pair *z, int64_t n, const float *roots, int64_t step) {
    if (n > IN_CACHE) {
        for (int64_t q = 0; q < 4; q++) from_spectrum(z + q * (n / 4), n / 4, roots, 4 * step);
        merge(z, n, roots, step);
        return;
    }
    int64_t m = n;
    while (m > 4) m /= 4;
    if (m == 2) {
        for (int64_t begin = 0; begin < n; begin += 2) halve(z + begin);
        m = 8;
    }
    for (; m >= 4 && m <= n; m *= 4)
        for (int64_t begin = 0; begin < n; begin += m) merge(z + begin, m, roots, step * (n / m));
}
