"""A cheap hash of a global batch, by which the ranks of a ring check that they cut their shards from the same tokens.

A loader that hands different samples to the ranks of a ring trains without an error on sequences that nobody wrote.
Not a checksum of files: those have a SHA-256 in their manifest.
"""

import hashlib

import torch


def batch_fingerprint(global_tokens: torch.Tensor) -> int:
    """Hash of a whole batch before it is sharded, sensitive to the shape and to the order of the tokens.

    global_tokens: integer tensor of any shape, [B, S] in training. Equal values give an equal hash whatever their
    dtype, strides or device. Returns a Python int that fits a signed int64, so that it travels in a tensor.
    """
    tokens = global_tokens.detach().to("cpu", torch.int64).contiguous()
    digest = hashlib.blake2b(repr(tuple(tokens.shape)).encode(), digest_size=8)
    digest.update(tokens.numpy().data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def told(data, visits: range) -> str:
    """What a step reads, for a message: its samples in a Mixture and the hash of their tokens [visits, S]."""
    value = batch_fingerprint(torch.stack([data[visit][0] for visit in visits]))
    return f"{data.samples(visits)}, batch {value % 2**64:016x}"
