"""Metrics of generated answers: each compares one answer with its references and gives a share of 1.

all    the share of the references that the answer holds (RULER's string match for lists of things to find)
any    1 if the answer holds one of them (RULER's string match for questions with several right answers)
numbers the share of the references, all numbers, that the answer holds, not as part of a longer one

Those of InfiniteBench are in infinitebench_scoring.py.
"""

import re
import statistics

from mtraining_nns.eval import infinitebench_scoring


def cleaned(text: str) -> str:
    """Lower case, control characters as blanks, ends trimmed."""
    return re.sub(r"[\x00-\x1f]", " ", text).strip().lower()


def all_of(answer: str, references: list[str]) -> float:
    """Share of the references that occur in the answer.

    >>> all_of("Two of them: 17 and Oslo.", ["17", "oslo", "91", "12"])
    0.5
    """
    answer = cleaned(answer)
    return sum(reference.lower() in answer for reference in references) / len(references)


def any_of(answer: str, references: list[str]) -> float:
    """1.0 if one of the references occurs in the answer."""
    answer = cleaned(answer)
    return float(any(reference.lower() in answer for reference in references))


def numbers(answer: str, references: list[str]) -> float:
    """Share of the numbers that occur, not as part of a longer one.

    >>> numbers("They are 17 and 170.", ["17", "70"])
    0.5
    """
    answer = cleaned(answer)
    found = [re.search(rf"(?<!\d){reference}(?!\d)", answer) is not None for reference in references]
    return sum(found) / len(references)


def mean_known(values: list[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


METRICS = {"all": all_of, "any": any_of, "numbers": numbers, **infinitebench_scoring.METRICS}
