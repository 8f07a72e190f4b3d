// Products that the library does not know: of no depth, or so aligned that it has no algorithm. Correct and plain: 32x32 sums a block, in a fixed order.
//
//     c[i][row][col] = alpha sum_k a[i](row, k) b[i](k, col) + beta c

struct Operand { u64 base; u64 row, col, next; }; // elements from row to row, column to column, product to product

constexpr int TILE = 32;

template <typename T, typename R> __device__ __forceinline__ void multiply(const Operand& a, const Operand& b, const Operand& c, u32 rows, u32 cols, u32 inner, float alpha, float beta) {
    __shared__ float left[TILE][TILE + 1], right[TILE][TILE + 1];
    const T* x = reinterpret_cast<const T*>(a.base) + blockIdx.y * a.next;
    const T* y = reinterpret_cast<const T*>(b.base) + blockIdx.y * b.next;
    R* z = reinterpret_cast<R*>(c.base) + blockIdx.y * c.next;
    u32 across = (cols + TILE - 1) / TILE, first_row = blockIdx.x / across * TILE, first_col = blockIdx.x % across * TILE;
    u32 lane = threadIdx.x % TILE, group = threadIdx.x / TILE; // 8 groups, of 4 rows each
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 k = 0; k < inner; k += TILE) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 r = group + 8 * i;
            left[r][lane] = first_row + r < rows && k + lane < inner ? to_f32(x[(first_row + r) * a.row + (k + lane) * a.col]) : 0.0f;
            right[r][lane] = k + r < inner && first_col + lane < cols ? to_f32(y[(k + r) * b.row + (first_col + lane) * b.col]) : 0.0f;
        }
        __syncthreads();
        for (int d = 0; d < TILE; d++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] += left[group + 8 * i][d] * right[d][lane];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 r = first_row + group + 8 * i;
        if (r < rows && first_col + lane < cols) {
            R* at = z + r * c.row + (first_col + lane) * c.col;
            *at = of_f32<R>(alpha * sum[i] + (beta != 0.0f ? beta * to_f32(*at) : 0.0f));
        }
    }
}

#define MULTIPLY(T, R, name)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) name(Operand a, Operand b, Operand c, u32 rows, u32 cols, u32 inner, float alpha, float beta) { \
        multiply<T, R>(a, b, c, rows, cols, inner, alpha, beta);                                                               \
    }
MULTIPLY(float, float, multiply_f32_f32)
MULTIPLY(bf16, bf16, multiply_bf16_bf16)
MULTIPLY(bf16, float, multiply_bf16_f32)
