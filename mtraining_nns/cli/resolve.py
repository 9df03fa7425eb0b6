"""Write a recipe as the files that stock nnscaler-train runs: its arguments, and the resolved recipe beside them.

    mtraining resolve recipes/demo.yaml --nproc 2 --out run.yaml
    torchrun --nproc-per-node 2 -m nnscaler.cli.train -f run.yaml

Without GPUs and processes, to see the code that nnScaler writes:

    python -m nnscaler.cli.train -f run.yaml --run_mode compile

Any key of nnScaler can be given after the file, as its own pages say. `mtraining train` with parallel.engine=nnscaler
does the same and exports the model at the end.
"""


def add_parser(subparsers) -> None:
    """Declare the verb and its arguments."""
    parser = subparsers.add_parser("resolve", help="write the file that nnscaler-train runs")
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a YAML file, such as recipes/demo.yaml")
    add("overrides", nargs="*", default=[], metavar="section.key=value", help="changes to the recipe")
    add("--nproc", type=int, required=True, metavar="N", help="processes of the run, over all machines")
    add("--out", required=True, metavar="FILE", help="the file to write; FILE.recipe.yaml goes beside it")


def run(args) -> None:
    """Resolve and write."""
    import os

    import yaml

    from mtraining_nns import engines
    from mtraining_nns.errors import UserError
    from mtraining_nns.nnscaler_args import trainer_args
    from mtraining_nns.recipe import Recipe

    if args.nproc < 1:
        raise UserError(f"--nproc must be at least 1, got {args.nproc}")
    folder = os.path.dirname(os.path.abspath(args.out))
    if not os.path.isdir(folder):
        raise UserError(f"{folder} is no folder; make it or give another --out")
    if os.path.isdir(args.out):
        raise UserError(f"{args.out} is a folder, expected a file to write; give another --out")
    recipe = Recipe.load(args.recipe, args.overrides).resolve(args.nproc)
    if beyond := engines.beyond(recipe, "nnscaler"):
        raise UserError(f"{beyond}, and nnscaler-train is none; leave it out")
    if recipe.checkpoint.resume != "auto":
        raise UserError(
            f"checkpoint.resume={recipe.checkpoint.resume} is for mtraining train; leave it out, nnscaler-train takes"
            " --checkpoint.resume_from.checkpoint PATH"
        )
    recipe.make_run_folder()
    beside = f"{args.out}.recipe.yaml"
    for path, text in (
        (beside, recipe.to_yaml()),
        (args.out, yaml.safe_dump(trainer_args(recipe, beside), sort_keys=False)),
    ):
        try:
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise UserError(f"cannot write {path} ({error.strerror}); give another --out") from error
    print(f"wrote {args.out}; run it with: torchrun --nproc-per-node N -m nnscaler.cli.train -f {args.out}")
