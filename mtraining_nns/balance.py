"""Which layout and which ring spread an index best: every case is counted, measured, and printed as one row.

    cases = compare(Inputs(indices, seq_len), layouts=("zigzag", "striped"), worlds=(8, 32), inner=8)
    print(table(cases))

A case is a layout, a number of ranks, and the order in which keys travel: flat, or "4 x 8" for 4 nodes of 8. What is
counted and measured is in `ops/balance.py`, the predicted time in `ops/cost.py`.
"""

from dataclasses import dataclass

import torch

from mtraining_nns.errors import UserError
from mtraining_nns.ops import balance
from mtraining_nns.ops.config import LAYOUTS, AttentionConfig, shortest
from mtraining_nns.ops.cost import Times, predict_ms
from mtraining_nns.ops.index import Index
from mtraining_nns.ops.layout import Layout
from mtraining_nns.tables import align


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Indices of one global sequence, one a layer, and the length of a stripe; None is a block."""

    indices: list[Index]
    seq_len: int
    granularity: int | None = None

    def layout(self, kind: str, world: int, inner: int | None = None) -> Layout:
        """UserError where a layout is unknown or a rank would have no share of the sequence."""
        if kind not in LAYOUTS:
            raise UserError(f"--layout must be of {', '.join(LAYOUTS)}, got {kind!r}")
        try:
            config = AttentionConfig(layout=kind, block=self.indices[0].block, granularity=self.granularity, stride=1)
            layout = Layout.of(config, self.seq_len, world, inner)
        except ValueError as error:
            raise UserError(f"{error}; change --block, --granularity or --world") from error
        needed, share = shortest(config, self.seq_len, world)
        if self.seq_len < needed:
            raise UserError(
                f"--world {world} and layout {kind} give each rank {share}, so the sequence must have at least"
                f" {needed} tokens, got {self.seq_len}; use fewer ranks or a longer sequence"
            )
        return layout


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout on a ring and how it does.

    work: float64 [layers, world, hops], query-key pairs. density: kept pairs over causal pairs. predicted_ms: of one
    attention call, where times were given.
    """

    layout: str
    world: int
    inner: int | None
    work: torch.Tensor
    density: float
    predicted_ms: float | None = None

    @property
    def schedule(self) -> str:
        return "flat" if self.inner is None else f"{self.world // self.inner} x {self.inner}"

    @property
    def measures(self) -> balance.Balance:
        return balance.measure(self.work)

    def as_dict(self) -> dict:
        """Plain values: measures, work by rank and by hop, as shares of the mean rank and the mean hop of a rank."""
        total = self.work.sum(0)
        values = {name: getattr(self, name) for name in ("layout", "world", "schedule", "density", "predicted_ms")}
        return {
            **values,
            **self.measures._asdict(),
            "work_by_rank": (total.sum(1) / total.sum(1).mean()).tolist(),
            "busiest_rank_by_hop": (self.work.amax(1).sum(0) / total.mean()).tolist(),
            "mean_rank_by_hop": (total.mean(0) / total.mean()).tolist(),
        }


def compare(inputs: Inputs, *, layouts, worlds, inner: int | None = None, times: Times | None = None) -> list[Case]:
    """Every layout on every ring, flat and, with `inner`, hierarchical. UserError for rings that cannot be."""
    if times is not None and len(worlds) > 1:
        raise UserError(f"the times of a hop hold for one world, got --world {','.join(map(str, worlds))}; give one")
    for world in worlds:
        if world < 1 or (inner is not None and (inner < 1 or world % inner)):
            raise UserError(f"--inner {inner} must divide every ring of --world, got {world}; change either")
    rings = [(world, level) for world in worlds for level in dict.fromkeys((None, inner))]
    every = [(inputs.layout(kind, world, level), level) for kind in layouts for world, level in rings]
    return [_case(inputs, layout, level, times) for layout, level in every]


def table(cases: list[Case]) -> str:
    """One row a case."""
    timed = any(case.predicted_ms is not None for case in cases)
    rows = [["layout", "world", "schedule", "worker", "step", "critical", "density", *(["predicted ms"] * timed)]]
    for case in cases:
        row = [case.layout, str(case.world), case.schedule, *(f"{value:.3f}" for value in case.measures)]
        rows.append([*row, f"{case.density:.4f}", *([f"{case.predicted_ms:.2f}"] if timed else [])])
    return align(rows)


def _case(inputs: Inputs, layout: Layout, inner: int | None, times: Times | None) -> Case:
    holds = balance.schedule(layout.world, inner)
    work = torch.stack([balance.work(index, layout, holds) for index in inputs.indices])
    heads = sum(index.head_count for index in inputs.indices)
    return Case(
        layout=layout.kind,
        world=layout.world,
        inner=inner,
        work=work,
        density=work.sum().item() / (heads * inputs.seq_len * (inputs.seq_len + 1) / 2),
        predicted_ms=None if times is None else predict_ms(times, work, inner),
    )
