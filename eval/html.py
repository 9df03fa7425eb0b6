"""One self-contained page of an evaluation: what was run, every table, the heat map of the needles, no outside file."""

import html
import json
from pathlib import Path
from typing import NamedTuple

from mtraining_nns.eval import report
from mtraining_nns.eval.perplexity import summed
from mtraining_nns.eval.runner import write_text

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .25rem .7rem; text-align: right }
th { border-bottom: 1px solid #999; font-weight: 600 } td:first-child, th:first-child { text-align: left }
pre { background: #f5f5f5; padding: 1rem; overflow: auto; font-size: 13px }
"""


def write(folder: Path, manifest: dict, found: dict[str, list[dict]], notes: dict[str, list[str]]) -> Path:
    """report.html of the records of each suite. notes: lines below its tables."""
    parts = [f"<h1>{html.escape(manifest['model'])}</h1>", f"<p>{html.escape(_summary(manifest))}</p>"]
    for suite, records in found.items():
        parts.append(f"<h2>{suite}</h2>")
        parts.append(SECTIONS[suite](records) if records else "<p>nothing was run</p>")
        parts += [f"<p>{html.escape(line)}</p>" for line in notes.get(suite, ())]
    text = html.escape(json.dumps(manifest, indent=1, ensure_ascii=False))
    parts.append(
        f"<h2>manifest</h2><details><summary>all that decides the numbers</summary><pre>{text}</pre></details>"
    )
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{html.escape(manifest["model"])}</title><style>{STYLE}</style>'
    return write_text(folder / "report.html", f"<!doctype html>\n<html>{head}\n<body>\n{body}\n</body></html>\n")


def _summary(manifest: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    engine = f"{manifest['engine']}, attention {manifest['attention']}, {manifest['dtype']} on {manifest['device']}"
    return f"{engine}; {versions}"


class Score(NamedTuple):
    """A cell in percent, red to green, and of how many questions."""

    percent: float
    samples: int


def _niah(records: list[dict]) -> str:
    """Depths down, lengths across."""
    depths, lengths, found = report.grid(records, "depth")
    lengths = sorted(lengths)
    rows = [[f"{depth:g} %", *_scores(found, depth, lengths)] for depth in sorted(depths)]
    return _table(["depth", *map(str, lengths)], [*rows, report.kept_row(records, lengths)])


def _tasks(records: list[dict]) -> str:
    """Tasks down, lengths across."""
    tasks, lengths, found = report.grid(records, "task")
    rows = [[task, *_scores(found, task, lengths)] for task in tasks]
    return _table(["task", *map(str, lengths)], [*rows, report.kept_row(records, lengths)])


def _scores(found: dict, row, lengths: list[int]) -> list[Score | str]:
    cells = (found.get((row, length)) for length in lengths)
    return ["-" if cell is None else Score(cell["score"], cell["samples"]) for cell in cells]


def _perplexity(records: list[dict]) -> str:
    rows = [
        [
            str(found.length),
            f"{bucket.begin} .. {bucket.end - 1}",
            f"{bucket.perplexity:.3f}",
            str(bucket.tokens),
            report.percent(found.density),
        ]
        for found in summed(records)
        for bucket in (*found.buckets, found.total)
    ]
    return _table(["length", "positions", "perplexity", "tokens", report.KEPT], rows)


def _table(heads: list[str], rows: list[list[str | Score]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _cell(value: str | Score) -> str:
    if isinstance(value, Score):
        color = f"hsl({1.2 * value.percent:.0f} 70% 80%)"
        return f'<td style="background: {color}">{value.percent:.1f} <small>({value.samples})</small></td>'
    return f"<td>{html.escape(value)}</td>"


SECTIONS = {"niah": _niah, "ruler": _tasks, "infinitebench": _tasks, "perplexity": _perplexity, "pg19": _perplexity}
