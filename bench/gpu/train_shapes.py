"""What the models of gpt-*.toml and llama-1b.toml compute, from their shapes."""

PEAK = 989e12
TOKENS = 1024

SHAPES = {  # layers, width, heads, KV heads, hidden, matrices of a feed-forward branch, vocabulary, samples
    "gpt-350m": (24, 1024, 16, 16, 4096, 2, 50304, 16),
    "gpt-1.3b": (24, 2048, 16, 16, 8192, 2, 50304, 8),
    "gpt-2.6b": (32, 2560, 32, 32, 10240, 2, 50304, 8),
    "llama-1b": (16, 2048, 32, 8, 8192, 3, 128256, 8),
}


def operations(layers, width, heads, kv_heads, hidden, matrices, vocab, samples):
    """Of a step: forward once, backward twice; a causal pair once; the head, but not the embedding."""
    columns = width // heads
    weights = layers * (width * (heads + 2 * kv_heads) * columns + width * width + matrices * width * hidden) + vocab * width
    pairs = TOKENS * (TOKENS + 1) // 2
    attention = layers * 2 * 2 * pairs * width
    return 3 * (2 * weights * TOKENS * samples + attention * samples)
