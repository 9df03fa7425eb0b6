"""Text to a prepared folder: tokenise the documents of some sources and make sequences of them.

    SOURCE...  ->  documents  ->  ids + EOS  ->  DIR/tokens.bin, boundaries.npy, manifest.json, tokenizer/
                       └ --holdout: whole documents, by a hash of their content  ->  DIR/heldout/

Equal documents are always on the same side of the hold-out. Memory holds a few batches of documents, not the corpus.
Tokenising happens once, here: for a corpus that changes while training runs, this is the wrong tool.
"""

import hashlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mtraining_nns.data import arrange, journal, lengths, store, tokenizer
from mtraining_nns.data.atomic import RESULT, work_folder
from mtraining_nns.data.records import SkipLog
from mtraining_nns.data.source_ids import SourceTokenizer
from mtraining_nns.data.sources import Document, Sources
from mtraining_nns.data.tokenise import Task, Tokenised, progress_bar, tokenise
from mtraining_nns.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What `mtraining prepare` was asked for; lengths in tokens, `max_bytes` in bytes of text."""

    sources: tuple[str, ...]
    out: str
    tokenizer: str | None = None
    train_bpe: int | None = None
    seq_len: int | None = None
    pack: str = "stream"
    holdout: float = 0.0
    glob: str = "*"
    max_bytes: int | None = None
    text_key: str = "text"
    source_tokenizer: str | None = None
    plot: str | None = None
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
        if self.pack not in arrange.WAYS:
            raise UserError(f"--pack {self.pack} is not known; use {' or '.join(arrange.WAYS)}")
        if self.pack != "stream" and self.seq_len is None:
            raise UserError(f"--pack {self.pack} fills sequences of one length; give --seq-len")
        if self.plot is not None:
            lengths.check_plot(self.plot)
        _check_apart(self.sources, self.out)

    def holds_out(self, document: Document) -> bool:
        """Whether a document is kept from training."""
        return int.from_bytes(document.digest[:8], "little") < self.holdout * 2**64


def prepare(config: PrepareConfig) -> tuple[dict, str]:
    """Manifest of the prepared folder, and what was done: `prepared`, or with a folder of the same settings and sources
    `kept` or, where only its sequences are others now, `rearranged`.
    """
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
        did = _rearrange(out, config)
    else:
        identity = {"format": store.FORMAT, "settings": settings, "sources": list(config.sources)}
        with work_folder(out, lambda work: journal.read(work, identity) is not None) as work:
            _write(work, identity, config, sources, chosen)
        did = "prepared"
    manifest = store.read_manifest(out)
    if config.plot is not None:
        lengths.plot(store.read_boundaries(out, manifest), config.plot)
    return manifest, did


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
    work: Path, identity: dict, config: PrepareConfig, sources: Sources, chosen: PreTrainedTokenizerBase | None
) -> None:
    """Fill the work folder, from where a killed run left it."""
    folder, done = work / RESULT, journal.read(work, identity)
    if done is not None and done.trained_on not in ("", _text_hash(sources)):
        print("the sources have changed since the run that was killed; training the tokenizer again", file=sys.stderr)
        (work / journal.JOURNAL).unlink()
        shutil.rmtree(folder)
        done = None
    if done is None:
        folder.mkdir()
        text_hash = hashlib.sha256()
        trained = chosen or tokenizer.train_bpe(_training_texts(config, sources, text_hash), config.train_bpe)
        tokenizer.save(trained, folder / "tokenizer")
        done = journal.Done(trained_on="" if chosen else text_hash.hexdigest())
        journal.write(work, identity, done)
    for left in folder.rglob("packing-*"):  # by a run that was killed when all was tokenised
        left.unlink()
    if chosen is None:
        chosen = tokenizer.load(str(folder / "tokenizer"))
    task = Task(
        work=work,
        identity=identity,
        sources=sources,
        encoder=tokenizer.Encoder(chosen),
        parts=("train", store.HELDOUT) if config.holdout else ("train",),
        part_of=lambda document: store.HELDOUT if config.holds_out(document) else "train",
    )
    found = tokenise(task, done)
    if done.trained_on not in ("", found.sources_sha256):
        raise UserError(
            "the sources changed after the tokenizer was trained on them; start again when they are at rest"
        )
    _check_counts(found, config)
    shared = {
        "eos_id": task.encoder.eos_id,
        "vocab_size": task.encoder.vocab_size,
        "tokenizer": {"source": config.tokenizer or "trained here", "sha256": tokenizer.fingerprint(chosen)},
        "settings": identity["settings"],
        "sources": list(config.sources),
        "sources_sha256": found.sources_sha256,
        "skipped": found.skipped.to_manifest(),
    }
    if config.source_tokenizer:
        shared["changed"] = {"source_tokenizer": config.source_tokenizer} | found.changed.to_manifest()
    if config.holdout:
        shutil.copytree(folder / "tokenizer", folder / store.HELDOUT / "tokenizer", dirs_exist_ok=True)
        held_out = _finish(folder / store.HELDOUT, found.counts[store.HELDOUT], shared, config)
        shared["heldout"] = {key: held_out[key] for key in ("documents", "tokens")}
    _finish(folder, found.counts["train"], shared, config)


def _finish(folder: Path, counts: dict, shared: dict, config: PrepareConfig) -> dict:
    """Sequences, lengths and manifest of a folder whose tokens are complete."""
    rows = lengths.retention(store.read_boundaries(folder, counts))
    manifest = counts | {"retention": rows} | shared
    return store.write_manifest(folder, arrange.arranged(folder, manifest, config.pack, config.seq_len))


def _training_texts(config: PrepareConfig, sources: Sources, text_hash) -> Iterator[str]:
    with progress_bar("train tokenizer", sources.total_bytes) as bar:
        for document in sources.documents(SkipLog()):
            text_hash.update(document.digest)
            if not config.holds_out(document):
                yield document.text
            bar.update(document.size_bytes)


def _check_counts(tokenised: Tokenised, config: PrepareConfig) -> None:
    counts = tokenised.counts
    found = sum(part["documents"] for part in counts.values())
    if not found:
        reasons = ", ".join(f"{count} {reason}" for reason, count in tokenised.skipped.reasons.items()) or "nothing"
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


def _rearrange(out: Path, config: PrepareConfig) -> str:
    """Give a folder that is kept the sequences that are asked for."""
    _check_length(store.read_manifest(out)["tokens"], config.seq_len)
    changed = [arrange.rearrange(folder, config.pack, config.seq_len) for folder in _folders(out)]
    return "rearranged" if any(changed) else "kept"


def _folders(out: Path) -> list[Path]:
    return [out / store.HELDOUT, out] if (out / store.HELDOUT).exists() else [out]


def _text_hash(sources: Sources) -> str:
    text_hash = hashlib.sha256()
    for document in sources.documents(SkipLog()):
        text_hash.update(document.digest)
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
