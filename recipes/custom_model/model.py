"""A model of one's own: learned positions, LayerNorm, one fused projection, GELU; nothing of HuggingFace's.

What makes it trainable over a ring is in three lines: position ids pass through `nnscaler_ops.ordered`, attention is
`nnscaler_ops.attention`, the loss `nnscaler_ops.linear_cross_entropy`, all called through the module. Everything else
is plain PyTorch that nnScaler can cut along the tokens (docs/custom_models.md).
"""

import torch
from torch import nn

from mtraining_nns import nnscaler_ops
from mtraining_nns.ops.config import AttentionConfig

WIDTH, HEADS, KV_HEADS, DIM = 48, 6, 2, 16


class Block(nn.Module):
    def __init__(self, layer: int, settings: str, seq_len: int):
        super().__init__()
        self.layer, self.settings, self.seq_len = layer, settings, seq_len
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(HEADS * DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
        q, k, v = (part.view(*x.shape[:2], -1, DIM) for part in (q, k, v))
        mixed = nnscaler_ops.attention(q, k, v, self.settings, layer=self.layer, seq_len=self.seq_len)
        x = x + self.out(mixed.flatten(2))
        return x + self.mlp(self.between(x))


class Custom(nn.Module):
    """samples -> the summed loss. words: of the vocabulary; places: positions it can learn, at least seq_len."""

    def __init__(
        self, attention: AttentionConfig, *, seq_len: int, layers: int = 2, words: int = 97, places: int = 8192
    ):
        super().__init__()
        torch.manual_seed(0)
        self.settings, self.seq_len = nnscaler_ops.settings_of(attention), seq_len
        self.words, self.places = nn.Embedding(words, WIDTH), nn.Embedding(places, WIDTH)
        self.layers = nn.ModuleList(Block(layer, self.settings, seq_len) for layer in range(layers))
        self.after, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, samples):
        position_ids = nnscaler_ops.ordered(samples["position_ids"], self.settings, self.seq_len)
        x = self.words(samples["input_ids"]) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return nnscaler_ops.linear_cross_entropy(self.after(x), self.head.weight, samples["labels"])
