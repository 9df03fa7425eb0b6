"""Rotary positions of a longer context: the fields of a config, in the spelling of the installed transformers.

    transformers 4.57    config.rope_theta = 5e5    config.rope_scaling = {"rope_type": "yarn", "factor": 4.0, ...}
    transformers 5       config.rope_parameters = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, ...}

`rope_of` and `with_rope` read and write the second form for both. The tables themselves (`inv_freq`) are computed by
transformers; `reset_rotary` recomputes them where a model came through the meta device.
"""

import copy

import torch

from mtraining_nns.errors import UserError

COMMON = {"rope_type", "rope_theta", "partial_rotary_factor"}
ROPE_KEYS = {  # type -> (keys it needs, keys it may have); original_max_position_embeddings has a default
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "yarn": (
        set(),
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"}
        | {"mscale", "mscale_all_dim"},
    ),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
}


def rope_of(config) -> dict:
    """Rope parameters of a config as one dict with rope_type and rope_theta, whatever transformers wrote it."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        parameters = {"rope_theta": config.rope_theta, **(getattr(config, "rope_scaling", None) or {})}
    parameters = dict(parameters)
    parameters["rope_type"] = parameters.get("rope_type") or parameters.pop("type", None) or "default"
    return parameters


def with_rope(config, rope: dict | None, *, base_length: int, trained_length: int):
    """Copy of `config` with max_position_embeddings = trained_length and, where given, the rope of a recipe.

    rope: rope_type, rope_theta (the base model's when left out), factor and what the type needs; it replaces the base
    model's. base_length: what the base model was trained to. UserError for unknown types and keys.
    """
    config = copy.deepcopy(config)
    config.max_position_embeddings = trained_length
    if rope is None:
        parameters = rope_of(config)
        if parameters["rope_type"] == "yarn" and trained_length != base_length:
            raise UserError(
                f"the model's yarn rope belongs to {base_length} positions and {trained_length} are asked for;"
                " say in model.rope what it shall be"
            )
    else:
        parameters = _checked({"rope_theta": rope_of(config)["rope_theta"], **rope}, base_length, trained_length)
    _write(config, parameters)
    return config


def _write(config, parameters: dict) -> None:
    if hasattr(config, "standardize_rope_params"):  # transformers 5
        config.rope_parameters = parameters
        return
    # Version 4 does not read rope_parameters, which a file of version 5 may have left on the config.
    vars(config).pop("rope_parameters", None)
    config.rope_theta = parameters.pop("rope_theta")
    config.rope_scaling = None if parameters["rope_type"] == "default" else parameters


def _checked(rope: dict, base_length: int, trained_length: int) -> dict:
    rope_type = rope.setdefault("rope_type", "default")
    if rope_type not in ROPE_KEYS:
        raise UserError(f"model.rope.rope_type must be one of {', '.join(ROPE_KEYS)}, got {rope_type!r}")
    needed, optional = ROPE_KEYS[rope_type]
    for key in sorted(needed - rope.keys()):
        raise UserError(f"model.rope of type {rope_type} needs {key}")
    for key in sorted(rope.keys() - needed - optional - COMMON):
        raise UserError(f"model.rope.{key} is no parameter of type {rope_type}; drop it or set model.rope.rope_type")
    for key, value in rope.items():
        if key not in ("rope_type", "truncate") and not (isinstance(value, int | float) and value > 0):
            raise UserError(f"model.rope.{key} must be a positive number, got {value!r}; write 2.5e+7 or 25000000.0")
    if "original_max_position_embeddings" in optional:
        rope.setdefault("original_max_position_embeddings", base_length)
    if rope_type == "yarn":
        _set_yarn_factor(rope, trained_length)
    return rope


def _set_yarn_factor(rope: dict, trained_length: int) -> None:
    # transformers 4 computes the factor from the lengths and ignores the one given, version 5 uses the one given:
    # a checkpoint means the same to both only where they agree.
    original = rope["original_max_position_embeddings"]
    factor = rope.setdefault("factor", trained_length / original)
    if factor * original != trained_length:
        raise UserError(
            f"model.rope.factor={factor} x original_max_position_embeddings={original} must be the trained length"
            f" {trained_length}; leave factor out or set model.max_position_embeddings={int(factor * original)}"
        )


def reset_rotary(model) -> None:
    """Recompute every rotary table of a model from its config, in fp32 and in place; other lost buffers are an error.

    Tables are no part of a state dict, so a model that was built on the meta device holds arbitrary memory in them.
    """
    for name, module in model.named_modules():
        buffers = [key for key, _ in module.named_buffers(recurse=False)]
        if not buffers:
            continue
        if "inv_freq" not in buffers:
            lost = f"{name}.{buffers[0]}"
            raise UserError(f"buffer {lost} of {type(model).__name__} cannot be restored; only Llama-like models load")
        with torch.device("cpu"):
            fresh = type(module)(module.config)
        device = module.inv_freq.device
        module.attention_scaling = fresh.attention_scaling
        for key in ("inv_freq", "original_inv_freq"):
            if hasattr(fresh, key):
                setattr(module, key, getattr(fresh, key).detach().to(device))
