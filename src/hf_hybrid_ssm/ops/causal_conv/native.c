/* The short causal convolution on a CPU: LANES channels in one vector, K taps each, bias and SiLU in the same pass.
 *
 * B batch, L length, D channels, K taps. All tensors are contiguous float32: x, y, dy (B, L, D); weight (K, D), taps
 * oldest first; bias (D); initial (B, K - 1, D). A task of the thread pool is a group of channel tiles of one row, and
 * its partial sums for weight and bias are kept apart by row, in a fixed order: the same bits for any number of
 * threads.
 */
#include "vectors.h"

#define BLOCK 64 /* tokens: a block's rows stay in cache while the channel tiles go through them */
#define USUAL 4  /* taps, for which the tile functions are specialised */

typedef struct {
    const float *x, *weight, *bias, *initial;
    const int64_t *seq_idx;
    int64_t silu, B, L, D;
} problem;

/* does the token at `from` (negative: the state, which belongs to the row's first document) share t's document? */
static inline int same_document(const problem *p, int64_t b, int64_t from, int64_t t) {
    const int64_t *of = p->seq_idx + b * p->L;
    return of[from < 0 ? 0 : from] == of[t];
}

static inline vec input(const problem *p, int64_t b, int64_t d, int64_t t, int64_t K, int lanes) {
    if (t >= 0) return load(p->x + (b * p->L + t) * p->D + d, lanes);
    return p->initial ? load(p->initial + (b * (K - 1) + K - 1 + t) * p->D + d, lanes) : broadcast(0);
}

INLINE vec linear(
    const problem *p, int64_t b, int64_t d, int64_t t, const vec *w, vec bias, int lanes, const int64_t K) {
    vec y = bias;
    if (!p->seq_idx && t >= K - 1) {
        const float *x = p->x + (b * p->L + t - K + 1) * p->D + d;
        for (int64_t j = 0; j < K; j++) y += w[j] * load(x + j * p->D, lanes);
        return y;
    }
    for (int64_t j = 0; j < K; j++) {
        const int64_t from = t - K + 1 + j;
        if (p->seq_idx && !same_document(p, b, from, t)) continue;
        y += w[j] * input(p, b, d, from, K, lanes);
    }
    return y;
}

INLINE void forward_tile(
    const problem *p, int64_t b, int64_t d, int64_t begin, int64_t end, float *y, vec *w, int lanes, const int64_t K) {
    for (int64_t j = 0; j < K; j++) w[j] = load(p->weight + j * p->D + d, lanes);
    const vec bias = p->bias ? load(p->bias + d, lanes) : broadcast(0);
    for (int64_t t = begin; t < end; t++) {
        const int64_t next = (b * p->L + t + AHEAD) * p->D + d;
        __builtin_prefetch(p->x + next);
        __builtin_prefetch(y + next, 1);
        vec out = linear(p, b, d, t, w, bias, lanes, K);
        if (p->silu) out *= sigmoid(out);
        store(y + (b * p->L + t) * p->D + d, out, lanes);
    }
}

/* One token of each row; weight is (D, K) here. state (P, K - 1, D) moves on by the token: row b's is at pages[b], or b
 * without pages. Rows of x and pages lie apart as said. Returns 0, or 2 for a page that is none. */
int causal_conv_step(
    const float *x, const float *weight, const float *bias, float *state, const int64_t *pages, float *y, int64_t x_row,
    int64_t page, int64_t silu, int64_t P, int64_t B, int64_t K, int64_t D, int64_t threads) {
    (void)threads;
    if (!are_pages(pages, B, P)) return 2;
    for (int64_t b = 0; b < B; b++) {
        for (int64_t d = 0; d < D; d += LANES) {
            const int lanes = lanes_of(d, D);
            float *held = state + (pages ? pages[b] : b) * page + d;
            vec out = bias ? load(bias + d, lanes) : broadcast(0);
            for (int64_t j = 0; j < K; j++) {
                vec w = {0};
                for (int i = 0; i < lanes; i++) w[i] = weight[(d + i) * K + j];
                const vec input = j < K - 1 ? load(held + j * D, lanes) : load(x + b * x_row + d, lanes);
                out += w * input;
                if (j) store(held + (j - 1) * D, input, lanes);
            }
            if (silu) out *= sigmoid(out);
            store(y + b * D + d, out, lanes);
        }
    }
    return 0;
}

/* Returns 0, or 1 if memory ran out. */
int causal_conv_forward(
    const float *x, const float *weight, const float *bias, const float *initial, const int64_t *seq_idx, float *y,
    int64_t silu, int64_t B, int64_t L, int64_t D, int64_t K, int64_t threads) {
    const problem p = {x, weight, bias, initial, seq_idx, silu, B, L, D};
    const int64_t tiles = ceil_div(D, LANES), groups = ceil_div(tiles, GROUP);
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && B * groups > 1 && L > 1)
    for (int64_t task = 0; task < B * groups; task++) {
        const int64_t b = task / groups, first = (task % groups) * GROUP;
        const int64_t last = smaller(first + GROUP, tiles);
        vec *w = allocate(K * sizeof(vec));
        if (!w) { failed = 1; continue; }
        for (int64_t begin = 0; begin < L; begin += BLOCK) {
            const int64_t end = smaller(begin + BLOCK, L);
            for (int64_t tile = first; tile < last; tile++) {
                const int64_t d = tile * LANES;
                const int lanes = lanes_of(d, D);
                if (K == USUAL && lanes == LANES) forward_tile(&p, b, d, begin, end, y, w, LANES, USUAL);
                else forward_tile(&p, b, d, begin, end, y, w, lanes, K);
            }
        }
        free(w);
    }
    return failed;
}

/* later: gradients of the linear outputs of the K tokens from t on, a ring by t modulo K */
INLINE void backward_tile(
    const problem *p, int64_t b, int64_t d, int64_t begin, int64_t end, const float *dy, float *dx, const vec *w,
    vec *dw, vec *dbias, vec *later, int lanes, const int64_t K) {
    const vec bias = p->bias ? load(p->bias + d, lanes) : broadcast(0);
    for (int64_t t = end - 1; t >= begin; t--) {
        const int64_t at = (b * p->L + t) * p->D + d, next = at - AHEAD * p->D;
        __builtin_prefetch(p->x + next);
        __builtin_prefetch(dy + next);
        __builtin_prefetch(dx + next, 1);
        vec g = load(dy + at, lanes);
        if (p->silu) {
            const vec u = linear(p, b, d, t, w, bias, lanes, K), s = sigmoid(u);
            g *= s * (1.0f + u * (1.0f - s));
        }
        *dbias += g;
        later[t % K] = g;
        vec out = broadcast(0);
        for (int64_t j = 0; j < K; j++) {
            const int64_t from = t - K + 1 + j, reader = t + K - 1 - j;
            if (!p->seq_idx || same_document(p, b, from, t)) dw[j] += g * input(p, b, d, from, K, lanes);
            if (reader < p->L && (!p->seq_idx || same_document(p, b, t, reader))) out += w[j] * later[reader % K];
        }
        store(dx + at, out, lanes);
    }
}

/* dweight (B, K, D), dbias (B, D): partial sums; dinitial (B, K - 1, D) or null. Returns 0, or 1 if memory ran out. */
int causal_conv_backward(
    const float *x, const float *weight, const float *bias, const float *initial, const int64_t *seq_idx,
    const float *dy, float *dx, float *dweight, float *dbias, float *dinitial, int64_t silu, int64_t B, int64_t L,
    int64_t D, int64_t K, int64_t threads) {
    const problem p = {x, weight, bias, initial, seq_idx, silu, B, L, D};
    const int64_t tiles = ceil_div(D, LANES), groups = ceil_div(tiles, GROUP), each = 3 * K + 1;
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && B * groups > 1)
    for (int64_t task = 0; task < B * groups; task++) {
        const int64_t b = task / groups, first = (task % groups) * GROUP;
        const int64_t last = smaller(first + GROUP, tiles);
        vec *memory = allocate(GROUP * each * sizeof(vec));
        if (!memory) { failed = 1; continue; }
        memset(memory, 0, GROUP * each * sizeof(vec));
        for (int64_t tile = first; tile < last; tile++) {
            const int64_t d = tile * LANES;
            const int lanes = lanes_of(d, D);
            for (int64_t j = 0; j < K; j++) memory[(tile - first) * each + j] = load(weight + j * D + d, lanes);
        }
        for (int64_t end = L; end > 0; end = (end - 1) / BLOCK * BLOCK) {
            const int64_t begin = (end - 1) / BLOCK * BLOCK;
            for (int64_t tile = first; tile < last; tile++) {
                const int64_t d = tile * LANES;
                const int lanes = lanes_of(d, D);
                vec *w = memory + (tile - first) * each, *dw = w + K, *later = dw + K, *db = later + K;
                if (K == USUAL && lanes == LANES)
                    backward_tile(&p, b, d, begin, end, dy, dx, w, dw, db, later, LANES, USUAL);
                else backward_tile(&p, b, d, begin, end, dy, dx, w, dw, db, later, lanes, K);
            }
        }
        for (int64_t tile = first; tile < last; tile++) {
            const int64_t d = tile * LANES;
            const int lanes = lanes_of(d, D);
            const vec *w = memory + (tile - first) * each, *dw = w + K, *later = dw + K;
            for (int64_t j = 0; j < K; j++) store(dweight + (b * K + j) * D + d, dw[j], lanes);
            store(dbias + b * D + d, later[K], lanes);
            for (int64_t t = 1 - K; dinitial && t < 0; t++) {
                vec out = broadcast(0);
                for (int64_t j = 0; j < K; j++) {
                    const int64_t reader = t + K - 1 - j;
                    if (reader < 0 || reader >= L || (seq_idx && !same_document(&p, b, t, reader))) continue;
                    out += w[j] * later[reader % K];
                }
                store(dinitial + (b * (K - 1) + K - 1 + t) * D + d, out, lanes);
            }
        }
        free(memory);
    }
    return failed;
}
