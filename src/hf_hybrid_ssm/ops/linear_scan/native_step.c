/* One token of linear systems of N real numbers on a CPU: B rows, D channels of S = F D systems, a system at a time.
 *
 * state (B, S, N), u (B, D), y (B, S); decay_minus_one, input, left, right, output (S, N); skip (S). All are contiguous float32.
 * Complex numbers lie as pairs of a real and an imaginary part.
 */
#include "vectors.h"

static inline vec times(vec a, vec h, int64_t is_complex) {
    if (!is_complex) return a * h;
    const vec signs = {IN_TURN(-1, 1)};
    return SHUFFLED(a, BY_PAIRS(0, 0)) * h + signs * SHUFFLED(a, BY_PAIRS(1, 1)) * SHUFFLED(h, BY_PAIRS(1, 0));
}

/* h = h + decay_minus_one h - left (right . h) + input u; returns output . h. left or output may be null. */
static inline float system_step(
    float *h, const float *decay_minus_one, const float *input, const float *left, const float *right, const float *output,
    float u, int64_t N, int64_t is_complex) {
    float through = 0;
    if (left) {
        vec total = broadcast(0);
        for (int64_t n = 0; n < N; n += LANES) {
            const int lanes = lanes_of(n, N);
            total += load(right + n, lanes) * load(h + n, lanes);
        }
        through = sum(total);
    }
    vec total = broadcast(0);
    for (int64_t n = 0; n < N; n += LANES) {
        const int lanes = lanes_of(n, N);
        const vec before = load(h + n, lanes);
        vec after = before + (times(load(decay_minus_one + n, lanes), before, is_complex) + load(input + n, lanes) * u);
        if (left) after -= load(left + n, lanes) * through;
        store(h + n, after, lanes);
        if (output) total += load(output + n, lanes) * after;
    }
    return sum(total);
}

int linear_step(
    const float *u, float *state, const float *decay_minus_one, const float *input, const float *left, const float *right,
    const float *output, const float *skip, float *y, int64_t is_complex, int64_t silu, int64_t B, int64_t S, int64_t D,
    int64_t N, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && B * S * N > 1 << 17)
    for (int64_t row = 0; row < B * S; row++) {
        const int64_t b = row / S, s = row % S, at = s * N;
        const float value = u[b * D + s % D];
        float out = system_step(
            state + row * N, decay_minus_one + at, input + at, left ? left + at : 0, right ? right + at : 0,
            output ? output + at : 0, value, N, is_complex);
        if (!output || !y) continue;
        if (skip) out += skip[s] * value;
        y[row] = silu ? out * sigmoid(broadcast(out))[0] : out;
    }
    return 0;
}
