"""The long part of a preparation: documents to token files, in parts that a killed run need not do again.

    documents  ->  batches  ->  ids (two batches at a time, in threads of the tokenizers library)  ->  tokens.bin
                                                     after every PART_BYTES of text  ->  journal

A run that goes on reads again what was read, without tokenising it: files that changed since would not fit together.
"""

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from mtraining_nns.data import journal, tokenizer
from mtraining_nns.data.journal import Damaged, Done, ResumableWriter
from mtraining_nns.data.records import SkipLog
from mtraining_nns.data.sources import Document, Sources

BATCH_BYTES = 1 << 22
PART_BYTES = 1 << 26
AT_ONCE = 2  # batches in the tokenizer: one is unpacked while the other is encoded


@dataclass(frozen=True)
class Task:
    """What is tokenised into a work folder; part_of: names the part of a document, of `parts`.

    identity: settings and sources, which a journal must share.
    """

    work: Path
    identity: dict
    sources: Sources
    encoder: tokenizer.Encoder
    parts: tuple[str, ...]
    part_of: Callable[[Document], str]


class Tokenised(NamedTuple):
    """What was written and left out."""

    counts: dict[str, dict]
    sources_sha256: str
    skipped: SkipLog
    changed: SkipLog


class Batch(NamedTuple):
    """Documents, and what was left out or changed since those of the batch before."""

    documents: list[Document]
    skipped: SkipLog
    changed: SkipLog


def tokenise(task: Task, done: Done) -> Tokenised:
    """Write all documents of the sources, from where the journal stands; from the first one where it does not fit."""
    try:
        run = Run(task, done)
    except Damaged as error:
        print(f"{error}; starting from the first document again", file=sys.stderr)
        run = Run(task, Done(trained_on=done.trained_on))
    return run.finish()


class Run:
    """A preparation that stands after `done.documents`; Damaged where sources or files are not those of the journal."""

    def __init__(self, task: Task, done: Done):
        self.task, self.hash, self.since_commit = task, hashlib.sha256(), 0
        self.documents, self.bytes = done.documents, done.bytes
        self.skipped, self.changed = SkipLog.restored(done.skipped), SkipLog.restored(done.changed)
        self.trained_on = done.trained_on
        self.unread = Unread(task.sources)
        if done.documents:
            self._read_again(done)
        self.writers = {
            part: ResumableWriter(task.work, part, task.encoder.dtype, done.parts.get(part)) for part in task.parts
        }

    def finish(self) -> Tokenised:
        """Tokenise what is left and close the files."""
        with progress_bar("tokenise", self.task.sources.total_bytes, done=self.bytes) as bar:
            for batch, found in encoded(self.unread.batches(), self.task.encoder):
                # never after the last batch: what is left out behind its documents would be counted again
                if self.since_commit >= PART_BYTES:
                    self.commit()
                self._write(batch, found)
                bar.update(sum(document.size_bytes for document in batch.documents))
        counts = {part: writer.close() for part, writer in self.writers.items()}
        return Tokenised(counts, self.hash.hexdigest(), self.skipped, self.changed)

    def commit(self) -> None:
        """A part is complete: whatever comes, it is not done again."""
        parts = {part: writer.commit() for part, writer in self.writers.items()}
        logs = {"skipped": self.skipped.to_manifest(), "changed": self.changed.to_manifest()}
        read = {"documents": self.documents, "bytes": self.bytes, "sources_sha256": self.hash.hexdigest()}
        done = Done(**read, **logs, parts=parts, trained_on=self.trained_on)
        journal.write(self.task.work, self.task.identity, done)
        self.since_commit = 0

    def _read_again(self, done: Done) -> None:
        print(f"going on after {done.documents:,} documents that a killed run has done", file=sys.stderr)
        with progress_bar("read again", done.bytes) as bar:
            for document in islice(self.unread.documents, done.documents):
                self.hash.update(document.digest)
                bar.update(document.size_bytes)
        if self.hash.hexdigest() != done.sources_sha256:
            raise Damaged("the sources have changed since the run that was killed")
        self.unread.forget_logs()

    def _write(self, batch: Batch, found: list[np.ndarray]) -> None:
        encoder, size_bytes = self.task.encoder, 0
        self.skipped.add(batch.skipped)
        self.changed.add(batch.changed)
        for document, ids in zip(batch.documents, found):
            self.hash.update(document.digest)
            size_bytes += document.size_bytes
            if not len(ids):
                self.skipped(document.name, "gives no tokens")
            elif encoder.has_control_token(ids):
                self.skipped(document.name, "the tokenizer reads some of its text as a control token")
            else:
                ids = np.append(ids, ids.dtype.type(encoder.eos_id))
                self.writers[self.task.part_of(document)].append(ids, text_bytes=document.size_bytes)
        self.documents += len(batch.documents)
        self.bytes += size_bytes
        self.since_commit += size_bytes


class Unread:
    """Documents that are still to come, each batch with what was left out before its last document."""

    def __init__(self, sources: Sources):
        self.forget_logs()
        self.documents = sources.documents(self._skip, self._change)

    def forget_logs(self) -> None:
        """Drop what was left out so far: it stands in the journal."""
        self._skipped, self._changed = SkipLog(), SkipLog()

    def batches(self) -> Iterator[Batch]:
        """All that is left; the last batch may have no documents."""
        documents, size_bytes = [], 0
        for document in self.documents:
            documents.append(document)
            size_bytes += document.size_bytes
            if size_bytes >= BATCH_BYTES:
                yield self._batch(documents)
                documents, size_bytes = [], 0
        yield self._batch(documents)

    def _batch(self, documents: list[Document]) -> Batch:
        batch = Batch(documents, self._skipped, self._changed)
        self.forget_logs()
        return batch

    def _skip(self, name: str, reason: str) -> None:
        self._skipped(name, reason)

    def _change(self, name: str, reason: str) -> None:
        self._changed(name, reason)


def encoded(batches: Iterable[Batch], encoder: tokenizer.Encoder) -> Iterator[tuple[Batch, list[np.ndarray]]]:
    """Each batch with the ids of its documents, in order; later ones are read and encoded meanwhile."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        waiting: deque = deque()
        for batch in batches:
            texts = [document.text for document in batch.documents]
            waiting.append((batch, threads.submit(encoder.encode, texts)))
            if len(waiting) > AT_ONCE:
                first, ids = waiting.popleft()
                yield first, ids.result()
        for first, ids in waiting:
            yield first, ids.result()


def progress_bar(label: str, total_bytes: int, *, done: int = 0) -> tqdm:
    """Bytes of text; done: where it starts."""
    return tqdm(total=total_bytes, initial=done, desc=label, unit="B", unit_scale=True, mininterval=1)
