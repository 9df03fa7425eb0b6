"""Words of the command line that several verbs read: lengths, and lists separated by commas."""

import re

from mtraining_nns.errors import UserError

UNITS = {"": 1, "k": 1024, "m": 1024**2}


def parse_length(text: str) -> int:
    """Tokens of `4k` (4096), `1m` (1048576) or a plain number."""
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if match is None:
        raise UserError(f"a length is a number with k or m, got {text!r}; give e.g. 4k, 1m or 1000")
    return int(match[1]) * UNITS[match[2]]


def parse_list(option: str, text: str, parse) -> tuple:
    """Values of a comma list, each once."""
    values = tuple(dict.fromkeys(parse(word.strip()) for word in text.split(",") if word.strip()))
    if not values:
        raise UserError(f"{option} is empty; give values separated by commas")
    return values
