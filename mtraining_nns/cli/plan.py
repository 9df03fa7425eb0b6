"""What a recipe will cost before it is started: memory of a rank, time of a step, and which settings fit.

    mtraining plan recipes/qwen2.5_3b_512k.yaml --gpu h200 --gpus 32
    mtraining plan recipes/qwen2.5_3b_512k.yaml --gpu a100-40gb --gpus 32 --table
    mtraining plan recipes/llama3.1_8b_512k.yaml --constants measured.yaml parallel.cp=8 parallel.ring=auto

Needs the model's config.json or model.init, no GPU, no weights and no data. How many pairs sparse attention will keep
is not known beforehand: --density says it. The numbers of a kind of GPU are packaged, or measured on one by `mtraining
calibrate`; what is assumed of them is named. docs/planning.md says what is counted and what is not.
"""


def add_parser(verbs) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("plan", help="memory, time and cost of a recipe, and which settings fit")
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a YAML file, such as recipes/qwen2.5_3b_512k.yaml")
    add("overrides", nargs="*", default=[], metavar="section.key=value", help="changes to the recipe")
    add("--gpus", type=int, metavar="N", help="of all machines (default: parallel.cp x parallel.dp)")
    add("--gpu", default="h200", metavar="KIND", help="h200 (default), h100, a100-80gb, a100-40gb")
    add("--constants", metavar="FILE", help="numbers of a GPU, of mtraining calibrate, instead of --gpu")
    add("--density", type=float, metavar="SHARE", help="kept pairs of sparse layers (default 0.05, as in the paper)")
    add("--indices", metavar="FILE", help="of mtraining record: their density and their spread over the ring")
    add("--table", action="store_true", help="rings of 8 to 128 GPUs beside the paper's, instead of settings")
    add("--json", action="store_true", help="everything as JSON")


def run(args) -> None:
    """Plan and print."""
    from mtraining_nns.errors import UserError
    from mtraining_nns.recipe import Recipe

    recipe = Recipe.load(args.recipe, args.overrides)
    gpus = args.gpus if args.gpus is not None else (recipe.parallel.cp or 1) * recipe.parallel.dp
    if gpus < 1:
        raise UserError(f"--gpus must be at least 1, got {gpus}")
    if args.density is not None and not 0 < args.density <= 1:
        raise UserError(f"--density must lie in (0, 1], got {args.density}")
    # Imported here because torch takes seconds and a mistake above needs none of it.
    from mtraining_nns.plan.constants import Constants
    from mtraining_nns.plan.planner import Planner

    constants = Constants.load(args.constants) if args.constants else Constants.of(args.gpu)
    planner = Planner.of(recipe.shared_by(gpus), constants, args.density, args.indices)
    print(planner.json(table=args.table) if args.json else planner.text(table=args.table))
