"""Cross entropy of a linear head, a chunk of tokens at a time: the S x V logits never exist.

    loss = linear_cross_entropy(hidden, lm_head.weight, labels)        # fp32 sum over the valid tokens

The gradients are computed in the forward pass, while a chunk's logits are at hand, so each chunk costs three matrix
products (logits, d hidden, d weight) and nothing is recomputed. Memory beyond the inputs, with C tokens per chunk,
T tokens, V words, D features and b bytes per element of `hidden`:

    4 V D  (d weight, fp32)  +  b T D  (d hidden)  +  (4 + b) C V  (a chunk's logits, then their gradients)

V = 151936, D = 2048, T = 65536 in bf16 with C = 1024: 1.25 + 0.27 + 0.93 = 2.45 GB, where the logits alone are 40 GB.
Do not use it where the gradient of single token losses is needed: only their sum can be differentiated.

Shapes: T tokens (batch and sequence flattened), D features, V words, C tokens of one chunk.
"""

import torch

IGNORE = -100
WEIGHT_ROWS = 16384  # rows of d weight per product, so that its bf16 partial result stays small


def linear_cross_entropy(hidden, weight, labels, *, chunk=1024):
    """Sum over valid tokens of -log softmax(hidden @ weight.T)[label], softmax in fp32.

    hidden [..., D] and weight [V, D] of one dtype, labels [...] int64 with -100 for ignored tokens -> fp32 scalar.
    Gradients reach hidden and weight; d weight is accumulated in fp32 over the chunks and rounded once. All labels
    ignored gives loss 0 and gradients 0.
    """
    if not torch.is_grad_enabled():
        return token_losses(hidden, weight, labels, chunk=chunk).sum()
    hidden, labels = _flatten(hidden, weight, labels)
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk)


@torch.no_grad()
def token_losses(hidden, weight, labels, *, chunk=1024):
    """-log softmax(hidden @ weight.T)[label] of every token, fp32, in the shape of labels; 0 where ignored. No grad."""
    shape = labels.shape
    hidden, labels = _flatten(hidden, weight, labels)
    losses = [_chunk_losses(h @ weight.t(), y)[0] for h, y in zip(hidden.split(chunk), labels.split(chunk))]
    return torch.cat(losses).view(shape)


def _flatten(hidden, weight, labels):
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(labels.shape)}"
        raise ValueError(f"expected hidden [..., D], weight [V, D], labels [...], got {shapes}")
    return hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)


def _chunk_losses(logits, labels):
    """(losses [C], exp(logits - row maximum) [C, V], its row sums [C, 1]) in fp32.

    torch.logsumexp would hold a second copy of the logits; here one buffer is written over.
    """
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    target = logits.gather(1, labels.clamp_min(0).unsqueeze(1)) - top
    exp = logits.sub_(top).exp_()
    total = exp.sum(-1, keepdim=True)
    losses = (total.log() - target).squeeze(1)
    return torch.where(labels == IGNORE, 0.0, losses), exp, total


def _logits_grad(exp, total, labels, dtype):
    """softmax - onehot, zero in ignored rows, written over exp [C, V] and returned in `dtype`."""
    grad = exp.div_(total)
    grad.scatter_add_(1, labels.clamp_min(0).unsqueeze(1), torch.full_like(total, -1.0))
    return grad.mul_((labels != IGNORE).unsqueeze(1)).to(dtype)


def _add_weight_grad(total, grad, hidden):
    """total [V, D] fp32 += grad [C, V]^T hidden [C, D], a band of rows at a time."""
    for start in range(0, total.shape[0], WEIGHT_ROWS):
        band = slice(start, start + WEIGHT_ROWS)
        total[band].add_(grad[:, band].t() @ hidden)


def _add_chunk(hidden, weight, labels, d_hidden, d_weight):
    """Loss of one chunk; writes its d hidden [C, D] and adds to d weight [V, D], either of which may be None."""
    losses, exp, total = _chunk_losses(hidden @ weight.t(), labels)
    grad = _logits_grad(exp, total, labels, hidden.dtype)
    if d_hidden is not None:
        torch.mm(grad, weight, out=d_hidden)
    if d_weight is not None:
        _add_weight_grad(d_weight, grad, hidden)
    return losses.sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk):
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            loss += _add_chunk(hidden[rows], weight, labels[rows], d_hidden[rows] if need_hidden else None, d_weight)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        # In place, for there may be no room for a second d weight; autograd then refuses a second backward pass.
        if d_hidden is not None:
            d_hidden = d_hidden.mul_(d_loss)
        if d_weight is not None:
            d_weight = d_weight.mul_(d_loss).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None
