"""Compare two evaluations question by question, with 95 % intervals of their differences.

    mtraining eval --model MODEL --suite ruler --lengths 4k --attention dense --out dense
    mtraining eval --model MODEL --suite ruler --lengths 4k --attention mtraining --out sparse
    mtraining compare dense sparse

A and B are folders that `mtraining eval --out` wrote. Questions of both are compared (other lengths, samples or tasks
are counted), and must be the same: seed, templates, text. What else differs (model, attention, engine, versions) is
printed above the table.
"""


def add_parser(subparsers) -> None:
    """Declare the verb and its arguments."""
    parser = subparsers.add_parser("compare", help="two evaluations, question by question")
    parser.add_argument("a", metavar="A", help="the --out of one evaluation")
    parser.add_argument("b", metavar="B", help="the --out of another")


def run(args) -> None:
    """Print the table."""
    from mtraining_nns.eval.compare import compare

    print(compare(args.a, args.b).table())
