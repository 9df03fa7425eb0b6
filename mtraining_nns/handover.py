"""A checkpoint of one engine as the other's: the same weights, moments, losses and place in the data.

    torch      ->  nnScaler     its Trainer reads the folder through `for_nnscaler`, one process a machine
    nnScaler   ->  torch        rank 0 writes step-000020/ beside nnscaler/states/0000-0020/
    nnScaler   ->  nnScaler     of another train.precision: through `for_nnscaler`, too

Each takes host memory for the whole state, 12 bytes a weight, in one process. Learning rate, weight decay and betas
are the recipe's. fp32 weights go over whole, also where nnScaler computes with bf16 copies of them.
"""

import json
import os
import socket

import torch
import torch.distributed as dist
from transformers import AutoConfig

from mtraining_nns import checkpoint, nnscaler_states
from mtraining_nns.checkpoint import KINDS, TRAINER
from mtraining_nns.errors import UserError
from mtraining_nns.host_adamw import MOMENTS
from mtraining_nns.model import build_model
from mtraining_nns.resume import Found, read_json
from mtraining_nns.weights import named_weights, read_tensors

TEXTS = ("recipe.yaml", "config.json", "generation_config.json")
MASTER = "fp32_params"  # of nnScaler's optimizer beside the moments, where it computes with other weights
OPTIMIZERS = 2  # of `nnscaler_parts.decay_class`


def to_torch(found: Found, folder: str) -> str:
    """Write a checkpoint of nnScaler as one of the torch engine into `folder` and return its path. Collective."""
    fault = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            fault = _write(found, folder)
        except UserError as error:
            fault = str(error)
    if fault := checkpoint.of_rank_0(fault):
        raise UserError(f"{found.path} cannot be written for the torch engine: {fault}")
    return checkpoint.folders(folder, found.step)[0]


def _write(found: Found, folder: str) -> str | None:
    lm, whole = _on_meta(found.path), _merged(found.path)
    told, states = whole["mtraining"], whole["optimizer"]["state"]
    trainer = {"format": 1, "step": found.step, **json.loads(told if isinstance(told, str) else told[0])}
    files = {TRAINER: json.dumps(trainer)}
    for name in TEXTS:
        with open(os.path.join(found.path, name), encoding="utf-8") as stream:
            files[name] = stream.read()
    kinds: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}
    for name in named_weights(lm):
        kinds["weight"][name] = whole["model"][nnscaler_states.PREFIX + name].float()
    for number, (name, _) in enumerate(lm.named_parameters()):
        for kind in MOMENTS:
            kinds[kind][name] = states[number][kind]
    return checkpoint.save_alone(folder, found.step, kinds.items(), files)


def file_for_nnscaler(found: Found, states: str, *, bf16: bool) -> str:
    """Path of a file that names a checkpoint of any engine, for `for_nnscaler`; each rank may write it."""
    path = os.path.join(os.path.dirname(states), "going_on.ckpt")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = f"{path}.{socket.gethostname()}-{os.getpid()}"
    torch.save({"path": os.path.abspath(found.path), "bf16": bf16}, partial)
    os.replace(partial, path)
    return path


def for_nnscaler(named: dict) -> dict:
    """The state that nnScaler's Trainer would have merged, of the checkpoint that `file_for_nnscaler` has named."""
    found = Found.at(named["path"])
    state = _merged(found.path) if found.engine == "nnscaler" else _from_torch(found.path)
    if named["bf16"]:
        state["model"] = {name: weight.bfloat16() for name, weight in state["model"].items()}
    else:
        for moments in state["optimizer"]["state"].values():
            del moments[MASTER]
    return state


def _merged(path: str) -> dict:
    """A checkpoint of nnScaler with fp32 weights in the model as in the optimizer, whatever it was trained in."""
    whole = nnscaler_states.merged(path)
    states, model = whole["optimizer"]["state"], whole["model"]
    for number, (name, _) in enumerate(_on_meta(path).named_parameters()):
        key = nnscaler_states.PREFIX + name
        states[number][MASTER] = model[key] = states[number].get(MASTER, model[key]).float()
    return whole


def _from_torch(path: str) -> dict:
    lm, trainer = _on_meta(path), read_json(path, TRAINER)
    weights, parameters = named_weights(lm), [name for name, _ in lm.named_parameters()]
    stored = {f"weight/{name}": torch.empty(x.shape, dtype=torch.float32) for name, x in weights.items()}
    stored |= {f"{kind}/{name}": torch.empty_like(stored[f"weight/{name}"]) for kind in MOMENTS for name in parameters}
    read_tensors(stored, path, alone=True)
    states = {}
    for number, name in enumerate(parameters):
        states[number] = {kind: stored[f"{kind}/{name}"] for kind in MOMENTS}
        states[number] |= {"step": torch.tensor(float(trainer["step"])), MASTER: stored[f"weight/{name}"]}
    # settings of the optimizer and the schedule are those of the recipe: the hook fills them in
    groups = {number: [{}] for number in range(OPTIMIZERS)}
    return {
        "model": {nnscaler_states.PREFIX + name: stored[f"weight/{name}"] for name in weights},
        "optimizer": {
            "state": states,
            "param_groups": [{"children": groups, "params": list(range(len(parameters)))}],
        },
        "lr_scheduler": {
            "last_epoch": trainer["step"],
            "_step_count": trainer["step"] + 1,
            "lr_lambdas": [None] * OPTIMIZERS,
        },
        "train_status": {"finished_train_steps": trainer["step"]},
        "train_args": {"checkpoint": {"save_type": "merged"}},
        "mtraining": json.dumps({key: trainer[key] for key in ("losses", "values", "data")}),
    }


def _on_meta(path: str):
    """The causal LM of a checkpoint, without weights."""
    return build_model(AutoConfig.from_pretrained(path, local_files_only=True), seed=None)
