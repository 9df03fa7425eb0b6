"""Where evaluation text comes from.

    a file                  one document; .jsonl is one document a line (key "text")
    a folder                every UTF-8 file below it is a document, in sorted order
    a prepared data folder  its held-out documents, decoded with its own tokenizer; never the training tokens

Text, not token ids, goes to the tasks: each model reads it through its own tokenizer.
Not for training: what is read stays in memory.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtraining_nns.data import store
from mtraining_nns.data.records import SkipLog
from mtraining_nns.data.sources import Document, Sources
from mtraining_nns.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Documents and how to find them again."""

    documents: tuple[str, ...]
    path: str
    skipped: dict  # what below the path was left out, by reason

    def describe(self) -> dict:
        """Manifest entry; the hash covers exactly the documents that were read."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.encode())
            digest.update(b"\0")
        return {
            "path": self.path,
            "documents": len(self.documents),
            "characters": sum(map(len, self.documents)),
            "skipped": self.skipped,
            "sha256": digest.hexdigest(),
        }


def read_source(path: str | Path, *, max_bytes: int) -> TextSource:
    """Documents of `path` until about `max_bytes` of text.

    Raises UserError when the path does not exist, holds no text, or is prepared data without a held-out part.
    """
    path, log = Path(path), SkipLog()
    if (path / store.TOKENS).is_file():
        documents = tuple(_heldout_documents(path, max_bytes))
    else:
        documents = tuple(doc.text for doc in Sources([str(path)], max_bytes=max_bytes).documents(log))
    if not documents:
        reasons = ", ".join(f"{count} {reason}" for reason, count in log.reasons.items()) or "it is empty"
        raise UserError(f"no evaluation text in {path}: {reasons}; give UTF-8 text or a prepared data folder")
    return TextSource(documents=documents, path=str(path), skipped=dict(log.reasons))


def read_books(path: str | Path, log: SkipLog) -> Iterator[Document]:
    """The text files of a folder one by one, in sorted order; UserError without any. log: of those left out."""
    sources, found = Sources([str(path)], glob="*.txt"), False
    for document in sources.documents(log):
        found = True
        yield document
    if not found:
        raise UserError(f"no books in {path}{left_out(log.reasons)}; give a folder of UTF-8 .txt files")


def left_out(reasons: dict[str, int]) -> str:
    """`, left out: 2 not UTF-8, 1 empty` of counts by reason, nothing of none."""
    told = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return told and f", left out: {told}"


def _heldout_documents(folder: Path, max_bytes: int) -> Iterator[str]:
    """Documents of DIR/heldout, or of a folder that is itself named heldout."""
    from transformers import AutoTokenizer

    heldout = folder if folder.name == store.HELDOUT else folder / store.HELDOUT
    if not heldout.is_dir():
        raise UserError(f"{folder} has no held-out part to evaluate on; prepare it with --holdout 0.05, or give a text")
    manifest = store.read_manifest(heldout)
    tokens, starts = store.open_tokens(heldout, manifest), store.read_boundaries(heldout, manifest)
    tokenizer = AutoTokenizer.from_pretrained(heldout / "tokenizer", trust_remote_code=False)
    for begin, end in zip(starts[:-1], starts[1:], strict=True):
        text = tokenizer.decode(tokens[begin : end - 1].tolist(), clean_up_tokenization_spaces=False)  # without its EOS
        yield text
        max_bytes -= len(text.encode())
        if max_bytes <= 0:
            return
