"""A byte-level tokenizer and a random two-layer Llama, saved as a model folder for evaluation tests."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<eos>"


def byte_tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte, and EOS; with `bos` it opens every text with <bos>, as Llama's does."""
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"eos_token": EOS}
    if bos:
        names["bos_token"] = "<bos>"
        tokenizer.add_special_tokens(["<bos>"])
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def save_llama(folder: Path, *, limit: int = 2048, attention: dict | None = None, tokenizer=None, head_dim=8) -> Path:
    """Write weights, config, tokenizer (a token a byte by default) and, with `attention`, a mtraining.json."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=4 * head_dim,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=limit,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.3,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if attention is not None:
        (folder / "mtraining.json").write_text(
            json.dumps({"format": 1, "trained_length": limit, "attention": attention})
        )
    return folder
