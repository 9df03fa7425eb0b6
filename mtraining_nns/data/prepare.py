"""Text to a prepared folder: tokenise the documents of some sources and pack them into one stream.

    SOURCE...  ->  documents  ->  ids + EOS  ->  DIR/tokens.bin, boundaries.npy, manifest.json, tokenizer/
                       └ --holdout: whole documents, by a hash of their content  ->  DIR/heldout/

Equal documents are always on the same side of the hold-out. Memory holds one batch of documents, not the corpus.
Tokenising happens once, here: for a corpus that changes while training runs, this is the wrong tool.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from mtraining_nns.data import store, tokenizer
from mtraining_nns.data.atomic import new_folder
from mtraining_nns.data.records import SkipLog
from mtraining_nns.data.source_ids import SourceTokenizer
from mtraining_nns.data.sources import Document, Sources
from mtraining_nns.errors import UserError

BATCH_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What `mtraining prepare` was asked for; lengths in tokens, `max_bytes` in bytes of text."""

    sources: tuple[str, ...]
    out: str
    tokenizer: str | None = None
    train_bpe: int | None = None
    seq_len: int | None = None
    holdout: float = 0.0
    glob: str = "*"
    max_bytes: int | None = None
    text_key: str = "text"
    source_tokenizer: str | None = None
    overwrite: bool = False

    def __post_init__(self):
        if (self.tokenizer is None) == (self.train_bpe is None):
            raise UserError("exactly one of --tokenizer and --train-bpe is needed")
        if self.train_bpe is not None and self.train_bpe < tokenizer.SMALLEST_BPE:
            raise UserError(f"--train-bpe {self.train_bpe} is too small; bytes and EOS need {tokenizer.SMALLEST_BPE}")
        if not 0 <= self.holdout < 1:
            raise UserError(f"--holdout {self.holdout} is not a fraction of the documents; use 0 <= FRACTION < 1")
        if self.seq_len is not None and self.seq_len < 2:
            raise UserError(f"--seq-len {self.seq_len} is too short; a sequence needs at least 2 tokens")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UserError(f"--max-bytes {self.max_bytes} leaves no text; give at least 1")
        _check_apart(self.sources, self.out)

    def holds_out(self, document: Document) -> bool:
        """Whether a document is kept from training."""
        return int.from_bytes(document.digest[:8], "little") < self.holdout * 2**64


def prepare(config: PrepareConfig) -> tuple[dict, bool]:
    """Manifest of the prepared folder, and whether it was there already with the same settings and sources."""
    out = Path(config.out).resolve()
    _check_replaceable(out)
    chosen = tokenizer.load(config.tokenizer) if config.tokenizer else None
    source_tokenizer = SourceTokenizer(config.source_tokenizer) if config.source_tokenizer else None
    sources = Sources(
        config.sources,
        glob=config.glob,
        text_key=config.text_key,
        max_bytes=config.max_bytes,
        source_tokenizer=source_tokenizer,
    )
    settings = _settings(config, chosen, source_tokenizer)
    if (out / store.MANIFEST).exists() and not config.overwrite:
        _check_same(out, settings, sources)
        return _recount(out, config.seq_len), True
    with new_folder(out) as folder:
        if chosen is None:
            chosen = tokenizer.train_bpe(_training_texts(config, sources), config.train_bpe)
        return _write(folder, config, settings, sources, chosen), False


def _settings(
    config: PrepareConfig, chosen: PreTrainedTokenizerBase | None, source_tokenizer: SourceTokenizer | None
) -> dict:
    """Everything but the text that decides which tokens come out."""
    return {
        "tokenizer": tokenizer.fingerprint(chosen) if chosen else None,
        "train_bpe": config.train_bpe,
        "holdout": config.holdout,
        "glob": config.glob,
        "max_bytes": config.max_bytes,
        "text_key": config.text_key,
        "source_tokenizer": source_tokenizer.fingerprint if source_tokenizer else None,
    }


def _write(
    folder: Path, config: PrepareConfig, settings: dict, sources: Sources, chosen: PreTrainedTokenizerBase
) -> dict:
    """Fill the temporary folder and return its manifest."""
    encoder, log, changed, text_hash = tokenizer.Encoder(chosen), SkipLog(), SkipLog(), hashlib.sha256()
    writers = {"train": store.TokenWriter(folder, encoder.dtype)}
    if config.holdout:
        writers["heldout"] = store.TokenWriter(folder / store.HELDOUT, encoder.dtype)
    documents = _hashed(sources.documents(log, changed), text_hash)
    with _progress_bar("tokenise", sources) as bar:
        for document, ids in _encoded(documents, encoder, log):
            part = "heldout" if config.holds_out(document) else "train"
            writers[part].append(ids, text_bytes=document.size_bytes)
            bar.update(document.size_bytes)
    counts = {part: writer.close() | _sequences(writer.tokens, config.seq_len) for part, writer in writers.items()}
    _check_counts(counts, config, log)
    shared = {
        "eos_id": encoder.eos_id,
        "vocab_size": encoder.vocab_size,
        "tokenizer": {"source": config.tokenizer or "trained here", "sha256": tokenizer.fingerprint(chosen)},
        "settings": settings,
        "sources": list(config.sources),
        "sources_sha256": text_hash.hexdigest(),
        "skipped": log.to_manifest(),
    }
    if config.source_tokenizer:
        shared["changed"] = {"source_tokenizer": config.source_tokenizer} | changed.to_manifest()
    if "heldout" in counts:
        tokenizer.save(chosen, folder / store.HELDOUT / "tokenizer")
        store.write_manifest(folder / store.HELDOUT, counts["heldout"] | shared)
        shared["heldout"] = {key: counts["heldout"][key] for key in ("documents", "tokens")}
    tokenizer.save(chosen, folder / "tokenizer")
    return store.write_manifest(folder, counts["train"] | shared)


def _encoded(
    documents: Iterable[Document], encoder: tokenizer.Encoder, log: SkipLog
) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its ids and EOS; documents that cannot be encoded are logged."""
    for batch in _batches(documents):
        for document, ids in zip(batch, encoder.encode([document.text for document in batch])):
            if not len(ids):
                log(document.name, "gives no tokens")
            elif encoder.has_control_token(ids):
                log(document.name, "the tokenizer reads some of its text as a control token")
            else:
                yield document, np.append(ids, ids.dtype.type(encoder.eos_id))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size_bytes = [], 0
    for document in documents:
        batch.append(document)
        size_bytes += document.size_bytes
        if size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _hashed(documents: Iterable[Document], text_hash) -> Iterator[Document]:
    for document in documents:
        text_hash.update(document.digest)
        yield document


def _training_texts(config: PrepareConfig, sources: Sources) -> Iterator[str]:
    with _progress_bar("train tokenizer", sources) as bar:
        for document in sources.documents(SkipLog()):
            if not config.holds_out(document):
                yield document.text
            bar.update(document.size_bytes)


def _progress_bar(label: str, sources: Sources) -> tqdm:
    return tqdm(total=sources.total_bytes, desc=label, unit="B", unit_scale=True, mininterval=1)


def _sequences(tokens: int, seq_len: int | None) -> dict:
    sequences, remainder = divmod(tokens, seq_len) if seq_len else (None, None)
    return {"seq_len": seq_len, "sequences": sequences, "remainder": remainder}


def _check_counts(counts: dict[str, dict], config: PrepareConfig, log: SkipLog) -> None:
    found = sum(part["documents"] for part in counts.values())
    if not found:
        reasons = ", ".join(f"{count} {reason}" for reason, count in log.reasons.items()) or "nothing"
        raise UserError(f"no document in {' '.join(config.sources)} for --glob {config.glob!r}; left out: {reasons}")
    for part, held in counts.items():
        if not held["documents"]:
            raise UserError(
                f"--holdout {config.holdout} of {found} documents leaves none for {part}; change the fraction"
            )
    _check_length(counts["train"]["tokens"], config.seq_len)


def _check_length(tokens: int, seq_len: int | None) -> None:
    if seq_len and tokens < seq_len:
        raise UserError(f"{tokens} tokens fill no sequence of --seq-len {seq_len}; add text or lower it")


def _check_same(out: Path, settings: dict, sources: Sources) -> None:
    """UserError unless the folder is whole and holds these sources, prepared with these settings."""
    for folder in _folders(out):
        store.open_tokens(folder, store.read_manifest(folder))
    manifest = store.read_manifest(out)
    was = manifest["settings"]
    changed = [f"{key}={was.get(key)} (now {value})" for key, value in settings.items() if was.get(key) != value]
    if not changed and _text_hash(sources) != manifest["sources_sha256"]:
        changed = ["other text in its sources"]
    if changed:
        raise UserError(f"{out} was prepared with {', '.join(changed)}; add --overwrite or choose another --out")


def _recount(out: Path, seq_len: int | None) -> dict:
    """Manifest of a folder that is kept; its tokens serve every length, so another one changes the manifest only."""
    manifest = store.read_manifest(out)
    _check_length(manifest["tokens"], seq_len)
    if seq_len in (None, manifest["seq_len"]):
        return manifest
    for folder in _folders(out):
        part = store.read_manifest(folder)
        store.write_manifest(folder, part | _sequences(part["tokens"], seq_len))
    return store.read_manifest(out)


def _folders(out: Path) -> list[Path]:
    return [out / store.HELDOUT, out] if (out / store.HELDOUT).exists() else [out]


def _text_hash(sources: Sources) -> str:
    text_hash = hashlib.sha256()
    for _ in _hashed(sources.documents(SkipLog()), text_hash):
        pass
    return text_hash.hexdigest()


def _check_replaceable(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        store.read_manifest(out)


def _check_apart(sources: Iterable[str], out: str) -> None:
    target = Path(out).resolve()
    for source in (Path(source).resolve() for source in sources):
        if source == target or source in target.parents or target in source.parents:
            raise UserError(f"--out {out} and the source {source} lie inside each other; choose a folder beside it")
