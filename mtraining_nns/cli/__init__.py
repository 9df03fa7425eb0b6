"""The command line: `mtraining VERB ...`, one file per verb.

A verb's file opens with what it does and an example, which its help shows. `add_parser(verbs)` declares its arguments,
`run(args)` does the work and returns the exit code or None. Heavy imports are inside `run`, so that help is instant.
A UserError is one line and exit code 2.
"""

import argparse
import importlib
import sys

from mtraining_nns import __version__, environment
from mtraining_nns.errors import UserError

VERBS = (
    "doctor",
    "prepare",
    "convert",
    "train",
    "export",
    "fetch",
    "eval",
    "compare",
    "plan",
    "calibrate",
    "balance",
    "record",
    "parallelize",
    "resolve",
)


def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="mtraining",
        description="Long-context training with dynamic sparse attention over a ring of GPUs.",
        epilog="Start with: mtraining doctor. Each verb explains itself: mtraining train --help",
    )
    parser.add_argument("--version", action="version", version=f"mtraining {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs = {name: importlib.import_module(f"mtraining_nns.cli.{name}") for name in VERBS}
    for name, verb in verbs.items():
        verb.add_parser(subparsers)
        subparsers.choices[name].description = verb.__doc__
        subparsers.choices[name].formatter_class = argparse.RawDescriptionHelpFormatter
    args, rest = parser.parse_known_args(argv)
    if hasattr(args, "overrides") and all("=" in word and not word.startswith("-") for word in rest):
        args.overrides.extend(rest)  # argparse gives up on positionals that follow an option
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return verbs[args.verb].run(args) or 0
    except UserError as error:
        print(f"mtraining: error: {error}", file=sys.stderr)
        return UserError.exit_code
    except KeyboardInterrupt:
        return environment.INTERRUPTED
