"""The prepared folder on disk: a flat token file, document boundaries and a manifest.

    DIR/tokens.bin      little-endian uint16 or uint32, documents one after another, each ended by EOS
    DIR/boundaries.npy  int64, where each document starts; the last entry is the number of tokens
    DIR/manifest.json   what is in it and how it was made; written last
    DIR/tokenizer/      loads with AutoTokenizer.from_pretrained
    DIR/heldout/        the same again for documents that training never sees, when some were held out

Not a shuffled or indexed format: sequences are cut from the stream by their position.
"""

import hashlib
import json
import os
from array import array
from pathlib import Path

import numpy as np

from mtraining_nns.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
TOKENS = "tokens.bin"
BOUNDARIES = "boundaries.npy"
HELDOUT = "heldout"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def dtype_name(vocab_size: int) -> str:
    """Smallest token type whose largest value is a valid id of the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class TokenWriter:
    """Appends documents to the token file of a folder; `close` writes the boundaries and returns the counts."""

    def __init__(self, folder: Path, dtype: str):
        folder.mkdir(exist_ok=True)
        self.folder, self._dtype = folder, dtype
        self._file = open(folder / TOKENS, "wb")
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
    """Document starts, int64 [documents + 1]; UserError when they do not fit the manifest."""
    path = folder / BOUNDARIES
    try:
        boundaries = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read ({error}); prepare the folder again with --overwrite") from error
    fits = len(boundaries) == manifest["documents"] + 1 and boundaries[0] == 0 and boundaries[-1] == manifest["tokens"]
    if not fits or (np.diff(boundaries) <= 0).any():
        raise UserError(
            f"{path} does not fit its manifest of {manifest['documents']} documents and {manifest['tokens']} tokens;"
            " prepare the folder again with --overwrite"
        )
    return boundaries
