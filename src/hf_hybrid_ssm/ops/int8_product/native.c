/* A few rows times a weight of 8 bits on a CPU: x (R, I) float32, codes (O, I), scales (O) and y (R, O) float32 or
 * bfloat16 (`narrow`), contiguous. A row of the weight is read as one stream, since the processor fetches only few
 * streams ahead, and widened once for ROWS rows of x.
 */
#include "vectors.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define ROWS 4
#define TOGETHER 4               /* vectors whose sums do not wait for each other */
#define FETCHED 2048             /* bytes between the prefetch of a code and its use */
#define WORTH_A_THREAD (1 << 17) /* products */

typedef int8_t code_vec __attribute__((vector_size(LANES), aligned(1), may_alias));

/* two or three instructions, in whose place GCC converts one number after the other */
INLINE vec load_codes(const int8_t *from) {
#if defined(__AVX512F__) && LANES == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__) && LANES == 8
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#elif defined(__SSE2__) && LANES == 4
    int32_t four;
    memcpy(&four, from, 4);
    const __m128i bytes = _mm_cvtsi32_si128(four), pairs = _mm_unpacklo_epi8(bytes, bytes);
    return (vec)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(pairs, pairs), 24));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const code_vec *)from, ivec), vec);
#endif
}

static inline float number_at(const char *from, int64_t at, int64_t narrow) {
    if (!narrow) return ((const float *)from)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void set_number(char *to, int64_t at, float value, int64_t narrow) {
    if (!narrow) {
        ((float *)to)[at] = value;
        return;
    }
    uint32_t bits; /* to the nearest, ties to even; NaN stays one */
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t *)to)[at] = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* y[at + r O] = scale x[r] . codes, of `rows` rows r; a row's sums are the same beside any others */
INLINE void products(
    const float *x, const int8_t *codes, float scale, char *y, int64_t at, int64_t I, int64_t O, int64_t narrow,
    const int rows) {
    vec total[ROWS * TOGETHER];
UNROLL(16)
    for (int s = 0; s < rows * TOGETHER; s++) total[s] = broadcast(0);
    int64_t i = 0;
    for (; i + TOGETHER * LANES <= I; i += TOGETHER * LANES) {
        __builtin_prefetch(codes + i + FETCHED);
UNROLL(4)
        for (int j = 0; j < TOGETHER; j++) {
            const vec code = load_codes(codes + i + j * LANES);
UNROLL(4)
            for (int r = 0; r < rows; r++) total[r * TOGETHER + j] += *(const vec *)(x + r * I + i + j * LANES) * code;
        }
    }
    for (; i + LANES <= I; i += LANES) {
        const vec code = load_codes(codes + i);
UNROLL(4)
        for (int r = 0; r < rows; r++) total[r * TOGETHER] += *(const vec *)(x + r * I + i) * code;
    }
UNROLL(4)
    for (int r = 0; r < rows; r++) {
        vec all = total[r * TOGETHER];
UNROLL(4)
        for (int j = 1; j < TOGETHER; j++) all += total[r * TOGETHER + j];
        float rest = 0;
        for (int64_t left = i; left < I; left++) rest += x[r * I + left] * codes[left];
        set_number(y, at + r * O, scale * (sum(all) + rest), narrow);
    }
}

int int8_product(
    const float *x, const int8_t *codes, const char *scales, char *y, int64_t narrow, int64_t R, int64_t I, int64_t O,
    int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && R * O * I > WORTH_A_THREAD)
    for (int64_t o = 0; o < O; o++) {
        const float scale = number_at(scales, o, narrow);
        const int8_t *row = codes + o * I;
        int64_t r = 0;
        for (; r + ROWS <= R; r += ROWS) products(x + r * I, row, scale, y, r * O + o, I, O, narrow, ROWS);
        for (; r < R; r++) products(x + r * I, row, scale, y, r * O + o, I, O, narrow, 1);
    }
    return 0;
}
