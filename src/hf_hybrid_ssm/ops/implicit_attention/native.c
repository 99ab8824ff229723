/* Implicit attention on a CPU: convolution by Fourier transforms, attention among the rows of each token, and decoding.
 *
 * Letters: B batch, L length, D channels, R rows of queries (of keys, of values), T taps of the 3 R filters. All
 * tensors are contiguous float32: x, m (B, L, D); taps (3 R, T); bias (3 R); collapse (R). A row is done in segments of
 * S tokens: a transform of `points` >= T - 1 + S covers a segment and what its filters see of the tokens before, so
 * that its last S outputs are the convolution (overlap-save). Queries, keys and values of one segment are all that is
 * ever held, the backward computes them once more. Sums over channels are kept apart by tile, in a fixed order.
 */
#include "vectors.h"
#include "fourier.h"
#include "attention.h"
#include "decoding.h"

typedef struct {
    attention a;
    const float *x, *taps;
    int64_t B, L, T, points, S;
    float *roots, *spectra; /* (points, 2), (3 R, points, 2) */
} problem;

/* Lanes of the real and imaginary parts of tile d / (2 LANES). */
static inline int real_lanes(const problem *p, int64_t d) { return lanes_of(d, p->a.D); }

static inline int imaginary_lanes(const problem *p, int64_t d) {
    return d + LANES < p->a.D ? lanes_of(d + LANES, p->a.D) : 0;
}

/* The spectrum of a tile's x before and in the segment that begins at token `begin`. */
static void spectrum_of_x(const problem *p, int64_t b, int64_t begin, int64_t tile, pair *z) {
    const int64_t d = tile * 2 * LANES, first = begin - (p->T - 1);
    const int re = real_lanes(p, d), im = imaginary_lanes(p, d);
    for (int64_t k = 0; k < p->points; k++) {
        const int64_t t = first + k;
        z[k] = (pair){{0}, {0}};
        if (t < 0 || t >= p->L || t >= begin + p->S) continue;
        const float *x = p->x + (b * p->L + t) * p->a.D + d;
        z[k] = (pair){load(x, re), load(x + LANES, im)};
    }
    to_spectrum(z, p->points, p->roots, 1);
}

/* Spectra of all filters, over `points`: the inverse transform does not divide. */
static void fill_spectra(const problem *p) {
    const int64_t filters = 3 * p->a.R, groups = ceil_div(filters, LANES);
#pragma omp parallel for num_threads(p->a.threads) if (p->a.threads > 1)
    for (int64_t group = 0; group < groups; group++) {
        pair *z = scratch_of(&p->a);
        const int64_t first = group * LANES, count = smaller(LANES, filters - first);
        memset(z, 0, p->points * sizeof(pair));
        for (int64_t i = 0; i < count; i++)
            for (int64_t k = 0; k < p->T; k++) z[k].re[i] = p->taps[(first + i) * p->T + k] / (float)p->points;
        to_spectrum(z, p->points, p->roots, 1);
        for (int64_t i = 0; i < count; i++)
            for (int64_t k = 0; k < p->points; k++) {
                p->spectra[2 * ((first + i) * p->points + k)] = z[k].re[i];
                p->spectra[2 * ((first + i) * p->points + k) + 1] = z[k].im[i];
            }
    }
}

/* All filters over a segment of `count` tokens. */
static void convolve(const problem *p, int64_t b, int64_t begin, int64_t count) {
#pragma omp parallel for num_threads(p->a.threads) schedule(dynamic) if (p->a.threads > 1)
    for (int64_t tile = 0; tile < p->a.tiles; tile++) {
        pair *z = scratch_of(&p->a), *y = z + p->points;
        spectrum_of_x(p, b, begin, tile, z);
        for (int64_t i = 0; i < 3 * p->a.R; i++) {
            const float *spectrum = p->spectra + 2 * i * p->points;
            for (int64_t k = 0; k < p->points; k++) y[k] = times(z[k], spectrum + 2 * k);
            from_spectrum(y, p->points, p->roots, 1);
            memcpy(row_of(&p->a, tile, i), y + p->T - 1, count * sizeof(pair));
        }
    }
}

static int open_problem(problem *p) {
    p->spectra = malloc(3 * p->a.R * p->points * 2 * sizeof(float));
    p->roots = malloc(p->points * 2 * sizeof(float));
    if (!open_attention(&p->a, p->S, 3 * p->points * sizeof(pair)) || !p->spectra || !p->roots) return 0;
    fill_roots(p->roots, p->points);
    fill_spectra(p);
    return 1;
}

static int close_problem(problem *p, int failed) {
    close_attention(&p->a);
    free(p->spectra);
    free(p->roots);
    return failed;
}

/* Returns 0, or 1 if memory ran out. */
int implicit_attention_forward(
    const float *x, const float *taps, const float *bias, const float *collapse, const float *offset,
    const float *scale, float *m,
    int64_t B, int64_t L, int64_t D, int64_t R, int64_t T, int64_t points, int64_t S, int64_t threads) {
    problem p = {.a = {.bias = bias, collapse, offset, *scale, D, R, threads}, x, taps, B, L, T, points, S};
    if (!open_problem(&p)) return close_problem(&p, 1);
    for (int64_t b = 0; b < B; b++)
        for (int64_t begin = 0; begin < L; begin += S) {
            const int64_t count = smaller(S, L - begin);
            convolve(&p, b, begin, count);
            attend_tokens(&p.a, count, m + (b * L + begin) * D);
        }
    return close_problem(&p, 0);
}

typedef struct {
    float *dx, *dtaps, *dspectra; /* (B, L, D), (3 R, T), (tiles, 3 R, points, 2) */
} gradients;

/* From the gradient of a segment's rows to those of x (added) and of the spectra (added). */
static void convolve_back(const problem *p, int64_t b, int64_t begin, int64_t count, const gradients *g) {
#pragma omp parallel for num_threads(p->a.threads) schedule(dynamic) if (p->a.threads > 1)
    for (int64_t tile = 0; tile < p->a.tiles; tile++) {
        pair *z = scratch_of(&p->a), *y = z + p->points, *dz = y + p->points;
        spectrum_of_x(p, b, begin, tile, z);
        memset(dz, 0, p->points * sizeof(pair));
        for (int64_t i = 0; i < 3 * p->a.R; i++) {
            const float *spectrum = p->spectra + 2 * i * p->points;
            float *dspectrum = g->dspectra + 2 * (tile * 3 * p->a.R + i) * p->points;
            memset(y, 0, p->points * sizeof(pair));
            memcpy(y + p->T - 1, row_of(&p->a, tile, i), count * sizeof(pair));
            to_spectrum(y, p->points, p->roots, 1);
            for (int64_t k = 0; k < p->points; k++) {
                dz[k] = plus(dz[k], times_conjugate(y[k], spectrum + 2 * k));
                dspectrum[2 * k] += sum(z[k].re * y[k].re + z[k].im * y[k].im);
                dspectrum[2 * k + 1] += sum(z[k].re * y[k].im - z[k].im * y[k].re);
            }
        }
        from_spectrum(dz, p->points, p->roots, 1);
        const int64_t d = tile * 2 * LANES, first = begin - (p->T - 1);
        const int re = real_lanes(p, d), im = imaginary_lanes(p, d);
        for (int64_t t = first < 0 ? 0 : first; t < begin + count; t++) {
            float *dx = g->dx + (b * p->L + t) * p->a.D + d;
            store(dx, load(dx, re) + dz[t - first].re, re);
            store(dx + LANES, load(dx + LANES, im) + dz[t - first].im, im);
        }
    }
}

/* The gradient of the taps from those of the spectra. */
static void gradient_of_taps(const problem *p, const gradients *g) {
    const int64_t filters = 3 * p->a.R;
#pragma omp parallel for num_threads(p->a.threads) if (p->a.threads > 1)
    for (int64_t first = 0; first < filters; first += LANES) {
        pair *z = scratch_of(&p->a);
        const int64_t count = smaller(LANES, filters - first);
        memset(z, 0, p->points * sizeof(pair));
        for (int64_t tile = 0; tile < p->a.tiles; tile++)
            for (int64_t i = 0; i < count; i++) {
                const float *dspectrum = g->dspectra + 2 * (tile * filters + first + i) * p->points;
                for (int64_t k = 0; k < p->points; k++) {
                    z[k].re[i] += dspectrum[2 * k];
                    z[k].im[i] += dspectrum[2 * k + 1];
                }
            }
        from_spectrum(z, p->points, p->roots, 1);
        for (int64_t i = 0; i < count; i++)
            for (int64_t k = 0; k < p->T; k++) g->dtaps[(first + i) * p->T + k] = z[k].re[i] / (float)p->points;
    }
}

/* dx and sums are zero at the start; sums (ceil(S / CHUNK), 4 R). Returns 0, or 1 if memory ran out. */
int implicit_attention_backward(
    const float *x, const float *taps, const float *bias, const float *collapse, const float *offset,
    const float *scale, const float *dm,
    float *dx, float *dtaps, float *sums, int64_t B, int64_t L, int64_t D, int64_t R, int64_t T, int64_t points,
    int64_t S, int64_t threads) {
    problem p = {.a = {.bias = bias, collapse, offset, *scale, D, R, threads}, x, taps, B, L, T, points, S};
    gradients g = {dx, dtaps, 0};
    if (!open_problem(&p)) return close_problem(&p, 1);
    g.dspectra = calloc(p.a.tiles * 3 * R * points * 2, sizeof(float));
    if (!g.dspectra) return close_problem(&p, 1);
    for (int64_t b = 0; b < B; b++)
        for (int64_t begin = 0; begin < L; begin += S) {
            const int64_t count = smaller(S, L - begin);
            convolve(&p, b, begin, count);
            attend_tokens_back(&p.a, count, dm + (b * L + begin) * D, sums);
            convolve_back(&p, b, begin, count, &g);
        }
    gradient_of_taps(&p, &g);
    free(g.dspectra);
    return close_problem(&p, 0);
}
