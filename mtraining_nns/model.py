"""The model of a recipe: its transformers config with the rope that the recipe asks for, built fresh or to be loaded.

    config = build_config(recipe)                 # fields checked, rope and trained length set; nothing shared
    lm = build_model(config, seed=0)              # fresh weights in fp32, the same on every rank
    lm = build_model(config, seed=None)           # on the meta device; shard it, then `materialize(lm, device, folder)`
    loss_sum = CausalLMLoss(lm)(input_ids, labels, position_ids)

Only safetensors folders on this machine are read, and no code from them. The rope arithmetic is `rope.py`.
Not for inference: an exported folder loads with plain transformers.
"""

import copy
import difflib
import inspect
import json
import os

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from mtraining_nns import hf
from mtraining_nns.errors import UserError
from mtraining_nns.loss import linear_cross_entropy, token_losses
from mtraining_nns.ops import clock
from mtraining_nns.rope import reset_rotary, with_rope
from mtraining_nns.weights import load_folder

# Models that change the logits after the head: the chunked loss does not see that and would train something else.
LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


class CausalLMLoss(nn.Module):
    """A causal LM that returns its summed loss instead of logits, so that no S x V tensor is made.

    forward: input_ids, labels, position_ids int64 [B, S] (S local), labels as the collator shifted them -> fp32 scalar,
    the sum of the token losses. Backward may run once. by_token: the losses [B, S] themselves, without gradients.
    """

    def __init__(self, lm: nn.Module, *, chunk: int = 1024):
        super().__init__()
        if lm.get_output_embeddings() is not lm.lm_head or lm.lm_head.bias is not None:
            raise UserError(f"{type(lm).__name__} has no plain lm_head without a bias, so its loss cannot be chunked")
        changed = [name for name in LOGIT_CHANGES if getattr(lm.config, name, None) not in (None, 1.0)]
        if changed:
            raise UserError(f"{type(lm).__name__} changes its logits by {changed[0]}; the chunked loss cannot follow")
        self.lm, self.chunk = lm, chunk

    def forward(self, input_ids, labels, position_ids, by_token: bool = False):
        hidden = self.lm.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0]
        loss = token_losses if by_token else linear_cross_entropy
        with clock.span("loss"):
            return loss(hidden, self.lm.lm_head.weight, labels, chunk=self.chunk)


def config_of(recipe):
    """The transformers config of a recipe's model as its config.json or model.init says it; no weights, no data.

    UserError where there is none, and for a fresh model without a vocabulary.
    """
    if recipe.model.path is not None:
        return AutoConfig.from_pretrained(recipe.model.path, local_files_only=True, trust_remote_code=False)
    if "vocab_size" not in recipe.model.init:
        raise UserError("model.init has no vocab_size, which data.path would say; give model.init.vocab_size=...")
    return _fresh_config(recipe.model.init)


def build_config(recipe, manifest: dict):
    """transformers config of a recipe, with its rope and its trained length; raises UserError for what does not fit.

    manifest: of the prepared data. A fresh model takes the end-of-text token from it unless the recipe names one.
    """
    if recipe.model.path is not None:
        config = _read_config(recipe.model.path)
        length = config.max_position_embeddings
    else:
        config = _fresh_config({"bos_token_id": None, "eos_token_id": manifest["eos_id"], **recipe.model.init})
        length = recipe.model.init.get("max_position_embeddings", recipe.train.seq_len)
    if config.vocab_size < manifest["vocab_size"]:
        raise UserError(
            f"the model knows {config.vocab_size} tokens, {recipe.data.first} was made with"
            f" {manifest['vocab_size']}; prepare the data with the model's tokenizer"
        )
    trained = recipe.model.max_position_embeddings or max(length, recipe.train.seq_len)
    if trained < recipe.train.seq_len:
        raise UserError(
            f"model.max_position_embeddings={trained} is below train.seq_len={recipe.train.seq_len};"
            " raise it or leave it out"
        )
    check_layers(recipe.attention, config)
    if getattr(config, "attention_dropout", 0.0):
        raise UserError(
            f"the model's config has attention_dropout={config.attention_dropout}, expected 0: sparse attention does no"
            " dropout; set it in model.init, or in config.json of model.path"
        )
    return with_rope(config, recipe.model.rope, base_length=length, trained_length=trained)


def check_layers(attention, config) -> None:
    """UserError where attention settings name a layer that the model has not."""
    try:
        attention.check_layers(config.num_hidden_layers)
    except ValueError as error:
        raise UserError(str(error)) from None


def build_model(config, *, seed: int | None):
    """Causal LM in fp32 with `attn_implementation="mtraining"`: fresh weights from a seed, or without any on meta.

    The config is copied, so that two models of one config object do not change each other. ValueError for a model that
    the adapter refuses (sliding windows, unknown attention).
    """
    hf.register()
    config = copy.deepcopy(config)
    if seed is None:
        with torch.device("meta"):
            lm = _from_config(config)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            lm = _from_config(config)
        hf.rope_check(lm)
    hf.check_model(lm)
    return lm


def recompute_layers(lm, *, offload_inputs: bool = False) -> None:
    """Activation checkpointing of every decoder layer: its forward pass runs again in the backward pass.

    offload_inputs: what a layer starts from waits in pinned host memory. UserError where transformers cannot do it.
    """
    # the first is the name since transformers 5.20
    enable = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
    if not offload_inputs:
        enable({"use_reentrant": False})
    elif "offload" in inspect.signature(enable).parameters:
        enable({"use_reentrant": False}, offload=True)
    else:
        raise UserError(
            f"train.offload_inputs=true needs transformers 5.17 or newer, got {transformers.__version__}; update it or"
            " leave it out"
        )


def materialize(lm, device, folder: str | None = None, *, alone: bool = False):
    """Give a meta model memory on `device` and its weights from a safetensors folder, then check its rope tables.

    The model may be sharded already: every rank then reads only its own rows. Without a folder the weights stay
    undefined, for a caller that loads them from a checkpoint. alone: other ranks do not take part.
    """
    lm.to_empty(device=device)
    if lm.get_output_embeddings().weight is not lm.get_input_embeddings().weight:
        lm.tie_weights()  # to_empty separated them, if they were one
    reset_rotary(lm)
    if folder is not None:
        load_folder(lm, folder, alone=alone)
    hf.rope_check(lm)


def check_pretrained(folder: str) -> None:
    """UserError unless `folder` is a local HuggingFace folder with safetensors weights."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise UserError(
            f"model.path={folder} must be a local folder with config.json; for a hub model run: hf download {folder}"
            " --local-dir DIR"
        )
    if not any(name.endswith(".safetensors") for name in os.listdir(folder)):
        raise UserError(f"model.path={folder} has no *.safetensors; save the model with save_pretrained first")


def _from_config(config):
    return AutoModelForCausalLM.from_config(config, attn_implementation="mtraining", dtype=torch.float32)


def _read_config(folder: str):
    check_pretrained(folder)
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _fresh_config(init: dict):
    fields = copy.deepcopy(init)
    model_type = fields.pop("model_type")
    try:
        defaults = AutoConfig.for_model(model_type).to_dict()
    except ValueError:
        raise UserError(f"transformers knows no model.init.model_type={model_type!r}; try llama or qwen2") from None
    known = defaults.keys() | {"rope_theta", "rope_scaling", "rope_parameters"}
    for name, value in fields.items():
        is_size = type(defaults.get(name)) is int and not name.endswith("_token_id")
        if is_size and type(value) is not int:
            raise UserError(f"model.init.{name} must be int, got {value!r}")
        if name in SIZES and type(value) is int and value < 1:
            raise UserError(f"model.init.{name} must be at least 1, got {value}; leave it out for the default")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"model.init.{name} is no field of a {model_type} config{hint}")
    try:
        return AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # transformers has an error class for each of its checks
        raise UserError(f"model.init is no valid {model_type} config: {' '.join(str(error).split())}") from error


def greedy_generation(config, folder: str | None = None) -> dict:
    """generation_config.json of an exported model: greedy, with the token ids of the base model's own file.

    Nothing else is taken over: a base model may sample or punish repetition by default, which hides what was trained.
    """
    ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    path = os.path.join(folder, "generation_config.json") if folder else None
    if path and os.path.isfile(path):
        with open(path, encoding="utf-8") as stream:
            base = json.load(stream)
        ids.update({name: base[name] for name in ids if base.get(name) is not None})
    ids = {name: value for name, value in ids.items() if value is not None}
    return {**ids, "do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
