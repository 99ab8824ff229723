/* What is asked, which keys a query sees, and the bias of each distance. */
#define FARTHEST (INT64_MAX / 4) /* rank of a token, however many it says came before */
#define PAD 64 /* distances on both sides of those that are seen, which the border of a tile reaches */

/* float32 (B, heads, tokens, entries): entries are dense, the rest lies apart as said */
typedef struct {
    const float *at;
    int64_t row, head, token;
} array;

static inline const float *token_of(array a, int64_t b, int64_t h, int64_t t) {
    return a.at + b * a.row + h * a.head + t * a.token;
}

typedef struct {
    array q, k, v;
    const float *bias; /* (H, R) or null, whose strides follow */
    int64_t bias_head, bias_column;
    array sinks;              /* (B, H, L), one logit for each token, or null */
    const float *sink_values; /* (S, V), a row for H / S heads; null for 0 */
    const int64_t *seen, *seq_idx, *lengths; /* (B), (B, L), (B), each may be null */
    float scale;
    int64_t left, right, chunk, zeros_before; /* limits may be beyond all tokens; 0 if there is none of the others */
    int64_t B, H, G, L, M, E, V, R, S;        /* M keys come before the row's own */
    int64_t threads;
    /* worked out from these */
    int64_t nearest, farthest, span;  /* distances between tokens of a row that may be seen, span is their number */
    int64_t key_width, value_width;   /* E and V in whole vectors */
    int64_t segment, segments;        /* queries of a task, tasks of a row and head */
    int32_t *low, *high, *rank;       /* (B, L): the first and last key that a query sees, its rank in its document */
    float *by_distance;               /* (H, PAD + span + PAD) */
    int64_t tails, tail_width;        /* distances that a zero before the document may have, -right .. left; padded */
    float *zeros, *tail;              /* (H, tail_width): their biases, and log sums of their weights from there on */
} problem;

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* the floats of as many whole vectors */
static inline int64_t whole(int64_t size) { return ceil_div(size, LANES) * LANES; }

static inline int64_t length_of(const problem *p, int64_t b) {
    return p->lengths ? larger(0, smaller(p->lengths[b], p->L)) : p->L;
}

/* Its interval of keys for each query of a row; low > high where it sees none. */
static void find_intervals(const problem *p, int64_t b) {
    const int64_t *document = p->seq_idx ? p->seq_idx + b * p->L : 0, n = length_of(p, b);
    int64_t start = 0, end = document ? 0 : n;
    for (int64_t i = 0; i < n; i++) {
        if (document && i && document[i] != document[i - 1]) start = i;
        if (i >= end)
            for (end = i + 1; end < n && document[end] == document[i];) end++;
        const int64_t rank = i - start + (start == 0 && p->seen ? larger(0, smaller(p->seen[b], FARTHEST)) : 0);
        int64_t first = p->right <= 0 ? -p->right : larger(-p->right, i + 1 - end), last = smaller(p->left, rank);
        if (p->chunk) {
            first = larger(first, rank % p->chunk + 1 - p->chunk);
            last = smaller(last, rank % p->chunk);
        }
        last = smaller(last, i + p->M);
        p->low[b * p->L + i] = first <= last ? i + p->M - last : INT32_MAX;
        p->high[b * p->L + i] = first <= last ? i + p->M - first : -1;
        p->rank[b * p->L + i] = smaller(rank, INT32_MAX);
    }
}

/* the bias of a distance; the table's ends for those beyond it */
static inline float bias_of(const problem *p, int64_t h, int64_t distance) {
    if (!p->bias) return 0;
    const int64_t column = distance + (p->right > 0 ? p->R / 2 : 0);
    return p->bias[h * p->bias_head + larger(0, smaller(column, p->R - 1)) * p->bias_column];
}

static void fill_tables(const problem *p, int64_t h) {
    const int64_t all = p->span + 2 * PAD, padded = p->tail_width;
    for (int64_t x = 0; x < all && p->bias; x++) p->by_distance[h * all + x] = bias_of(p, h, p->nearest + x - PAD);
    double log_sum = -INFINITY;
    for (int64_t x = padded - 1; x >= 0; x--) {
        const float bias = x < p->tails ? bias_of(p, h, x - p->right) : -INFINITY;
        const double top = fmax(bias, log_sum), less = fmin(bias, log_sum);
        if (top > -INFINITY) log_sum = top + log1p(expm1(less - top) + 1); /* exp and log would ask for glibc 2.29 */
        p->zeros[h * padded + x] = bias;
        p->tail[h * padded + x] = (float)log_sum;
    }
}

/* The place in `tail` of the first distance that reaches before a query's document; p->tails if all lie within. */
static inline int64_t tail_of(const problem *p, int64_t at) {
    return smaller(larger(p->rank[at] + 1 + p->right, 0), p->tails);
}

/* The logit of a query's sink, the zeros before its document among them; -INFINITY if it has none. */
static inline float sink_of(const problem *p, int64_t b, int64_t h, int64_t i) {
    if (p->sinks.at) return *token_of(p->sinks, b, h, i);
    const int64_t first = tail_of(p, b * p->L + i);
    return first < p->tails ? p->tail[h * p->tail_width + first] : -INFINITY;
}

/* The value (V) of a head's sink, or null for 0. */
static inline const float *sink_value_of(const problem *p, int64_t h) {
    return p->sink_values ? p->sink_values + h / (p->H / p->S) * p->V : 0;
}

static void close_problem(const problem *p) {
    free(p->low);
    free(p->high);
    free(p->rank);
    free(p->by_distance);
    free(p->zeros);
    free(p->tail);
}

/* What follows from the arguments; 0 if memory ran out. */
static int open_problem(problem *p) {
    p->farthest = smaller(p->left, p->M + p->L - 1);
    p->nearest = -smaller(p->right, p->L);
    p->span = larger(p->farthest - p->nearest + 1, 0);
    p->tails = p->zeros_before ? p->left + p->right + 1 : 0;
    p->tail_width = p->zeros_before ? whole(p->tails) + LANES : 0;
    p->key_width = whole(p->E);
    p->value_width = whole(p->V);
    p->low = malloc((p->B * p->L + 1) * sizeof(int32_t));
    p->high = malloc((p->B * p->L + 1) * sizeof(int32_t));
    p->rank = malloc((p->B * p->L + 1) * sizeof(int32_t));
    p->by_distance = malloc(p->H * (p->span + 2 * PAD) * sizeof(float));
    p->zeros = malloc((p->H * p->tail_width + 1) * sizeof(float));
    p->tail = malloc((p->H * p->tail_width + 1) * sizeof(float));
    if (!p->low || !p->high || !p->rank || !p->by_distance || !p->zeros || !p->tail) return 0;
    for (int64_t b = 0; b < p->B; b++) find_intervals(p, b);
    for (int64_t h = 0; h < p->H; h++) fill_tables(p, h);
    return 1;
}
