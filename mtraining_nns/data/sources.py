"""Documents out of files and folders, one at a time, and a record of everything that did not become a document.

    file      .jsonl: a document a line    .parquet: one a row    any other: one
    folder    saved by `datasets`: a document a row    MDS shards: one a sample, or several packed
              any other: walked for files and for such folders whose names match a glob, in sorted order

Documents are read one by one, so memory is bounded by the largest of them. Compressed files are not unpacked.
"""

import codecs
import fnmatch
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtraining_nns.data import mds, tables
from mtraining_nns.data.records import Reading, Skip, Texts
from mtraining_nns.errors import UserError

if TYPE_CHECKING:
    from mtraining_nns.data.source_ids import SourceTokenizer


@dataclass(frozen=True)
class Document:
    """A text, where it came from, and a hash of its content."""

    name: str
    text: str
    size_bytes: int
    digest: bytes


@dataclass(frozen=True)
class Kind:
    """A kind of source: `read` gives its texts in order, `check` raises UserError where it could not."""

    read: Callable[[Path, Reading], Texts]
    check: Callable[[Path, Reading], None] = lambda path, reading: None


class Sources:
    """The files behind the SOURCE arguments, listed once and readable many times.

    paths: files and folders. glob: on the file name, or on the path inside the folder when it has a slash. text_key:
    field of a JSON line, column of a table, field of a sample. max_bytes: read only so much text, in UTF-8 bytes; the
    last document is cut. source_tokenizer: what made the ids of MDS shards. UserError for a source that cannot be read
    at all.
    """

    def __init__(
        self,
        paths: Iterable[str],
        *,
        glob: str = "*",
        text_key: str = "text",
        max_bytes: int | None = None,
        source_tokenizer: "SourceTokenizer | None" = None,
    ):
        self._glob, self._text_key, self._max_bytes = glob, text_key, max_bytes
        self._source_tokenizer = source_tokenizer
        self._unlisted: list[tuple[str, str]] = []
        self._files: list[Path] = []
        seen: set[Path] = set()
        for path in map(Path, paths):
            for file in self._list(path):
                if file.resolve() in seen:
                    self._unlisted.append((str(file), "already read through another source"))
                else:
                    seen.add(file.resolve())
                    self._files.append(file)
        self._kinds = [_kind(file) for file in self._files]
        reading = self._reading(_ignore, _ignore)
        for file, kind in zip(self._files, self._kinds):
            kind.check(file, reading)
        size_bytes = sum(map(_size_bytes, self._files))
        self.total_bytes = size_bytes if max_bytes is None else min(size_bytes, max_bytes)

    def documents(self, skip: Skip, changed: Skip | None = None) -> Iterator[Document]:
        """Every document in order.

        `skip(name, reason)` is called for whatever is left out, `changed(name, reason)` for what is not exactly the
        text its ids were made from.
        """
        for name, reason in self._unlisted:
            skip(name, reason)
        texts = self._texts(self._reading(skip, changed or _ignore))
        if self._max_bytes is not None:
            texts = _limit(texts, self._max_bytes, skip)
        for name, data in texts:
            yield Document(name, data.decode("utf-8"), len(data), hashlib.blake2b(data, digest_size=16).digest())

    def _reading(self, skip: Skip, changed: Skip) -> Reading:
        return Reading(text_key=self._text_key, source_tokenizer=self._source_tokenizer, skip=skip, changed=changed)

    def _list(self, source: Path) -> list[Path]:
        """The file or dataset itself, or what in a folder matches the glob, sorted by path."""
        if source.is_file() or (source.is_dir() and _folder_kind(source)):
            return [source]
        if not source.is_dir():
            raise UserError(f"source {source} does not exist; give a file of text, .jsonl or .parquet, or a folder")
        found = []
        for folder, subfolders, files in os.walk(source, onerror=self._leave_out_unreadable):
            for name in list(subfolders):
                path = Path(folder, name)
                if name.startswith(".") or path.is_symlink():
                    subfolders.remove(name)
                    self._unlisted.append((f"{path}/", "hidden folder, or a link to a folder"))
                elif self._matches(path, source) and _folder_kind(path):
                    subfolders.remove(name)
                    found.append(path)
            found += [path for name in files if self._keep(path := Path(folder, name), source)]
        return sorted(found)

    def _matches(self, path: Path, source: Path) -> bool:
        pattern_is_path = "/" in self._glob
        return fnmatch.fnmatchcase(path.relative_to(source).as_posix() if pattern_is_path else path.name, self._glob)

    def _keep(self, path: Path, source: Path) -> bool:
        if not self._matches(path, source):
            return False
        if path.name.startswith(".") or not path.is_file():
            self._unlisted.append((str(path), "hidden, or not a regular file"))
            return False
        return True

    def _leave_out_unreadable(self, error: OSError) -> None:
        self._unlisted.append((str(error.filename), f"cannot be listed: {error.strerror}"))

    def _texts(self, reading: Reading) -> Texts:
        """Name and UTF-8 bytes of every document that has text."""
        for file, kind in zip(self._files, self._kinds):
            try:
                for name, data in kind.read(file, reading):
                    if problem := _problem(data):
                        reading.skip(name, problem)
                    else:
                        yield name, data
            except OSError as error:
                reading.skip(str(file), f"cannot be read: {error.strerror or error}")


def _json_lines(file: Path, reading: Reading) -> Texts:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = f"{file}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                reading.skip(name, "not a JSON line")
                continue
            text = record.get(reading.text_key) if isinstance(record, dict) else None
            if isinstance(text, str):
                # A lone surrogate becomes bytes that are not UTF-8, which the caller reports.
                yield name, text.encode("utf-8", errors="surrogatepass")
            else:
                reading.no_text(name)


def _whole_file(file: Path, reading: Reading) -> Texts:
    yield str(file), file.read_bytes().removeprefix(codecs.BOM_UTF8)


TEXT = Kind(_whole_file)
FILE_KINDS = {".jsonl": Kind(_json_lines), ".parquet": Kind(tables.read_parquet, tables.check_parquet)}
# How to tell a folder of a kind -> the kind
FOLDER_KINDS = {
    tables.is_saved_dataset: Kind(tables.read_dataset, tables.check_dataset),
    mds.is_mds: Kind(mds.read_mds, mds.check_mds),
}


def _kind(path: Path) -> Kind:
    return _folder_kind(path) if path.is_dir() else FILE_KINDS.get(path.suffix, TEXT)


def _folder_kind(folder: Path) -> Kind | None:
    return next((kind for tells, kind in FOLDER_KINDS.items() if tells(folder)), None)


def _size_bytes(path: Path) -> int:
    """Of a file, or of the files of a dataset; an estimate of its text."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _ignore(name: str, reason: str) -> None:
    pass


def _problem(data: bytes) -> str | None:
    if not data.strip():
        return "empty"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def _limit(texts: Texts, max_bytes: int, skip: Skip) -> Texts:
    left = max_bytes
    for name, data in texts:
        if len(data) > left:
            skip(name, f"past --max-bytes {max_bytes}: cut or left out, and nothing was read after it")
            data = data[:left].decode("utf-8", errors="ignore").encode()
            if data.strip():
                yield name, data
            return
        left -= len(data)
        yield name, data
