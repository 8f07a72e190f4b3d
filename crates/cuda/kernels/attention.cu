// Attention with its scores in memory, for every size: products before and behind these kernels are the library's. A block has a row of scores.
//
//     forward    P = softmax(S), dropped              lse = log(sum(exp(S)))
//     backward   P = exp(S - lse), dropped            dS = scale P (dP - delta)        delta = y dy
//
// S is scaled already. With `causal` the last query sees all keys, and each one before it a key less. What is dropped is decided by a score's place in
// the whole model's [samples, heads, queries, keys].

constexpr int THREADS = 256, WARPS = THREADS / 32;

struct Scores {
    u32 heads, queries, keys, causal;
    Draws draws;
    u64 first_head; // of this sample's first head here, among those of all samples
    u32 threshold;
    float keep;
};

struct Row {
    u32 seen;
    u64 at;    // of the row's first score here
    u64 drawn; // its place in the whole model's tensor
};

__device__ __forceinline__ Row row_of(const Scores& s) {
    u32 query = blockIdx.x, head = blockIdx.y, earlier = s.keys > s.queries ? s.keys - s.queries : 0;
    u32 seen = s.causal && earlier + query + 1 < s.keys ? earlier + query + 1 : s.keys;
    return {seen, ((u64)head * s.queries + query) * s.keys, ((s.first_head + head) * s.queries + query) * s.keys};
}

__device__ __forceinline__ float kept(const Scores& s, const Row& row, u32 key) {
    if (!s.threshold) return 1.0f;
    u64 index = row.drawn + key;
    return draw(philox(index / 4, s.draws), (u32)(index % 4)) < s.threshold ? 0.0f : s.keep;
}

template <typename T> __device__ __forceinline__ void softmax(const float* scores, const Scores& s, T* p, float* lse) {
    __shared__ float shared[WARPS];
    Row row = row_of(s);
    const float* x = scores + row.at;
    float most = -3.0e38f, sum = 0.0f;
    for (u32 key = threadIdx.x; key < row.seen; key += THREADS) most = fmaxf(most, x[key]);
    most = block_max<WARPS>(most, shared);
    for (u32 key = threadIdx.x; key < row.seen; key += THREADS) sum += __expf(x[key] - most);
    sum = block_sum<WARPS>(sum, shared);
    if (threadIdx.x == 0) lse[(u64)blockIdx.y * s.queries + blockIdx.x] = most + logf(sum);
    float factor = 1.0f / sum;
    for (u32 key = threadIdx.x; key < s.keys; key += THREADS) {
        p[row.at + key] = of_f32<T>(key < row.seen ? __expf(x[key] - most) * factor * kept(s, row, key) : 0.0f);
    }
}

template <typename T> __device__ __forceinline__ void softmax_grad(const float* scores, const float* d_p, const float* lse, const float* deltas, const Scores& s, float scale, T* p, T* d_scores) {
    Row row = row_of(s);
    float log_sum = lse[(u64)blockIdx.y * s.queries + blockIdx.x], delta = deltas[(u64)blockIdx.y * s.queries + blockIdx.x];
    for (u32 key = threadIdx.x; key < s.keys; key += THREADS) {
        float probability = 0.0f, slope = 0.0f;
        if (key < row.seen) {
            float keep = kept(s, row, key), all = __expf(scores[row.at + key] - log_sum);
            slope = scale * all * (d_p[row.at + key] * keep - delta);
            probability = all * keep;
        }
        p[row.at + key] = of_f32<T>(probability);
        d_scores[row.at + key] = of_f32<T>(slope);
    }
}

// deltas[sample, head, query] = the product of y and dy; a warp for each.
template <typename T> __device__ __forceinline__ void products(const T* y, const T* dy, u32 rows, u32 heads, u32 queries, u32 head_dim, float* deltas) {
    u64 which = (u64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (which >= (u64)rows * heads) return;
    u32 row = (u32)(which / heads), head = (u32)(which % heads), lane = threadIdx.x % 32;
    u64 at = ((u64)row * heads + head) * head_dim;
    float sum = 0.0f;
    for (u32 i = lane; i < head_dim; i += 32) sum += to_f32(y[at + i]) * to_f32(dy[at + i]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) deltas[((u64)(row / queries) * heads + head) * queries + row % queries] = sum;
}

#define ATTENTION(T, suffix)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) softmax_forward_##suffix(const float* scores, Scores s, T* p, float* lse) { \
        softmax(scores, s, p, lse);                                                                                            \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) softmax_backward_##suffix(const float* scores, const float* d_p, const float* lse, const float* deltas, Scores s, float scale, T* p, T* d_scores) { \
        softmax_grad(scores, d_p, lse, deltas, s, scale, p, d_scores);                                                         \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) deltas_##suffix(const T* y, const T* dy, u32 rows, u32 heads, u32 queries, u32 head_dim, float* deltas) { \
        products(y, dy, rows, heads, queries, head_dim, deltas);                                                               \
    }
ATTENTION(float, f32)
ATTENTION(bf16, bf16)
