"""A training checkpoint as a HuggingFace folder that plain transformers and vLLM load.

    mtraining export runs/demo/sparse --out runs/demo/sparse/hf

    OUT/  model*.safetensors  config.json  generation_config.json  tokenizer files
          mtraining.json      the attention that the model was trained with, its trained length

Needs no GPU and no process group, and memory for the weights once in the export's dtype. The folder appears complete
or not at all. A tied head is written once, as transformers expects.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig

from mtraining_nns import nnscaler_states, permissions, resume
from mtraining_nns.data import tokenizer as tokenizers
from mtraining_nns.data.atomic import new_folder
from mtraining_nns.errors import UserError
from mtraining_nns.model import build_model, greedy_generation, materialize
from mtraining_nns.pretrained import Pretrained
from mtraining_nns.recipe import Recipe
from mtraining_nns.rope import rope_of
from mtraining_nns.weights import named_weights, read_tensors

ATTENTION = "mtraining.json"
TOKENIZER = "tokenizer"  # folder beside the checkpoints, copied there from the prepared data when training starts


def export(source: str, out: str) -> None:
    """Write the HuggingFace folder `out` from a checkpoint, or from the latest complete one of a run's folder.

    Checkpoints of both engines will do; those of nnScaler need it.
    """
    path, run, read = _locate(source)
    recipe = Recipe.load(os.path.join(path, "recipe.yaml"))
    check_out(out)
    lm = read(path, getattr(torch, recipe.model.dtype))
    publish(lm, recipe, out, resume.read_json(path, "generation_config.json"), os.path.join(run, TOKENIZER))


def read_trained(source: str, dtype: torch.dtype) -> torch.nn.Module:
    """The causal LM that `export` would write, on the CPU in `dtype`."""
    path, _, read = _locate(source)
    return read(path, dtype)


def _locate(source: str) -> tuple[str, str, Callable[[str, torch.dtype], torch.nn.Module]]:
    """(checkpoint, folder of its run, what reads it)."""
    if not os.path.isdir(source):
        raise UserError(f"{source} is no checkpoint; give a checkpoint.dir or one of its step folders")
    found = resume.find(source, source, "torch", tell=print)
    return found.path, found.run, read_model if found.engine == "torch" else read_nnscaler_model


def convert(source: str, out: str, dtype: str = "bfloat16") -> None:
    """Write the HuggingFace folder `out` from a GGUF file, its weights in `dtype`."""
    model = Pretrained.at(source)
    if not model.is_gguf:
        raise UserError(f"{source} is a HuggingFace folder already; give a .gguf file")
    if os.path.exists(out):
        raise UserError(f"{out} exists; give the path of a new folder")
    config, tokenizer = model.config(), model.tokenizer()
    unpacked = named_weights(model.causal_lm(dtype=torch.float32))
    lm = _empty_model(config, getattr(torch, dtype))
    for name, weight in named_weights(lm).items():
        weight.detach().copy_(unpacked[name])
    with new_folder(Path(out)) as folder:
        _save(lm, folder)
        tokenizers.save(tokenizer, folder)


def _save(lm, folder: Path) -> None:
    """Weights and config.json."""
    lm.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        permissions.as_opened(weights)
    (folder / "config.json").write_text(config_text(lm.config), encoding="utf-8")


def finish(recipe: Recipe, path: str, found: dict) -> None:
    """End a run on its first rank: the export of its last checkpoint, and its figures in summary.json."""
    export(path, recipe.export.dir)
    with open(os.path.join(recipe.checkpoint.dir, "summary.json"), "w", encoding="utf-8") as stream:
        json.dump(found, stream, indent=1)
    print(f"exported to {recipe.export.dir}", flush=True)


def texts_of(recipe: Recipe, config) -> dict[str, str]:
    """The small files that a checkpoint holds for an export, by name; config: of the causal LM."""
    generation = greedy_generation(config, recipe.model.path)
    return {
        "recipe.yaml": recipe.to_yaml(),
        "config.json": config_text(config),
        "generation_config.json": json.dumps(generation, indent=2),
    }


def keep_tokenizer(recipe: Recipe) -> None:
    """Copy the data's tokenizer into checkpoint.dir, so that an export needs nothing else."""
    source, target = (os.path.join(folder, TOKENIZER) for folder in (recipe.data.first, recipe.checkpoint.dir))
    if os.path.isdir(source):
        shutil.copytree(source, target, dirs_exist_ok=True)


def check_out(out: str) -> None:
    """UserError where an export would replace something else."""
    if os.path.exists(out) and not os.path.isdir(out):
        raise UserError(f"{out} is a file, expected a folder to export into; give another path")
    if os.path.isdir(out) and os.listdir(out) and not os.path.isfile(os.path.join(out, ATTENTION)):
        raise UserError(f"{out} holds something else than an export and would be replaced; give an empty folder")


def publish(lm, recipe: Recipe, out: str, generation: dict, tokenizer: str) -> None:
    """Write the HuggingFace folder `out` from a causal LM on the CPU; generation: of generation_config.json."""
    with new_folder(Path(out)) as folder:
        _save(lm, folder)
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
        (folder / ATTENTION).write_text(attention_text(recipe), encoding="utf-8")
        if os.path.isdir(tokenizer):
            shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
        else:
            print(f"export: {tokenizer} does not exist, so {out} has no tokenizer", flush=True)


def read_model(path: str, dtype: torch.dtype) -> torch.nn.Module:
    """Causal LM of a checkpoint on the CPU in `dtype`, its rope tables in fp32."""
    lm = _empty_model(_config_of(path), dtype)
    read_tensors({f"weight/{name}": tensor for name, tensor in named_weights(lm).items()}, path, alone=True)
    return lm.eval()


def read_nnscaler_model(path: str, dtype: torch.dtype) -> torch.nn.Module:
    """The same of a checkpoint of nnScaler's Trainer."""
    lm, stored = _empty_model(_config_of(path), dtype), nnscaler_states.merged_weights(path)
    for name, weight in named_weights(lm).items():
        weight.detach().copy_(stored[name])
    return lm.eval()


def _config_of(path: str):
    return AutoConfig.from_pretrained(path, local_files_only=True)


def _empty_model(config, dtype: torch.dtype) -> torch.nn.Module:
    lm = build_model(config, seed=None).to(dtype)
    materialize(lm, "cpu")
    return lm


def config_text(config) -> str:
    """config.json with the rope in the spelling of transformers 4 (rope_theta, rope_scaling) and of version 5."""
    fields = json.loads(config.to_json_string(use_diff=False))
    rope = rope_of(config)
    fields["rope_parameters"] = rope
    fields["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    fields["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def attention_text(recipe: Recipe) -> str:
    """mtraining.json, from which an evaluation takes the attention of training."""
    attention = dataclasses.asdict(recipe.attention)
    fields = {"format": 1, "attention": attention, "trained_length": recipe.train.seq_len}
    return json.dumps(fields, indent=2) + "\n"
