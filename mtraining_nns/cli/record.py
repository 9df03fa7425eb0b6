"""Run a model over a text with sparse attention and keep what each layer kept, for `mtraining balance --indices`.

    mtraining record runs/demo/sparse/hf book.txt --out index.safetensors
    mtraining record smollm2.gguf /usr/lib/python3 --out index.safetensors --seq-len 16k --rope-theta 1e6 \\
        attention.p_v=0.9 attention.p_s=0.9

MODEL is a local HuggingFace folder or a GGUF file, TEXT a file, a folder of text, or a prepared data folder. It takes
one forward and one backward pass in fp32. Beside the indices it measures, for some queries of each layer, how few keys
hold 95 % of the attention weights and of the gradient of the loss with respect to the scores; attention.pattern=dense
measures those of full attention.
"""

from mtraining_nns.errors import UserError


def add_parser(subparsers) -> None:
    """Declare the verb and its arguments."""
    parser = subparsers.add_parser("record", help="keep the indices and the sparsity of a model on a text")
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model folder or a .gguf file")
    add("text", metavar="TEXT", help="text file, folder of text, or prepared data folder")
    add("overrides", nargs="*", default=[], metavar="attention.key=value", help="settings of the operator")
    add("--out", required=True, metavar="FILE", help="the safetensors file to write")
    add(
        "--budgets",
        metavar="FILE",
        help="also write how much each head kept, for mtraining eval --attention minference",
    )
    add("--seq-len", metavar="N", help="tokens, such as 16k (default: the trained length, or the whole text)")
    add("--rope-theta", type=float, metavar="X", help="in place of the model's own, to go past its trained length")
    add("--rows", type=int, default=32, metavar="N", help="queries measured in each layer (default 32)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")


def run(args) -> None:
    """Check, run, write, print."""
    import os
    from pathlib import Path

    from mtraining_nns import recipe_yaml
    from mtraining_nns.cli.words import parse_length

    attention = recipe_yaml.attention(args.overrides, "record")
    for name, path in (("--out", args.out), ("--budgets", args.budgets)):
        if path is None:
            continue
        if not Path(path).absolute().parent.is_dir():
            raise UserError(f"the folder of {name} {path} does not exist; make it first")
        if Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK):
            raise UserError(
                f"{name} {path} cannot be written, it is a folder or lies in one of somebody else; give a file"
            )
    if args.budgets is not None:
        dense = attention.dense_layers or attention.dense_below
        if attention.pattern != "vertical_slash" or dense:
            raise UserError(
                f"--budgets needs vertical_slash in every layer, got {attention.pattern}, dense layers"
                f" {list(attention.dense_layers)}, dense below {attention.dense_below}; leave --budgets or those"
                " settings out"
            )
        if os.path.realpath(args.budgets) == os.path.realpath(args.out):
            raise UserError(f"--out and --budgets are one file, {args.out}; give each its own")
    # Imported here because transformers takes seconds and a mistake above needs none of it.
    from mtraining_nns.eval.attentions import write_budgets
    from mtraining_nns.record import Request, record, sparsity_table

    request = Request(
        model=args.model,
        text=args.text,
        seq_len=None if args.seq_len is None else parse_length(args.seq_len),
        rope_theta=args.rope_theta,
        rows=args.rows,
        device=args.device,
        attention=attention,
    )
    recording = record(request)
    recording.save(args.out)
    if args.budgets is not None:
        write_budgets(args.budgets, recording)
    print(sparsity_table(recording))
    loss, pattern = recording.about["loss"], recording.about["attention"]["pattern"]
    print(f"{args.out}: {len(recording.indices)} layers, {recording.seq_len} tokens, {pattern}, loss {loss:.4f}")
