/* The convolution and the scan against loops without vectors, for processors on which Python does not run here. */
#include <math.h>
#include <stdio.h>
#include "vectors.h"

int causal_conv_forward(
    const float *x, const float *weight, const float *bias, const float *initial, const int64_t *seq_idx, float *y,
    int64_t silu, int64_t B, int64_t L, int64_t D, int64_t K, int64_t threads);
int longhorn_forward(
    const float *x, const float *beta_logit, const float *k, const float *q, const float *z, const float *beta_bias,
    const float *skip, const float *initial, const int64_t *seq_idx, float *y, float *final, float *checkpoints,
    int64_t keep_checkpoints, int64_t B, int64_t L, int64_t D, int64_t N, int64_t threads);

enum { B = 2, L = 37, D = 21, K = 4, N = 16 };

static float unit(unsigned *state) { /* in -1 .. 1 */
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (1 << 23) - 1;
}

static float *draw(int count, unsigned seed) {
    float *x = malloc(count * sizeof(float));
    for (int i = 0; i < count; i++) x[i] = unit(&seed);
    return x;
}

static double off(const float *got, const double *want, int count) {
    double worst = 0;
    for (int i = 0; i < count; i++) worst = fmax(worst, fabs(got[i] - want[i]));
    return worst;
}

static double convolution(void) {
    float *x = draw(B * L * D, 1), *w = draw(K * D, 2), *bias = draw(D, 3), *y = draw(B * L * D, 4);
    double want[B * L * D];
    if (causal_conv_forward(x, w, bias, 0, 0, y, 1, B, L, D, K, 2)) return INFINITY;
    for (int b = 0; b < B; b++)
        for (int t = 0; t < L; t++)
            for (int d = 0; d < D; d++) {
                double u = bias[d];
                for (int j = 0; j < K; j++)
                    if (t - K + 1 + j >= 0) u += w[j * D + d] * x[(b * L + t - K + 1 + j) * D + d];
                want[(b * L + t) * D + d] = u / (1 + exp(-u));
            }
    return off(y, want, B * L * D);
}

static double scan(void) {
    float *x = draw(B * L * D, 5), *logit = draw(B * L * D, 6), *k = draw(B * L * N, 7), *q = draw(B * L * N, 8);
    float *y = draw(B * L * D, 9), *last = draw(B * D * N, 10), *room = draw(B * L, 11);
    double want[B * L * D];
    if (longhorn_forward(x, logit, k, q, 0, 0, 0, 0, 0, y, last, room, 0, B, L, D, N, 2)) return INFINITY;
    for (int b = 0; b < B; b++)
        for (int d = 0; d < D; d++) {
            double h[N] = {0};
            for (int t = 0; t < L; t++) {
                const float *key = k + (b * L + t) * N, *query = q + (b * L + t) * N;
                const double beta = 1 / (1 + exp(-logit[(b * L + t) * D + d]));
                double kk = 0, out = 0;
                for (int n = 0; n < N; n++) kk += key[n] * key[n];
                const double delta = beta / (1 + beta * kk);
                for (int n = 0; n < N; n++) {
                    h[n] = (1 - delta * key[n] * key[n]) * h[n] + delta * x[(b * L + t) * D + d] * key[n];
                    out += h[n] * query[n];
                }
                want[(b * L + t) * D + d] = out;
            }
        }
    return off(y, want, B * L * D);
}

int main(void) {
    printf("%d %g %g\n", LANES, convolution(), scan());
    return 0;
}
