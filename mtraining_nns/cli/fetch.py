"""Fetch public evaluation data, each file checked against its published sha256.

    mtraining fetch squad hotpotqa essays --out data
    mtraining eval --model MODEL --suite ruler --lengths 4k --text data/essays --squad data/squad/dev-v2.0.json ...

Of each NAME the folder DIR/NAME gets what is missing:

    squad          dev-v1.1.json, dev-v2.0.json
    hotpotqa       hotpot_dev_distractor_v1.json
    essays         49 essays by Paul Graham
    pg19           the 100 books of PG-19's test split
    infinitebench  the JSONL files of the 12 tasks, 2.5 GB

The same command goes on where it was stopped. A file can also be put there by hand: then it is only checked.
"""

from pathlib import Path

from mtraining_nns.errors import UserError


def add_parser(subparsers) -> None:
    """Declare the verb and its arguments."""
    parser = subparsers.add_parser("fetch", help="public evaluation data, checked against published hashes")
    parser.add_argument("names", nargs="+", metavar="NAME", help="squad, hotpotqa, essays, pg19 or infinitebench")
    parser.add_argument("--out", required=True, metavar="DIR", help="each NAME gets a folder of its own there")


def run(args) -> None:
    """Fetch one source after the other; a line for each."""
    from mtraining_nns.eval import fetch

    known = fetch.sources()
    for name in args.names:
        if name not in known:
            raise UserError(f"unknown data {name!r}; fetch takes {', '.join(known)}")
    for name in dict.fromkeys(args.names):
        source, folder = known[name], Path(args.out) / name
        print(f"{source.note}; hashes: {source.hashes}")
        total, fetched = len(source.files), len(fetch.fetch(source, folder))
        print(f"{folder}: {total} files, {fetched} fetched, {total - fetched} were there")
