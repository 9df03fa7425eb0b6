"""What a run was and what it found: a manifest, results of every suite, tables that show every cell.

    results.json    {"manifest": {...}, "niah": {...}, "ruler": {...}, "infinitebench": {...}, "perplexity": [...]}
    scores.csv      suite,task,length,depth,samples,score,standard_error,density
                    a cell a row, scores in percent

The manifest is enough to run the same again. A mean is printed only under the cells it is the mean of.
"""

import csv
import io
import os
import statistics
from pathlib import Path

import torch
import transformers

import mtraining_nns
from mtraining_nns import digest
from mtraining_nns.errors import UserError
from mtraining_nns.eval.perplexity import LengthPerplexity
from mtraining_nns.eval.runner import write_json, write_text
from mtraining_nns.eval.scoring import mean_known
from mtraining_nns.tables import align

FORMAT = 3
KEPT = "kept by prefill"


def manifest(model_dir: str | Path, tokenizer, engine: dict, tasks: dict) -> dict:
    """Everything that decides the numbers. `engine` is `engine.describe()`, `tasks` maps a task to its settings."""
    return {
        "format": FORMAT,
        "model": str(model_dir),
        "model_sha256": digest.of_model(model_dir),
        "tokenizer": tokenizer.describe(),
        "tasks": tasks,
        **engine,
        "versions": {
            "mtraining_nns": mtraining_nns.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def make_folder(out_dir: str | Path) -> Path:
    """Create the results folder before hours of evaluation; UserError if that cannot be."""
    folder = Path(out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"results folder {folder} cannot be made ({error.strerror}); give another --out") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"results folder {folder} cannot be written; give another --out")
    return folder


def write_results(folder: Path, results: dict) -> Path:
    """Write results.json; one that exists is replaced."""
    return write_json(folder / "results.json", results)


def cells(records: list[dict], *keys: str) -> list[dict]:
    """Scores of the records that agree in some keys: the keys, samples, score and its standard error in percent.

    density: mean share of causal pairs that reading their prompts kept, None where the engine could not tell.
    """
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return [{**dict(zip(keys, values)), **_cell(same)} for values, same in groups.items()]


def _cell(records: list[dict]) -> dict:
    scores = [100.0 * record["score"] for record in records]
    density = mean_known([record["density"] for record in records])
    return {"samples": len(scores), "score": _mean(scores), "standard_error": _error(scores), "density": density}


def kept_row(records: list[dict], lengths: list[int]) -> list[str]:
    """The last row of a table: what share of causal pairs the prompts of each length kept, in percent."""
    found = {cell["length"]: cell["density"] for cell in cells(records, "length")}
    return [KEPT, *(percent(found[length]) for length in lengths)]


def percent(share: float | None) -> str:
    """`31.2 %`, or `-` where it is not known."""
    return "-" if share is None else f"{100 * share:.1f} %"


def grid(records: list[dict], down: str) -> tuple[list, list[int], dict[tuple, dict]]:
    """(values of a key, lengths, cells by both), in the order of the records."""
    rows, lengths = (list(dict.fromkeys(record[key] for record in records)) for key in (down, "length"))
    return rows, lengths, {(cell[down], cell["length"]): cell for cell in cells(records, down, "length")}


def niah_result(records: list[dict]) -> dict:
    """Of results.json."""
    return {"cells": cells(records, "length", "depth"), "score": _mean([100.0 * record["score"] for record in records])}


def niah_table(records: list[dict]) -> str:
    """Depth x length grid of scores in percent, with the mean of each column below it."""
    depths, lengths, found = grid(records, "depth")
    rows = [["depth \\ length", *map(str, lengths)]]
    for depth in depths:
        rows.append([f"{depth:g} %", *(f"{found[depth, length]['score']:.1f}" for length in lengths)])
    rows.append(["all depths", *(f"{cell['score']:.1f}" for cell in cells(records, "length"))])
    rows.append(kept_row(records, lengths))
    return f"niah, score in percent, {next(iter(found.values()))['samples']} per cell\n{align(rows)}"


def ruler_result(records: list[dict], not_run: dict[str, str]) -> dict:
    """Of results.json."""
    return {"cells": cells(records, "task", "length"), "not_run": not_run}


def ruler_table(records: list[dict], not_run: dict[str, str]) -> str:
    """Task x length grid of scores in percent with their standard errors, then what was not run and why."""
    tasks, lengths, found = grid(records, "task")
    rows = _task_rows(records, _with_error)
    if records:
        of_tasks = [[found[task, length]["score"] for task in tasks] for length in lengths]
        rows.insert(-1, ["mean of the tasks above", *(f"{_mean(scores):.1f}" for scores in of_tasks)])
    samples = next(iter(found.values()))["samples"] if records else 0
    head = f"ruler, score in percent +- standard error, {samples} per cell"
    return "\n".join([head, align(rows), *notes(not_run)])


def infinitebench_result(records: list[dict], not_run: dict[str, str], not_asked: dict[str, str]) -> dict:
    """Of results.json."""
    return {"cells": cells(records, "task", "length"), "not_run": not_run, "not_asked": not_asked}


def infinitebench_table(records: list[dict], not_run: dict[str, str], not_asked: dict[str, str]) -> str:
    """Task x length grid of scores with the number of questions of each, then what was not run and not asked."""
    rows = _task_rows(records, lambda cell: f"{_with_error(cell)} ({cell['samples']})")
    head = "infinitebench, score in percent +- standard error (questions) at the smallest length that holds them"
    return "\n".join([head, align(rows), *notes(not_run, not_asked)])


def notes(not_run: dict[str, str], not_asked: dict[str, str] | None = None) -> list[str]:
    """A line for each task without a source, and for each with questions that are too long."""
    missing = [f"not run: {task}, {why}" for task, why in not_run.items()]
    return missing + [f"not asked: {task}, {why}" for task, why in (not_asked or {}).items()]


def _task_rows(records: list[dict], show) -> list[list[str]]:
    """A head, each task's cells by length, and what was kept; show: a cell as text."""
    tasks, lengths, found = grid(records, "task")
    rows = [[show(found[task, length]) if (task, length) in found else "-" for length in lengths] for task in tasks]
    rows = [["task \\ length", *map(str, lengths)], *([task, *row] for task, row in zip(tasks, rows))]
    return [*rows, kept_row(records, lengths)] if records else rows


def write_csv(folder: Path, found: dict[str, list[dict]]) -> Path:
    """scores.csv of all suites with scores; found: cells by suite."""
    columns = ("suite", "task", "length", "depth", "samples", "score", "standard_error", "density")
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, columns, restval="")
    writer.writeheader()
    writer.writerows({"suite": suite, **cell} for suite, some in found.items() for cell in some)
    return write_text(folder / "scores.csv", stream.getvalue())


def perplexity_table(results: list[LengthPerplexity], name: str = "perplexity") -> str:
    """Perplexity by position (rows) and sequence length (columns), the whole sequence last."""
    longest = max(results, key=lambda result: result.length)
    rows = [["position \\ length", *(str(result.length) for result in results)]]
    for bucket in longest.buckets:
        found = [next((b for b in result.buckets if b.begin == bucket.begin), None) for result in results]
        rows.append([f"from {bucket.begin}", *("-" if b is None else f"{b.perplexity:.3f}" for b in found)])
    rows.append(["all positions", *(f"{result.total.perplexity:.3f}" for result in results)])
    rows.append(["tokens scored", *(str(result.total.tokens) for result in results)])
    rows.append([KEPT, *(percent(result.density) for result in results)])
    return f"{name} by position\n{align(rows)}"


def _mean(values: list[float]) -> float:
    return statistics.fmean(values)


def _error(values: list[float]) -> float | None:
    """Standard error of the mean, None of a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def _with_error(cell: dict) -> str:
    error = cell["standard_error"]
    return f"{cell['score']:.1f}" + ("" if error is None else f" +- {error:.1f}")
