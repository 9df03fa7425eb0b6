"""MDS shards of mosaicml-streaming as documents: a folder with index.json, with texts or with ids of some tokenizer.

    shard    uint32 n | uint32 offset[n + 1] | configuration | samples
    sample   uint32 size of each column without a fixed one | columns

ProLong publishes ids: `input_ids`, and `indices` [documents, 2], where each packed document starts and ends. Every one
of them becomes a document. Shards are read as they lie on disk, one sample at a time; compressed ones are refused.
The library itself is not used: it pins NumPy below 2.2 and transformers below 5, and brings torchvision and the clients
of five clouds along.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtraining_nns.data.records import Reading, Texts
from mtraining_nns.errors import UserError

INDEX = "index.json"
IDS, SPANS = "input_ids", "indices"
SIZE = np.dtype("<u4")
# The byte before an array whose type is not in its encoding.
VALUE_TYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    32: "uint32",
    33: "int32",
    64: "uint64",
    65: "int64",
}


@dataclass(frozen=True)
class Shard:
    """A shard of the index: its file, how many samples it has, and its columns with their fixed sizes in bytes."""

    path: Path
    samples: int
    encodings: dict[str, str]
    sizes_bytes: dict[str, int | None]


def is_mds(folder: Path) -> bool:
    """Whether the folder has an index of shards, rather than some other index.json."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(index, dict) and isinstance(index.get("shards"), list)


def check_mds(path: Path, reading: Reading) -> None:
    """UserError unless every shard is there, is not compressed, and has text, or ids and a tokenizer to decode them."""
    for shard in _shards(path):
        if not shard.path.is_file():
            raise UserError(f"{path} lacks {shard.path.name}; complete the folder, and decompress shards first")
        if reading.text_key in shard.encodings:
            continue
        if IDS not in shard.encodings:
            fields = ", ".join(shard.encodings)
            raise UserError(f"{shard.path} has the fields {fields}; name the one that holds the text with --text-key")
        if reading.source_tokenizer is None:
            raise UserError(f"{path} holds {IDS}; name the tokenizer that made them with --source-tokenizer")
        for field in {IDS, SPANS} & set(shard.encodings):
            if shard.encodings[field].split(":")[0] != "ndarray":
                raise UserError(f"{shard.path} has {field} as {shard.encodings[field]}; only ndarray can be read")


def read_mds(path: Path, reading: Reading) -> Texts:
    """The text of every sample, or of every document packed into it, shard by shard."""
    for shard in _shards(path):
        read = _text if reading.text_key in shard.encodings else _decoded
        try:
            for row, sample in enumerate(_samples(shard), start=1):
                yield from read(sample, shard, f"{shard.path}:{row}", reading)
        except OSError as error:
            reading.skip(str(shard.path), f"cannot be read: {error.strerror or error}")


def _text(sample: dict[str, bytes], shard: Shard, name: str, reading: Reading) -> Texts:
    if shard.encodings[reading.text_key] == "str":
        yield name, sample[reading.text_key]
    else:
        reading.no_text(name)


def _decoded(sample: dict[str, bytes], shard: Shard, name: str, reading: Reading) -> Texts:
    """Documents of one sample: name `shard.00000.mds:1[0:700]` where several are packed."""
    ids = _array(sample[IDS], shard.encodings[IDS]).reshape(-1)
    spans = [(0, len(ids))]
    if SPANS in sample:
        spans = _array(sample[SPANS], shard.encodings[SPANS]).reshape(-1, 2).tolist()
    for start, end in spans:
        part = f"{name}[{start}:{end}]" if SPANS in sample else name
        if not 0 <= start <= end <= len(ids):
            reading.skip(part, f"outside of its {IDS}")
            continue
        text, same = reading.source_tokenizer.decode(ids[start:end], part)
        if not same:
            reading.changed(part, "its text does not encode to its ids again")
        yield part, text.encode("utf-8", errors="surrogatepass")


def _shards(folder: Path) -> list[Shard]:
    """The shards of an index, in its order; UserError when it is not of the format that is known here."""
    try:
        return [_shard(folder, entry) for entry in json.loads((folder / INDEX).read_bytes())["shards"]]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{folder / INDEX} is damaged, not an index of MDS shards ({error!r}); fetch it again"
        ) from error


def _shard(folder: Path, entry: dict) -> Shard:
    if (entry["format"], entry["version"]) != ("mds", 2):
        found = f"{entry['format']} {entry['version']}"
        raise UserError(f"{folder / INDEX} lists a shard of format {found}; only mds 2 can be read")
    names = entry["column_names"]
    return Shard(
        path=folder / entry["raw_data"]["basename"],
        samples=entry["samples"],
        encodings=dict(zip(names, entry["column_encodings"])),
        sizes_bytes=dict(zip(names, entry["column_sizes"])),
    )


def _samples(shard: Shard) -> Iterator[dict[str, bytes]]:
    """Every sample's columns as bytes. OSError when the file is not what its index and its offsets say."""
    with open(shard.path, "rb") as file:
        offsets = np.frombuffer(file.read((shard.samples + 2) * SIZE.itemsize), SIZE).astype(np.int64)
        whole = len(offsets) == shard.samples + 2 and offsets[0] == shard.samples
        if not whole or (np.diff(offsets[1:]) < 0).any() or offsets[-1] > shard.path.stat().st_size:
            raise OSError("damaged, its offsets do not fit its index")
        for start, end in zip(offsets[1:], offsets[2:]):
            file.seek(start)
            yield _columns(file.read(end - start), shard)


def _columns(sample: bytes, shard: Shard) -> dict[str, bytes]:
    variable = [name for name, size in shard.sizes_bytes.items() if not size]
    head_bytes = len(variable) * SIZE.itemsize
    sizes = dict(zip(variable, np.frombuffer(sample[:head_bytes], SIZE).tolist()))
    sizes = {name: size or sizes.get(name, 0) for name, size in shard.sizes_bytes.items()}
    if head_bytes + sum(sizes.values()) != len(sample):
        raise OSError(f"damaged, a sample has {len(sample)} bytes, its fields {head_bytes + sum(sizes.values())}")
    columns, start = {}, head_bytes
    for name, size in sizes.items():
        columns[name] = sample[start : start + size]
        start += size
    return columns


def _array(data: bytes, encoding: str) -> np.ndarray:
    """Integers of an encoding `ndarray[:dtype[:shape]]`, flat.

    What the encoding leaves open stands before the values: the type, a byte; then the shape, a byte of 4 * dimensions
    + log2 of their size in bytes, and the dimensions. `ndarray:uint32` b"\\x05\\x02\\x00..." holds two values.
    """
    dtype, _, shape = encoding.removeprefix("ndarray").removeprefix(":").partition(":")
    start = 0
    try:
        if not dtype:
            dtype, start = VALUE_TYPES[data[0]], 1
        if not shape:
            start += 1 + (data[start] >> 2) * (1 << data[start] % 4)
        return np.frombuffer(data[start:], np.dtype(dtype).newbyteorder("<")).astype(np.int64, casting="safe")
    except (ValueError, TypeError, LookupError) as error:
        raise OSError(f"damaged, or no integers under {IDS} or {SPANS}") from error
