"""A pretrained model on this machine: a HuggingFace folder with safetensors, or a GGUF file (needs the package gguf).

    source = Pretrained.at("smollm2.gguf")
    source.config(), source.tokenizer(), source.causal_lm(dtype=torch.bfloat16)

No code from the place is run and nothing is fetched. Errors are UserError in one line.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from mtraining_nns.data import tokenizer as tokenizers
from mtraining_nns.errors import UserError
from mtraining_nns.eval.model_folder import read, read_causal_lm
from mtraining_nns.model import check_pretrained


@dataclass(frozen=True)
class Pretrained:
    """Where a model lies, and how transformers is told so."""

    place: str
    folder: str
    source: dict[str, str]

    @classmethod
    def at(cls, place: str) -> "Pretrained":
        """The model of a folder or a .gguf file; UserError if there is none."""
        path = Path(place)
        if path.suffix == ".gguf":
            if not path.is_file():
                raise UserError(f"there is no file {place}; give a model folder or a .gguf file")
            return cls(place, str(path.parent), {"gguf_file": path.name})
        if not path.is_dir():
            raise UserError(
                f"{place} is no folder and no .gguf file; for a hub model run: hf download {place} --local-dir DIR"
            )
        check_pretrained(place)
        return cls(place, place, {})

    @property
    def is_gguf(self) -> bool:
        return bool(self.source)

    def config(self):
        """Its transformers config."""
        return read(AutoConfig, self.folder, place=self.place, trust_remote_code=False, **self.source)

    def tokenizer(self):
        """Its transformers tokenizer."""
        if self.is_gguf:
            return read(AutoTokenizer, self.folder, place=self.place, **self.source)
        return tokenizers.load(self.place)

    def causal_lm(self, config=None, *, dtype: torch.dtype, **options):
        """The causal LM with its weights in `dtype`, none of them missing; options: of from_pretrained."""
        options |= self.source if self.is_gguf else {"use_safetensors": True}
        if config is not None:
            options["config"] = config
        return read_causal_lm(self.folder, place=self.place, dtype=dtype, **options)
