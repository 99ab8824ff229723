/* Attention of one token of each row to held keys and values on a CPU, and the place of its own among them.
 *
 * B rows, H heads, G heads of keys and values, M held slots; q (B, H, E), k (B, G, E), v (B, G, V), y (B, H, V) are
 * float32. keys (B, G, M, E) and values (B, G, M, V) are float32 or bfloat16 (`narrow`): their entries are dense;
 * rows, heads and slots lie apart as said. A task of the thread pool is a part of the slots, for the heads of one row
 * that share keys: they read it together. The parts do not depend on the threads, nor do the sums of what they give.
 * Then what is held is overwritten.
 */
#include <math.h>
#include <omp.h>
#include "vectors.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define SLOTS 4     /* whose products with a query are summed side by side */
#define TOGETHER 4  /* vectors of a value */
#define HEADS (REGISTERS == 32 ? 4 : 2) /* that share what is held, and read it together */
#define NEXT 16     /* slots between the prefetch of one and its use: rows may lie apart */
#define SHORT 128   /* slots of a part of a window, so that threads share them evenly */
#define LONG 1024   /* and of many slots, whose scores the nearest cache holds */
#define WORTH_A_THREAD (1 << 20) /* waking a thread takes as long as so many products */

#if defined(__clang__)
#define MERGED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t iquarter __attribute__((vector_size(16)));
#define MERGED(a, b, ...) __builtin_shuffle(a, b, (iquarter){__VA_ARGS__})
#endif

enum { FREE, BY_RANK, BLOCK }; /* where a token finds the keys before it: see slots.py */

typedef uint16_t narrow_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

typedef struct {
    const float *q, *k, *v, *bias, *head_scale;
    const float *sink_logits, *sink_values; /* (B, H) and (S, V), a row for H / S heads; null if there is none, or 0 */
    const char *mask;                       /* (B, M), slots that are seen; null: all */
    char *keys, *values;
    const int64_t *seen;
    float *y;
    int64_t key_row, key_head, key_slot, value_row, value_head, value_slot, bias_head, bias_column, R;
    int64_t sink_row, sink_head, mask_row, left, right, chunk, layout, zeros_before, narrow;
    int64_t B, H, G, M, E, V, S;
    float scale;
} problem;

/* What the heads of a row see: `held` slots, `ahead` of them from `first` on and the others from slot 0 on, of the
 * distances `far`, far - 1, ..., those that `shown` says 1 of (null: all); of a group the token's own key and value,
 * unless null, which go to `slot`; with zeros before the document, all distances from `missing_from` on. */
typedef struct {
    int64_t first, ahead, held, far, missing_from, slot;
    const char *shown;
    const float *own_key, *own_value;
} view;

INLINE vec load_held(const char *from, int64_t at, int lanes, const int narrow) {
    if (!narrow) return load((const float *)from + at, lanes);
    const uint16_t *source = (const uint16_t *)from + at;
#if defined(__AVX512F__) && LANES == 16 /* one instruction, of which GCC makes three */
    if (lanes == LANES)
        return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)source)), 16);
#endif
    narrow_vec v = {0};
    if (lanes == LANES) v = *(const narrow_vec *)source;
    else for (int i = 0; i < lanes; i++) v[i] = source[i];
    return (vec)(__builtin_convertvector(v, ivec) << 16);
}

INLINE float held_at(const char *from, int64_t at, const int narrow) {
    if (!narrow) return ((const float *)from)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
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

/* scale times the products of the queries of `heads` heads with keys that lie `apart` */
INLINE void products(
    float *to, int64_t to_head, const float *q, const char *keys, int64_t at, int64_t apart, int64_t E, float scale,
    const int heads, const int slots, const int narrow) {
    vec total[HEADS * SLOTS];
UNROLL(16)
    for (int s = 0; s < heads * slots; s++) total[s] = broadcast(0);
    int64_t i = 0;
    for (; i + LANES <= E; i += LANES) {
        vec key[SLOTS];
        const char *ahead = keys + (at + NEXT * apart + i) * (narrow ? 2 : 4);
UNROLL(4)
        for (int j = 0; j < slots; j++) __builtin_prefetch(ahead + j * apart * (narrow ? 2 : 4));
UNROLL(4)
        for (int j = 0; j < slots; j++) key[j] = load_held(keys, at + j * apart + i, LANES, narrow);
UNROLL(4)
        for (int h = 0; h < heads; h++) {
            const vec query = load(q + h * E + i, LANES);
UNROLL(4)
            for (int j = 0; j < slots; j++) total[h * slots + j] += query * key[j];
        }
    }
UNROLL(4)
    for (int h = 0; h < heads; h++)
        if (slots == SLOTS) *(quarter *)(to + h * to_head) = scale * sums(total + h * slots);
        else to[h * to_head] = scale * sum(total[h]);
    for (; i < E; i++)
        for (int h = 0; h < heads; h++)
            for (int j = 0; j < slots; j++)
                to[h * to_head + j] += scale * q[h * E + i] * held_at(keys, at + j * apart + i, narrow);
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
UNROLL(4)
    for (int h = 0; h < heads; h++)
UNROLL(4)
        for (int j = 0; j < vectors; j++) out[h][j] = broadcast(0);
    for (int64_t i = 0; i < held; i++)
UNROLL(4)
        for (int j = 0; j < vectors; j++) {
            __builtin_prefetch(values + (at + (i + NEXT) * apart + j * LANES) * (narrow ? 2 : 4));
            const vec value = load_held(values, at + i * apart + j * LANES, lanes, narrow);
UNROLL(4)
            for (int h = 0; h < heads; h++) out[h][j] += weights[h * weight_head + i] * value;
        }
UNROLL(4)
    for (int h = 0; h < heads; h++)
UNROLL(4)
        for (int j = 0; j < vectors; j++) store(y + h * y_head + j * LANES, out[h][j], lanes);
}

INLINE void weighted_heads(
    const problem *p, float *y, const char *values, int64_t first, int64_t held, const float *weights,
    int64_t weight_head, const int heads, const int narrow) {
    const int64_t wide = p->V + 2;
    int64_t e = 0;
    for (; e + TOGETHER * LANES <= p->V; e += TOGETHER * LANES) /* sums that do not wait for each other */
        weighted(y + e, wide, values, first * p->value_slot + e, p->value_slot, weights, weight_head, held, heads,
                 TOGETHER, LANES, narrow);
    for (; e < p->V; e += LANES)
        weighted(y + e, wide, values, first * p->value_slot + e, p->value_slot, weights, weight_head, held, heads, 1,
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

/* For `heads` heads of a group, of the slots lo .. hi - 1 of a view, which lie side by side: out[h] = {y (V), sum,
 * top}, where y is the sum of values, weighted by the exponential of score - top. scores: (heads, hi - lo + SLOTS),
 * space. */
INLINE void attend_some(
    const problem *p, int64_t b, int64_t h0, const view *seen, int64_t lo, int64_t hi, const float *queries,
    float *out, float *scores, const int heads, const int narrow) {
    const int64_t g = h0 / (p->H / p->G), size = narrow ? 2 : 4, count = hi - lo, apart = count + SLOTS;
    const int64_t first = lo < seen->ahead ? seen->first + lo : lo - seen->ahead, wide = p->V + 2;
    const char *keys = p->keys + (b * p->key_row + g * p->key_head) * size;
    const char *values = p->values + (b * p->value_row + g * p->value_head) * size;
    int64_t i = 0;
    for (; i + SLOTS <= count; i += SLOTS)
        products(scores + i, apart, queries, keys, (first + i) * p->key_slot, p->key_slot, p->E, p->scale, heads, SLOTS,
                 narrow);
    for (; i < count; i++)
        products(scores + i, apart, queries, keys, (first + i) * p->key_slot, p->key_slot, p->E, p->scale, heads, 1,
                 narrow);
    for (int h = 0; h < heads; h++) {
        const float factor = p->head_scale ? fabsf(p->head_scale[h0 + h]) : 1;
        float *score = scores + h * apart;
        for (i = 0; i < count && p->bias; i++) score[i] += bias_of(p, h0 + h, seen->far - lo - i, factor);
        for (i = 0; i < count && seen->shown; i++) score[i] = seen->shown[lo + i] ? score[i] : -INFINITY;
        const float top = greatest(score, count);
        out[h * wide + p->V + 1] = top;
        if (top == -INFINITY) memset(score, 0, count * sizeof(float)); /* all may be hidden, by a bias too */
        out[h * wide + p->V] = top == -INFINITY ? 0 : exponentials(score, count, top);
    }
    weighted_heads(p, out, values, first, count, scores, apart, heads, narrow);
}

/* The same for all heads of a group. */
INLINE void attend(
    const problem *p, int64_t b, int64_t g, const view *seen, int64_t lo, int64_t hi, const float *queries, float *out,
    float *scores, const int narrow) {
    const int64_t heads = p->H / p->G, wide = p->V + 2;
    for (int64_t h = 0; h < heads;) {
        const int64_t left = heads - h, at = g * heads + h;
        const float *q = queries + h * p->E;
        float *to = out + h * wide;
        if (left >= HEADS) attend_some(p, b, at, seen, lo, hi, q, to, scores, HEADS, narrow), h += HEADS;
#if HEADS > 2
        else if (left == 3) attend_some(p, b, at, seen, lo, hi, q, to, scores, 3, narrow), h += 3;
        else if (left == 2) attend_some(p, b, at, seen, lo, hi, q, to, scores, 2, narrow), h += 2;
#endif
        else attend_some(p, b, at, seen, lo, hi, q, to, scores, 1, narrow), h++;
    }
}

/* y of a head: the sums of its parts (parts, apart floats each), what the zeros before the document weigh, its own key
 * (`own`, its logit) and the sink. */
static void combine(const problem *p, int64_t b, int64_t h, const view *seen, float *parts, int64_t apart,
                    int64_t count, float own) {
    const float factor = p->head_scale ? fabsf(p->head_scale[h]) : 1;
    const float sink = p->sink_logits ? p->sink_logits[b * p->sink_row + h * p->sink_head] : -INFINITY;
    float *y = p->y + (b * p->H + h) * p->V, top = greater(sink, own);
    for (int64_t i = 0; i < count; i++) top = greater(top, parts[i * apart + p->V + 1]);
    /* the distances before the document's start hold zeros: their logits are the biases, the same from `last` on */
    const int64_t from = seen->missing_from, table = smaller(p->left, p->R - 1), last = from > table ? from : table;
    const int zeros = p->zeros_before && from <= p->left;
    for (int64_t d = from; d <= last && zeros; d++) top = greater(top, bias_of(p, h, d, factor));
    memset(y, 0, p->V * sizeof(float));
    if (top == -INFINITY) return;
    const float of_sink = sink == -INFINITY ? 0 : expf(sink - top), of_own = seen->own_key ? expf(own - top) : 0;
    float total = of_sink + of_own;
    for (int64_t d = from; d <= last && zeros; d++)
        total += (d < last ? 1 : p->left + 1 - last) * expf(bias_of(p, h, d, factor) - top);
    for (int64_t i = 0; i < count; i++) { /* the top becomes the part's factor */
        float *part = parts + i * apart;
        part[p->V + 1] = part[p->V + 1] == -INFINITY ? 0 : expf(part[p->V + 1] - top);
        total += part[p->V] * part[p->V + 1];
    }
    const float *sink_value = p->sink_values ? p->sink_values + h / (p->H / p->S) * p->V : 0;
    for (int64_t e = 0; e < p->V; e += LANES) {
        const int lanes = lanes_of(e, p->V);
        vec out = broadcast(0);
        for (int64_t i = 0; i < count; i++) {
            const float *part = parts + i * apart;
            out += part[p->V + 1] * load(part + e, lanes);
        }
        if (seen->own_key) out += of_own * load(seen->own_value + e, lanes);
        if (sink_value) out += of_sink * load(sink_value + e, lanes);
        store(y + e, out * (1.0f / total), lanes);
    }
}

/* a token's key or value into its slot of M, or, where a block is over, zeros into all slots */
static void keep(const problem *p, char *held, int64_t apart, const float *new, int64_t entries, int64_t slot) {
    const int64_t size = p->narrow ? 2 : 4, over = p->layout == BLOCK && slot == p->M - 1;
    for (int64_t i = 0; i < p->M && over; i++) memset(held + i * apart * size, 0, entries * size);
    if (!over) store_held(held, slot * apart, new, entries, p->narrow);
}

/* the heads of a group that are normalised, or as they are */
static const float *queries_of(const problem *p, int64_t b, int64_t g, float *space) {
    const int64_t heads = p->H / p->G;
    const float *queries = p->q + (b * p->H + g * heads) * p->E;
    if (!p->head_scale) return queries;
    for (int64_t h = 0; h < heads; h++)
        normalised(space + h * p->E, queries + h * p->E, p->E, fabsf(p->head_scale[g * heads + h]));
    return space;
}

/* what a row's heads see, but for the token's own key and value */
static view view_of(const problem *p, int64_t b) {
    const int64_t rank = p->seen ? smaller(p->seen[b], INT64_MAX / 4) : 0;
    view seen = {0, 0, p->M, 0, p->left + 1, p->M - 1, 0, 0, 0};
    if (p->mask) { /* from the first to the last one that it shows */
        const char *mask = p->mask + b * p->mask_row;
        for (uint64_t eight = 0; seen.held >= 8; seen.held -= 8) { /* most of a static cache may be empty */
            memcpy(&eight, mask + seen.held - 8, sizeof eight);
            if (eight) break;
        }
        while (seen.held > 0 && !mask[seen.held - 1]) seen.held--;
        while (seen.first < seen.held && !mask[seen.first]) seen.first++;
        seen.held -= seen.first;
        seen.shown = mask + seen.first;
    } else if (p->layout == BLOCK) { /* slots 0 .. rank % M, the last one the token's */
        seen.slot = seen.held = rank % p->M;
    } else if (p->k) { /* the newest slots, as many distances as window, document and chunk leave */
        int64_t reach = p->left >= 0 ? smaller(p->left, rank) : rank;
        if (p->chunk) reach = smaller(reach, rank % p->chunk);
        seen.far = smaller(reach, p->layout == BY_RANK ? p->M : p->M - 1);
        if (p->layout == BY_RANK) seen.slot = rank % p->M;
        seen.first = p->layout == BY_RANK ? (rank - seen.far) % p->M : p->M - 1 - seen.far;
        seen.held = seen.far + (p->right < 0 ? p->right + 1 : 0);
        if (seen.held < 0) seen.held = 0;
        seen.missing_from = rank + 1 > -p->right ? rank + 1 : -p->right;
    }
    seen.ahead = smaller(seen.held, p->M - seen.first);
    return seen;
}

/* one part of the slots that a row sees, for the heads of a group */
static void one_part(
    const problem *p, int64_t b, int64_t g, const view *seen, int64_t part, int64_t length, float *out, float *space) {
    const int64_t parts = ceil_div(seen->ahead, length); /* of the slots that come first, none of which is in two */
    const int64_t lo = part < parts ? part * length : smaller(seen->ahead + (part - parts) * length, seen->held);
    const int64_t hi = smaller(lo + length, part < parts ? seen->ahead : seen->held);
    float *scores = space + p->H / p->G * p->E;
    const float *queries = queries_of(p, b, g, space);
    if (p->narrow) attend(p, b, g, seen, lo, hi, queries, out, scores, 1);
    else attend(p, b, g, seen, lo, hi, queries, out, scores, 0);
}

/* y of a group's heads from their parts; its key and value are kept */
static void finish(const problem *p, int64_t b, int64_t g, view seen, float *parts, int64_t count, float *space) {
    const int64_t heads = p->H / p->G, wide = p->V + 2;
    const float *queries = queries_of(p, b, g, space), *k = p->k ? p->k + (b * p->G + g) * p->E : 0;
    const float *v = p->k ? p->v + (b * p->G + g) * p->V : 0;
    if (k && p->head_scale) {
        normalised(space + heads * p->E, k, p->E, 1);
        k = space + heads * p->E;
    }
    if (k && p->right == 0) seen.own_key = k, seen.own_value = v;
    for (int64_t h = 0; h < heads; h++) {
        const float factor = p->head_scale ? fabsf(p->head_scale[g * heads + h]) : 1;
        float own = -INFINITY;
        if (seen.own_key)
            own = p->scale * dot(queries + h * p->E, k, p->E) + bias_of(p, g * heads + h, 0, factor);
        combine(p, b, g * heads + h, &seen, parts + h * wide, heads * wide, count, own);
    }
    if (!k) return;
    const int64_t size = p->narrow ? 2 : 4;
    keep(p, p->keys + (b * p->key_row + g * p->key_head) * size, p->key_slot, k, p->E, seen.slot);
    keep(p, p->values + (b * p->value_row + g * p->value_head) * size, p->value_slot, v, p->V, seen.slot);
}

/* Returns 0, 1 if memory ran out, or 2 if there is no slot, or a row has seen fewer tokens than none or has none for the
 * next. left < 0: no limit; chunk: 0 if there is none; k null: nothing is kept. */
int attention_step(
    const float *q, const float *k, const float *v, char *keys, char *values, const int64_t *seen, const float *bias,
    const float *head_scale, const float *sink_logits, const float *sink_values, const char *mask, float *y, double scale,
    int64_t key_row, int64_t key_head, int64_t key_slot, int64_t value_row, int64_t value_head, int64_t value_slot,
    int64_t bias_head, int64_t bias_column, int64_t R, int64_t sink_row, int64_t sink_head, int64_t mask_row,
    int64_t left, int64_t right, int64_t chunk, int64_t layout, int64_t zeros_before, int64_t narrow, int64_t B,
    int64_t H, int64_t G, int64_t M, int64_t E, int64_t V, int64_t S, int64_t threads) {
    const problem p = {q, k, v, bias, head_scale, sink_logits, sink_values, mask, keys, values, seen, y, key_row,
                       key_head, key_slot, value_row, value_head, value_slot, bias_head, bias_column, R, sink_row,
                       sink_head, mask_row, left, right, chunk, layout, zeros_before, narrow, B, H, G, M, E, V, S, scale};
    for (int64_t b = 0; b < B; b++)
        if (M < 1 || (seen && (seen[b] < 0 || (k && layout == BY_RANK && left < 0 && seen[b] >= M)))) return 2;
    view *views = malloc((B + 1) * sizeof(view));
    if (!views) return 1;
    int64_t most = 1, turns = 0;
    for (int64_t b = 0; b < B; b++) {
        views[b] = view_of(&p, b);
        if (views[b].held > most) most = views[b].held;
        if (views[b].ahead < views[b].held) turns = 1;
    }
    const int64_t length = smaller(most, most > 8 * SHORT ? LONG : SHORT), heads = H / G;
    const int64_t count = ceil_div(most, length) + turns;
    /* of a part, and of a thread: queries, a key, scores */
    const int64_t out = heads * (V + 2), space = (heads + 1) * E + HEADS * (length + SLOTS);
    threads = B * H * most * (E + V) > WORTH_A_THREAD ? smaller(threads, B * G * count) : 1;
    float *parts = malloc((B * G * count * out + threads * space) * sizeof(float)), *spaces = parts + B * G * count * out;
    if (!parts) {
        free(views);
        return 1;
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *own = spaces + omp_get_thread_num() * space;
#pragma omp for
        for (int64_t task = 0; task < B * G * count; task++)
            one_part(&p, task / count / G, task / count % G, views + task / count / G, task % count, length,
                     parts + task * out, own);
#pragma omp for
        for (int64_t task = 0; task < B * G; task++)
            finish(&p, task / G, task % G, views[task / G], parts + task * count * out, count, own);
    }
    free(parts);
    free(views);
    return 0;
}
