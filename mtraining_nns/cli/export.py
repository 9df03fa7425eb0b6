"""Write a training checkpoint as a HuggingFace folder: weights, config, tokenizer and attention settings.

    mtraining export runs/demo/sparse --out runs/demo/sparse/hf

A run exports its last step by itself; this is for an earlier one, or for a run that was stopped.
"""


def add_parser(verbs) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("export", help="turn a training checkpoint into a HuggingFace folder")
    parser.add_argument("checkpoint", help="a checkpoint, or a checkpoint.dir whose latest complete one is taken")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write")


def run(args) -> None:
    """Export and say where."""
    from mtraining_nns.export import export

    export(args.checkpoint, args.out)
    print(f"exported {args.checkpoint} to {args.out}")
