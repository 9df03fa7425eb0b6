"""Layouts: every global token lies on one rank at one place, in whole blocks, and comes back."""

import itertools

import pytest
import torch

from mtraining_nns.ops.config import LAYOUTS
from mtraining_nns.ops.layout import Layout

WORLDS = (1, 2, 3, 4, 6, 8)
LENGTHS = (1, 2, 10, 16, 63, 64, 65, 127, 128, 129, 1000, 2999, 4095, 8423)


def owner(layout: Layout, token: int) -> int:
    """Rank of a token, from the pictures of the papers, and the turning of stripes from its definition."""
    number, world = token // layout.chunk, layout.world
    if layout.kind == "zigzag":
        return [*range(world), *reversed(range(world))][number]
    if layout.kind == "contiguous":
        return number
    nodes = torch.arange(world).view(-1, layout.inner or world)
    turns = 0 if layout.inner is None else number // world
    # one turn brings what the first rank of a node had to the second one
    return nodes.roll(-turns, 1).flatten()[number % world].item()


def layouts(kind, world):
    nodes = [None, *(inner for inner in range(1, world) if world % inner == 0)] if kind == "striped" else [None]
    for block, times in ((16, 1), (16, 4), (64, 1), (64, 2), (128, 1)):
        if times == 1 or kind == "striped":
            for seq_len, inner in itertools.product(LENGTHS, nodes):
                geometry = {"block": block, "granularity": times * block, "inner": inner}
                yield Layout(kind=kind, world=world, seq_len=seq_len, **geometry)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_token_has_one_place(kind, world):
    for layout in layouts(kind, world):
        parts = [layout.positions(rank) for rank in range(world)]
        assert all(len(part) == layout.local_len for part in parts)
        assert torch.cat(parts).sort().values.tolist() == list(range(layout.padded_len))
        for rank, part in enumerate(parts):
            assert (part.diff() > 0).all(), "local order is not the sequence's order"
            ends = part[[0, -1]].tolist()
            assert [owner(layout, t) for t in ends] == [rank, rank]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_local_block_is_a_global_block(kind, world):
    for layout in layouts(kind, world):
        for rank in range(world):
            blocks = layout.positions(rank).unflatten(0, (-1, layout.block))
            starts = layout.block_starts(rank)
            assert torch.equal(blocks, starts[:, None] + torch.arange(layout.block))
            assert (starts % layout.block == 0).all() and starts.dtype == torch.int32
        assert (layout.local_blocks, layout.global_blocks) == (len(starts), len(starts) * world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_padding_is_the_least_that_fills_whole_stripes(kind, world):
    for layout in layouts(kind, world):
        unit = world * {"contiguous": layout.block, "zigzag": 2 * layout.block, "striped": layout.stripe}[kind]
        assert layout.padded_len == -(-layout.seq_len // unit) * unit


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_locate_inverts_positions(kind, world):
    for layout in layouts(kind, world):
        for rank in range(world):
            ranks, local = layout.locate(layout.positions(rank))
            assert (ranks == rank).all()
            assert torch.equal(local, torch.arange(layout.local_len))
        table = torch.arange(layout.padded_len).view(-1, layout.block)  # any shape
        assert layout.locate(table)[1].shape == table.shape


@pytest.mark.parametrize("granularity", [16, 64, 128])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_shard_and_unshard_give_the_sequence_back(kind, world, granularity):
    for seq_len in (1, 10, 777, 2999):
        layout = Layout(kind=kind, world=world, seq_len=seq_len, block=16, granularity=granularity)
        ids = torch.arange(seq_len)[None]
        shards = [layout.shard(ids, rank, pad_value=-7) for rank in range(world)]
        assert torch.equal(layout.unshard(shards), ids)
        joined = torch.cat(shards, 1)
        assert (joined == -7).sum() == layout.padded_len - seq_len
        for rank, shard in enumerate(shards):
            positions = layout.positions(rank)
            assert torch.equal(shard[0], torch.where(positions < seq_len, positions, -7))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_token_t_is_rotated_by_angle_t(kind):
    layout = Layout(kind=kind, world=3, seq_len=1000, block=16, granularity=32)
    frequency = 10000.0 ** -torch.linspace(0, 1, 8)
    shards = [torch.outer(layout.positions(rank).float(), frequency).cos()[None] for rank in range(3)]
    expected = torch.outer(torch.arange(1000.0), frequency).cos()[None]
    assert torch.equal(layout.unshard(shards), expected)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_any_dim_and_dtype_can_be_sharded(dim):
    layout = Layout(kind="zigzag", world=2, seq_len=50, block=16)
    shape = [3, 4, 5]
    shape[dim] = 50
    for dtype in (torch.bool, torch.int32, torch.bfloat16):
        x = torch.randn(shape).to(dtype)
        assert torch.equal(layout.unshard([layout.shard(x, rank, dim) for rank in range(2)], dim), x)


def test_worked_examples():
    def chunks(kind, world, seq_len, inner=None):
        layout = Layout(kind=kind, world=world, seq_len=seq_len, block=16, inner=inner)
        return [layout.chunks(rank).tolist() for rank in range(world)]

    assert chunks("striped", 2, 128) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert chunks("striped", 4, 256, inner=2) == [[0, 5, 8, 13], [1, 4, 9, 12], [2, 7, 10, 15], [3, 6, 11, 14]]
    assert chunks("zigzag", 2, 64) == [[0, 3], [1, 2]]
    assert chunks("zigzag", 3, 96) == [[0, 5], [1, 4], [2, 3]]
    assert chunks("contiguous", 3, 48) == [[0], [1], [2]]


def test_permutation_lays_the_shards_end_to_end():
    layout = Layout(kind="striped", world=3, seq_len=100, block=16)
    x = torch.randn(1, 100, 2)
    joined = torch.cat([layout.shard(x, rank) for rank in range(3)], 1)
    order = layout.permutation()
    assert torch.equal(joined[0, order < 100], x[0, order[order < 100]])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "spiral"}, ["spiral", "zigzag"]),
        ({"granularity": 96, "block": 64}, ["96", "64"]),
        ({"granularity": 64, "block": 128}, ["64", "128"]),
        ({"seq_len": 0}, ["seq_len=0"]),
        ({"world": 0}, ["world=0"]),
        ({"world": 6, "inner": 4}, ["nodes of 4 ranks", "got 6"]),
    ],
)
def test_impossible_layouts_name_their_numbers(fields, words):
    with pytest.raises(ValueError) as error:
        Layout(**{"seq_len": 1000, **fields})
    assert all(word in str(error.value) for word in words)


def test_wrong_shapes_are_refused():
    layout = Layout(seq_len=100, world=2, block=16)
    with pytest.raises(ValueError, match="100 tokens along dim 1"):
        layout.shard(torch.zeros(1, 101), 0)
    with pytest.raises(ValueError, match="2 shards"):
        layout.unshard([torch.zeros(1, layout.local_len)])
    with pytest.raises(ValueError, match="2 shards"):
        layout.unshard([torch.zeros(1, layout.local_len), torch.zeros(1, layout.local_len - 1)])
