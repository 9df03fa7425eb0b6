"""Fixed-length sequences of a prepared folder, and the order in which training visits them.

    stream      the tokens cut every seq_len, across documents; the tail that fills no sequence is `remainder`
    best_fit    the pieces that `mtraining prepare --pack` chose for each sequence, padded at the end

With 3 documents of 100, 6000 and 7000 tokens at seq_len 512, 25 sequences of the stream use 12800 tokens, 300 remain.
The order is a pure function of the step, so a resumed run needs no saved loader state.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from mtraining_nns.data import store
from mtraining_nns.errors import UserError


class PackedDataset(torch.utils.data.Dataset):
    """The sequences of a prepared folder: `ds[i]` is int64 [seq_len], `ds.padded(i)` tells how much of it is text.

    path: folder written by `mtraining prepare`; seq_len: global length in tokens. Raises UserError when the folder is
    damaged, holds fewer than seq_len tokens or was packed for another length. Loader workers open the files again
    instead of copying them.
    """

    def __init__(self, path: str | Path, seq_len: int):
        if seq_len < 2:
            raise UserError(f"seq_len needs at least 2 tokens, one to read and one to predict, got {seq_len}")
        self.path, self.seq_len = Path(path), seq_len
        self.manifest = store.read_manifest(self.path)
        self._sequences, self.remainder = store.sequences_of(self.path, self.manifest, seq_len)
        self.boundaries = store.read_boundaries(self.path, self.manifest)
        self._open()

    def __len__(self) -> int:
        return self._sequences

    @property
    def padding_share(self) -> float:
        """Padding among all tokens of the sequences."""
        return self.manifest["packing"]["padding_share"] if "packing" in self.manifest else 0.0

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.padded(index)[0]

    def padded(self, index: int) -> tuple[torch.Tensor, int]:
        """Tokens int64 [seq_len] and how many of them are text; EOS stands behind them, for `collate` to ignore."""
        if not 0 <= index < self._sequences:
            raise IndexError(f"sequence {index} of {self._sequences}")
        if self._pieces is None:
            start = index * self.seq_len
            return torch.from_numpy(self._tokens[start : start + self.seq_len].astype(np.int64)), self.seq_len
        first, last = np.searchsorted(self._pieces[0], [index, index + 1])
        pieces = [self._tokens[start:end] for start, end in self._pieces[1:, first:last].T]
        text = np.concatenate(pieces).astype(np.int64)
        padding = np.full(self.seq_len - len(text), self.manifest["eos_id"])
        return torch.from_numpy(np.concatenate([text, padding])), len(text)

    def _open(self) -> None:
        self._tokens = store.open_tokens(self.path, self.manifest)
        self._pieces = store.open_packing(self.path, self.manifest)

    def __getstate__(self) -> dict:
        # A pickled memmap is a copy of the whole file.
        return {**self.__dict__, "_tokens": None, "_pieces": None, "boundaries": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.boundaries = store.read_boundaries(self.path, self.manifest)
        self._open()


@lru_cache(maxsize=4)
def permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch, int64 [num_samples]."""
    # RandomState and SeedSequence are frozen across NumPy versions, and a resumed run may meet another version.
    bits = np.random.MT19937(np.random.SeedSequence((seed, epoch)))
    return np.random.RandomState(bits).permutation(num_samples)
