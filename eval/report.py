"""What a run was and what it found: a manifest, one results file, tables that show every cell.

results.json = {"manifest": {...}, "niah": {...}, "perplexity": [...]}; the manifest is enough to run the same again.
A mean is printed only under the cells it is the mean of.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
import transformers

import mtraining_nns
from mtraining_nns.errors import UserError
from mtraining_nns.eval.niah import NiahResult
from mtraining_nns.eval.perplexity import LengthPerplexity

FORMAT = 1


def model_fingerprint(model_dir: str | Path) -> str:
    """sha256 over config.json, the safetensors index and the names and sizes of the weight files.

    Tells two exports apart without reading gigabytes; it does not prove that weights of equal size are equal.
    """
    folder, digest = Path(model_dir), hashlib.sha256()
    for name in ("config.json", "model.safetensors.index.json"):
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()


def manifest(model_dir: str | Path, engine: dict, tasks: dict) -> dict:
    """Everything that decides the numbers. `engine` is `engine.describe()`, `tasks` maps a task to its settings."""
    return {
        "format": FORMAT,
        "model": str(model_dir),
        "model_sha256": model_fingerprint(model_dir),
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
    return folder


def write_results(folder: Path, results: dict) -> Path:
    """Write results.json whole or not at all; a results file that exists is replaced."""
    path = folder / "results.json"
    temporary = folder / f".results.json.{os.getpid()}"
    temporary.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def niah_table(result: NiahResult) -> str:
    """Depth x length grid of scores in percent, with the mean of each column below it."""
    lengths = result.config.lengths
    rows = [["depth \\ length", *map(str, lengths)]]
    for depth in result.config.depths:
        rows.append([f"{depth:g} %", *(f"{result.percent(length, depth):.1f}" for length in lengths)])
    rows.append(["all depths", *(f"{result.percent(length):.1f}" for length in lengths)])
    return f"niah, score in percent, {result.config.samples} per cell\n{_align(rows)}"


def perplexity_table(results: list[LengthPerplexity]) -> str:
    """Perplexity by position (rows) and sequence length (columns), the whole sequence last."""
    longest = max(results, key=lambda result: result.length)
    rows = [["position \\ length", *(str(result.length) for result in results)]]
    for bucket in longest.buckets:
        found = [next((b for b in result.buckets if b.begin == bucket.begin), None) for result in results]
        rows.append([f"from {bucket.begin}", *("-" if b is None else f"{b.perplexity:.3f}" for b in found)])
    rows.append(["all positions", *(f"{result.total.perplexity:.3f}" for result in results)])
    rows.append(["tokens scored", *(str(result.total.tokens) for result in results)])
    return f"perplexity by position\n{_align(rows)}"


def _align(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
