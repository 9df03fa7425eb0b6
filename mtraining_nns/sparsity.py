"""How sparse attention and its gradient are, side by side: the measurement of the paper's figure 2.

    A  = softmax(S), S = q k^T * scale         attention weights of a query over all its keys
    dL/dS = A * (dL/dA - sum A dL/dA)          gradient of the loss with respect to the scores, dL/dA = dout v^T

For some queries of each layer: the smallest share of their keys that holds 95 % of the mass of |A|, the same of
|dL/dS|, and the mass of |dL/dS| on the keys that A chose, since the backward pass can only use the forward's index.

`Tap` stands in for the operator of a model and measures in its backward pass, when dout is there. Rows are computed
against every key, also those that the operator left out, a few at a time; no S x S tensor exists. q, k and dout are
those of the model as it ran: with attention.pattern=dense they are full attention's.

Letters: B batch, S keys, R rows measured, N query heads, H key heads, D head dim. Source: MTraining, section 3.2.
"""

from typing import NamedTuple

import torch

from mtraining_nns.ops.patterns import Place, vertical_slash
from mtraining_nns.ops.patterns.top_p import fewest

MASS = 0.95
CHUNK_ELEMENTS = 1 << 24  # weights held at once


class Sparsity(NamedTuple):
    """Means over the rows and heads of a layer; all of them shares in [0, 1]."""

    weights: float  # keys that hold 95 % of |A|
    gradients: float  # keys that hold 95 % of |dL/dS|
    inherited: float  # of |dL/dS|, on the keys that hold 95 % of |A|


class Tap:
    """An operator that computes as `operator` does and, in the backward pass, measures `rows` of each layer.

    found: {layer: Sparsity} after the backward pass. budgets: {layer: [k_v, k_s] of each head} of vertical_slash.
    """

    def __init__(self, operator, rows: list[int]):
        self.operator, self.rows = operator, rows
        self.found: dict[int, Sparsity] = {}
        self.budgets: dict[int, list[list[int]]] = {}

    def __call__(self, q, k, v, *, layer: int, seq_len=None, scale=None):
        out = self.operator(q, k, v, layer=layer, seq_len=seq_len, scale=scale)
        if out.requires_grad:  # not in the first of two forward passes under activation checkpointing
            kept = q.detach(), k.detach(), v.detach()
            if self.operator.config.pattern == "vertical_slash":
                self.budgets[layer] = self._budgets(*kept[:2], layer, scale)

            def measure(dout):
                self.found[layer] = measure_rows(*kept, dout, self.rows, scale=scale)

            out.register_hook(measure)
        return out

    def _budgets(self, q, k, layer: int, scale: float | None) -> list[list[int]]:
        place = Place(self.operator.last[layer][1], self.operator.ring)
        config = self.operator.config.of_layer(layer)
        found = vertical_slash.budgets(q, k, place, config, q.shape[-1] ** -0.5 if scale is None else scale)
        return torch.stack(found, -1)[0].tolist()

    def prepare(self, *shape) -> None:
        """Tell the operator a model's shape."""
        self.operator.prepare(*shape)


def sampled_rows(seq_len: int, count: int) -> list[int]:
    """Up to `count` queries spread evenly over the second half, where rows are long; never the last one, which predicts
    nothing and in the last layer has no gradient.

    >>> sampled_rows(64, 4)
    [39, 47, 55, 62]
    """
    first, last = seq_len // 2, max(seq_len - 2, 0)
    count = min(count, last - first + 1)
    return sorted({last - (last - first + 1) * i // max(count, 1) for i in range(count)})


@torch.no_grad()
def measure_rows(q, k, v, dout, rows: list[int], *, scale: float | None = None) -> Sparsity:
    """q, dout [B, S, N, D], k and v [B, S, H, D] -> means over rows, heads and batch."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    step = max(1, CHUNK_ELEMENTS // (q.shape[0] * q.shape[2] * q.shape[1]))
    parts = []
    for first in range(0, len(rows), step):
        at = torch.tensor(rows[first : first + step], device=q.device)
        weights, gradients = _rows(q[:, at], k, v, dout[:, at], at, scale)
        parts.append(_shares(weights, gradients.abs(), at + 1))
    return Sparsity(*torch.cat(parts, 1).nanmean(1).tolist())


def _rows(q, k, v, dout, at, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(A, dL/dS) fp32 [B, H, group, R, S] of the queries at positions `at`; 0 at later keys."""
    k, v = k.float(), v.float()
    q, dout = (x.float().unflatten(2, (k.shape[2], -1)) for x in (q, dout))
    later = torch.arange(k.shape[1], device=k.device) > at[:, None]
    weights = torch.einsum("brhgd,bshd->bhgrs", q, k).mul_(scale).masked_fill_(later, -torch.inf).softmax(-1)
    toward = torch.einsum("brhgd,bshd->bhgrs", dout, v)
    return weights, weights * (toward - (weights * toward).sum(-1, keepdim=True))


def _shares(weights, gradients, keys) -> torch.Tensor:
    """float64 [3, rows]: shares of the keys for weights and gradients, and the inherited mass; NaN without gradient."""
    chosen, needed = (fewest(mass, MASS) for mass in (weights, gradients))
    total = gradients.double().sum(-1)
    inherited = (gradients.double() * chosen).sum(-1) / total  # 0 / 0 where no loss depends on the row
    of_weights, of_gradients = (kept.sum(-1).double() / keys for kept in (chosen, needed))
    return torch.stack([of_weights, of_gradients.where(total > 0, torch.nan), inherited]).flatten(1)
