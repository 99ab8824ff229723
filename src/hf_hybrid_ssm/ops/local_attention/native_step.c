/* Attention of one token of each row to held keys and values on a CPU, and the place of its own among them.
 *
 * B rows, H heads, G heads of keys and values, M held slots; q (B, H, E), k (B, G, E), v (B, G, V), y (B, H, V) are
 * float32. keys (B, G, M, E) and values (B, G, M, V) are float32 or bfloat16 (`narrow`): their entries are dense;
 * rows, heads and slots lie apart as said. A task of the thread pool is one head of one row; heads that share keys
 * are one task, since the last of them writes.
 */
#include <math.h>
#include "vectors.h"

#define TOGETHER 4 /* vectors of a value */

typedef uint16_t narrow_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

typedef struct {
    const float *q, *k, *v, *bias, *head_scale;
    const float *sink_logits, *sink_values; /* (B, H) and (S, V), a row for H / S heads; null if there is none, or 0 */
    char *keys, *values;
    const int64_t *seen;
    float *y;
    int64_t key_row, key_head, key_slot, value_row, value_head, value_slot, bias_head, bias_column, R;
    int64_t sink_row, sink_head, left, right, chunk, block, shift, zeros_before, narrow;
    int64_t B, H, G, M, E, V, S;
    float scale;
} problem;

static inline vec load_held(const char *from, int64_t at, int lanes, int64_t narrow) {
    if (!narrow) return load((const float *)from + at, lanes);
    const uint16_t *source = (const uint16_t *)from + at;
    narrow_vec v = {0};
    if (lanes == LANES) v = *(const narrow_vec *)source;
    else for (int i = 0; i < lanes; i++) v[i] = source[i];
    return (vec)(__builtin_convertvector(v, ivec) << 16);
}

static inline void store_held(char *to, int64_t at, const float *from, int64_t size, int64_t narrow) {
    if (!narrow) {
        memcpy((float *)to + at, from, size * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < size; i++) { /* to the nearest, ties to even; NaN stays one */
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        const uint16_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        ((uint16_t *)to)[at + i] = from[i] != from[i] ? 0x7fc0 : nearest;
    }
}

static inline float dot(const float *a, const char *from, int64_t at, int64_t size, int64_t narrow) {
    vec total = broadcast(0);
    for (int64_t i = 0; i < size; i += LANES) {
        const int lanes = lanes_of(i, size);
        total += load(a + i, lanes) * load_held(from, at + i, lanes, narrow);
    }
    return sum(total);
}

/* to = x / sqrt(|x|^2 + 1e-6) times factor */
static void normalised(float *to, const float *x, int64_t size, float factor) {
    const float norm = sqrtf(dot(x, (const char *)x, 0, size, 0) + 1e-6f);
    for (int64_t i = 0; i < size; i++) to[i] = x[i] / norm * factor;
}

/* the bias of a distance, the last column for those beyond the table */
static inline float bias_of(const problem *p, int64_t h, int64_t distance, float factor) {
    if (!p->bias) return 0;
    const int64_t column = distance < 0 ? 0 : smaller(distance, p->R - 1);
    return factor * p->bias[h * p->bias_head + column * p->bias_column];
}

/* y = share * (sum of scores times values) of `vectors` vectors of entries from e on; the own value's score is last, and
 * the sink's value, if it has one, has its weight */
INLINE void weighted(
    const problem *p, float *y, const char *values, int64_t e, const float *scores, int64_t first, int64_t held,
    const float *own_value, const float *sink_value, float sink_weight, float share, const int vectors, int lanes) {
    vec out[TOGETHER];
    for (int j = 0; j < vectors; j++) out[j] = broadcast(0);
    for (int64_t i = 0; i < held; i++)
        for (int j = 0; j < vectors; j++)
            out[j] += scores[i] * load_held(values, (first + i) * p->value_slot + e + j * LANES, lanes, p->narrow);
    for (int j = 0; j < vectors; j++) {
        if (own_value) out[j] += scores[held] * load(own_value + e + j * LANES, lanes);
        if (sink_value) out[j] += sink_weight * load(sink_value + e + j * LANES, lanes);
        store(y + j * LANES, out[j] * share, lanes);
    }
}

/* y of one head; `held` slots from `first` on have the distances `far`, far - 1, ...; `own`: the token's key too.
 * scores: space for M + 1 + LANES floats. */
static void attend(
    const problem *p, int64_t b, int64_t h, const float *q, float factor, const float *own_key, const float *own_value,
    int64_t first, int64_t held, int64_t far, int64_t missing_from, float *scores) {
    const int64_t g = h / (p->H / p->G), size = p->narrow ? 2 : 4;
    if (!own_key) own_value = 0;
    const char *keys = p->keys + (b * p->key_row + g * p->key_head) * size;
    const char *values = p->values + (b * p->value_row + g * p->value_head) * size;
    float *y = p->y + (b * p->H + h) * p->V, top = -INFINITY;
    int64_t count = 0;
    for (; count < held; count++) {
        scores[count] = p->scale * dot(q, keys, (first + count) * p->key_slot, p->E, p->narrow) +
                        bias_of(p, h, far - count, factor);
        if (scores[count] > top || scores[count] != scores[count]) top = scores[count];
    }
    if (own_key) {
        scores[count] = p->scale * dot(q, (const char *)own_key, 0, p->E, 0) + bias_of(p, h, 0, factor);
        if (scores[count] > top || scores[count] != scores[count]) top = scores[count];
        count++;
    }
    /* the distances before the document's start hold zeros: their logits are the biases */
    for (int64_t d = missing_from; d <= p->left && p->zeros_before; d++) {
        const float logit = bias_of(p, h, d, factor);
        if (logit > top) top = logit;
    }
    const float sink = p->sink_logits ? p->sink_logits[b * p->sink_row + h * p->sink_head] : -INFINITY;
    if (sink > top || sink != sink) top = sink;
    if (top == -INFINITY) { /* a token that sees nothing gets 0; the bias may hide all that there are */
        memset(y, 0, p->V * sizeof(float));
        return;
    }
    const float *sink_value = p->sink_values ? p->sink_values + h / (p->H / p->S) * p->V : 0;
    const float sink_weight = p->sink_logits ? expf(sink - top) : 0;
    float total = sink_weight;
    for (int64_t d = missing_from; d <= p->left && p->zeros_before; d++) total += expf(bias_of(p, h, d, factor) - top);
    for (int64_t i = 0; i < count; i += LANES) {
        const int lanes = lanes_of(i, count);
        vec weight = exponential(load(scores + i, lanes) - top);
        store(scores + i, weight, lanes);
    }
    for (int64_t i = 0; i < count; i++) total += scores[i];
    const float share = 1.0f / total;
    int64_t e = 0;
    for (; e + TOGETHER * LANES <= p->V; e += TOGETHER * LANES) /* sums that do not wait for each other */
        weighted(p, y + e, values, e, scores, first, held, own_value, sink_value, sink_weight, share, TOGETHER, LANES);
    for (; e < p->V; e += LANES)
        weighted(p, y + e, values, e, scores, first, held, own_value, sink_value, sink_weight, share, 1,
                 lanes_of(e, p->V));
}

/* a token's key or value into its slot of M, or, where a block is over, zeros into all slots */
static void keep(const problem *p, char *held, int64_t apart, const float *new, int64_t entries, int64_t slot) {
    const int64_t size = p->narrow ? 2 : 4, over = p->block && slot == p->M - 1;
    for (int64_t i = 0; i < p->M && over; i++) memset(held + i * apart * size, 0, entries * size);
    for (int64_t i = 1; i < p->M && p->shift; i++)
        memcpy(held + (i - 1) * apart * size, held + i * apart * size, entries * size);
    if (!over) store_held(held, slot * apart, new, entries, p->narrow);
}

static void one_group(const problem *p, int64_t b, int64_t g, float *space) {
    const int64_t heads = p->H / p->G, rank = p->seen ? smaller(p->seen[b], INT64_MAX / 4) : 0;
    float *q = space, *key = q + p->E, *scores = key + p->E;
    const float *k = p->k ? p->k + (b * p->G + g) * p->E : 0, *v = p->k ? p->v + (b * p->G + g) * p->V : 0;
    if (k && p->head_scale) {
        normalised(key, k, p->E, 1);
        k = key;
    }
    int64_t first = 0, held = p->M, far = 0, slot = 0, missing_from = p->left + 1;
    int own = 0;
    if (p->block) { /* slots 0 .. rank % M of the block, the last one the token's */
        slot = held = rank % p->M;
        own = p->right == 0;
    } else if (p->k) { /* the newest slots, as many distances as window, document and chunk leave */
        const int64_t before = p->shift ? p->M : p->M - 1;
        int64_t reach = p->left >= 0 ? smaller(p->left, rank) : rank;
        if (p->chunk) reach = smaller(reach, rank % p->chunk);
        far = smaller(reach, before);
        first = before - far;
        held = far + (p->right < 0 ? p->right + 1 : 0);
        if (held < 0) held = 0;
        own = p->right == 0;
        slot = p->M - 1;
        missing_from = rank + 1 > -p->right ? rank + 1 : -p->right;
    }
    for (int64_t h = g * heads; h < (g + 1) * heads; h++) {
        const float *query = p->q + (b * p->H + h) * p->E;
        const float factor = p->head_scale ? fabsf(p->head_scale[h]) : 1;
        if (p->head_scale) {
            normalised(q, query, p->E, factor);
            query = q;
        }
        attend(p, b, h, query, factor, own ? k : 0, v, first, held, far, missing_from, scores);
    }
    if (!k) return;
    const int64_t size = p->narrow ? 2 : 4;
    keep(p, p->keys + (b * p->key_row + g * p->key_head) * size, p->key_slot, k, p->E, slot);
    keep(p, p->values + (b * p->value_row + g * p->value_head) * size, p->value_slot, v, p->V, slot);
}

/* Returns 0, 1 if memory ran out, or 2 if there is no slot or a row has seen fewer tokens than none. left < 0: no
 * limit; chunk, block: 0 if there is none; k null: nothing is kept. */
int attention_step(
    const float *q, const float *k, const float *v, char *keys, char *values, const int64_t *seen, const float *bias,
    const float *head_scale, const float *sink_logits, const float *sink_values, float *y, double scale,
    int64_t key_row, int64_t key_head, int64_t key_slot, int64_t value_row, int64_t value_head, int64_t value_slot,
    int64_t bias_head, int64_t bias_column, int64_t R, int64_t sink_row, int64_t sink_head, int64_t left,
    int64_t right, int64_t chunk, int64_t block, int64_t shift, int64_t zeros_before, int64_t narrow, int64_t B,
    int64_t H, int64_t G, int64_t M, int64_t E, int64_t V, int64_t S, int64_t threads) {
    const problem p = {q, k, v, bias, head_scale, sink_logits, sink_values, keys, values, seen, y, key_row, key_head,
                       key_slot, value_row, value_head, value_slot, bias_head, bias_column, R, sink_row, sink_head, left,
                       right, chunk, block, shift, zeros_before, narrow, B, H, G, M, E, V, S, scale};
    int failed = 0;
    for (int64_t b = 0; b < B; b++)
        if (M < 1 || (seen && seen[b] < 0)) return 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && B * G * M * (E + V) > 1 << 17)
    for (int64_t task = 0; task < B * G; task++) {
        float *space = malloc((2 * E + M + 1 + LANES) * sizeof(float));
        if (!space) { failed = 1; continue; }
        one_group(&p, task / G, task % G, space);
        free(space);
    }
    return failed;
}
