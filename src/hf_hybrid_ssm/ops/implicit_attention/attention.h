/* The attention of each token among its own rows, forward and backward, while these are in cache.
 *
 * R rows of queries, of keys and of values, D channels. Rows are what the memory gives, before bias and activation; the
 * backward leaves their gradients in their place. Sums over tokens are kept apart by chunk, in a fixed order, hence the
 * same bits in every run and for every number of threads.
 */
#include <omp.h>
#include <sys/mman.h>

#define CHUNK 16 /* tokens of one task of the thread pool */
#define BLOCK 4  /* rows of queries whose products are summed in registers */
#define KEYS_AT_ONCE (REGISTERS / 8) /* of keys */
#define WHOLE (LANES > 2 * BLOCK ? LANES : 2 * BLOCK) /* what rows of weights are a multiple of */

typedef struct {
    const float *bias, *collapse, *offset; /* (3 R) or null, (R), (1) or null */
    float scale;                           /* of the logits */
    int64_t D, R, threads;
    int64_t tiles, vectors; /* of 2 LANES channels, of LANES */
    int64_t padded, width;  /* R rounded up to BLOCK, to WHOLE */
    int64_t stride;         /* tokens from filter to filter; a power of two would make them share cache lines */
    float *rows;            /* (tiles, 3 R, stride, 2 LANES) */
    char *scratch;          /* of each thread */
    int64_t scratch_size;
} attention;

/* Row i of a tile's channels, token by token. */
static inline float *row_of(const attention *a, int64_t tile, int64_t i) {
    return a->rows + (tile * 3 * a->R + i) * a->stride * 2 * LANES;
}

static inline void *scratch_of(const attention *a) { return a->scratch + omp_get_thread_num() * a->scratch_size; }

static int open_attention(attention *a, int64_t tokens, int64_t more_scratch) {
    a->tiles = ceil_div(a->D, 2 * LANES);
    a->vectors = ceil_div(a->D, LANES);
    a->padded = ceil_div(a->R, BLOCK) * BLOCK;
    a->width = ceil_div(a->R, WHOLE) * WHOLE;
    a->stride = tokens | 1;
    const int64_t own = ((6 * a->padded + 2) * a->vectors * LANES + (3 * a->padded + 3) * a->width) * sizeof(float);
    a->scratch_size = ceil_div(own > more_scratch ? own : more_scratch, 4096) * 4096;
    const int64_t needed = a->tiles * 3 * a->R * a->stride * sizeof(pair), page = needed >> 21 ? 1 << 21 : 64;
    a->rows = aligned_alloc(page, ceil_div(needed, page) * page);
    a->scratch = allocate(a->threads * a->scratch_size);
    if (!a->rows || !a->scratch) return 0;
    if (page > 64) madvise(a->rows, ceil_div(needed, page) * page, MADV_HUGEPAGE); /* or a page fault for every 4 KB */
    return 1;
}

static void close_attention(attention *a) {
    free(a->rows);
    free(a->scratch);
}

/* The activated rows of one token, (3, padded, vectors), and their slopes unless null; what does not exist stays zero. */
INLINE void activate(const attention *a, int64_t t, vec *active, vec *slope) {
    const int left = lanes_of((a->vectors - 1) * LANES, a->D);
    for (int64_t i = 0; i < 3 * a->R; i++) {
        const vec bias = broadcast(a->bias ? a->bias[i] : 0);
        const int64_t at = (i / a->R * a->padded + i % a->R) * a->vectors;
        for (int64_t v = 0; v < a->vectors; v++) {
            const float *y = row_of(a, v / 2, i) + (2 * t + v % 2) * LANES;
            __builtin_prefetch(y + 4 * LANES);
            vec change;
            active[at + v] = gelu(*(const vec *)y + bias, &change);
            if (slope) slope[at + v] = change;
        }
        for (int lane = left; lane < LANES; lane++) {
            active[at + a->vectors - 1][lane] = 0;
            if (slope) slope[at + a->vectors - 1][lane] = 0;
        }
    }
}

/* softmax(scale Q K^T) of one token, (R, width). */
static inline void attend(const attention *a, const vec *active, float *weights) {
    const int64_t V = a->vectors;
    const vec *q = active, *k = active + a->padded * V;
    for (int64_t i = 0; i < a->padded; i += BLOCK)
        for (int64_t j = 0; j < a->padded; j += KEYS_AT_ONCE) {
            vec sums[BLOCK * KEYS_AT_ONCE] = {0};
            for (int64_t v = 0; v < V; v++)
UNROLL(4)
                for (int e = 0; e < BLOCK; e++)
UNROLL(4)
                    for (int c = 0; c < KEYS_AT_ONCE; c++) sums[e * KEYS_AT_ONCE + c] += q[(i + e) * V + v] * k[(j + c) * V + v];
            for (int e = 0; e < BLOCK; e++)
                for (int c = 0; c < KEYS_AT_ONCE; c++)
                    weights[(i + e) * a->width + j + c] =
                        j + c < a->R ? a->scale * sum(sums[e * KEYS_AT_ONCE + c]) : -1e30f;
        }
    for (int64_t i = 0; i < a->R; i++) {
        float *row = weights + i * a->width, largest = row[0];
        for (int64_t j = a->padded; j < a->width; j++) row[j] = -1e30f;
        for (int64_t j = 1; j < a->R; j++) largest = row[j] > largest ? row[j] : largest;
        vec all = {0};
        for (int64_t j = 0; j < a->width; j += LANES) all += *(vec *)(row + j) = exponential(*(vec *)(row + j) - largest);
        const float norm = 1 / sum(all);
        for (int64_t j = 0; j < a->width; j += LANES) *(vec *)(row + j) *= norm;
        for (int64_t j = a->R; j < a->width; j++) row[j] = 0;
    }
}

/* p S, (width): what each value weighs in the output. */
static inline void collapse_weights(const attention *a, const float *weights, float *of_values) {
    for (int64_t j = 0; j < a->width; j += LANES) {
        vec sum = {0};
        for (int64_t i = 0; i < a->R; i++) sum += a->collapse[i] * *(const vec *)(weights + i * a->width + j);
        *(vec *)(of_values + j) = sum;
    }
}

/* Outputs m (count, D) of the tokens whose rows are there. */
static void attend_tokens(const attention *a, int64_t count, float *m) {
#pragma omp parallel for num_threads(a->threads) schedule(dynamic) if (a->threads > 1)
    for (int64_t chunk = 0; chunk < ceil_div(count, CHUNK); chunk++) {
        const int64_t V = a->vectors, all = 3 * a->padded * V;
        vec *active = scratch_of(a);
        float *weights = (float *)(active + all), *of_values = weights + a->padded * a->width;
        memset(active, 0, all * sizeof(vec));
        for (int64_t t = chunk * CHUNK; t < smaller(count, (chunk + 1) * CHUNK); t++) {
            activate(a, t, active, 0);
            attend(a, active, weights);
            collapse_weights(a, weights, of_values);
            const vec *values = active + 2 * a->padded * V;
            for (int64_t v = 0; v < V; v++) {
                vec sum = broadcast(a->offset ? *a->offset : 0);
                for (int64_t j = 0; j < a->R; j++) sum += of_values[j] * values[j * V + v];
                store(m + t * a->D + v * LANES, sum, lanes_of(v * LANES, a->D));
            }
        }
    }
}

/* to[i] = sum over j of weights[i, j] from[j], for rows (R, vectors), times the slope, back to the rows of the token. */
static inline void mix_back(
    const attention *a, int64_t t, int64_t first, const float *weights, const vec *from, const vec *slope, float *dbias) {
    const int64_t V = a->vectors;
    for (int64_t i = 0; i < a->R; i += 2 * BLOCK) {
        const int64_t count = smaller(2 * BLOCK, a->R - i);
        vec biases[2 * BLOCK] = {0};
        for (int64_t v = 0; v < V; v++) {
            vec sums[2 * BLOCK] = {0};
            for (int64_t j = 0; j < a->R; j++)
UNROLL(8)
                for (int e = 0; e < 2 * BLOCK; e++) sums[e] += weights[j * a->width + i + e] * from[j * V + v];
            for (int64_t e = 0; e < count; e++) {
                sums[e] *= slope[(i + e) * V + v];
                biases[e] += sums[e];
                *(vec *)(row_of(a, v / 2, first + i + e) + (2 * t + v % 2) * LANES) = sums[e];
            }
        }
        for (int64_t e = 0; e < count; e++) dbias[first + i + e] += sum(biases[e]);
    }
}

/* The rows' gradients in their place, from dm (count, D); those of bias and collapse are added to sums (chunks, 4 R). */
static void attend_tokens_back(const attention *a, int64_t count, const float *dm_of_tokens, float *sums) {
#pragma omp parallel for num_threads(a->threads) schedule(dynamic) if (a->threads > 1)
    for (int64_t chunk = 0; chunk < ceil_div(count, CHUNK); chunk++) {
        const int64_t V = a->vectors, part = a->padded * V, W = a->width;
        vec *active = scratch_of(a), *slope = active + 3 * part, *dm = slope + 3 * part;
        float *weights = (float *)(dm + V), *of_keys = weights + a->padded * W, *of_queries = of_keys + a->padded * W;
        float *of_values = of_queries + W * a->padded, *along = of_values + W;
        float *dbias = sums + chunk * 4 * a->R, *dcollapse = dbias + 3 * a->R;
        memset(active, 0, 3 * part * sizeof(vec));
        memset(of_keys, 0, 2 * a->padded * W * sizeof(float));
        for (int64_t t = chunk * CHUNK; t < smaller(count, (chunk + 1) * CHUNK); t++) {
            activate(a, t, active, slope);
            attend(a, active, weights);
            collapse_weights(a, weights, of_values);
            for (int64_t v = 0; v < V; v++)
                dm[v] = load(dm_of_tokens + t * a->D + v * LANES, lanes_of(v * LANES, a->D));
            for (int64_t j = 0; j < a->R; j++) {
                vec all = {0};
                for (int64_t v = 0; v < V; v++) all += dm[v] * active[2 * part + j * V + v];
                along[j] = sum(all);
            }
            for (int64_t i = 0; i < a->R; i++) {
                const float *row = weights + i * W;
                float mean = 0;
                for (int64_t j = 0; j < a->R; j++) mean += row[j] * along[j];
                dcollapse[i] += mean;
                for (int64_t j = 0; j < a->R; j++) {
                    const float dlogit = a->scale * a->collapse[i] * row[j] * (along[j] - mean);
                    of_queries[i * W + j] = dlogit; /* what query i is worth to key j, and the other way round */
                    of_keys[j * W + i] = dlogit;
                }
            }
            mix_back(a, t, 0, of_keys, active + part, slope, dbias);
            mix_back(a, t, a->R, of_queries, active, slope + part, dbias);
            for (int64_t j = 0; j < a->R; j++) {
                vec all = {0};
                for (int64_t v = 0; v < V; v++) {
                    const vec gradient = of_values[j] * dm[v] * slope[2 * part + j * V + v];
                    all += gradient;
                    *(vec *)(row_of(a, v / 2, 2 * a->R + j) + (2 * t + v % 2) * LANES) = gradient;
                }
                dbias[2 * a->R + j] += sum(all);
            }
        }
    }
}
