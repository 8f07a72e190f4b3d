// Element by element: activations, gates, rotary positions, dropout, casts. Vectors of 16 bytes where all of it is; the last few one by one.

// f(reads, writes) over `len` elements, `IN` inputs and `OUT` outputs. An output may be an input: a thread reads before it writes.
template <typename T, int IN, int OUT, typename F>
__device__ __forceinline__ void each(const T* const (&in)[IN], T* const (&out)[OUT], u64 len, F f) {
    constexpr int N = Lanes<T>::N;
    bool aligned = true;
#pragma unroll
    for (int i = 0; i < IN; i++) aligned &= (u64)in[i] % 16 == 0;
#pragma unroll
    for (int i = 0; i < OUT; i++) aligned &= (u64)out[i] % 16 == 0;
    u64 vectors = aligned ? len / N : 0, stride = (u64)gridDim.x * blockDim.x, thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (u64 v = thread; v < vectors; v += stride) {
        float x[IN][N], y[OUT][N];
#pragma unroll
        for (int i = 0; i < IN; i++) Lanes<T>::load(in[i] + v * N, x[i]);
#pragma unroll
        for (int lane = 0; lane < N; lane++) {
            float a[IN], b[OUT];
#pragma unroll
            for (int i = 0; i < IN; i++) a[i] = x[i][lane];
            f(a, b, v * N + lane);
#pragma unroll
            for (int i = 0; i < OUT; i++) y[i][lane] = b[i];
        }
#pragma unroll
        for (int i = 0; i < OUT; i++) Lanes<T>::store(out[i] + v * N, y[i]);
    }
    for (u64 at = vectors * N + thread; at < len; at += stride) {
        float a[IN], b[OUT];
#pragma unroll
        for (int i = 0; i < IN; i++) a[i] = to_f32(in[i][at]);
        f(a, b, at);
#pragma unroll
        for (int i = 0; i < OUT; i++) out[i][at] = of_f32<T>(b[i]);
    }
}

// GPT-2's, the form with tanh: x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ __forceinline__ float gelu(float x) { return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x)); }
__device__ __forceinline__ float gelu_slope(float x) {
    float s = sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    return s + x * s * (1.0f - s) * 1.5957691216057308f * (1.0f + 0.134145f * x * x);
}
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float silu_slope(float x) {
    float s = sigmoid(x);
    return s + x * s * (1.0f - s);
}

// Draws of neighbours come from one block: it is computed when the index enters it.
struct Drawn {
    Draws draws;
    u64 block;
    uint4 four;
    __device__ __forceinline__ Drawn(const Draws& d) : draws(d), block(~0ull) {}
    __device__ __forceinline__ u32 at(u64 index) {
        if (index / 4 != block) {
            block = index / 4;
            four = philox(block, draws);
        }
        return draw(four, (u32)(index % 4));
    }
};

// Where vectors begin with a block of draws, a vector has whole ones, and nothing is looked up.
template <typename T> __device__ __forceinline__ void drop(const T* x, const Draws& draws, u64 first, u32 threshold, float scale, u64 len, T* y) {
    constexpr int N = Lanes<T>::N;
    u64 stride = (u64)gridDim.x * blockDim.x, thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 vectors = ((u64)x | (u64)y) % 16 == 0 && first % 4 == 0 ? len / N : 0;
    for (u64 v = thread; v < vectors; v += stride) {
        float a[N];
        Lanes<T>::load(x + v * N, a);
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            uint4 four = philox((first + v * N + i) / 4, draws);
            a[i] = four.x < threshold ? 0.0f : a[i] * scale;
            a[i + 1] = four.y < threshold ? 0.0f : a[i + 1] * scale;
            a[i + 2] = four.z < threshold ? 0.0f : a[i + 2] * scale;
            a[i + 3] = four.w < threshold ? 0.0f : a[i + 3] * scale;
        }
        Lanes<T>::store(y + v * N, a);
    }
    u64 done = vectors * N;
    Drawn drawn(draws);
    each<T, 1, 1>({x + done}, {y + done}, len - done, [&](const float* a, float* b, u64 i) {
        b[0] = drawn.at(first + done + i) < threshold ? 0.0f : a[0] * scale;
    });
}

// y = x + dropped(branch + bias); without a bias or draws these are left out.
template <typename T, bool BIAS, bool DROPS> __device__ __forceinline__ void join(const T* x, const T* branch, const T* bias, u32 cols, const Draws& draws, u64 first, u32 threshold, float scale, u64 len, T* y) {
    Drawn drawn(draws);
    each<T, 2, 1>({x, branch}, {y}, len, [&](const float* a, float* b, u64 i) {
        float v = a[1];
        if (BIAS) v += to_f32(bias[i % cols]);
        if (DROPS) v = drawn.at(first + i) < threshold ? 0.0f : v * scale;
        b[0] = a[0] + v;
    });
}

// Columns of every head, turned by the position of their row: the first half with the second. A block has a row.
template <typename T> __device__ __forceinline__ void rotate(const float* cosines, const float* sines, u32 first, u32 positions, u32 heads, u32 half, u32 stride, float sign, T* x) {
    constexpr int N = Lanes<T>::N;
    u64 turn = (u64)((first + blockIdx.x) % positions) * half;
    T* row = x + (u64)blockIdx.x * stride;
    cosines += turn;
    sines += turn;
    if (((u64)cosines | (u64)sines | (u64)row | (u64)half * sizeof(T)) % 16 == 0) {
        u32 each_head = half / N;
        for (u32 v = threadIdx.x; v < heads * each_head; v += blockDim.x) {
            u32 head = v / each_head, column = v % each_head * N;
            T* at = row + head * 2 * half + column;
            float a[N], b[N], c[N], s[N];
            Lanes<T>::load(at, a);
            Lanes<T>::load(at + half, b);
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                Lanes<float>::load(cosines + column + i, c + i);
                Lanes<float>::load(sines + column + i, s + i);
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                float low = a[i], high = b[i], sine = sign * s[i];
                a[i] = low * c[i] - high * sine;
                b[i] = high * c[i] + low * sine;
            }
            Lanes<T>::store(at, a);
            Lanes<T>::store(at + half, b);
        }
    } else {
        for (u32 i = threadIdx.x; i < heads * half; i += blockDim.x) {
            u32 head = i / half, column = i % half;
            T* at = row + head * 2 * half + column;
            float c = cosines[column], s = sign * sines[column], a = to_f32(at[0]), b = to_f32(at[half]);
            at[0] = of_f32<T>(a * c - b * s);
            at[half] = of_f32<T>(b * c + a * s);
        }
    }
}

#define POINTWISE(T, suffix)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) gelu_forward_##suffix(const T* x, u64 len, T* y) {                      \
        each<T, 1, 1>({x}, {y}, len, [](const float* a, float* b, u64) { b[0] = gelu(a[0]); });                               \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) gelu_backward_##suffix(const T* x, u64 len, T* dy) {                    \
        each<T, 2, 1>({x, dy}, {dy}, len, [](const float* a, float* b, u64) { b[0] = a[1] * gelu_slope(a[0]); });             \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) swiglu_forward_##suffix(const T* gate, const T* up, u64 len, T* y) {    \
        each<T, 2, 1>({gate, up}, {y}, len, [](const float* a, float* b, u64) { b[0] = silu(a[0]) * a[1]; });                 \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) swiglu_backward_##suffix(const T* gate, const T* up, u64 len, T* dy, T* d_gate) { \
        each<T, 3, 2>({gate, up, dy}, {d_gate, dy}, len, [](const float* a, float* b, u64) {                                  \
            b[0] = a[2] * a[1] * silu_slope(a[0]);                                                                            \
            b[1] = a[2] * silu(a[0]);                                                                                         \
        });                                                                                                                   \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) geglu_forward_##suffix(const T* gate, const T* up, u64 len, T* y) {    \
        each<T, 2, 1>({gate, up}, {y}, len, [](const float* a, float* b, u64) { b[0] = gelu(a[0]) * a[1]; });                 \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) geglu_backward_##suffix(const T* gate, const T* up, u64 len, T* dy, T* d_gate) { \
        each<T, 3, 2>({gate, up, dy}, {d_gate, dy}, len, [](const float* a, float* b, u64) {                                  \
            b[0] = a[2] * a[1] * gelu_slope(a[0]);                                                                            \
            b[1] = a[2] * gelu(a[0]);                                                                                         \
        });                                                                                                                   \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) silu_forward_##suffix(const T* x, u64 len, T* y) {                      \
        each<T, 1, 1>({x}, {y}, len, [](const float* a, float* b, u64) { b[0] = silu(a[0]); });                               \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) silu_backward_##suffix(const T* x, u64 len, T* dy) {                    \
        each<T, 2, 1>({x, dy}, {dy}, len, [](const float* a, float* b, u64) { b[0] = a[1] * silu_slope(a[0]); });             \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) difference_##suffix(const T* x, const T* target, float factor, u64 len, T* dx) { \
        each<T, 2, 1>({x, target}, {dx}, len, [=](const float* a, float* b, u64) { b[0] = factor * (a[0] - a[1]); });         \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) join_##suffix(const T* x, const T* branch, const T* bias, u32 cols, Draws draws, u64 first, u32 threshold, float scale, u64 len, T* y) { \
        if (bias && threshold) join<T, true, true>(x, branch, bias, cols, draws, first, threshold, scale, len, y);            \
        else if (bias) join<T, true, false>(x, branch, bias, cols, draws, first, threshold, scale, len, y);                   \
        else if (threshold) join<T, false, true>(x, branch, bias, cols, draws, first, threshold, scale, len, y);              \
        else join<T, false, false>(x, branch, bias, cols, draws, first, threshold, scale, len, y);                            \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) dropout_##suffix(const T* x, Draws draws, u64 first, u32 threshold, float scale, u64 len, T* y) { \
        drop(x, draws, first, threshold, scale, len, y);                                                                      \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) add_##suffix(const T* x, u64 len, T* y) {                               \
        each<T, 2, 1>({x, y}, {y}, len, [](const float* a, float* b, u64) { b[0] = a[0] + a[1]; });                           \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) rotary_##suffix(const float* cosines, const float* sines, u32 first, u32 positions, u32 heads, u32 half, u32 stride, float sign, T* x) { \
        rotate(cosines, sines, first, positions, heads, half, stride, sign, x);                                               \
    }
POINTWISE(float, f32)
POINTWISE(bf16, bf16)

extern "C" __global__ void __launch_bounds__(256) to_bf16(const float* x, u64 len, bf16* y) {
    u64 stride = (u64)gridDim.x * blockDim.x, thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 vectors = ((u64)x | (u64)y) % 16 == 0 ? len / 8 : 0;
    for (u64 v = thread; v < vectors; v += stride) {
        float a[8];
        Lanes<float>::load(x + v * 8, a);
        Lanes<float>::load(x + v * 8 + 4, a + 4);
        Lanes<bf16>::store(y + v * 8, a);
    }
    for (u64 i = vectors * 8 + thread; i < len; i += stride) y[i] = of_f32<bf16>(x[i]);
}

extern "C" __global__ void __launch_bounds__(256) widen_bf16(const bf16* x, u64 len, float* y) {
    u64 stride = (u64)gridDim.x * blockDim.x, thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 vectors = ((u64)x | (u64)y) % 16 == 0 ? len / 8 : 0;
    for (u64 v = thread; v < vectors; v += stride) {
        float a[8];
        Lanes<bf16>::load(x + v * 8, a);
        Lanes<float>::store(y + v * 8, a);
        Lanes<float>::store(y + v * 8 + 4, a + 4);
    }
    for (u64 i = vectors * 8 + thread; i < len; i += stride) y[i] = to_f32(x[i]);
}

// Rows of bias, added.
template <typename T> __device__ __forceinline__ void shift(const T* bias, u32 cols, u64 len, T* y) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < len; i += (u64)gridDim.x * blockDim.x) {
        y[i] = of_f32<T>(to_f32(y[i]) + to_f32(bias[i % cols]));
    }
}
extern "C" __global__ void __launch_bounds__(256) add_bias_f32(const float* bias, u32 cols, u64 len, float* y) { shift(bias, cols, len, y); }
extern "C" __global__ void __launch_bounds__(256) add_bias_bf16(const bf16* bias, u32 cols, u64 len, bf16* y) { shift(bias, cols, len, y); }
