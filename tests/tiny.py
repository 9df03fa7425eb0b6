"""The smallest recipe that is still real: two Llama layers of head dim 64, random tokens, stripes of 32."""

from pathlib import Path

import numpy as np
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mtraining_nns.data import packing, store
from mtraining_nns.eval import niah
from mtraining_nns.recipe import Recipe

VOCABULARY = 128
MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,  # large enough that attention is not uniform and the pattern has something to choose
}
ATTENTION = {"block": 32, "budget": "fixed", "k_v": 8, "k_s": 2, "sinks": 2, "local": 32, "last_q": 16}


def prepare(folder: Path, tokens: int, seed: int = 0) -> Path:
    """A prepared folder of random tokens in documents of 700, as `mtraining prepare` would write it."""
    rng = np.random.RandomState(seed)
    folder.mkdir(parents=True)
    writer = store.TokenWriter(folder, "uint16")
    for start in range(0, tokens, 700):
        length = min(700, tokens - start)
        writer.append(np.append(rng.randint(1, VOCABULARY, length - 1), 0), text_bytes=length)
    store.write_manifest(folder, {**writer.close(), "eos_id": 0, "vocab_size": VOCABULARY})
    return folder


def pack(folder: Path, seq_len: int) -> Path:
    """The same folder, packed as `mtraining prepare --pack best_fit` would do it."""
    manifest = store.read_manifest(folder)
    boundaries = store.read_boundaries(folder, manifest)
    store.write_manifest(folder, manifest | packing.write(folder, f"packing-{seq_len}.npy", boundaries, seq_len))
    return folder


def save_tokenizer(data: Path) -> None:
    """A token a word or digit in the prepared folder `data`: few enough for VOCABULARY, so most words are unknown."""
    known = ["<eos>", "<unk>", *"0123456789", *"magic number city text The of is".split(), *niah.CITIES]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(data / "tokenizer")


def write_recipe(folder: Path, *overrides: str, tokens: int = 2048) -> str:
    """Path of a recipe of 4 steps at S = 256 whose data and checkpoints lie in `folder`; overrides as in the CLI."""
    data = folder / "data"
    if not data.exists():
        prepare(data, tokens)
    tree = {
        "model": {"init": MODEL, "dtype": "float32"},
        "data": {"path": str(data)},
        "train": {"steps": 4, "seq_len": 256, "lr": 1e-3, "precision": "fp32", "loss_chunk": 48, "recompute": False},
        "attention": ATTENTION,
        "parallel": {"engine": "torch"},
        "checkpoint": {"dir": str(folder / "run")},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    path.write_text(Recipe.load(str(path), overrides).to_yaml(), encoding="utf-8")
    return str(path)
