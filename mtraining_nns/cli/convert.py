"""Write a GGUF file as a HuggingFace folder, which recipes and evaluations read.

    mtraining convert smollm2.gguf --out models/smollm2

Quantized weights are unpacked to --dtype. Needs the package gguf. The folder appears complete or not at all.
"""

DTYPES = ("bfloat16", "float32")


def add_parser(verbs) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("convert", help="turn a GGUF file into a HuggingFace folder")
    parser.add_argument("model", metavar="FILE.gguf", help="the model; nothing is fetched")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write; it must not exist")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help=f"of the weights (default {DTYPES[0]})")


def run(args) -> None:
    """Convert and say where."""
    from mtraining_nns.export import convert

    convert(args.model, args.out, args.dtype)
    print(f"converted {args.model} to {args.out}")
