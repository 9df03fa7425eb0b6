"""Floating point operations of training, counted in one place for plans, logs and benchmarks.

    token, forward       2 x (weights of the layers' matrix products + those of the head)
    pair, forward        4 x head dim: its score and its part of the sum of values
    backward             twice the forward pass

These are operations of the model: what recomputation and kernels do twice is not counted, so that MFU (their rate over
the peak of the GPUs) does not rise with wasted work. Kernels are measured otherwise: `kernel_flops`, by which a
backward pass that computes its scores again does 2.5 times the forward pass. Norms, rotations and activations are left
out.

A pair is a query and a key of one head in one layer. Dense-equivalent MFU takes all causal pairs, whatever was kept.
Source: PaLM, appendix B, with causal pairs instead of all.
"""

from mtraining_nns.plan.shape import Shape

BACKWARD = 2  # times the forward pass
KERNEL_BACKWARD = 2.5  # of attention, scores computed again


def causal_pairs(shape: Shape, seq_len: int) -> int:
    """Query-key pairs of one sequence, all heads and layers."""
    return shape.layers * shape.heads * seq_len * (seq_len + 1) // 2


def linear_flops(shape: Shape) -> int:
    """Of a token in the forward pass of all layers."""
    return 2 * shape.layers * shape.linear


def head_flops(shape: Shape) -> int:
    """Of a token in the forward pass of the head."""
    return 2 * shape.vocabulary * shape.hidden


def attention_flops(shape: Shape, pairs: float) -> float:
    """Of pairs in the forward pass."""
    return 4 * shape.head_dim * pairs


def training_flops(shape: Shape, *, tokens: float, pairs: float) -> float:
    """Of forward and backward pass."""
    forward = tokens * (linear_flops(shape) + head_flops(shape)) + attention_flops(shape, pairs)
    return (1 + BACKWARD) * forward


def kernel_flops(head_dim: int, pairs: float, *, backward: bool) -> float:
    """Of an attention kernel, as `docs/benchmarks.md` counts them."""
    return 4 * head_dim * pairs * (KERNEL_BACKWARD if backward else 1)
