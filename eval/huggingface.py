"""The HuggingFace engine: greedy generation and per-token loss of one model folder on one device.

    engine = HuggingFaceEngine("out/hf", attention="mtraining")
    engine.generate([[1, 15, 7]], max_new_tokens=8)   # new tokens only
    engine.nll(token_ids)                             # [S] -> [S-1] fp32

attention: a name of `attentions.py`; "dense" is PyTorch's scaled dot product attention, the others read the prompt with
the operator and decode densely. Only safetensors, never code from the folder.
Prompts are read one by one and decode together.
"""

import dataclasses
import inspect
import re
from contextlib import contextmanager
from datetime import datetime
from itertools import accumulate, takewhile
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from mtraining_nns import hf
from mtraining_nns.data import tokenizer as tokenizers
from mtraining_nns.data.collator import collate
from mtraining_nns.errors import UserError
from mtraining_nns.eval.attentions import attention_of, check_names
from mtraining_nns.eval.model_folder import check_length, context_limit, end_tokens, model_folder, read_causal_lm
from mtraining_nns.eval.questions import Engine
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.ring import Ring

LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # config keys that nll() does not apply
BATCH_TOKENS = 1 << 17  # keys held for prompts that decode together
LOSS_CHUNK = 1024  # positions whose logits exist at once


class TextTokenizer:
    """The model's tokenizer as the tasks see it. Text never becomes a control token, as in training data.

    `first` opens a sequence if the tokenizer opens its own with it (BOS of Llama, None for Qwen); `eos` may be None.
    `clock` is what chat templates that print the date take for now, so that prompts are the same every day.
    """

    clock = datetime(2024, 7, 26)

    def __init__(self, tokenizer):
        self.tokenizer, self.encoder = tokenizer, tokenizers.Encoder(tokenizer)
        self.eos = tokenizer.eos_token_id
        opened = tokenizer("a", add_special_tokens=True)["input_ids"]
        self.first = tokenizer.bos_token_id if opened[0] == tokenizer.bos_token_id else None

    def describe(self) -> dict:
        """Manifest entry: what turns text into tokens."""
        return {"sha256": tokenizers.fingerprint(self.tokenizer), "first": self.first}

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
        try:
            template = (
                f"{self._clock_macro()}\n{self.tokenizer.get_chat_template()}"  # the line end belongs to the macro
            )
            text = self.tokenizer.apply_chat_template(
                message, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program, whatever it raises
            raise UserError(f"the tokenizer's chat template fails ({error}); use --prompt base") from error
        if text.count(mark) != 1:
            raise UserError("the tokenizer's chat template changes or repeats the message; use --prompt base")
        return tuple(self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(mark))

    def _clock_macro(self) -> str:
        """A macro of the name of transformers' `strftime_now`, which it hides; newer releases take no function."""
        codes = [f"%{dash}{letter}" for letter in "aAbBcdfHIjmMpSUwWxXyYzZ" for dash in ("", "-")]
        replaced = "".join(f"|replace('{code}', '{self.clock.strftime(code)}')" for code in codes)
        return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}"

    def decode(self, token_ids: list[int]) -> str:
        """Text of generated tokens, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load_tokenizer(model_dir: str | Path) -> TextTokenizer:
    """Tokenizer of a model folder; UserError if the folder holds none."""
    return TextTokenizer(tokenizers.load(str(model_folder(model_dir))))


class HuggingFaceEngine(Engine):
    """One model folder, loaded. Errors are UserError and name the folder and the fix.

    attention_config, budgets: as for `attention_of`. dtype: of DTYPES, None takes the dtype of the weights.
    device: None takes the GPU if there is one. ring: of ranks that share each sequence for `nll`, all with one
    AttentionConfig, "dense" included; its calls are collective. reach: tokens of the longest question.
    """

    most_together = 32  # prompts that are asked at once; each is read alone, for the sparse attention takes no padding

    def __init__(
        self, model_dir, attention="dense", attention_config=None, budgets=None, device=None, dtype=None, ring=None,
        reach=1,
    ):  # fmt: skip
        check_names(attention, dtype)
        self.ring = ring or Ring.single()
        self.batch_size = max(1, min(self.most_together, BATCH_TOKENS // reach))
        self.model_dir, self.attention = model_folder(model_dir), attention
        self.device = usable_device(device)
        given = attention_config
        whole = self.ring.world == 1
        self.attention_config = attention_of(self.model_dir, attention, given, budgets) if whole else given
        self.context_limit = context_limit(model_dir)
        self.model = self._load("auto" if dtype is None else getattr(torch, dtype))

    def _load(self, dtype):
        sparse = self.attention_config is not None
        if sparse:
            hf.register()
        implementation = hf.NAME if sparse else "sdpa"
        model = read_causal_lm(self.model_dir, attn_implementation=implementation, dtype=dtype, use_safetensors=True)
        model = model.to(self.device).eval()
        if sparse:
            try:
                self.operator = Operator(self.attention_config, self.ring, self.device.type)
                hf.attach(model, self.operator)
            except ValueError as error:
                raise UserError(f"{self.model_dir} cannot use the attention {self.attention}: {error}") from error
        self.ends = end_tokens(self.model_dir)
        names = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # the older name, until transformers 5.23
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
        answers, self.densities = [], []
        while len(answers) < len(prompts):
            left = prompts[len(answers) :]
            answers += self._answer(left[: self._together(left, max_new_tokens)], max_new_tokens)
        return answers

    def _together(self, prompts: list[list[int]], max_new_tokens: int) -> int:
        """How many of the first prompts, at least one, decode at once: padded to the longest, BATCH_TOKENS in all."""
        longest = accumulate(map(len, prompts), max)
        fits = takewhile(lambda found: found[0] * (found[1] + max_new_tokens) <= BATCH_TOKENS, enumerate(longest, 1))
        return max(1, len(list(fits)))

    def _answer(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Each prompt is read alone and gives its first token; then all decode together, padded on the left."""
        read = [self._read(prompt) for prompt in prompts]
        firsts = [first for first, _ in read]
        going = [row for row, first in enumerate(firsts) if max_new_tokens > 1 and first not in self.ends]
        answers = [[first] for first in firsts]
        if not going:
            return answers
        lengths = torch.tensor([len(prompts[row]) for row in going], device=self.device)
        cache = _joined([read[row][1] for row in going], int(lengths.max()))
        del read
        with self._decoding():
            found = self._decode(cache, lengths, [firsts[row] for row in going], max_new_tokens - 1)
        for row, tokens in zip(going, found):
            length = next((place + 1 for place, token in enumerate(tokens) if token in self.ends), len(tokens))
            answers[row] += tokens[:length]
        return answers

    def _decode(self, cache, lengths: torch.Tensor, firsts: list[int], steps: int) -> list[list[int]]:
        """Greedy continuations of rows of `lengths` tokens in a cache that is padded on the left."""
        width, ends = int(lengths.max()), torch.tensor(self.ends, dtype=torch.long, device=self.device)
        mask = (torch.arange(width + steps, device=self.device) >= width - lengths[:, None]).long()
        tokens = torch.tensor(firsts, device=self.device)[:, None]
        ended, found = torch.zeros_like(lengths, dtype=torch.bool), []
        for step in range(steps):
            output = self.model(
                input_ids=tokens,
                attention_mask=mask[:, : width + step + 1],
                position_ids=lengths[:, None] + step,
                use_cache=True,
                **{self.cache_name: cache},
            )
            tokens = self._greedy(output.logits[:, -1])
            found.append(tokens)
            ended |= torch.isin(tokens[:, 0], ends)
            if ended.all():
                break
        return torch.cat(found, 1).tolist()

    def _read(self, prompt: list[int]) -> tuple[int, DynamicCache]:
        """(the first token of the answer, keys and values of the prompt)."""
        input_ids, cache = torch.tensor([prompt], device=self.device), DynamicCache()
        found = self.model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{self.cache_name: cache})
        self.densities.append(self._density())
        return int(self._greedy(found.logits[:, -1])), cache

    def _greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, V] -> the largest of each row, int64 [B, 1]. UserError where that is no finite number, as NaN is."""
        tokens = logits.argmax(-1, keepdim=True)  # NaN counts as the largest
        found = logits.gather(-1, tokens)
        if not found.isfinite().all():
            value = float(found[~found.isfinite()][0])
            raise UserError(
                f"{self.model_dir} answers with logits of {value}; its weights or the dtype {self.dtype} are broken,"
                " take a whole model or another --dtype"
            )
        return tokens

    def _density(self) -> float:
        """Of the sequence that was read last."""
        return 1.0 if self.attention_config is None else round(self.operator.density(), 6)

    @contextmanager
    def _decoding(self):
        """Dense attention with a mask of the padding, which the operator does not take."""
        if self.attention_config is None:
            yield
            return
        self.model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            self.model.set_attn_implementation(hf.NAME)

    @torch.no_grad()
    def nll(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of tokens 1 .. S-1 in nats: [S] int64 -> [S-1] fp32 on the engine's device.

        Logits exist for LOSS_CHUNK positions at a time, never for the sequence.
        """
        self._check_length(len(token_ids))
        transforms = [key for key in LOGIT_TRANSFORMS if getattr(self.model.config, key, None) not in (None, 1)]
        if transforms:
            raise UserError(f"{self.model_dir} sets {transforms[0]}, which the chunked loss lacks; use Llama or Qwen")
        if self.ring.world > 1:
            nll = self._nll_of_the_ring(token_ids)
        else:
            token_ids = token_ids.to(self.device)
            hidden = self.model.model(input_ids=token_ids[None], use_cache=False)[0][0]  # [S, hidden]
            nll = self._losses(hidden[:-1], token_ids[1:])
        self.densities = [self._density()]
        return nll

    def _nll_of_the_ring(self, token_ids: torch.Tensor) -> torch.Tensor:
        layout = self.operator.layout(len(token_ids))
        mine = {name: x.to(self.device) for name, x in collate(token_ids[None], layout, self.ring.rank).items()}
        labels = mine.pop("labels")[0]
        with hf.sequence(self.model, seq_len=len(token_ids)):
            hidden = self.model.model(**mine, use_cache=False)[0][0]
        parts = self.ring.gather(self._losses(hidden, labels))
        return layout.unshard(parts, 0)[: len(token_ids) - 1]

    def _losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """fp32 [tokens], 0 where a label is ignored."""
        chunks = zip(hidden.split(LOSS_CHUNK), labels.split(LOSS_CHUNK), strict=True)
        head = self.model.lm_head
        return torch.cat([F.cross_entropy(head(part).float(), label, reduction="none") for part, label in chunks])

    def describe(self) -> dict:
        """Manifest entry: everything that decides what this engine answers."""
        config = None if self.attention_config is None else dataclasses.asdict(self.attention_config)
        return {
            "engine": "huggingface",
            "attention": self.attention,
            "attention_config": config,
            "dtype": self.dtype,
            "device": self.device.type,
            "generation": {"do_sample": False, "repetition_penalty": 1.0, "eos_token_id": self.ends},
        }

    def close(self) -> None:
        """Nothing to give back."""

    def _check_length(self, tokens: int) -> None:
        check_length(tokens, self.context_limit, self.model_dir)


def _joined(caches: list[DynamicCache], width: int) -> DynamicCache:
    """One cache of a row each, padded on the left to `width` tokens; empties the others."""
    joined = DynamicCache()
    for number in range(len(caches[0].layers)):
        keys, values = ([], [])
        for cache in caches:
            layer = cache.layers[number]
            pad = (0, 0, width - layer.keys.shape[2], 0)
            keys.append(torch.nn.functional.pad(layer.keys, pad))
            values.append(torch.nn.functional.pad(layer.values, pad))
            layer.keys = layer.values = None
        joined.update(torch.cat(keys), torch.cat(values), number)
    return joined


def usable_device(name: str | None) -> torch.device:
    """The device of a name, the GPU if there is one for None; UserError for another."""
    cuda = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if cuda else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name) or (name != "cpu" and not cuda):
        raise UserError(f"device {name!r} is not usable here; use cpu" + (" or cuda" if cuda else ", there is no GPU"))
    return torch.device(name)
