"""HuggingFace causal LMs on the sparse operator: `attn_implementation="mtraining"`, models unmodified.

    hf.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="mtraining")
    hf.attach(model, Operator(AttentionConfig(p_v=0.9, p_s=0.9), Ring.single(), "cuda"))

Qwen2 and Llama families. The operator is plain causal attention over one document a row: padding masks, packed
documents, sliding windows, dropout and score caps are refused, never ignored. The pattern is chosen from the last
queries, so which keys an early query keeps can depend on later tokens; no query ever attends to one.

Generation: the prompt runs through the operator, every further token attends densely to the cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring

NAME = "mtraining"
REFUSED = ("sliding_window", "softcap", "s_aux", "head_mask", "output_attentions", "dropout", "attention_sink")


@dataclass
class _Attached:
    """What the attention layers of one model share; lives on the modules, never on the config."""

    operator: Operator
    seq_len: int | None = None  # global length, None where each row is a whole sequence


def register() -> None:
    """Make `attn_implementation="mtraining"` known to transformers; idempotent."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, _no_mask)


def attach(model: nn.Module, operator, dtype: torch.dtype | None = None, *, seq_len: int | None = None) -> None:
    """Let every attention layer of the model use `operator`, an `Operator` or what is called alike.

    dtype: of the activations, where the parameters' own does not say it. seq_len: as for `sequence`, for good.
    Raises ValueError as `check_model`, and where no backend can do the model's shape.
    """
    check_model(model)
    shared = _Attached(operator, seq_len)
    for layer in _attention_layers(model):
        layer._mtraining = shared
    config = layer.config
    heads = config.num_attention_heads, config.num_key_value_heads
    operator.prepare(layer.head_dim, *heads, dtype or model.dtype, config.num_hidden_layers)


def detach(model: nn.Module) -> None:
    """Undo `attach`: layers go back to an operator with default settings."""
    for layer in _attention_layers(model):
        vars(layer).pop("_mtraining", None)


@contextmanager
def sequence(model: nn.Module, *, seq_len: int) -> Iterator[None]:
    """Forwards inside carry this rank's shard of a sequence of `seq_len` tokens, in the operator's layout."""
    shared = getattr(next(iter(_attention_layers(model)), None), "_mtraining", None)
    if shared is None:
        raise ValueError("hf.sequence needs a model with an operator; call hf.attach(model, operator) first")
    before, shared.seq_len = shared.seq_len, seq_len
    try:
        yield
    finally:
        shared.seq_len = before


def check_model(model: nn.Module) -> None:
    """Raise ValueError for a model that the operator would compute wrongly."""
    config = model.config
    if config._attn_implementation != NAME:
        raise ValueError(
            f'the model was loaded with attn_implementation="{config._attn_implementation}",'
            f' expected "{NAME}"; pass attn_implementation="{NAME}" to from_pretrained or from_config'
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or getattr(
        config, "use_sliding_window", False
    ):
        raise ValueError(
            "the model uses sliding-window attention, expected full attention in every layer;"
            " set use_sliding_window=false in its config if you mean to train it without windows"
        )
    if not _attention_layers(model):
        raise ValueError(
            f"{type(model).__name__} has no attention layer of the Qwen2 or Llama kind (q_proj, layer_idx)"
        )


def rope_check(model: nn.Module) -> None:
    """Raise ValueError unless every rotary table is fp32 and equals the formula of the model's config.

    Casting a model to bf16, or building it on the meta device, ruins the tables without any other sign.
    """
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            continue
        if module.inv_freq.is_meta:
            raise ValueError(f"{name}.inv_freq is on the meta device; initialise the rotary buffers after loading")
        if module.inv_freq.dtype != torch.float32:
            raise ValueError(
                f"{name}.inv_freq is {module.inv_freq.dtype}, expected torch.float32; cast parameters only"
            )
        with torch.device("cpu"):
            expected = type(module)(config=module.config).inv_freq
        if not torch.equal(module.inv_freq.cpu(), expected):
            raise ValueError(
                f"{name}.inv_freq differs from the formula of the config (got {module.inv_freq[:2].tolist()},"
                f" expected {expected[:2].tolist()}); initialise the rotary buffers after loading"
            )


def attention_forward(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """transformers' attention interface: query [B, N, S, D], key and value [B, H, S, D] -> ([B, S, N, D], None)."""
    if attention_mask is not None:
        raise ValueError(
            'attn_implementation="mtraining" takes no attention mask, got one of shape '
            f"{tuple(attention_mask.shape)}; give whole sequences without padding"
        )
    for name in REFUSED:
        if kwargs.get(name):
            raise ValueError(f'attn_implementation="mtraining" does not do {name}, got {kwargs[name]!r}')
    if query.shape[2] != key.shape[2]:
        return _decode(query, key, value, scaling), None
    shared = getattr(module, "_mtraining", None) or _default(module, query.device.type)
    if shared.seq_len is None and module.layer_idx == 0:
        _check_positions(kwargs.get("position_ids"))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return shared.operator(q, k, v, layer=module.layer_idx, seq_len=shared.seq_len, scale=scaling), None


def _decode(query, key, value, scale):
    """One new token against the cache: dense, every cached key is visible."""
    if query.shape[2] != 1:
        raise ValueError(
            f"got {query.shape[2]} queries for {key.shape[2]} cached keys; give the whole prompt at once"
            " (no chunked prefill, no static cache), then one token at a time"
        )
    out = nn.functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def _no_mask(*args, attention_mask=None, **kwargs):
    """transformers' mask interface: a mask that hides nothing becomes None, any other is refused."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            'attn_implementation="mtraining" takes no padding, got an attention_mask with zeros;'
            " give sequences of equal length, or one at a time"
        )
    _check_cache(**kwargs)


def _check_cache(kv_length, q_length=None, q_offset=0, cache_position=None, **kwargs):
    """A static cache has slots that no token has filled yet; decoding would attend to them."""
    if cache_position is not None:  # transformers 4
        q_length = len(cache_position)
        q_offset = 0 if kv_length == q_length else int(cache_position[0])  # asks the device only where a cache is used
    if kv_length > int(q_offset) + q_length:
        raise ValueError(
            f"got {int(q_offset) + q_length} tokens in {kv_length} cache slots; a static cache is not supported,"
            " generate with the default (dynamic) cache"
        )


def _check_positions(position_ids) -> None:
    """Packed documents restart their positions; the operator would attend across them."""
    if position_ids is None:
        return
    steps = position_ids.diff(dim=-1)
    if not bool((steps == 1).all()):
        raise ValueError(
            'attn_implementation="mtraining" takes one document a row, got position_ids that do not rise by one;'
            " pass packed documents one at a time, or name the sharded length with hf.sequence"
        )


def _default(module, device_type: str) -> _Attached:
    module._mtraining = _Attached(Operator(AttentionConfig(), Ring.single(), device_type))
    return module._mtraining


def _attention_layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "q_proj")]
