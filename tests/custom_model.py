"""A model that is neither HuggingFace's nor Llama-like: learned positions, LayerNorm, one fused projection, GELU."""

import torch
from torch import nn

from mtraining_nns import nnscaler_ops
from mtraining_nns.ops.config import AttentionConfig

WORDS, WIDTH, HEADS, KV_HEADS, DIM = 97, 48, 6, 2, 16


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
    """samples -> the summed loss."""

    def __init__(self, attention: AttentionConfig, *, seq_len: int, layers: int = 2, longest: int = 512):
        super().__init__()
        torch.manual_seed(0)
        self.settings, self.seq_len = nnscaler_ops.settings_of(attention), seq_len
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(longest, WIDTH)
        self.layers = nn.ModuleList(Block(layer, self.settings, seq_len) for layer in range(layers))
        self.after, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, samples):
        position_ids = nnscaler_ops.ordered(samples["position_ids"], self.settings, self.seq_len)
        x = self.words(samples["input_ids"]) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return nnscaler_ops.linear_cross_entropy(self.after(x), self.head.weight, samples["labels"])


class Mixing(Custom):
    """Mixes tokens outside attention, which no cut along the tokens can follow."""

    def forward(self, samples):
        x = self.words(samples["input_ids"])
        x = x * x.softmax(dim=1)
        for layer in self.layers:
            x = layer(x)
        return nnscaler_ops.linear_cross_entropy(x, self.head.weight, samples["labels"])


class Unknown(Custom):
    """Calls an operator that nnScaler has no annotation for."""

    def forward(self, samples):
        x = self.words(samples["input_ids"]).unflatten(-1, (-1, 2)).flatten(2)
        for layer in self.layers:
            x = layer(x)
        return nnscaler_ops.linear_cross_entropy(x, self.head.weight, samples["labels"])
