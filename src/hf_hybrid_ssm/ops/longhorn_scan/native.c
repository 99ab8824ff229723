/* The Longhorn scan on a CPU: LANES channels in one vector, the states of those channels in N vectors.
 *
 * Letters as in reference.py: B batch, L length, D channels, N state size. All tensors are contiguous float32:
 * x, beta_logit, z, y (B, L, D); k, q (B, L, N); states (B, D, N); kk (B, L) = sum of k squared over N.
 * Time runs in blocks of BLOCK tokens, channel tiles run inside a block, so that a block's rows stay in cache. A group
 * of GROUP tiles is one task of the thread pool; the sums over channels (dk, dq) are kept apart by group, in a fixed
 * order, hence the same bits in every run and for every number of threads.
 */
#include "vectors.h"

#define BLOCK 32
#define AT_ONCE (REGISTERS / 2) /* states that stay in registers */
#define IN_REGISTERS 16 /* the usual N, for which the tile functions are specialised */
/* unrolled, so that the states of a tile stay in registers where N is known */
#define EACH_STATE UNROLL(16) for (int64_t n = 0; n < N; n++)

/* what every token of a tile needs: delta = beta / (1 + beta kk), and E = 1 / beta - 1 for its gradient */
static inline vec compute_delta(const float *beta_logit, const float *beta_bias, float kk, int lanes, vec *e) {
    vec logit = load(beta_logit, lanes);
    if (beta_bias) logit += load(beta_bias, lanes);
    *e = exponential(-logit);
    return 1.0f / (*e + (1.0f + kk));
}

static inline int starts_document(const int64_t *seq_idx, int64_t row, int64_t t) {
    return seq_idx && t > 0 && seq_idx[row + t] != seq_idx[row + t - 1];
}

typedef struct {
    const float *x, *beta_logit, *k, *q, *z, *beta_bias, *skip, *kk;
    const int64_t *seq_idx;
    int64_t B, L, D, N;
} problem;

/* The rows of a tile lie whole pages apart, which no hardware prefetcher follows. */
static inline void ahead(const problem *p, int64_t at) {
    const int64_t later = at + AHEAD * p->D;
    __builtin_prefetch(p->x + later);
    __builtin_prefetch(p->beta_logit + later);
    if (p->z) __builtin_prefetch(p->z + later);
}

static void square_sums(const float *k, float *kk, int64_t rows, int64_t N) {
    for (int64_t row = 0; row < rows; row++) {
        float total = 0;
        for (int64_t n = 0; n < N; n++) total += k[row * N + n] * k[row * N + n];
        kk[row] = total;
    }
}

/* Some states of a tile through a block; `outs` collects what is read of them. */
INLINE void forward_states(
    const problem *p, int64_t row, int64_t d, int lanes, int64_t begin, int64_t end, vec *h, int64_t first,
    const vec *deltas, vec *outs, const int64_t N) {
    vec registers[AT_ONCE], *state = N == AT_ONCE ? registers : h + first;
    EACH_STATE state[n] = h[first + n];
    for (int64_t t = begin; t < end; t++) {
        const float *k = p->k + (row + t) * p->N + first, *q = p->q + (row + t) * p->N + first;
        if (starts_document(p->seq_idx, row, t)) EACH_STATE state[n] = broadcast(0);
        const vec x = load(p->x + (row + t) * p->D + d, lanes), delta = deltas[t - begin];
        vec out = outs[t - begin], odd = broadcast(0); /* two sums: half the chain of dependent additions */
        EACH_STATE {
            const vec write = delta * k[n];
            state[n] += write * (x - state[n] * k[n]);
            if (n % 2) odd += state[n] * q[n];
            else out += state[n] * q[n];
        }
        outs[t - begin] = out + odd;
    }
    EACH_STATE h[first + n] = state[n];
}

INLINE void forward_tile(
    const problem *p, int64_t b, int64_t d, int lanes, int64_t begin, int64_t end, vec *h, float *y,
    const int64_t N) {
    const int64_t row = b * p->L;
    const vec skip = p->skip ? load(p->skip + d, lanes) : broadcast(0);
    vec deltas[BLOCK], outs[BLOCK], e;
    for (int64_t t = begin; t < end; t++) {
        const int64_t at = (row + t) * p->D + d;
        ahead(p, at);
        __builtin_prefetch(y + at + AHEAD * p->D, 1);
        const float *bias = p->beta_bias ? p->beta_bias + d : 0;
        deltas[t - begin] = compute_delta(p->beta_logit + at, bias, p->kk[row + t], lanes, &e);
        outs[t - begin] = skip * load(p->x + at, lanes);
    }
    int64_t first = 0;
    for (; first + AT_ONCE <= N; first += AT_ONCE)
        forward_states(p, row, d, lanes, begin, end, h, first, deltas, outs, AT_ONCE);
    if (first < N) forward_states(p, row, d, lanes, begin, end, h, first, deltas, outs, N - first);
    for (int64_t t = begin; t < end; t++) {
        const int64_t at = (row + t) * p->D + d;
        vec out = outs[t - begin];
        if (p->z) {
            const vec z = load(p->z + at, lanes);
            out *= z * sigmoid(z);
        }
        store(y + at, out, lanes);
    }
}

static void load_state(const float *state, vec *h, int lanes, int64_t N) {
    for (int64_t n = 0; n < N; n++) {
        h[n] = broadcast(0);
        if (state) for (int i = 0; i < lanes; i++) h[n][i] = state[i * N + n];
    }
}

static void store_state(float *state, const vec *h, int lanes, int64_t N) {
    for (int64_t n = 0; n < N; n++)
        for (int i = 0; i < lanes; i++) state[i * N + n] = h[n][i];
}

/* Returns 0, or 1 if memory ran out. checkpoints: kk, after the state before every block if they are kept; longer than
 * that, since the binding does not know LANES. */
int longhorn_forward(
    const float *x, const float *beta_logit, const float *k, const float *q, const float *z, const float *beta_bias,
    const float *skip, const float *initial, const int64_t *seq_idx, float *y, float *final, float *checkpoints,
    int64_t keep_checkpoints, int64_t B, int64_t L, int64_t D, int64_t N, int64_t threads) {
    const int64_t tiles = ceil_div(D, LANES), groups = ceil_div(tiles, GROUP), blocks = ceil_div(L, BLOCK);
    const int64_t saved = keep_checkpoints ? B * blocks * tiles * N * LANES : 0;
    float *kk = checkpoints + saved;
    square_sums(k, kk, B * L, N);
    const problem p = {x, beta_logit, k, q, z, beta_bias, skip, kk, seq_idx, B, L, D, N};
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && B * groups > 1)
    for (int64_t task = 0; task < B * groups; task++) {
        const int64_t b = task / groups, first = (task % groups) * GROUP;
        const int64_t last = smaller(first + GROUP, tiles);
        vec *h = allocate(GROUP * N * sizeof(vec));
        if (!h) { failed = 1; continue; }
        for (int64_t tile = first; tile < last; tile++)
            load_state(initial ? initial + (b * D + tile * LANES) * N : 0, h + (tile - first) * N,
                       lanes_of(tile * LANES, D), N);
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t begin = block * BLOCK, end = smaller(begin + BLOCK, L);
            for (int64_t tile = first; tile < last; tile++) {
                const int lanes = lanes_of(tile * LANES, D);
                vec *state = h + (tile - first) * N;
                if (keep_checkpoints)
                    memcpy(checkpoints + ((b * blocks + block) * tiles + tile) * N * LANES, state, N * sizeof(vec));
                if (N == IN_REGISTERS && lanes == LANES)
                    forward_tile(&p, b, tile * LANES, LANES, begin, end, state, y, IN_REGISTERS);
                else forward_tile(&p, b, tile * LANES, lanes, begin, end, state, y, N);
            }
        }
        for (int64_t tile = first; tile < last; tile++)
            store_state(final + (b * D + tile * LANES) * N, h + (tile - first) * N, lanes_of(tile * LANES, D), N);
        free(h);
    }
    return failed;
}

/* One token of each row. state (P, D, N) is overwritten: row b's is at pages[b], or b without pages. Rows of x,
 * beta_logit, z, of k, q, and pages lie apart as said. Returns 0, or 2 for a page that is none. */
int longhorn_step(
    const float *x, const float *beta_logit, const float *k, const float *q, const float *z, const float *beta_bias,
    const float *skip, float *state, const int64_t *pages, float *y, int64_t x_row, int64_t logit_row, int64_t k_row,
    int64_t q_row, int64_t z_row, int64_t page, int64_t P, int64_t B, int64_t D, int64_t N, int64_t threads) {
    const int64_t tiles = ceil_div(D, LANES);
    if (!are_pages(pages, B, P)) return 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && B * D * N > 1 << 18)
    for (int64_t task = 0; task < B * tiles; task++) {
        const int64_t b = task / tiles, d = task % tiles * LANES;
        const int lanes = lanes_of(d, D);
        const float *key = k + b * k_row, *query = q + b * q_row;
        float kk = 0;
        for (int64_t n = 0; n < N; n++) kk += key[n] * key[n];
        vec e, value = load(x + b * x_row + d, lanes);
        const vec delta = compute_delta(beta_logit + b * logit_row + d, beta_bias ? beta_bias + d : 0, kk, lanes, &e);
        vec out = broadcast(0);
        if (skip) out = load(skip + d, lanes) * value;
        for (int i = 0; i < lanes; i++) { /* here a vector is LANES states of one channel */
            float *h = state + (pages ? pages[b] : b) * page + (d + i) * N;
            vec read = broadcast(0);
            for (int64_t n = 0; n < N; n += LANES) {
                const int states = lanes_of(n, N);
                const vec of_key = load(key + n, states);
                vec after = load(h + n, states);
                after += delta[i] * of_key * (value[i] - after * of_key);
                store(h + n, after, states);
                read += after * load(query + n, states);
            }
            out[i] += sum(read);
        }
        if (z) {
            const vec gate = load(z + b * z_row + d, lanes);
            out *= gate * sigmoid(gate);
        }
        store(y + b * D + d, out, lanes);
    }
    return 0;
}

typedef struct {
    float *dx, *dbeta_logit, *dz;
    const float *dy;
    vec *dskip, *dbias; /* one vector each */
    vec *dk, *dq;       /* (BLOCK, N) lane-wise sums over the tiles of the group */
} gradients;

INLINE void backward_tile(
    const problem *p, int64_t b, int64_t d, int lanes, int64_t begin, int64_t end, const vec *start, vec *lambda,
    vec *restrict before, const gradients *g, const int64_t N) {
    const int64_t row = b * p->L;
    vec deltas[BLOCK], es[BLOCK], registers[IN_REGISTERS];
    vec *state = N == IN_REGISTERS ? registers : before + BLOCK * N;
    EACH_STATE state[n] = start[n];
    for (int64_t t = begin; t < end; t++) { /* once more forwards; before[t] is the state that the token found */
        const int64_t c = t - begin, at = (row + t) * p->D + d;
        const float *k = p->k + (row + t) * N;
        ahead(p, at);
        __builtin_prefetch(g->dy + at); /* for the way back */
        __builtin_prefetch(g->dx + at, 1);
        __builtin_prefetch(g->dbeta_logit + at, 1);
        if (p->z) __builtin_prefetch(g->dz + at, 1);
        if (starts_document(p->seq_idx, row, t)) EACH_STATE state[n] = broadcast(0);
        vec x = load(p->x + at, lanes);
        deltas[c] = compute_delta(p->beta_logit + at, p->beta_bias ? p->beta_bias + d : 0, p->kk[row + t], lanes, es + c);
        EACH_STATE {
            before[c * N + n] = state[n];
            state[n] += deltas[c] * k[n] * (x - state[n] * k[n]);
        }
    }
    vec skip = p->skip ? load(p->skip + d, lanes) : broadcast(0);
    vec more_registers[IN_REGISTERS], *lam = N == IN_REGISTERS ? more_registers : lambda;
    EACH_STATE lam[n] = lambda[n];
    for (int64_t t = end - 1; t >= begin; t--) {
        const int64_t c = t - begin, at = (row + t) * p->D + d;
        const float *k = p->k + (row + t) * N, *q = p->q + (row + t) * N;
        vec x = load(p->x + at, lanes), out = load(g->dy + at, lanes), delta = deltas[c];
        vec *dk = g->dk + c * N, *dq = g->dq + c * N;
        vec z = {0}, gate = {0};
        if (p->z) {
            z = load(p->z + at, lanes);
            gate = sigmoid(z);
        }
        const vec dout = out; /* gradient of the gated output */
        if (p->z) out *= z * gate;
        vec y = skip * x, along = {0}, ddelta = {0};
        EACH_STATE {
            vec h = before[c * N + n], kh = h * k[n], w = x - kh;
            vec after = h + delta * k[n] * w;
            y += after * q[n];
            dq[n] += out * after;
            lam[n] += out * q[n];
            vec lk = lam[n] * k[n];
            along += lk;
            ddelta += lk * w;
            dk[n] += delta * lam[n] * (w - kh);
            lam[n] -= delta * k[n] * lk; /* the decay, towards the token before */
        }
        vec through_norm = -2.0f * delta * delta * ddelta;
        EACH_STATE dk[n] += through_norm * k[n];
        vec dlogit = ddelta * delta * delta * es[c];
        store(g->dx + at, out * skip + delta * along, lanes);
        store(g->dbeta_logit + at, dlogit, lanes);
        *g->dbias += dlogit;
        *g->dskip += out * x;
        if (p->z) store(g->dz + at, dout * y * gate * (1.0f + z * (1.0f - gate)), lanes);
        if (starts_document(p->seq_idx, row, t)) EACH_STATE lam[n] = broadcast(0);
    }
    EACH_STATE lambda[n] = lam[n];
}

/* dk and dq (groups, B, L, N), dskip and dbias (B, D) are partial sums; dinitial (B, D, N). Returns 0, or 1 if memory ran out. */
int longhorn_backward(
    const float *x, const float *beta_logit, const float *k, const float *q, const float *z, const float *beta_bias,
    const float *skip, const int64_t *seq_idx, const float *checkpoints, const float *dy, const float *dfinal,
    float *dx, float *dbeta_logit, float *dk, float *dq, float *dz, float *dbias, float *dskip, float *dinitial,
    int64_t B, int64_t L, int64_t D, int64_t N, int64_t threads) {
    const int64_t tiles = ceil_div(D, LANES), groups = ceil_div(tiles, GROUP), blocks = ceil_div(L, BLOCK);
    const float *kk = checkpoints + B * blocks * tiles * N * LANES;
    const problem p = {x, beta_logit, k, q, z, beta_bias, skip, kk, seq_idx, B, L, D, N};
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && B * groups > 1)
    for (int64_t task = 0; task < B * groups; task++) {
        const int64_t b = task / groups, group = task % groups, first = group * GROUP;
        const int64_t last = smaller(first + GROUP, tiles);
        vec *memory = allocate((GROUP * (N + 2) + (3 * BLOCK + 1) * N) * sizeof(vec));
        if (!memory) { failed = 1; continue; }
        vec *lambda = memory, *sums = lambda + GROUP * N, *before = sums + 2 * GROUP;
        vec *partial = before + (BLOCK + 1) * N; /* dk, then dq */
        memset(sums, 0, 2 * GROUP * sizeof(vec));
        for (int64_t tile = first; tile < last; tile++)
            load_state(dfinal ? dfinal + (b * D + tile * LANES) * N : 0, lambda + (tile - first) * N,
                       lanes_of(tile * LANES, D), N);
        for (int64_t block = blocks - 1; block >= 0; block--) {
            const int64_t begin = block * BLOCK, end = smaller(begin + BLOCK, L);
            memset(partial, 0, 2 * BLOCK * N * sizeof(vec));
            for (int64_t tile = first; tile < last; tile++) {
                const int64_t i = tile - first;
                const int lanes = lanes_of(tile * LANES, D);
                vec *lam = lambda + i * N;
                const vec *start = (const vec *)(checkpoints + ((b * blocks + block) * tiles + tile) * N * LANES);
                vec *dskip_sum = sums + 2 * i, *dbias_sum = dskip_sum + 1;
                const gradients g = {dx, dbeta_logit, dz, dy, dskip_sum, dbias_sum, partial, partial + BLOCK * N};
                if (N == IN_REGISTERS && lanes == LANES)
                    backward_tile(&p, b, tile * LANES, LANES, begin, end, start, lam, before, &g, IN_REGISTERS);
                else backward_tile(&p, b, tile * LANES, lanes, begin, end, start, lam, before, &g, N);
            }
            const int64_t at = ((group * B + b) * L + begin) * N;
            for (int64_t i = 0; i < (end - begin) * N; i++) {
                dk[at + i] = sum(partial[i]);
                dq[at + i] = sum(partial[BLOCK * N + i]);
            }
        }
        for (int64_t tile = first; tile < last; tile++) {
            const int64_t i = tile - first, d = tile * LANES;
            const int lanes = lanes_of(d, D);
            store(dskip + b * D + d, sums[2 * i], lanes);
            store(dbias + b * D + d, sums[2 * i + 1], lanes);
            store_state(dinitial + (b * D + d) * N, lambda + i * N, lanes, N);
        }
        free(memory);
    }
    return failed;
}
