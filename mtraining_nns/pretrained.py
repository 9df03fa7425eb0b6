"""A pretrained model on this machine: a HuggingFace folder with safetensors, or a GGUF file (needs the package gguf).

    source = Pretrained.at("smollm2.gguf")
    source.config(), source.tokenizer(), source.causal_lm(dtype=torch.bfloat16)

No code from the place is run and nothing is fetched. Errors are UserError in one line.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mtraining_nns.data import tokenizer as tokenizers
from mtraining_nns.errors import UserError
from mtraining_nns.model import check_pretrained


@dataclass(frozen=True)
class Pretrained:
    """Where a model lies, and how transformers is told so."""

    place: str
    source: dict[str, str]

    @classmethod
    def at(cls, place: str) -> "Pretrained":
        """The model of a folder or a .gguf file; UserError if there is none."""
        path = Path(place)
        if path.suffix == ".gguf":
            if not path.is_file():
                raise UserError(f"there is no file {place}; give a model folder or a .gguf file")
            return cls(place, {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name})
        if not path.is_dir():
            raise UserError(
                f"{place} is no folder and no .gguf file; for a hub model run: hf download {place} --local-dir DIR"
            )
        check_pretrained(place)
        return cls(place, {"pretrained_model_name_or_path": place})

    @property
    def is_gguf(self) -> bool:
        return "gguf_file" in self.source

    def config(self):
        """Its transformers config."""
        return self._read(AutoConfig, trust_remote_code=False)

    def tokenizer(self):
        """Its transformers tokenizer."""
        return self._read(AutoTokenizer) if self.is_gguf else tokenizers.load(self.place)

    def causal_lm(self, config=None, *, dtype: torch.dtype, **options):
        """The causal LM with its weights in `dtype`, none of them missing; options: of from_pretrained."""
        if not self.is_gguf:
            options["use_safetensors"] = True
        if config is not None:
            options["config"] = config
        lm, loading = self._read(
            AutoModelForCausalLM, trust_remote_code=False, dtype=dtype, output_loading_info=True, **options
        )
        broken = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
        if broken:
            raise UserError(
                f"the model in {self.place} lacks {len(broken)} weights, first {broken[0]}; take a whole one"
            )
        return lm

    def _read(self, kind, **options):
        try:
            return kind.from_pretrained(**self.source, local_files_only=True, **options)
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            fix = "; is it a whole GGUF file?" if self.is_gguf else ""
            raise UserError(f"{self.place} cannot be loaded: {str(error).strip().splitlines()[0]}{fix}") from error
