"""The prepared folder on disk: a flat token file, document boundaries and a manifest.

    DIR/tokens.bin      little-endian uint16 or uint32, documents one after another, each ended by EOS
    DIR/boundaries.npy  int64, where each document starts; the last entry is the number of tokens
    DIR/manifest.json   what is in it and how it was made; written last
    DIR/packing-S.npy   int64 [3, pieces]: sequence of S tokens, first token and end of each piece; with --pack only
    DIR/tokenizer/      loads with AutoTokenizer.from_pretrained
    DIR/heldout/        the same again for documents that training never sees, when some were held out

Tokens and boundaries are the same however sequences are made of them: cut from the stream by their position, or packed.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mtraining_nns.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
TOKENS = "tokens.bin"
BOUNDARIES = "boundaries.npy"
HELDOUT = "heldout"
PART_DOCUMENTS = 1 << 20
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def dtype_name(vocab_size: int) -> str:
    """Smallest token type whose largest value is a valid id of the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class TokenWriter:
    """Appends documents to the token file of a folder; `close` writes the boundaries and returns the counts."""

    def __init__(self, folder: Path, dtype: str, mode: str = "wb"):
        folder.mkdir(exist_ok=True)
        self.folder, self._dtype = folder, dtype
        self._file = open(folder / TOKENS, mode)
        self._starts, self.tokens, self._text_bytes = array("q", [0]), 0, 0
        self._hash = hashlib.sha256()

    def append(self, ids: np.ndarray, *, text_bytes: int) -> None:
        """One document; ids already end with EOS."""
        data = ids.astype(DTYPES[self._dtype]).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.tokens += len(ids)
        self._text_bytes += text_bytes
        self._starts.append(self.tokens)

    def close(self) -> dict:
        """Flush to disk and return the manifest's counts and file hashes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        np.save(self.folder / BOUNDARIES, np.array(self._starts, np.int64))
        boundaries_hash = hashlib.sha256((self.folder / BOUNDARIES).read_bytes()).hexdigest()
        return {
            "dtype": self._dtype,
            "tokens": self.tokens,
            "documents": len(self._starts) - 1,
            "bytes": self._text_bytes,
            "sha256": {TOKENS: self._hash.hexdigest(), BOUNDARIES: boundaries_hash},
        }


def write_manifest(folder: Path, manifest: dict) -> dict:
    """Write or replace the manifest of a folder whose other files are complete, and return it."""
    manifest = {"format": FORMAT, **manifest}
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / MANIFEST)
    return manifest


def read_manifest(folder: str | Path) -> dict:
    """Manifest of a prepared folder; UserError when the folder is not one."""
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{folder} is not a prepared folder, its {MANIFEST} cannot be read ({error.strerror});"
            " make one with `mtraining prepare`"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is damaged, not JSON ({error}); delete {folder} and prepare it again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("dtype") not in DTYPES:
        raise UserError(f"{path} is not a manifest of format {FORMAT}; prepare the data into another folder")
    return manifest


def sequences_of(folder: str | Path, manifest: dict, seq_len: int) -> tuple[int, int]:
    """(sequences of seq_len tokens, tokens that remain); UserError for none, and where packed for another length."""
    if "packing" in manifest:
        if seq_len != manifest["seq_len"]:
            raise UserError(
                f"{folder} is packed for sequences of {manifest['seq_len']} tokens, got seq_len={seq_len}; run its"
                f" `mtraining prepare --pack best_fit` again with --seq-len {seq_len}, which tokenises nothing anew"
            )
        return manifest["sequences"], manifest["remainder"]
    sequences, remainder = divmod(manifest["tokens"], seq_len)
    if not sequences:
        raise UserError(
            f"{folder} holds {manifest['tokens']} tokens, less than one sequence of seq_len={seq_len};"
            " prepare more text or lower the length"
        )
    return sequences, remainder


def open_packing(folder: Path, manifest: dict) -> np.ndarray | None:
    """Read-only memory map of the pieces, None for a stream; UserError when they do not fit the manifest."""
    if "packing" not in manifest:
        return None
    path, count = folder / manifest["packing"]["file"], manifest["packing"]["pieces"]
    pieces = _load(path)
    if pieces.shape != (3, count) or pieces[0, -1] != manifest["sequences"] - 1:
        raise UserError(
            f"{path} does not fit its manifest of {count} pieces in {manifest['sequences']} sequences; prepare the"
            " folder again with --overwrite"
        )
    return pieces


def open_tokens(folder: Path, manifest: dict) -> np.ndarray:
    """Read-only memory map of the token file; UserError when its size is not the manifest's."""
    path, dtype = folder / TOKENS, DTYPES[manifest["dtype"]]
    expected = manifest["tokens"] * dtype.itemsize
    size = path.stat().st_size if path.is_file() else 0
    if size != expected:
        raise UserError(
            f"{path} has {size} bytes, expected {expected} ({manifest['tokens']} tokens of {manifest['dtype']});"
            " the file is damaged, prepare it again with --overwrite"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def read_boundaries(folder: Path, manifest: dict) -> np.ndarray:
    """Document starts, int64 [documents + 1], mapped from disk; UserError when they do not fit the manifest."""
    path = folder / BOUNDARIES
    starts = _load(path)
    fits = starts.shape == (manifest["documents"] + 1,) and starts[0] == 0 and starts[-1] == manifest["tokens"]
    if not fits or any((np.diff(part) <= 0).any() for part in overlapping(starts)):
        raise UserError(
            f"{path} does not fit its manifest of {manifest['documents']} documents and {manifest['tokens']} tokens;"
            " prepare the folder again with --overwrite"
        )
    return starts


def overlapping(starts: np.ndarray) -> Iterator[np.ndarray]:
    """The boundaries of a folder in parts that share an end, so that no copy of all of them is made."""
    for first in range(0, len(starts) - 1, PART_DOCUMENTS):
        yield starts[first : first + PART_DOCUMENTS + 1]


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read ({error}); prepare the folder again with --overwrite") from error
