// The end of a step: sums of squares, the factor that clips, and AdamW, which also writes the copy that the next step computes with.

constexpr int THREADS = 256, WARPS = THREADS / 32;

__device__ __forceinline__ double block_sum_f64(double x, double* shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += shared[i];
    return sum;
}

// partial[block] = the sum of squares (or of the numbers) that a block sees.
template <typename T, bool SQUARES> __device__ __forceinline__ void sums(const T* x, u64 len, double* partial) {
    constexpr int N = Lanes<T>::N;
    __shared__ double shared[WARPS];
    u64 vectors = (u64)x % 16 == 0 ? len / N : 0, stride = (u64)gridDim.x * THREADS, thread = (u64)blockIdx.x * THREADS + threadIdx.x;
    double total = 0.0;
    for (u64 v = thread; v < vectors; v += stride) {
        float a[N], some = 0.0f;
        Lanes<T>::load(x + v * N, a);
#pragma unroll
        for (int i = 0; i < N; i++) some += SQUARES ? a[i] * a[i] : a[i];
        total += some;
    }
    for (u64 at = vectors * N + thread; at < len; at += stride) {
        double a = to_f32(x[at]);
        total += SQUARES ? a * a : a;
    }
    total = block_sum_f64(total, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_squares_f32(const float* x, u64 len, double* partial) { sums<float, true>(x, len, partial); }
extern "C" __global__ void __launch_bounds__(THREADS) sum_squares_bf16(const bf16* x, u64 len, double* partial) { sums<bf16, true>(x, len, partial); }
extern "C" __global__ void __launch_bounds__(THREADS) sum_f32(const float* x, u64 len, double* partial) { sums<float, false>(x, len, partial); }

// One block: total (+)= the partial sums, in a fixed order.
extern "C" __global__ void __launch_bounds__(THREADS) add_partials(const double* partial, u32 count, u32 add, double* total) {
    __shared__ double shared[WARPS];
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < count; i += THREADS) sum += partial[i];
    sum = block_sum_f64(sum, shared);
    if (threadIdx.x == 0) *total = add ? *total + sum : sum;
}

// The factor that brings gradients below a norm, on the device: no step waits for it.
extern "C" __global__ void clip_scale(const double* squares, double limit, float* scale) {
    double norm = sqrt(*squares);
    *scale = norm > limit ? (float)(limit / norm) : 1.0f;
}

struct Adam { float decay, beta1, rest1, beta2, rest2, rate, second_scale, epsilon, grad_scale; };

// p = p * decay - rate * m / (sqrt(v) * second_scale + epsilon), from f32 masters; `copy` may be null.
template <typename G> __device__ __forceinline__ void adamw(const G* grads, Adam n, const float* scale, u64 len, float* params, float* first, float* second, bf16* copy) {
    float factor = n.grad_scale * (scale ? *scale : 1.0f);
    u64 stride = (u64)gridDim.x * THREADS, thread = (u64)blockIdx.x * THREADS + threadIdx.x;
    auto one = [&](float g, float& p, float& m, float& v) {
        g *= factor;
        m = n.beta1 * m + n.rest1 * g;
        v = n.beta2 * v + n.rest2 * g * g;
        p = p * n.decay - n.rate * m / (sqrtf(v) * n.second_scale + n.epsilon);
    };
    bool aligned = ((u64)grads | (u64)params | (u64)first | (u64)second | (u64)copy) % 16 == 0;
    u64 vectors = aligned ? len / 8 : 0;
    for (u64 i = thread; i < vectors; i += stride) {
        float g[8], p[8], m[8], v[8];
        u64 at = i * 8;
        if (sizeof(G) == 2) {
            Lanes<bf16>::load(reinterpret_cast<const bf16*>(grads) + at, g);
        } else {
            Lanes<float>::load(reinterpret_cast<const float*>(grads) + at, g);
            Lanes<float>::load(reinterpret_cast<const float*>(grads) + at + 4, g + 4);
        }
        Lanes<float>::load(params + at, p); Lanes<float>::load(params + at + 4, p + 4);
        Lanes<float>::load(first + at, m); Lanes<float>::load(first + at + 4, m + 4);
        Lanes<float>::load(second + at, v); Lanes<float>::load(second + at + 4, v + 4);
#pragma unroll
        for (int j = 0; j < 8; j++) one(g[j], p[j], m[j], v[j]);
        Lanes<float>::store(params + at, p); Lanes<float>::store(params + at + 4, p + 4);
        Lanes<float>::store(first + at, m); Lanes<float>::store(first + at + 4, m + 4);
        Lanes<float>::store(second + at, v); Lanes<float>::store(second + at + 4, v + 4);
        if (copy) Lanes<bf16>::store(copy + at, p);
    }
    for (u64 at = vectors * 8 + thread; at < len; at += stride) {
        float p = params[at], m = first[at], v = second[at];
        one(to_f32(grads[at]), p, m, v);
        params[at] = p; first[at] = m; second[at] = v;
        if (copy) copy[at] = of_f32<bf16>(p);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) adamw_f32(const float* grads, Adam n, const float* scale, u64 len, float* params, float* first, float* second, bf16* copy) {
    adamw(grads, n, scale, len, params, first, second, copy);
}
extern "C" __global__ void __launch_bounds__(THREADS) adamw_bf16(const bf16* grads, Adam n, const float* scale, u64 len, float* params, float* first, float* second, bf16* copy) {
    adamw(grads, n, scale, len, params, first, second, copy);
}

// v = momentum v + (g scale + decay p), p -= rate v; `copy` may be null.
extern "C" __global__ void __launch_bounds__(THREADS) sgd(const float* grads, float rate, float momentum, float decay, float scale, u64 len, float* params, float* velocity, bf16* copy) {
    for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < len; at += (u64)gridDim.x * THREADS) {
        float p = params[at], v = momentum * velocity[at] + (grads[at] * scale + decay * p);
        p -= rate * v;
        params[at] = p; velocity[at] = v;
        if (copy) copy[at] = of_f32<bf16>(p);
    }
}

// partial[block] = the sum of squared differences that a block sees.
template <typename T> __device__ __forceinline__ void distances(const T* x, const T* y, u64 len, double* partial) {
    __shared__ double shared[WARPS];
    double total = 0.0;
    for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < len; at += (u64)gridDim.x * THREADS) {
        double d = (double)to_f32(x[at]) - (double)to_f32(y[at]);
        total += d * d;
    }
    total = block_sum_f64(total, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}
extern "C" __global__ void __launch_bounds__(THREADS) squared_distance_f32(const float* x, const float* y, u64 len, double* partial) { distances(x, y, len, partial); }
extern "C" __global__ void __launch_bounds__(THREADS) squared_distance_bf16(const bf16* x, const bf16* y, u64 len, double* partial) { distances(x, y, len, partial); }
