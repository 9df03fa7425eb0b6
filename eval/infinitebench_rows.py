"""InfiniteBench's questions in words: a row of a file becomes a message, the beginning of its answer, references.

    {"id": 0, "context": "The grass is ...", "input": "What is the pass key?", "answer": ["71432"], "options": []}

What a row must hold follows from the templates in infinitebench.yaml; a row that does not is a UserError.
"""

import functools
import json
import re
from collections.abc import Iterator
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import yaml

from mtraining_nns import digest
from mtraining_nns.errors import UserError

LETTERS = ("A", "B", "C", "D")
WHOLE, DECIMAL = re.compile("[+-]?[0-9]+"), re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
NUMBERS = {"last_number": WHOLE, "leading_values": WHOLE, "first_number": DECIMAL}  # what a metric compares with


@functools.cache
def tables() -> dict[str, dict]:
    """infinitebench.yaml: a task's file, template, metric and budget by its name."""
    return yaml.safe_load((resources.files("mtraining_nns.eval") / "infinitebench.yaml").read_text(encoding="utf-8"))


class Asked(NamedTuple):
    """A question. references: its right answers; of a choice the text of the right option and its letter."""

    message: str
    answer: str
    references: list[str]


def read(name: str, path: Path, count: int | None) -> Iterator[Asked]:
    """The first so many questions of a task, None for all of them, in the order of its file."""
    with _open(path) as stream:
        lines = ((number, line) for number, line in enumerate(stream, 1) if line.strip())
        for number, line in islice(lines, count):
            try:
                asked = _asked(tables()[name], json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(f"{path}, line {number}: {reason}; give InfiniteBench's file as published") from error
            yield asked


def sha256(path: Path) -> str:
    """Of a file of any size."""
    with _open(path) as stream:
        return digest.of_stream(stream)


def _open(path: Path):
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give the file as published") from error


def _asked(task: dict, row: dict) -> Asked:
    """ValueError, KeyError or TypeError for a row that is not as published."""
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    for key in ("context", "input"):
        if not isinstance(row[key], str):
            raise ValueError(f"expected text as its {key}, got {row[key]!r}")
    # A prompt that ends with a blank, as some inputs do, is one that no tokenizer learned to continue.
    fields = {"context": row["context"], "input": row["input"].strip()}
    if "input" in task:
        found = re.search(task["input"], row["input"])
        if found is None:
            raise ValueError(f"expected {task['input']} in its input, got {row['input']!r}")
        fields |= found.groupdict()
    references = _flat(row["answer"])
    if not references:
        raise ValueError("has no answer")
    if not all(map(str.strip, references)):
        raise ValueError(f"expected no empty answer, got {row['answer']!r}")
    number = NUMBERS.get(task["metric"])
    if number is not None and not all(map(number.fullmatch, references)):
        raise ValueError(f"expected numbers as its answer, got {references!r}")
    if task.get("options"):
        references = _chosen(row["options"], references)
        fields |= zip(LETTERS, row["options"])
    message, answer = task["message"].format(**fields), task["answer"].format(**fields)
    return Asked(f"{message}\n" if answer else message, answer, references)


def _flat(answer) -> list[str]:
    """`7`, `[7]` and `[[7, 8]]` as a list of words, null as an empty one: math_calc's answer is a list in a list."""
    if isinstance(answer, list):
        return [text for part in answer for text in _flat(part)]
    return ["" if answer is None else str(answer)]


def _chosen(options: list[str], references: list[str]) -> list[str]:
    """The right option and its letter, which some rows give themselves."""
    if not isinstance(options, list) or len(options) != len(LETTERS):
        raise ValueError(f"expected four options, got {options!r}")
    if len(references) == 2 and references[1] in LETTERS:
        return references
    if references[0] not in options:
        raise ValueError(f"expected one of its options as answer, got {references[0]!r}")
    return [references[0], LETTERS[options.index(references[0])]]
