"""Training states on disk: complete or invisible, readable by any number of ranks, no pickle.

    checkpoint.dir/
      step-000020/                    appears by one rename, after every file is on disk
        shard-00001-model-0000{1,2,3}-of-00003.safetensors     rank 0: weights, first and second moments
        shard-00002-...                                        rank 1
        trainer.json                  step, losses so far, world
        recipe.yaml  config.json  generation_config.json       what an export needs
        manifest.json                 name and size of every file, written last
      .step-000030.partial/           a save that was killed; the next save removes it

Weights and moments are fp32 shards of FSDP's DTensors, written by torch.distributed.checkpoint, so another world size
reads them too. Random numbers need no state: each step seeds its own. Ranks must see one file system.
"""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from mtraining_nns import permissions
from mtraining_nns.errors import UserError
from mtraining_nns.host_adamw import MOMENTS
from mtraining_nns.optim import make_room
from mtraining_nns.resume import MANIFEST, prune, read_json
from mtraining_nns.weights import cause, named_weights, read_tensors

TRAINER = "trainer.json"
KINDS = ("weight", *MOMENTS)  # a file for each kind and rank: one is in memory at a time, and an export reads one kind


@dataclass(frozen=True)
class State:
    """What is saved and restored: a causal LM (sharded or not) and its AdamW."""

    lm: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by `kind/name`. The optimizer has made a step, or `load` has made room for its moments."""
        named = {f"weight/{name}": tensor for name, tensor in named_weights(self.lm).items()}
        for name, parameter in self.lm.named_parameters():
            for kind in MOMENTS if parameter.requires_grad else ():
                named[f"{kind}/{name}"] = self.optimizer.state[parameter][kind]
        return named


def save(folder: str, step: int, state: State, *, files: dict[str, str], keep: int) -> str:
    """Write the state after `step` optimizer steps and return its folder. Collective.

    files: small texts by name, trainer.json among them. A kill at any moment leaves the earlier checkpoints; complete
    ones beyond the newest `keep` go once this one is complete. UserError on all ranks where the disk takes no more.
    """
    final, partial = folders(folder, step)
    if _rank() == 0:
        _remove_partial(folder)
        os.makedirs(partial)
    _barrier()
    tensors = state.tensors()
    place = {name: KINDS.index(name.split("/", 1)[0]) + 1 for name in tensors}
    writer = HuggingFaceStorageWriter(partial, fqn_to_index_mapping=place, save_distributed=True)
    try:
        dcp.save({k: v.detach() for k, v in tensors.items()}, storage_writer=writer, no_dist=not dist.is_initialized())
        fault = None
    except CheckpointException as error:
        fault = cause(error)
    if _rank() == 0:
        fault = fault or _complete(partial, final, files)
    fault = of_rank_0(fault)
    if fault:
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"saving {final} failed, earlier checkpoints are kept: {fault}; mend that, and the same command goes on"
            " from the latest of them"
        )
    if _rank() == 0:
        prune(folder, step, keep)
    _barrier()
    return final


def folders(folder: str, step: int) -> tuple[str, str]:
    """(a checkpoint, where it lies until it is complete)."""
    return os.path.join(folder, f"step-{step:06d}"), os.path.join(folder, f".step-{step:06d}.partial")


def save_alone(folder: str, step: int, kinds: Iterable[tuple[str, dict[str, torch.Tensor]]], files: dict) -> str | None:
    """`save` by one process, of whole tensors by kind and name: why it failed, or None."""
    final, partial = folders(folder, step)
    _remove_partial(folder)
    os.makedirs(partial)
    try:
        for number, (kind, tensors) in enumerate(kinds, 1):
            named = {f"{kind}/{name}": tensor.contiguous() for name, tensor in tensors.items()}
            path = os.path.join(partial, f"shard-00001-model-{number:05d}-of-{len(KINDS):05d}.safetensors")
            save_file(named, path)
            permissions.as_opened(path)
        fault = _complete(partial, final, files)
    except (OSError, SafetensorError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        shutil.rmtree(partial, ignore_errors=True)
    return fault


def load(path: str, state: State) -> dict:
    """Fill the weights and moments of `state` from a complete checkpoint; returns its trainer.json. Collective."""
    trainer = read_json(path, TRAINER)
    make_room(state.optimizer, trainer["step"])
    read_tensors(state.tensors(), path)
    return trainer


def _complete(partial: str, final: str, files: dict[str, str]) -> str | None:
    """Add the small files and publish the folder; why that failed, or None."""
    try:
        for name, text in files.items():
            write(os.path.join(partial, name), text)
        _publish(partial, final)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _publish(partial: str, final: str) -> None:
    """Make a finished folder visible: manifest, then the rename, each on disk before the next."""
    sizes = {name: os.path.getsize(os.path.join(partial, name)) for name in sorted(os.listdir(partial))}
    write(os.path.join(partial, MANIFEST), json.dumps({"format": 1, "files": sizes}, indent=1))
    _sync_folder(partial)
    if os.path.isdir(final):  # left by a run that went back to an earlier step, or incomplete
        shutil.rmtree(final)
    os.rename(partial, final)
    _sync_folder(os.path.dirname(final))


def write(path: str, text: str) -> None:
    """A small file, on disk when this returns."""
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _remove_partial(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        if name.startswith(".step-") and name.endswith(".partial"):
            shutil.rmtree(os.path.join(folder, name))


def of_rank_0(text: str | None) -> str | None:
    """The text of rank 0 on all ranks. Collective."""
    told = [text]
    if dist.is_initialized():
        dist.broadcast_object_list(told)
    return told[0]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
