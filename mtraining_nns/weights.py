"""Read a HuggingFace safetensors folder into a model, sharded or not: each rank reads only the rows it holds.

    load_folder(lm, "models/qwen2.5-3b")      # fp32 master weights from bf16 files

Strict: a missing, unexpected or differently shaped tensor is a UserError. Not for training states (`checkpoint.py`).
"""

import re
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from mtraining_nns.errors import UserError

DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # old checkpoints hold the rope tables, which follow from the config


def named_weights(lm) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers of a causal LM by name, each storage once (a tied head only as the embedding)."""
    saved = lm.state_dict().keys()
    return {**dict(lm.named_parameters()), **{name: b for name, b in lm.named_buffers() if name in saved}}


def load_folder(lm, folder: str, *, alone: bool = False) -> None:
    """Copy the weights of a folder into `lm`, cast to its dtype.

    Collective where a process group exists, unless this process reads `alone`.
    """
    weights = named_weights(lm)
    stored = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    tied = lm.state_dict().keys() - weights.keys()
    for name in sorted(weights.keys() - stored.keys()):
        raise UserError(f"{folder} has no tensor {name}, which {type(lm).__name__} needs; is it another model?")
    for name in sorted(stored.keys() - weights.keys() - tied):
        if not DERIVED.search(name):
            raise UserError(f"{folder} holds {name}, which {type(lm).__name__} does not know; is it another model?")
    for name, weight in weights.items():
        if stored[name].size != weight.shape:
            raise UserError(f"{name} in {folder} has shape {list(stored[name].size)}, expected {list(weight.shape)}")
    read_tensors(weights, folder, alone=alone)


def read_tensors(tensors: dict[str, torch.Tensor], folder: str, *, alone: bool = False) -> None:
    """Fill tensors (DTensors too) by name from the safetensors files of a folder, whatever sharding wrote them.

    Collective where a process group exists, unless this process reads `alone`.
    """
    targets = {name: tensor.detach() for name, tensor in tensors.items()}
    alone = alone or not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(targets, storage_reader=HuggingFaceStorageReader(folder), no_dist=alone)
        except CheckpointException as error:
            raise UserError(f"{folder} cannot be read, remove it or take another: {cause(error)}") from error


def cause(error: CheckpointException) -> str:
    """The first failure in one line; torch's own text is every rank's traceback, and no `except Exception` sees it."""
    failure, _ = next(iter(error.failures.values()))
    return " ".join(f"{type(failure).__name__}: {failure}".split())
