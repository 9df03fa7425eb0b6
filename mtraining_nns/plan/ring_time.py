"""How long the hops of one attention call take on a ring: kernels of its busiest rank, and transfers that show.

    hop by hop      `ops/cost.py`: a hop lasts as long as its kernels or its transfer, whichever is longer
    gathered        an outer step has the keys of a node at once; their first chunk comes before anything is computed

How the pairs are spread over ranks and hops is counted (`ops/balance.py`) from an index: recorded ones if they are
given, else a generated one of the density. Patterns that choose for every row have no generated index; for them stand
measured factors. Links of a ring are taken to be idle otherwise.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from mtraining_nns.generated import Generated
from mtraining_nns.ops import balance, passes
from mtraining_nns.ops.cost import Times, predict_ms
from mtraining_nns.ops.layout import Layout
from mtraining_nns.plan.attention_memory import hop_bytes
from mtraining_nns.plan.constants import Constants
from mtraining_nns.plan.setting import Setting

# Busiest rank over the mean one, at every hop, of patterns that choose for every row. zigzag: the paper, 95 % sparsity
# on 32 ranks; striped: recorded on 64K tokens, 32 ranks (docs/balance.md); contiguous: the last rank sees all keys.
ROW_IMBALANCE = {"zigzag": 3.17, "striped": 1.22, "contiguous": 2.0}


@dataclass(frozen=True)
class Links:
    """Milliseconds of a hop within an inner circle, and between circles or machines: 0 where none is crossed."""

    intra_ms: float
    inter_ms: float


def links(setting: Setting, constants: Constants, *, backward: bool) -> Links:
    """Of the keys of a rank; back with sums of their gradients, in fp32 except where they go straight home."""
    sent, b = hop_bytes(setting), setting.element_bytes
    within = sent * (2 if setting.mode == "gather" else 1 + 4 / b) if backward else sent
    between = sent * (1 + 4 / b) if backward else sent
    if setting.cp > setting.node:
        latency_ms, gb_s = constants["inter_latency_ms"], constants["inter_gb_s"]
    else:  # two levels within one machine
        latency_ms, gb_s = constants["intra_latency_ms"], constants["intra_gb_s"]
    intra = constants["intra_latency_ms"] + within / constants["intra_gb_s"] / 1e6
    inter = latency_ms + between / gb_s / 1e6
    crosses = setting.cp > min(setting.within, setting.node)
    return Links(intra if setting.cp > 1 else 0.0, inter if crosses else 0.0)


def call_ms(setting: Setting, comp_ms: float, on: Links, *, dense: bool, indices=()) -> float:
    """One pass of a layer. comp_ms: kernels of the mean rank; indices: recorded ones."""
    if setting.cp == 1:
        return comp_ms
    if dense or setting.attention.pattern in ("vertical_slash", "dense") or indices:
        work = _work(setting, dense, indices)
    else:
        work = torch.ones(1, setting.cp, setting.cp, dtype=torch.float64)
        work[:, 0] *= ROW_IMBALANCE[setting.attention.layout]
        work[:, 1:] *= (setting.cp - ROW_IMBALANCE[setting.attention.layout]) / (setting.cp - 1)
    if setting.mode == "ring":
        times = Times(comp_ms=comp_ms / setting.cp, intra_ms=on.intra_ms, inter_ms=on.inter_ms)
        return predict_ms(times, work, None if setting.leaves_node else setting.within)
    return sum(_gathered_ms(setting, comp_ms * layer / layer.sum(1).mean(), on) for layer in work) / len(work)


def _gathered_ms(setting: Setting, comp: torch.Tensor, on: Links) -> float:
    """comp [W, hops] in ms."""
    steps = comp.unflatten(1, (-1, setting.within)).sum(2).amax(0)
    first = on.intra_ms * (setting.within - 1) / passes.CHUNKS
    return first + steps[:-1].clamp_min(on.inter_ms).sum().item() + steps[-1].item()


def _work(setting: Setting, dense: bool, indices) -> torch.Tensor:
    """float64 [layers, W, hops]."""
    holds = balance.schedule(setting.cp, setting.inner)
    if indices and not dense:
        seq_len, found = indices
        layout = Layout.of(setting.attention, seq_len, setting.cp, setting.inner)
        return torch.stack([balance.work(index, layout, holds) for index in found])
    return _generated_work(setting.layout, setting.cp, setting.inner, 1.0 if dense else setting.density)


@lru_cache(maxsize=64)
def _generated_work(layout: Layout, world: int, inner: int | None, density: float) -> torch.Tensor:
    index = of_density(layout.seq_len, layout.block, density).index()
    return balance.work(index, layout, balance.schedule(world, inner))[None]


def of_density(seq_len: int, block: int, density: float, heads: int = 16) -> Generated:
    """A generated index that keeps about `density`: a sixth of it columns, a tenth the local band, the rest bands."""
    if density >= 1:
        return Generated(pattern="dense", seq_len=seq_len, heads=heads, block=block)
    local = max(block, int(seq_len * density / 20) // block * block)
    # a far band of 64 distances keeps two block diagonals of 128 or three, on average half as long as the sequence
    bands = max(0, round(seq_len / block * (density * 5 / 6 - 2 * local / seq_len) / 2.5))
    width = min(64, max(1, seq_len - local))
    columns = max(0, int(seq_len * density / 6) - 64)
    return Generated(
        seq_len=seq_len, heads=heads, block=block, sinks=min(64, seq_len), local=local, columns=columns,
        bands=bands if local + width <= seq_len else 0, band_width=width,
    )  # fmt: skip
