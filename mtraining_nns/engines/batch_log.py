"""Which tokens each step has read, in checkpoint.dir/batches.jsonl: the recipe key log.batches.

    {"step": 12, "samples": "samples [7, 3] of data/books", "batch": "8f0c3a..."}

Written before the update; a step done again has two lines.

The hash is of what the ranks compute with, after layout and ring, so runs on the same ranks compare. It copies every
batch to the host; leave it off where nobody compares.
"""

import json
import os

import torch

from mtraining_nns.data.guard import batch_fingerprint
from mtraining_nns.engines.world import World


class BatchLog:
    """Appends a line a step on rank 0."""

    def __init__(self, folder: str, world: World):
        self.world = world
        path = os.path.join(folder, "batches.jsonl")
        self.stream = open(path, "a", encoding="utf-8", buffering=1) if world.rank == 0 else None

    def add(self, step: int, samples: str, input_ids: list[torch.Tensor]) -> None:
        """samples: words for what all ranks read; input_ids: this rank's micro-batches. Collective over all ranks."""
        mine = torch.tensor([batch_fingerprint(torch.cat(input_ids))], device=self.world.device)
        whole = self.world.sum(mine).item()
        if self.stream is not None:
            self.stream.write(json.dumps({"step": step, "samples": samples, "batch": f"{whole % 2**64:016x}"}) + "\n")
