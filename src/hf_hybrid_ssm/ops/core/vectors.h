/* What the C kernels share: float32 channels in one vector, tiles of them, and the exponential function.
 *
 * A vector is what the processor holds in one register, since compilers split longer ones badly: 16 numbers with
 * AVX-512, 8 with AVX2, else 4. GCC and clang compile all of this.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(LANES) /* -DLANES=16 has the form for AVX-512 tested on any processor, in split vectors */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#endif
#define REGISTERS (LANES == 16 ? 32 : 16)
#define GROUP (128 / LANES) /* tiles of LANES channels that one task of the thread pool walks through */
#define AHEAD 16            /* tokens between the prefetch of a row and its use: rows lie pages apart, no hardware follows */

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define UNROLL(times) PRAGMA(clang loop unroll_count(times))
#else
#define UNROLL(times) PRAGMA(GCC unroll times)
#endif

/* aligned(4): tensors begin anywhere, and their rows are as long as D says */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float half __attribute__((vector_size(32), aligned(4), may_alias));
typedef float quarter __attribute__((vector_size(16), aligned(4), may_alias));

/* a and b in turn, as they are or two more for every pair */
#if LANES == 16
#define IN_TURN(a, b) a, b, a, b, a, b, a, b, a, b, a, b, a, b, a, b
#define BY_PAIRS(a, b) \
    a, b, a + 2, b + 2, a + 4, b + 4, a + 6, b + 6, a + 8, b + 8, a + 10, b + 10, a + 12, b + 12, a + 14, b + 14
#elif LANES == 8
#define IN_TURN(a, b) a, b, a, b, a, b, a, b
#define BY_PAIRS(a, b) a, b, a + 2, b + 2, a + 4, b + 4, a + 6, b + 6
#else
#define IN_TURN(a, b) a, b, a, b
#define BY_PAIRS(a, b) a, b, a + 2, b + 2
#endif

/* the lanes of v with these indices */
#if defined(__clang__)
#define SHUFFLED(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define SHUFFLED(v, ...) __builtin_shuffle(v, (ivec){__VA_ARGS__})
#endif

/* memory that begins with a cache line, or null; for free() */
static inline void *allocate(int64_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* does each of B rows have one of P pages? Without pages, row b has page b */
static inline int are_pages(const int64_t *pages, int64_t B, int64_t P) {
    for (int64_t b = 0; pages && b < B; b++)
        if (pages[b] < 0 || pages[b] >= P) return 0;
    return pages || B == P;
}

/* how many of a tile's channels exist, where d is its first */
static inline int lanes_of(int64_t d, int64_t D) { return (int)smaller(D - d, LANES); }

static inline vec broadcast(float value) { return value - (vec){0}; }

static inline vec load(const float *from, int lanes) {
    if (lanes == LANES) return *(const vec *)from;
    vec v = {0};
    for (int i = 0; i < lanes; i++) v[i] = from[i];
    return v;
}

static inline void store(float *to, vec v, int lanes) {
    if (lanes == LANES) *(vec *)to = v;
    else for (int i = 0; i < lanes; i++) to[i] = v[i];
}

/* the sums of four lanes each */
static inline quarter folded(vec v) {
#if LANES == 16
    const half h = ((half *)&v)[0] + ((half *)&v)[1];
#else
    const vec h = v;
#endif
#if LANES >= 8
    return ((const quarter *)&h)[0] + ((const quarter *)&h)[1];
#else
    return h;
#endif
}

/* of all lanes */
static inline float sum(vec v) {
    const quarter q = folded(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

static inline vec clamp(vec v, float low, float high) {
    const vec l = broadcast(low), h = broadcast(high);
    const ivec below = v < l, above = v > h;
    return (vec)(((ivec)l & below) | ((ivec)h & above) | ((ivec)v & ~(below | above)));
}

/* exp for |x| <= 80: 2^n times a polynomial in the rest, 1 ulp or so */
static inline vec exponential(vec x) {
    x = clamp(x, -80.0f, 80.0f);
    vec n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* the nearest integer to x / ln 2 */
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}

/* beyond |x| = 80 it is 0 or 1 in float32 */
static inline vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

/* x Phi(x), and its derivative Phi(x) + x phi(x); erfc(|x| / sqrt 2) = exp(-x^2 / 2) times a polynomial in
 * 1 / (1 + 0.3 |x|), relative error 1.1e-7 */
static inline vec gelu(vec x, vec *slope) {
    const vec size = (vec)((ivec)x & 0x7fffffff), density = exponential(-0.5f * x * x);
    const vec t = 1.0f / (1.0f + 0.3f * size);
    vec p = broadcast(7.239093036e-02f);
    p = p * t - 3.187620745e-01f;
    p = p * t + 4.202467785e-01f;
    p = p * t - 1.143444291e-01f;
    p = p * t + 2.608382792e-01f;
    p = p * t + 1.986925548e-01f;
    p = p * t + 2.416913413e-01f;
    p = p * t + 2.392465064e-01f;
    const vec tail = 0.5f * density * p * t; /* 1 - Phi(|x|) */
    const ivec negative = x < 0;
    const vec below = (vec)(((ivec)tail & negative) | ((ivec)(1.0f - tail) & ~negative));
    *slope = below + 0.398942280401f * x * density;
    return x * below;
}
