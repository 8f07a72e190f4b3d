// The classifier's loss and the gradient of its logits in one pass: a block has a row. It is read for the softmax's sum, and again (then from
// the cache) when logits become gradients in place. Nothing else is kept: no exponentials, no f32 logits.
//
//     loss[row] = log(sum exp(logit)) - logit[target]        logit' = scale * (softmax - [target])
//
// Columns beyond the classes are padding: their gradient is zero. A row whose target is negative does not count.

constexpr int THREADS = 1024, WARPS = THREADS / 32;

struct Softmax { float max, sum; };

__device__ __forceinline__ void take(Softmax& s, float x) {
    if (x > s.max) {
        s.sum = s.sum * __expf(s.max - x) + 1.0f;
        s.max = x;
    } else {
        s.sum += __expf(x - s.max);
    }
}

template <typename T> __device__ __forceinline__ void classify(T* logits, const int* targets, u32 classes, u32 stride, float scale, float* loss) {
    constexpr int N = Lanes<T>::N;
    __shared__ float shared[WARPS];
    T* row = logits + (u64)blockIdx.x * stride;
    int target = targets[blockIdx.x];
    bool aligned = (u64)row % 16 == 0 && stride % N == 0;
    u32 vectors = aligned ? classes / N : 0;
    Softmax mine = {-3.0e38f, 0.0f};
    for (u32 v = threadIdx.x; v < vectors; v += THREADS) {
        float x[N];
        Lanes<T>::load(row + v * N, x);
        float most = x[0];
#pragma unroll
        for (int i = 1; i < N; i++) most = fmaxf(most, x[i]);
        if (most > mine.max) {
            mine.sum *= __expf(mine.max - most);
            mine.max = most;
        }
#pragma unroll
        for (int i = 0; i < N; i++) mine.sum += __expf(x[i] - mine.max);
    }
    for (u32 at = vectors * N + threadIdx.x; at < classes; at += THREADS) take(mine, to_f32(row[at]));
    float max = block_max<WARPS>(mine.max, shared);
    float sum = block_sum<WARPS>(mine.sum * __expf(mine.max - max), shared);
    if (threadIdx.x == 0) loss[blockIdx.x] = target < 0 ? 0.0f : logf(sum) + max - to_f32(row[target]);
    __syncthreads(); // the target's logit was read
    float factor = target < 0 ? 0.0f : scale / sum, hit = target < 0 ? 0.0f : scale;
    // All of the row and its padding.
    vectors = aligned ? stride / N : 0;
    for (u32 v = threadIdx.x; v < vectors; v += THREADS) {
        float x[N];
        Lanes<T>::load(row + v * N, x);
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32 at = v * N + i;
            x[i] = at < classes ? factor * __expf(x[i] - max) - ((int)at == target ? hit : 0.0f) : 0.0f;
        }
        Lanes<T>::store(row + v * N, x);
    }
    for (u32 at = vectors * N + threadIdx.x; at < stride; at += THREADS) {
        float x = at < classes ? factor * __expf(to_f32(row[at]) - max) - ((int)at == target ? hit : 0.0f) : 0.0f;
        row[at] = of_f32<T>(x);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) classifier_f32(float* logits, const int* targets, u32 classes, u32 stride, float scale, float* loss) {
    classify(logits, targets, classes, stride, scale, loss);
}
extern "C" __global__ void __launch_bounds__(THREADS) classifier_bf16(bf16* logits, const int* targets, u32 classes, u32 stride, float scale, float* loss) {
    classify(logits, targets, classes, stride, scale, loss);
}

// The same in four steps, for classes that are split over ranks, with sums over the ranks between them:
//
//     row_max    max[row]                       exp_sums    logit -> exp(logit - max), sums[0][row], sums[1][row] = the target's logit - max
//     entropy    loss[row] = log(sum) - target  exps_grad   exp -> scale * (exp / sum - [target])
//
// Targets count among all classes; those that are here begin with `first`.

template <typename T> __device__ __forceinline__ void largest(const T* x, u32 cols, float* max) {
    constexpr int N = Lanes<T>::N;
    __shared__ float shared[WARPS];
    const T* row = x + (u64)blockIdx.x * cols;
    u32 vectors = (u64)row % 16 == 0 ? cols / N : 0;
    float most = -3.402823466e38f;
    for (u32 v = threadIdx.x; v < vectors; v += THREADS) {
        float a[N];
        Lanes<T>::load(row + v * N, a);
#pragma unroll
        for (int i = 0; i < N; i++) most = fmaxf(most, a[i]);
    }
    for (u32 at = vectors * N + threadIdx.x; at < cols; at += THREADS) most = fmaxf(most, to_f32(row[at]));
    most = block_max<WARPS>(most, shared);
    if (threadIdx.x == 0) max[blockIdx.x] = most;
}

template <typename T> __device__ __forceinline__ void exponentials(T* logits, const int* targets, u32 first, u32 cols, const float* max, float* sums) {
    constexpr int N = Lanes<T>::N;
    __shared__ float shared[WARPS];
    T* row = logits + (u64)blockIdx.x * cols;
    float most = max[blockIdx.x], sum = 0.0f;
    i64 target = (i64)targets[blockIdx.x] - first;
    bool here = target >= 0 && target < cols;
    float hit = here ? to_f32(row[target]) - most : 0.0f;
    __syncthreads(); // the target's logit was read
    u32 vectors = (u64)row % 16 == 0 ? cols / N : 0;
    for (u32 v = threadIdx.x; v < vectors; v += THREADS) {
        float a[N];
        Lanes<T>::load(row + v * N, a);
#pragma unroll
        for (int i = 0; i < N; i++) {
            a[i] = __expf(a[i] - most);
            sum += a[i];
        }
        Lanes<T>::store(row + v * N, a);
    }
    for (u32 at = vectors * N + threadIdx.x; at < cols; at += THREADS) {
        float e = __expf(to_f32(row[at]) - most);
        sum += e;
        row[at] = of_f32<T>(e);
    }
    sum = block_sum<WARPS>(sum, shared);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
        sums[gridDim.x + blockIdx.x] = hit;
    }
}

template <typename T> __device__ __forceinline__ void slopes(T* exps, const int* targets, u32 first, u32 cols, const float* sums, float scale) {
    constexpr int N = Lanes<T>::N;
    T* row = exps + (u64)blockIdx.x * cols;
    i64 target = (i64)targets[blockIdx.x] - first;
    float factor = scale / sums[blockIdx.x];
    u32 vectors = (u64)row % 16 == 0 ? cols / N : 0;
    for (u32 v = threadIdx.x; v < vectors; v += THREADS) {
        float a[N];
        Lanes<T>::load(row + v * N, a);
#pragma unroll
        for (int i = 0; i < N; i++) a[i] = factor * a[i] - (v * N + i == target ? scale : 0.0f);
        Lanes<T>::store(row + v * N, a);
    }
    for (u32 at = vectors * N + threadIdx.x; at < cols; at += THREADS) {
        row[at] = of_f32<T>(factor * to_f32(row[at]) - (at == target ? scale : 0.0f));
    }
}

#define STEPS(T, suffix)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) row_max_##suffix(const T* x, u32 cols, float* max) { largest(x, cols, max); } \
    extern "C" __global__ void __launch_bounds__(THREADS) exp_sums_##suffix(T* logits, const int* targets, u32 first, u32 cols, const float* max, float* sums) { \
        exponentials(logits, targets, first, cols, max, sums);                                                                 \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) exps_grad_##suffix(T* exps, const int* targets, u32 first, u32 cols, const float* sums, float scale) { \
        slopes(exps, targets, first, cols, sums, scale);                                                                       \
    }
STEPS(float, f32)
STEPS(bf16, bf16)

extern "C" __global__ void __launch_bounds__(256) entropy(const float* sums, u32 rows, float* loss) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < rows; i += gridDim.x * blockDim.x) loss[i] = logf(sums[i]) - sums[rows + i];
}
