"""Ask an engine everything that suites ask, and keep every answer at once.

    OUT/manifest.json      what was asked of what; a folder goes on only with the same
    OUT/records.jsonl      one answer a line, in the order in which they were asked
    OUT/results.json, scores.csv      made of the records at the end

A run that was killed goes on after its last whole line, and its records are those of a run that was not.
"""

import json
import os
from pathlib import Path

from tqdm import tqdm

from mtraining_nns.errors import UserError

MANIFEST, RECORDS = "manifest.json", "records.jsonl"


class Records:
    """The answers of a run, on disk if it has a folder."""

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
            self.stream.write(json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
            self.stream.flush()

    def close(self) -> None:
        """Nothing follows."""
        if self.stream is not None:
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
            if not {"id", "length"} <= record.keys() or not {"score", "buckets"} & record.keys():
                raise ValueError("it has no id, length and score")
        except (ValueError, AttributeError) as error:
            raise UserError(
                f"{folder / RECORDS}, line {number} is damaged ({error}); remove the line and evaluate again, which"
                " asks its question alone"
            ) from error
        found[record["id"]] = record
    return found, len(whole) + bool(whole)


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def differences(before: dict, now: dict, path: str = "") -> dict[str, tuple]:
    """Both values of every key in which two manifests differ, nested keys joined by dots."""
    found = {}
    for key in sorted(before.keys() | now.keys()):
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{path}{key}.")
        elif a != b:
            found[f"{path}{key}"] = a, b
    return found
