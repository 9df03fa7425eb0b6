"""Public evaluation data by name, from sources.yaml, each file checked against its sha256.

    https://.../dev-v2.0.json  ->  DIR/squad/.dev-v2.0.json.partial  -- right size, right sha256, rename -->
                                   DIR/squad/dev-v2.0.json

A file appears complete or not at all. What a stopped download left is gone on with, a file that is there is not fetched
again, one that is there and differs is never overwritten. For a file of which no sha256 was published, the first one to
come (or to be put there by hand) is trusted, and its sha256 is kept in DIR/NAME/fetched.json and demanded from then on.

Files are only ever stored: no code of a dataset runs. Not for training data, of which there is no table.
"""

import fcntl
import functools
import hashlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import yaml
from tqdm import tqdm

from mtraining_nns.digest import BLOCK_BYTES, feed, of_stream
from mtraining_nns.errors import UserError

REMEMBERED = "fetched.json"
TIMEOUT_SECONDS = 60  # without a byte
Say = Callable[[str], None]


@dataclass(frozen=True)
class File:
    """urls: where it is to be had, tried in order. sha256, size_bytes: None where none was published."""

    name: str
    urls: tuple[str, ...]
    sha256: str | None = None
    size_bytes: int | None = None
    known_from: str = "published"  # who says the sha256


@dataclass(frozen=True)
class Source:
    """A folder of files. note: what it is, and its license. hashes: who published them."""

    name: str
    note: str
    hashes: str
    files: tuple[File, ...]


class _Failed(Exception):
    """An address did not give the file; the text says why."""


@functools.cache
def sources() -> dict[str, Source]:
    """sources.yaml by name."""
    table = yaml.safe_load((resources.files("mtraining_nns.eval") / "sources.yaml").read_text(encoding="utf-8"))
    return {name: _source(name, fields) for name, fields in table.items()}


def _source(name: str, fields: dict) -> Source:
    files = tuple(
        File(file, tuple(f"{url}/{file}" for url in fields["urls"]), known.get("sha256"), known.get("bytes"))
        for file, known in fields["files"].items()
    )
    return Source(name, fields["note"], fields["hashes"], files)


def fetch(source: Source, folder: Path, say: Say = print) -> list[Path]:
    """Bring what is missing of a source into a folder; returns the files that were fetched.

    Raises UserError for a file that cannot be had, one that is not what the table or fetched.json says, and a folder
    that cannot be used.
    """
    fetched = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remembered = _remembered(folder)
        for number, file in enumerate(source.files, 1):
            path = folder / file.name
            if file.sha256 is None and file.name in remembered:
                file = replace(file, sha256=remembered[file.name], known_from=f"kept in {folder / REMEMBERED}")
            if path.exists():
                found = _check(path, file)
            else:
                found = _download(file, path, f"{source.name} {number}/{len(source.files)} {file.name}")
                fetched.append(path)
            if file.sha256 is None:
                remembered[file.name] = found
                _remember(folder, remembered)
                say(f"{path}: no sha256 was published; trusted as it came, {found}, kept in {folder / REMEMBERED}")
    except OSError as error:
        raise UserError(f"cannot use {error.filename or folder} ({error.strerror}); choose another --out") from error
    return fetched


def _check(path: Path, file: File) -> str:
    """The sha256 of a file that is there; UserError where another is known."""
    with path.open("rb") as stream:
        found = of_stream(stream)
    if file.sha256 not in (None, found):
        raise UserError(
            f"{path} has sha256 {found}, expected {file.sha256} ({file.known_from}); remove it to fetch it again"
        )
    return found


def _download(file: File, path: Path, title: str) -> str:
    """Fetch a file from the first of its addresses that has it; returns its sha256."""
    reasons = []
    with _partial(path) as (stream, partial):
        for url in file.urls:
            try:
                found = _receive(file, url, stream, title)
            except _Failed as failed:
                reasons.append(f"{url}: {failed}")
                continue
            os.fsync(stream.fileno())
            os.replace(partial, path)
            return found
    raise UserError(
        f"cannot fetch {path.name} ({'; '.join(reasons)}); run it again to go on, or put the file at {path} by hand"
    )


@contextmanager
def _partial(path: Path) -> Iterator[tuple]:
    """The hidden sibling that a file is written to, locked. It stays while it holds bytes to go on from."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "a+b", buffering=0) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another run is fetching {path}; wait for it") from error
        if not (partial.exists() and os.path.samestat(os.fstat(stream.fileno()), partial.stat())):
            raise UserError(f"another run has just fetched {path}; run it again")
        yield stream, partial
        if partial.exists() and not partial.stat().st_size:
            partial.unlink()


def _receive(file: File, url: str, stream, title: str) -> str:
    """Write the file at an address into a stream, from where the stream ends; returns its sha256."""
    if file.sha256 is None:
        stream.truncate(0)  # parts of two versions would make a file that nothing could tell from a good one
    digest = hashlib.sha256()
    stream.seek(0)
    start = feed(digest, stream)
    if start and digest.hexdigest() == file.sha256:
        return file.sha256  # stopped between the last byte and the rename
    with _open(url, start, stream) as response:
        if start and response.status != http.HTTPStatus.PARTIAL_CONTENT:
            stream.truncate(0)
            start, digest = 0, hashlib.sha256()
        _copy(response, stream, digest, start=start, title=title)
    return _accept(file, stream, digest.hexdigest())


def _open(url: str, start: int, stream):
    """The response for a file's bytes from `start` on; a stream that is longer than the file is emptied."""
    headers = {"User-Agent": "mtraining-nns"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            stream.truncate(0)
        raise _Failed(f"HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _Failed(str(error.reason)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(str(error) or type(error).__name__) from error


def _copy(response, stream, digest, *, start: int, title: str) -> None:
    """A response's body, appended and hashed as it comes; _Failed where it ends early."""
    rest = response.headers["Content-Length"]
    total, done = None if rest is None else start + int(rest), start
    with tqdm(total=total, initial=start, desc=title, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        while block := _read(response):
            stream.write(block)
            digest.update(block)
            done += len(block)
            bar.update(len(block))
    if total not in (None, done):
        raise _Failed(f"ended after {done} of {total} bytes")


def _read(response) -> bytes:
    """What has come, b"" at the end."""
    try:
        return response.read1(BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(str(error) or type(error).__name__) from error


def _accept(file: File, stream, found: str) -> str:
    """The sha256 of what was received; where it is not the file, that is thrown away."""
    size_bytes = stream.seek(0, os.SEEK_END)
    if file.size_bytes is not None and size_bytes < file.size_bytes:
        raise _Failed(f"ended after {size_bytes} of {file.size_bytes} bytes")
    if file.sha256 not in (None, found):
        stream.truncate(0)
        raise _Failed(f"{size_bytes} bytes with sha256 {found}, expected {file.sha256} ({file.known_from})")
    return found


def _remembered(folder: Path) -> dict[str, str]:
    """The sha256 of files that were trusted before, by name."""
    path = folder / REMEMBERED
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is no JSON file ({error}); remove it to trust the files anew") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds {type(found).__name__}, expected an object; remove it to trust the files anew")
    return found


def _remember(folder: Path, hashes: dict[str, str]) -> None:
    partial = folder / f".{REMEMBERED}.partial"
    partial.write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / REMEMBERED)
