"""The HuggingFace engine: greedy generation and per-token loss of one model folder on one device.

    engine = HuggingFaceEngine("out/hf", attention="mtraining")
    engine.generate([[1, 15, 7]], max_new_tokens=8)   # new tokens only
    engine.nll(token_ids)                             # [S] -> [S-1] fp32

attention "dense" is PyTorch's scaled dot product attention; "mtraining" reads the prompt with the sparse attention that
the folder was trained with (its mtraining.json) and decodes densely. Only safetensors, never code from the folder.
Not for throughput: prompts run one by one, since the sparse attention takes no padding.
"""

import dataclasses
import json
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from mtraining_nns import hf
from mtraining_nns.data import tokenizer as tokenizers
from mtraining_nns.errors import UserError
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring

ATTENTIONS = {"dense": "sdpa", "mtraining": "mtraining"}  # ours -> transformers' attn_implementation
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # config keys that nll() does not apply
LOSS_CHUNK = 1024  # positions whose logits exist at once


class TextTokenizer:
    """The model's tokenizer as the tasks see it. Text never becomes a control token, as in training data.

    `first` opens a sequence if the tokenizer opens its own with it (BOS of Llama, None for Qwen); `eos` may be None.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.encoder = tokenizer, tokenizers.Encoder(tokenizer)
        self.eos = tokenizer.eos_token_id
        opened = tokenizer("a", add_special_tokens=True)["input_ids"]
        self.first = tokenizer.bos_token_id if opened[0] == tokenizer.bos_token_id else None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        return [ids.tolist() for ids in self.encoder.encode(texts)]

    def stream(self, documents: tuple[str, ...]) -> torch.Tensor:
        """All documents as one stream, each ended by EOS if the tokenizer has one: [T] int64."""
        closing = [] if self.eos is None else [self.eos]
        return torch.tensor([token for ids in self.encode(list(documents)) for token in (*ids, *closing)])

    def chat_turn(self, mark: str) -> tuple[list[int], list[int]]:
        """Token ids of the chat template before and after a message `mark`, up to the beginning of the answer."""
        if self.tokenizer.chat_template is None:
            raise UserError("the tokenizer has no chat template; use --prompt base")
        message = [{"role": "user", "content": mark}]
        text = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        if text.count(mark) != 1:
            raise UserError("the tokenizer's chat template changes or repeats the message; use --prompt base")
        return tuple(self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(mark))

    def decode(self, token_ids: list[int]) -> str:
        """Text of generated tokens, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load_tokenizer(model_dir: str | Path) -> TextTokenizer:
    """Tokenizer of a model folder; UserError if the folder holds none."""
    return TextTokenizer(tokenizers.load(str(model_folder(model_dir))))


def context_limit(model_dir: str | Path) -> int | None:
    """max_position_embeddings of a model folder, read without its weights; None if the model states no limit."""
    try:
        config = AutoConfig.from_pretrained(model_folder(model_dir), trust_remote_code=False)
    except OSError as error:
        raise UserError(f"{model_dir}/config.json cannot be read: {str(error).splitlines()[0]}") from error
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def end_tokens(model_dir: str | Path) -> list[int]:
    """Token ids that end a text, by the folder's generation_config.json or else its config."""
    folder = model_folder(model_dir)
    try:
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        eos = AutoConfig.from_pretrained(folder, trust_remote_code=False).eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def weights_dtype(model_dir: str | Path) -> str:
    """The dtype that a folder's config states for its weights, fp32 if it states none."""
    config = AutoConfig.from_pretrained(model_folder(model_dir), trust_remote_code=False)
    return str(config.dtype or torch.float32).removeprefix("torch.")


def load_attention(model_dir: str | Path, overrides: dict | None = None) -> AttentionConfig:
    """The attention a folder was trained with: its mtraining.json, with `overrides` on top.

    Without a mtraining.json the overrides alone say it; without either it is a UserError, never a default.
    """
    path = model_folder(model_dir) / "mtraining.json"
    if not path.is_file() and not overrides:
        raise UserError(
            f"{path} does not exist, so the trained attention is unknown; evaluate an exported folder, "
            "say it with --attention-config k=v, or use --attention dense"
        )
    try:
        fields = dict(json.loads(path.read_text())["attention"]) if path.is_file() else {}
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is no record of an attention ({reason}); export the model again") from error
    fields.update(overrides or {})
    known = [field.name for field in dataclasses.fields(AttentionConfig)]
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise UserError(f"unknown attention key {unknown[0]!r}; known are {', '.join(known)}")
    try:
        return AttentionConfig(**fields)
    except (ValueError, TypeError) as error:
        raise UserError(f"attention of {path.parent}: {error}") from error


def check_names(attention: str, dtype: str | None) -> None:
    """UserError for a method of attention or a dtype that no engine knows."""
    if attention not in ATTENTIONS or dtype not in (None, *DTYPES):
        raise UserError(
            f"attention must be one of {', '.join(ATTENTIONS)} and dtype one of {', '.join(DTYPES)}, "
            f"got attention={attention!r}, dtype={dtype!r}"
        )


def attention_of(model_dir, attention: str, given: AttentionConfig | dict | None) -> AttentionConfig | None:
    """What a method of attention computes: None for "dense"; given: a config, or changes to the folder's own."""
    if attention != "mtraining":
        if given is not None:
            raise UserError(f"attention_config is for attention='mtraining', got attention={attention!r}; drop one")
        return None
    return given if isinstance(given, AttentionConfig) else load_attention(model_dir, given)


class HuggingFaceEngine:
    """One model folder, loaded. Errors are UserError and name the folder and the fix.

    attention_config: AttentionConfig, or a dict of overrides on the folder's mtraining.json; only for "mtraining"
    dtype: a key of DTYPES, None takes the dtype of the weights. device: None takes the GPU if there is one.
    """

    batch_size = 1  # the sparse attention takes no padding

    def __init__(self, model_dir, attention="dense", attention_config=None, device=None, dtype=None):
        check_names(attention, dtype)
        self.model_dir, self.attention = model_folder(model_dir), attention
        self.device = _device(device)
        self.attention_config = attention_of(model_dir, attention, attention_config)
        self.context_limit = context_limit(model_dir)
        self.model = self._load("auto" if dtype is None else DTYPES[dtype])

    def _load(self, dtype):
        if self.attention == "mtraining":
            hf.register()
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                self.model_dir,
                attn_implementation=ATTENTIONS[self.attention],
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{self.model_dir} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
        broken = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
        if broken:
            raise UserError(f"{self.model_dir} lacks {len(broken)} weights, first {broken[0]}; export it again")
        model = model.to(self.device).eval()
        if self.attention == "mtraining":
            try:
                hf.attach(model, Operator(self.attention_config, Ring.single(), self.device.type))
            except ValueError as error:
                raise UserError(f"{self.model_dir} cannot use its trained attention: {error}") from error
        self.greedy = _greedy(end_tokens(self.model_dir))
        # generate() fills whatever a given config leaves open from the model's own, so the folder's must go.
        model.generation_config = GenerationConfig()
        return model

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy continuations, new tokens only, at most `max_new_tokens` each (fewer if the model ends).

        Raises UserError when prompt plus budget exceeds the model's limit; nothing is truncated.
        """
        for prompt in prompts:
            self._check_length(len(prompt) + max_new_tokens)
        outputs = []
        for prompt in prompts:
            input_ids = torch.tensor([prompt], device=self.device)
            generated = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=GenerationConfig(**self.greedy, max_new_tokens=max_new_tokens),
            )
            outputs.append(generated[0, len(prompt) :].tolist())
        return outputs

    @torch.no_grad()
    def nll(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of tokens 1 .. S-1 in nats: [S] int64 -> [S-1] fp32 on the engine's device.

        Logits exist for LOSS_CHUNK positions at a time, never for the sequence.
        """
        self._check_length(len(token_ids))
        transforms = [key for key in LOGIT_TRANSFORMS if getattr(self.model.config, key, None) not in (None, 1)]
        if transforms:
            raise UserError(f"{self.model_dir} sets {transforms[0]}, which the chunked loss lacks; use Llama or Qwen")
        token_ids = token_ids.to(self.device)
        hidden = self.model.model(input_ids=token_ids[None], use_cache=False)[0][0]  # [S, hidden]
        head, targets = self.model.lm_head, token_ids[1:]
        chunks = zip(hidden[:-1].split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True)
        return torch.cat([F.cross_entropy(head(part).float(), target, reduction="none") for part, target in chunks])

    def describe(self) -> dict:
        """Manifest entry: everything that decides what this engine answers."""
        config = None if self.attention_config is None else dataclasses.asdict(self.attention_config)
        return {
            "engine": "huggingface",
            "attention": self.attention,
            "attention_config": config,
            "dtype": self.dtype,
            "device": self.device.type,
            "generation": self.greedy,
        }

    def close(self) -> None:
        """Nothing to give back."""

    def _check_length(self, tokens: int) -> None:
        check_length(tokens, self.context_limit, self.model_dir)


def check_length(tokens: int, limit: int | None, model_dir: str | Path, name="max_position_embeddings") -> None:
    """UserError if `tokens` (prompt plus generation) exceed the model's limit, or another one of that name."""
    if limit is not None and tokens > limit:
        raise UserError(
            f"{tokens} tokens exceed {name}={limit} of {model_dir}; "
            "use a shorter length or a checkpoint exported for this one"
        )


def _greedy(ends: list[int]) -> dict:
    """Greedy decoding, said explicitly; the folder contributes only the token ids that end a text."""
    return {
        "do_sample": False,
        "num_beams": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else 0,
    }


def _device(name: str | None) -> torch.device:
    cuda = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if cuda else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name) or (name != "cpu" and not cuda):
        raise UserError(f"device {name!r} is not usable here; use cpu" + (" or cuda" if cuda else ", there is no GPU"))
    return torch.device(name)


def model_folder(model_dir: str | Path) -> Path:
    folder = Path(model_dir)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no model folder (no config.json); give the folder of an exported model")
    return folder
