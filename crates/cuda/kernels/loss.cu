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
