"""Check a recipe, then train it on the processes of this machine.

    mtraining train recipes/demo.yaml --nproc 2
    mtraining train recipes/demo.yaml --nproc 2 train.steps=20 attention.pattern=dense

On several machines, torchrun starts the processes:

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        -m mtraining_nns.train RECIPE section.key=value
"""


def add_parser(verbs) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("train", help="train a recipe on the processes of this machine")
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, such as recipes/demo.yaml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="changes to the recipe")
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="processes to start (default: parallel.cp x dp, else the GPUs, else dp)"
    )


def run(args) -> int:
    """Launch the workers and wait for them."""
    from mtraining_nns.launch import launch

    return launch(args.recipe, args.overrides, args.nproc)
