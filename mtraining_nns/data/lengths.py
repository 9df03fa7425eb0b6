"""How long the documents of a folder are: how many, and how much of the text, have at least a length.

    length     documents    share of tokens
     4,096           120    0.93
     8,192            80    0.81
    16,384             0    0.00

A run at 512K learns little about distances that no document has, whatever sequences are made of them. The curve needs
matplotlib, the optional extra `plots`.
"""

from pathlib import Path

import numpy as np

from mtraining_nns.data import store
from mtraining_nns.errors import UserError

SHORTEST = 4096


def retention(boundaries: np.ndarray) -> list[dict]:
    """Rows for SHORTEST and its doubles up to the first length that no document has; the share is of all tokens."""
    longest = max(int(np.diff(part).max()) for part in store.overlapping(boundaries))
    lengths = [SHORTEST]
    while lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return [
        {"length": length, "documents": documents, "share": tokens / int(boundaries[-1])}
        for length, documents, tokens in zip(lengths, *_at_least(boundaries, lengths))
    ]


def _at_least(boundaries: np.ndarray, lengths: list[int]) -> tuple[list[int], list[int]]:
    """Documents with at least each length, and their tokens; lengths ascend."""
    documents, tokens = np.zeros(len(lengths) + 1, np.int64), np.zeros(len(lengths) + 1, np.int64)
    for part in store.overlapping(boundaries):
        found = np.diff(part)
        reached = np.searchsorted(lengths, found, side="right")
        documents += np.bincount(reached, minlength=len(documents))
        np.add.at(tokens, reached, found)
    return tuple(np.cumsum(counts[::-1])[::-1][1:].tolist() for counts in (documents, tokens))


def table(rows: list[dict]) -> list[str]:
    """Lines for the terminal."""
    lines = ["documents of at least  documents  share of tokens"]
    return lines + [f"{row['length']:>21,}  {row['documents']:>9,}  {row['share']:>15.2%}" for row in rows]


def check_plot(file: str) -> None:
    """UserError where the curve could not be drawn into a file."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("--plot needs matplotlib; pip install 'mtraining-nns[plots]'") from error
    if Path(file).suffix != ".png":
        raise UserError(f"--plot {file} must end in .png")
    if not Path(file).resolve().parent.is_dir():
        raise UserError(f"--plot {file} lies in a folder that does not exist; make it first")


def plot(boundaries: np.ndarray, file: str) -> None:
    """Draw the share of tokens over the length, with eight points an octave."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    last = retention(boundaries)[-1]["length"]
    points = np.unique(np.geomspace(1, last, 8 * int(np.log2(last)) + 1).round().astype(np.int64))
    _, tokens = _at_least(boundaries, points.tolist())
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot(xlabel="length in tokens", ylabel="share of tokens", ylim=(0, 1.02))
    axis.set_xscale("log", base=2)
    axis.set_title("Tokens in documents of at least a length")
    axis.grid(alpha=0.3)
    axis.step(points, np.array(tokens) / boundaries[-1], where="pre")
    figure.savefig(file, format="png", dpi=120)
