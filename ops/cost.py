"""Time of one attention call over a ring, from measured times of its parts: the model of the paper's table 4.

    flat            sum over the first W - 1 hops of max(comp, intra, inter)  +  comp of the last hop
    hierarchical    sum over the outer steps of max(inter, sum over inner steps of max(comp, intra))
                    the last inner step sends nothing around, the last outer step sends nothing along
    both            + index + cpu

Of the paper, 32 GPUs as 4 nodes of 8 (comp 0.51, intra 0.13, inter 0.98, index 1.13, cpu 2.08 ms):

    flat            31 * 0.98 + 0.51 + 1.13 + 2.08 = 34.10 ms
    hierarchical    32 * 0.51 + 1.13 + 2.08        = 19.53 ms

The paper takes one comp for all hops. Here comp is the mean over ranks and hops, and a hop lasts as long as its busiest
rank: comp * max_r w[r, t] / mean w, with w of `ops/balance.py`. That is an upper bound: ranks meet their neighbours at
a hop, not all others. A flat ring is taken to cross nodes; a ring within one node is hierarchical with one outer step.
Source: MTraining, appendix C.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Times:
    """Measured times of one attention call: of a hop's kernels, of a hop within and between nodes, and once a call."""

    comp_ms: float
    intra_ms: float
    inter_ms: float
    index_ms: float = 0.0
    cpu_ms: float = 0.0


def predict_ms(times: Times, work: torch.Tensor, inner: int | None = None) -> float:
    """Time of a call whose pairs are work [W, hops], on a flat ring or in inner circles of `inner` ranks.

    Work [layers, W, hops] gives the mean over the layers.
    """
    if work.dim() == 3:
        return sum(predict_ms(times, layer, inner) for layer in work) / len(work)
    comp = times.comp_ms * work.amax(0) / work.mean()
    ring = _flat_ms(times, comp) if inner is None else _hierarchical_ms(times, comp.view(-1, inner))
    return ring.item() + times.index_ms + times.cpu_ms


def _flat_ms(times: Times, comp: torch.Tensor) -> torch.Tensor:
    """comp [hops]."""
    return comp[:-1].clamp_min(max(times.intra_ms, times.inter_ms)).sum() + comp[-1]


def _hierarchical_ms(times: Times, comp: torch.Tensor) -> torch.Tensor:
    """comp [outer steps, inner steps]."""
    outer = comp[:, :-1].clamp_min(times.intra_ms).sum(1) + comp[:, -1]
    return outer[:-1].clamp_min(times.inter_ms).sum() + outer[-1]
