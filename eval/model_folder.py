"""A model folder as transformers and vLLM write and read it: what it says of itself, and its weights.

No code from the folder is run and nothing is fetched. Whatever is wrong with it is a UserError in one line.
"""

from pathlib import Path
from textwrap import shorten

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from mtraining_nns.errors import UserError


def model_folder(model_dir: str | Path) -> Path:
    """The path of a folder with a config.json."""
    folder = Path(model_dir)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no model folder (no config.json); give the folder of an exported model")
    return folder


def read(kind, path: str | Path, *, place=None, **options):
    """`kind.from_pretrained(path, **options)` of a class of transformers. place: its name in errors."""
    try:
        return kind.from_pretrained(path, local_files_only=True, **options)
    except Exception as error:  # a class of its own for each check, and those of JSON, safetensors and torch
        reason = shorten(str(error).split("\n\n")[0], 240).rstrip(".") or type(error).__name__
        fix = "install it" if isinstance(error, ImportError) else "take a whole model, or export it again"
        raise UserError(f"{place or path} cannot be loaded: {reason}; {fix}") from error


def read_causal_lm(path: str | Path, *, place=None, **options):
    """The causal LM with its weights, none of them missing or of another shape; options: of from_pretrained."""
    told = {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": False, **options}
    lm, loading = read(AutoModelForCausalLM, path, place=place, **told)
    broken = sorted(
        key if isinstance(key, str) else key[0] for key in loading["missing_keys"] | loading["mismatched_keys"]
    )
    if broken:
        raise UserError(
            f"{place or path} lacks {len(broken)} weights, first {broken[0]}; take a whole model, or export it again"
        )
    return lm


def context_limit(model_dir: str | Path) -> int | None:
    """max_position_embeddings of a model folder, read without its weights; None if the model states no limit."""
    return getattr(_config(model_dir).get_text_config(), "max_position_embeddings", None)


def end_tokens(model_dir: str | Path) -> list[int]:
    """Token ids that end a text, by the folder's generation_config.json or, where there is none, its config."""
    folder = model_folder(model_dir)
    stated = (folder / "generation_config.json").is_file()
    eos = (read(GenerationConfig, folder) if stated else _config(folder)).eos_token_id
    ends = [] if eos is None else eos if isinstance(eos, list | tuple) else [eos]
    if not all(type(token) is int for token in ends):
        raise UserError(
            f"{folder} states the eos_token_id {eos!r}, expected token ids; mend its generation_config.json"
        )
    return list(ends)


def weights_dtype(model_dir: str | Path) -> str:
    """The dtype that a folder's config states for its weights, fp32 if it states none."""
    return str(_config(model_dir).dtype or torch.float32).removeprefix("torch.")


def check_length(tokens: int, limit: int | None, model_dir: str | Path, name="max_position_embeddings") -> None:
    """UserError if `tokens` (prompt plus generation) exceed the model's limit, or another one of that name."""
    if limit is not None and tokens > limit:
        raise UserError(
            f"{tokens} tokens exceed {name}={limit} of {model_dir}; "
            "use a shorter length or a checkpoint exported for this one"
        )


def _config(model_dir: str | Path):
    folder = model_folder(model_dir)
    return read(AutoConfig, folder, trust_remote_code=False)
