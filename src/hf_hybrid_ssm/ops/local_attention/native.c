/* Attention within a window on a CPU, forward and backward.
 *
 * B rows, H heads, G heads of keys and values, L queries, M keys before theirs; q (B, H, L, E), k (B, G, M + L, E),
 * v (B, G, M + L, V), y (B, L, H, V). A task of the thread pool is a segment of a row's queries in the heads that share
 * keys. Its keys and values are copied to where they lie side by side; then come tiles of QUERIES queries, each against
 * KEYS of its keys at a time. A segment is at least as long as the window, so that in the backward the even segments
 * write to keys of their own, and afterwards the odd ones. Hence the same bits for every number of threads.
 */
#include <math.h>
#include <omp.h>
#include "vectors.h"
#include "tiles.h"
#include "problem.h"

#define LEAST_SEGMENT 256

/* Working memory of a thread. */
typedef struct {
    float *keys, *values, *dkeys, *dvalues; /* of a segment, (keys, width) */
    float *q, *y, *dy, *dq;                 /* of a tile, (QUERIES, width) */
    float *q_columns, *dy_columns;          /* (size, QUERIES) */
    float *weights, *dlogits;               /* (KEYS, QUERIES) */
    float *by_distance, *of_zeros;          /* gradients of the bias: (LANES, slots), and by the zeros, as the tails */
} memory;

/* A tile of queries and what it sees: keys low .. high; inner_low .. inner_high are seen by all of its queries. */
typedef struct {
    int64_t b, h, begin, count;
    int32_t first[QUERIES], last[QUERIES];
    int64_t low, high, inner_low, inner_high;
    const float *bias; /* of distance 0, or null */
} tile;

/* the sums of one buffer by distance: an odd number of vectors, or they would share sets of the caches */
static int64_t slots_of(const problem *p) { return (ceil_div(p->span + 2 * PAD, LANES) | 1) * LANES; }

/* Cuts one thread's memory into its parts, or counts the floats if `base` is null. */
static int64_t lay_out(const problem *p, memory *m, float *base, int64_t keys, int backward) {
    const int64_t E = p->key_width, V = p->value_width, W = LANES * slots_of(p);
    const struct { float **part; int64_t size; } parts[] = {
        {&m->keys, keys * E}, {&m->values, keys * V}, {&m->dkeys, backward * keys * E},
        {&m->dvalues, backward * keys * V}, {&m->q, QUERIES * E}, {&m->y, QUERIES * V}, {&m->dy, QUERIES * V},
        {&m->dq, QUERIES * E}, {&m->q_columns, QUERIES * E}, {&m->dy_columns, QUERIES * V},
        {&m->weights, KEYS * QUERIES}, {&m->dlogits, KEYS * QUERIES}, {&m->by_distance, backward && p->bias ? W : 0},
        {&m->of_zeros, backward * p->tail_width}};
    int64_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; used += parts[i++].size)
        if (base) *parts[i].part = base + used;
    return ceil_div(used, 1024) * 1024 + 5 * LANES; /* not a power of two: threads would share sets of the caches */
}

/* The keys that a segment's queries see; 0 if none. */
static int64_t keys_of(const problem *p, int64_t b, int64_t begin, int64_t end, int64_t *low) {
    int64_t high = -1;
    *low = INT32_MAX;
    for (int64_t i = begin; i < end; i++) {
        *low = smaller(*low, p->low[b * p->L + i]);
        high = larger(high, p->high[b * p->L + i]);
    }
    return larger(high + 1 - *low, 0);
}

static void open_tile(const problem *p, tile *t, int64_t b, int64_t h, int64_t begin, int64_t end) {
    t->b = b;
    t->h = h;
    t->begin = begin;
    t->count = smaller(QUERIES, end - begin);
    t->low = t->inner_high = INT32_MAX;
    t->high = t->inner_low = -1;
    for (int64_t i = 0; i < QUERIES; i++) {
        const int64_t at = b * p->L + begin + smaller(i, t->count - 1); /* what is missing is like the last */
        t->first[i] = p->low[at];
        t->last[i] = p->high[at];
        t->low = smaller(t->low, t->first[i]);
        t->high = larger(t->high, t->last[i]);
        t->inner_low = larger(t->inner_low, t->first[i]);
        t->inner_high = smaller(t->inner_high, t->last[i]);
    }
    t->bias = p->bias ? p->by_distance + h * (p->span + 2 * PAD) + PAD - p->nearest : 0;
}

/* Logits (KEY_TILE, QUERIES) of the keys from j on, whose rows are given. */
static inline void logits_of(
    const problem *p, const tile *t, const float *columns, const float *rows, int64_t j, float *out) {
    dot_tile(out, columns, rows, p->key_width, p->E);
    const int inner = j >= t->inner_low && j + KEY_TILE - 1 <= t->inner_high;
    if (inner && !t->bias) return;
    for (int64_t r = 0; r < KEY_TILE; r++)
        for (int64_t i = 0; i < QUERIES; i += LANES) {
            vec *logit = (vec *)(out + r * QUERIES + i);
            if (t->bias) *logit += *(const vec *)(t->bias + t->begin + i + p->M - (j + r));
            if (inner) continue;
            const ivec key = (int32_t)(j + r) - (ivec){0};
            const ivec is_seen = (key >= *(const ivec *)(t->first + i)) & (key <= *(const ivec *)(t->last + i));
            *logit = choose(is_seen, *logit, all(HIDDEN));
        }
}

/* y of a tile, and the log of its summed weights, from keys and values that begin with key `from`. */
static void attend(const problem *p, const memory *m, const tile *t, int64_t from, float *y, float *log_sum) {
    const int64_t E = p->key_width, V = p->value_width;
    const float *sink_value = sink_value_of(p, t->h);
    float top[QUERIES], sum[QUERIES], factor[QUERIES];
    memset(m->y, 0, QUERIES * V * sizeof(float));
    for (int64_t i = 0; i < QUERIES; i++) {
        const float sink = sink_of(p, t->b, t->h, t->begin + smaller(i, t->count - 1));
        const int is_absent = sink <= NOTHING; /* the bias may hide all zeros; NaN is not absent */
        top[i] = is_absent ? NOTHING : sink;
        sum[i] = !is_absent;
        if (sink_value && !is_absent) memcpy(m->y + i * V, sink_value, p->V * sizeof(float));
    }
    copy_rows(m->q, E, QUERIES, token_of(p->q, t->b, t->h, t->begin), p->q.token, p->E, t->count, p->scale);
    turn(m->q_columns, m->q, E, p->E);
    for (int64_t j = t->low; j <= t->high; j += KEYS) {
        const int64_t count = ceil_div(smaller(KEYS, t->high + 1 - j), KEY_TILE) * KEY_TILE;
        for (int64_t r = 0; r < count; r += KEY_TILE)
            logits_of(p, t, m->q_columns, m->keys + (j + r - from) * E, j + r, m->weights + r * QUERIES);
        for (int64_t i = 0; i < QUERIES; i += LANES) {
            vec most = *(vec *)(top + i), total = {0};
            for (int64_t r = 0; r < count; r++) {
                const vec logit = *(vec *)(m->weights + r * QUERIES + i);
                most = choose(logit > most, logit, most);
            }
            for (int64_t r = 0; r < count; r++) {
                vec *weight = (vec *)(m->weights + r * QUERIES + i);
                total += *weight = weight_of(*weight - most);
            }
            const vec shrunk = weight_of(*(vec *)(top + i) - most);
            *(vec *)(factor + i) = shrunk;
            *(vec *)(sum + i) = *(vec *)(sum + i) * shrunk + total;
            *(vec *)(top + i) = most;
        }
        for (int64_t i = 0; i < QUERIES && (j > t->low || sink_value); i++)
            for (int64_t c = 0; c < V; c += LANES) *(vec *)(m->y + i * V + c) *= factor[i];
        add_products(m->y, QUERIES, m->weights, 1, QUERIES, m->values + (j - from) * V, V, count);
    }
    for (int64_t i = 0; i < t->count; i++) {
        const float share = sum[i] == 0 ? 0 : 1 / sum[i];
        for (int64_t c = 0; c < p->V; c++) y[i * p->H * p->V + c] = m->y[i * V + c] * share;
        log_sum[i] = sum[i] == 0 ? 0 : top[i] + logf(sum[i]);
    }
}

/* The segments of a row and head: as long as the window, or the whole row where the keys' gradients would collide. */
static void cut(problem *p, int backward) {
    const int64_t window = p->farthest - p->nearest;
    p->segment = larger(LEAST_SEGMENT, ceil_div(window, QUERIES) * QUERIES);
    if (!backward) p->segment = smaller(p->segment, 4 * LEAST_SEGMENT);
    p->segments = ceil_div(p->L, p->segment);
}

/* Memory of all threads; null if there is none. */
static char *memory_of_threads(const problem *p, int backward, int64_t *size, int64_t *keys) {
    memory m;
    *keys = smaller(p->M + p->L, p->segment + p->span) + KEY_TILE;
    *size = lay_out(p, &m, 0, *keys, backward) * sizeof(float);
    return allocate(p->threads * *size);
}

static void forward_task(
    const problem *p, const memory *m, int64_t b, int64_t g, int64_t begin, float *y, float *log_sums) {
    const int64_t heads = p->H / p->G, stop = smaller(begin + p->segment, p->L);
    const int64_t end = smaller(stop, larger(begin, length_of(p, b)));
    int64_t from;
    const int64_t keys = keys_of(p, b, begin, end, &from);
    if (keys) {
        copy_rows(m->keys, p->key_width, keys + KEY_TILE, token_of(p->k, b, g, from), p->k.token, p->E, keys, 1);
        copy_rows(m->values, p->value_width, keys + KEY_TILE, token_of(p->v, b, g, from), p->v.token, p->V, keys, 1);
    }
    for (int64_t h = g * heads; h < (g + 1) * heads; h++) {
        float *log_sum = log_sums + (b * p->H + h) * p->L;
        for (int64_t i = begin; i < end; i += QUERIES) {
            tile t;
            open_tile(p, &t, b, h, i, end);
            attend(p, m, &t, from, y + ((b * p->L + i) * p->H + h) * p->V, log_sum + i);
        }
        for (int64_t i = end; i < stop; i++) {
            memset(y + ((b * p->L + i) * p->H + h) * p->V, 0, p->V * sizeof(float));
            log_sum[i] = 0;
        }
    }
}

/* Returns 0, or 1 if memory ran out. log_sums (B, H, L). */
int local_attention_forward(
    const float *q, const float *k, const float *v, const float *bias, const float *sink_logits,
    const float *sink_values, const int64_t *seen, const int64_t *seq_idx, const int64_t *lengths, float *y,
    float *log_sums, double scale, int64_t q_row, int64_t q_head, int64_t q_token, int64_t k_row, int64_t k_head,
    int64_t k_token, int64_t v_row, int64_t v_head, int64_t v_token, int64_t bias_head, int64_t bias_column,
    int64_t sink_row, int64_t sink_head, int64_t sink_token, int64_t left, int64_t right, int64_t chunk,
    int64_t zeros_before, int64_t B, int64_t H, int64_t G, int64_t L, int64_t M, int64_t E, int64_t V, int64_t R,
    int64_t S, int64_t threads) {
    problem p = {.q = {q, q_row, q_head, q_token}, {k, k_row, k_head, k_token}, {v, v_row, v_head, v_token}, bias, bias_head,
                 bias_column, {sink_logits, sink_row, sink_head, sink_token}, sink_values, seen, seq_idx, lengths, scale,
                 left, right, chunk, zeros_before, B, H, G, L, M, E, V, R, S, threads};
    int64_t size, keys;
    char *space = 0;
    const int ready = open_problem(&p);
    if (ready) {
        cut(&p, 0);
        space = memory_of_threads(&p, 0, &size, &keys);
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t task = 0; task < (space ? B * G * p.segments : 0); task++) {
        memory m = {0};
        lay_out(&p, &m, (float *)(space + omp_get_thread_num() * size), keys, 0);
        const int64_t row = task / p.segments;
        forward_task(&p, &m, row / G, row % G, task % p.segments * p.segment, y, log_sums);
    }
    free(space);
    close_problem(&p);
    return !space;
}

/* What the backward reads and writes beside the problem. */
typedef struct {
    array y, dy;
    const float *log_sums;
    float *dq, *dk, *dv, *dbias;        /* (B, L, H, E), (B, M + L, G, E), (B, M + L, G, V), (H, R) */
    float *dsink_logits, *dsink_values; /* (B, H, L), (S, V) */
    float *parts;                       /* of dbias and dsink_values: (B, segments, H, part_width) */
    int64_t part_width;                 /* R, and V if the sink has a value */
} gradients;

static inline float *part_of(const problem *p, const gradients *g, int64_t b, int64_t segment, int64_t h) {
    return g->parts + ((b * p->segments + segment) * p->H + h) * g->part_width;
}

/* The gradients of a tile's sink: p (dy v - mean) of its logits, p dy of its value, p = exp(logit - log_sum). */
static void sink_back(
    const problem *p, const memory *m, const tile *t, const gradients *g, const float *log_sum, const float *mean) {
    const float *value = sink_value_of(p, t->h);
    float *dvalue = part_of(p, g, t->b, t->begin / p->segment, t->h) + p->R;
    for (int64_t i = 0; i < t->count; i++) {
        const float *dy = m->dy + i * p->value_width;
        const float weight = expf(sink_of(p, t->b, t->h, t->begin + i) - log_sum[i]);
        float product = 0;
        for (int64_t c = 0; value && c < p->V; c++) {
            product += dy[c] * value[c];
            dvalue[c] += weight * dy[c];
        }
        g->dsink_logits[(t->b * p->H + t->h) * p->L + t->begin + i] = weight * (product - mean[i]);
    }
}

/* The bias's gradient by the zeros before a tile's documents, whose weights are exp(bias - log_sum). */
static void zeros_back(const problem *p, const memory *m, const tile *t, const float *log_sum, const float *mean) {
    const float *zeros = p->zeros + t->h * p->tail_width;
    for (int64_t i = 0; i < t->count; i++) {
        const int64_t first = tail_of(p, t->b * p->L + t->begin + i);
        for (int64_t x = first; x < p->tails; x += LANES) { /* after them, exp(-inf) */
            const vec weight = weight_of(*(const vec *)(zeros + x) - log_sum[i]);
            *(vec *)(m->of_zeros + x) -= mean[i] * weight;
        }
    }
}

/* The gradients of a tile: dq, and what it adds to those of keys, values and bias. */
static void attend_back(const problem *p, const memory *m, const tile *t, int64_t from, const gradients *g) {
    const int64_t E = p->key_width, V = p->value_width, W = slots_of(p);
    float mean[QUERIES] = {0}, log_sum[QUERIES]; /* sum over c of dy y: the mean of what keys gain */
    for (int64_t i = 0; i < QUERIES; i++) log_sum[i] = -HIDDEN; /* a query that is missing has no weights */
    copy_rows(m->q, E, QUERIES, token_of(p->q, t->b, t->h, t->begin), p->q.token, p->E, t->count, p->scale);
    turn(m->q_columns, m->q, E, p->E);
    copy_rows(m->dy, V, QUERIES, token_of(g->dy, t->b, t->h, t->begin), g->dy.token, p->V, t->count, 1);
    turn(m->dy_columns, m->dy, V, p->V);
    for (int64_t i = 0; i < t->count; i++) {
        const float *y = token_of(g->y, t->b, t->h, t->begin + i);
        vec sums = {0};
        for (int64_t c = 0; c < p->V; c += LANES)
            sums += load(y + c, lanes_of(c, p->V)) * *(vec *)(m->dy + i * V + c);
        mean[i] = sum(sums);
        log_sum[i] = g->log_sums[(t->b * p->H + t->h) * p->L + t->begin + i];
    }
    memset(m->dq, 0, QUERIES * E * sizeof(float));
    for (int64_t j = t->low; j <= t->high; j += KEYS) {
        const int64_t count = ceil_div(smaller(KEYS, t->high + 1 - j), KEY_TILE) * KEY_TILE;
        for (int64_t r = 0; r < count; r++) {
            if (r % KEY_TILE == 0) {
                logits_of(p, t, m->q_columns, m->keys + (j + r - from) * E, j + r, m->weights + r * QUERIES);
                dot_tile(m->dlogits + r * QUERIES, m->dy_columns, m->values + (j + r - from) * V, V, p->V);
            }
            for (int64_t i = 0; i < QUERIES; i += LANES) {
                vec *weight = (vec *)(m->weights + r * QUERIES + i), *dlogit = (vec *)(m->dlogits + r * QUERIES + i);
                *weight = weight_of(*weight - *(vec *)(log_sum + i));
                *dlogit = *weight * (*dlogit - *(vec *)(mean + i));
                if (!p->bias) continue;
                /* by distance: a buffer for each offset within a vector, or sums would wait for parts of stores */
                const int64_t x = t->begin + i + p->M - (j + r) - p->nearest + PAD;
                *(vec *)(m->by_distance + x % LANES * W + x / LANES * LANES) += *dlogit;
            }
        }
        add_products(m->dvalues + (j - from) * V, count, m->weights, QUERIES, 1, m->dy, V, QUERIES);
        add_products(m->dkeys + (j - from) * E, count, m->dlogits, QUERIES, 1, m->q, E, QUERIES);
        add_products(m->dq, QUERIES, m->dlogits, 1, QUERIES, m->keys + (j - from) * E, E, count);
    }
    for (int64_t i = 0; i < t->count; i++) {
        float *dq = g->dq + ((t->b * p->L + t->begin + i) * p->H + t->h) * p->E;
        for (int64_t e = 0; e < p->E; e++) dq[e] = m->dq[i * E + e] * p->scale;
    }
    if (p->bias) zeros_back(p, m, t, log_sum, mean);
    if (p->sinks.at) sink_back(p, m, t, g, log_sum, mean);
}

/* dbias (R) from the sums by distance. */
static void fold_bias(const problem *p, const memory *m, float *dbias) {
    const int64_t W = slots_of(p), offset = p->right > 0 ? p->R / 2 : 0;
    for (int64_t x = 0; x < p->span; x++) {
        float sum = 0;
        for (int64_t r = 0; r < LANES; r++) sum += m->by_distance[r * W + x + PAD - r];
        dbias[larger(0, smaller(x + p->nearest + offset, p->R - 1))] += sum;
    }
    for (int64_t x = 0; x < p->tails; x++)
        dbias[smaller(x - p->right, p->R - 1)] += m->of_zeros[x];
}

static void add_rows(float *to, int64_t apart, const float *from, int64_t width, int64_t size, int64_t count) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t e = 0; e < size; e++) to[r * apart + e] += from[r * width + e];
}

static void backward_task(
    const problem *p, const memory *m, int64_t b, int64_t group, int64_t segment, const gradients *g) {
    const int64_t heads = p->H / p->G, begin = segment * p->segment, E = p->key_width, V = p->value_width;
    const int64_t end = smaller(smaller(begin + p->segment, p->L), larger(begin, length_of(p, b)));
    int64_t from;
    const int64_t keys = keys_of(p, b, begin, end, &from);
    if (keys) {
        copy_rows(m->keys, E, keys + KEY_TILE, token_of(p->k, b, group, from), p->k.token, p->E, keys, 1);
        copy_rows(m->values, V, keys + KEY_TILE, token_of(p->v, b, group, from), p->v.token, p->V, keys, 1);
        memset(m->dkeys, 0, (keys + KEY_TILE) * E * sizeof(float));
        memset(m->dvalues, 0, (keys + KEY_TILE) * V * sizeof(float));
    }
    for (int64_t h = group * heads; h < (group + 1) * heads; h++) {
        if (p->bias) memset(m->by_distance, 0, LANES * slots_of(p) * sizeof(float));
        memset(m->of_zeros, 0, p->tail_width * sizeof(float));
        for (int64_t i = begin; i < end; i += QUERIES) {
            tile t;
            open_tile(p, &t, b, h, i, end);
            attend_back(p, m, &t, from, g);
        }
        if (p->bias) fold_bias(p, m, part_of(p, g, b, segment, h));
    }
    if (!keys) return;
    const int64_t row = b * (p->M + p->L) + from;
    add_rows(g->dk + (row * p->G + group) * p->E, p->G * p->E, m->dkeys, E, p->E, keys);
    add_rows(g->dv + (row * p->G + group) * p->V, p->G * p->V, m->dvalues, V, p->V, keys);
}

/* Returns 0, or 1 if memory ran out. The gradients are zero at the start. */
int local_attention_backward(
    const float *q, const float *k, const float *v, const float *bias, const float *sink_logits,
    const float *sink_values, const int64_t *seen, const int64_t *seq_idx, const int64_t *lengths, const float *y,
    const float *dy, const float *log_sums, float *dq, float *dk, float *dv, float *dbias, float *dsink_logits,
    float *dsink_values, double scale, int64_t q_row, int64_t q_head, int64_t q_token, int64_t k_row, int64_t k_head,
    int64_t k_token, int64_t v_row, int64_t v_head, int64_t v_token, int64_t bias_head, int64_t bias_column,
    int64_t sink_row, int64_t sink_head, int64_t sink_token, int64_t left, int64_t right, int64_t chunk,
    int64_t zeros_before, int64_t B, int64_t H, int64_t G, int64_t L, int64_t M, int64_t E, int64_t V, int64_t R,
    int64_t S, int64_t y_row, int64_t y_head, int64_t y_token, int64_t dy_row, int64_t dy_head, int64_t dy_token,
    int64_t threads) {
    problem p = {.q = {q, q_row, q_head, q_token}, {k, k_row, k_head, k_token}, {v, v_row, v_head, v_token}, bias, bias_head,
                 bias_column, {sink_logits, sink_row, sink_head, sink_token}, sink_values, seen, seq_idx, lengths, scale,
                 left, right, chunk, zeros_before, B, H, G, L, M, E, V, R, S, threads};
    gradients g = {{y, y_row, y_head, y_token}, {dy, dy_row, dy_head, dy_token}, log_sums, dq, dk, dv, dbias, dsink_logits,
                   dsink_values, 0, R + (sink_values ? V : 0)};
    int64_t size, keys;
    char *space = 0;
    const int ready = open_problem(&p);
    if (ready) {
        cut(&p, 1);
        g.parts = calloc(B * p.segments * H * g.part_width + 1, sizeof(float));
        if (g.parts) space = memory_of_threads(&p, 1, &size, &keys);
    }
    for (int64_t odd = 0; odd < 2; odd++) {
        const int64_t count = (p.segments + 1 - odd) / 2;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
        for (int64_t task = 0; task < (space ? B * G * count : 0); task++) {
            memory m = {0};
            lay_out(&p, &m, (float *)(space + omp_get_thread_num() * size), keys, 1);
            const int64_t row = task / count;
            backward_task(&p, &m, row / G, row % G, 2 * (task % count) + odd, &g);
        }
    }
    for (int64_t part = 0; part < (space ? B * p.segments : 0); part++)
        for (int64_t h = 0; h < H; h++) {
            const float *of_head = part_of(&p, &g, part / p.segments, part % p.segments, h);
            for (int64_t x = 0; x < R; x++) dbias[h * R + x] += of_head[x];
            for (int64_t c = 0; c < g.part_width - R; c++) dsink_values[h / (H / S) * V + c] += of_head[R + c];
        }
    free(g.parts);
    free(space);
    close_problem(&p);
    return !space;
}
