"""The heat map of needles as a picture: depth down, length across, percent found in each cell.

matplotlib is the optional extra `plots` and is imported here alone.
"""

from pathlib import Path

from mtraining_nns.eval.report import grid
from mtraining_nns.eval.runner import writing


def niah(folder: Path, records: list[dict]) -> Path:
    """niah.png; ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    depths, lengths, found = grid(records, "depth")
    depths, lengths = sorted(depths), sorted(lengths)
    percents = [[found[depth, length]["score"] for length in lengths] for depth in depths]
    figure = Figure(figsize=(2 + len(lengths), 2 + 0.5 * len(depths)))
    axis = figure.add_subplot()
    image = axis.imshow(percents, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for row, across in enumerate(percents):
        for column, percent in enumerate(across):
            axis.text(column, row, f"{percent:.0f}", ha="center", va="center")
    axis.set_xticks(range(len(lengths)), map(str, lengths))
    axis.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths])
    axis.set_xlabel("tokens")
    axis.set_ylabel("depth of the needle")
    figure.colorbar(image, label="percent found")
    with writing(folder / "niah.png"):
        figure.savefig(folder / "niah.png", dpi=120, bbox_inches="tight")
    return folder / "niah.png"
