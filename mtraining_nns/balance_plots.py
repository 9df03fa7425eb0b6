"""Pictures of a comparison, like the paper's figures 3, 5 and 13.

    work_by_worker.png    pairs of each rank over the mean rank: flat lines are what a ring wants
    work_by_step.png      pairs of the mean and of the busiest rank, hop by hop
    layout_maps.png       who computes which part of the attention matrix, and at which hop

matplotlib is the optional extra `plots` and is imported here alone.
"""

from pathlib import Path

import torch

from mtraining_nns.ops import balance
from mtraining_nns.ops.layout import Layout

MAP_CHUNKS = 4  # chunks of the map's sequence for each rank
MAP_WORLD = 32  # maps of larger rings would show noise


def write(cases, folder: Path) -> list[Path]:
    """All pictures of the cases; ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    pictures = {"work_by_worker.png": _by_worker, "work_by_step.png": _by_step, "layout_maps.png": _maps}
    for name, draw in pictures.items():
        figure = draw(cases)
        figure.savefig(folder / name, dpi=120, bbox_inches="tight")
    return [folder / name for name in pictures]


def _by_worker(cases):
    worlds = list(dict.fromkeys(case.world for case in cases))
    figure, axes = _figure(1, len(worlds))
    for axis, world in zip(axes[0], worlds):
        # the order of hops changes nothing here, so one line a layout
        for case in (case for case in cases if case.world == world and case.inner is None):
            axis.plot(case.as_dict()["work_by_rank"], label=f"{case.layout}, worker {case.measures.worker:.2f}")
        _describe(axis, f"{world} ranks", "rank", "pairs / mean rank")
    return figure


def _by_step(cases):
    worlds = list(dict.fromkeys(case.world for case in cases))
    kinds = list(dict.fromkeys(case.layout for case in cases))
    figure, axes = _figure(len(kinds), len(worlds))
    for case in cases:
        axis, values = axes[kinds.index(case.layout)][worlds.index(case.world)], case.as_dict()
        line = axis.plot(values["busiest_rank_by_hop"], label=f"{case.schedule}: busiest rank")[0]
        axis.plot(
            values["mean_rank_by_hop"], color=line.get_color(), linestyle=":", label=f"{case.schedule}: mean rank"
        )
        _describe(axis, f"{case.layout}, {case.world} ranks", "hop", "pairs / mean hop")
    return figure


def _maps(cases):
    """Chunks by chunks of a short sequence, on the largest ring that can still be seen."""
    world = max((case.world for case in cases if case.world <= MAP_WORLD), default=MAP_WORLD)
    fits = [case for case in cases if case.inner is None or (case.inner < world and world % case.inner == 0)]
    shown = list(dict.fromkeys((case.layout, case.inner) for case in fits))
    figure, axes = _figure(len(shown), 2)
    for row, (kind, inner) in zip(axes, shown):
        order = "flat" if inner is None else f"{world // inner} x {inner}"
        for axis, name, values in zip(row, ("rank", "hop"), map_of(kind, world, inner)):
            image = axis.imshow(values.numpy(), cmap="viridis", interpolation="nearest")
            figure.colorbar(image, ax=axis, label=name)
            axis.set(title=f"{kind}, {order}, {world} ranks: {name}", xlabel="key chunk", ylabel="query chunk")
    return figure


def map_of(kind: str, world: int, inner: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(rank, hop) float [n, n] that computes each query and key chunk of a short sequence; NaN above the diagonal."""
    chunks = MAP_CHUNKS * world
    layout = Layout(seq_len=chunks, world=world, kind=kind, block=1, inner=inner)
    owner, _ = layout.locate(torch.arange(chunks))
    hop_of = balance.schedule(world, inner).argsort(1)  # [rank, source] -> hop
    later = torch.ones(chunks, chunks, dtype=torch.bool).triu(1)
    rank = owner[:, None].expand(chunks, chunks).float().masked_fill(later, torch.nan)
    hop = hop_of[owner[:, None], owner[None]].float().masked_fill(later, torch.nan)
    return rank, hop


def _figure(rows: int, columns: int):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 3.5 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _describe(axis, title: str, x: str, y: str) -> None:
    axis.set(title=title, xlabel=x, ylabel=y)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize="small")
