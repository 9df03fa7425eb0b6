"""Packed sequences, their order, the shards of the ranks and their hash: every token and label is used once."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from data_order import sample_ids

from mtraining_nns.data import store
from mtraining_nns.data.collator import IGNORED_LABEL, collate, collate_ring
from mtraining_nns.data.dataset import PackedDataset
from mtraining_nns.data.guard import batch_fingerprint
from mtraining_nns.errors import UserError
from mtraining_nns.ops.layout import Layout


def packed_folder(path: Path, lengths: list[int], dtype: str = "uint16") -> tuple[Path, np.ndarray]:
    """A prepared folder of random ids, many of them 0, without a tokenizer."""
    path.mkdir()
    writer = store.TokenWriter(path, dtype)
    documents = [np.random.RandomState(length).randint(0, 5, length) for length in lengths]
    for document in documents:
        writer.append(document, text_bytes=len(document))
    store.write_manifest(path, writer.close())
    return path, np.concatenate(documents)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_in_are_tokens_out_plus_remainder(tmp_path, dtype):
    path, tokens = packed_folder(tmp_path / "data", [100, 6000, 7000], dtype)
    dataset = PackedDataset(path, 512)
    assert len(dataset) == 25 and dataset.remainder == 300
    assert len(dataset) * 512 + dataset.remainder == 13100
    assert dataset[0].dtype == torch.int64 and (dataset[0] == 0).any()
    np.testing.assert_array_equal(torch.cat(list(dataset)), tokens[:12800])
    assert dataset.boundaries.tolist() == [0, 100, 6100, 13100]


def test_loader_workers_read_the_same_file(tmp_path):
    path, tokens = packed_folder(tmp_path / "data", [100, 600])
    dataset = PackedDataset(path, 100)
    assert len(pickle.dumps(dataset)) < 2000
    order = [sample_ids(step, 7, 2, seed=1) for step in range(7)]
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=order, num_workers=2)
    batches = list(loader)
    assert [batch.tolist() for batch in batches] == [[dataset[i].tolist() for i in ids] for ids in order]


@pytest.mark.parametrize("name, size", [(store.TOKENS, 1001), (store.TOKENS, 0), (store.BOUNDARIES, 100)])
def test_truncated_files_are_refused(tmp_path, name, size):
    path, _ = packed_folder(tmp_path / "data", [500, 500])
    os.truncate(path / name, size)
    with pytest.raises(UserError, match=name):
        PackedDataset(path, 100)


def test_folders_that_cannot_be_trained_on_are_refused(tmp_path):
    path, _ = packed_folder(tmp_path / "data", [500])
    with pytest.raises(UserError, match="500 tokens, less than one sequence of seq_len=501"):
        PackedDataset(path, 501)
    with pytest.raises(UserError, match="at least 2 tokens"):
        PackedDataset(path, 1)
    np.save(path / store.BOUNDARIES, np.array([0, 499]))
    with pytest.raises(UserError, match="does not fit its manifest"):
        PackedDataset(path, 100)
    (path / store.MANIFEST).write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        PackedDataset(path, 100)
    with pytest.raises(UserError, match="not a prepared folder"):
        PackedDataset(tmp_path / "nowhere", 100)


@pytest.mark.parametrize("num_samples, batch", [(40, 8), (7, 2), (3, 5), (1, 1)])
def test_every_epoch_visits_every_sample_once(num_samples, batch):
    steps = 3 * num_samples
    visits = [i for step in range(steps) for i in sample_ids(step, num_samples, batch, seed=3)]
    epochs = [visits[start : start + num_samples] for start in range(0, 3 * num_samples, num_samples)]
    assert all(sorted(epoch) == list(range(num_samples)) for epoch in epochs)
    if num_samples > 7:
        assert epochs[0] != epochs[1] != list(range(num_samples))
        assert sample_ids(0, num_samples, batch, seed=4) != sample_ids(0, num_samples, batch, seed=3)


def test_order_is_the_same_in_every_version():
    """A resumed run may find other versions of the libraries; these values must never change."""
    assert sample_ids(2, 7, 3, seed=2**40) == [4, 1, 4]


@pytest.mark.parametrize("seq_len, world", [(2999, 4), (10, 3), (8423, 8), (2, 3), (12, 2), (1, 1)])
@pytest.mark.parametrize(
    "kind, block", [("striped", 1), ("striped", 16), ("striped", 128), ("zigzag", 16), ("contiguous", 1)]
)
def test_ranks_together_hold_every_token_label_position_once(seq_len, world, kind, block):
    layout = Layout(kind=kind, world=world, seq_len=seq_len, block=block, granularity=block)
    tokens = torch.randint(0, 1000, (2, seq_len), generator=torch.Generator().manual_seed(0))
    shards = [collate(tokens, layout, rank) for rank in range(world)]
    next_tokens = torch.cat([tokens[:, 1:], torch.full((2, 1), IGNORED_LABEL)], dim=1)
    found = []
    for rank, shard in enumerate(shards):
        real = layout.positions(rank) < seq_len
        assert all(part.shape == (2, layout.local_len) and part.dtype == torch.int64 for part in shard.values())
        assert (shard["labels"][:, ~real] == IGNORED_LABEL).all() and (shard["input_ids"][:, ~real] == 0).all()
        assert (shard["position_ids"][:, ~real] == seq_len - 1).all()
        found.append(torch.stack([shard[name][:, real] for name in ("position_ids", "input_ids", "labels")]))
    found = torch.cat(found, dim=2)
    for row in range(2):
        position, ids, labels = found[:, row, found[0, row].argsort()]
        assert position.tolist() == list(range(seq_len))
        assert torch.equal(ids, tokens[row]) and torch.equal(labels, next_tokens[row])
    assert sum(int((shard["labels"] != IGNORED_LABEL).sum()) for shard in shards) == 2 * (seq_len - 1)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("stripe", [1, 16, 64, 128])
def test_unsharded_ids_and_targets_are_in_order(world, stripe):
    seq_len = 2 * world * stripe + 5
    layout = Layout(kind="striped", world=world, seq_len=seq_len, block=stripe, granularity=stripe)
    shards = [collate(torch.arange(seq_len)[None], layout, rank) for rank in range(world)]
    for name in ("input_ids", "position_ids"):
        assert layout.unshard([shard[name] for shard in shards])[0].tolist() == list(range(seq_len))
    labels = layout.unshard([shard["labels"] for shard in shards])[0].tolist()
    assert labels == [*range(1, seq_len), IGNORED_LABEL]


def test_sequences_of_another_length_are_refused():
    with pytest.raises(ValueError, match="12"):
        collate(torch.zeros(1, 10, dtype=torch.int64), Layout(world=2, seq_len=12, block=2, granularity=2), 0)


def test_fingerprint_tells_batches_apart():
    tokens = torch.arange(12).view(2, 6)
    value = batch_fingerprint(tokens)
    assert value == batch_fingerprint(tokens.to(torch.int32)) == batch_fingerprint(tokens.T.contiguous().T)
    assert torch.tensor([value], dtype=torch.int64).item() == value
    others = [tokens.flip(0), tokens.flip(1), tokens.view(3, 4), tokens.view(-1), tokens + 1]
    assert len({value, *map(batch_fingerprint, others)}) == 6


def test_fingerprint_of_rings():
    """The ranks of a ring draw the same samples, other rings draw others: 2 rings of 4 over 40 samples."""
    batch = [sample_ids(0, 40, 2, seed=0)[rank // 4] for rank in range(8)]
    hashes = [batch_fingerprint(torch.arange(16) + 100 * sample) for sample in batch]
    assert len(set(hashes[:4])) == len(set(hashes[4:])) == 1 and hashes[0] != hashes[4]


@pytest.mark.parametrize("inner", [None, 2])
def test_a_ring_end_to_end_is_the_sequence_in_the_order_of_its_layout(inner):
    layout = Layout(seq_len=150, world=4, block=16, inner=inner)
    tokens = torch.randint(1, 1000, (2, 150))
    batch, order = collate_ring(tokens, layout), layout.permutation()
    real = order < 150
    assert torch.equal(batch["input_ids"][:, real], tokens[:, order[real]]) and not batch["input_ids"][:, ~real].any()
    assert torch.equal(batch["position_ids"][0, real], order[real]) and (batch["position_ids"][:, ~real] == 149).all()
    following = order[real & (order < 149)]
    assert torch.equal(batch["labels"][:, real & (order < 149)], tokens[:, following + 1])
    assert (batch["labels"][:, ~(order < 149)] == IGNORED_LABEL).all()
