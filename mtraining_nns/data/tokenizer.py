"""Tokenizers: load one, or train a byte-level BPE, and encode documents without letting text act as control tokens.

A document that quotes "<|endoftext|>" must not end itself: control tokens found in text are encoded as the plain
characters they are. Documents get no BOS, no truncation and no padding, whatever the tokenizer's files ask for.
Only tokenizers of the `tokenizers` library (a tokenizer.json) are supported, and no code of a model repository is run.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mtraining_nns.data import store
from mtraining_nns.errors import UserError

BPE_EOS = "<|endoftext|>"
SMALLEST_BPE = 257  # 256 bytes and EOS
BATCH_CHARS = 1 << 22
PIECE_CHARS = 1 << 17
# Some models (Qwen2.5: <|fim_prefix|>) ship control tokens that are not marked special; their form gives them away.
CONTROL_FORM = re.compile(r"<[|｜].*[|｜]>")
# After a letter, before what is no part of its word: pre-tokenizers of the GPT-2 and Llama-3 kind start anew there.
WORD_END = re.compile(r"(?<=[^\W\d_])(?=[^\w'’])")
CUTS_TRIED = 16
CUT_CONTEXT = 256  # characters on either side of a cut that must encode the same with and without it
LONGEST_RUN = 1000  # characters without a break that a tokenizer learns from as one
LONG_RUN = re.compile(rf"\S{{{LONGEST_RUN}}}|\s{{{LONGEST_RUN}}}")


def load(path_or_name: str) -> PreTrainedTokenizerBase:
    """Tokenizer from a folder or from its HuggingFace name; UserError when it cannot be used for training data."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_name)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer at {path_or_name}: {reason}; give a folder or a HuggingFace name") from error
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer of {path_or_name} has no tokenizer.json; convert it to a fast tokenizer first")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {path_or_name} has no EOS token to end documents; set eos_token in its config"
        )
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most vocab_size tokens, EOS included; a small text gives fewer, never an unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BPE_EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=BPE_EOS)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """The texts, cut where a run without a break is too long to count its pairs (encoded binaries)."""
    for text in texts:
        if LONG_RUN.search(text):
            yield from (text[at : at + LONGEST_RUN] for at in range(0, len(text), LONGEST_RUN))
        else:
            yield text


def save(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's files so that transformers 4 and 5 and vLLM can load them."""
    tokenizer.save_pretrained(folder)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if config["tokenizer_class"] == "TokenizersBackend":
        # The name of transformers 5 for the class that both versions know by its older one.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what the tokenizer does: its vocabulary, merges and rules, and which token is EOS."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["truncation"] = rules["padding"] = None
    return hashlib.sha256(json.dumps([rules, tokenizer.eos_token_id], sort_keys=True).encode()).hexdigest()


class Encoder:
    """Documents to token ids, many at once. The tokenizer it is made from is left as it was."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules["truncation"] = rules["padding"] = None
        for token in rules["added_tokens"]:
            token["special"] = token["special"] or CONTROL_FORM.fullmatch(token["content"]) is not None
        self._backend = Tokenizer.from_str(json.dumps(rules))
        self._backend.encode_special_tokens = True
        self.eos_id = tokenizer.eos_token_id
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.dtype = store.dtype_name(self.vocab_size)
        control = {token["id"] for token in rules["added_tokens"] if token["special"]} | {self.eos_id}
        self._control_ids = np.array(sorted(control - {tokenizer.unk_token_id}))

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, without EOS."""
        parts: list[list[np.ndarray]] = [[np.empty(0, store.DTYPES[self.dtype])] for _ in texts]
        pieces = ((owner, piece) for owner, text in enumerate(texts) for piece in self._pieces(text))
        for batch in _batches(pieces):
            encodings = self._backend.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
            for (owner, _), encoding in zip(batch, encodings):
                parts[owner].append(np.array(encoding.ids, store.DTYPES[self.dtype]))
        return [np.concatenate(part) for part in parts]

    def has_control_token(self, ids: np.ndarray) -> bool:
        """Whether plain text became a control token after all, as models with such words in their vocabulary can do."""
        return bool(np.isin(ids, self._control_ids).any())

    def without_control_tokens(self, ids: np.ndarray) -> np.ndarray:
        """The ids [n] that stand for text; int64 or any other integer type is kept."""
        return ids[~np.isin(ids, self._control_ids)]

    def _pieces(self, text: str) -> Iterator[str]:
        """Cut a long text where it changes no token: encodings are about a hundred times the size of their text."""
        start, at_least = 0, PIECE_CHARS
        while len(text) > at_least:
            cut = self._harmless_cut(text, at_least)
            if cut is not None:
                yield text[start:cut]
                start = cut
            # a stretch without a cut, as of encoded binaries, stays whole
            at_least = max(cut or 0, at_least) + PIECE_CHARS
        yield text[start:]

    def _harmless_cut(self, text: str, at_least: int) -> int | None:
        for match in islice(WORD_END.finditer(text, at_least, at_least + PIECE_CHARS), CUTS_TRIED):
            cut = match.start()
            left, right = text[cut - CUT_CONTEXT : cut], text[cut : cut + CUT_CONTEXT]
            if self._ids(left) + self._ids(right) == self._ids(left + right):
                return cut
        return None

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids


def _batches(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch, chars = [], 0
    for owner, piece in pieces:
        batch.append((owner, piece))
        chars += len(piece)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
