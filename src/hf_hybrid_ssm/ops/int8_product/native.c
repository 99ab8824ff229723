/* A few rows times a weight of 8 bits on a CPU: x (R, I) float32, codes (O, I), scales (O) and y (R, O) float32 or
 * bfloat16 (`narrow`), contiguous. A row of the weight is read as one stream, since the processor fetches only few
 * streams ahead, and widened once for ROWS rows of x.
 */
#include "vectors.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define ROWS 4
#define TOGETHER 4              /* vectors of a single row, so that one sum does not wait for the other */
#define FETCHED 2048            /* bytes between the prefetch of a code and its use */
#define WORTH_A_THREAD (1 << 17) /* products */

typedef int8_t code_vec __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE vec load_codes(const int8_t *from) {
#if defined(__AVX512F__) && LANES == 16 /* two instructions, of which GCC makes more */
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const code_vec *)from, ivec), vec);
#endif
}

static inline float number_at(const void *from, int64_t at, int64_t narrow) {
    if (!narrow) return ((const float *)from)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void set_number(void *to, int64_t at, float value, int64_t narrow) {
    if (!narrow) {
        ((float *)to)[at] = value;
        return;
    }
    uint32_t bits; /* to the nearest, ties to even; NaN stays one */
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t *)to)[at] = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* y[at + r O] = scale x[r] . codes, of `rows` rows r */
INLINE void products(
    const float *x, const int8_t *codes, float scale, void *y, int64_t at, int64_t I, int64_t O, int64_t narrow,
    const int rows, const int together) {
    vec total[ROWS * TOGETHER];
UNROLL(16)
    for (int s = 0; s < rows * together; s++) total[s] = broadcast(0);
    int64_t i = 0;
    for (; i + together * LANES <= I; i += together * LANES) {
        __builtin_prefetch(codes + i + FETCHED);
UNROLL(4)
        for (int j = 0; j < together; j++) {
            const vec code = load_codes(codes + i + j * LANES);
UNROLL(4)
            for (int r = 0; r < rows; r++) total[r * together + j] += *(const vec *)(x + r * I + i + j * LANES) * code;
        }
    }
UNROLL(4)
    for (int r = 0; r < rows; r++) {
        vec all = total[r * together];
UNROLL(4)
        for (int j = 1; j < together; j++) all += total[r * together + j];
        float rest = 0;
        for (int64_t left = i; left < I; left++) rest += x[r * I + left] * codes[left];
        set_number(y, at + r * O, scale * (sum(all) + rest), narrow);
    }
}

int int8_product(
    const float *x, const int8_t *codes, const void *scales, void *y, int64_t narrow, int64_t R, int64_t I, int64_t O,
    int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && R * O * I > WORTH_A_THREAD)
    for (int64_t o = 0; o < O; o++) {
        const float scale = number_at(scales, o, narrow);
        const int8_t *row = codes + o * I;
        int64_t r = 0;
        for (; r + ROWS <= R; r += ROWS) products(x + r * I, row, scale, y, r * O + o, I, O, narrow, ROWS, 2);
        for (; r < R; r++) products(x + r * I, row, scale, y, r * O + o, I, O, narrow, 1, TOGETHER);
    }
    return 0;
}
