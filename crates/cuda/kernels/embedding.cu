// Rows of a table, and their gradients in a fixed order.

// y[row] = tokens[ids[row]] + positions[row % context]; an id outside of [first, first + held) reads as zero.
// With `add` it is added to what is there.
template <typename T> __device__ __forceinline__ void embed(const T* tokens, const T* positions, const int* ids, u32 first, u32 held, u32 context, u32 width, u32 add, T* y) {
    constexpr int N = Lanes<T>::N;
    u32 row = blockIdx.x;
    i64 id = (i64)ids[row] - first;
    bool here = id >= 0 && id < held;
    const T* token = tokens + (here ? (u64)id * width : 0);
    T* out = y + (u64)row * width;
    const T* position = add ? out : positions ? positions + (u64)(row % context) * width : nullptr;
    u32 vectors = ((u64)tokens | (u64)positions | (u64)y | ((u64)width * sizeof(T))) % 16 == 0 ? width / N : 0;
    for (u32 v = threadIdx.x; v < vectors; v += blockDim.x) {
        float a[N], b[N];
        if (here) Lanes<T>::load(token + v * N, a);
        if (position) Lanes<T>::load(position + v * N, b);
#pragma unroll
        for (int i = 0; i < N; i++) a[i] = (here ? a[i] : 0.0f) + (position ? b[i] : 0.0f);
        Lanes<T>::store(out + v * N, a);
    }
    for (u32 at = vectors * N + threadIdx.x; at < width; at += blockDim.x) {
        out[at] = of_f32<T>((here ? to_f32(token[at]) : 0.0f) + (position ? to_f32(position[at]) : 0.0f));
    }
}

// sum += ROWS rows, in their order; all are asked for before the first is added.
template <typename T, int ROWS> __device__ __forceinline__ void add_rows(const T* dy, const u32* rows, u32 width, float* sum) {
    constexpr int N = Lanes<T>::N;
    uint4 read[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; k++) read[k] = *reinterpret_cast<const uint4*>(dy + (u64)rows[k] * width);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        float x[N];
        Lanes<T>::load(reinterpret_cast<const T*>(&read[k]), x);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += x[i];
    }
}

// table[entry] += the sum of its rows of dy, in their order. `rows[starts[i]..starts[i + 1]]` are the rows of `entries[i]`, ascending: the host
// sorts a batch's ids once, so that no addition depends on what ran first. Few entries have most of the rows: theirs is the time.
template <typename T> __device__ __forceinline__ void gather(const T* dy, const u32* entries, const u32* starts, const u32* rows, u32 width, float* table) {
    constexpr int N = Lanes<T>::N;
    u32 begin = starts[blockIdx.x], end = starts[blockIdx.x + 1], thread = blockIdx.y * blockDim.x + threadIdx.x, stride = gridDim.y * blockDim.x;
    float* into = table + (u64)entries[blockIdx.x] * width;
    u32 vectors = ((u64)dy | (u64)table | (u64)width * sizeof(T)) % 16 == 0 ? width / N : 0;
    for (u32 v = thread; v < vectors; v += stride) {
        const T* column = dy + v * N;
        float* out = into + v * N;
        float sum[N], before[N];
#pragma unroll
        for (int i = 0; i < N; i += 4) Lanes<float>::load(out + i, before + i);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] = 0.0f;
        u32 i = begin;
        for (; i + 16 <= end; i += 16) add_rows<T, 16>(column, rows + i, width, sum);
        for (; i + 4 <= end; i += 4) add_rows<T, 4>(column, rows + i, width, sum);
        for (; i < end; i++) add_rows<T, 1>(column, rows + i, width, sum);
#pragma unroll
        for (int i = 0; i < N; i++) before[i] += sum[i];
#pragma unroll
        for (int i = 0; i < N; i += 4) Lanes<float>::store(out + i, before + i);
    }
    for (u32 at = vectors * N + thread; at < width; at += stride) {
        float sum = 0.0f;
        for (u32 i = begin; i < end; i++) sum += to_f32(dy[(u64)rows[i] * width + at]);
        into[at] += sum;
    }
}

// positions[p] += the sum over the samples, in their order.
template <typename T> __device__ __forceinline__ void samples(const T* dy, u32 rows, u32 context, u32 width, float* table) {
    u64 len = (u64)context * width;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < len; at += (u64)gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (u64 row = at / width; row < rows; row += context) sum += to_f32(dy[row * width + at % width]);
        table[at] += sum;
    }
}

#define EMBEDDING(T, suffix)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) embedding_forward_##suffix(const T* tokens, const T* positions, const int* ids, u32 first, u32 held, u32 context, u32 width, u32 add, T* y) { \
        embed(tokens, positions, ids, first, held, context, width, add, y);                                                         \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) embedding_backward_##suffix(const T* dy, const u32* entries, const u32* starts, const u32* rows, u32 width, float* table) { \
        gather(dy, entries, starts, rows, width, table);                                                                       \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) positions_backward_##suffix(const T* dy, u32 rows, u32 context, u32 width, float* table) { \
        samples(dy, rows, context, width, table);                                                                              \
    }
EMBEDDING(float, f32)
EMBEDDING(bf16, bf16)
