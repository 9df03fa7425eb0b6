"""Compile a model with nnScaler and print the plan: what is cut along the tokens, what is sent, what each GPU holds.

    mtraining parallelize my_package.model:Model --world 4 --seq-len 8k --out plan/
    mtraining parallelize my_package.model:Model --world 8 --seq-len 32k --out plan/ --zero 3 attention.pattern=dense

MODEL is called as Model(attention, seq_len=...) with an AttentionConfig and returns a module whose forward takes
samples (input_ids, labels, position_ids) and returns the summed loss. It is looked for from the current folder. No GPU
is needed and nothing is trained; an operator that cannot be cut is an error that names its line.
"""


def add_parser(subparsers) -> None:
    """Declare the verb and its arguments."""
    parser = subparsers.add_parser("parallelize", help="compile a model of your own with nnScaler and print the plan")
    add = parser.add_argument
    add("model", metavar="MODEL", help="package.module:Model")
    add("overrides", nargs="*", default=[], metavar="attention.key=value", help="settings of the operator")
    add("--world", type=int, required=True, metavar="N", help="GPUs of the plan")
    add("--seq-len", required=True, metavar="N", help="tokens, such as 8k")
    add("--out", required=True, metavar="DIR", help="where the generated code goes")
    add("--batch", type=int, default=1, metavar="N", help="sequences of a micro-batch (default 1)")
    add("--zero", type=int, choices=(0, 1, 3), default=1, help="nnScaler's use_zero (default 1)")
    add("--no-recompute", action="store_true", help="keep all activations of a layer for the backward pass")


def run(args) -> None:
    """Check, compile, print."""
    from pathlib import Path

    from mtraining_nns import recipe_yaml
    from mtraining_nns.cli.words import parse_length
    from mtraining_nns.errors import UserError

    attention = recipe_yaml.attention(args.overrides, "parallelize")
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {args.out} cannot be made ({error.strerror}); give the path of a folder") from error
    # Imported here because torch takes seconds and a mistake above needs none of it.
    from mtraining_nns.parallelize import Request, compile_plan

    request = Request(
        model=args.model,
        world=args.world,
        seq_len=parse_length(args.seq_len),
        out=args.out,
        batch=args.batch,
        zero=args.zero,
        recompute=not args.no_recompute,
        attention=attention,
    )
    print(compile_plan(request).table())
