/* Linear recurrences with a diagonal transition on a CPU; letters as in __init__.py and diagonal.py.
 *
 * All tensors are contiguous float32, but for the decays, which are float64. A decay near 1 that is rounded to float32
 * decays at another rate: the recurrence runs in float32, and after every BLOCK tokens what the rounding did to the
 * state they began with is put right (`drift`).
 * Gradients need no stored states: that of the decay follows the derivative of the state along with it, all others
 * come from the same recurrence backwards in time. Sums run in a fixed order: the same bits for every number of threads.
 */
#include "vectors.h"

#define BLOCK 32 /* tokens */

typedef struct { double re, im; } number;

static inline number times(number a, number b) {
    return (number){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

/* a^BLOCK, and a^(BLOCK - 1) */
static number block_power(number a, number *one_less) {
    number power = a, less = {1, 0};
    for (int steps = 1; steps < BLOCK; steps *= 2) {
        less = times(less, power);
        power = times(power, power);
    }
    *one_less = less;
    return power;
}

static inline number rounded(number a) { return (number){(float)a.re, (float)a.im}; }

static inline number drift_of(number a, number *of_derivative) {
    number less, rounded_less, power = block_power(a, &less), other = block_power(rounded(a), &rounded_less);
    *of_derivative = (number){BLOCK * (less.re - rounded_less.re), BLOCK * (less.im - rounded_less.im)};
    return (number){power.re - other.re, power.im - other.im};
}

static inline int64_t row_end(const int64_t *lengths, int64_t b, int64_t L) {
    return !lengths || lengths[b] > L ? L : lengths[b] < 0 ? 0 : lengths[b];
}

/* ---------------------------------------------------------------- a system of N states for every channel */

/* of one state and LANES channels: a, what enters, what is read, and the drifts of the state and its derivative */
typedef struct { vec ar, ai, br, bi, cr, ci, dr, di, er, ei; } coefficients;

/* a state, its derivative by a, and sums over time of each times the other signal */
typedef struct { vec r, i, pr, pi, sr, si, qr, qi; } carried;

typedef struct {
    const float *u, *vector, *output, *skip, *initial, *dfinal;
    const double *decay;
    const int64_t *seq_idx, *lengths;
    int64_t B, L, F, D, N, is_complex;
} problem;

/* One state through `count` tokens of one document. `out` collects what is read, `sums` what meets `weight`.
 * Forwards the decay comes before the token enters, backwards after it was read: that is the transposed map. */
INLINE void advance(
    const coefficients *c, carried *s, const vec *restrict in, const vec *restrict weight, vec *restrict out, int count,
    int whole, const int is_complex, const int backwards, const int reads, const int sums, const int derives) {
    const carried start = *s;
    vec r = s->r, i = s->i, pr = s->pr, pi = s->pi, sr = s->sr, si = s->si, qr = s->qr, qi = s->qi;
    for (int t = 0; t < count; t++) {
        const vec x = in[t];
        if (derives) {
            const vec before = pr;
            pr = c->ar * pr + r;
            if (is_complex) {
                pr -= c->ai * pi;
                pi = c->ar * pi + c->ai * before + i;
            }
        }
        if (!backwards) {
            const vec before = r;
            r = c->ar * r + c->br * x;
            if (is_complex) {
                r -= c->ai * i;
                i = c->ar * i + (c->ai * before + c->bi * x);
            }
        } else {
            r += c->br * x;
            if (is_complex) i += c->bi * x;
        }
        if (reads) out[t] += is_complex ? c->cr * r + c->ci * i : c->cr * r;
        if (sums) {
            sr += weight[t] * r;
            if (is_complex) si += weight[t] * i;
        }
        if (derives) {
            qr += weight[t] * pr;
            if (is_complex) qi += weight[t] * pi;
        }
        if (backwards) {
            const vec before = r;
            r = c->ar * r;
            if (is_complex) {
                r -= c->ai * i;
                i = c->ar * i + c->ai * before;
            }
        }
    }
    if (whole) {
        r += c->dr * start.r - c->di * start.i;
        i += c->dr * start.i + c->di * start.r;
        if (derives) {
            pr += c->dr * start.pr - c->di * start.pi + c->er * start.r - c->ei * start.i;
            pi += c->dr * start.pi + c->di * start.pr + c->er * start.i + c->ei * start.r;
        }
    }
    *s = (carried){r, i, pr, pi, sr, si, qr, qi};
}

enum { FORWARD, DERIVATIVE, BACKWARD };

INLINE void advance_all(
    const coefficients *c, carried *s, int64_t states, const vec *in, const vec *weight, vec *out, int count, int whole,
    int pass, const int is_complex) {
    for (int64_t n = 0; n < states; n++) {
        if (pass == FORWARD) advance(c + n, s + n, in, weight, out, count, whole, is_complex, 0, 1, 0, 0);
        if (pass == DERIVATIVE) advance(c + n, s + n, in, weight, out, count, whole, is_complex, 0, 0, 1, 1);
        if (pass == BACKWARD) advance(c + n, s + n, in, weight, out, count, whole, is_complex, 1, 1, 1, 0);
    }
}

static void forget(carried *s, int64_t states) {
    for (int64_t n = 0; n < states; n++) s[n].r = s[n].i = s[n].pr = s[n].pi = broadcast(0);
}

static inline int64_t states_of(const problem *p) { return p->is_complex ? p->N / 2 : p->N; }

/* What a filter's states need for LANES channels; backwards enters what was read, and a becomes its conjugate. */
static void prepare(const problem *p, int64_t f, int64_t d, int lanes, int backwards, coefficients *c) {
    const int64_t step = p->is_complex ? 2 : 1;
    memset(c, 0, states_of(p) * sizeof(coefficients));
    for (int64_t n = 0; n < states_of(p); n++) {
        for (int lane = 0; lane < lanes; lane++) {
            const int64_t at = ((f * p->D + d + lane) * p->N) + n * step;
            number a = {p->decay[at], p->is_complex ? p->decay[at + 1] : 0}, e;
            if (backwards) a.im = -a.im;
            const number drift = drift_of(a, &e);
            const float *in = backwards ? p->output : p->vector, *out = backwards ? p->vector : p->output;
            c[n].ar[lane] = a.re, c[n].ai[lane] = a.im;
            c[n].br[lane] = in[at], c[n].cr[lane] = out[at];
            if (p->is_complex) c[n].bi[lane] = in[at + 1], c[n].ci[lane] = out[at + 1];
            c[n].dr[lane] = drift.re, c[n].di[lane] = drift.im, c[n].er[lane] = e.re, c[n].ei[lane] = e.im;
        }
    }
}

static void load_states(const problem *p, const float *from, carried *s, int lanes) {
    const int64_t step = p->is_complex ? 2 : 1;
    forget(s, states_of(p));
    if (!from) return;
    for (int64_t n = 0; n < states_of(p); n++)
        for (int lane = 0; lane < lanes; lane++) {
            s[n].r[lane] = from[lane * p->N + n * step];
            if (p->is_complex) s[n].i[lane] = from[lane * p->N + n * step + 1];
        }
}

static void store_states(const problem *p, float *to, const carried *s, int lanes) {
    const int64_t step = p->is_complex ? 2 : 1;
    for (int64_t n = 0; n < states_of(p); n++)
        for (int lane = 0; lane < lanes; lane++) {
            to[lane * p->N + n * step] = s[n].r[lane];
            if (p->is_complex) to[lane * p->N + n * step + 1] = s[n].i[lane];
        }
}

/* A row through one filter, block by block. `in`, `weight` and `out` are the row's, with these distances of tokens;
 * what is read is added to skip times the input, and `dskip` collects input times weight. */
static void run_row(
    const problem *p, int64_t b, int lanes, int pass, const coefficients *c, carried *s, const float *in,
    int64_t in_step, const float *weight, int64_t weight_step, float *out, int64_t out_step, int adds, vec skip,
    vec *dskip) {
    const int64_t end = row_end(p->lengths, b, p->L), states = states_of(p);
    const int64_t *documents = p->seq_idx ? p->seq_idx + b * p->L : 0;
    vec x[BLOCK], w[BLOCK], y[BLOCK];
    for (int64_t done = 0; done < end; done += BLOCK) {
        const int count = (int)smaller(BLOCK, end - done);
        int begin = 0;
        for (int q = 0; q < count; q++) {
            const int64_t t = pass == BACKWARD ? end - 1 - done - q : done + q;
            x[q] = load(in + t * in_step, lanes);
            if (weight) w[q] = load(weight + t * weight_step, lanes);
            if (dskip) *dskip += x[q] * w[q];
            if (out) y[q] = skip * x[q] + (adds ? load(out + t * out_step, lanes) : broadcast(0));
        }
        for (int q = 1; q <= count; q++) { /* runs of tokens of one document */
            const int64_t t = pass == BACKWARD ? end - 1 - done - q : done + q;
            const int64_t before = pass == BACKWARD ? t + 1 : t - 1;
            const int cut = documents && t >= 0 && t < end && documents[t] != documents[before];
            if (q < count && !cut) continue;
            const int run = q - begin;
            if (p->is_complex) advance_all(c, s, states, x + begin, w + begin, y + begin, run, run == BLOCK, pass, 1);
            else advance_all(c, s, states, x + begin, w + begin, y + begin, run, run == BLOCK, pass, 0);
            if (cut) forget(s, states);
            begin = q;
        }
        for (int q = 0; out && q < count; q++)
            store(out + (pass == BACKWARD ? end - 1 - done - q : done + q) * out_step, y[q], lanes);
    }
    for (int64_t t = end; out && t < p->L; t++)
        if (!adds) store(out + t * out_step, broadcast(0), lanes);
}

static vec skip_of(const problem *p, int64_t f, int64_t d, int lanes) {
    return p->skip ? load(p->skip + f * p->D + d, lanes) : broadcast(0);
}

/* y (B, L, F, D) and the final state (B, F, D, N). Returns 0, or 1 if memory ran out. */
int lti_scan_forward(
    const float *u, const double *decay, const float *vector, const float *output, const float *skip,
    const float *initial, const int64_t *seq_idx, const int64_t *lengths, float *y, float *final, int64_t B, int64_t L,
    int64_t F, int64_t D, int64_t N, int64_t is_complex, int64_t threads) {
    const problem p = {u, vector, output, skip, initial, 0, decay, seq_idx, lengths, B, L, F, D, N, is_complex};
    const int64_t tiles = ceil_div(D, LANES), states = states_of(&p);
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t task = 0; task < F * tiles; task++) {
        const int64_t f = task / tiles, d = task % tiles * LANES;
        const int lanes = lanes_of(d, D);
        coefficients *c = allocate(states * (sizeof(coefficients) + sizeof(carried)));
        if (!c) { failed = 1; continue; }
        carried *s = (carried *)(c + states);
        prepare(&p, f, d, lanes, 0, c);
        for (int64_t b = 0; b < B; b++) {
            const int64_t state = ((b * F + f) * D + d) * N;
            load_states(&p, initial ? initial + state : 0, s, lanes);
            run_row(&p, b, lanes, FORWARD, c, s, u + b * L * D + d, D, 0, 0, y + (b * L * F + f) * D + d, F * D, 0,
                    skip_of(&p, f, d, lanes), 0);
            store_states(&p, final + state, s, lanes);
        }
        free(c);
    }
    return failed;
}

/* Adds a row's part: of the decay o conj(sum of g p) + dfinal conj(p), of the output row the sum of g s. */
static void add_derivatives(
    const problem *p, int64_t f, int64_t b, int64_t d, int lanes, const carried *s, double *ddecay, float *doutput) {
    const int64_t step = p->is_complex ? 2 : 1, last = ((b * p->F + f) * p->D + d) * p->N;
    for (int64_t n = 0; n < states_of(p); n++)
        for (int lane = 0; lane < lanes; lane++) {
            const int64_t inside = lane * p->N + n * step, at = (f * p->D + d) * p->N + inside;
            const float *o = p->output + at, *z = p->dfinal + last + inside;
            const double qr = s[n].qr[lane], qi = s[n].qi[lane], pr = s[n].pr[lane], pi = s[n].pi[lane];
            doutput[at] += s[n].sr[lane];
            ddecay[at] += o[0] * qr + z[0] * pr;
            if (!p->is_complex) continue;
            doutput[at + 1] += s[n].si[lane];
            ddecay[at] += o[1] * qi + z[1] * pi;
            ddecay[at + 1] += o[1] * qr - o[0] * qi + z[1] * pr - z[0] * pi;
        }
}

static void add_sums(const problem *p, const carried *s, float *to, int lanes) {
    const int64_t step = p->is_complex ? 2 : 1;
    for (int64_t n = 0; n < states_of(p); n++)
        for (int lane = 0; lane < lanes; lane++) {
            to[lane * p->N + n * step] += s[n].sr[lane];
            if (p->is_complex) to[lane * p->N + n * step + 1] += s[n].si[lane];
        }
}

static void clear_sums(carried *s, int64_t states) {
    for (int64_t n = 0; n < states; n++) s[n].sr = s[n].si = s[n].qr = s[n].qi = broadcast(0);
}

/* ddecay, dvector and doutput must be zero. Without `trains` they stay so. Returns 0, or 1 if memory ran out. */
int lti_scan_backward(
    const float *u, const double *decay, const float *vector, const float *output, const float *skip,
    const float *initial, const int64_t *seq_idx, const int64_t *lengths, const float *dy, const float *dfinal,
    float *du, double *ddecay, float *dvector, float *doutput, float *dskip, float *dinitial, int64_t trains, int64_t B,
    int64_t L, int64_t F, int64_t D, int64_t N, int64_t is_complex, int64_t threads) {
    const problem p = {u, vector, output, skip, initial, dfinal, decay, seq_idx, lengths, B, L, F, D, N, is_complex};
    const int64_t tiles = ceil_div(D, LANES), states = states_of(&p);
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t d = tile * LANES;
        const int lanes = lanes_of(d, D);
        coefficients *c = allocate(states * (sizeof(coefficients) + sizeof(carried)));
        if (!c) { failed = 1; continue; }
        carried *s = (carried *)(c + states);
        for (int64_t f = 0; f < F; f++) {
            const int64_t of_filter = (f * D + d) * N;
            if (trains) prepare(&p, f, d, lanes, 0, c);
            for (int64_t b = 0; trains && b < B; b++) {
                const float *x = u + b * L * D + d, *g = dy + (b * L * F + f) * D + d;
                load_states(&p, initial ? initial + ((b * F + f) * D + d) * N : 0, s, lanes);
                clear_sums(s, states);
                run_row(&p, b, lanes, DERIVATIVE, c, s, x, D, g, F * D, 0, 0, 0, broadcast(0), 0);
                add_derivatives(&p, f, b, d, lanes, s, ddecay, doutput);
            }
            prepare(&p, f, d, lanes, 1, c);
            const vec weight = skip_of(&p, f, d, lanes);
            vec of_skip = {0};
            for (int64_t b = 0; b < B; b++) {
                const int64_t state = ((b * F + f) * D + d) * N, row = b * L * D + d;
                load_states(&p, dfinal + state, s, lanes);
                clear_sums(s, states);
                run_row(&p, b, lanes, BACKWARD, c, s, dy + (b * L * F + f) * D + d, F * D, u + row, D, du + row, D, f > 0,
                        weight, &of_skip);
                if (trains) add_sums(&p, s, dvector + of_filter, lanes);
                store_states(&p, dinitial + state, s, lanes);
            }
            store(dskip + f * D + d, of_skip, lanes);
        }
        free(c);
    }
    return failed;
}

/* ---------------------------------------------------------------- one state for every channel, which is the output */

/* vectors that run side by side: the next token waits for the one before, other channels need not */
#define WIDTH (LANES == 8 ? 8 : 4)

/* W floats lie side by side, complex numbers as pairs (real, imaginary) */
typedef struct { vec a[WIDTH], b[WIDTH], da[WIDTH], db[WIDTH]; int lanes[WIDTH]; } rotation;

static inline vec swapped(vec v) {
    return SHUFFLED(v, BY_PAIRS(1, 0));
}

static void prepare_rotation(rotation *r, const double *decay, int64_t w, int64_t W, int is_complex, int conjugate) {
    memset(r, 0, sizeof(rotation));
    for (int v = 0; v < WIDTH; v++) {
        const int64_t first = w + v * LANES;
        r->lanes[v] = first < W ? lanes_of(first, W) : 0;
        for (int lane = 0; lane < r->lanes[v]; lane++) {
            const int64_t at = first + lane, own = is_complex ? at / 2 * 2 : at;
            number a = {decay[own], is_complex ? decay[own + 1] : 0}, unused;
            if (conjugate) a.im = -a.im;
            const number drift = drift_of(a, &unused);
            const int sign = at % 2 ? 1 : -1; /* of what the other half of the pair adds */
            r->a[v][lane] = a.re, r->da[v][lane] = drift.re;
            r->b[v][lane] = sign * a.im, r->db[v][lane] = sign * drift.im;
        }
    }
}

/* h_t = a h_{t-1} + x_t with W floats a token; backwards in time the same with conj(a), and `h` gives the gradient of
 * the decay: products of the state with that of the token before (pairs crossed in `crossed`). */
static void scan_row(
    const rotation *r, const float *x, const int64_t *documents, int64_t L, int64_t W, float *out, vec *state,
    int backwards, const float *initial, const float *h, vec *straight, vec *crossed) {
    for (int64_t done = 0; done < L; done += BLOCK) {
        const int64_t count = smaller(BLOCK, L - done);
        vec start[WIDTH];
        int whole = count == BLOCK;
        memcpy(start, state, sizeof(start));
        for (int64_t q = done; q < done + count; q++) {
            const int64_t t = backwards ? L - 1 - q : q, before = backwards ? t + 1 : t - 1;
            const int cut = documents && q > 0 && documents[t] != documents[before];
            const int ends = h && documents && t > 0 && documents[t] != documents[t - 1];
            if (cut) {
                memset(state, 0, WIDTH * sizeof(vec));
                whole = 0;
            }
            for (int v = 0; v < WIDTH; v++) {
                if (!r->lanes[v]) continue;
                const int64_t at = t * W + v * LANES;
                state[v] = r->a[v] * state[v] + (r->b[v] * swapped(state[v]) + load(x + at, r->lanes[v]));
                if (whole && q == done + BLOCK - 1) state[v] += r->da[v] * start[v] + r->db[v] * swapped(start[v]);
                store(out + at, state[v], r->lanes[v]);
                if (!h || ends || (t == 0 && !initial)) continue;
                const vec last = load(t ? h + at - W : initial + v * LANES, r->lanes[v]);
                straight[v] += state[v] * last;
                crossed[v] += state[v] * swapped(last);
            }
        }
    }
}

/* h (B, L, W) of x, the decays (W) float64 and the state before (B, W) or null. */
int diagonal_scan_forward(
    const float *x, const double *decay, const float *initial, const int64_t *seq_idx, float *h, int64_t B, int64_t L,
    int64_t W, int64_t is_complex, int64_t threads) {
    const int64_t tiles = ceil_div(W, WIDTH * LANES);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t task = 0; task < B * tiles; task++) {
        const int64_t b = task / tiles, w = task % tiles * WIDTH * LANES;
        rotation r;
        vec state[WIDTH];
        prepare_rotation(&r, decay, w, W, is_complex, 0);
        for (int v = 0; v < WIDTH; v++)
            state[v] = initial && r.lanes[v] ? load(initial + b * W + w + v * LANES, r.lanes[v]) : broadcast(0);
        const int64_t row = b * L * W + w;
        scan_row(&r, x + row, seq_idx ? seq_idx + b * L : 0, L, W, h + row, state, 0, 0, 0, 0, 0);
    }
    return 0;
}

/* Gradients of x (B, L, W), of the decays (W) and of the state before (B, W). */
int diagonal_scan_backward(
    const float *dh, const float *h, const double *decay, const float *initial, const int64_t *seq_idx, float *dx,
    double *ddecay, float *dinitial, int64_t B, int64_t L, int64_t W, int64_t is_complex, int64_t threads) {
    const int64_t tiles = ceil_div(W, WIDTH * LANES);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t w = tile * WIDTH * LANES;
        rotation r;
        vec straight[WIDTH] = {0}, crossed[WIDTH] = {0};
        prepare_rotation(&r, decay, w, W, is_complex, 1);
        for (int64_t b = 0; b < B; b++) {
            const int64_t row = b * L * W + w, place = b * W + w;
            vec state[WIDTH] = {0};
            scan_row(&r, dh + row, seq_idx ? seq_idx + b * L : 0, L, W, dx + row, state, 1,
                     initial ? initial + place : 0, h + row, straight, crossed);
            for (int v = 0; v < WIDTH; v++)
                if (r.lanes[v])
                    store(dinitial + place + v * LANES, r.a[v] * state[v] + r.b[v] * swapped(state[v]), r.lanes[v]);
        }
        for (int64_t at = w; at < smaller(W, w + WIDTH * LANES); at++) {
            const int v = (int)(at - w) / LANES, lane = (int)(at - w) % LANES;
            if (!is_complex) ddecay[at] = straight[v][lane];
            else if (at % 2 == 0) {
                ddecay[at] = straight[v][lane] + straight[v][lane + 1];
                ddecay[at + 1] = crossed[v][lane + 1] - crossed[v][lane];
            }
        }
    }
    return 0;
}
