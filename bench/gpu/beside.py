"""What torch takes for some of the same on this GPU: norms, GELU, gradients of biases by torch.compile, and plain products."""

import torch

ROWS, WIDTH, WIDE = 8192, 2048, 8192
PRODUCTS = [(ROWS, 6144, WIDTH), (ROWS, WIDTH, WIDTH), (ROWS, WIDE, WIDTH), (ROWS, WIDTH, WIDE), (ROWS, 50304, WIDTH)]


def microseconds(call, times=20):
    for _ in range(3):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times * 1e3


def numbers(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def main():
    functional = torch.nn.functional
    x, residual, gamma, wide = numbers(ROWS, WIDTH), numbers(ROWS, WIDTH), numbers(WIDTH), numbers(ROWS, WIDE)
    norm = torch.compile(lambda x, r: (x + r, functional.layer_norm(x + r, (WIDTH,), gamma, gamma)))
    gelu = torch.compile(lambda y: functional.gelu(y, approximate="tanh"))
    print(f"torch.compile layer norm + residual forward bf16 {microseconds(lambda: norm(x, residual)):10.1f} us")
    print(f"torch.compile gelu forward bf16 {microseconds(lambda: gelu(wide)):10.1f} us")
    print(f"torch bias gradient bf16 {microseconds(lambda: wide.sum(0, dtype=torch.float32)):10.1f} us")
    for rows, cols, inner in PRODUCTS:
        a, b = numbers(rows, inner), numbers(inner, cols)
        took = microseconds(lambda: a @ b, 10)
        print(f"torch product {rows}x{cols}x{inner} {took:10.1f} us {2 * rows * cols * inner / took / 1e6:8.1f} TFLOP/s")


main()
