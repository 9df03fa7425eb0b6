"""Two evaluations of the same questions: how much one differs from the other, and how sure that is.

    mtraining compare OUT_A OUT_B

Questions that both answered, whatever else either was asked, are compared in pairs, cell by cell: each question is as
hard for both, so the difference is known better than either score. The interval holds the mean difference with 95 %
(`intervals.py`); of one question there is none. Perplexities are compared as losses a token, in nats, by sequence.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtraining_nns.errors import UserError
from mtraining_nns.eval import intervals
from mtraining_nns.eval.runner import differences, read_manifest, read_records
from mtraining_nns.tables import align

LOSS = ", loss a token"
CHOICE = {"lengths", "samples", "tasks", "depths", "not_run"}  # settings of a suite: which questions, not what they say
SUPPLIES = {"sources", "files", "books"}  # settings whose parts are each read by some questions


@dataclass(frozen=True)
class Cell:
    """One suite, task and length. a, b: means; difference: b - a with its interval, None of a single question."""

    name: str
    length: int
    questions: int
    a: float
    b: float
    interval: tuple[float, float] | None

    @property
    def difference(self) -> float:
        return self.b - self.a


@dataclass(frozen=True)
class Comparison:
    """differing: what the manifests do not share beside questions; alone: questions that only one of them answered."""

    cells: list[Cell]
    differing: dict[str, tuple]
    alone: int

    def table(self) -> str:
        """For people."""
        rows = [["suite", "length", "questions", "A", "B", "B - A", "95 % interval"]]
        for cell in self.cells:
            digits = 4 if cell.name.endswith(LOSS) else 2
            numbers = [f"{value:.{digits}f}" for value in (cell.a, cell.b)] + [f"{cell.difference:+.{digits}f}"]
            interval = "-" if cell.interval is None else " .. ".join(f"{bound:+.{digits}f}" for bound in cell.interval)
            rows.append([cell.name, str(cell.length), str(cell.questions), *numbers, interval])
        lines = [f"A and B differ in {key}: {a!r}, {b!r}" for key, (a, b) in self.differing.items()]
        alone = [f"{self.alone} questions were answered in one of them alone"] if self.alone else []
        return "\n".join([*lines, *alone, align(rows)])


def compare(a: str | Path, b: str | Path) -> Comparison:
    """UserError for a folder without answers, and for two that share no question or mean another by the same id."""
    (manifest_a, records_a), (manifest_b, records_b) = _read(Path(a)), _read(Path(b))
    differing = differences(manifest_a, manifest_b)
    asked = [key for key, values in differing.items() if _is_of_questions(key, values)]
    if asked:
        raise UserError(f"{a} and {b} asked other questions: they differ in {', '.join(asked)}; evaluate both alike")
    both = [name for name in records_a if name in records_b]
    if not both:
        raise UserError(f"{a} and {b} share no question; evaluate both with the same suites and lengths")
    groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for name in both:
        one, other = records_a[name], records_b[name]
        suite, task = name.split("/")[0], one.get("task")
        cell = (f"{suite} {task}" if task else suite + ("" if "score" in one else LOSS), one["length"])
        groups.setdefault(cell, []).append((_value(one), _value(other)))
    cells = [_cell(name, length, np.array(values)) for (name, length), values in groups.items()]
    if "model_sha256" in differing:
        differing = {"model": (manifest_a.get("model"), manifest_b.get("model")), **differing}
    runs = {key: values for key, values in differing.items() if not key.startswith("tasks.")}
    return Comparison(cells, runs, len(records_a.keys() ^ records_b.keys()))


def _is_of_questions(key: str, values: tuple) -> bool:
    """Whether a difference of manifests makes another question of the same id, not only more or fewer of them."""
    part, _, rest = key.partition(".")
    suite_and_setting = rest.split(".")[:2]
    if part != "tasks" or len(suite_and_setting) < 2:  # a suite of one of them alone shares no question
        return part == "tokenizer"
    setting = suite_and_setting[1]
    return setting not in CHOICE and not (setting in SUPPLIES and None in values)


def _cell(name: str, length: int, values: np.ndarray) -> Cell:
    differences = values[:, 1] - values[:, 0]
    if name.endswith(LOSS):
        interval = intervals.of_mean(differences)
    else:
        found = intervals.of_scores(differences / 100)
        interval = found and tuple(100 * bound for bound in found)
    return Cell(name, length, len(values), *map(float, values.mean(0)), interval)


def _value(record: dict) -> float:
    """Percent, or nats a token."""
    if "score" in record:
        return 100.0 * record["score"]
    return sum(part["nll_sum"] for part in record["buckets"]) / sum(part["tokens"] for part in record["buckets"])


def _read(folder: Path) -> tuple[dict, dict[str, dict]]:
    try:
        return read_manifest(folder), read_records(folder)[0]
    except OSError as error:
        raise UserError(f"{folder} holds no evaluation ({error}); give the --out of mtraining eval") from error
