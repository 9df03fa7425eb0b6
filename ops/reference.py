"""The truth that tests compare with: attention under an explicit mask, in fp32, and the pattern's rule stated plainly.

It costs S x S memory per head and a Python loop per query. Only tests call it; nothing trains or evaluates with it.
"""

import torch

from mtraining_nns.ops.config import AttentionConfig


def masked_attention(q, k, v, mask, scale=None):
    """Attention over the pairs that `mask` keeps.

    q [B, S, N, D], k and v [B, S, H, D] with N a multiple of H, mask bool [B, N, S, S] or broadcastable.
    Returns out fp32 [B, S, N, D] and lse fp32 [B, N, S]; a row with an empty mask gives 0 and -inf. Differentiable.
    """
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.float().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q.float(), k) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    empty = ~mask.any(-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), -1)
    weights = torch.exp(scores - lse[..., None])
    return torch.einsum("bnqk,bknd->bqnd", weights, v), lse.masked_fill(empty[..., 0], -torch.inf)


def causal_mask(seq_len, device=None):
    """bool [1, 1, S, S]."""
    return torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).tril()[None, None]


def vertical_slash_mask(q, k, config: AttentionConfig, scale=None):
    """bool [B, N, S, S]: algorithm 1 of MTraining, one head and one query at a time."""
    batch, seq_len, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    group = heads // k.shape[2]
    mask = torch.zeros(batch, heads, seq_len, seq_len, dtype=torch.bool)
    for b in range(batch):
        for n in range(heads):
            columns, bins = _masses(q[b, :, n].float(), k[b, :, n // group].float(), config, scale)
            kept = set(_top(columns, config.p_v, config.k_v, config)[: config.cap]) | set(range(config.sinks))
            near = -(-config.local // config.block)
            kept_bins = set(_top(bins, config.p_s, config.k_s, config)) | set(range(near))
            diagonals = {0} | kept_bins | {b + 1 for b in kept_bins}
            rows, cols = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
            distance = rows // config.block - cols // config.block
            slash = torch.isin(distance, torch.tensor(sorted(diagonals)))
            vertical = torch.isin(cols, torch.tensor(sorted(kept), dtype=torch.long))
            mask[b, n] = (slash | vertical) & (cols <= rows)
    return mask


def _masses(q, k, config, scale):
    seq_len = len(q)
    columns, bins = (torch.zeros(n, dtype=torch.float32) for n in (seq_len, -(-seq_len // config.block)))
    for row in range(max(0, seq_len - config.last_q), seq_len):
        weights = torch.softmax(q[row] @ k[: row + 1].T * scale, -1)
        columns[: row + 1] += weights
        for col in range(row + 1):
            bins[(row - col) // config.block] += weights[col]
    return columns, bins


def _top(mass, share, budget, config):
    order = mass.argsort(descending=True, stable=True).tolist()
    if config.budget == "fixed":
        return order[:budget]
    if share == 1.0:
        return order
    reached, kept = 0.0, []
    for entry in order:
        kept.append(entry)
        reached += mass[entry].item()
        if reached >= share * mass.sum().item():
            break
    return kept
