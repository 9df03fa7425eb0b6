"""What a killed preparation needs to go on, beside the files that it has written.

    .NAME.partial-3f2a.../
      journal.json      settings, documents done, hashes of what was read and written; replaced after every part
      train.starts      int64, where documents start
      data/             tokenizer/, tokens.bin, heldout/tokens.bin: what is beyond the journal is cut off again

A hash in progress cannot be stored. So what was read and written is read again, which costs little beside tokenising,
must have the digests of the journal, and gives the hash from which to go on.
"""

import json
import os
import sys
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from mtraining_nns import digest
from mtraining_nns.data import store
from mtraining_nns.data.atomic import RESULT

JOURNAL = "journal.json"


@dataclass
class Done:
    """How far a preparation is: documents and bytes of text read, digest of the documents, logs, tokens by part."""

    documents: int = 0
    bytes: int = 0
    sources_sha256: str = ""
    skipped: dict = field(default_factory=dict)
    changed: dict = field(default_factory=dict)
    parts: dict[str, dict] = field(default_factory=dict)
    trained_on: str = ""  # digest of the documents from which the tokenizer was made, if it was made here


def read(work: Path, identity: dict) -> Done | None:
    """The journal of a work folder; None where it has none and, with a warning, where it is of other settings."""
    try:
        found = json.loads((work / JOURNAL).read_text(encoding="utf-8"))
        before = found.pop("identity")
    except (OSError, ValueError, KeyError):
        return None
    if not (work / RESULT).is_dir():
        return None
    changed = [key for key in identity if before.get(key) != identity[key]]
    if changed:
        print(f"a killed run that had other {' and '.join(changed)} is dropped: {work}", file=sys.stderr)
        return None
    return Done(**found)


def write(work: Path, identity: dict, done: Done) -> None:
    """Replace the journal, on disk when this returns."""
    partial = work / f"{JOURNAL}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump({"identity": identity, **asdict(done)}, file)
        _sync(file)
    os.replace(partial, work / JOURNAL)


class Damaged(Exception):
    """Files that are not what the journal says."""


class ResumableWriter(store.TokenWriter):
    """A TokenWriter that can go on after a kill; part: its name in the work folder."""

    def __init__(self, work: Path, part: str, dtype: str, state: dict | None = None):
        self._starts_file = work / f"{part}.starts"
        folder = work / RESULT if part == "train" else work / RESULT / part
        self._written = 0  # of the starts
        try:
            super().__init__(folder, dtype, mode="r+b" if state else "wb")
            if state:
                self._reopen(state)
        except FileNotFoundError as error:
            raise Damaged(f"{error.filename} is missing") from error

    def commit(self) -> dict:
        """Bring all documents so far to disk; returns the state to go on from."""
        _sync(self._file)
        with open(self._starts_file, "r+b" if self._written else "wb") as file:
            file.seek(self._written * self._starts.itemsize)
            self._starts[self._written :].tofile(file)
            _sync(file)
        self._written = len(self._starts)
        return {
            "tokens": self.tokens,
            "documents": len(self._starts) - 1,
            "bytes": self._text_bytes,
            "sha256": self._hash.hexdigest(),
        }

    def _reopen(self, state: dict) -> None:
        """Cut the files to the state and read them; Damaged where they are something else."""
        self._file.truncate(state["tokens"] * store.DTYPES[self._dtype].itemsize)
        digest.feed(self._hash, self._file)
        self._file.seek(0, os.SEEK_END)
        starts = np.fromfile(self._starts_file, np.int64, state["documents"] + 1)
        whole = len(starts) == state["documents"] + 1 and starts[0] == 0 and starts[-1] == state["tokens"]
        if self._hash.hexdigest() != state["sha256"] or not whole or (np.diff(starts) <= 0).any():
            raise Damaged(f"{self._file.name} is not what its journal says")
        self._starts = array("q", starts.tobytes())
        self._written, self.tokens, self._text_bytes = len(starts), state["tokens"], state["bytes"]


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())
