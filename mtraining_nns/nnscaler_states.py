"""Checkpoints of nnScaler's Trainer: complete ones alone count, and each holds what an export needs.

    checkpoint.dir/nnscaler/states/
      0000-0004/          epoch and step
        *.ckpt            one a rank, in nnScaler's own format
        recipe.yaml  config.json  generation_config.json
        complete.json     name and size of every file, written last

nnScaler's files are pickles: read none but your own. Only `merged_weights` needs nnScaler.
"""

import glob
import json
import os
import shutil
import socket
import time

from mtraining_nns.checkpoint import write
from mtraining_nns.engines import nnscaler_fault
from mtraining_nns.errors import UserError
from mtraining_nns.resume import COMPLETE, Found

PREFIX = "traced.lm."  # of the causal LM's weights in what is compiled


def mark(folder: str, step: int, files: dict[str, str]) -> str:
    """Say that the checkpoint of a step is complete and return its path; files: small texts by name that go into it."""
    path = next(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(f"-{step:04d}"))
    for file, text in files.items():
        write(os.path.join(path, file), text)
    sizes = {file: os.path.getsize(os.path.join(path, file)) for file in os.listdir(path)}
    write(os.path.join(path, f".{COMPLETE}"), json.dumps({"step": step, "files": sizes}))
    os.replace(os.path.join(path, f".{COMPLETE}"), os.path.join(path, COMPLETE))
    return path


def wait(folder: str, step: int, timeout_s: float) -> None:
    """Return when rank 0, maybe on another machine, has marked the checkpoint of a step, or after the time-out."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and not glob.glob(os.path.join(glob.escape(folder), f"*-{step:04d}", COMPLETE)):
        time.sleep(0.1)


def remove_incomplete(folder: str) -> None:
    """Remove what killed saves left: the trainer would count it among the checkpoints to keep."""
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        found = Found.at(os.path.join(folder, name))
        if found is not None and found.fault():
            shutil.rmtree(found.path)


def named(model) -> list[tuple]:
    """(name in the causal LM, parameter) of nnScaler's generated module, in the order of its graph."""
    return [(model.fullmap[key].orig_name.removeprefix(PREFIX), p) for key, p in model.named_parameters()]


def merged_weights(path: str) -> dict:
    """Tensors of the causal LM by name, on the CPU, from all ranks' files of a checkpoint."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in merged(path, model_only=True)["model"].items()}


def merged(path: str, *, model_only: bool = False) -> dict:
    """A checkpoint as one process would have written it, in nnScaler's form, on the CPU."""
    if fault := nnscaler_fault():
        raise UserError(f"{path} is a checkpoint of nnScaler, which reads it: {fault}")
    from nnscaler.cli.serialization import Checkpointer
    from nnscaler.cli.trainer import Trainer

    files = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(".ckpt")]
    whole = os.path.join(path, f".merged-{socket.gethostname()}-{os.getpid()}.ckpt")
    try:
        Trainer.merge_checkpoint(files, whole, model_only=model_only)
        return Checkpointer().load(whole)
    finally:
        if os.path.exists(whole):
            os.remove(whole)
