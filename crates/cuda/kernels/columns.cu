// Sums over rows: gradients of biases, and the last step of other sums by column. In a fixed order, in two steps:
//
//     rows --strips--> partial[strip][column] --in order--> sums[column]

// 32 vectors of columns by 8 rows at a time; a strip is every gridDim.y-th such group.
template <typename T> __device__ __forceinline__ void strips(const T* x, u32 rows, u32 cols, float* partial) {
    constexpr int N = Lanes<T>::N;
    __shared__ float shared[8][32][N + 1];
    u32 lane = threadIdx.x % 32, group = threadIdx.x / 32, at = (blockIdx.x * 32 + lane) * N;
    float sum[N];
#pragma unroll
    for (int i = 0; i < N; i++) sum[i] = 0.0f;
    if (at < cols) {
        // Four rows are asked for before the first is added; the order stays.
        u32 row = blockIdx.y * 8 + group, step = gridDim.y * 8;
        for (; (u64)row + 3 * (u64)step < rows; row += 4 * step) {
            uint4 read[4];
#pragma unroll
            for (int k = 0; k < 4; k++) read[k] = *reinterpret_cast<const uint4*>(x + ((u64)row + k * (u64)step) * cols + at);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float v[N];
                Lanes<T>::load(reinterpret_cast<const T*>(&read[k]), v);
#pragma unroll
                for (int i = 0; i < N; i++) sum[i] += v[i];
            }
        }
        for (; row < rows; row += step) {
            float v[N];
            Lanes<T>::load(x + (u64)row * cols + at, v);
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += v[i];
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) shared[group][lane][i] = sum[i];
    __syncthreads();
    for (u32 i = threadIdx.x; i < 32 * N; i += blockDim.x) {
        u32 column = blockIdx.x * 32 * N + i;
        float total = 0.0f;
#pragma unroll
        for (int g = 0; g < 8; g++) total += shared[g][i / N][i % N];
        if (column < cols) partial[(u64)blockIdx.y * cols + column] = total;
    }
}

// The same for any number of columns, one a lane.
template <typename T> __device__ __forceinline__ void strips_any(const T* x, u32 rows, u32 cols, float* partial) {
    __shared__ float shared[8][32];
    u32 lane = threadIdx.x % 32, group = threadIdx.x / 32, at = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (at < cols) {
        for (u32 row = blockIdx.y * 8 + group; row < rows; row += gridDim.y * 8) sum += to_f32(x[(u64)row * cols + at]);
    }
    shared[group][lane] = sum;
    __syncthreads();
    if (group == 0 && at < cols) {
        float total = 0.0f;
#pragma unroll
        for (int g = 0; g < 8; g++) total += shared[g][lane];
        partial[(u64)blockIdx.y * cols + at] = total;
    }
}

extern "C" __global__ void __launch_bounds__(256) column_strips_f32(const float* x, u32 rows, u32 cols, float* partial) { strips(x, rows, cols, partial); }
extern "C" __global__ void __launch_bounds__(256) column_strips_bf16(const bf16* x, u32 rows, u32 cols, float* partial) { strips(x, rows, cols, partial); }
extern "C" __global__ void __launch_bounds__(256) column_strips_any_f32(const float* x, u32 rows, u32 cols, float* partial) { strips_any(x, rows, cols, partial); }
extern "C" __global__ void __launch_bounds__(256) column_strips_any_bf16(const bf16* x, u32 rows, u32 cols, float* partial) { strips_any(x, rows, cols, partial); }

// 32 columns a block, 32 warps: each adds every 32nd strip, then the warps in order.
extern "C" __global__ void __launch_bounds__(1024) add_strips(const float* partial, u32 strips, u32 cols, u32 add, float* sums) {
    __shared__ float shared[32][33];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (at < cols) {
        for (u32 strip = warp; strip < strips; strip += 32) sum += partial[(u64)strip * cols + at];
    }
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && at < cols) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < 32; w++) total += shared[w][lane];
        sums[at] = add ? sums[at] + total : total;
    }
}
