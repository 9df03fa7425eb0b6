"""Joining attention over two disjoint sets of keys, in fp32.

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

A partial result keeps out normalised by its own lse; a row that saw nothing has out 0 and lse -inf.
"""

from typing import NamedTuple

import torch


class Partial(NamedTuple):
    """Attention of all queries over some of the keys. out: [B, S, N, D]; lse: fp32 [B, N, S], natural log."""

    out: torch.Tensor
    lse: torch.Tensor


def merge(a: Partial | None, b: Partial) -> Partial:
    """Attention over the keys of both; exactly `a` where `b` saw nothing and the other way round."""
    if a is None:
        return b
    lse = torch.logaddexp(a.lse, b.lse)
    return Partial(_weigh(a, lse) + _weigh(b, lse), lse)


def _weigh(part: Partial, lse: torch.Tensor) -> torch.Tensor:
    # -inf - -inf would be nan: a row that saw nothing weighs nothing
    weight = torch.where(part.lse == -torch.inf, 0.0, torch.exp(part.lse - lse))
    return part.out.float() * weight.transpose(1, 2)[..., None]
