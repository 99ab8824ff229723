/* The selective scan of Mamba (arXiv 2312.00752): h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t, y_t = C_t h_t.
 * Sixteen channels in a vector. All tensors contiguous float32: u, delta, y (B, L, D); b, c (B, L, N); a (N, D). */
#include "vectors.h"

static inline void advance(vec *h, vec dt, vec dx, const float *a, const float *b, int64_t D, int64_t N, int lanes) {
    for (int64_t n = 0; n < N; n++) h[n] = exponential(dt * load(a + n * D, lanes)) * h[n] + dx * b[n];
}

/* Returns 0, or 1 if memory ran out; so does the backward. */
int mamba_scan_forward(const float *u, const float *delta, const float *a, const float *b, const float *c, float *y,
                       int64_t B, int64_t L, int64_t D, int64_t N, int64_t threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < B; i++) {
        vec *h = aligned_alloc(64, N * sizeof(vec));
        if (!h) { failed = 1; continue; }
        for (int64_t d = 0; d < D; d += LANES) {
            const int lanes = lanes_of(d, D);
            memset(h, 0, N * sizeof(vec));
            for (int64_t row = i * L; row < (i + 1) * L; row++) {
                const vec dt = load(delta + row * D + d, lanes);
                advance(h, dt, dt * load(u + row * D + d, lanes), a + d, b + row * N, D, N, lanes);
                vec out = broadcast(0);
                for (int64_t n = 0; n < N; n++) out += h[n] * c[row * N + n];
                store(y + row * D + d, out, lanes);
            }
        }
        free(h);
    }
    return failed;
}

/* da (B, N, D) is kept apart by batch row; db and dc begin as zeros. States are computed again, a tile at a time. */
int mamba_scan_backward(const float *u, const float *delta, const float *a, const float *b, const float *c,
                        const float *dy, float *du, float *ddelta, float *da, float *db, float *dc,
                        int64_t B, int64_t L, int64_t D, int64_t N, int64_t threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < B; i++) {
        vec *h = aligned_alloc(64, (L + 3) * N * sizeof(vec)), *later = h + (L + 1) * N, *sum_a = later + N;
        if (!h) { failed = 1; continue; }
        for (int64_t d = 0; d < D; d += LANES) {
            const int lanes = lanes_of(d, D);
            memset(h, 0, N * sizeof(vec));
            memset(later, 0, 2 * N * sizeof(vec));
            for (int64_t t = 0; t < L; t++) {
                const int64_t row = i * L + t;
                const vec dt = load(delta + row * D + d, lanes);
                memcpy(h + (t + 1) * N, h + t * N, N * sizeof(vec));
                advance(h + (t + 1) * N, dt, dt * load(u + row * D + d, lanes), a + d, b + row * N, D, N, lanes);
            }
            for (int64_t t = L - 1; t >= 0; t--) {
                const int64_t row = i * L + t, at = row * D + d;
                const vec dt = load(delta + at, lanes), x = load(u + at, lanes), out = load(dy + at, lanes);
                vec of_dx = broadcast(0), of_dt = broadcast(0);
                for (int64_t n = 0; n < N; n++) {
                    const vec rate = load(a + n * D + d, lanes), decay = exponential(dt * rate);
                    dc[row * N + n] += sum(out * h[(t + 1) * N + n]);
                    later[n] += out * c[row * N + n];
                    db[row * N + n] += sum(later[n] * dt * x);
                    of_dx += later[n] * b[row * N + n];
                    later[n] *= decay;
                    const vec slope = later[n] * h[t * N + n];
                    of_dt += slope * rate;
                    sum_a[n] += slope * dt;
                }
                store(du + at, of_dx * dt, lanes);
                store(ddelta + at, of_dt + of_dx * x, lanes);
            }
            for (int64_t n = 0; n < N; n++) store(da + (i * N + n) * D + d, sum_a[n], lanes);
        }
        free(h);
    }
    return failed;
}
