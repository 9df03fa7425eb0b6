"""What a run trains on: the sequences of one prepared folder or of several by weight, in the order of its visits.

    visit = step * batch + place in the step    ->    domain (`shares.py`)    ->    sample of the domain's own epochs

A pure function of the visit: any engine, any split over ranks and any resumed run reads the same sequences. Domains are
ordered by their content, so a moved folder or another order in the recipe changes nothing.
"""

import json
from collections.abc import Mapping

import numpy as np
import torch

from mtraining_nns.data import shares
from mtraining_nns.data.dataset import PackedDataset, permutation
from mtraining_nns.errors import UserError


class Mixture:
    """`mixture[visit]` is (tokens, length) of the sequence that a visit reads, as `PackedDataset.padded` gives it.

    weights: prepared folders and their parts of the tokens, in any unit. seq_len: global length. seed: of the order.
    """

    def __init__(self, weights: Mapping[str, float], seq_len: int, seed: int):
        found = [(PackedDataset(folder, seq_len), folder, weight) for folder, weight in weights.items()]
        found.sort(key=lambda domain: json.dumps(domain[0].manifest["sha256"], sort_keys=True))
        self.domains, self.folders, ordered = zip(*found)
        self.seq_len, self.seed = seq_len, seed
        self.visits = shares.whole_shares(ordered)
        self._order: dict[int, tuple[int, np.ndarray]] = {}  # epoch and permutation of each domain

    @classmethod
    def of(cls, recipe) -> "Mixture":
        """The training data of a recipe."""
        return cls(recipe.data.weights, recipe.train.seq_len, recipe.data.seed)

    @property
    def manifest(self) -> dict:
        """Of one of the folders; they agree on vocabulary, EOS and tokenizer."""
        return self.domains[0].manifest

    @property
    def identity(self) -> dict:
        """What a checkpoint compares: the content of every folder and its share."""
        prints = [domain.manifest["sha256"] for domain in self.domains]
        if len(prints) == 1:
            return prints[0]
        return {"mix": [{"share": share, "sha256": sha256} for share, sha256 in zip(self.visits, prints)]}

    def place(self, visit: int) -> tuple[int, int]:
        """(domain, its sample) that a visit reads."""
        domain, before = shares.domain_of(visit, self.visits)
        epoch, turn = divmod(before, len(self.domains[domain]))
        if self._order.get(domain, (None,))[0] != epoch:
            self._order[domain] = epoch, permutation(len(self.domains[domain]), self.seed, epoch)
        return domain, int(self._order[domain][1][turn])

    def __getitem__(self, visit: int) -> tuple[torch.Tensor, int]:
        domain, sample = self.place(visit)
        return self.domains[domain].padded(sample)

    def samples(self, visits: range) -> str:
        """Words for an error: `samples [12, 5] of data/books, [3] of data/code`."""
        read: dict[str, list[int]] = {}
        for domain, sample in map(self.place, visits):
            read.setdefault(self.folders[domain], []).append(sample)
        return "samples " + ", ".join(f"{ids} of {folder}" for folder, ids in read.items())

    def visited(self, visits: int) -> dict[str, dict]:
        """By folder, what the first `visits` of a run read: sequences, tokens, epochs."""
        read = zip(self.folders, self.domains, shares.counts(visits, self.visits))
        return {
            folder: {"sequences": count, "tokens": count * self.seq_len, "epochs": round(count / len(domain), 4)}
            for folder, domain, count in read
        }

    def plan(self, visits: int) -> list[str]:
        """A line a folder for the start of a run of so many visits."""
        lines = []
        for domain, (folder, read) in zip(self.domains, self.visited(visits).items()):
            count, epochs = read["sequences"], read["epochs"]
            line = f"data {folder}: {count:,} of {visits:,} sequences, {epochs:.2f} epochs of its {len(domain):,}"
            line += ", so all are read again" if epochs >= 2 else ", so some are read again" if epochs > 1 else ""
            lines.append(line + (f"; {domain.padding_share:.2%} padding" if domain.padding_share else ""))
        return lines

    def check_resumed(self, path: str, identity: dict | None, resume: str) -> None:
        """UserError where the checkpoint `path` was trained on other data, unless checkpoint.resume names it."""
        if identity != self.identity and resume == "auto":
            one = len(self.folders) == 1
            raise UserError(
                f"{f'data.path={self.folders[0]}' if one else 'data.mix'} holds other tokens"
                f"{'' if one else ' or shares'} than {path} was trained on; take another checkpoint.dir,"
                f" or say checkpoint.resume={path} to go on with the new data"
            )
