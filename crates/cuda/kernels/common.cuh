// What every file of kernels begins with. No header of the toolkit is included, so that NVRTC alone can compile them.
//
// Numbers are read in the width they are stored in and computed with in f32; sums over rows and columns have a fixed order, so that the
// same input gives the same bits, however often it runs.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 { u16 bits; };

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// To the nearest, to even on a tie; a NaN stays one.
__device__ __forceinline__ u32 round_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

template <typename T> __device__ __forceinline__ T of_f32(float x);
template <> __device__ __forceinline__ float of_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 of_f32<bf16>(float x) {
    bf16 y;
    y.bits = (u16)round_pair(x, 0.0f);
    return y;
}

// Sixteen bytes of elements: 4 of f32, 8 of bf16.
template <typename T> struct Lanes;
template <> struct Lanes<float> {
    static constexpr int N = 4;
    static __device__ __forceinline__ void load(const float* p, float* out) {
        float4 v = *reinterpret_cast<const float4*>(p);
        out[0] = v.x; out[1] = v.y; out[2] = v.z; out[3] = v.w;
    }
    static __device__ __forceinline__ void store(float* p, const float* in) {
        *reinterpret_cast<float4*>(p) = make_float4(in[0], in[1], in[2], in[3]);
    }
};
template <> struct Lanes<bf16> {
    static constexpr int N = 8;
    static __device__ __forceinline__ void load(const bf16* p, float* out) {
        uint4 v = *reinterpret_cast<const uint4*>(p);
        u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[2 * i] = __uint_as_float(w[i] << 16);
            out[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        }
    }
    static __device__ __forceinline__ void store(bf16* p, const float* in) {
        *reinterpret_cast<uint4*>(p) = make_uint4(round_pair(in[0], in[1]), round_pair(in[2], in[3]),
                                                  round_pair(in[4], in[5]), round_pair(in[6], in[7]));
    }
};

// The sum over a block, in every thread. The order is fixed: lanes by halves, then warps one behind the other.
template <int WARPS> __device__ __forceinline__ float block_sum(float x, float* shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    int warp = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[warp] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += shared[i];
    return sum;
}

template <int WARPS> __device__ __forceinline__ float block_max(float x, float* shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    int warp = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[warp] = x;
    __syncthreads();
    float max = shared[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) max = fmaxf(max, shared[i]);
    return max;
}

struct Draws { u32 key0, key1, high0, high1; };

// Philox 4x32-10 (Salmon et al., SC'11): draws 4 block .. 4 block + 3 of a stream.
__device__ __forceinline__ uint4 philox(u64 block, const Draws& draws) {
    u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = draws.high0, c3 = draws.high1, k0 = draws.key0, k1 = draws.key1;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 h0 = __umulhi(c0, 0xD2511F53u), l0 = c0 * 0xD2511F53u, h1 = __umulhi(c2, 0xCD9E8D57u), l1 = c2 * 0xCD9E8D57u;
        c0 = h1 ^ c1 ^ k0; c1 = l1; c2 = h0 ^ c3 ^ k1; c3 = l0;
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

__device__ __forceinline__ u32 draw(const uint4& four, u32 i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }
