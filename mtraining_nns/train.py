"""One worker of a training run.

    torchrun --nproc-per-node 8 -m mtraining_nns.train recipes/demo.yaml train.steps=20

`mtraining train` starts the same module on one machine. Every rank checks the recipe before anything else. Exit codes:
0, 2 for what the user got wrong (one line from rank 0), 75 where SIGTERM or SIGUSR1 stopped it after a checkpoint
(`signals.py`), 130 for Ctrl-C, 1 for anything else.
"""

import os
import sys
from contextlib import nullcontext

from mtraining_nns import engines, environment, failure, run_lock, signals
from mtraining_nns.errors import UserError
from mtraining_nns.recipe import Recipe


def main(argv: list[str] | None = None) -> int:
    """Train the recipe that `argv` names (path, then overrides); returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    process = environment.Process.launched() or environment.Process()
    environment.end_with_parent()
    signals.listen()
    try:
        environment.prepare_caches()
        run(arguments, process)
    except KeyboardInterrupt:
        return environment.INTERRUPTED
    except signals.Stopped:
        return signals.STOPPED
    except Exception as error:
        return failure.leave(error, process.rank)
    return 0


def run(arguments: list[str], process: environment.Process) -> None:
    """Resolve the recipe, keep a copy of it beside the checkpoints, hand it to its engine."""
    if not arguments or arguments[0].startswith("-"):
        raise UserError("usage: python -m mtraining_nns.train RECIPE [section.key=value ...]")
    recipe = Recipe.load(arguments[0], arguments[1:]).resolve(process.world)
    engines.check(recipe)
    recipe.make_run_folder()
    with run_lock.held(recipe.checkpoint.dir, "checkpoint.dir") if process.rank == 0 else nullcontext():
        if process.rank == 0:
            keep(recipe)
        try:
            engines.train(recipe)
        except Exception as error:
            if failure.is_out_of_memory(error):
                raise failure.NoRoom(failure.explain_memory(error, recipe, process.local_world)) from error
            raise


def keep(recipe: Recipe) -> None:
    """Write `checkpoint.dir/recipe.yaml` in one move: it may be the very file that the other ranks read now."""
    path = os.path.join(recipe.checkpoint.dir, "recipe.yaml")
    with open(path + ".partial", "w", encoding="utf-8") as stream:
        stream.write(recipe.to_yaml())
    os.replace(path + ".partial", path)


if __name__ == "__main__":
    sys.exit(main())
