"""The nnScaler engine: its Trainer, with the parts of a recipe (`mtraining_nns/nnscaler_parts.py`).

    torchrun --nproc-per-node 8 -m mtraining_nns.train recipes/demo.yaml parallel.engine=nnscaler

The model is traced once, cut along the tokens over the ring, and saved as code in checkpoint.dir/nnscaler/code; states
of training lie beside it in nnScaler's own format, which any number of ranks reads. They are pickles: go on from none
but your own.
"""

import os

import torch.distributed as dist
from nnscaler.cli.trainer import Trainer

from mtraining_nns import nnscaler_parts as parts
from mtraining_nns import nnscaler_states, signals
from mtraining_nns.data.mixture import Mixture
from mtraining_nns.data.store import read_manifest
from mtraining_nns.engines.held_out import check_held_out
from mtraining_nns.environment import Process
from mtraining_nns.errors import UserError
from mtraining_nns.export import finish
from mtraining_nns.metrics import summary
from mtraining_nns.nnscaler_args import folders, trainer_args
from mtraining_nns.recipe import Recipe


def train(recipe: Recipe) -> dict:
    """Train a resolved recipe to its last step, export it, and return the summary (also in checkpoint.dir)."""
    process, (_, states) = Process.launched() or Process(), folders(recipe)
    if recipe.data.eval_path is not None:
        check_held_out(recipe, read_manifest(recipe.data.first))
    resume = _resume(recipe, states)
    if process.rank == 0:
        nnscaler_states.remove_incomplete(states)
    path = os.path.join(recipe.checkpoint.dir, "recipe.yaml")
    trainer = Trainer(train_args=trainer_args(recipe, path, resume=resume))
    try:
        trainer.run()
    except signals.Stopped:
        parts.leave()
        dist.destroy_process_group()
        raise
    except RuntimeError as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from error
        raise parts.blame(error) from error
    signals.all_is_saved("all steps are done and saved, the same command exports")
    progress, meter = _hook(trainer).progress, _hook(trainer).meter
    found = summary(progress.losses, progress.values, world=process.world, tokens_per_step=meter.tokens_per_step)
    found["data"] = Mixture.of(recipe).visited(len(progress.losses) * recipe.batch)
    parts.leave()
    dist.barrier()
    if process.rank == 0:
        finish(recipe, nnscaler_states.latest(states), found)
    dist.destroy_process_group()
    return found


def _resume(recipe: Recipe, states: str) -> str | None:
    """The checkpoint to go on from, None for a fresh start; those that were not completed do not count."""
    wanted = recipe.checkpoint.resume
    if wanted not in ("auto", "never"):
        found = nnscaler_states.find(wanted)
        if found is None:
            raise UserError(
                f"{wanted} holds no complete checkpoint of nnScaler; give a checkpoint.dir or one of its step folders"
            )
        return found
    newest = nnscaler_states.latest(states)
    if wanted == "never" and newest is not None:
        raise UserError(
            f"checkpoint.dir={recipe.checkpoint.dir} holds {os.path.basename(newest)} of another run; continue it with"
            " checkpoint.resume=auto, remove it, or take an empty folder"
        )
    return newest


def _hook(trainer: Trainer) -> parts.RecipeHook:
    return next(hook for hook in trainer.hook.hooks if isinstance(hook, parts.RecipeHook))
