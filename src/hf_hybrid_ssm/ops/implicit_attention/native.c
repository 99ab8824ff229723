/* Implicit attention on a CPU: the convolution by Fourier transforms, and the attention of each token while its rows
 * are in cache.
 *
 * Letters: B batch, L length, D channels, R rows of queries (of keys, of values), T taps of the 3 R filters. All
 * tensors are contiguous float32: x, m (B, L, D); taps (3 R, T); bias (3 R); collapse (R). A row is done in segments of
 * S tokens: the transform of `points` >= T - 1 + S covers a segment and what its filters see of the tokens before, so
 * that its last S outputs are the convolution (overlap-save). Queries, keys and values of one segment are all that is
 * ever held, the backward computes them once more; sums over tokens are kept apart by chunk, those over channels by
 * tile, in a fixed order: hence the same bits in every run and for every number of threads.
 */
#include <omp.h>
#include <sys/mman.h>

#include "vectors.h"
#include "fourier.h"

#define CHUNK 16 /* tokens of one task of the thread pool */
#define BLOCK 4  /* rows whose products are summed in registers: BLOCK squared sums */

typedef float half __attribute__((vector_size(32), aligned(4), may_alias));
typedef float quarter __attribute__((vector_size(16), aligned(4), may_alias));

typedef struct {
    const float *x, *taps, *bias, *collapse;
    float scale; /* of the logits */
    int64_t B, L, D, R, T, points, S, threads;
    int64_t tiles, vectors, padded, width, stride; /* padded, width: R rounded up to BLOCK, LANES; stride: see row_of */
    float *roots, *spectra;                        /* (points, 2), (3 R, points, 2) */
    float *rows;                                   /* (tiles, 3 R, stride, 2 LANES) of a segment */
    char *scratch;                                 /* of each thread */
    int64_t scratch_size;
    int has_failed;
} problem;

static inline float total(vec v) {
    const half h = ((half *)&v)[0] + ((half *)&v)[1];
    const quarter q = ((quarter *)&h)[0] + ((quarter *)&h)[1];
    return (q[0] + q[2]) + (q[1] + q[3]);
}

/* x Phi(x), and its derivative Phi(x) + x phi(x); erfc(|x| / sqrt 2) = exp(-x^2 / 2) times a polynomial in
 * 1 / (1 + 0.3 |x|), relative error 1.1e-7 */
static inline vec gelu(vec x, vec *slope) {
    const vec size = (vec)((ivec)x & 0x7fffffff), density = exponential(-0.5f * x * x);
    const vec t = 1.0f / (1.0f + 0.3f * size);
    vec p = broadcast(7.239093036e-02f);
    p = p * t - 3.187620745e-01f;
    p = p * t + 4.202467785e-01f;
    p = p * t - 1.143444291e-01f;
    p = p * t + 2.608382792e-01f;
    p = p * t + 1.986925548e-01f;
    p = p * t + 2.416913413e-01f;
    p = p * t + 2.392465064e-01f;
    const vec tail = 0.5f * density * p * t; /* 1 - Phi(|x|) */
    const ivec negative = x < 0;
    const vec below = (vec)(((ivec)tail & negative) | ((ivec)(1.0f - tail) & ~negative));
    *slope = below + 0.398942280401f * x * density;
    return x * below;
}

/* Outputs of filter i for a tile's channels, token by token; strides of a power of two would share cache lines. */
static inline float *row_of(const problem *p, int64_t tile, int64_t i) {
    return p->rows + (tile * 3 * p->R + i) * p->stride * 2 * LANES;
}

static inline void *scratch_of(const problem *p) { return p->scratch + omp_get_thread_num() * p->scratch_size; }

/* Lanes of the real and imaginary parts of tile d / (2 LANES). */
static inline int real_lanes(const problem *p, int64_t d) { return lanes_of(d, p->D); }

static inline int imaginary_lanes(const problem *p, int64_t d) {
    return d + LANES < p->D ? lanes_of(d + LANES, p->D) : 0;
}

/* The spectrum of a tile's x before and in the segment that begins at token `begin`. */
static void spectrum_of_x(const problem *p, int64_t b, int64_t begin, int64_t tile, pair *z) {
    const int64_t d = tile * 2 * LANES, first = begin - (p->T - 1);
    const int re = real_lanes(p, d), im = imaginary_lanes(p, d);
    for (int64_t k = 0; k < p->points; k++) {
        const int64_t t = first + k;
        z[k] = (pair){{0}, {0}};
        if (t < 0 || t >= p->L || t >= begin + p->S) continue;
        const float *x = p->x + (b * p->L + t) * p->D + d;
        z[k] = (pair){load(x, re), load(x + LANES, im)};
    }
    to_spectrum(z, p->points, p->roots, 1);
}

/* Spectra of all filters, over `points`: the inverse transform does not divide. */
static void fill_spectra(const problem *p) {
    const int64_t filters = 3 * p->R, groups = ceil_div(filters, LANES);
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t group = 0; group < groups; group++) {
        pair *z = scratch_of(p);
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
#pragma omp parallel for num_threads(p->threads) schedule(dynamic) if (p->threads > 1)
    for (int64_t tile = 0; tile < p->tiles; tile++) {
        pair *z = scratch_of(p), *y = z + p->points;
        spectrum_of_x(p, b, begin, tile, z);
        for (int64_t i = 0; i < 3 * p->R; i++) {
            const float *spectrum = p->spectra + 2 * i * p->points;
            for (int64_t k = 0; k < p->points; k++) y[k] = times(z[k], spectrum + 2 * k);
            from_spectrum(y, p->points, p->roots, 1);
            memcpy(row_of(p, tile, i), y + p->T - 1, count * sizeof(pair));
        }
    }
}

/* The activated rows of one token, (3, padded, vectors); channels and rows that do not exist stay zero. */
static inline void activate(const problem *p, int64_t t, vec *active, vec *slope) {
    const int left = lanes_of((p->vectors - 1) * LANES, p->D);
    for (int64_t i = 0; i < 3 * p->R; i++) {
        const vec bias = broadcast(p->bias ? p->bias[i] : 0);
        const int64_t at = (i / p->R * p->padded + i % p->R) * p->vectors;
        for (int64_t v = 0; v < p->vectors; v++) {
            const float *y = row_of(p, v / 2, i) + (2 * t + v % 2) * LANES;
            __builtin_prefetch(y + 4 * LANES);
            active[at + v] = gelu(*(const vec *)y + bias, slope + at + v);
        }
        for (int lane = left; lane < LANES; lane++)
            active[at + p->vectors - 1][lane] = slope[at + p->vectors - 1][lane] = 0;
    }
}

/* softmax(scale Q K^T) of one token, (R, width). */
static inline void attend(const problem *p, const vec *active, float *weights) {
    const int64_t V = p->vectors;
    const vec *q = active, *k = active + p->padded * V;
    for (int64_t i = 0; i < p->padded; i += BLOCK)
        for (int64_t j = 0; j < p->padded; j += BLOCK) {
            vec sums[BLOCK * BLOCK] = {0};
            for (int64_t v = 0; v < V; v++)
#pragma GCC unroll 4
                for (int a = 0; a < BLOCK; a++)
#pragma GCC unroll 4
                    for (int c = 0; c < BLOCK; c++) sums[a * BLOCK + c] += q[(i + a) * V + v] * k[(j + c) * V + v];
            for (int a = 0; a < BLOCK; a++)
                for (int c = 0; c < BLOCK; c++)
                    weights[(i + a) * p->width + j + c] = j + c < p->R ? p->scale * total(sums[a * BLOCK + c]) : -1e30f;
        }
    for (int64_t i = 0; i < p->R; i++) {
        float *row = weights + i * p->width, largest = row[0];
        for (int64_t j = p->padded; j < p->width; j++) row[j] = -1e30f;
        for (int64_t j = 1; j < p->R; j++) largest = row[j] > largest ? row[j] : largest;
        vec sum = {0};
        for (int64_t j = 0; j < p->width; j += LANES) sum += *(vec *)(row + j) = exponential(*(vec *)(row + j) - largest);
        const float norm = 1 / total(sum);
        for (int64_t j = 0; j < p->width; j += LANES) *(vec *)(row + j) *= norm;
        for (int64_t j = p->R; j < p->width; j++) row[j] = 0;
    }
}

/* p S, (width): what each value weighs in the output. */
static inline void collapse_weights(const problem *p, const float *weights, float *of_values) {
    for (int64_t j = 0; j < p->width; j += LANES) {
        vec sum = {0};
        for (int64_t i = 0; i < p->R; i++) sum += p->collapse[i] * *(const vec *)(weights + i * p->width + j);
        *(vec *)(of_values + j) = sum;
    }
}

static int open_problem(problem *p) {
    p->tiles = ceil_div(p->D, 2 * LANES);
    p->vectors = ceil_div(p->D, LANES);
    p->padded = ceil_div(p->R, BLOCK) * BLOCK;
    p->width = ceil_div(p->R, LANES) * LANES;
    p->stride = p->S | 1;
    const int64_t transforms = 3 * p->points * sizeof(pair);
    const int64_t attention = ((6 * p->padded + 2) * p->vectors * LANES + (3 * p->padded + 3) * p->width) * sizeof(float);
    p->scratch_size = ceil_div(transforms > attention ? transforms : attention, 4096) * 4096;
    const int64_t page = 1 << 21, size = p->tiles * 3 * p->R * p->stride * 2 * LANES * sizeof(float);
    p->rows = aligned_alloc(page, ceil_div(size, page) * page);
    p->scratch = aligned_alloc(4096, p->threads * p->scratch_size);
    p->spectra = malloc(3 * p->R * p->points * 2 * sizeof(float));
    p->roots = malloc(p->points * 2 * sizeof(float));
    if (!p->rows || !p->scratch || !p->spectra || !p->roots) return 0;
    madvise(p->rows, ceil_div(size, page) * page, MADV_HUGEPAGE); /* otherwise a page fault for every 4 KB */
    fill_roots(p->roots, p->points);
    fill_spectra(p);
    return 1;
}

static int close_problem(problem *p, int failed) {
    free(p->rows);
    free(p->scratch);
    free(p->spectra);
    free(p->roots);
    return failed;
}

static void attend_segment(const problem *p, int64_t b, int64_t begin, int64_t count, float *m) {
#pragma omp parallel for num_threads(p->threads) schedule(dynamic) if (p->threads > 1)
    for (int64_t chunk = 0; chunk < ceil_div(count, CHUNK); chunk++) {
        const int64_t V = p->vectors, all = 3 * p->padded * V;
        vec *active = scratch_of(p), *slope = active + all;
        float *weights = (float *)(slope + all), *of_values = weights + p->padded * p->width;
        memset(active, 0, all * sizeof(vec));
        for (int64_t t = chunk * CHUNK; t < smaller(count, (chunk + 1) * CHUNK); t++) {
            activate(p, t, active, slope);
            attend(p, active, weights);
            collapse_weights(p, weights, of_values);
            const vec *values = active + 2 * p->padded * V;
            for (int64_t v = 0; v < V; v++) {
                vec sum = {0};
                for (int64_t j = 0; j < p->R; j++) sum += of_values[j] * values[j * V + v];
                store(m + (b * p->L + begin + t) * p->D + v * LANES, sum, lanes_of(v * LANES, p->D));
            }
        }
    }
}

/* Returns 0, or 1 if memory ran out. */
int implicit_attention_forward(
    const float *x, const float *taps, const float *bias, const float *collapse, const float *scale, float *m,
    int64_t B, int64_t L, int64_t D, int64_t R, int64_t T, int64_t points, int64_t S, int64_t threads) {
    problem p = {x, taps, bias, collapse, *scale, B, L, D, R, T, points, S, threads};
    if (!open_problem(&p)) return close_problem(&p, 1);
    for (int64_t b = 0; b < B; b++)
        for (int64_t begin = 0; begin < L; begin += S) {
            const int64_t count = smaller(S, L - begin);
            convolve(&p, b, begin, count);
            attend_segment(&p, b, begin, count, m);
        }
    return close_problem(&p, 0);
}

typedef struct {
    const float *dm;
    float *dx, *dtaps, *sums; /* sums: (chunks, 3 R + R) of the gradients of bias and collapse */
    float *dspectra;          /* (tiles, 3 R, points, 2) */
} gradients;

/* to[i] = sum over j of weights[i, j] from[j], for rows (R, vectors), times the slope, back to the rows of the token. */
static inline void mix_back(
    const problem *p, int64_t t, int64_t first, const float *weights, const vec *from, const vec *slope, float *dbias) {
    const int64_t V = p->vectors;
    for (int64_t i = 0; i < p->R; i += 2 * BLOCK) {
        const int64_t count = smaller(2 * BLOCK, p->R - i);
        vec biases[2 * BLOCK] = {0};
        for (int64_t v = 0; v < V; v++) {
            vec sums[2 * BLOCK] = {0};
            for (int64_t j = 0; j < p->R; j++)
#pragma GCC unroll 8
                for (int a = 0; a < 2 * BLOCK; a++) sums[a] += weights[j * p->width + i + a] * from[j * V + v];
            for (int64_t a = 0; a < count; a++) {
                sums[a] *= slope[(i + a) * V + v];
                biases[a] += sums[a];
                *(vec *)(row_of(p, v / 2, first + i + a) + (2 * t + v % 2) * LANES) = sums[a];
            }
        }
        for (int64_t a = 0; a < count; a++) dbias[first + i + a] += total(biases[a]);
    }
}

/* The gradient of a segment's rows, in their place. */
static void attend_back(const problem *p, int64_t b, int64_t begin, int64_t count, const gradients *g) {
#pragma omp parallel for num_threads(p->threads) schedule(dynamic) if (p->threads > 1)
    for (int64_t chunk = 0; chunk < ceil_div(count, CHUNK); chunk++) {
        const int64_t V = p->vectors, part = p->padded * V, W = p->width;
        vec *active = scratch_of(p), *slope = active + 3 * part, *dm = slope + 3 * part;
        float *weights = (float *)(dm + V), *of_keys = weights + p->padded * W, *of_queries = of_keys + p->padded * W;
        float *of_values = of_queries + W * p->padded, *along = of_values + W;
        float *dbias = g->sums + chunk * 4 * p->R, *dcollapse = dbias + 3 * p->R;
        memset(active, 0, 3 * part * sizeof(vec));
        memset(of_keys, 0, 2 * p->padded * W * sizeof(float));
        for (int64_t t = chunk * CHUNK; t < smaller(count, (chunk + 1) * CHUNK); t++) {
            activate(p, t, active, slope);
            attend(p, active, weights);
            collapse_weights(p, weights, of_values);
            for (int64_t v = 0; v < V; v++)
                dm[v] = load(g->dm + (b * p->L + begin + t) * p->D + v * LANES, lanes_of(v * LANES, p->D));
            for (int64_t j = 0; j < p->R; j++) {
                vec sum = {0};
                for (int64_t v = 0; v < V; v++) sum += dm[v] * active[2 * part + j * V + v];
                along[j] = total(sum);
            }
            for (int64_t i = 0; i < p->R; i++) {
                const float *row = weights + i * W;
                float mean = 0;
                for (int64_t j = 0; j < p->R; j++) mean += row[j] * along[j];
                dcollapse[i] += mean;
                for (int64_t j = 0; j < p->R; j++) {
                    const float dlogit = p->scale * p->collapse[i] * row[j] * (along[j] - mean);
                    of_queries[i * W + j] = dlogit; /* what query i is worth to key j, and the other way round */
                    of_keys[j * W + i] = dlogit;
                }
            }
            mix_back(p, t, 0, of_keys, active + part, slope, dbias);
            mix_back(p, t, p->R, of_queries, active, slope + part, dbias);
            for (int64_t j = 0; j < p->R; j++) {
                vec sum = {0};
                for (int64_t v = 0; v < V; v++) {
                    const vec gradient = of_values[j] * dm[v] * slope[2 * part + j * V + v];
                    sum += gradient;
                    *(vec *)(row_of(p, v / 2, 2 * p->R + j) + (2 * t + v % 2) * LANES) = gradient;
                }
                dbias[2 * p->R + j] += total(sum);
            }
        }
    }
}

/* From the gradient of a segment's rows to those of x (added) and of the spectra (added). */
static void convolve_back(const problem *p, int64_t b, int64_t begin, int64_t count, const gradients *g) {
#pragma omp parallel for num_threads(p->threads) schedule(dynamic) if (p->threads > 1)
    for (int64_t tile = 0; tile < p->tiles; tile++) {
        pair *z = scratch_of(p), *y = z + p->points, *dz = y + p->points;
        spectrum_of_x(p, b, begin, tile, z);
        memset(dz, 0, p->points * sizeof(pair));
        for (int64_t i = 0; i < 3 * p->R; i++) {
            const float *spectrum = p->spectra + 2 * i * p->points;
            float *dspectrum = g->dspectra + 2 * (tile * 3 * p->R + i) * p->points;
            memset(y, 0, p->points * sizeof(pair));
            memcpy(y + p->T - 1, row_of(p, tile, i), count * sizeof(pair));
            to_spectrum(y, p->points, p->roots, 1);
            for (int64_t k = 0; k < p->points; k++) {
                dz[k] = plus(dz[k], times_conjugate(y[k], spectrum + 2 * k));
                dspectrum[2 * k] += total(z[k].re * y[k].re + z[k].im * y[k].im);
                dspectrum[2 * k + 1] += total(z[k].re * y[k].im - z[k].im * y[k].re);
            }
        }
        from_spectrum(dz, p->points, p->roots, 1);
        const int64_t d = tile * 2 * LANES, first = begin - (p->T - 1);
        const int re = real_lanes(p, d), im = imaginary_lanes(p, d);
        for (int64_t t = first < 0 ? 0 : first; t < begin + count; t++) {
            float *dx = g->dx + (b * p->L + t) * p->D + d;
            store(dx, load(dx, re) + dz[t - first].re, re);
            store(dx + LANES, load(dx + LANES, im) + dz[t - first].im, im);
        }
    }
}

/* The gradient of the taps from those of the spectra. */
static void gradient_of_taps(const problem *p, const gradients *g) {
    const int64_t filters = 3 * p->R;
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t first = 0; first < filters; first += LANES) {
        pair *z = scratch_of(p);
        const int64_t count = smaller(LANES, filters - first);
        memset(z, 0, p->points * sizeof(pair));
        for (int64_t tile = 0; tile < p->tiles; tile++)
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
    const float *x, const float *taps, const float *bias, const float *collapse, const float *scale, const float *dm,
    float *dx, float *dtaps, float *sums, int64_t B, int64_t L, int64_t D, int64_t R, int64_t T, int64_t points,
    int64_t S, int64_t threads) {
    problem p = {x, taps, bias, collapse, *scale, B, L, D, R, T, points, S, threads};
    gradients g = {dm, dx, dtaps, sums, 0};
    if (!open_problem(&p)) return close_problem(&p, 1);
    g.dspectra = calloc(p.tiles * 3 * R * points * 2, sizeof(float));
    if (!g.dspectra) return close_problem(&p, 1);
    for (int64_t b = 0; b < B; b++)
        for (int64_t begin = 0; begin < L; begin += S) {
            const int64_t count = smaller(S, L - begin);
            convolve(&p, b, begin, count);
            attend_back(&p, b, begin, count, &g);
            convolve_back(&p, b, begin, count, &g);
        }
    gradient_of_taps(&p, &g);
    free(g.dspectra);
    return close_problem(&p, 0);
}
