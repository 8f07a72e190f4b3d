// Layer norm and RMS norm, with the residual that leads to them, and their gradients.
//
//     sum = x + residual        y = (sum - mean) * rstd * gamma + beta        (RMS: no mean, no beta)
//
// A block has a row at a time. Where rows are whole vectors, its threads keep the row in registers: every number is read once and written
// once. Statistics are every row's mean and rstd, one behind the other (RMS: rstd alone). Gradients of gamma and beta are added up by column in registers, a block for the rows it sees, and then over the blocks in order.

template <typename T> struct Row { const T* x; const T* residual; T* sum; u32 width; };

__device__ __forceinline__ float2 block_sums(float2 v, float2* shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        v.x += __shfl_xor_sync(0xffffffffu, v.x, step);
        v.y += __shfl_xor_sync(0xffffffffu, v.y, step);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    float2 sum = make_float2(0.0f, 0.0f);
    for (u32 i = 0; i < blockDim.x / 32; i++) { sum.x += shared[i].x; sum.y += shared[i].y; }
    return sum;
}

// CHUNKS vectors a thread.
template <typename T, bool RMS, int CHUNKS>
__device__ __forceinline__ void forward(const T* x, const T* residual, const T* gamma, const T* beta, float epsilon, u32 width, T* sum, T* y, float* stats) {
    constexpr int N = Lanes<T>::N;
    __shared__ float2 shared[32];
    u64 row = (u64)blockIdx.x * width;
    float v[CHUNKS][N];
    float2 moments = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        u32 at = (c * blockDim.x + threadIdx.x) * N;
        if (at < width) {
            Lanes<T>::load(x + row + at, v[c]);
            if (residual) {
                float r[N];
                Lanes<T>::load(residual + row + at, r);
#pragma unroll
                for (int i = 0; i < N; i++) v[c][i] = to_f32(of_f32<T>(v[c][i] + r[i]));
                Lanes<T>::store(sum + row + at, v[c]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) v[c][i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < N; i++) moments.x += RMS ? v[c][i] * v[c][i] : v[c][i];
    }
    moments = block_sums(moments, shared);
    float center = RMS ? 0.0f : moments.x / width, spread = moments.x;
    if (!RMS) {
        float2 squares = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            u32 at = (c * blockDim.x + threadIdx.x) * N;
            if (at < width) {
#pragma unroll
                for (int i = 0; i < N; i++) squares.x += (v[c][i] - center) * (v[c][i] - center);
            }
        }
        spread = block_sums(squares, shared).x;
    }
    float scale = rsqrtf(spread / width + epsilon);
    if (threadIdx.x == 0) {
        if (!RMS) stats[2 * blockIdx.x] = center;
        stats[RMS ? blockIdx.x : 2 * blockIdx.x + 1] = scale;
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        u32 at = (c * blockDim.x + threadIdx.x) * N;
        if (at < width) {
            float g[N], b[N];
            Lanes<T>::load(gamma + at, g);
            if (!RMS) Lanes<T>::load(beta + at, b);
#pragma unroll
            for (int i = 0; i < N; i++) v[c][i] = (v[c][i] - center) * scale * g[i] + (RMS ? 0.0f : b[i]);
            Lanes<T>::store(y + row + at, v[c]);
        }
    }
}

// Rows of any width.
template <typename T, bool RMS>
__device__ __forceinline__ void forward_any(const T* x, const T* residual, const T* gamma, const T* beta, float epsilon, u32 width, T* sum, T* y, float* stats) {
    __shared__ float2 shared[32];
    u64 row = (u64)blockIdx.x * width;
    float2 moments = make_float2(0.0f, 0.0f);
    for (u32 at = threadIdx.x; at < width; at += blockDim.x) {
        float v = to_f32(x[row + at]);
        if (residual) {
            T rounded = of_f32<T>(v + to_f32(residual[row + at]));
            sum[row + at] = rounded;
            v = to_f32(rounded);
        }
        moments.x += RMS ? v * v : v;
    }
    moments = block_sums(moments, shared);
    const T* in = residual ? sum : x; // what a thread reads again it wrote itself
    float center = RMS ? 0.0f : moments.x / width, spread = moments.x;
    if (!RMS) {
        float2 squares = make_float2(0.0f, 0.0f);
        for (u32 at = threadIdx.x; at < width; at += blockDim.x) {
            float v = to_f32(in[row + at]) - center;
            squares.x += v * v;
        }
        spread = block_sums(squares, shared).x;
    }
    float scale = rsqrtf(spread / width + epsilon);
    if (threadIdx.x == 0) {
        if (!RMS) stats[2 * blockIdx.x] = center;
        stats[RMS ? blockIdx.x : 2 * blockIdx.x + 1] = scale;
    }
    for (u32 at = threadIdx.x; at < width; at += blockDim.x) {
        float v = (to_f32(in[row + at]) - center) * scale * to_f32(gamma[at]);
        y[row + at] = of_f32<T>(RMS ? v : v + to_f32(beta[at]));
    }
}

// dx = residual + gradient; partial[block][0] and [1] are the block's sums of the gradients of gamma and beta. Where a
// thread has one vector of a row, the next row is asked for before this one's sums are waited for; more vectors would cost half of the threads.
template <typename T, bool RMS, int CHUNKS>
__device__ __forceinline__ void backward(const T* x, const T* gamma, const float* stats, const T* dy, const T* residual, u32 rows, u32 width, T* dx, float* partial) {
    constexpr int N = Lanes<T>::N;
    constexpr bool AHEAD = CHUNKS == 1;
    __shared__ float2 shared[32];
    float d_gamma[CHUNKS][N], d_beta[RMS ? 1 : CHUNKS][N];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            d_gamma[c][i] = 0.0f;
            if (!RMS) d_beta[c][i] = 0.0f;
        }
    }
    uint4 next_x[CHUNKS], next_dy[CHUNKS];
    auto ask = [&](u32 r) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            u32 at = (c * blockDim.x + threadIdx.x) * N;
            if (r < rows && at < width) {
                next_x[c] = *reinterpret_cast<const uint4*>(x + (u64)r * width + at);
                next_dy[c] = *reinterpret_cast<const uint4*>(dy + (u64)r * width + at);
            }
        }
    };
    if (AHEAD) ask(blockIdx.x);
    for (u32 r = blockIdx.x; r < rows; r += gridDim.x) {
        u64 row = (u64)r * width;
        float scale = stats[RMS ? r : 2 * r + 1], center = RMS ? 0.0f : stats[2 * r];
        float hat[CHUNKS][N], weighted[CHUNKS][N];
        uint4 added[CHUNKS];
        if (!AHEAD) ask(r);
        float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            u32 at = (c * blockDim.x + threadIdx.x) * N;
            if (at < width) {
                float g[N];
                if (AHEAD && residual) added[c] = *reinterpret_cast<const uint4*>(residual + row + at);
                Lanes<T>::load(reinterpret_cast<const T*>(&next_x[c]), hat[c]);
                Lanes<T>::load(reinterpret_cast<const T*>(&next_dy[c]), weighted[c]);
                Lanes<T>::load(gamma + at, g);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    hat[c][i] = (hat[c][i] - center) * scale;
                    d_gamma[c][i] += weighted[c][i] * hat[c][i];
                    if (!RMS) d_beta[c][i] += weighted[c][i];
                    weighted[c][i] *= g[i];
                    sums.x += weighted[c][i];
                    sums.y += weighted[c][i] * hat[c][i];
                }
            }
        }
        if (AHEAD) ask(r + gridDim.x);
        sums = block_sums(sums, shared);
        float shift = RMS ? 0.0f : sums.x / width, slope = sums.y / width;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            u32 at = (c * blockDim.x + threadIdx.x) * N;
            if (at < width) {
                float r0[N];
                if (residual) Lanes<T>::load(AHEAD ? reinterpret_cast<const T*>(&added[c]) : residual + row + at, r0);
#pragma unroll
                for (int i = 0; i < N; i++) weighted[c][i] = scale * (weighted[c][i] - shift - hat[c][i] * slope) + (residual ? r0[i] : 0.0f);
                Lanes<T>::store(dx + row + at, weighted[c]);
            }
        }
    }
    float* mine = partial + (u64)blockIdx.x * (RMS ? 1 : 2) * width;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        u32 at = (c * blockDim.x + threadIdx.x) * N;
        if (at < width) {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                Lanes<float>::store(mine + at + i, d_gamma[c] + i);
                if (!RMS) Lanes<float>::store(mine + width + at + i, d_beta[c] + i);
            }
        }
    }
}

// Rows of any width: the sums are in shared memory, [1 or 2][width], where a column belongs to one thread.
template <typename T, bool RMS>
__device__ __forceinline__ void backward_any(const T* x, const T* gamma, const float* stats, const T* dy, const T* residual, u32 rows, u32 width, T* dx, float* partial) {
    extern __shared__ float columns[];
    __shared__ float2 shared[32];
    for (u32 at = threadIdx.x; at < width; at += blockDim.x) {
        columns[at] = 0.0f;
        if (!RMS) columns[width + at] = 0.0f;
    }
    for (u32 r = blockIdx.x; r < rows; r += gridDim.x) {
        u64 row = (u64)r * width;
        float scale = stats[RMS ? r : 2 * r + 1], center = RMS ? 0.0f : stats[2 * r];
        float2 sums = make_float2(0.0f, 0.0f);
        for (u32 at = threadIdx.x; at < width; at += blockDim.x) {
            float hat = (to_f32(x[row + at]) - center) * scale, d = to_f32(dy[row + at]);
            columns[at] += d * hat;
            if (!RMS) columns[width + at] += d;
            d *= to_f32(gamma[at]);
            sums.x += d;
            sums.y += d * hat;
        }
        sums = block_sums(sums, shared);
        float shift = RMS ? 0.0f : sums.x / width, slope = sums.y / width;
        for (u32 at = threadIdx.x; at < width; at += blockDim.x) {
            float hat = (to_f32(x[row + at]) - center) * scale;
            float d = scale * (to_f32(dy[row + at]) * to_f32(gamma[at]) - shift - hat * slope);
            dx[row + at] = of_f32<T>(residual ? d + to_f32(residual[row + at]) : d);
        }
    }
    float* mine = partial + (u64)blockIdx.x * (RMS ? 1 : 2) * width;
    for (u32 at = threadIdx.x; at < width; at += blockDim.x) {
        mine[at] = columns[at];
        if (!RMS) mine[width + at] = columns[width + at];
    }
}

#define FORWARD(name, T, RMS, how)                                                                                          \
    extern "C" __global__ void __launch_bounds__(512) name(const T* x, const T* residual, const T* gamma, const T* beta, float epsilon, u32 width, T* sum, T* y, float* stats) { \
        how(x, residual, gamma, beta, epsilon, width, sum, y, stats);                                                  \
    }
#define BACKWARD(name, T, RMS, how)                                                                                         \
    extern "C" __global__ void __launch_bounds__(512) name(const T* x, const T* gamma, const float* stats, const T* dy, const T* residual, u32 rows, u32 width, T* dx, float* partial) { \
        how(x, gamma, stats, dy, residual, rows, width, dx, partial);                                                  \
    }
#define NORM(kind, T, suffix, RMS)                                                                                          \
    FORWARD(kind##_forward_1_##suffix, T, RMS, (forward<T, RMS, 1>))                                                        \
    FORWARD(kind##_forward_2_##suffix, T, RMS, (forward<T, RMS, 2>))                                                        \
    FORWARD(kind##_forward_4_##suffix, T, RMS, (forward<T, RMS, 4>))                                                        \
    FORWARD(kind##_forward_any_##suffix, T, RMS, (forward_any<T, RMS>))                                                     \
    BACKWARD(kind##_backward_1_##suffix, T, RMS, (backward<T, RMS, 1>))                                                     \
    BACKWARD(kind##_backward_2_##suffix, T, RMS, (backward<T, RMS, 2>))                                                     \
    BACKWARD(kind##_backward_any_##suffix, T, RMS, (backward_any<T, RMS>))
NORM(layer_norm, float, f32, false)
NORM(layer_norm, bf16, bf16, false)
NORM(rms_norm, float, f32, true)
NORM(rms_norm, bf16, bf16, true)
