"""Documents out of files and folders, one at a time, and a record of everything that did not become a document.

A text file is a document, a .jsonl file holds one per line, a folder is walked for files that match a glob, in sorted
order. Documents are read one by one, so memory is bounded by the largest of them. Compressed files are not unpacked.
"""

import codecs
import fnmatch
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mtraining_nns.errors import UserError

NAMED_SKIPS = 10_000
Skip = Callable[[str, str], None]


@dataclass(frozen=True)
class Document:
    """A text, where it came from, and a hash of its content."""

    name: str
    text: str
    size_bytes: int
    digest: bytes


class SkipLog:
    """Counts what was left out by reason and names it: `log("a/b.png", "not UTF-8")`."""

    def __init__(self):
        self.reasons: Counter[str] = Counter()
        self.names: list[dict[str, str]] = []

    def __call__(self, name: str, reason: str) -> None:
        self.reasons[reason] += 1
        if len(self.names) < NAMED_SKIPS:
            self.names.append({"name": name, "reason": reason})

    def to_manifest(self) -> dict:
        """Counts of all, names of the first NAMED_SKIPS."""
        count = self.reasons.total()
        reasons = dict(sorted(self.reasons.items()))
        return {"count": count, "reasons": reasons, "names": self.names, "names_omitted": count - len(self.names)}


class Sources:
    """The files behind the SOURCE arguments, listed once and readable many times.

    paths: text files, .jsonl files, folders. glob: on the file name, or on the path inside the folder when it has a
    slash. text_key: field of a JSON line. max_bytes: read only so much text, in UTF-8 bytes; the last document is cut.
    """

    def __init__(self, paths: Iterable[str], *, glob: str = "*", text_key: str = "text", max_bytes: int | None = None):
        self._glob, self._text_key, self._max_bytes = glob, text_key, max_bytes
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
        size_bytes = sum(file.stat().st_size for file in self._files)
        self.total_bytes = size_bytes if max_bytes is None else min(size_bytes, max_bytes)

    def documents(self, skip: Skip) -> Iterator[Document]:
        """Every document in order; `skip(name, reason)` is called for whatever is left out."""
        for name, reason in self._unlisted:
            skip(name, reason)
        texts = self._texts(skip)
        if self._max_bytes is not None:
            texts = _limit(texts, self._max_bytes, skip)
        for name, data in texts:
            yield Document(name, data.decode("utf-8"), len(data), hashlib.blake2b(data, digest_size=16).digest())

    def _list(self, source: Path) -> list[Path]:
        """The file itself, or the files of a folder that match the glob, sorted by their path."""
        if source.is_file():
            return [source]
        if not source.is_dir():
            raise UserError(f"source {source} does not exist; give a text file, a .jsonl file or a folder")
        found = []
        for folder, subfolders, files in os.walk(source, onerror=self._leave_out_unreadable):
            for name in list(subfolders):
                path = Path(folder, name)
                if name.startswith(".") or path.is_symlink():
                    subfolders.remove(name)
                    self._unlisted.append((f"{path}/", "hidden folder, or a link to a folder"))
            found += [path for name in files if self._keep(path := Path(folder, name), source)]
        return sorted(found)

    def _keep(self, path: Path, source: Path) -> bool:
        pattern_is_path = "/" in self._glob
        if not fnmatch.fnmatchcase(path.relative_to(source).as_posix() if pattern_is_path else path.name, self._glob):
            return False
        if path.name.startswith(".") or not path.is_file():
            self._unlisted.append((str(path), "hidden, or not a regular file"))
            return False
        return True

    def _leave_out_unreadable(self, error: OSError) -> None:
        self._unlisted.append((str(error.filename), f"cannot be listed: {error.strerror}"))

    def _texts(self, skip: Skip) -> Iterator[tuple[str, bytes]]:
        """Name and UTF-8 bytes of every document that has text."""
        for file in self._files:
            try:
                records = self._json_lines(file, skip) if file.suffix == ".jsonl" else _whole_file(file)
                for name, data in records:
                    if problem := _problem(data):
                        skip(name, problem)
                    else:
                        yield name, data
            except OSError as error:
                skip(str(file), f"cannot be read: {error.strerror}")

    def _json_lines(self, file: Path, skip: Skip) -> Iterator[tuple[str, bytes]]:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                name = f"{file}:{number}"
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    skip(name, "not a JSON line")
                    continue
                text = record.get(self._text_key) if isinstance(record, dict) else None
                if isinstance(text, str):
                    # A lone surrogate becomes bytes that are not UTF-8, which the caller reports.
                    yield name, text.encode("utf-8", errors="surrogatepass")
                else:
                    skip(name, f"no text under the key {self._text_key!r}")


def _whole_file(file: Path) -> Iterator[tuple[str, bytes]]:
    yield str(file), file.read_bytes().removeprefix(codecs.BOM_UTF8)


def _problem(data: bytes) -> str | None:
    if not data.strip():
        return "empty"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def _limit(texts: Iterator[tuple[str, bytes]], max_bytes: int, skip: Skip) -> Iterator[tuple[str, bytes]]:
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
