/* Attention of one token of each row to held keys and values on a CPU, and the place of its own among them.
 *
 * B rows, H heads, G heads of keys and values, M held slots; q (B, H, E), k (B, G, E), v (B, G, V), y (B, H, V) are
 * float32. keys (B, G, M, E) and values (B, G, M, V) are float32 or bfloat16 (`narrow`): their entries are dense;
 * rows, heads and slots lie apart as said. A task of the thread pool are the heads of one row that share keys: they
 * read what is held together, and then it is overwritten.
 */
#include <math.h>
#include "vectors.h"

#define SLOTS 4     /* whose products with a query are summed side by side */
#define TOGETHER 4  /* vectors of a value */
#define HEADS (REGISTERS == 32 ? 4 : 2) /* that share what is held, and read it together */
#define STRETCH 16  /* slots that all heads read, while they lie in the nearest cache */

#if defined(__clang__)
#define MERGED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t iquarter __attribute__((vector_size(16)));
#define MERGED(a, b, ...) __builtin_shuffle(a, b, (iquarter){__VA_ARGS__})
#endif

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

/* What a group's heads see: `held` slots from `first` on, of the distances `far`, far - 1, ...; the token's own key and
 * value, unless null; with zeros before the document, all distances from `missing_from` on. */
typedef struct {
    int64_t first, held, far, missing_from;
    const float *own_key, *own_value;
} view;

INLINE vec load_held(const char *from, int64_t at, int lanes, const int narrow) {
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

static inline float dot(const float *a, const float *b, int64_t size) {
    vec total = broadcast(0);
    for (int64_t i = 0; i < size; i += LANES) {
        const int lanes = lanes_of(i, size);
        total += load(a + i, lanes) * load(b + i, lanes);
    }
    return sum(total);
}

/* of SLOTS vectors */
static inline quarter sums(const vec *v) {
    const quarter a = folded(v[0]), b = folded(v[1]), c = folded(v[2]), d = folded(v[3]);
    const quarter ab = MERGED(a, b, 0, 4, 1, 5) + MERGED(a, b, 2, 6, 3, 7);
    const quarter cd = MERGED(c, d, 0, 4, 1, 5) + MERGED(c, d, 2, 6, 3, 7);
    return MERGED(ab, cd, 0, 1, 4, 5) + MERGED(ab, cd, 2, 3, 6, 7);
}

/* scale times the products of q with keys that lie `apart` */
INLINE void products(
    float *to, const float *q, const char *keys, int64_t at, int64_t apart, int64_t E, float scale, const int slots,
    const int narrow) {
    vec total[SLOTS];
    for (int j = 0; j < slots; j++) total[j] = broadcast(0);
    for (int64_t i = 0; i < E; i += LANES) {
        const int lanes = lanes_of(i, E);
        const vec query = load(q + i, lanes);
        for (int j = 0; j < slots; j++) total[j] += query * load_held(keys, at + j * apart + i, lanes, narrow);
    }
    if (slots == SLOTS) *(quarter *)to = scale * sums(total);
    else for (int j = 0; j < slots; j++) to[j] = scale * sum(total[j]);
}

/* to = x / sqrt(|x|^2 + 1e-6) times factor */
static void normalised(float *to, const float *x, int64_t size, float factor) {
    const float norm = sqrtf(dot(x, x, size) + 1e-6f);
    for (int64_t i = 0; i < size; i++) to[i] = x[i] / norm * factor;
}

/* the bias of a distance, the last column for those beyond the table */
static inline float bias_of(const problem *p, int64_t h, int64_t distance, float factor) {
    if (!p->bias) return 0;
    const int64_t column = distance < 0 ? 0 : smaller(distance, p->R - 1);
    return factor * p->bias[h * p->bias_head + column * p->bias_column];
}

/* y = the sum of weights times values, of `heads` heads whose weights and y lie apart as said, `vectors` vectors each */
INLINE void weighted(
    float *y, int64_t y_head, const char *values, int64_t at, int64_t apart, const float *weights, int64_t weight_head,
    int64_t held, const int heads, const int vectors, int lanes, const int narrow) {
    vec out[HEADS][TOGETHER];
    for (int h = 0; h < heads; h++)
        for (int j = 0; j < vectors; j++) out[h][j] = broadcast(0);
    for (int64_t i = 0; i < held; i++)
        for (int j = 0; j < vectors; j++) {
            const vec value = load_held(values, at + i * apart + j * LANES, lanes, narrow);
            for (int h = 0; h < heads; h++) out[h][j] += weights[h * weight_head + i] * value;
        }
    for (int h = 0; h < heads; h++)
        for (int j = 0; j < vectors; j++) store(y + h * y_head + j * LANES, out[h][j], lanes);
}

INLINE void weighted_heads(
    const problem *p, float *y, const char *values, int64_t first, int64_t held, const float *weights,
    int64_t weight_head, const int heads, const int narrow) {
    int64_t e = 0;
    for (; e + TOGETHER * LANES <= p->V; e += TOGETHER * LANES) /* sums that do not wait for each other */
        weighted(y + e, p->V, values, first * p->value_slot + e, p->value_slot, weights, weight_head, held, heads,
                 TOGETHER, LANES, narrow);
    for (; e < p->V; e += LANES)
        weighted(y + e, p->V, values, first * p->value_slot + e, p->value_slot, weights, weight_head, held, heads, 1,
                 lanes_of(e, p->V), narrow);
}

/* the greater one; NaN, once it is there, stays */
static inline float greater(float top, float other) { return other > top || other != other ? other : top; }

static float greatest(const float *x, int64_t count) {
    vec tops = broadcast(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vec v = load(x + i, LANES);
        const ivec take = (v > tops) | (v != v);
        tops = (vec)(((ivec)v & take) | ((ivec)tops & ~take));
    }
    float top = -INFINITY;
    for (; i < count; i++) top = greater(top, x[i]);
    for (int j = 0; j < LANES; j++) top = greater(top, tops[j]);
    return top;
}

/* the scores of a head become exp(score - top); their sum */
static float exponentials(float *scores, int64_t count, float top) {
    vec totals = broadcast(0);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vec weight = exponential(load(scores + i, LANES) - top);
        store(scores + i, weight, LANES);
        totals += weight;
    }
    float total = sum(totals);
    if (i < count) {
        const vec weight = exponential(load(scores + i, lanes_of(i, count)) - top);
        store(scores + i, weight, lanes_of(i, count));
        for (; i < count; i++) total += scores[i];
    }
    return total;
}

/* The softmax of a head's `held` scores, its own key's after them if it has one: the weights in their place before they
 * are divided by their sum, and 1 / sum, or 0 where the head sees nothing. */
static float softmax(const problem *p, int64_t b, int64_t h, const view *seen, float factor, float *scores,
                     float *sink_weight) {
    const int64_t count = seen->held + (seen->own_key != 0);
    for (int64_t i = 0; i < count && p->bias; i++)
        scores[i] += bias_of(p, h, i < seen->held ? seen->far - i : 0, factor);
    float top = greatest(scores, count);
    /* the distances before the document's start hold zeros: their logits are the biases */
    for (int64_t d = seen->missing_from; d <= p->left && p->zeros_before; d++) {
        const float logit = bias_of(p, h, d, factor);
        if (logit > top) top = logit;
    }
    const float sink = p->sink_logits ? p->sink_logits[b * p->sink_row + h * p->sink_head] : -INFINITY;
    top = greater(top, sink);
    *sink_weight = 0;
    if (top == -INFINITY) return 0; /* the bias may hide all that there are */
    if (p->sink_logits) *sink_weight = expf(sink - top);
    float total = *sink_weight;
    for (int64_t d = seen->missing_from; d <= p->left && p->zeros_before; d++)
        total += expf(bias_of(p, h, d, factor) - top);
    return 1.0f / (total + exponentials(scores, count, top));
}

/* y of the heads of a group. queries: (heads, E); scores: (heads, `apart`), space. */
INLINE void attend(
    const problem *p, int64_t b, int64_t g, const view *seen, const float *queries, float *scores, int64_t apart,
    const int narrow) {
    const int64_t heads = p->H / p->G, size = narrow ? 2 : 4, held = seen->held, first = seen->first;
    const char *keys = p->keys + (b * p->key_row + g * p->key_head) * size;
    const char *values = p->values + (b * p->value_row + g * p->value_head) * size;
    float *y = p->y + (b * p->H + g * heads) * p->V;
    for (int64_t start = 0; start < held; start += STRETCH) {
        const int64_t end = smaller(start + STRETCH, held);
        for (int64_t h = 0; h < heads; h++) {
            int64_t i = start;
            for (; i + SLOTS <= end; i += SLOTS)
                products(scores + h * apart + i, queries + h * p->E, keys, (first + i) * p->key_slot, p->key_slot,
                         p->E, p->scale, SLOTS, narrow);
            for (; i < end; i++)
                products(scores + h * apart + i, queries + h * p->E, keys, (first + i) * p->key_slot, p->key_slot,
                         p->E, p->scale, 1, narrow);
        }
    }
    float *shares = scores + heads * apart, *sink_weights = shares + heads;
    for (int64_t h = 0; h < heads; h++) {
        const float factor = p->head_scale ? fabsf(p->head_scale[g * heads + h]) : 1;
        if (seen->own_key) scores[h * apart + held] = p->scale * dot(queries + h * p->E, seen->own_key, p->E);
        shares[h] = softmax(p, b, g * heads + h, seen, factor, scores + h * apart, sink_weights + h);
    }
    int64_t h = 0;
    for (; h + HEADS <= heads; h += HEADS)
        weighted_heads(p, y + h * p->V, values, first, held, scores + h * apart, apart, HEADS, narrow);
#if HEADS > 2
    if (h + 3 <= heads) {
        weighted_heads(p, y + h * p->V, values, first, held, scores + h * apart, apart, 3, narrow);
        h += 3;
    } else if (h + 2 <= heads) {
        weighted_heads(p, y + h * p->V, values, first, held, scores + h * apart, apart, 2, narrow);
        h += 2;
    }
#endif
    for (; h < heads; h++)
        weighted_heads(p, y + h * p->V, values, first, held, scores + h * apart, apart, 1, narrow);
    for (h = 0; h < heads; h++) {
        const float *sink_value = p->sink_values ? p->sink_values + (g * heads + h) / (p->H / p->S) * p->V : 0;
        const float own_weight = seen->own_key ? scores[h * apart + held] : 0;
        if (shares[h] == 0) {
            memset(y + h * p->V, 0, p->V * sizeof(float));
            continue;
        }
        for (int64_t e = 0; e < p->V; e += LANES) {
            const int lanes = lanes_of(e, p->V);
            vec out = load(y + h * p->V + e, lanes);
            if (seen->own_key) out += own_weight * load(seen->own_value + e, lanes);
            if (sink_value) out += sink_weights[h] * load(sink_value + e, lanes);
            store(y + h * p->V + e, out * shares[h], lanes);
        }
    }
}

/* a token's key or value into its slot of M, or, where a block is over, zeros into all slots */
static void keep(const problem *p, char *held, int64_t apart, const float *new, int64_t entries, int64_t slot) {
    const int64_t size = p->narrow ? 2 : 4, over = p->block && slot == p->M - 1;
    for (int64_t i = 0; i < p->M && over; i++) memset(held + i * apart * size, 0, entries * size);
    for (int64_t i = 1; i < p->M && p->shift; i++)
        memcpy(held + (i - 1) * apart * size, held + i * apart * size, entries * size);
    if (!over) store_held(held, slot * apart, new, entries, p->narrow);
}

/* floats of space that a group needs: queries, a key, scores, and what follows of them for each head */
static int64_t space_of(const problem *p) {
    const int64_t heads = p->H / p->G;
    return (heads + 1) * p->E + heads * (p->M + 1 + SLOTS + 2);
}

static void one_group(const problem *p, int64_t b, int64_t g, float *space) {
    const int64_t heads = p->H / p->G, rank = p->seen ? smaller(p->seen[b], INT64_MAX / 4) : 0;
    float *normal = space, *key = normal + heads * p->E, *scores = key + p->E;
    const float *queries = p->q + (b * p->H + g * heads) * p->E;
    const float *k = p->k ? p->k + (b * p->G + g) * p->E : 0, *v = p->k ? p->v + (b * p->G + g) * p->V : 0;
    if (p->head_scale) {
        for (int64_t h = 0; h < heads; h++)
            normalised(normal + h * p->E, queries + h * p->E, p->E, fabsf(p->head_scale[g * heads + h]));
        queries = normal;
    }
    if (k && p->head_scale) {
        normalised(key, k, p->E, 1);
        k = key;
    }
    view seen = {0, p->M, 0, p->left + 1, 0, 0};
    int64_t slot = 0;
    int own = 0;
    if (p->block) { /* slots 0 .. rank % M of the block, the last one the token's */
        slot = seen.held = rank % p->M;
        own = p->right == 0;
    } else if (p->k) { /* the newest slots, as many distances as window, document and chunk leave */
        const int64_t before = p->shift ? p->M : p->M - 1;
        int64_t reach = p->left >= 0 ? smaller(p->left, rank) : rank;
        if (p->chunk) reach = smaller(reach, rank % p->chunk);
        seen.far = smaller(reach, before);
        seen.first = before - seen.far;
        seen.held = seen.far + (p->right < 0 ? p->right + 1 : 0);
        if (seen.held < 0) seen.held = 0;
        own = p->right == 0;
        slot = p->M - 1;
        seen.missing_from = rank + 1 > -p->right ? rank + 1 : -p->right;
    }
    if (own) seen.own_key = k, seen.own_value = v;
    if (p->narrow) attend(p, b, g, &seen, queries, scores, p->M + 1 + SLOTS, 1);
    else attend(p, b, g, &seen, queries, scores, p->M + 1 + SLOTS, 0);
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
    /* waking a thread takes as long as so many products */
#pragma omp parallel for num_threads(threads) if (threads > 1 && B * H * M * (E + V) > 1 << 20)
    for (int64_t task = 0; task < B * G; task++) {
        float *space = malloc(space_of(&p) * sizeof(float));
        if (!space) { failed = 1; continue; }
        one_group(&p, task / G, task % G, space);
        free(space);
    }
    return failed;
}
