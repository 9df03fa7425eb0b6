"""One worker of a training run.

    torchrun --nproc-per-node 8 -m mtraining_nns.train recipes/demo.yaml train.steps=20

`mtraining train` starts the same module on one machine. Every rank checks the recipe before anything else. Exit codes:
0, 2 for what the user got wrong (one line from rank 0), 130 for Ctrl-C, 1 for anything else.
"""

import json
import os
import sys
import time
import traceback

from mtraining_nns import engines, environment
from mtraining_nns.errors import UserError
from mtraining_nns.recipe import Recipe


def main(argv: list[str] | None = None) -> int:
    """Train the recipe that `argv` names (path, then overrides); returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    process = environment.Process.launched() or environment.Process()
    environment.end_with_parent()
    environment.prepare_caches()
    try:
        run(arguments, process)
    except KeyboardInterrupt:
        return environment.INTERRUPTED
    except Exception as error:
        return fail(error, process.rank)
    return 0


def run(arguments: list[str], process: environment.Process) -> None:
    """Resolve the recipe, keep a copy of it beside the checkpoints, hand it to its engine."""
    if not arguments or arguments[0].startswith("-"):
        raise UserError("usage: python -m mtraining_nns.train RECIPE [section.key=value ...]")
    recipe = Recipe.load(arguments[0], arguments[1:]).resolve(process.world)
    engines.choose(recipe.parallel.engine)
    if process.rank == 0:
        keep(recipe)
    engines.train(recipe)


def keep(recipe: Recipe) -> None:
    """Write `checkpoint.dir/recipe.yaml` in one move: it may be the very file that the other ranks read now."""
    recipe.make_run_folder()
    path = os.path.join(recipe.checkpoint.dir, "recipe.yaml")
    with open(path + ".partial", "w", encoding="utf-8") as stream:
        stream.write(recipe.to_yaml())
    os.replace(path + ".partial", path)


def fail(error: Exception, rank: int) -> int:
    """Leave the error for the launcher, print it where nobody else will, return the exit code."""
    user = isinstance(error, UserError)
    text = "".join(traceback.format_exception(error))
    file = environment.error_file()
    if file is not None:  # the format that torchrun reads; `seconds` is ours, its own timestamp is too coarse to order
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "seconds": time.time(), "user": user}
        message = str(error) if user else f"{type(error).__name__}: {error}"
        with open(file, "w", encoding="utf-8") as stream:
            json.dump({"message": {"message": message, "extraInfo": extra}}, stream)
    if not environment.has_parent() and not (user and rank):
        print(f"mtraining: error: {error}" if user else f"rank {rank}: {text}", file=sys.stderr)
    return UserError.exit_code if user else 1


if __name__ == "__main__":
    sys.exit(main())
