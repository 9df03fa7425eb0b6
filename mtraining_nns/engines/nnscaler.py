"""The nnScaler engine: its Trainer, with the parts of a recipe (`mtraining_nns/nnscaler_parts.py`).

    torchrun --nproc-per-node 8 -m mtraining_nns.train recipes/demo.yaml parallel.engine=nnscaler

The model is traced once, cut along the tokens over the ring, and saved as code in checkpoint.dir/nnscaler/code; states
of training lie beside it in nnScaler's own format, which any number of ranks reads. They are pickles: go on from none
but your own.
"""

import os

import torch.distributed as dist
from nnscaler.cli.trainer import Trainer

from mtraining_nns import handover, nnscaler_states, resume, signals
from mtraining_nns import nnscaler_parts as parts
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
    resume_from = _resume(recipe, states, print if process.rank == 0 else lambda text: None)
    if process.rank == 0:
        nnscaler_states.remove_incomplete(states)
    path = os.path.join(recipe.checkpoint.dir, "recipe.yaml")
    trainer = Trainer(train_args=trainer_args(recipe, path, resume_from=resume_from))
    try:
        trainer.run()
    except signals.Stopped:
        parts.leave()
        dist.destroy_process_group()
        raise
    except RuntimeError as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        parts.again(error)
    signals.all_is_saved("all steps are done and saved, the same command exports")
    progress, meter = _hook(trainer).progress, _hook(trainer).meter
    found = summary(progress.losses, progress.values, world=process.world, tokens_per_step=meter.tokens_per_step)
    found["data"] = Mixture.of(recipe).visited(len(progress.losses) * recipe.batch)
    parts.leave()
    dist.barrier()
    if process.rank == 0:
        finish(recipe, resume.latest(recipe.checkpoint.dir, "nnscaler").path, found)
    dist.destroy_process_group()
    return found


def _resume(recipe: Recipe, states: str, tell) -> dict | None:
    """nnScaler's `resume_from` for the checkpoint to go on from, None for a fresh start."""
    found = resume.find(recipe.checkpoint.dir, recipe.checkpoint.resume, "nnscaler", tell)
    if found is None:
        return None
    tell(f"going on from {found.path}" + "".join(f"; {text}" for text in resume.changes(found.path, recipe)))
    before = Recipe.load(os.path.join(found.path, "recipe.yaml")).train.precision
    if found.engine == "nnscaler" and recipe.train.precision == before:
        return {"checkpoint": found.path}
    file = handover.file_for_nnscaler(found, states, bf16=recipe.train.precision == "bf16")
    return {"checkpoint": file, "convert_fn": "mtraining_nns.handover.for_nnscaler"}


def _hook(trainer: Trainer) -> parts.RecipeHook:
    return next(hook for hook in trainer.hook.hooks if isinstance(hook, parts.RecipeHook))
