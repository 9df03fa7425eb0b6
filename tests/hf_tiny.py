"""Two-layer Qwen2 and Llama models with the operator, for tests of the adapter."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from mtraining_nns import hf
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
ALL = {"block": 16, "p_v": 1.0, "p_s": 1.0}
FEW = {"block": 16, "budget": "fixed", "k_v": 4, "k_s": 1, "sinks": 2, "local": 16, "last_q": 8}


def operator(**settings) -> Operator:
    return Operator(AttentionConfig(**settings), Ring.single(), "cpu")


def config(family="llama", **fields):
    return FAMILIES[family][0](**{**SIZES, **fields})


def build(family="llama", attention="mtraining", settings=None, **fields):
    """A tiny model; the weights depend on the family alone."""
    hf.register()
    torch.manual_seed(0)
    cfg = config(family, **fields)
    cfg._attn_implementation = attention
    model = FAMILIES[family][1](cfg).eval()
    if settings is not None:
        hf.attach(model, operator(**settings))
    return model


def tokens(length, batch=1, seed=0):
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(seed))
