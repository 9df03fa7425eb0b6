"""Fixed-length sequences cut from a prepared folder, and the order in which training visits them.

The token stream is cut every seq_len tokens, across documents, and the tail that fills no sequence is `remainder`:
with 3 documents of 100, 6000 and 7000 tokens at seq_len 512, 25 sequences use 12800 tokens and 300 remain.
The order is a pure function of the step, so a resumed run needs no saved loader state.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from mtraining_nns.data import store
from mtraining_nns.errors import UserError


class PackedDataset(torch.utils.data.Dataset):
    """The sequences of a prepared folder: `ds[i]` is tokens [i * seq_len, (i + 1) * seq_len) as int64 [seq_len].

    path: folder written by `mtraining prepare`; seq_len: global length in tokens. Raises UserError when the folder is
    damaged or holds fewer than seq_len tokens. Loader workers open the file again instead of copying it.
    """

    def __init__(self, path: str | Path, seq_len: int):
        if seq_len < 2:
            raise UserError(f"seq_len needs at least 2 tokens, one to read and one to predict, got {seq_len}")
        self.path, self.seq_len = Path(path), seq_len
        self.manifest = store.read_manifest(self.path)
        self.boundaries = store.read_boundaries(self.path, self.manifest)
        self._tokens = store.open_tokens(self.path, self.manifest)
        self._sequences, self.remainder = divmod(len(self._tokens), seq_len)
        if not self._sequences:
            raise UserError(
                f"{path} holds {len(self._tokens)} tokens, less than one sequence of seq_len={seq_len};"
                " prepare more text or lower the length"
            )

    def __len__(self) -> int:
        return self._sequences

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self._sequences:
            raise IndexError(f"sequence {index} of {self._sequences}")
        start = index * self.seq_len
        return torch.from_numpy(self._tokens[start : start + self.seq_len].astype(np.int64))

    def __getstate__(self) -> dict:
        # A pickled memmap is a copy of the whole file.
        return {**self.__dict__, "_tokens": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._tokens = store.open_tokens(self.path, self.manifest)


def sample_ids(step: int, num_samples: int, batch: int, seed: int) -> list[int]:
    """Samples of optimizer step `step`, counted from 0: all of them, over all data-parallel ranks and micro-batches.

    Every epoch is a fresh permutation and epochs follow each other without a gap, so a batch may straddle two:
    with 3 samples and batch 2, step 1 takes the last of epoch 0 and the first of epoch 1.
    """
    if step < 0 or num_samples < 1 or batch < 1:
        raise ValueError(f"step >= 0, num_samples >= 1 and batch >= 1 expected, got {step}, {num_samples}, {batch}")
    visits = range(step * batch, (step + 1) * batch)
    return [int(_permutation(num_samples, seed, visit // num_samples)[visit % num_samples]) for visit in visits]


@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState and SeedSequence are frozen across NumPy versions, and a resumed run may meet another version.
    bits = np.random.MT19937(np.random.SeedSequence((seed, epoch)))
    return np.random.RandomState(bits).permutation(num_samples)
