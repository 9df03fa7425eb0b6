"""The order in which a run of one folder reads it, stated step by step."""

from mtraining_nns.data.dataset import permutation


def sample_ids(step: int, num_samples: int, batch: int, seed: int) -> list[int]:
    """Samples of optimizer step `step`, counted from 0: all of them, over all data-parallel ranks and micro-batches.

    Every epoch is a fresh permutation and epochs follow each other without a gap, so a batch may straddle two:
    with 3 samples and batch 2, step 1 takes the last of epoch 0 and the first of epoch 1.
    """
    visits = range(step * batch, (step + 1) * batch)
    return [int(permutation(num_samples, seed, visit // num_samples)[visit % num_samples]) for visit in visits]
