// Copies a part of a box's stream of bytes to another: packing, unpacking and copies between tensors are one kernel.
//
// A side is a run of bytes, repeated with a stride for every outer dim (see `View` of the crate that moves bytes):
//
//     run 3, outer (2 times, 6 apart):     . . x x x .      stream  0 1 2 3 4 5
//                                          . . x x x .      at      2 3 4 8 9 10
//
// A thread takes vectors of the stream, finds where each lies on both sides, reads all of them, then writes all of them. Sides are in units of
// the vector, whose width divides everything. Divisions are by multiplication, for streams below 2^31 vectors; else by the slow way.

struct Divider { u32 divisor, factor, shift; };
struct Side {
    u64 base;      // bytes
    u64 start;     // vectors
    u64 run;       // vectors
    Divider by_run;
    u32 dims;
    u64 counts[8]; // major first
    u64 strides[8]; // bytes
    Divider by_count[8];
};

__device__ __forceinline__ u32 quotient(u32 n, const Divider& d) { return (__umulhi(n, d.factor) + n) >> d.shift; }

template <bool WIDE> __device__ __forceinline__ u64 address(const Side& side, u64 vector, u32 width) {
    if (WIDE) {
        u64 at = side.start + vector, index = at / side.run;
        u64 address = side.base + (at - index * side.run) * width;
        for (int dim = (int)side.dims - 1; dim >= 0; dim--) {
            u64 rest = index / side.counts[dim];
            address += (index - rest * side.counts[dim]) * side.strides[dim];
            index = rest;
        }
        return address;
    }
    u32 at = (u32)(side.start + vector), index = quotient(at, side.by_run);
    u64 address = side.base + (u64)(at - index * (u32)side.run) * width;
#pragma unroll
    for (int dim = 7; dim >= 0; dim--) {
        if (dim < (int)side.dims) {
            u32 rest = quotient(index, side.by_count[dim]);
            address += (u64)(index - rest * (u32)side.counts[dim]) * side.strides[dim];
            index = rest;
        }
    }
    return address;
}

constexpr int EACH = 4;

template <typename V, bool WIDE> __device__ __forceinline__ void copy(const Side& from, const Side& into, u64 vectors) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x; first < vectors; first += stride * EACH) {
        V values[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            u64 at = first + i * stride;
            if (at < vectors) values[i] = *reinterpret_cast<const V*>(address<WIDE>(from, at, sizeof(V)));
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            u64 at = first + i * stride;
            if (at < vectors) *reinterpret_cast<V*>(address<WIDE>(into, at, sizeof(V))) = values[i];
        }
    }
}

#define COPY(name, type)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) name(__grid_constant__ const Side from, __grid_constant__ const Side into, u64 vectors) { \
        copy<type, false>(from, into, vectors);                                                                           \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) name##_wide(__grid_constant__ const Side from, __grid_constant__ const Side into, u64 vectors) { \
        copy<type, true>(from, into, vectors);                                                                            \
    }
COPY(copy_1, u8)
COPY(copy_2, u16)
COPY(copy_4, u32)
COPY(copy_8, uint2)
COPY(copy_16, uint4)

// Combining what arrives with what is there: the same arithmetic as on the host, element by element. A NaN stays one; which of its many forms it
// has is the hardware's.

__device__ __forceinline__ float largest(float a, float b) {
    if (a > b || (a == b && !(__float_as_uint(a) >> 31))) return a;
    return a <= b ? b : __uint_as_float(0x7fc00000u);
}
__device__ __forceinline__ double largest(double a, double b) {
    if (a > b || (a == b && !(__double_as_longlong(a) < 0))) return a;
    return a <= b ? b : __longlong_as_double(0x7ff8000000000000ll);
}

struct Sum { template <typename T> static __device__ T of(T a, T b) { return a + b; } };
struct Max { template <typename T> static __device__ T of(T a, T b) { return largest(a, b); } };
struct Min { template <typename T> static __device__ T of(T a, T b) { return -largest(-a, -b); } };

template <typename OP> struct Whole { template <typename T> static __device__ T of(T a, T b); };
template <> struct Whole<Sum> { template <typename T> static __device__ T of(T a, T b) { return (T)(a + b); } };
template <> struct Whole<Max> { template <typename T> static __device__ T of(T a, T b) { return a > b ? a : b; } };
template <> struct Whole<Min> { template <typename T> static __device__ T of(T a, T b) { return a < b ? a : b; } };

struct f64 { typedef double Stored; template <typename OP> static __device__ double of(double a, double b) { return OP::of(a, b); } };
struct f32 { typedef float Stored; template <typename OP> static __device__ float of(float a, float b) { return OP::of(a, b); } };
struct brain {
    typedef bf16 Stored;
    template <typename OP> static __device__ bf16 of(bf16 a, bf16 b) { return of_f32<bf16>(OP::of(to_f32(a), to_f32(b))); }
};
struct f16 {
    typedef u16 Stored;
    static __device__ float to(u16 x) { float y; asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "h"(x)); return y; }
    static __device__ u16 from(float x) { u16 y; asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(y) : "f"(x)); return y; }
    template <typename OP> static __device__ u16 of(u16 a, u16 b) { return from(OP::of(to(a), to(b))); }
};
// Eight bits: a sign, EXPONENT bits of exponent, the rest mantissa; without infinities what is too large becomes a NaN.
template <int EXPONENT, bool INFINITIES> struct Eight {
    typedef u8 Stored;
    static constexpr int MANTISSA = 7 - EXPONENT, BIAS = (1 << (EXPONENT - 1)) - 1;
    static __device__ double power(int e) { return __longlong_as_double((i64)(e + 1023) << 52); }
    static __device__ float to(u8 x) {
        float sign = x & 0x80 ? -1.0f : 1.0f, mantissa = (float)(x & ((1 << MANTISSA) - 1));
        int exponent = (x & 0x7f) >> MANTISSA;
        if (INFINITIES && exponent == (1 << EXPONENT) - 1) return mantissa == 0.0f ? sign * __uint_as_float(0x7f800000u) : __uint_as_float(0x7fc00000u);
        if (!INFINITIES && (x & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000u);
        if (exponent == 0) return sign * mantissa * (float)power(1 - BIAS - MANTISSA);
        return sign * (mantissa + (float)(1 << MANTISSA)) * (float)power(exponent - BIAS - MANTISSA);
    }
    static __device__ u8 from(float x) {
        u8 sign = (u8)((__float_as_uint(x) >> 24) & 0x80);
        if (x != x) return sign | 0x7f;
        float magnitude = fabsf(x);
        int exponent = (int)(__float_as_uint(magnitude) >> 23) - 127;
        if (exponent < 1 - BIAS) exponent = 1 - BIAS;
        double steps = rint((double)magnitude / power(exponent - MANTISSA));
        i64 bits = steps < 1e9 ? ((i64)(exponent + BIAS - 1) << MANTISSA) + (i64)steps : 0x7fffffff;
        i64 bad = INFINITIES ? ((1 << EXPONENT) - 1) << MANTISSA : 0x7f;
        return sign | (u8)(bits < bad ? bits : bad);
    }
    template <typename OP> static __device__ u8 of(u8 a, u8 b) { return from(OP::of(to(a), to(b))); }
};
typedef Eight<4, false> f8e4m3;
typedef Eight<5, true> f8e5m2;
struct int64 { typedef i64 Stored; template <typename OP> static __device__ i64 of(i64 a, i64 b) { return Whole<OP>::of(a, b); } };
struct int32 { typedef int Stored; template <typename OP> static __device__ int of(int a, int b) { return Whole<OP>::of(a, b); } };
struct int8 { typedef signed char Stored; template <typename OP> static __device__ signed char of(signed char a, signed char b) { return Whole<OP>::of(a, b); } };
struct uint8 { typedef u8 Stored; template <typename OP> static __device__ u8 of(u8 a, u8 b) { return Whole<OP>::of(a, b); } };
// A sum of truths is true if one of them is.
template <typename OP> struct Truth { static __device__ u8 of(u8 a, u8 b) { return Whole<OP>::of(a, b); } };
template <> struct Truth<Sum> { static __device__ u8 of(u8 a, u8 b) { return a | b; } };
struct boolean { typedef u8 Stored; template <typename OP> static __device__ u8 of(u8 a, u8 b) { return Truth<OP>::of(a, b); } };

template <typename E, typename OP> __device__ __forceinline__ void combine(const Side& from, const Side& into, u64 elements) {
    typedef typename E::Stored S;
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += stride) {
        S* there = reinterpret_cast<S*>(address<true>(into, i, sizeof(S)));
        *there = E::template of<OP>(*there, *reinterpret_cast<const S*>(address<true>(from, i, sizeof(S))));
    }
}

#define COMBINE(dtype, type, op, Op)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) combine_##dtype##_##op(__grid_constant__ const Side from, __grid_constant__ const Side into, u64 elements) { \
        combine<type, Op>(from, into, elements);                                                                           \
    }
#define COMBINES(dtype, type) COMBINE(dtype, type, sum, Sum) COMBINE(dtype, type, max, Max) COMBINE(dtype, type, min, Min)
COMBINES(f64, f64)
COMBINES(f32, f32)
COMBINES(bf16, brain)
COMBINES(f16, f16)
COMBINES(f8e4m3, f8e4m3)
COMBINES(f8e5m2, f8e5m2)
COMBINES(i64, int64)
COMBINES(i32, int32)
COMBINES(i8, int8)
COMBINES(u8, uint8)
COMBINES(bool, boolean)
