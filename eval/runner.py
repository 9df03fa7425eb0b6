"""Ask an engine everything that suites ask, and keep every answer at once.

    OUT/manifest.json      what was asked of what; a folder goes on only with the same
    OUT/records.jsonl      one answer a line, in the order in which they were asked
    OUT/results.json, scores.csv      made of the records at the end

A run that was killed goes on after its last whole line, and its records are those of a run that was not.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from mtraining_nns.errors import UserError

MANIFEST, RECORDS = "manifest.json", "records.jsonl"


PATHS = {"model", "path", "skipped"}  # keys of a manifest that are for people: a hash beside them decides


class Records:
    """The answers of a run, on disk if it has a folder, which no other run may write (`run_lock`)."""

    def __init__(self, folder: Path | None, manifest: dict):
        self.folder, self.found, self.stream = folder, {}, None
        if folder is None:
            return
        self._claim(manifest)
        size = 0
        if (folder / RECORDS).is_file():
            self.found, size = read_records(folder)
        self.stream = (folder / RECORDS).open("ab")
        self.stream.truncate(size)  # what a kill has cut in two is asked again

    def add(self, record: dict) -> None:
        """Keep a record."""
        self.found[record["id"]] = record
        if self.stream is not None:
            # a lone surrogate becomes the escape that JSON has for it
            line = json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
            with writing(self.folder / RECORDS):
                self.stream.write(line)
                self.stream.flush()

    def close(self) -> None:
        """Nothing follows."""
        if self.stream is not None:
            with contextlib.suppress(OSError):  # `add` has told of what could not be written
                self.stream.close()

    def _claim(self, manifest: dict) -> None:
        manifest = json.loads(json.dumps(manifest))
        if not (self.folder / MANIFEST).is_file():
            if (self.folder / RECORDS).is_file():
                raise UserError(
                    f"{self.folder} holds answers of an unknown run, without {MANIFEST}; give another --out"
                )
            write_json(self.folder / MANIFEST, manifest)
            return
        differing = differences(read_manifest(self.folder), manifest)
        if differing:
            raise UserError(
                f"{self.folder} holds answers of another run, which differs in {', '.join(differing)}; give another"
                " --out, or remove it"
            )


def read_manifest(folder: Path) -> dict:
    """manifest.json of a folder; UserError for one that is damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        manifest.keys()
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); give another --out, or remove it") from error
    return manifest


def read_records(folder: Path) -> tuple[dict[str, dict], int]:
    """(records by id, bytes) of the whole lines of a folder's records.jsonl; UserError for one that is no record."""
    whole, found = (folder / RECORDS).read_bytes().rpartition(b"\n")[0], {}
    for number, line in enumerate(whole.split(b"\n"), 1):
        if not line:
            continue
        try:
            record = json.loads(line)
            _check(record)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise UserError(
                f"{folder / RECORDS}, line {number} is damaged ({reason}); remove the line and evaluate again, which"
                " asks its question alone"
            ) from error
        found[record["id"]] = record
    return found, len(whole) + bool(whole)


def _check(record: dict) -> None:
    """ValueError, TypeError, AttributeError or KeyError for a record that no suite has written."""
    suite = record["id"].partition("/")[0]
    numbers = [record["length"]] + ([] if record["density"] is None else [record["density"]])
    if suite == "niah":
        numbers.append(record["depth"])
    if suite in ("ruler", "infinitebench") and not isinstance(record["task"], str):
        raise ValueError(f"its task is {record['task']!r}")
    if "buckets" in record:
        numbers += [bucket[name] for bucket in record["buckets"] for name in ("begin", "end", "tokens", "nll_sum")]
        if not record["buckets"] or any(bucket["tokens"] < 1 for bucket in record["buckets"]):
            raise ValueError("it has no losses")
    elif not 0 <= record["score"] <= 1:
        raise ValueError(f"its score is {record['score']}")
    if not all(map(math.isfinite, numbers)):
        raise ValueError("it holds numbers that are not finite")


def run(suites: list, engine, records: Records) -> dict[str, list[dict]]:
    """Records of every suite by its name, in order; those that are there already are not asked again."""
    for suite in suites:
        ids = suite.ids()
        pending = [name for name in ids if name not in records.found]
        with tqdm(total=len(ids), initial=len(ids) - len(pending), desc=suite.name, disable=None) as bar:
            for first in range(0, len(pending), engine.batch_size):
                for record in suite.answers(engine, pending[first : first + engine.batch_size]):
                    records.add(record)
                    bar.update()
    return {suite.name: [records.found[name] for name in suite.ids()] for suite in suites}


def write_json(path: Path, value: dict) -> Path:
    """Write a file whole or not at all; one that exists is replaced."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> Path:
    """Write a file whole or not at all; one that exists is replaced. UserError where that cannot be."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path):
            temporary.write_text(text, encoding="utf-8", newline="")
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """UserError for a file that cannot be written, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); make room and give the same command again, which goes on there"
        ) from error


def differences(before: dict, now: dict, path: str = "") -> dict[str, tuple]:
    """Both values of every key in which two manifests differ, but for PATHS; nested keys joined by dots."""
    found = {}
    for key in sorted((before.keys() | now.keys()) - PATHS):
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{path}{key}.")
        elif a != b:
            found[f"{path}{key}"] = a, b
    return found
