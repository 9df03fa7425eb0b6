"""How evenly layouts and rings spread sparse attention, before a cluster is paid for.

    mtraining balance --world 8,32,128 --inner 8 --seq-len 512k --out balance/
    mtraining balance --world 8 --layout zigzag,striped --indices index.safetensors
    mtraining balance --world 32 --inner 8 --comp-ms 0.51 --intra-ms 0.13 --inter-ms 0.98 --index-ms 1.13 --cpu-ms 2.08

1 is perfect: worker is the busiest rank over the mean rank, step a rank's busiest hop over its mean hop, critical the
sum over the hops of the busiest rank over the mean rank. Indices are those that `mtraining record` kept, or generated:
sinks, a local band, far bands and single columns at random places, the same numbers for every head. With measured times
of a hop it predicts the time of one attention call. --out gets results.json and, with the extra `plots`, pictures.
"""

import sys

from mtraining_nns.errors import UserError

LENGTHS = ("seq_len",)
GENERATED = {  # option -> what it is; the defaults are those of generated.py
    "pattern": "vertical_slash or dense (default vertical_slash)",
    "seq_len": "tokens, such as 512k (default)",
    "heads": "query heads (default 28)",
    "block": "tokens of a block (default 128)",
    "sinks": "first keys, kept by all (default 64)",
    "local": "nearest keys, kept by all (default 1024)",
    "bands": "far bands of each head (default 8)",
    "band_width": "distances of a far band (default 64)",
    "columns": "single keys of each head beside the sinks (default 1024)",
    "seed": "of the random places (default 0)",
}
TIMES = {
    "comp_ms": "kernels of a hop, mean over ranks and hops",
    "intra_ms": "keys of a hop between GPUs of a node",
    "inter_ms": "the same between nodes",
    "index_ms": "the index, once a call (default 0)",
    "cpu_ms": "host work, once a call (default 0)",
}


def add_parser(subparsers) -> None:
    """Declare the verb and its arguments."""
    parser = subparsers.add_parser("balance", help="how evenly a ring would share sparse attention")
    add = parser.add_argument
    add("--world", required=True, metavar="LIST", help="ranks of the ring, such as 8,32,128")
    add("--inner", type=int, metavar="N", help="also rings of two levels, N ranks a node")
    add("--layout", default="contiguous,zigzag,striped", metavar="LIST", help="default: all three")
    add("--granularity", type=int, metavar="N", help="tokens of a stripe (default: a block)")
    add("--indices", metavar="FILE", help="recorded by mtraining record (default: generated)")
    add("--out", metavar="DIR", help="where results.json and pictures go (default: the table only)")
    generated = parser.add_argument_group("generated indices")
    for name, text in GENERATED.items():
        kind = str if name in ("pattern", *LENGTHS) else int
        generated.add_argument(_option(name), type=kind, metavar="NAME" if name == "pattern" else "N", help=text)
    times = parser.add_argument_group("measured times in ms, for a prediction")
    for name, text in TIMES.items():
        times.add_argument(_option(name), type=float, metavar="MS", help=text)


def run(args) -> None:
    """Count, print the table, write what was asked for."""
    worlds = tuple(_whole("--world", word) for word in _words("--world", args.world))
    times = _times(args)
    # Imported here because torch takes seconds and help needs none of it.
    from mtraining_nns.balance import compare, table

    source, inputs = _inputs(args)
    out = None
    if args.out is not None:
        from mtraining_nns.eval import report

        out = report.make_folder(args.out)
    cases = compare(inputs, layouts=_words("--layout", args.layout), worlds=worlds, inner=args.inner, times=times)
    print(_describe(source))
    print(table(cases))
    if out is not None:
        options = {"granularity": inputs.granularity, "times": None if times is None else vars(times)}
        rows = [case.as_dict() for case in cases]
        print("results:", report.write_results(out, {"indices": source, **options, "cases": rows}))
        _draw(cases, out)


def _inputs(args):
    """(what the indices are, for the output; Inputs)."""
    from mtraining_nns.balance import Inputs

    given = {name: getattr(args, name) for name in GENERATED if getattr(args, name) is not None}
    if args.indices is not None:
        from mtraining_nns.recording import Recording

        if given:
            option = _option(next(iter(given)))
            raise UserError(f"{option} is for generated indices, got --indices {args.indices}; leave one out")
        recording = Recording.load(args.indices)
        about = {"kind": "recorded", "file": args.indices, "seq_len": recording.seq_len, **recording.about}
        indices, seq_len = list(recording.indices.values()), recording.seq_len
    else:
        from mtraining_nns.cli.words import parse_length
        from mtraining_nns.generated import Generated

        generated = Generated(**given | {name: parse_length(given[name]) for name in LENGTHS if name in given})
        about, indices, seq_len = {"kind": "generated", **vars(generated)}, [generated.index()], generated.seq_len
    return about, Inputs(indices=indices, seq_len=seq_len, granularity=args.granularity)


def _describe(source: dict) -> str:
    if source["kind"] == "generated":
        return "generated indices: " + ", ".join(f"{name} {source[name]}" for name in GENERATED)
    layers, pattern = len(source["layers"]), source["attention"]["pattern"]
    return (
        f"recorded indices of {source['file']}: {source['model']} on {source['text']['path']}, {layers} layers,"
        f" {source['seq_len']} tokens, {pattern}"
    )


def _times(args):
    given = {name: getattr(args, name) for name in TIMES if getattr(args, name) is not None}
    if not given:
        return None
    for name, value in given.items():
        if not 0 <= value < float("inf"):
            raise UserError(f"{_option(name)} must be a time of at least 0 ms, got {value}")
    for name in ("comp_ms", "intra_ms", "inter_ms"):
        if name not in given:
            raise UserError(f"a prediction needs {_option(name)}, too, got only {', '.join(map(_option, given))}")
    from mtraining_nns.ops.cost import Times

    return Times(**given)


def _draw(cases, out) -> None:
    from mtraining_nns import balance_plots

    try:
        print("pictures:", *balance_plots.write(cases, out))
    except ImportError:
        print("no pictures: they need matplotlib; pip install 'mtraining-nns[plots]'", file=sys.stderr)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _words(option: str, text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise UserError(f"{option} is empty; give values separated by commas")
    return words


def _whole(option: str, word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise UserError(f"{option} takes whole numbers of at least 1, got {word!r}; give e.g. 8,32")
    return int(word)
