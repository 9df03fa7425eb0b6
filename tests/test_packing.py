"""Best-fit packing: every token once, no document cut that fits, and padding that counts nowhere."""

import pickle

import numpy as np
import pytest
import torch
from distributed import run_workers
from test_engine import gradients, same
from tiny import pack as packed
from tiny import prepare, write_recipe

from mtraining_nns.data import store
from mtraining_nns.data.collator import IGNORED_LABEL, collate, collate_ring
from mtraining_nns.data.dataset import PackedDataset
from mtraining_nns.data.packing import pack
from mtraining_nns.errors import UserError
from mtraining_nns.ops.layout import Layout


def boundaries_of(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def best_fit_decreasing(lengths, seq_len) -> list[list[int]]:
    """The textbook's loop: piece lengths of each sequence."""
    pieces = [min(seq_len, n - at) for n in lengths for at in range(0, n, seq_len)]
    bins: list[list[int]] = []
    for piece in sorted(pieces, reverse=True):
        rooms = [(seq_len - sum(found), number) for number, found in enumerate(bins) if seq_len - sum(found) >= piece]
        if rooms:
            bins[min(rooms)[1]].append(piece)
        else:
            bins.append([piece])
    return bins


def cases():
    rng = np.random.RandomState(0)
    yield [11, 3, 5, 2, 4], 8
    yield [1], 2
    yield [8] * 5, 8
    yield [3] * 7, 8
    yield [100, 600, 700], 512
    for seq_len in (7, 64, 1000, 3000):  # 3000: rooms in more than one word
        yield rng.randint(1, 2 * seq_len, 300), seq_len
        yield np.minimum(rng.lognormal(3, 1.5, 400).astype(int) + 1, 5 * seq_len), seq_len


@pytest.mark.parametrize("lengths, seq_len", list(cases()), ids=lambda x: str(x) if isinstance(x, int) else "")
def test_packing_is_best_fit_decreasing(lengths, seq_len):
    boundaries = boundaries_of(lengths)
    sequence, start, end = pack(boundaries, seq_len)
    by_start = np.argsort(start)
    assert start[by_start][0] == 0 and end[by_start][-1] == boundaries[-1]
    np.testing.assert_array_equal(start[by_start][1:], end[by_start][:-1])
    inside = set(start.tolist()) - set(boundaries.tolist())
    assert inside == {b + at for b, n in zip(boundaries.tolist(), lengths) for at in range(seq_len, n, seq_len)}
    assert (np.diff(sequence) >= 0).all() and sequence[0] == 0
    used = np.bincount(sequence, weights=end - start)
    # sequences with equal room are interchangeable, so how full they get is all that is determined
    assert sorted(used) == sorted(map(sum, best_fit_decreasing(lengths, seq_len)))
    first = [start[sequence == number] for number in range(sequence[-1] + 1)]
    assert all((np.diff(part) > 0).all() for part in first)
    assert (np.diff([part[0] for part in first]) > 0).all()


@pytest.mark.parametrize("way", ["stream", "best_fit"])
def test_three_documents_at_512k(tmp_path, way):
    """100, 600,000 and 700,000 tokens, many of them 0: every token is in a sequence or in the remainder."""
    tmp_path, lengths = tmp_path / "data", [100, 600_000, 700_000]
    tmp_path.mkdir()
    writer = store.TokenWriter(tmp_path, "uint16")
    for length in lengths:
        writer.append(np.random.RandomState(length).randint(0, 3, length), text_bytes=length)
    store.write_manifest(tmp_path, writer.close() | {"eos_id": 0, "vocab_size": 128})
    if way == "best_fit":
        packed(tmp_path, 524288)
    dataset = PackedDataset(tmp_path, 524288)
    text = sum(dataset.padded(number)[1] for number in range(len(dataset)))
    assert text + dataset.remainder == sum(lengths) == dataset.boundaries[-1]
    assert (len(dataset), dataset.remainder) == {"stream": (2, 251_524), "best_fit": (3, 0)}[way]
    assert sorted(dataset.padded(i)[1] for i in range(len(dataset)))[-2:] == [524288, 524288]


def test_a_million_documents_take_seconds():
    lengths = np.random.default_rng(0).lognormal(6.5, 1.4, 1_000_000).astype(np.int64) + 1
    sequence, start, end = pack(boundaries_of(lengths), 32768)
    used = np.bincount(sequence, weights=end - start)
    assert used.max() <= 32768 and used.sum() == lengths.sum()
    assert len(used) <= 1.001 * lengths.sum() / 32768 + 1


@pytest.fixture
def folder(tmp_path):
    """Documents of 700 tokens, the last of 300: at 512 one sequence is full and others have padding."""
    return packed(prepare(tmp_path / "packed", 3100), 512)


def test_tokens_in_are_tokens_out_plus_padding(folder):
    dataset = PackedDataset(folder, 512)
    manifest = store.read_manifest(folder)
    tokens, starts = store.open_tokens(folder, manifest), store.read_boundaries(folder, manifest)
    read = [dataset.padded(number) for number in range(len(dataset))]
    assert all(sequence.shape == (512,) and sequence.dtype == torch.int64 for sequence, _ in read)
    assert all((sequence[length:] == manifest["eos_id"]).all() for sequence, length in read)
    assert sum(length for _, length in read) == len(tokens) == 3100 and dataset.remainder == 0
    padding = manifest["packing"]["padding"]
    assert len(dataset) * 512 - padding == 3100 and padding > 0
    assert dataset.padding_share == padding / (len(dataset) * 512)
    pieces = np.concatenate([sequence[:length] for sequence, length in read])
    np.testing.assert_array_equal(np.sort(pieces), np.sort(tokens))
    documents = [tokens[a:b].tolist() for a, b in zip(starts, starts[1:])]
    text = [sequence[:length].tolist() for sequence, length in read]
    for document in documents:
        whole, rest = document[:512], document[512:]
        assert any(whole == t[i : i + len(whole)] for t in text for i in range(len(t) - len(whole) + 1))
        assert any(rest == t[i : i + len(rest)] for t in text for i in range(len(t) - len(rest) + 1))
    again = pickle.loads(pickle.dumps(dataset))
    assert all(torch.equal(again[number], sequence) for number, (sequence, _) in enumerate(read))


def test_a_packed_folder_has_one_length_and_its_own_content(folder):
    with pytest.raises(UserError, match="packed for sequences of 512 tokens, got seq_len=256.*--seq-len 256"):
        PackedDataset(folder, 256)
    file = folder / "packing-512.npy"
    np.save(file, np.load(file)[:, :-1])
    with pytest.raises(UserError, match="packing-512.npy does not fit its manifest"):
        PackedDataset(folder, 512)
    file.unlink()
    with pytest.raises(UserError, match="packing-512.npy cannot be read"):
        PackedDataset(folder, 512)


@pytest.mark.parametrize("length", [1, 2, 40, 149, 150])
def test_padding_has_no_label(length):
    layout = Layout(seq_len=150, world=2, block=16, granularity=16)
    tokens = torch.arange(300).view(2, 150)
    shards = [collate(tokens, layout, rank, [150, length]) for rank in range(2)]
    labels = layout.unshard([shard["labels"] for shard in shards])
    assert labels[0].tolist() == [*range(1, 150), IGNORED_LABEL]
    assert labels[1].tolist() == [*range(151, 150 + length), *[IGNORED_LABEL] * (151 - length)]
    ring = collate_ring(tokens, layout, [150, length])
    assert torch.equal(ring["labels"], torch.cat([shard["labels"] for shard in shards], dim=1))


def test_padding_changes_no_loss_and_no_gradient(tmp_path):
    """Three documents of 90, 90 and 80 at 256: a sequence of 180 and one of 80, on one process and on a ring.

    The expectation ignores the labels of the padding in the stream of the same tokens with EOS written out.
    """
    path = write_recipe(tmp_path, "attention.pattern=dense", tokens=64)
    folders = {name: tmp_path / name for name in ("packed", "written")}
    rng = np.random.RandomState(0)
    documents = [np.append(rng.randint(1, 128, n - 1), 0) for n in (90, 90, 80)]
    padding = np.zeros(76, np.int64), np.zeros(176, np.int64)
    streams = {"packed": documents, "written": [*documents[:2], padding[0], documents[2], padding[1]]}
    for name, parts in streams.items():
        folders[name].mkdir()
        writer = store.TokenWriter(folders[name], "uint16")
        for part in parts:
            writer.append(part, text_bytes=len(part))
        store.write_manifest(folders[name], writer.close() | {"eos_id": 0, "vocab_size": 128})
    packed(folders["packed"], 256)
    lengths = dict(PackedDataset(folders["packed"], 256).padded(i)[1:] + (i,) for i in range(2))
    assert sorted(lengths) == [80, 180]
    order = Order(folders)
    one = ["train.accumulation=2", f"data.path={folders['written']}"]
    expected = run_workers(gradients, 1, path, one, order.ignored)[0]
    for world, split in ((1, ["train.accumulation=2"]), (2, ["parallel.cp=2", "train.accumulation=2"])):
        same(run_workers(gradients, world, path, [*split, f"data.path={folders['packed']}"])[0], expected)


class Order:
    """Labels to ignore in the stream with its padding written out: (turn of the sample in step 0, from, to)."""

    def __init__(self, folders):
        from data_order import sample_ids

        first = {0: 179, 1: 79}  # sample 0 has 180 tokens of text, sample 1 has 80
        self.ignored = [(turn, first[i], 256) for turn, i in enumerate(sample_ids(0, 2, 2, seed=0))]
